"""One layer's cells against sums done by hand, their intervals, and what is not measured."""

import json
import math

import pytest
import torch

import hadaquant as hq
from hadaquant.errors import RotationError
from hadaquant.formats import get_format
from hadaquant.study.bootstrap import RESAMPLES, interval, resampled_sums
from hadaquant.study.layers import MOST_DB, Cell, LayerResult, measure
from hadaquant.study.outliers import PROFILE, Spread
from hadaquant.study.rotations import as_rotation, fitted, of_name, random_signs


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def loud():
    """Inputs with one channel 60 times the others."""
    x = randn(64, 128)
    x[:, 5] *= 60
    return x


def decibels(found, exact):
    return -10 * math.log10((found - exact).double().square().sum() / exact.square().sum())


@pytest.mark.parametrize("format", ["int8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("rotation", ["none", "sylvester:16", "random:64"])
def test_a_cell_is_the_library_s_own_product(loud, format, rotation):
    w = randn(48, 128, seed=1)
    cell = measure("layer", loud, w, [format], [rotation], reads="layer").under(format, rotation)
    qx, qw = (hq.quantize(t, format, rotation=of_name(cell.rotation)) for t in (loud, w))
    exact = loud.double() @ w.double().T
    found = hq.scaled_mm(qx, qw, out_dtype=torch.float32)
    assert cell.db == pytest.approx(decibels(found, exact), abs=1e-9)
    quiet = exact.square().sum(0).argsort()[:24]
    assert cell.quiet_db == pytest.approx(decibels(found[:, quiet], exact[:, quiet]), abs=1e-9)
    assert cell.weights_db == pytest.approx(decibels(loud.double() @ qw.dequantize().double().T, exact), abs=1e-3)
    assert cell.inputs_db == pytest.approx(decibels(qx.dequantize().double() @ w.double().T, exact), abs=1e-3)
    assert cell.bits == 8 * get_format(format).nbytes((48, 128)) / (48 * 128)


def test_n26_one_channel_in_a_layer(loud):
    found = measure("layer", loud, randn(48, 128, seed=1), ["int8", "nvfp4", "mxfp4"], ["sylvester:64"], reads="layer")
    assert {f: found.best(f).helps for f in found.formats} == {"int8": "yes", "nvfp4": "no", "mxfp4": "yes"}
    for format in found.formats:
        plain, rotated = found.of(format)
        assert rotated.gain_db == rotated.db - plain.db and plain.gain_db == 0
        assert rotated.low_db < rotated.gain_db < rotated.high_db
    assert found.inputs["none"].ratio > 40 > 10 > found.inputs["sylvester:64"].ratio


def test_gaussian_inputs_make_no_difference():
    found = measure("layer", randn(64, 128), randn(48, 128, seed=1), ["nvfp4"], ["sylvester:64"], reads="layer")
    assert found.best("nvfp4").helps == "no difference"


def test_a_result_survives_its_line(loud):
    found = measure("layer", loud, randn(8, 128), ["int8"], ["regular:64"], reads="q", tokens=9, nonfinite=1)
    again = LayerResult.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again == found and (again.reads, again.tokens, again.nonfinite, again.rows) == ("q", 9, 1, 64)


def test_s4_a_rotation_that_ends_at_another_s_group_is_measured_once():
    found = measure("layer", randn(8, 192), randn(8, 192), ["int8"], ["regular:64", "regular:256"], reads="layer")
    assert [(c.rotation, c.asked) for c in found.cells] == [
        ("none", ("none",)),
        ("regular:64", ("regular:64", "regular:256")),
    ]
    assert found.under("int8", "regular:256") is found.under("int8", "regular:64")


def test_s4_what_does_not_fit_is_left_out_and_noted():
    found = measure("layer", randn(8, 24), randn(8, 24), ["int8", "nvfp4"], ["matrix:16"], reads="layer")
    assert [c.rotation for c in found.cells] == ["none"] and not found.of("nvfp4")
    assert "24 is not a multiple of 16" in found.notes["nvfp4"] and not found.skipped
    alone = measure("layer", randn(8, 24), randn(8, 24), ["nvfp4"], ["none"], reads="layer")
    assert alone.cells == () and alone.skipped == alone.notes["nvfp4"]


@pytest.mark.parametrize(
    ("x", "w", "why"),
    [
        (torch.ones(4, 16), torch.full((4, 16), math.nan), "its weight holds NaN or Inf"),
        (torch.zeros(4, 16), torch.ones(4, 16), "its outputs are all zero"),
    ],
)
def test_what_cannot_be_measured_says_why(x, w, why):
    found = measure("layer", x, w, ["int8"], ["none"], reads="layer")
    assert found.skipped == why and found.cells == ()


def test_no_error_at_all_has_a_number():
    x = torch.full((4, 16), 127.0)
    found = measure("layer", x, x, ["int8"], ["regular:16"], reads="layer")
    assert [c.db for c in found.cells] == [MOST_DB, MOST_DB]
    assert found.best("int8").helps == "no difference"


def cell(gain, low, high):
    numbers = dict.fromkeys(("bits", "db", "quiet_db", "weights_db", "inputs_db"), 20.0)
    return Cell(format="int8", rotation="x", asked=("x",), gain_db=gain, low_db=low, high_db=high, **numbers)


def test_helps_needs_the_margin_and_the_interval():
    assert cell(2.0, 1.0, 3.0).helps == "yes" and cell(-2.0, -3.0, -1.0).helps == "no"
    assert cell(2.0, -0.1, 4.0).helps == "no difference" and cell(-2.0, -4.0, 0.1).helps == "no difference"
    assert cell(0.3, 0.2, 0.4).helps == "no difference" and cell(-0.3, -0.4, -0.2).helps == "no difference"


# ---- outliers and rotations ------------------------------------------------------------------------


def test_outlier_figures():
    x = torch.ones(10, 400)
    x[::2] = -1
    x[0, 7] = 30
    spread = Spread.of(x)
    assert spread.ratio == 30 and spread.median == 1
    values = x.double().flatten()
    z = values - values.mean()
    assert spread.kurtosis == pytest.approx((z**4).mean().item() / (z**2).mean().item() ** 2)
    assert len(spread.profile) == PROFILE and spread.profile[:2] == (1.0, 30.0)
    assert Spread.of(randn(1000, 64)).kurtosis == pytest.approx(3, abs=0.1)


def test_outliers_of_dead_channels():
    assert Spread.of(torch.zeros(4, 8)).kurtosis == 0
    x = torch.zeros(4, 8)
    x[0, 0] = 1
    assert Spread.of(x).ratio == math.inf


def test_random_signs():
    rotation = as_rotation("random:64")
    assert str(rotation) == "sylvester:64+signs" and rotation == random_signs(64) == of_name(str(rotation))
    assert {-1.0, 1.0} == set(rotation.signs.tolist())
    assert rotation != random_signs(64, seed=1)
    smaller, note = fitted("random:64", get_format("int8"), 96)
    assert smaller == random_signs(32) and "does not divide K=96" in note
    assert fitted("random:64", get_format("int8"), 97)[0] is None
    for spec in ("random", "random:12", "random:x"):
        with pytest.raises(RotationError):
            as_rotation(spec)


# ---- bootstrap -------------------------------------------------------------------------------------


def test_resampled_sums_share_their_rows():
    values = torch.stack((torch.arange(20.0), 2 * torch.arange(20.0)), 1)
    sums = resampled_sums(values)
    assert sums.shape == (RESAMPLES, 2) and torch.equal(2 * sums[:, 0], sums[:, 1])
    assert sums[:, 0].mean().item() == pytest.approx(190, rel=0.02)
    # a sum of 20 draws with replacement
    assert sums[:, 0].std().item() == pytest.approx((20 * torch.arange(20.0).var(correction=0)).sqrt().item(), rel=0.1)


def test_interval_widens_with_comparisons():
    normal = randn(200_000)
    assert interval(normal) == pytest.approx((-1.96, 1.96), abs=0.03)
    assert interval(normal, comparisons=5) == pytest.approx((-2.576, 2.576), abs=0.05)
