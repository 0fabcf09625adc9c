"""NVFP4: E2M1 codes, an E4M3 scale for each 16 elements, a float32 global multiplier.

The contract, version 1. ``y`` is the rotated row in float32, ``g`` the global multiplier.

1.  A block is 16 consecutive elements along K; K is a multiple of 16.
2.  ``g`` is given, or g = (amax / 6) / 448 over the finite values of the rotated tensor, and 1.0
    where that is 0. A ``g`` that is not positive and finite gives scale 0x7F everywhere.
3.  The scale is E4M3 = RNE((amax / 6) / g), two correctly rounded divisions, clamped to 448;
    subnormals down to 2**-9 are kept.
4.  The multiplier is m = RN(scale * g).
5.  The code is E2M1 of y / m, the correctly rounded quotient, nearest, ties to the even code;
    where m is 0 the divisor is 1.0 (the decoded value is 0 whatever the code).
6.  The sign bit is set iff y < 0, so -0.0 encodes as +0.
7.  The decoded value is RN(code * m).
8.  An all-zero block has scale 0x00 and codes 0.
9.  A block holding NaN or Inf has scale 0x7F and codes 0; no other block notices.
10. Element 2i is in the low nibble. Scales are row-major [M, K/16], or tiled 128x4.

Others differ. compressed-tensors and FP-Quant store 1/g (448 * 6 / amax); ComfyUI puts element 2i
in the high nibble and stores scales tiled; ModelOpt and compressed-tensors replace a zero scale by
a small or unit one; the reference that first rounded ties in E4M3 upwards differs on exact ties.
NVFP4 is described in NVIDIA's "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149).
"""

from hadaquant.formats.elements import E2M1
from hadaquant.formats.scales import E4M3_GLOBAL
from hadaquant.formats.spec import Format

NVFP4 = Format(name="nvfp4", version=1, element=E2M1, scale=E4M3_GLOBAL, block=16, has_global_scale=True)
