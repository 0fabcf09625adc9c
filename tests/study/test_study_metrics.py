"""The measures of the study on numbers that can be worked out by hand."""

import math

import pytest
import torch

from hadaquant.study.metrics import MARGIN_DB, helps, quiet_error, relative_l2, sqnr_db


def test_relative_l2():
    x = torch.tensor([[3.0, 4.0], [0.0, 12.0]])
    assert relative_l2(x, x) == 0.0
    assert relative_l2(x, torch.zeros_like(x)) == 1.0
    assert relative_l2(x, x + torch.tensor([[1.0, 0.0], [0.0, 0.0]])) == pytest.approx(1 / 13)


def test_relative_l2_of_zero_and_of_nan():
    zero = torch.zeros(4)
    assert relative_l2(zero, zero) == 0.0
    assert relative_l2(zero, zero + 1) == math.inf
    assert math.isnan(relative_l2(torch.ones(2), torch.tensor([1.0, math.nan])))


def test_sqnr_db():
    assert sqnr_db(1.0) == 0.0
    assert sqnr_db(0.001) == pytest.approx(60.0)
    assert sqnr_db(0.0) == math.inf


def test_quiet_error_leaves_the_outliers_out():
    x = torch.tensor([[100.0, 3.0, 4.0]])
    restored = torch.tensor([[0.0, 3.0, 9.0]])
    assert quiet_error(x, restored, outliers=(0,)) == pytest.approx(1.0)
    assert quiet_error(x, restored, outliers=(0, 2)) == 0.0


@pytest.mark.parametrize(
    "gain, verdict", [(-1.0, "no"), (-0.49, "no difference"), (0.49, "no difference"), (1.0, "yes")]
)
def test_helps_by_a_margin(gain, verdict):
    assert MARGIN_DB == 0.5
    assert helps(0.1, 0.1 * 10 ** (-gain / 20)) == verdict


def test_helps_without_any_error():
    assert helps(0.0, 0.0) == "no difference"
    assert helps(0.1, 0.0) == "yes"
    assert helps(0.0, 0.1) == "no"
