"""Whole models with codes that fit a text: what becomes of each layer, and that it is worth it."""

import pytest
import torch
from tiny_llama import tiny_llama
from torch import nn

import hadaquant as hq
from hadaquant.calibrate import METHODS, CalibratedLayer, Recipe, calibrate_, token_batches
from hadaquant.errors import AlreadyQuantized, LayerError, MismatchError, PatternError, UnknownChoice
from hadaquant.formats import get_format
from hadaquant.rotation import parse

LAYERS = 14


def batches(windows=8, batch=4):
    ids = torch.randint(0, 256, (windows * 64,), generator=torch.Generator().manual_seed(5))
    return token_batches(ids, 64, windows, batch)


def logits(model, data):
    with torch.no_grad():
        return torch.cat([model(x).logits for x in data])


def distance(model, data):
    full = logits(tiny_llama(), data)
    return ((logits(model, data) - full).norm() / full.norm()).item()


@pytest.mark.parametrize(("format", "rotation"), [("nvfp4", "none"), ("mxfp4", "sylvester:32"), ("int8", "regular:64")])
def test_outputs_are_nearer_than_rounded_to_nearest(format, rotation):
    data = batches()
    found = {}
    for method in METHODS:
        model = tiny_llama()
        report = calibrate_(model, format, rotation, data, method)
        assert [layer.method for layer in report.quantized] == [method] * LAYERS
        found[method] = distance(model, data)
    assert found["gptq+search"] < found["rtn"] and found["gptq"] < found["rtn"]


def test_rtn_is_quantize_():
    model, plain = tiny_llama(), tiny_llama()
    calibrate_(model, "mxfp4", "sylvester:32", recipe="rtn")
    hq.quantize_(plain, "mxfp4", "sylvester:32")
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_codes_are_of_the_contract_and_travel_like_any_others(tmp_path):
    model, data = tiny_llama(), batches()
    report = calibrate_(model, "nvfp4", "sylvester:16", data)
    name = "model.layers.1.mlp.down_proj"
    layer = model.get_submodule(name)
    assert (
        isinstance(layer, hq.RotatedLinear) and layer.format.name == "nvfp4" and str(layer.rotation) == "sylvester:16"
    )
    (row,) = [row for row in report.quantized if row.name == name]
    assert isinstance(row, CalibratedLayer) and row.rows == 8 * 64 and row.output_error < row.nearest_error
    hq.save(model, tmp_path / "model.safetensors")
    again = hq.load(tmp_path / "model.safetensors", tiny_llama())
    assert torch.equal(logits(again, data[:1]), logits(model, data[:1]))


def test_report_says_what_became_of_each_layer():
    model, data = tiny_llama(), batches()
    done = []
    report = calibrate_(
        model,
        "int8",
        "regular:64",
        data,
        Recipe(method="gptq", stepwise=False),
        skip=("lm_head", "layers.0.mlp"),
        filter_fn=lambda _, name: not name.endswith("k_proj"),
        progress=lambda *args: done.append(args),
    )
    reasons = {layer.name.rpartition(".")[2]: layer.reason for layer in report.kept}
    assert reasons["lm_head"] == "matches skip pattern 'lm_head'" and reasons["k_proj"] == "filter_fn says no"
    assert len(report.quantized) == 9 and len(report.kept) == 6
    assert [count for _, count, _ in done] == list(range(1, 10)) and {total for _, _, total in done} == {9}
    assert all(row.output_error < row.nearest_error and row.bytes_after < row.bytes_before for row in report.quantized)


def test_choices_give_each_layer_its_own():
    model, data = tiny_llama(), batches()
    choices = {
        "model.layers.0.self_attn.q_proj": (get_format("nvfp4"), parse("none")),
        "model.layers.0.self_attn.k_proj": (get_format("int8"), parse("regular:64")),  # reads the same tensor
        "model.layers.1.mlp.up_proj": (get_format("mxfp4"), parse("sylvester:32")),
    }
    report = calibrate_(model, "int8", batches=data, choices=choices)
    assert {row.name: (row.format, row.rotation) for row in report.quantized} == {
        name: (format.name, str(rotation)) for name, (format, rotation) in choices.items()
    }
    assert all(row.output_error < row.nearest_error for row in report.quantized if row.format != "int8")
    assert {row.reason for row in report.kept} == {"not among the choices"}


