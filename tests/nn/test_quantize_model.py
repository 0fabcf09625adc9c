"""quantize_: which layers are converted, which are kept and why, and what stays as it was."""

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import hadaquant as hq
from hadaquant.errors import AlreadyQuantized, LayerError, PatternError
from hadaquant.ops.checks import INT8_MAX_K

PARAMETRIZED = "its weight is computed by a parametrization"


class Block(nn.Module):
    def __init__(self, k: int = 64) -> None:
        super().__init__()
        self.q, self.up, self.down = nn.Linear(k, k), nn.Linear(k, 2 * k), nn.Linear(2 * k, k)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.q(x)))


class Model(nn.Module):
    def __init__(self, blocks: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.lm_head = nn.Linear(64, 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(x)


def reasons(report: hq.Report) -> dict[str, str]:
    return {layer.name: layer.reason for layer in report.kept}


def rotated(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, hq.RotatedLinear)]


# ---- what is converted --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "nvfp4", "mxfp4", "mxfp4-ceil", "mxfp4-even"])
def test_a_model_works_after_it(name):
    model, tokens = Model(2), torch.arange(32)[None]
    before = model(tokens)
    report = hq.quantize_(model, name, "regular:64")
    after = model(tokens)
    assert after.shape == before.shape
    assert (after - before).norm() < (0.03 if name == "int8" else 0.4) * before.norm()
    assert rotated(model) == [layer.name for layer in report.quantized]
    assert [layer.name for layer in report.kept] == ["lm_head"]
    assert report.bytes_before == 4 * (2 * 5 * 64 * 64 + 32 * 64)
    assert report.bytes_after == report.layers[-1].bytes_after + sum(
        cast(hq.RotatedLinear, model.get_submodule(layer.name)).quantized_weight().nbytes for layer in report.quantized
    )


def test_report_reads_well():
    text = str(hq.quantize_(Model(1), "int8", "regular:256"))
    first, *lines = text.splitlines()
    assert first == "3 layers quantized, 1 kept; 90,112 -> 29,696 bytes of weights"
    assert lines[0].startswith("  layers.0.q: int8, regular:64, error 0.00")
    assert lines[0].endswith("(group fitted: regular:256 does not divide K=64)")
    assert lines[-1] == "  lm_head: kept, matches skip pattern 'lm_head'"


def test_report_names_a_weight_with_nan():
    model = Model(1)
    with torch.no_grad():
        model.layers[0].q.weight[1, 2] = float("nan")
        model.layers[0].up.weight[0, 0] = float("inf")
    q, up, down = str(hq.quantize_(model, "int8", "regular:256")).splitlines()[1:4]
    fitted = "(group fitted: regular:256 does not divide K=64)"
    for line in (q, up):
        assert line.endswith(f"error nan {fitted} (it holds NaN or Inf)")
    assert "layers.0.down" in down and "NaN" not in down


def test_report_of_a_model_on_meta():
    with torch.device("meta"):
        model = Model(1)
    report = hq.quantize_(model, "nvfp4", "regular:16")
    assert "layers.0.q: nvfp4, regular:16\n" in str(report) and len(report.quantized) == 3
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_any_dtype(dtype):
    model: Any = nn.Sequential(nn.Linear(64, 8, dtype=dtype))
    weight = model[0].weight.detach().clone()
    (layer,) = hq.quantize_(model, "int8", "regular:64").quantized
    assert layer.error is not None and layer.error < 0.01
    expected = hq.quantize(weight.float(), "int8", rotation="regular:64")
    assert torch.equal(model[0].codes, expected.codes) and torch.equal(model[0].scales, expected.scales)
    assert model[0].bias.dtype == dtype and model[0].weight.dtype == dtype


# ---- what is kept, by name ----------------------------------------------------------------------


def test_c8_patterns():
    report = hq.quantize_(Model(), "int8", skip=["layers.1.", "lm_head"])
    assert set(reasons(report)) == {"layers.1.q", "layers.1.up", "layers.1.down", "lm_head"}
    assert reasons(report)["layers.1.q"] == "matches skip pattern 'layers.1.'"
    report = hq.quantize_(Model(2), "int8", skip="down")
    assert set(reasons(report)) == {"layers.0.down", "layers.1.down"}


def test_c8_a_pattern_that_matches_nothing_changes_nothing():
    model = Model(2)
    with pytest.raises(PatternError, match=r"'layers.7' matches no layer; the layers are layers.0.q, "):
        hq.quantize_(model, "int8", skip=["layers.0", "layers.7"])
    assert rotated(model) == []


def test_filter_fn():
    def only_up(module: nn.Module, name: str) -> bool:
        assert isinstance(module, nn.Linear)
        return name.endswith("up")

    report = hq.quantize_(Model(2), "int8", filter_fn=only_up)
    assert [layer.name for layer in report.quantized] == ["layers.0.up", "layers.1.up"]
    assert reasons(report)["layers.0.q"] == "filter_fn says no"


# ---- what is kept, by size ----------------------------------------------------------------------

SIZES = (1, 8, 12, 32, 96, 100, 3420, 4304)


@pytest.mark.parametrize(("name", "rotation", "groups"), [
    ("int8", "regular:256", [None, 4, 4, 16, 16, 4, 4, 16]),
    ("int8", "sylvester:256", [None, 8, 4, 32, 32, 4, 4, 16]),
    ("int8", "none", [0] * 8),
    ("nvfp4", "regular:256", [None, None, None, 16, 16, None, None, 16]),
    ("mxfp4", "sylvester:256", [None, None, None, 32, 32, None, None, None]),
])  # fmt: skip
def test_s4_largest_legal_group_or_high_precision(name, rotation, groups):
    model = nn.ModuleDict({f"k{k}": nn.Linear(k, 4) for k in SIZES})
    report = hq.quantize_(model, name, rotation)
    found = {layer.name: layer for layer in report.layers}
    for k, group in zip(SIZES, groups, strict=True):
        layer = found[f"k{k}"]
        expected = None if group is None else f"{rotation.partition(':')[0]}:{group}" if group else "none"
        assert layer.rotation == expected
        if expected is None:
            assert type(model[f"k{k}"]) is nn.Linear
            assert f"in_features {k}" in layer.reason
        else:
            converted = cast(hq.RotatedLinear, model[f"k{k}"])
            assert str(converted.rotation) == expected and converted(torch.randn(2, k)).shape == (2, 4)
            assert ("group fitted" in layer.reason) is (expected != rotation)


def test_s4_from_linear_and_quantize_refuse():
    for k in (1, 8, 12, 32, 96, 100, 3420, 4304):
        with pytest.raises(hq.HadaquantError):
            hq.RotatedLinear.from_linear(nn.Linear(k, 4), "int8", "regular:256")
        with pytest.raises(hq.HadaquantError):
            hq.quantize(torch.ones(2, k), "int8", rotation="regular:256")


def test_s4_rotations_with_tensors_are_not_shrunk():
    signs = hq.Rotation("regular", 64, torch.ones(64))
    report = hq.quantize_(nn.Sequential(nn.Linear(96, 4), nn.Linear(128, 4)), "int8", signs)
    assert "multiple of the group of regular:64+signs, whose tensors have one size" in reasons(report)["0"]
    assert [layer.name for layer in report.quantized] == ["1"]


def test_n18_too_wide_for_the_accumulator():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(INT8_MAX_K + 8, 2), nn.Linear(INT8_MAX_K, 2))
    report = hq.quantize_(model, "int8")
    assert "int32 accumulator" in reasons(report)["0"] and [layer.name for layer in report.quantized] == ["1"]


