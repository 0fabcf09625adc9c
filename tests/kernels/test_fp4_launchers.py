"""The launchers of the FP4 products give each parameter of their kernels once, in its place, and cover the output."""

import pytest
import torch

import hadaquant as hq
from hadaquant.ops.plan import interpreting

if interpreting():
    pytest.skip("Gluon does not run in the interpreter", allow_module_level=True)

from hadaquant.kernels import gemm, gemm_fp4_hopper, gemm_fp4_parts, gemm_fp4_small, gemm_fp4_values


class Recorder:
    """Stands for a kernel: keeps what it is launched with, by name."""

    def __init__(self, kernel):
        self.names, self.grid, self.given = kernel.arg_names, None, {}

    def __getitem__(self, grid):
        self.grid = grid
        return self

    def __call__(self, *arguments, **named):
        launch = {"num_warps", "num_stages", "enable_fp_fusion", "launch_pdl", "maxnreg"}
        self.given = dict(zip(self.names, arguments, strict=False))
        constants = {name: value for name, value in named.items() if name not in launch}
        assert not set(constants) & set(self.given), "given twice"
        self.given |= constants
        assert set(self.given) == set(self.names)


def operands(m: int, n: int, k: int, format: str):
    return [hq.quantize(torch.randn(rows, k), format, backend="reference") for rows in (m, n)]


def launched(monkeypatch, module, kernel: str, run) -> Recorder:
    recorder = Recorder(getattr(module, kernel))
    monkeypatch.setattr(module, kernel, recorder)
    run()
    return recorder


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("m", [1, 4])
def test_few_rows(monkeypatch, format, with_bias, m):
    n, k = 100, 96
    x, w = operands(m, n, k, format)
    bias = torch.randn(n) if with_bias else None
    scales = (x.global_scale, w.global_scale)

    def run():
        all_of_it = (x.codes, x.scales, scales[0], w.codes, w.scales, scales[1], x.format, bias, torch.bfloat16)
        y = gemm.scaled_mm(*all_of_it, kernel="fp4_gemv")
        assert y.shape == (m, n) and y.dtype == torch.bfloat16

    found = launched(monkeypatch, gemm_fp4_small, "gemv_kernel", run)
    given = found.given
    assert given["K32"] == k // 32 and given["N"] == n and given["M"] == m
    assert torch.equal(given["x_ptr"], x.codes) and torch.equal(given["sw_ptr"], w.scales)
    assert given["HAS_GLOBAL"] == (format == "nvfp4") and given["HAS_BIAS"] == with_bias
    assert (given["bias_ptr"] is bias) == with_bias
    if format == "nvfp4":
        assert given["gx_ptr"] is scales[0] and given["gw_ptr"] is scales[1]
    assert (found.grid[0] - 1) * given["BN"] < n <= found.grid[0] * given["BN"]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("tile", gemm_fp4_values.SLICES_AND_WORDS, ids=str)
def test_rows_of_values(monkeypatch, format, tile):
    m, n, k = 40, 100, 96
    x, w = operands(m, n, k, format)
    monkeypatch.setattr(gemm_fp4_values, "unpack_words", lambda *_, **__: torch.zeros(m, k, dtype=torch.bfloat16))

    def run():
        all_of_it = (x.codes, x.scales, x.global_scale, w.codes, w.scales, w.global_scale, x.format, None)
        gemm.scaled_mm(*all_of_it, torch.bfloat16, kernel="fp4_value_rows", tile=tile)

    found = launched(monkeypatch, gemm_fp4_values, "value_rows_kernel", run)
    given = found.given
    assert given["K32"] == k // 32 and given["N"] == n and given["M"] == m and given["x_ptr"].shape == (m, k)
    assert torch.equal(given["w_ptr"], w.codes) and torch.equal(given["sw_ptr"], w.scales)
    assert (found.grid[0] - 1) * tile[1] < n <= found.grid[0] * tile[1]
    assert (found.grid[1] - 1) * tile[0] < m <= found.grid[1] * tile[0]
    assert (given["BM"], given["BN"]) == tile


@pytest.mark.parametrize(("m", "shares"), [(300, (256, 1, 1)), (64, (64, 4, 1)), (1, (16, 2, 1)), (300, (256, 1, 2))])
def test_hopper(monkeypatch, m, shares):
    rows, split, cut = shares
    n, k = 520, 1056
    x, w = operands(m, n, k, "nvfp4")
    values = torch.zeros(m, 1152, dtype=torch.bfloat16)
    y, bias = torch.zeros(m, n, dtype=torch.bfloat16), torch.randn(n)
    parts = Recorder(gemm_fp4_parts.add_parts_kernel)
    monkeypatch.setattr(gemm_fp4_parts, "add_parts_kernel", parts)

    def run():
        gemm_fp4_hopper.multiply(
            values, x.global_scale, w.codes, w.scales, w.global_scale, bias, y, w.format, shares=shares, programs=132
        )

    found = launched(monkeypatch, gemm_fp4_hopper, "fp4_mm_hopper", run)
    tiles = -(-m // rows) * -(-n // 128)
    assert found.grid == (min(132, tiles * split),) and found.given["SPLIT"] == split and found.given["K"] == k
    assert found.given["x_desc"].block_shape == [rows, 64] and (found.given["x_cut_desc"] is None) == (cut == 1)
    assert (parts.grid is not None) == (split > 1)
    if split > 1:
        assert parts.given["parts_ptr"].shape == (split, n, m)
        assert parts.grid[0] * parts.given["BN"] >= n and parts.grid[1] * parts.given["BM"] >= m


@pytest.mark.parametrize(
    ("shape", "rows", "split", "cut"),
    [
        ((64, 4096, 4096), 64, 4, 1),
        ((64, 8448, 4096), 64, 2, 1),
        ((64, 8576, 4096), 64, 1, 1),
        ((64, 1024, 1024), 64, 2, 1),
        ((64, 1024, 512), 64, 1, 1),
        ((1024, 14336, 4096), 256, 1, 2),
        ((4096, 4096, 4096), 256, 1, 1),
    ],
)
def test_work_is_shared_so_that_multiprocessors_end_together(shape, rows, split, cut):
    assert gemm_fp4_hopper.shares_of(shape, rows, 132) == (rows, split, cut)
