"""The clauses of NVFP4, on the values that have failed elsewhere."""

import pytest
import torch

import hadaquant as hq
from hadaquant.errors import GlobalScaleError
from hadaquant.formats.elements import decode_e2m1
from hadaquant.formats.scales import global_scale_of
from hadaquant.layout import unpack_nibbles


def values(q: hq.QuantizedTensor) -> torch.Tensor:
    """Element values before scaling."""
    return decode_e2m1(unpack_nibbles(q.codes))


def g_of(q: hq.QuantizedTensor) -> torch.Tensor:
    assert q.global_scale is not None and q.global_scale.shape == ()
    return q.global_scale


def test_n1_scale_bytes():
    x = torch.zeros(1, 48)
    x[0, 0], x[0, 16], x[0, 32] = 2688, 757.4316, 6.375
    assert hq.quantize(x, "nvfp4", global_scale=1.0).scales.tolist() == [[0x7E, 0x70, 0x38]]


def test_n2_scales_rounded_once():
    x = torch.zeros(3, 16)
    x[:, 0] = torch.tensor([400.199585, 272.156555, 136.002075]) * 6
    q = hq.quantize(x, "nvfp4", global_scale=1.0)
    assert (q.dequantize()[:, 0] / 6).tolist() == [416, 288, 144]


@pytest.mark.parametrize("scale", [464.0, 465.0, 480.0, 1000.0])
def test_n3_scale_saturates(scale):
    x = torch.zeros(1, 16)
    x[0, 0] = scale * 6
    assert hq.quantize(x, "nvfp4", global_scale=1.0).scales.item() == 0x7E


def test_n3_quotient_that_overflows_is_not_a_nan():
    x = torch.full((1, 16), 3e38)
    assert hq.quantize(x, "nvfp4", global_scale=1e-30).scales.item() == 0x7E
    x[0, 3] = float("inf")
    assert hq.quantize(x, "nvfp4", global_scale=1e-30).scales.item() == 0x7F


def test_n4_zero_blocks_and_rows():
    w = torch.randn(4, 64) * 0.02
    w[2, 16:32] = 0
    w[3] = 0
    for x in (w, torch.zeros(4, 64)):
        q = hq.quantize(x, "nvfp4")
        assert not (q.scales == 0x7F).any()
        restored = q.dequantize()
        assert not restored[2, 16:32].any() and not restored[3].any()
        assert (q.scales[x.view(4, 4, 16).abs().amax(-1) == 0] == 0).all()
        assert (q.codes.view(4, 4, 8)[x.view(4, 4, 16).abs().amax(-1) == 0] == 0).all()


def test_n6_tiny_rows_beside_a_normal_one():
    x = torch.ones(5, 32)
    x[1:] = torch.tensor([1e-36, 3e-37, 1.2e-38, 9.2e-41])[:, None]
    together = hq.quantize(x, "nvfp4").dequantize()
    assert together.isfinite().all() and together[0].eq(1).all()
    assert not together[1:].any()  # far below the smallest scale of a tensor that holds ones
    for row in x[1:]:
        restored = hq.quantize(row[None], "nvfp4").dequantize()
        assert restored.isfinite().all()
        # g is a float32: where it is itself a subnormal, its own step is the error
        step = max(row[0].item() / 6, 2.0**-149 * 448 * 6)
        assert ((restored - row).abs() <= step / 2).all()


def test_n8_large_block():
    x = torch.randn(1, 64)
    x[0, 16:32] = 5000
    assert (hq.quantize(x, "nvfp4").dequantize()[0, 16:32] - 5000).abs().max() <= 5000 / 6 / 2
    g = global_scale_of(x[0, :16].abs().amax())  # calibrated on data far smaller
    q = hq.quantize(x, "nvfp4", global_scale=g)
    assert q.scales[0, 1] == 0x7E and q.dequantize()[0, 16:32].eq(448 * 6 * g).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_n9_ties(dtype):
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = torch.cat((torch.tensor([6.0]), ties, -ties, torch.tensor([0.0])))[None].to(dtype)  # scale 1 by its 6
    q = hq.quantize(x, "nvfp4", global_scale=1.0)
    assert q.scales.item() == 0x38
    assert values(q)[0, 1:15].tolist() == [0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4]


