"""MXFP4: E2M1 codes and a power-of-two E8M0 scale for each 32 elements.

The contract, version 1. ``y`` is the rotated row in float32.

1.  A block is 32 consecutive elements along K; K is a multiple of 32.
2.  The scale is 2**e, e taken from the float32 bits of the block's amax and clamped to -127..127.
3.  ``mxfp4``: e = exponent(amax) - 2, the OCP floor rule. Elements above 6 * 2**e saturate.
4.  ``mxfp4-ceil``: the smallest e with amax <= 6 * 2**e. Nothing saturates.
5.  ``mxfp4-even``: e = exponent(bits(amax) + 0x200000) - 2, which rounds up from mantissa 1.75.
6.  The code is E2M1 of y / 2**e, nearest, ties to the even code; sign bit set iff y < 0.
7.  The decoded value is code * 2**e. ``mxfp4-ceil`` and ``mxfp4-even`` can round a magnitude of
    2.98e38 or more up to 2**128, which float32 calls infinite; ``mxfp4`` cannot.
8.  An all-zero block has scale 0x00 and codes 0.
9.  A block holding NaN or Inf has scale 0xFF and codes 0; no other block notices.
10. Element 2i is in the low nibble. Scales are row-major [M, K/32], or tiled 128x4.

Others differ in the rule, which is why it is part of the name: torchao rounds e up
(``mxfp4-ceil``), compressed-tensors rounds the mantissa (``mxfp4-even``), QuTLASS takes the floor
and folds a factor 3 into a global scale. The format is the OCP Microscaling Formats (MX)
specification 1.0.
"""

from hadaquant.formats.elements import E2M1
from hadaquant.formats.scales import E8M0_CEIL, E8M0_EVEN, E8M0_FLOOR
from hadaquant.formats.spec import Format

MXFP4 = Format(name="mxfp4", version=1, element=E2M1, scale=E8M0_FLOOR, block=32)
MXFP4_CEIL = Format(name="mxfp4-ceil", version=1, element=E2M1, scale=E8M0_CEIL, block=32)
MXFP4_EVEN = Format(name="mxfp4-even", version=1, element=E2M1, scale=E8M0_EVEN, block=32)
