"""Rotations: what they are, the exact order of their arithmetic, and what is refused."""

import copy
import pickle

import numpy as np
import pytest
import torch

import hadaquant as hq
from hadaquant.errors import GroupError, RotationError, ShapeError, UnknownChoice
from hadaquant.rotation import NONE, Rotation, norm, parse, stages, trusted

SYLVESTER = [f"sylvester:{2**p}" for p in range(1, 13)]
REGULAR = [f"regular:{4**p}" for p in range(1, 7)]
H4 = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
S4 = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])

#: (radix, stride) of the stages, typed in: the order is part of the contract.
STAGES = {
    2: [(2, 1)],
    4: [(4, 1)],
    8: [(4, 1), (2, 4)],
    16: [(4, 1), (4, 4)],
    32: [(4, 1), (4, 4), (2, 16)],
    64: [(4, 1), (4, 4), (4, 16)],
    128: [(4, 1), (2, 64), (4, 4), (4, 16)],
    256: [(4, 1), (4, 64), (4, 4), (4, 16)],
    512: [(4, 1), (4, 64), (4, 4), (4, 16), (2, 256)],
    1024: [(4, 1), (4, 64), (4, 4), (4, 16), (4, 256)],
    2048: [(4, 1), (4, 64), (4, 4), (4, 16), (4, 256), (2, 1024)],
    4096: [(4, 1), (4, 64), (4, 4), (4, 16), (4, 256), (4, 1024)],
}


def random_signs(group: int) -> torch.Tensor:
    return torch.randint(0, 2, (group,), generator=torch.Generator().manual_seed(group)) * 2.0 - 1


def random_orthogonal(group: int) -> torch.Tensor:
    gaussian = torch.randn(group, group, dtype=torch.float64, generator=torch.Generator().manual_seed(group))
    return torch.linalg.qr(gaussian).Q


def bits(t: torch.Tensor) -> list:
    return t.contiguous().view(torch.int32).tolist()


# ---- the contract of the arithmetic -------------------------------------------------------------


def slow_rotate(row: list[float], kind: str, group: int, signs: list[float] | None, inverse: bool = False) -> list:
    """One group by the contract's words: scalars, one rounded float32 operation at a time."""
    v = [np.float32(value) for value in row]
    if signs is not None and not inverse:
        v = [value * np.float32(s) for value, s in zip(v, signs, strict=True)]
    for radix, stride in STAGES[group]:
        for start in range(group):
            if start // stride % radix:
                continue  # the digit of this stage is not zero: done with its partners
            if radix == 2:
                x0, x1 = v[start], v[start + stride]
                v[start], v[start + stride] = x0 + x1, x0 - x1
                continue
            x0, x1, x2, x3 = (v[start + i * stride] for i in range(4))
            a, b, c, d = x0 + x1, x2 + x3, x0 - x1, x2 - x3
            new = (a + b, c + d, a - b, c - d) if kind == "sylvester" else (a + d, a - d, b + c, b - c)
            for i in range(4):
                v[start + i * stride] = new[i]
    v = [value * np.float32(1 / np.sqrt(group)) for value in v]
    if signs is not None and inverse:
        v = [value * np.float32(s) for value, s in zip(v, signs, strict=True)]
    return v


@pytest.mark.parametrize("spec", SYLVESTER + REGULAR)
@pytest.mark.parametrize("signed", [False, True])
def test_order_of_operations_bit_for_bit(spec, signed):
    base = parse(spec)
    signs = random_signs(base.group) if signed else None
    rotation = Rotation(base.kind, base.group, signs)
    x = torch.randn(2, base.group) * torch.tensor([[1.0], [1e-38]])  # subnormals too
    x[0, ::3] *= 1e4
    x[1, 1] = -0.0
    for inverse in (False, True):
        ours = hq.rotate(x, rotation, inverse)
        slow = [
            slow_rotate(row, base.kind, base.group, None if signs is None else signs.tolist(), inverse)
            for row in x.tolist()
        ]
        assert bits(ours) == np.array(slow, np.float32).view(np.int32).tolist()


