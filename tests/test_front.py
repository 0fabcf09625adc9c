"""Front ends: the order of every operation by another road, and what cannot be a front end."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import hadaquant as hq
from hadaquant import front, reference
from hadaquant.errors import DtypeError, FrontEndError, ShapeError, UnknownChoice
from hadaquant.formats import FORMATS

F32 = np.float32
WIDTHS = [1, 5, 255, 256, 300, 768, 3072, 5120]


def tree_sum(row: np.ndarray) -> np.float32:
    """The contract's sum of one float32 row, by the bits of indices."""
    runs = -(-len(row) // 256)
    padded = np.zeros(runs * 256, F32)
    padded[: len(row)] = row
    sums = {}
    for r in range(runs):
        left = dict(enumerate(padded[256 * r : 256 * (r + 1)]))
        for bit in (0, 1, 2, 6, 7, 3, 4, 5):
            left = {i: F32(v + left[i | 1 << bit]) for i, v in left.items() if not i >> bit & 1}
        sums[r] = left[0]
    bit = 0
    while len(sums) > 1:
        zero = F32(0)
        sums = {i: F32(v + sums.get(i | 1 << bit, zero)) for i, v in sums.items() if not i >> bit & 1}
        bit += 1
    return sums[0]


def inverse(squares: np.float32, k: int, eps: float) -> np.float32:
    return F32(1) / np.sqrt(F32(F32(squares / F32(k)) + F32(eps)))


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=gen) * torch.randn(*shape, generator=gen).mul(3).exp()).to(dtype)


def same_bits(a: torch.Tensor, b: np.ndarray | torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), torch.as_tensor(b).view(torch.int32))


@pytest.mark.parametrize("k", WIDTHS)
def test_sums_are_the_contracts_tree(k):
    x = numbers(3, k)
    assert same_bits(reference.row_sums(x), np.array([tree_sum(row) for row in x.numpy()]))


def test_the_trees_order_shows():
    """Else the test above would show nothing: most orders give other bits."""
    x = numbers(64, 512)
    plain = x.view(64, 2, 256).cumsum(-1)[..., -1].sum(1)
    assert (reference.row_sums(x) != plain).float().mean() > 0.5


def test_roots_are_correctly_rounded():
    """torch's own float32 root is not, on a CPU: it gave 730.38416 here."""
    v = torch.tensor([533461.0625])
    assert reference._inverse_root(v, 1e-6).item() == F32(1) / F32(730.3842163085938)
    many = torch.rand(100_000) * 1e4
    assert same_bits(reference._inverse_root(many, 1.0), F32(1) / np.sqrt(many.numpy() + F32(1)))


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_step_by_step(k, dtype):
    x, w = numbers(3, k, dtype=dtype), numbers(k, dtype=dtype, seed=1)
    rows, weight = x.float().numpy(), w.float().numpy()
    inv = np.array([[inverse(tree_sum(row * row), k, 1e-5)] for row in rows])
    assert same_bits(reference.front(x, front.rms_norm(w, 1e-5)), (rows * inv) * weight)
    assert same_bits(reference.front(x, front.rms_norm(None, 1e-5)), rows * inv)


@pytest.mark.parametrize("k", WIDTHS)
def test_ada_norm_step_by_step(k):
    x = numbers(2, 3, k, dtype=torch.bfloat16) + 5
    scale, shift = numbers(2, 2 * k, seed=1).to(torch.bfloat16).chunk(2, -1)
    y = reference.front(x, front.ada_norm(scale, shift, 1e-6))
    for b in range(2):
        factor, added = F32(1) + scale[b].float().numpy(), shift[b].float().numpy()
        for i in range(3):
            row = x[b, i].float().numpy()
            d = row - tree_sum(row) / F32(k)
            expected = (d * inverse(tree_sum(d * d), k, 1e-6)) * factor + added
            assert same_bits(y[b, i], expected), (b, i)