# ---- what is kept, by kind ----------------------------------------------------------------------


def test_a7_modules_that_read_weights_themselves():
    model = nn.ModuleDict({
        "attention": nn.MultiheadAttention(64, 4),
        "encoder": nn.TransformerEncoderLayer(64, 4, 128, batch_first=True),
        "decoder": nn.TransformerDecoderLayer(64, 4, 128),
        "plain": nn.Linear(64, 64),
    })  # fmt: skip
    model.eval()
    x = torch.randn(2, 5, 64)
    before = model["encoder"](x)
    report = hq.quantize_(model, "int8", "regular:64")
    assert [layer.name for layer in report.quantized] == ["plain"]
    assert reasons(report)["attention.out_proj"] == "its parent MultiheadAttention reads the weight itself"
    assert reasons(report)["encoder.linear1"] == "its parent TransformerEncoderLayer reads the weight itself"
    assert reasons(report)["decoder.linear2"] == "its parent TransformerDecoderLayer reads the weight itself"
    with torch.no_grad():  # the fused path of evaluation
        assert torch.allclose(model["encoder"](x), before, atol=1e-5)


class MyLinear(nn.Linear):
    pass


def test_a7_linears_that_are_not_plain():
    model = nn.ModuleDict({
        "old_norm": nn.Linear(64, 8),
        "new_norm": nn.utils.parametrizations.weight_norm(nn.Linear(64, 8)),
        "spectral": nn.utils.parametrizations.spectral_norm(nn.Linear(64, 8)),
        "mine": MyLinear(64, 8),
        "lazy": nn.LazyLinear(8),
        "convolution": nn.Conv1d(64, 8, 1),
        "embedding": nn.Embedding(8, 64),
    })  # fmt: skip
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(model["old_norm"])
    model["pruned"] = prune.random_unstructured(nn.Linear(64, 8), "weight", 0.5)
    x, before = (
        torch.randn(3, 64),
        {name: p.detach().clone() for name, p in model.named_parameters() if "lazy" not in name},
    )
    report = hq.quantize_(model, "int8", "regular:64")
    assert reasons(report) == {
        "old_norm": "its weight is computed by weight_norm",
        "new_norm": PARAMETRIZED,
        "spectral": PARAMETRIZED,
        "mine": "MyLinear, a subclass of nn.Linear, may use its weight in its own way",
        "lazy": "LazyLinear, a subclass of nn.Linear, may use its weight in its own way",
        "pruned": PARAMETRIZED,
    }
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters() if name in before)
    assert all(model[name](x).shape == (3, 8) for name in ("old_norm", "new_norm", "spectral", "mine", "pruned"))


