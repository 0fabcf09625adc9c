"""What linears read: the same figures as from hooks on the whole model, in bounded memory."""

import pytest
import torch
from tiny_llama import tiny_llama
from torch import nn

from hadaquant.calibrate import capture, token_batches
from hadaquant.calibrate.blocks import causal_lm, find_chain
from hadaquant.errors import DtypeError, LayerError, ShapeError


def linears(model):
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def batches(windows=4, length=32, batch=2):
    return token_batches(torch.randint(0, 256, (windows * length,)), length, windows, batch)


def seen_by_hooks(model, data, forward=causal_lm):
    """All inputs of each linear in one piece: [rows, K] float64."""
    seen = {name: [] for name in linears(model)}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: seen[name].append(args[0].reshape(-1, args[0].shape[-1]).double())
        )
        for name in seen
    ]
    with torch.no_grad():
        for x in data:
            forward(model, x)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in seen.items() if parts}


def assert_product(found, a, b):
    """found is aᵀb, up to float32 sums over the rows of one batch and inputs rounded apart by as much."""
    bound = 2 * a.shape[0] * 2.0**-24 * (a.abs().T @ b.abs())
    assert ((found - a.T @ b).abs() <= bound).all()


def gathered(model, data, **options):
    return {name: s for step in capture(model, data, linears(model), **options) for name, s in step.items()}


@pytest.mark.parametrize("stepwise", [False, True])
def test_figures_are_those_of_the_whole_model(stepwise):
    model, data = tiny_llama(), batches()
    truth = seen_by_hooks(model, data)
    found = gathered(model, data, gram=True, rows=8, stepwise=stepwise)
    assert found.keys() == truth.keys()
    for name, x in truth.items():
        s = found[name]
        assert (s.count, s.nonfinite) == (len(x), 0)
        assert_product(s.gram, x, x)
        torch.testing.assert_close(s.absmax.double(), x.abs().amax(0))
        distances = torch.cdist(s.sample.double(), x).amin(1)
        assert s.sample.shape == (8, x.shape[1]) and distances.max() < 1e-5


def test_steps_are_blocks_then_what_is_outside():
    model, data = tiny_llama(), batches()
    steps = [list(step) for step in capture(model, data, linears(model))]
    assert [len(step) for step in steps] == [7, 7, 1]
    assert all(name.startswith("model.layers.1.") for name in steps[1]) and steps[2] == ["lm_head"]


@pytest.mark.parametrize("wanted", [0, 1])
def test_blocks_behind_the_last_that_is_wanted_do_not_run(wanted):
    model, data = tiny_llama(), batches()
    runs = []
    for i, block in enumerate(model.model.layers):
        block.register_forward_pre_hook(lambda *_, i=i: runs.append(i))
    find_chain(model, data, causal_lm)
    before = len(runs)
    runs.clear()
    names = [n for n in linears(model) if f"layers.{wanted}." in n]
    (step,) = capture(model, data, names)
    assert set(step) == set(names)
    # once to see what reads what, once to gather, and the blocks before hand their outputs on
    after = sorted(runs[before:])
    assert after == sorted([0] * len(data) * wanted + [wanted] * (1 + len(data)))


def test_stepwise_gives_readers_of_one_tensor_in_the_order_of_calls():
    model, data = tiny_llama(), batches()
    names = [n for n in linears(model) if "layers.0" in n]
    steps = [[n.rpartition(".")[2] for n in step] for step in capture(model, data, reversed(names), stepwise=True)]
    assert [sorted(step) for step in steps] == [
        ["k_proj", "q_proj", "v_proj"],
        ["o_proj"],
        ["gate_proj", "up_proj"],
        ["down_proj"],
    ]


def test_later_statistics_are_of_the_changed_model():
    model, data = tiny_llama(), batches()
    found = {}
    for step in capture(model, data, linears(model), gram=True):
        found |= step
        if "model.layers.0.mlp.down_proj" in step:
            nn.init.zeros_(model.model.layers[0].mlp.down_proj.weight)
            nn.init.zeros_(model.model.layers[0].self_attn.o_proj.weight)
    changed = seen_by_hooks(model, data)
    name = "model.layers.1.mlp.up_proj"
    assert_product(found[name].gram, changed[name], changed[name])


def test_coded_inputs_are_gathered_in_place_of_the_inputs():
    model, data = tiny_llama(), batches()
    name = "model.layers.1.self_attn.q_proj"
    (step,) = capture(model, data, [name], gram=True, coded=lambda _, x: x.round())
    x = seen_by_hooks(model, data)[name]
    assert_product(step[name].gram, x.round(), x.round())


def test_no_hook_stays_when_the_caller_stops_early():
    model, data = tiny_llama(), batches()
    steps = capture(model, data, linears(model))
    next(steps)
    steps.close()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