@pytest.mark.parametrize("k", [5, 300, 3072])
def test_front_ends_are_what_torch_computes(k):
    x, v = numbers(2, 3, k), torch.randn(2, 2, k)
    wide, (scale, shift) = x.double(), v.double()[:, :, None]
    for front_end, exact in (
        (front.rms_norm(v[0][0]), F.rms_norm(wide, (k,), scale[0, 0], 1e-6)),
        (front.ada_norm(v[0], v[1]), F.layer_norm(wide, (k,), None, None, 1e-6) * (1 + scale) + shift),
        (front.silu_mul(x.flip(1)), F.silu(wide) * wide.flip(1)),
        (front.gelu_tanh(), F.gelu(wide, approximate="tanh")),
    ):
        y = reference.front(x, front_end)
        assert y.dtype == torch.float32 and y.shape == x.shape
        torch.testing.assert_close(y.double(), exact, rtol=2e-5, atol=2e-5)


def test_activations_of_extremes():
    inf = float("inf")
    x = torch.tensor([[0.0, -0.0, 1e30, -1e30, -100.0, 88.0, inf, -inf, float("nan")]])
    ones = torch.ones_like(x)
    for front_end in (front.silu_mul(ones), front.gelu_tanh()):
        y = reference.front(x, front_end)[0]
        assert y[:6].tolist() == [0.0, 0.0, x[0, 2], 0.0, 0.0, 88.0]
        assert y[6] == inf and y[7:].isnan().all()


# ---- with quantize ------------------------------------------------------------------------------


