"""The test on the model: what is measured, what it makes of the layers' verdict, and that the model stays whole."""

import math

import pytest
import torch
from tiny_llama import tiny_llama

import hadaquant as hq
from hadaquant.study import perplexity
from hadaquant.study.layers import Cell
from hadaquant.study.perplexity import Comparison, Gain
from hadaquant.study.run import Linears, StudyFolder
from hadaquant.study.trials import PER_LAYER, Bench, FormatTrial
from hadaquant.study.verdict import FormatVerdict, verdicts

IDS = torch.randint(256, (130,), generator=torch.Generator().manual_seed(0))
LAYER = "model.layers.0.mlp.down_proj"
YES, NO, UNSURE = (Gain(mean=m, low=low, high=high) for m, low, high in ((1, 0.5, 2), (-1, -2, -0.5), (0, -1, 1)))


def cell(format, rotation, gain=0.0, asked=None):
    numbers = dict.fromkeys(("quiet_db", "weights_db", "inputs_db"), 20.0)
    ends = {"low_db": gain - 0.1, "high_db": gain + 0.1}
    asked = (rotation,) if asked is None else asked
    return Cell(format=format, rotation=rotation, asked=asked, bits=4, db=20 + gain, gain_db=gain, **ends, **numbers)


@pytest.fixture
def bench(tmp_path):
    model = tiny_llama()
    names = {n: n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    return Bench(StudyFolder(tmp_path), model, Linears(names=names, kept={}), IDS, 64)


def test_a_trial_is_the_quantized_model_and_leaves_none_behind(bench):
    before = bench.model.get_submodule(LAYER)
    found = bench.trial("mxfp4", "random:64", {LAYER: cell("mxfp4", "sylvester:64+signs")}).result
    assert bench.model.get_submodule(LAYER) is before

    from hadaquant.study.rotations import random_signs

    model = tiny_llama()
    layer = hq.RotatedLinear.from_linear(model.get_submodule(LAYER), "mxfp4", random_signs(64))
    model.model.layers[0].mlp.down_proj = layer
    expected = perplexity(model, IDS, 64, lambda tokens: tiny_llama()(tokens).logits)
    assert torch.equal(found.losses, expected.losses) and torch.equal(found.divergence, expected.divergence)
    assert bench.full().result.divergence is None
    assert torch.equal(bench.full().result.losses, perplexity(tiny_llama(), IDS, 64).losses)


def test_the_model_is_whole_again_after_an_error(bench, monkeypatch):
    from hadaquant.study import trials

    def fail(*args):
        raise KeyboardInterrupt

    before = bench.model.get_submodule(LAYER)
    monkeypatch.setattr(trials, "perplexity", fail)
    with pytest.raises(KeyboardInterrupt):
        bench.trial("int8", "none", {LAYER: cell("int8", "none")})
    assert bench.model.get_submodule(LAYER) is before


def test_a_trial_is_not_run_twice(bench, monkeypatch):
    from hadaquant.study import trials

    told = []
    bench.tell = told.append
    first = bench.trial("int8", "none", {LAYER: cell("int8", "none")}).result
    monkeypatch.setattr(trials, "perplexity", None)
    # by whatever name, and in a later run
    again = bench.trial("plan", PER_LAYER, {LAYER: cell("int8", "none")})
    assert again.result is first and told == ["int8, none"]
    later = Bench(bench.folder, bench.model, bench.linears, IDS, 64).trial(
        "int8", "none", {LAYER: cell("int8", "none")}
    )
    torch.testing.assert_close(later.result.losses, first.losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(later.result.divergence, first.divergence, rtol=1e-6, atol=1e-9)
    # of another text it says nothing
    other = Bench(bench.folder, bench.model, bench.linears, IDS[2:], 64)
    with pytest.raises(TypeError):
        other.trial("int8", "none", {LAYER: cell("int8", "none")})


def trial(gain_db, uniform, own):
    verdict = FormatVerdict(format="int8", layers={}, rotation="regular:64", gain_db=gain_db)
    gains = {"regular:64": uniform, PER_LAYER: own}
    return FormatTrial(verdict=verdict, gains={n: Comparison(loss=UNSURE, divergence=g) for n, g in gains.items()})


@pytest.mark.parametrize(
    ("gain_db", "uniform", "own", "helps", "status", "allowed"),
    [
        (5.0, YES, UNSURE, "yes", "confirmed", ["regular:64"]),
        (5.0, UNSURE, YES, "yes", "confirmed", None),
        (5.0, UNSURE, UNSURE, "no difference", "not confirmed", None),
        (5.0, NO, UNSURE, "no", "withdrawn", ["none"]),
        (5.0, NO, NO, "no", "withdrawn", ["none"]),
        (-5.0, NO, UNSURE, "no", "confirmed", ["none"]),
        (-5.0, YES, UNSURE, "yes", "withdrawn", ["regular:64"]),
        (0.1, UNSURE, UNSURE, "no difference", "confirmed", None),
        (-5.0, UNSURE, UNSURE, "no difference", "not confirmed", None),
    ],
)
def test_the_verdict_is_confirmed_or_withdrawn(gain_db, uniform, own, helps, status, allowed):
    found = trial(gain_db, uniform, own)
    assert (found.helps, found.status, found.allowed) == (helps, status, allowed)


def test_the_layers_verdict_of_a_format():
    from hadaquant.study.layers import LayerResult

    def layer(name, **gains):
        cells = [cell("int8", "none")] + [cell("int8", f"{kind}:64", gain) for kind, gain in gains.items()]
        return LayerResult(name=name, shape=(4, 4), reads=name, cells=tuple(cells))

    layers = [layer("a", regular=6.0, sylvester=2.0), layer("b", regular=-3.0, sylvester=2.0), layer("c", regular=0.1)]
    (found,) = verdicts([*layers, LayerResult(name="d", shape=(4, 4), reads="d", skipped="never called")])
    assert found.layers == {"yes": 2, "no": 0, "no difference": 1}
    assert found.rotation == "sylvester:64" and found.helps == "yes"
    assert found.gain_db == pytest.approx(10 * math.log10(3 / (2 * 10**-0.2 + 1)))  # c as it is
