"""B9: whatever moves parameters moves these, both ways, with the same outputs."""

import pytest
import torch
from samples import SIGNED
from torch import nn

import hadaquant as hq

accelerate = pytest.importorskip("accelerate")


def model(name: str) -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 128), nn.Linear(128, 8)).eval()
    hq.quantize_(layers, name, SIGNED)
    return layers


@pytest.fixture(params=["int8", "nvfp4", "mxfp4"])
def case(request):
    layers, x = model(request.param), torch.randn(5, 128)
    with torch.no_grad():
        return layers, x, layers(x)


@torch.no_grad()
def test_b9_cpu_offload_keeps_weights_on_meta_between_calls(case):
    layers, x, expected = case
    accelerate.cpu_offload(layers, execution_device=torch.device("cpu"))
    for _ in range(2):
        assert all(p.is_meta for p in layers.parameters())
        assert torch.equal(layers(x), expected)


@torch.no_grad()
def test_b9_dispatched_to_cpu_and_disk(case, tmp_path):
    layers, x, expected = case
    accelerate.dispatch_model(
        layers,
        {"0": "cpu", "1": "cpu", "2": "disk", "3": "disk"},
        main_device="cpu",
        offload_dir=tmp_path,
        force_hooks=True,
    )
    assert all(p.is_meta for p in layers[2].parameters())
    for _ in range(2):
        assert torch.equal(layers(x), expected)


@torch.no_grad()
def test_b9_hooks_that_are_added_and_removed(case):
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules

    layers, x, expected = case
    for layer in layers:
        add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu", offload=True))
    assert layers[2].codes.is_meta and torch.equal(layers(x), expected)
    remove_hook_from_submodules(layers)
    assert not layers[2].codes.is_meta and torch.equal(layers(x), expected)


class GroupOffload:
    """Streamed offloading: ``param.data`` is replaced before a layer runs and put back after it."""

    def __init__(self, layer: nn.Module) -> None:
        self.home = {p: p.data for p in layer.parameters()}
        self.moves: list[str] = []
        layer.register_forward_pre_hook(self.onload)
        layer.register_forward_hook(self.offload)
        self.offload()

    def onload(self, *_: object) -> None:
        self.moves.append("on")
        for p, data in self.home.items():
            p.data = data.clone()

    def offload(self, *_: object) -> None:
        self.moves.append("off")
        for p in self.home:
            p.data = torch.full_like(p.data, 1)  # what a layer that kept the old tensor would read


@torch.no_grad()
def test_b9_data_swapped_under_the_layer(case):
    layers, x, expected = case
    groups = [GroupOffload(layer) for layer in layers if isinstance(layer, hq.RotatedLinear)]
    for _ in range(2):
        assert torch.equal(layers(x), expected)
    assert all(group.moves == ["off", "on", "off", "on", "off"] for group in groups)
    assert all(p.eq(1).all() for group in groups for p in group.home)


@torch.no_grad()
def test_b9_shared_inputs_while_weights_come_and_go():
    layers = [hq.RotatedLinear.from_linear(nn.Linear(128, 16), "int8", "regular:64") for _ in range(3)]
    x = torch.randn(4, 128)
    expected = [layer(x) for layer in layers]
    hq.share_input(layers)
    for layer in layers:
        GroupOffload(layer)
    for _ in range(2):
        assert all(torch.equal(layer(x), y) for layer, y in zip(layers, expected, strict=True))
