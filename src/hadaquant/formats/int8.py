"""INT8: one float32 scale for each row, symmetric codes -127..127.

The contract, version 1. ``y`` is the rotated row in float32.

1.  The block is the whole row: a token of the activations, an output channel of a weight.
2.  The scale is max(amax, 1e-12) / 127, correctly rounded: a row below 3.9e-15 decodes to 0.
3.  The code is RNE(y / scale), the correctly rounded quotient, nearest, ties to even.
4.  Codes lie in -127..127; -128 is never written.
5.  The decoded value is RN(code * scale).
6.  An all-zero row has scale 1e-12 / 127 and codes 0.
7.  A row holding NaN or Inf has scale 0x7FC00000 (NaN) and codes 0; no other row notices.
8.  Codes are int8 [M, K], scales float32 [M].
9.  A linear is y = RN_out(((float(acc) * sx) * sw) + bias), acc the exact int32 sum, each step
    float32 and in that order.
10. acc fits in int32 up to K = 133,144; larger K is refused.

Others differ. ComfyUI floors the weight's amax at 1e-30; compressed-tensors divides by 127.5 and
uses -128; kernels that multiply by an approximate reciprocal of the scale differ on near-ties.
Per-token, per-channel W8A8 is described in Xiao et al., SmoothQuant (arXiv:2211.10438).
"""

from hadaquant.formats.elements import INT8 as INT8_ELEMENT
from hadaquant.formats.scales import ABSMAX
from hadaquant.formats.spec import Format

INT8 = Format(name="int8", version=1, element=INT8_ELEMENT, scale=ABSMAX, block=None)
