"""A study's folder: written layer by layer, gone on with after a kill; and inputs that cannot be measured."""

import json
import math
from dataclasses import replace

import pytest
import torch
from tiny_llama import tiny_llama
from torch import nn

from hadaquant.checkpoint.source import Checkpoint
from hadaquant.errors import AlreadyQuantized, CheckpointError, LayerError, PatternError, ShapeError
from hadaquant.study import run
from hadaquant.study.run import Linears, Settings, StudyFolder, linears_of, study_layers

SETTINGS = Settings(
    model="tiny",
    fingerprint="sha256:0",
    calibration="text.txt",
    digest="0",
    formats=("int8",),
    rotations=("none", "regular:16"),
    windows=4,
    window=32,
    rows=20,
)
IDS = torch.randint(16, (200,), generator=torch.Generator().manual_seed(0))
#: The four of the text's six windows that are spread over it.
WINDOWS = IDS[:192].view(6, 32)[torch.arange(4) * 6 // 4]


class Toy(nn.Module):
    """Linears that share an input, that read a NaN now and then or always, and that are never called."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.up, self.gate, self.sometimes, self.always, self.never = (nn.Linear(32, 16) for _ in range(5))

    def forward(self, ids, use_cache):
        x = self.embed(ids)
        self.up(x), self.gate(x), self.always(x * math.nan)
        return self.sometimes(torch.where(ids[..., None] == 3, math.nan, x))


NAMES = ("up", "gate", "sometimes", "always", "never")


def begun(path, settings=SETTINGS):
    folder = StudyFolder(path)
    folder.begin(settings)
    return folder


def toy_study(folder, names=NAMES, progress=lambda *_: None):
    return study_layers(folder, SETTINGS, Toy(), Linears(names={n: n for n in names}, kept={}), IDS, progress)


def test_every_layer_is_measured_or_says_why(tmp_path):
    torch.manual_seed(0)
    toy = Toy()
    torch.manual_seed(0)
    found = {r.name: r for r in toy_study(begun(tmp_path / "study"))}
    assert found["up"].tokens == found["gate"].tokens == 128 and found["up"].rows == 20
    absmax = toy.embed(WINDOWS).abs().amax((0, 1))
    assert found["up"].ratio == absmax.max().item() / absmax.median().item()
    assert found["gate"].reads == found["up"].reads == "up" and found["sometimes"].reads == "sometimes"
    hurt = int((WINDOWS == 3).sum())
    assert found["sometimes"].nonfinite == hurt > 0 and found["sometimes"].cells
    assert found["always"].skipped == "all of its 128 inputs hold NaN or Inf"
    assert found["never"].skipped == "the text never calls it"
    assert [len(found[name].cells) for name in NAMES] == [2, 2, 2, 0, 0]


def test_nothing_to_measure_is_an_error(tmp_path):
    with pytest.raises(LayerError, match=r"no linear could be measured \(always: all of its .*; never: the text never"):
        toy_study(begun(tmp_path / "study"), ("always", "never"))


def test_too_little_text(tmp_path):
    with pytest.raises(ShapeError, match=r"\[32 or more\]"):
        study_layers(begun(tmp_path / "s"), SETTINGS, Toy(), Linears(names={"up": "up"}, kept={}), IDS[:31])


def test_a_killed_run_goes_on(tmp_path, monkeypatch):
    whole = [r.to_dict() for r in toy_study(begun(tmp_path / "whole"))]
    measured = []

    def killed(name, *args, **fields):
        measured.append(name)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return real(name, *args, **fields)

    real = run.measure
    monkeypatch.setattr(run, "measure", killed)
    torch.manual_seed(0)
    with pytest.raises(KeyboardInterrupt):
        toy_study(begun(tmp_path / "study"))
    lines = tmp_path / "study" / "layers.jsonl"
    assert measured == ["up", "gate", "sometimes"]
    assert [json.loads(line)["name"] for line in lines.read_text().splitlines()] == ["up", "gate", "always"]
    # the kill may come in the middle of a line
    lines.write_text(lines.read_text() + '{"name": "some')
    done = []
    torch.manual_seed(0)
    again = toy_study(begun(tmp_path / "study"), progress=lambda name, i, n: done.append((i, n)))
    assert measured[3:] == ["sometimes"]
    assert {r.name for r in again} == set(NAMES) and done[0] == (3, 5) and done[-1] == (5, 5)
    assert len(lines.read_text().splitlines()) == 5
    assert len(whole) == 5

    # once all is there, the model does not run again
    monkeypatch.setattr(run, "capture", None)
    assert [r.to_dict() for r in toy_study(begun(tmp_path / "study"))] == [r.to_dict() for r in again]


def test_a_resumed_run_finds_what_a_whole_one_finds(tmp_path):
    torch.manual_seed(0)
    whole = toy_study(begun(tmp_path / "whole"))
    folder = begun(tmp_path / "half")
    (folder.path / "layers.jsonl").write_text((tmp_path / "whole" / "layers.jsonl").read_text().split("\n")[0] + "\n")
    torch.manual_seed(0)
    assert toy_study(folder) == whole


def test_settings_of_another_study_are_refused(tmp_path):
    begun(tmp_path / "study")
    begun(tmp_path / "study")  # the same are fine
    with pytest.raises(CheckpointError, match=r"other settings \(rows 20, now 64\); give another --out"):
        begun(tmp_path / "study", replace(SETTINGS, rows=64))
    with pytest.raises(CheckpointError, match="fingerprint 'sha256:0', now 'sha256:1'"):
        begun(tmp_path / "study", replace(SETTINGS, fingerprint="sha256:1"))


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match="is not empty and holds no study"):
        begun(tmp_path)
    with pytest.raises(CheckpointError, match="No such file or directory"):
        begun(tmp_path / "none" / "study")
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]


# ---- which linears ---------------------------------------------------------------------------------


def test_linears_of_a_checkpoint(tiny):
    checkpoint, model = Checkpoint.open(tiny.source), tiny_llama()
    found = linears_of(checkpoint, model)
    assert len(found.names) == 14 and all(layer == name for layer, name in found.names.items())
    first = list(found.names)[:7]
    assert [name.rpartition(".")[2] for name in first] == [
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ]
    some = linears_of(checkpoint, model, skip=["mlp"], only=["layers.1"])
    assert list(some.names) == [n for n in found.names if "layers.1.self_attn" in n]
    assert some.kept["model.layers.1.mlp.up_proj"] == "matches skip pattern 'mlp'"
    assert some.kept["model.layers.0.self_attn.q_proj"] == "not among the layers that were studied"


def test_linears_that_are_not_there(tiny, tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(PatternError, match=r"'layer\.1'"):
        linears_of(Checkpoint.open(tiny.source), tiny_llama(), only=["layer.1"])
    with pytest.raises(LayerError, match="holds no linear to study"):
        linears_of(Checkpoint.open(tiny.source), tiny_llama(), skip=["model"])
    with pytest.raises(AlreadyQuantized):
        linears_of(Checkpoint.open(tiny.plain), tiny_llama())
    save_file({"embed.weight": torch.ones(4, 4), "norm.weight": torch.ones(4)}, tmp_path / "m.safetensors")
    with pytest.raises(LayerError, match=r"holds no linear to study \(named like an embedding"):
        linears_of(Checkpoint.open(tmp_path / "m.safetensors"), nn.Embedding(4, 4))