class TwoPaths(nn.Module):
    """A linear that is used and one that is not."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.used(x)


def run(model, x):
    return model(x)


def test_a_layer_that_is_never_called_is_rounded_to_nearest():
    model = TwoPaths()
    nearest = hq.quantize(model.unused.weight, "nvfp4")
    report = calibrate_(model, "nvfp4", batches=[torch.randn(64, 32)], forward=run)
    used, unused = sorted(report.quantized, key=lambda row: row.name == "unused")
    assert used.method == "gptq+search" and used.reason == ""
    assert unused.method == "rtn" and unused.reason == "(no batch reaches it: rounded to nearest)"
    assert torch.equal(model.unused.codes, nearest.codes)


@pytest.mark.parametrize("all_rows", [False, True])
def test_rows_with_nan_are_told(all_rows):
    model, x = TwoPaths(), torch.randn(64, 32)
    x[: 64 if all_rows else 3, 1] = float("nan")
    report = calibrate_(model, "int8", batches=[x], forward=run, filter_fn=lambda _, name: name == "used")
    (row,) = report.quantized
    if all_rows:
        assert row.method == "rtn" and row.reason == "(all 64 input rows hold NaN or Inf: rounded to nearest)"
    else:
        assert row.method == "gptq+search" and row.rows == 61
        assert row.reason == "(3 of 64 input rows hold NaN or Inf and were left out)"
        assert row.output_error <= row.nearest_error


def test_a_weight_with_nan_is_rounded_to_nearest():
    model = TwoPaths()
    with torch.no_grad():
        model.used.weight[3, 3] = float("nan")
    report = calibrate_(
        model, "mxfp4", batches=[torch.randn(64, 32)], forward=run, filter_fn=lambda _, name: name == "used"
    )
    assert report.quantized[0].reason == "(its weight holds NaN or Inf: rounded to nearest)"
    assert model.used.dequantized_weight()[3].isnan().all()
    model = TwoPaths()
    with torch.no_grad():
        model.used.weight[3, 3] = float("inf")
    used, unused = calibrate_(model, "mxfp4", recipe="rtn").quantized
    assert used.reason == "(it holds NaN or Inf)" and unused.reason == ""


def test_dead_channels_and_few_rows():
    """A Hessian of rank 3, with channels that are always zero."""
    model, x = TwoPaths(), torch.randn(3, 32)
    x[:, ::4] = 0
    full = model(x)
    report = calibrate_(model, "nvfp4", batches=[x], forward=run, filter_fn=lambda _, name: name == "used")
    assert report.quantized[0].output_error < report.quantized[0].nearest_error
    assert (model(x) - full).norm() < 0.2 * full.norm()


def test_memory_that_is_too_small_is_an_error_with_a_name(monkeypatch):
    def fail(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(calibrate_.__globals__, "_replace", fail)
    with pytest.raises(LayerError, match=r"used.*memory was too small.*smaller batches"):
        calibrate_(TwoPaths(), "int8", batches=[torch.randn(4, 32)], forward=run)


def modes(model):
    return {name: module.training for name, module in model.named_modules()}


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_each_module_keeps_its_mode(method):
    model = tiny_llama().train()
    model.model.layers[1].mlp.eval()
    before = modes(model)
    calibrate_(model, "mxfp4", "sylvester:32", batches(2, 1), method)
    assert isinstance(model.model.layers[0].mlp.up_proj, hq.RotatedLinear) and modes(model) == before


def test_each_module_keeps_its_mode_on_an_error():
    model = tiny_llama().train()
    before = modes(model)

    def fail(name, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        calibrate_(model, "int8", batches=batches(2, 1), progress=fail)
    assert modes(model) == before and caught.tb  # also while the error is still held


def test_batches_may_be_any_iterable():
    models = [TwoPaths(), TwoPaths()]
    models[1].load_state_dict(models[0].state_dict())
    data = [torch.randn(16, 32) for _ in range(4)]
    for model, given in zip(models, (data, (x for x in data)), strict=True):
        calibrate_(model, "nvfp4", batches=given, forward=run)
    assert torch.equal(models[0].used.codes, models[1].used.codes)
    with pytest.raises(LayerError, match="no batches"):
        calibrate_(TwoPaths(), "nvfp4", batches=iter(()), forward=run)


def test_a_model_that_is_not_of_transformers_needs_forward():
    model = TwoPaths()
    rule = r"TwoPaths.*takes no use_cache.*no language model of transformers; give forward=, a function of model and"
    with pytest.raises(LayerError, match=rule):
        calibrate_(model, "int8", batches=[torch.randn(4, 32)])
    assert type(model.used) is nn.Linear


def test_refusals():
    data = batches(2, 1)
    with pytest.raises(UnknownChoice, match=r"unknown method 'best': choose one of rtn, search, gptq, gptq\+search"):
        calibrate_(tiny_llama(), "int8", batches=data, recipe="best")
    with pytest.raises(LayerError, match="no batches"):
        calibrate_(tiny_llama(), "int8")
    with pytest.raises(LayerError, match=r"no nn\.Linear; nothing to quantize"):
        calibrate_(nn.Sequential(nn.ReLU()), "int8", batches=[torch.ones(1, 4)], forward=run)
    with pytest.raises(PatternError):
        calibrate_(tiny_llama(), "int8", batches=data, skip=("nothing",))
    model = tiny_llama()
    hq.quantize_(model, "int8")
    with pytest.raises(AlreadyQuantized):
        calibrate_(model, "int8", batches=data)


def test_set_weight_takes_only_codes_of_its_own_kind():
    linear = nn.Linear(64, 8)
    layer = hq.RotatedLinear.from_linear(linear, "nvfp4", "sylvester:16")
    better = hq.calibrate.search_scales(linear.weight, "nvfp4", "sylvester:16")
    layer.set_weight(better)
    assert torch.equal(layer.codes, better.codes) and torch.equal(layer.scales, better.scales)
    for other in (
        hq.quantize(linear.weight, "mxfp4", rotation="sylvester:16"),
        hq.quantize(linear.weight, "nvfp4", rotation="sylvester:32"),
        hq.quantize(linear.weight, "nvfp4", rotation="sylvester:16", scale_layout="tiled"),
    ):
        with pytest.raises(MismatchError, match="the weight's"):
            layer.set_weight(other)
