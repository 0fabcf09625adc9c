"""What a stranger types first, and how it is refused."""

import pytest
import torch

import hadaquant as hq


@pytest.mark.parametrize("rotation", [None, 16, "sylvester:02", "sylvester:１６", "regular", torch.eye(16)], ids=repr)
def test_a_rotation_of_another_kind(rotation):
    with pytest.raises(hq.HadaquantError, match=r"a rotation is written|hq.Rotation"):
        hq.quantize(torch.randn(2, 64), "int8", rotation=rotation)


def test_a_list_is_no_tensor():
    with pytest.raises(hq.HadaquantError, match=r"torch\.Tensor"):
        hq.quantize([[1.0, 2.0]], "int8")  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(0, 3, 4), (1, 0, 4), (1, 3, 0), (1.5, 3, 4)], ids=str)
def test_explain_of_no_linear(shape):
    with pytest.raises(hq.HadaquantError):
        hq.explain("int8", *shape)


def test_a_skip_pattern_that_is_no_expression():
    model = torch.nn.Sequential(torch.nn.Linear(64, 8))
    with pytest.raises(hq.HadaquantError, match="no regular expression"):
        hq.quantize_(model, "int8", skip=("re:(",))
    assert type(model[0]) is torch.nn.Linear