@pytest.mark.parametrize("group", sorted(STAGES))
def test_stage_table(group):
    assert list(stages(group)) == STAGES[group]


def test_one_multiply_by_the_rounded_norm():
    assert np.float32(norm(8)).view(np.uint32) == 0x3EB504F3
    assert {g: norm(g) for g in (4, 16, 64, 256, 1024, 4096)} == {
        4: 0.5,
        16: 0.25,
        64: 1 / 8,
        256: 1 / 16,
        1024: 1 / 32,
        4096: 1 / 64,
    }
    x = torch.zeros(1000, 8)
    x[:, 0] = torch.rand(1000)
    product, quotient = x[:, :1] * norm(8), x[:, :1] / torch.tensor(8.0).sqrt()
    assert not torch.equal(product, quotient)  # so the test can tell them apart
    assert torch.equal(hq.rotate(x, "sylvester:8"), product.expand(-1, 8))


# ---- what the matrices are ----------------------------------------------------------------------


@pytest.mark.parametrize("spec", SYLVESTER[:10] + REGULAR[:5])
def test_dense_is_what_the_butterflies_compute(spec):
    rotation = parse(spec)
    rotation = Rotation(rotation.kind, rotation.group, random_signs(rotation.group))
    x = torch.randint(-100, 101, (3, 2 * rotation.group)).to(torch.float32)  # sums of integers are exact
    whole = (rotation.dense() * rotation.group**0.5).round()
    sums = (x.view(3, 2, -1).to(torch.float64) @ whole).view(3, -1)
    assert torch.equal(hq.rotate(x, rotation), sums.to(torch.float32) * norm(rotation.group))
    assert whole.abs().eq(1).all()


@pytest.mark.parametrize("spec", SYLVESTER[:10] + REGULAR[:5])
def test_dense_is_orthonormal_and_symmetric(spec):
    h = parse(spec).dense()
    assert torch.allclose(h @ h.T, torch.eye(len(h), dtype=torch.float64), atol=1e-13, rtol=0)
    assert torch.equal(h, h.T)


def test_regular_rows_sum_to_one():
    for spec in REGULAR[:5]:
        h = parse(spec).dense()
        assert torch.equal(h.sum(0), torch.ones(len(h), dtype=torch.float64))
    constant = torch.full((1, 512), 3.0)
    assert torch.equal(hq.rotate(constant, "regular:256"), constant)


def test_regular_is_sylvester_with_signs_and_a_permutation():
    d, p = np.diag([1, 1, 1, -1]), np.eye(4, dtype=int)[[0, 2, 1, 3]]
    dk = sk = pk = rk = np.ones((1, 1), dtype=int)
    for power in range(1, 5):
        dk, sk, pk, rk = np.kron(dk, d), np.kron(sk, S4), np.kron(pk, p), np.kron(rk, H4)
        assert (dk @ sk @ pk @ dk == rk).all()
        group = 4**power
        assert (parse(f"regular:{group}").dense().numpy() * 2**power == rk).all()
        assert (parse(f"sylvester:{group}").dense().numpy() * 2**power == sk).all()


def test_signs_multiply_from_the_left():
    signs = random_signs(16)
    assert torch.equal(
        Rotation("sylvester", 16, signs).dense(), torch.diag(signs.double()) @ parse("sylvester:16").dense()
    )


ALL_KINDS = [
    *(parse(f"sylvester:{2**p}") for p in range(3, 10)),
    *(parse(f"regular:{4**p}") for p in range(2, 5)),
    *(Rotation("sylvester", 2**p, random_signs(2**p)) for p in range(3, 10)),
    *(Rotation("regular", 4**p, random_signs(4**p)) for p in range(2, 5)),
    *(Rotation("matrix", 2**p, matrix=random_orthogonal(2**p)) for p in range(3, 10)),
    Rotation("matrix", matrix=random_orthogonal(96)),
]