def test_n10_just_beside_ties():
    x = torch.zeros(1, 16)
    x[0, :6] = torch.tensor([6, 2.500004, 0.7499999, 1.2500001, 5.000001, 3.4999998])
    q = hq.quantize(x, "nvfp4", global_scale=1.0)
    assert values(q)[0, :6].tolist() == [6, 3, 0.5, 1.5, 6, 3]


def test_n14_exact_tie_of_a_scale_that_is_no_power_of_two():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16], x[0, 17] = 2688, 5.625, 4.6875
    q = hq.quantize(x, "nvfp4", global_scale=1.0)
    assert q.dequantize()[0, 16:18].tolist() == [5.625, 3.75]
    assert unpack_nibbles(q.codes)[0, 17] == 6


def test_c7_nibbles():
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([0.5, 1.0, -6.0, 4.0])
    assert hq.quantize(x, "nvfp4", global_scale=1.0).codes[0, :2].tolist() == [0x21, 0x6F]


def test_minus_zero_is_plus_zero_and_below_zero_is_signed():
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([6.0, -0.0, -1e-3, -1e-45])
    assert unpack_nibbles(hq.quantize(x, "nvfp4", global_scale=1.0).codes)[0, :5].tolist() == [7, 0, 8, 8, 0]


# ---- the global scale ---------------------------------------------------------------------------


def test_a9_dynamic_and_given():
    x = torch.randn(8, 64)
    dynamic = hq.quantize(x, "nvfp4")
    g = g_of(dynamic)
    assert torch.equal(g, global_scale_of(x.abs().amax()))
    given = hq.quantize(x, "nvfp4", global_scale=g)
    assert torch.equal(given.codes, dynamic.codes) and torch.equal(given.scales, dynamic.scales)
    number = hq.quantize(x, "nvfp4", global_scale=g.item())
    assert torch.equal(number.codes, dynamic.codes) and torch.equal(number.scales, dynamic.scales)


def test_global_scale_is_of_the_rotated_tensor_and_its_finite_values():
    x = torch.zeros(1, 16)
    x[0, 0] = 8.0
    assert g_of(hq.quantize(x, "nvfp4", rotation="sylvester:16")) == global_scale_of(torch.tensor(2.0))
    x = torch.tensor([[1.0] * 16 + [float("inf")] + [5.0] * 15])
    assert g_of(hq.quantize(x, "nvfp4")) == global_scale_of(torch.tensor(5.0))
    for nothing in (torch.zeros(2, 16), torch.full((2, 16), float("nan")), torch.full((1, 16), 1e-45)):
        assert g_of(hq.quantize(nothing, "nvfp4")) == 1.0


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), 1e300, 1e-60])
def test_n22_implausible_numbers_are_refused(value):
    with pytest.raises(GlobalScaleError, match="must be positive and finite"):
        hq.quantize(torch.ones(1, 16), "nvfp4", global_scale=value)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_n22_a_bad_device_scalar_gives_nan(value):
    q = hq.quantize(torch.ones(2, 32), "nvfp4", global_scale=torch.tensor(value))
    assert q.scales.eq(0x7F).all() and q.codes.eq(0).all() and q.dequantize().isnan().all()


def test_n23_dequantize_uses_stored_numbers_only():
    x = torch.randn(2, 32)
    g = x.abs().amax() / 6 / 256  # as the 4/6 recipe makes it
    q = hq.quantize(x, "nvfp4", global_scale=g)
    assert (q.dequantize() - x).abs().max() <= x.abs().max() / 6
    s = q.scales.view(torch.float8_e4m3fn).to(torch.float32) * g
    assert torch.equal(q.dequantize(), values(q) * s.repeat_interleave(16, -1))


def test_global_scale_belongs_to_nvfp4_alone():
    with pytest.raises(GlobalScaleError, match="'int8' has no global scale"):
        hq.quantize(torch.ones(1, 16), "int8", global_scale=1.0)
    with pytest.raises(GlobalScaleError, match="one float32 number"):
        hq.quantize(torch.ones(1, 16), "nvfp4", global_scale=torch.ones(2))
    with pytest.raises(GlobalScaleError, match="one float32 number"):
        hq.quantize(torch.ones(1, 16), "nvfp4", global_scale=torch.ones(1, dtype=torch.float64))
    assert g_of(hq.quantize(torch.ones(1, 16), "nvfp4", global_scale=torch.ones(1, 1))) == 1
