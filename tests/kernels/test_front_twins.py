"""Front ends in the kernels: norms give the reference's bytes, activations differ on near-ties alone."""

from dataclasses import replace

import pytest
import torch

import hadaquant as hq
from hadaquant import front, reference
from hadaquant.formats import FORMATS, get_format
from hadaquant.rotation import Rotation

from .front_ends import check_explained, norms, on
from .test_twins import assert_same, nasty

FORMAT_NAMES = sorted(FORMATS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIGNED = Rotation("regular", 64, torch.randint(0, 2, (64,), generator=torch.Generator().manual_seed(1)) * 2 - 1)
KINDS = ("rms_norm", "rms_norm with weight", "ada_norm", "ada_norm of batches")


def both(x: torch.Tensor, format: str, front_end: hq.FrontEnd, device: str, **how) -> list[hq.QuantizedTensor]:
    """The kernel's and the reference's result."""
    moved = on(front_end, device)
    ours = hq.quantize(x.to(device), format, front_end=moved, backend="triton", **how)
    return [ours, hq.quantize(x, format, front_end=front_end, backend="reference", **how)]


def assert_twins(x: torch.Tensor, format: str, front_end: hq.FrontEnd, device: str, **how) -> None:
    ours, oracle = both(x, format, front_end, device, **how)
    assert_same(ours.scales, oracle.scales, "scales")
    assert_same(ours.codes, oracle.codes, "codes")
    if oracle.global_scale is not None and ours.global_scale is not None:
        assert_same(ours.global_scale, oracle.global_scale, "global scale")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotation", ["none", "sylvester:32", "regular:256"])
@pytest.mark.parametrize("kind", KINDS)
def test_norms_give_the_same_bytes(kind, rotation, dtype, device):
    x = nasty(9, 768, dtype).view(3, 3, 768)
    for name in ("int8", "nvfp4", "mxfp4-even"):
        assert_twins(x, name, norms(x, dtype)[kind], device, rotation=rotation)


@pytest.mark.parametrize("k", [32, 96, 288, 5120, 13824])
@pytest.mark.parametrize("kind", ["rms_norm with weight", "ada_norm of batches"])
def test_norms_of_any_width(kind, k, device):
    x = nasty(2, k, torch.bfloat16) + 1
    for name in ("int8", "mxfp4"):
        assert_twins(x, name, norms(x, torch.bfloat16)[kind], device, rotation="sylvester:32")


@pytest.mark.parametrize("k", [1, 7, 1000])
def test_int8_norms_of_odd_widths(k, device):
    x = torch.randn(3, 2, k).to(torch.float16)
    for front_end in norms(x, torch.float16).values():
        assert_twins(x, "int8", front_end, device)


@pytest.mark.parametrize("rows", [1, 2, 33])
def test_norms_of_any_number_of_rows(rows, device):
    x = torch.randn(rows, 256)
    for name in ("int8", "nvfp4"):
        assert_twins(x, name, norms(x, torch.float32)["ada_norm of batches"], device, rotation=SIGNED)


@pytest.mark.parametrize("rotation", ["none", "regular:16"])
def test_norms_with_tiled_scales_and_a_given_global_scale(rotation, device):
    x = torch.randn(2, 65, 64).to(torch.bfloat16)
    for name, how in (("nvfp4", {"global_scale": 0.004}), ("mxfp4", {})):
        front_end = norms(x, torch.bfloat16)["ada_norm of batches"]
        assert_twins(x, name, front_end, device, rotation=rotation, scale_layout="tiled", **how)


def halves(rows: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(4)
    return (torch.randn(rows, 2 * k, generator=gen) * 3).to(dtype).chunk(2, -1)  # type: ignore[return-value]


def moved_halves(gate: torch.Tensor, up: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.cat((gate, up), -1).to(device)
    return whole.chunk(2, -1)  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotation", ["none", "regular:16", "sylvester:256"])
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_activations_differ_on_near_ties_alone(format, rotation, dtype, device):
    gate, up = halves(17, 768, dtype)
    how = {"rotation": rotation, "global_scale": 0.004 if get_format(format).has_global_scale else None}
    moved = moved_halves(gate, up, device)
    for front_end, there in ((front.silu_mul(up), front.silu_mul(moved[1])), (front.gelu_tanh(), front.gelu_tanh())):
        ours = hq.quantize(moved[0], format, front_end=there, backend="triton", **how)  # a view with a row stride
        oracle = hq.quantize(gate, format, front_end=front_end, backend="reference", **how)
        check_explained(ours, oracle, gate, front_end)


def test_the_explanation_refuses_what_it_should(device):
    gate, up = halves(3, 512, torch.bfloat16)
    front_end = front.silu_mul(up)
    for name in ("int8", "mxfp4"):
        ours, oracle = both(gate, name, front_end, device, rotation="regular:16")
        check_explained(ours, oracle, gate, front_end)
        for part in ("codes", "scales"):
            changed = getattr(ours, part).clone()
            changed[1, 7] += 1
            with pytest.raises(AssertionError):
                check_explained(replace(ours, **{part: changed}), oracle, gate, front_end)
            if name == "int8":
                break  # one scale a row: [3]


@pytest.mark.parametrize("g", [24, 64])
def test_behind_a_matrix(g, device):
    """Permutations: exact whatever the order of sums. A side of 24 is rotated by its own kernel."""
    matrix = torch.eye(g)[torch.randperm(g, generator=torch.Generator().manual_seed(0))]
    x = torch.randn(5, 2, 2 * g).to(torch.bfloat16)
    for name in ("int8", "nvfp4"):
        for front_end in norms(x, torch.bfloat16).values():
            rotation = Rotation("matrix", matrix=matrix)
            ours = hq.quantize(
                x.to(device), name, front_end=on(front_end, device), rotation=rotation.to(device), backend="triton"
            )
            oracle = hq.quantize(x, name, front_end=front_end, rotation=rotation)
            assert_same(ours.codes, oracle.codes, "codes")
            assert_same(ours.scales, oracle.scales, "scales")


@pytest.mark.parametrize("kind", KINDS)
def test_the_front_end_alone(kind, device):
    from hadaquant.kernels.rotate import front as kernel

    x = torch.randn(3, 5, 640).to(torch.bfloat16)
    front_end = norms(x, torch.bfloat16)[kind]
    assert_same(kernel(x.to(device), on(front_end, device)), reference.front(x, front_end), "front end")


def test_l1_strided_rows_without_a_front_end(device):
    wide = torch.randn(9, 2, 768).to(torch.bfloat16).to(device)
    for x in (wide[:, 1], wide[..., ::2], wide.transpose(0, 1)):
        ours = hq.quantize(x, "int8", rotation="regular:16", backend="triton")
        oracle = hq.quantize(x.cpu(), "int8", rotation="regular:16")
        assert_same(ours.codes, oracle.codes, "codes")
        assert_same(ours.scales, oracle.scales, "scales")