def every_front_end(x: torch.Tensor) -> list[hq.FrontEnd]:
    k = x.shape[-1]
    return [
        front.rms_norm(numbers(k, seed=1)),
        front.rms_norm(None, 0.1),
        front.ada_norm(numbers(k, seed=1), numbers(k, seed=2).half()),
        front.ada_norm(numbers(x.shape[0], k, seed=1), numbers(k, seed=2)),
        front.silu_mul(x.flip(0)),
        front.gelu_tanh(),
    ]


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("rotation", ["none", "regular:16", "sylvester:32"])
def test_quantize_is_front_then_quantize(name, rotation, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK", 2 * 96)  # rows in several pieces
    x = torch.randn(3, 4, 96, dtype=torch.bfloat16)
    for front_end in every_front_end(x):
        ours = hq.quantize(x, name, rotation=rotation, front_end=front_end)
        apart = hq.quantize(reference.front(x, front_end), name, rotation=rotation)
        assert torch.equal(ours.codes, apart.codes) and torch.equal(ours.scales, apart.scales)
        if ours.global_scale is not None and apart.global_scale is not None:
            assert torch.equal(ours.global_scale, apart.global_scale)
        assert ours.scales.shape[:2] == (3, 4)


def test_l1_halves_of_one_tensor():
    gate, up = torch.randn(2, 5, 128).to(torch.bfloat16).chunk(2, -1)
    ours = hq.quantize(gate, "int8", front_end=front.silu_mul(up))
    apart = hq.quantize(gate.contiguous(), "int8", front_end=front.silu_mul(up.contiguous()))
    assert torch.equal(ours.codes, apart.codes) and torch.equal(ours.scales, apart.scales)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_bad_row_spoils_no_other(value):
    x = torch.randn(4, 64)
    for front_end in every_front_end(x)[:4]:
        good = hq.quantize(x, "int8", front_end=front_end)
        spoilt = x.clone()
        spoilt[1, 3] = value
        bad = hq.quantize(spoilt, "int8", front_end=front_end)
        others = [0, 2, 3]
        assert torch.equal(bad.codes[others], good.codes[others])
        assert torch.equal(bad.scales[others], good.scales[others])
        # the square of 3e38 is infinite, the inverse root of that is 0
        assert not bad.codes[1].any() or value == 3e38


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (64,)])
def test_s2_s6_empty_and_vectors(shape):
    x = torch.randn(shape)
    for front_end in (front.rms_norm(torch.ones(64)), front.silu_mul(x), front.gelu_tanh()):
        assert hq.quantize(x, "int8", front_end=front_end).shape == shape
        assert reference.front(x, front_end).shape == shape


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.1 + 0.2, 1.0, 2**-126, 1])
def test_a_spec_keeps_every_bit_of_eps(eps):
    made = front.rms_norm(torch.ones(4), eps)
    again = front.trusted(made.spec, *made.tensors)
    assert again.eps == eps and again.kind == "rms_norm" and again.factor is made.factor


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda v: front.FrontEnd("relu"),  # type: ignore[arg-type]
            UnknownChoice,
            "unknown front end 'relu': choose one of none, rms_norm",
        ),
        (lambda v: front.rms_norm(v, 0.0), FrontEndError, "eps is 0.0, not a positive number"),
        (lambda v: front.rms_norm(v, -1e-6), FrontEndError, "eps is -1e-06, not a positive number"),
        (lambda v: front.rms_norm(v, float("nan")), FrontEndError, "eps is nan"),
        (lambda v: front.rms_norm(v, float("inf")), FrontEndError, "eps is inf"),
        (lambda v: front.rms_norm(v, 1e-40), FrontEndError, "normal float32 size; for example 1e-6"),
        (
            lambda v: front.rms_norm([1.0]),  # type: ignore[arg-type]
            FrontEndError,
            "its weight is of type list; give a tensor",
        ),
        (lambda v: front.FrontEnd("ada_norm", 1e-6, v), FrontEndError, "it needs its shift"),
        (lambda v: front.FrontEnd("ada_norm", 1e-6, None, v), FrontEndError, "it needs its scale"),
        (lambda v: front.FrontEnd("silu_mul"), FrontEndError, "'silu_mul': it needs its up; make it by"),
        (lambda v: front.FrontEnd("silu_mul", 1e-6, v), FrontEndError, "only the norms have an eps"),
        (lambda v: front.FrontEnd("gelu_tanh", None, v), FrontEndError, "it takes no factor"),
        (lambda v: front.FrontEnd("rms_norm", 1e-6, v, v), FrontEndError, "it takes no shift; leave shift out"),
    ],
)
def test_front_ends_that_cannot_be(make, error, message):
    with pytest.raises(error, match=message):
        make(torch.ones(64))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda x: "rms_norm", FrontEndError, "front end 'rms_norm': it is made by a function of hadaquant.front"),
        (lambda x: 3, FrontEndError, "front end of type int"),
        (lambda x: front.rms_norm(torch.ones(32)), ShapeError, r"weight of front end 'rms_norm' has shape \(32,\)"),
        (lambda x: front.rms_norm(torch.ones(2, 64)), ShapeError, r"but \(64,\) is needed; x has shape \(2, 3, 64\)"),
        (lambda x: front.ada_norm(torch.ones(3, 64), torch.ones(64)), ShapeError, r"\(64,\) or \(2, 64\) is needed"),
        (lambda x: front.ada_norm(torch.ones(64), torch.ones(2, 1, 64)), ShapeError, "shift of front end 'ada_norm'"),
        (lambda x: front.silu_mul(x[:1]), ShapeError, r"up of front end 'silu_mul' has shape \(1, 3, 64\)"),
        (lambda x: front.silu_mul(x.half()), DtypeError, "up of front end 'silu_mul' has dtype torch.float16"),
        (lambda x: front.rms_norm(torch.ones(64).double()), DtypeError, "has dtype torch.float64, but one of"),
        (lambda x: front.rms_norm(torch.ones(64, device="meta")), ShapeError, "on device meta"),
    ],
)
def test_front_ends_that_do_not_fit(make, error, message):
    x = torch.randn(2, 3, 64)
    for name in ("int8", "nvfp4"):
        with pytest.raises(error, match=message):
            hq.quantize(x, name, front_end=make(x))
