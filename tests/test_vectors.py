"""What two earlier programs computed (tests/data/README.md): equal, or each difference explained."""

import pytest
import torch

import hadaquant as hq
from hadaquant.formats.elements import fp32_bits
from hadaquant.rotation import parse

NVFP4_CASES = (
    *("outlier_channels", "gaussian", "student_t3", "bf16", "fp16", "zeros", "zero_rows", "one_block"),
    *("odd_blocks", "tiny", "huge", "e2m1_ties", "e4m3_ties"),
)
LAYERS = {"a": 256, "b": 64, "c": 256}


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many float32 numbers lie between positive a and b, at most."""
    return int((fp32_bits(a) - fp32_bits(b)).abs().max())


def relative_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return ((y.double() - exact).norm() / exact.norm()).item()


# ---- NVFP4 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", NVFP4_CASES)
@pytest.mark.parametrize(("which", "rotation"), [("none", "none"), ("h16", "sylvester:16")])
def test_a4_nvfp4_byte_for_byte(vectors, case, which, rotation):
    v = vectors("nvfp4_seed_reference")
    x = v[f"{case}.x"]
    q = hq.quantize(x, "nvfp4", rotation=rotation)
    assert q.global_scale is not None
    assert torch.equal(q.codes.view(-1, 8), v[f"{case}.{which}.q"])
    assert torch.equal(q.scales.flatten(), v[f"{case}.{which}.s"])
    ours, theirs = q.global_scale.double(), v[f"{case}.{which}.g"].double()
    if which == "none" or x.dtype != torch.float32 or not x.any():
        assert ours == theirs
        return
    # There a matrix product summed 16 terms in an order of its own, here four stages of sums. Each
    # errs by at most half an ulp of its terms' sum a step, and the two divisions by half an ulp each.
    blocks = x.double().view(-1, 16)
    exact = (blocks @ parse(rotation).dense()).abs().max() / (6 * 448)
    terms = blocks.abs().sum(-1).max() / 4 / (6 * 448)
    assert (ours - exact).abs() <= 2.0**-24 * (4 * terms + 2 * exact)
    assert (theirs - exact).abs() <= 2.0**-24 * (16 * terms + 2 * exact)


def test_every_case_is_tested(vectors):
    assert {name.split(".")[0] for name in vectors("nvfp4_seed_reference")} == set(NVFP4_CASES)


# ---- INT8, plain PyTorch ------------------------------------------------------------------------


@pytest.mark.parametrize("group", [4, 16, 64, 256])
def test_b1_the_regular_hadamard(vectors, group):
    theirs = vectors("int8_seed_torch")[f"regular_hadamard_{group}"]
    assert torch.equal(parse(f"regular:{group}").dense().float(), theirs)


def test_b1_weights(vectors):
    v = vectors("int8_seed_torch")
    different = 0
    for layer, group in LAYERS.items():
        w, codes, scales = (v[f"{layer}.{name}"] for name in ("w", "qweight", "wscale"))
        q = hq.quantize(w, "int8", rotation=f"regular:{group}")
        assert ulps(q.scales, scales) <= 2
        wrong = q.codes != codes
        different += int(wrong.sum())
        # a code may differ only where the float64 value before rounding all but ties; our butterflies
        # err by less than one rounding a stage and one for the norm, at most half an ulp of the row's
        # maximum each, and each of the two scales by two ulps
        exact = (w.double().view(len(w), -1, group) @ parse(f"regular:{group}").dense()).view(w.shape)
        steps = exact / (exact.abs().amax(-1, keepdim=True) / 127)
        from_tie = ((steps - steps.floor()) - 0.5).abs()
        assert (from_tie[wrong] <= 127 * (9 + 4) * 2.0**-24).all()
        assert (q.codes[wrong].int() - codes[wrong].int()).abs().le(1).all()
    assert different == 1


@pytest.mark.parametrize("layer", LAYERS)
def test_b2_outputs_err_no_more_than_the_plain_path(vectors, layer):
    v = vectors("int8_seed_torch")
    x, w, theirs = (v[f"{layer}.{name}"] for name in ("x", "w", "y_torch_path"))
    linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    linear.weight.data = w
    rotated = hq.RotatedLinear.from_linear(linear, "int8", f"regular:{LAYERS[layer]}")
    exact = x.double() @ w.double().T
    ours = rotated(x)
    assert ours.dtype == torch.bfloat16
    assert relative_error(ours, exact) <= relative_error(theirs, exact)


# ---- INT8, compiled kernels ---------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["dense", "factored"])
def test_b3_gpu_kernels(vectors, kernel):
    v = vectors("int8_seed_gpu")
    for case in "ab":
        q = hq.quantize(v[f"{case}.x"], "int8", rotation="regular:256")
        assert torch.equal(q.codes, v[f"{case}.{kernel}.q"])
        theirs = v[f"{case}.{kernel}.s"]
        assert ((q.scales - theirs).abs() / q.scales).max() <= 1.2e-7  # they multiply by an approximate reciprocal
