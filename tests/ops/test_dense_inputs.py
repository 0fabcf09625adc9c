"""What is no dense tensor is refused by every entry, with what it is and what to do."""

import numpy as np
import pytest
import torch

import hadaquant as hq
from hadaquant.errors import DtypeError

ENTRIES = {
    "layer": lambda x: hq.RotatedLinear.from_linear(torch.nn.Linear(64, 8), "int8", "regular:16")(x),
    "full": lambda x: hq.RotatedLinear.from_linear(torch.nn.Linear(64, 8), "int8", activations="full")(x),
    "quantize": lambda x: hq.quantize(x, "int8"),
    "rotate": lambda x: hq.rotate(x, "regular:16"),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("x", "found"),
    [(np.zeros((2, 64), np.float32), "ndarray"), ([1.0] * 64, "list"), ("x", "str"), (None, "NoneType")],
)
def test_no_tensor(entry, x, found):
    with pytest.raises(DtypeError, match=rf"x has dtype {found}, but a torch\.Tensor is needed; .*torch\.as_tensor"):
        ENTRIES[entry](x)


@pytest.mark.parametrize("entry", ENTRIES)
def test_coded_already(entry):
    with pytest.raises(DtypeError, match=r"x has dtype QuantizedTensor, .* give the tensor before it was coded"):
        ENTRIES[entry](hq.quantize(torch.ones(2, 64), "int8"))


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("layout", ["coo", "csr", "strided", "jagged"])
def test_no_dense_tensor(entry, layout):
    if layout in ("coo", "csr"):
        x = torch.ones(2, 64).to_sparse(layout=getattr(torch, f"sparse_{layout}"))
        message = rf"float32, in layout torch\.sparse_{layout}, but a dense tensor is needed; .*to_dense"
    else:
        x = torch.nested.nested_tensor([torch.ones(2, 64), torch.ones(3, 64)], layout=getattr(torch, layout))
        message = "float32, nested, but a dense tensor is needed; give its parts"
    with pytest.raises(DtypeError, match=message):
        ENTRIES[entry](x)


@pytest.mark.parametrize("which", ["x", "w"])
def test_a_product_of_what_is_not_quantized(which):
    q, plain = hq.quantize(torch.ones(2, 64), "int8"), torch.ones(2, 64)
    with pytest.raises(DtypeError, match=f"{which} has dtype Tensor, but a QuantizedTensor is needed; .*hq.quantize"):
        hq.scaled_mm(*((plain, q) if which == "x" else (q, plain)))  # type: ignore[arg-type]