def test_a7_an_old_t5_feed_forward():
    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wi, self.wo = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.relu(self.wi(x))
            if isinstance(self.wo.weight, torch.Tensor) and h.dtype != self.wo.weight.dtype != torch.int8:
                h = h.to(self.wo.weight.dtype)
            return self.wo(h)

    for dtype in (torch.float32, torch.bfloat16):
        model = FeedForward().to(dtype)
        x = torch.randn(3, 64).to(dtype)
        before = model(x)
        hq.quantize_(model, "int8", "regular:64")
        after = model(x)
        assert after.dtype == dtype and (after - before).norm() < 0.05 * before.norm()
        wo = cast(Any, model.wo)
        assert wo.weight.dtype == dtype and wo.weight.shape == (64, 128) and wo.weight.device.type == "cpu"


# ---- sharing ------------------------------------------------------------------------------------


def test_c2_tied_embedding():
    model = Model(1)
    model.lm_head.weight = model.embed.weight
    before = model.embed.weight.detach().clone()
    report = hq.quantize_(model, "int8", "regular:64")
    assert reasons(report) == {"lm_head": "matches skip pattern 'lm_head'"}
    assert model.lm_head.weight is model.embed.weight and torch.equal(model.embed.weight, before)
    model = Model(1)
    model.lm_head.weight = model.embed.weight
    before = model.embed.weight.detach().clone()
    report = hq.quantize_(model, "int8", "regular:64", skip=())
    assert reasons(report) == {"lm_head": "tied to embed.weight"}
    assert model.lm_head.weight is model.embed.weight and torch.equal(model.embed.weight, before)
    kept = next(layer for layer in report.layers if layer.name == "lm_head")
    assert kept.bytes_before == kept.bytes_after


def test_a7_shared_modules_stay_shared():
    linear, block = nn.Linear(64, 64), Block()
    model = nn.ModuleDict({"a": linear, "b": nn.Sequential(linear), "block": block, "again": block})
    report = hq.quantize_(model, "int8", "regular:64")
    assert isinstance(model["a"], hq.RotatedLinear) and model["a"] is cast(nn.Sequential, model["b"])[0]
    assert model["block"] is model["again"] and isinstance(block.q, hq.RotatedLinear)
    assert [layer.name for layer in report.layers] == ["a", "block.q", "block.up", "block.down"]


@pytest.mark.parametrize("order", [("body", "lm_head"), ("lm_head", "body")])
def test_a7_a_shared_module_is_kept_if_any_place_is_skipped(order):
    linear = nn.Linear(64, 64)
    model = nn.ModuleDict(dict.fromkeys(order, linear) | {"other": nn.Linear(64, 64)})
    report = hq.quantize_(model, "int8", "regular:64")
    assert model["body"] is model["lm_head"] is linear
    assert [layer.name for layer in report.quantized] == ["other"] and "lm_head" in reasons(report)[order[0]]


def test_tied_weights_of_two_linears():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    report = hq.quantize_(model, "int8", "regular:64")
    assert reasons(report) == {"0": "tied to 1.weight", "1": "tied to 0.weight"}
    assert model[1].weight is model[0].weight and isinstance(model[2], hq.RotatedLinear)


# ---- what is refused ----------------------------------------------------------------------------


def test_s7_twice():
    model: Any = Model(1)
    hq.quantize_(model, "int8", "regular:64")
    state = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(AlreadyQuantized, match=r"layers.0.q is already quantized \(int8, regular:64\)"):
        hq.quantize_(model, "nvfp4")
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    with pytest.raises(AlreadyQuantized, match="the model is already quantized"):
        hq.quantize_(model.layers[0].q, "int8")
    with pytest.raises(LayerError, match="quantized already"):
        hq.RotatedLinear.from_linear(model.layers[0].q, "int8")


def test_nothing_to_quantize():
    with pytest.raises(LayerError, match=r"'ReLU': it holds no nn.Linear"):
        hq.quantize_(nn.ReLU(), "int8")
    with pytest.raises(LayerError, match=r"itself a linear.*RotatedLinear.from_linear"):
        hq.quantize_(nn.Linear(8, 8), "int8")


def test_an_unknown_format_or_rotation_changes_nothing():
    model = Model(1)
    for arguments in (("fp8", "none"), ("int8", "regular:8"), ("int8", "hadamard")):
        with pytest.raises(hq.HadaquantError):
            hq.quantize_(model, *arguments)
    with pytest.raises(hq.HadaquantError, match="backend 'fast'"):
        hq.quantize_(model, "int8", backend="fast")
    assert rotated(model) == []


def test_old_weights_are_freed_one_by_one():
    import weakref

    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    alive = [weakref.ref(layer.weight) for layer in model]
    seen = []

    def counting(self, weight, original=hq.RotatedLinear.set_weight):
        seen.append(sum(ref() is not None for ref in alive))
        return original(self, weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hq.RotatedLinear, "set_weight", counting)
        hq.quantize_(model, "int8", "regular:64")
    assert seen == [4, 3, 2, 1]