class Skipping(nn.Module):
    """A list of layers whose order of calls is not that of the list, one of them called never, one twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        y = self.layers[0](self.layers[2](x))
        return y + self.layers[1](x) + self.layers[2](y)


def test_a_model_that_is_no_chain_is_run_whole(monkeypatch):
    monkeypatch.setitem(capture.__globals__, "BUDGET", 2 * 8 * 16 * 16)
    model, data = Skipping(), [torch.randn(5, 16) for _ in range(3)]
    run = lambda model, x: model(x)  # noqa: E731
    assert find_chain(model, data, run) is None
    steps = list(capture(model, data, linears(model), gram=True, forward=run))
    assert [list(step) for step in steps] == [["layers.2", "layers.0"], ["layers.1", "layers.3"]]
    found = {name: s for step in steps for name, s in step.items()}
    truth = seen_by_hooks(model, data, run)
    assert {name: s.count for name, s in found.items()} == {
        "layers.0": 15,
        "layers.1": 15,
        "layers.2": 30,
        "layers.3": 0,
    }
    for name, x in truth.items():
        assert_product(found[name].gram, x, x)


def test_blocks_whose_other_arguments_follow_the_data_are_run_whole():
    class Block(nn.Linear):
        def forward(self, x, shift):
            return super().forward(x) + shift

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Block(8, 8), Block(8, 8)])

        def forward(self, x):
            shift = x.mean()
            for layer in self.layers:
                x = layer(x, shift)
            return x

    run = lambda model, x: model(x)  # noqa: E731
    assert find_chain(Model(), [torch.ones(2, 8), torch.ones(2, 8)], run) is not None
    assert find_chain(Model(), [torch.ones(2, 8), torch.zeros(2, 8)], run) is None


def test_rows_with_nan_or_inf_are_counted_and_left_out():
    model = nn.Sequential(nn.Linear(4, 4))
    x = torch.ones(6, 4)
    x[1, 2], x[4, 0] = float("nan"), float("inf")
    (step,) = capture(model, [x, x], ["0"], gram=True, rows=3, forward=lambda model, x: model(x))
    s = step["0"]
    assert (s.count, s.nonfinite) == (8, 4)
    assert torch.equal(s.gram, torch.full((4, 4), 8.0, dtype=torch.float64))
    assert torch.equal(s.sample, torch.ones(3, 4)) and torch.equal(s.absmax, torch.ones(4))


def test_the_sample_is_drawn_evenly():
    model = nn.Sequential(nn.Linear(1, 1))
    data = [torch.arange(i * 500.0, (i + 1) * 500.0)[:, None] for i in range(20)]
    (step,) = capture(model, data, ["0"], rows=400, forward=lambda model, x: model(x))
    sample = step["0"].sample.flatten()
    assert sample.unique().numel() == 400
    # mean and spread of 400 numbers drawn from 0 ... 9999, each within four standard errors
    assert abs(sample.mean() - 5000) < 4 * 2887 / 20
    assert abs(sample.std() - 2887) < 4 * 2887 / 20


def test_windows_are_spread_over_the_text():
    ids = torch.arange(1003)
    found = token_batches(ids, 100, 4, 2)
    assert [tuple(b.shape) for b in found] == [(2, 100), (2, 100)]
    assert torch.cat(found)[:, 0].tolist() == [0, 200, 500, 700]
    assert [tuple(b.shape) for b in token_batches(ids, 100, 64, 8)] == [(5, 100), (5, 100)]
    with pytest.raises(ShapeError, match="100 or more"):
        token_batches(ids[:99], 100, 4)


@pytest.mark.parametrize("more", [{"batch": 0}, {"windows": 0}, {"window": 0}, {"batch": -1}], ids=str)
def test_numbers_below_one_are_refused(more):
    with pytest.raises(ShapeError, match=r"window=\d+, windows=\d+, batch=-?\d, but 1 or more of each is needed"):
        token_batches(torch.arange(1000), **{"window": 100, "windows": 4, **more})


@pytest.mark.parametrize("ids", [torch.rand(1000), torch.ones(1000, dtype=torch.bool), [1] * 1000], ids=type)
def test_ids_are_integers(ids):
    with pytest.raises(DtypeError, match=r"but a torch\.Tensor of integers is needed; give the token ids"):
        token_batches(ids, 100, 4)
    short = token_batches(torch.arange(100, dtype=torch.int16), 50, 2)
    assert [batch.dtype for batch in short] == [torch.int64] * 2


def test_ids_of_a_batch_are_told_to_be_flattened():
    with pytest.raises(ShapeError, match=r"\(1, 1000\), but one dimension is needed; flatten it, or pick a row"):
        token_batches(torch.arange(1000)[None], 100, 4)


def modes(model):
    return {name: module.training for name, module in model.named_modules()}


def test_each_module_gets_back_its_mode():
    model = tiny_llama().train()
    model.model.layers[0].eval()
    before, seen = modes(model), set()
    for _ in capture(model, batches(), linears(model)):
        seen |= set(modes(model).values())
    assert seen == {False} and modes(model) == before
    steps = capture(model, batches(), linears(model))
    next(steps)
    steps.close()
    assert modes(model) == before


def test_any_iterable_of_batches_but_an_empty_one():
    model, data = tiny_llama(), batches()
    names = ["model.layers.1.mlp.up_proj", "lm_head"]
    (first, last), (again, also) = (capture(model, given, names, gram=True) for given in (data, iter(data)))
    for ours, theirs in ((first, again), (last, also)):
        assert all(torch.equal(ours[name].gram, theirs[name].gram) for name in ours) and ours.keys() == theirs.keys()
    with pytest.raises(LayerError, match=r"LlamaForCausalLM.*no batches"):
        next(capture(model, iter(()), names))
