"""GPTQ against a dense one in float64 that is written differently, and what it promises."""

import math

import numpy as np
import pytest
import torch

import hadaquant as hq
import oracle
from hadaquant import layout, reference
from hadaquant.calibrate import Curvature, gptq, output_error, search_scales
from hadaquant.errors import BlockError, LayerError, ShapeError
from hadaquant.formats import FORMATS
from hadaquant.rotation import parse

every_format = pytest.mark.parametrize("format", sorted(FORMATS))
BLOCKS = {"nvfp4": 16, "int8": None, "mxfp4": 32, "mxfp4-ceil": 32, "mxfp4-even": 32}


def correlated(rows, k):
    """Inputs [rows, K] with strong and weak channels that hang together."""
    return torch.randn(rows, k) @ torch.randn(k, k) * torch.logspace(-0.5, 0.5, k)


def problem(n=12, k=96, rows=400):
    x = correlated(rows, k).double()
    return torch.randn(n, k), x.T @ x, x


def unpacked(q):
    codes = layout.unpack_nibbles(q.codes) if q.format.element.packed else q.codes
    return codes.numpy()


DAMPING = 0.1
#: How far float32 and float64 may be apart, of a number that is about to be rounded.
FLOAT32 = 2e-5


def dense_gptq(weight, hessian, format, order):
    """One column at a time, removing its row and column from the inverse Hessian by elimination. numpy, float64.

    ``order`` keeps blocks together. Scales are chosen from a block as it is when its turn comes. Returns codes, and
    where a number lies so near to a boundary that float32 may round it to the other side.
    """
    block = BLOCKS[format] or weight.shape[1]
    w = weight.double().numpy().copy()
    h = hessian.numpy() + DAMPING * np.trace(hessian.numpy()) / len(hessian) * np.eye(len(hessian))
    inverse = np.linalg.inv(h[np.ix_(order, order)])
    g = oracle.global_scale(weight.numpy()) if format == "nvfp4" else None
    codes = np.zeros(w.shape, np.int8 if format == "int8" else np.uint8)
    ties = np.zeros(w.shape, bool)
    multipliers = {}

    def encoded(ratio, y):
        return np.clip(np.rint(ratio), -127, 127) if format == "int8" else oracle.e2m1(ratio, y)

    left = list(order)
    while left:
        column = left[0]
        members = [column // block * block + i for i in range(block)]
        if column // block not in multipliers:
            now = oracle.quantize(w[:, members].astype(np.float32), format, g)
            multipliers[column // block] = now.multiplier.reshape(-1)
        m = multipliers[column // block]
        y = w[:, column].astype(np.float32)
        ratio = oracle.divide(y, np.where(m == 0, 1, m))
        codes[:, column] = encoded(ratio, y)
        near = [encoded((ratio * (1 + e)).astype(np.float32), y) for e in (-FLOAT32, FLOAT32)]
        ties[:, column] = near[0] != near[1]
        if format == "int8":
            value = codes[:, column] * m.astype(np.float64)
        else:
            value = np.sign(y) * np.array(oracle.E2M1_VALUES)[codes[:, column] & 7] * m.astype(np.float64)
        pivot = inverse[0, 0]
        w[:, left[1:]] -= np.outer((w[:, column] - value) / pivot, inverse[0, 1:])
        inverse = inverse[1:, 1:] - np.outer(inverse[1:, 0], inverse[0, 1:]) / pivot
        left = left[1:]
    return codes, ties


def assert_same(q, dense, order):
    """The codes of each row are the dense ones, up to a tie: what comes after one has another error to make up for."""
    found, (codes, ties) = unpacked(q), dense
    for mine, right, tie in zip(found[:, order], codes[:, order], ties[:, order], strict=True):
        differ = np.flatnonzero(mine != right)
        assert not len(differ) or tie[differ[0]], f"column {differ[0]} of {len(mine)} is no tie"


@every_format
@pytest.mark.parametrize("k", [96, 288])  # within one chunk of columns, and over three
def test_codes_are_those_of_a_dense_gptq(format, k):
    weight, hessian, _ = problem(k=k)
    found = gptq(weight, hessian, format, act_order=False, damping=DAMPING)
    assert_same(found, dense_gptq(weight, hessian, format, range(k)), range(k))


@every_format
def test_act_order_takes_strong_channels_first_and_keeps_blocks_together(format):
    weight, hessian, _ = problem()
    block = BLOCKS[format] or 96
    strength = hessian.diagonal()
    blocks = sorted(range(96 // block), key=lambda b: -strength[b * block : (b + 1) * block].sum())
    order = [c for b in blocks for c in sorted(range(b * block, (b + 1) * block), key=lambda c: -strength[c].item())]
    found = gptq(weight, hessian, format, damping=DAMPING)
    assert_same(found, dense_gptq(weight, hessian, format, order), order)


@every_format
@pytest.mark.parametrize("rotation", ["sylvester:32", "regular:16"])
def test_a_rotation_is_folded_into_both(format, rotation):
    """Rotated weight and rotated inputs, given as they are, have the same codes."""
    weight, hessian, _ = problem()
    r = parse(rotation)
    dense = torch.block_diag(*[r.dense()] * (96 // r.group))
    rotated = reference.rotate(weight, r)
    found = gptq(weight, hessian, format, rotation)
    assert torch.equal(found.codes, gptq(rotated, dense.T @ hessian @ dense, format).codes)
    assert found.rotation == r


def true_error(weight, q, x):
    """‖x·Wᵀ − x·Ŵᵀ‖ in float64."""
    return ((weight.double() - q.dequantize().double()) @ x.T).norm().item()


@every_format
@pytest.mark.parametrize("rotation", ["none", "sylvester:32"])
@pytest.mark.parametrize("options", [{}, {"act_order": False}, {"fixed": True}, {"search": True}, {"damping": 0.1}])
def test_better_than_round_to_nearest(format, rotation, options):
    weight, hessian, x = problem()
    nearest = true_error(weight, hq.quantize(weight, format, rotation=rotation), x)
    assert true_error(weight, gptq(weight, hessian, format, rotation, **options), x) < nearest


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_both_are_better_than_one(format):
    weight, hessian, x = problem(n=64)
    importance = hessian.diagonal()
    both = true_error(weight, gptq(weight, hessian, format, search=True), x)
    assert both < true_error(weight, gptq(weight, hessian, format), x)
    assert both < true_error(weight, search_scales(weight, format, importance=importance), x)


@every_format
def test_without_correlation_it_is_round_to_nearest(format):
    """A diagonal Hessian has nothing to make up with."""
    weight = torch.randn(8, 64)
    hessian = torch.diag(torch.rand(64) + 0.5)
    found, nearest = gptq(weight, hessian, format), hq.quantize(weight, format)
    assert torch.equal(found.codes, nearest.codes) and torch.equal(found.scales, nearest.scales)
    searched = gptq(weight, hessian, format, search=True, damping=0.0)
    assert torch.equal(searched.dequantize(), search_scales(weight, format, importance=hessian.diagonal()).dequantize())


@every_format
def test_fixed_scales_are_the_contracts(format):
    weight, hessian, _ = problem()
    found = gptq(weight, hessian, format, "sylvester:16", fixed=True)
    nearest = hq.quantize(weight, format, rotation="sylvester:16")
    assert torch.equal(found.scales, nearest.scales)
    assert not torch.equal(found.codes, nearest.codes)


def test_channels_that_are_always_zero_are_rounded_to_nearest():
    weight, _, x = problem()
    x[:, ::5] = 0
    found = gptq(weight, x.T @ x, "int8")
    assert torch.equal(found.codes[:, ::5], hq.quantize(weight, "int8").codes[:, ::5])
    zero = gptq(weight, torch.zeros(96, 96), "nvfp4")
    assert torch.equal(zero.codes, hq.quantize(weight, "nvfp4").codes)


def test_a_singular_hessian_is_damped():
    weight, _, x = problem(rows=10)  # fewer rows than channels
    hessian = x.T @ x
    for damping in (0.1, 0.0):
        found = gptq(weight, hessian, "int8", damping=damping)
        assert true_error(weight, found, x) < 0.5 * true_error(weight, hq.quantize(weight, "int8"), x)


def test_what_is_no_hessian_is_refused():
    weight, hessian, _ = problem()
    with pytest.raises(LayerError, match="not positive"):
        gptq(weight, torch.full((96, 96), 10.0).fill_diagonal_(1.0), "int8")
    hessian[3, 3] = float("nan")
    with pytest.raises(LayerError, match="holds NaN or Inf"):
        gptq(weight, hessian, "int8")
    with pytest.raises(ShapeError, match="hessian has shape"):
        gptq(weight, torch.eye(95), "int8")
    with pytest.raises(BlockError):
        gptq(torch.randn(4, 40), torch.eye(40), "nvfp4")


def test_output_error_is_the_relative_error_of_the_outputs():
    weight, hessian, x = problem()
    q = hq.quantize(weight, "nvfp4", rotation="sylvester:16")
    curvature = Curvature.of(hessian, q.format, q.rotation)
    expected = true_error(weight, q, x) / (weight.double() @ x.T).norm().item()
    assert math.isclose(output_error(weight, q, curvature), expected, rel_tol=1e-4)