@pytest.mark.parametrize("rotation", ALL_KINDS, ids=str)
def test_n20_the_product_is_kept(rotation):
    x, w = torch.randn(8, 3 * rotation.group), torch.randn(12, 3 * rotation.group)
    xr, wr = hq.rotate(x, rotation).double(), hq.rotate(w, rotation).double()
    expected = x.double() @ w.double().T
    assert (xr @ wr.T - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("rotation", ALL_KINDS, ids=str)
def test_inverse(rotation):
    x = torch.randn(4, 2 * rotation.group)
    assert (hq.rotate(hq.rotate(x, rotation), rotation, inverse=True) - x).norm() <= 1e-6 * x.norm()
    dense = hq.rotate(torch.eye(rotation.group), rotation).double()
    assert (dense - rotation.dense()).abs().max() <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_n19_nothing_overflows_or_is_rounded_to_16_bits(dtype):
    x = torch.full((1, 4096), 2000.0, dtype=dtype)
    y = hq.rotate(x, "sylvester:4096")
    assert y.dtype == torch.float32 and y[0, 0] == 128000 and not y[0, 1:].any()
    x = torch.randn(3, 256).to(dtype)
    assert torch.equal(hq.rotate(x, "regular:256"), hq.rotate(x.float(), "regular:256"))


def test_input_is_left_alone():
    for shape in ((1, 256), (4, 256), (3, 2, 16)):
        x = torch.randn(shape)
        for spec in ("none", "sylvester:16", "regular:16"):
            before = x.clone()
            y = hq.rotate(x, spec)
            y.fill_(7)
            assert torch.equal(x, before)


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("group", [0, 1, 2, 3, 8, 32, 48, 128, 512, 16384, -4])
def test_b11_regular_needs_a_power_of_four(group):
    with pytest.raises(RotationError, match=rf"'regular:{group}'.*power of four from 4 to 4096.*regular:256"):
        Rotation("regular", group)


@pytest.mark.parametrize("group", [0, 1, 3, 12, 8192, -2])
def test_sylvester_needs_a_power_of_two(group):
    with pytest.raises(RotationError, match=rf"'sylvester:{group}'.*power of two from 2 to 4096"):
        Rotation("sylvester", group)


def test_b11_k_that_the_group_does_not_divide():
    with pytest.raises(
        GroupError, match=r"K=320 .* group 256 .*'regular:256'.*largest is 'regular:64'.*rotation='none'"
    ):
        hq.rotate(torch.ones(2, 320), "regular:256")
    with pytest.raises(GroupError, match=r"K=3 .* group 4 .*group that divides K, or"):
        hq.rotate(torch.ones(2, 3), "regular:4")


@pytest.mark.parametrize(
    "text",
    ["", "hadamard", "sylvester", "sylvester:", "sylvester:x", "none:1", "regular:-4", "regular:4.0", "regular 4"],
)
def test_unreadable_strings(text):
    with pytest.raises(RotationError, match="a rotation is written 'none', 'sylvester:G'"):
        parse(text)


def test_matrix_must_be_orthonormal():
    q = random_orthogonal(16)
    for bad in (q * 1.001, q + 1e-4, torch.ones(16, 16), torch.full((16, 16), float("nan"))):
        with pytest.raises(RotationError, match=r"not orthonormal.*torch.linalg.qr"):
            Rotation("matrix", matrix=bad)
    unnormalized = parse("sylvester:16").dense() * 4
    with pytest.raises(RotationError, match=r"divide a ±1 Hadamard matrix by sqrt\(group\)"):
        Rotation("matrix", matrix=unnormalized)
    for wrong in (q[:8], q[None], torch.tensor(1.0)):
        with pytest.raises(ShapeError, match="matrix has shape"):
            Rotation("matrix", 16, matrix=wrong)
    with pytest.raises(RotationError, match="needs its tensor"):
        parse("matrix:16")
    with pytest.raises(RotationError, match="only kind 'matrix'"):
        Rotation("sylvester", 16, matrix=q)


def test_signs_must_be_signs():
    with pytest.raises(RotationError, match=r"each sign must be \+1 or -1"):
        Rotation("sylvester", 4, torch.tensor([1, -1, 0, 1]))
    with pytest.raises(ShapeError, match="signs has shape"):
        Rotation("sylvester", 4, torch.ones(8))
    for kind in ("none", "matrix"):
        with pytest.raises(RotationError, match="take signs"):
            Rotation(kind, 1, torch.ones(1), torch.ones(1, 1) if kind == "matrix" else None)


def test_unknown_kind():
    with pytest.raises(UnknownChoice, match=r"rotation kind 'walsh'.*none, sylvester, regular, matrix"):
        Rotation("walsh", 4)  # type: ignore[arg-type]
    with pytest.raises(RotationError, match="'none' has no group"):
        Rotation("none", 4)


# ---- fitting, names, equality -------------------------------------------------------------------


@pytest.mark.parametrize(("k", "regular", "sylvester"), [
    (1, None, None), (2, None, "sylvester:2"), (8, "regular:4", "sylvester:8"), (12, "regular:4", "sylvester:4"),
    (32, "regular:16", "sylvester:32"), (96, "regular:16", "sylvester:32"), (100, "regular:4", "sylvester:4"),
    (3420, "regular:4", "sylvester:4"), (4304, "regular:16", "sylvester:16"), (512, "regular:256", "sylvester:256"),
    (0, None, None),
])  # fmt: skip
def test_s4_largest_group_that_divides(k, regular, sylvester):
    for spec, expected in (("regular:256", regular), ("sylvester:256", sylvester)):
        fitted = parse(spec).fit(k)
        assert (None if fitted is None else str(fitted)) == expected
    assert str(NONE.fit(k)) == ("None" if k == 0 else "none")


def test_s4_fit_within_a_block():
    assert parse("regular:256").fit(96, multiple=32) == parse("regular:16")
    for k in (1, 8, 12, 100, 3420, 4304):
        assert parse("regular:256").fit(k, multiple=32) is None
    assert NONE.fit(40, multiple=16) is None


def test_tensors_have_one_size():
    signed = Rotation("regular", 256, random_signs(256))
    assert signed.fit(512) is signed and signed.fit(96) is None
    matrix = Rotation("matrix", matrix=random_orthogonal(12))
    assert matrix.group == 12 and matrix.fit(24) is matrix and matrix.fit(16) is None


@pytest.mark.parametrize("spec", ["none", *SYLVESTER, *REGULAR])
def test_parse_and_print(spec):
    assert str(parse(spec)) == parse(spec).spec == spec
    assert parse(parse(spec)) == parse(spec)


def test_equality_and_hash():
    signs, q = random_signs(16), random_orthogonal(16)
    same = [Rotation("sylvester", 16, signs), Rotation("sylvester", 16, signs.clone().int())]
    different = [
        *same[:1],
        Rotation("sylvester", 16, -signs),
        parse("sylvester:16"),
        parse("regular:16"),
        parse("sylvester:64"),
        NONE,
        Rotation("matrix", matrix=q),
        Rotation("matrix", matrix=q.T),
    ]
    assert same[0] == same[1] and hash(same[0]) == hash(same[1])
    assert [a == b for a in different for b in different] == [a is b for a in different for b in different]
    assert parse("none") != "none"
    assert str(same[0]) == "sylvester:16+signs" and same[0].spec == "sylvester:16"
    for rotation in different:
        assert pickle.loads(pickle.dumps(rotation)) == rotation and copy.deepcopy(rotation) == rotation


def test_to():
    rotation = Rotation("sylvester", 16, random_signs(16))
    assert rotation.to("cpu") is rotation and NONE.to("meta") is NONE
    moved = rotation.to("meta")
    assert moved.signs is not None and moved.signs.is_meta and str(moved) == str(rotation)


def test_trusted_reads_no_values():
    signs = torch.empty(16, device="meta")
    assert trusted("sylvester:16", signs, None).signs is signs
    assert trusted("matrix:4", None, torch.empty(4, 4, device="meta")).group == 4
    assert trusted("none", None, None) == NONE


def test_default_device_does_not_matter():
    with torch.device("meta"):
        assert norm(8) == np.float32(1 / np.sqrt(8))
