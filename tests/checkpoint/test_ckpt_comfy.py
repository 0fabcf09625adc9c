"""The ComfyUI layout, with comfy-kitchen's own CPU code as the oracle; and HyperFlow's pairs."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from ckpt_support import read_all, same_bits
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hadaquant as hq
from hadaquant.checkpoint.contents import describe
from hadaquant.errors import AlreadyQuantized, CheckpointError, HadaquantError

N, K = 96, 512


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0)) * 0.05


def comfy_file(folder, tmp_path, tensors: dict[str, Tensor], rotation: str, name: str = "c.safetensors") -> Path:
    out = tmp_path / name
    hq.quantize_checkpoint(folder(tensors), out, "int8", rotation, layout="comfy")
    return out


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


@pytest.mark.parametrize("rotation", ["regular:256", "regular:16", "none"])
def test_keys_and_settings(folder, tmp_path, weight, rotation) -> None:
    bias = torch.randn(N)
    path = comfy_file(folder, tmp_path, {"a.weight": weight, "a.bias": bias, "norm.weight": torch.ones(8)}, rotation)
    tensors = load_file(path)
    assert set(tensors) == {"a.weight", "a.weight_scale", "a.comfy_quant", "a.bias", "norm.weight"}
    q = hq.quantize(weight, "int8", rotation=rotation)
    assert same_bits(tensors["a.weight"], q.codes)
    assert same_bits(tensors["a.weight_scale"], q.scales[:, None])
    assert same_bits(tensors["a.bias"], bias)
    settings = json.loads(bytes(tensors["a.comfy_quant"].tolist()))
    convrot = {} if rotation == "none" else {"convrot": True, "convrot_groupsize": int(rotation[8:])}
    assert settings == {"format": "int8_tensorwise", **convrot}
    said = json.loads(metadata_of(path)["_quantization_metadata"])
    assert said == {"format_version": "1.0", "layers": {"a": settings}}


@pytest.mark.parametrize(
    ("format", "rotation"),
    [
        ("nvfp4", "none"),
        ("mxfp4", "regular:16"),
        ("int8", "sylvester:16"),
        ("int8", hq.Rotation("regular", 4, signs=torch.ones(4))),
    ],
)
def test_holds_int8_with_regular_or_no_rotation_only(folder, tmp_path, weight, format, rotation) -> None:
    with pytest.raises(CheckpointError, match="the comfy layout holds format int8 with rotation none or regular:G"):
        hq.quantize_checkpoint(folder({"a.weight": weight}), tmp_path / "o", format, rotation, layout="comfy")


def rotated_exactly(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x·R in float64, and how far a float32 computation of it can be away, whatever its order of sums.

    Each of the two programs adds ``group`` products in float32: the error of either is at most
    gamma = group · 2⁻²⁴ / (1 − group · 2⁻²⁴) times the sum of the products' magnitudes, and one more
    rounding for the factor 1/√group.
    """
    h = hq.Rotation("regular", group).dense()
    blocks = x.double().view(x.shape[0], -1, group)
    u = (group + 2) * 2.0**-24
    return (blocks @ h).view(x.shape), (blocks.abs() @ h.abs()).view(x.shape) * (u / (1 - u))


def distance_of_codes(exact: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """The exact value before rounding, and how far either program's can be from it.

    Both divide by amax / 127. An error of the value is scaled by that; an error of the amax, relative to
    it, moves a value of at most 127 by as much; three float32 roundings (amax / 127, the quotient) remain.
    """
    scale = exact.abs().amax(-1, keepdim=True) / 127
    relative = (error.amax(-1, keepdim=True) / (127 * scale)) + 3 * 2.0**-24
    return exact / scale, error / scale + 127 * relative


@pytest.mark.parametrize("group", [256, 64, 4])
def test_codes_and_scales_are_comfy_kitchens(folder, tmp_path, weight, group) -> None:
    """Equal but for explained near-ties: its rotation is a float32 matrix product in another order."""
    tensor = pytest.importorskip("comfy_kitchen.tensor")
    weight = weight.clone()
    weight[5] = 0  # its floor of the scale is 1e-30, ours 1e-12 / 127
    weight[6, :64] = 0
    stored = load_file(comfy_file(folder, tmp_path, {"a.weight": weight}, f"regular:{group}"))
    theirs = tensor.QuantizedTensor.from_float(
        weight, "TensorWiseINT8Layout", per_channel=True, convrot=True, convrot_groupsize=group
    )
    codes, scales = theirs._qdata, theirs._params.scale
    assert (codes.shape, scales.shape) == (stored["a.weight"].shape, stored["a.weight_scale"].shape)

    assert not codes[5].any()
    assert not stored["a.weight"][5].any()
    assert stored["a.weight_scale"][5].item() == hq.quantize(torch.zeros(1, 4), "int8").scales.item()
    rows = [i for i in range(N) if i != 5]
    exact, error = rotated_exactly(weight[rows], group)
    ours, theirs_scale = stored["a.weight_scale"][rows].double(), scales[rows].double()
    bound = 2 * error.amax(-1, keepdim=True) / 127 + 2 * 2.0**-24 * ours
    assert ((ours - theirs_scale).abs() <= bound).all()

    value, reach = distance_of_codes(exact, error)
    assert reach.max() < 0.03  # an explanation that explains anything would be none
    differ = stored["a.weight"][rows] != codes[rows]
    to_boundary = ((value.abs() % 1) - 0.5).abs()
    assert (to_boundary[differ] <= reach[differ]).all()
    assert ((stored["a.weight"][rows].int() - codes[rows].int()).abs() <= 1).all()
    assert differ.float().mean() < 0.001


@pytest.mark.parametrize("rotation", ["none", "regular:256"])
@pytest.mark.parametrize("bias", [True, False])
def test_comfy_kitchen_reads_our_file(folder, tmp_path, weight, rotation, bias) -> None:
    """Its CPU int8_linear on our file's tensors gives our linear's output, but for what near-ties explain."""
    kitchen = pytest.importorskip("comfy_kitchen")
    tensors = {"0.weight": weight} | ({"0.bias": torch.randn(N)} if bias else {})
    path = comfy_file(folder, tmp_path, tensors, rotation)
    ours = hq.load(path, nn.Sequential(nn.Linear(K, N, bias=bias)))
    x = torch.randn(7, K, generator=torch.Generator().manual_seed(1))
    stored = load_file(path)
    settings = json.loads(bytes(stored["0.comfy_quant"].tolist()))
    convrot = {key: value for key, value in settings.items() if key != "format"}
    theirs = kitchen.int8_linear(
        x, stored["0.weight"], stored["0.weight_scale"], stored.get("0.bias"), torch.float32, **convrot
    )
    y = ours(x)

    group = convrot.get("convrot_groupsize", 1)
    if group == 1:
        exact, error = x.double(), torch.zeros_like(x, dtype=torch.float64)
    else:
        exact, error = rotated_exactly(x, group)
    value, reach = distance_of_codes(exact, error)
    near = ((value.abs() % 1) - 0.5).abs() <= reach  # input codes that may differ by one
    row_scale = exact.abs().amax(-1, keepdim=True) / 127
    sw = stored["0.weight_scale"].double().view(1, -1)
    flips = (near.double() @ stored["0.weight"].double().abs().T) * row_scale * sw
    # the row's scale, relative to it, and float32 roundings: of two products, of the bias, of their sum
    relative = 2 * error.amax(-1, keepdim=True) / (127 * row_scale) + 8 * 2.0**-24
    size = y.double().abs() + (stored["0.bias"].double().abs() if bias else 0)
    bound = flips * (1 + 2.0**-20) + relative * size
    assert ((y.double() - theirs.double()).abs() <= bound).all()
    print("RATIO", bound.mean() / y.abs().mean(), (y - theirs).abs().max() / y.abs().mean())
    assert bound.mean() < 0.03 * y.abs().mean()


@pytest.mark.parametrize("shape", ["scalar", "one", "n", "n1"])
@pytest.mark.parametrize("place", ["tensor", "metadata", "params"])
def test_reads_what_others_write(tmp_path, weight, shape, place) -> None:
    q = hq.quantize(weight, "int8", rotation="regular:256")
    scale = {
        "scalar": torch.tensor(0.01),
        "one": torch.tensor([0.01]),
        "n": q.scales,
        "n1": q.scales[:, None],
    }[shape]
    tensors, settings = {"0.weight": q.codes, "0.weight_scale": scale.clone()}, {"convrot": True}
    settings |= {"convrot_groupsize": 256}
    said = {"format": "int8_tensorwise", **({"params": settings} if place == "params" else settings)}
    metadata = {}
    if place == "metadata":
        metadata["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": {"0": said}})
    else:
        tensors["0.comfy_quant"] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    save_file(tensors, tmp_path / "c.safetensors", metadata)
    layer = hq.load(tmp_path / "c.safetensors", nn.Sequential(nn.Linear(K, N, bias=False)))[0]
    assert str(layer.rotation) == "regular:256"
    assert same_bits(layer.codes.detach(), q.codes)
    assert torch.equal(layer.scales, scale.reshape(-1).expand(N))
    (row,) = describe(tmp_path / "c.safetensors").layers
    assert (row.name, row.format, row.rotation, row.shape) == ("0", "int8", "regular:256", (N, K))


def test_file_of_ours_loads_like_the_native_one(folder, plain_tensors, plain_model, tmp_path) -> None:
    source = folder(plain_tensors, 2)
    hq.quantize_checkpoint(source, tmp_path / "a", "int8", "regular:16", layout="comfy")
    hq.quantize_checkpoint(source, tmp_path / "b", "int8", "regular:16")
    a, b = (hq.load(tmp_path / name, copy.deepcopy(plain_model)).state_dict() for name in "ab")
    assert a.keys() == b.keys()
    assert all(same_bits(a[name], b[name]) for name in a)


def change(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    path.unlink()
    save_file(tensors, path, metadata)


SETTINGS = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("stripped", r"'a': its weight is int8, but neither comfy_quant nor _quantization_metadata"),
        ("group", r"'a': its comfy_quant says {'convrot': 64}, the header {'convrot': 256}"),
        ("record", r"'a': rotation: stored 'regular:64', expected 'regular:256'"),
        ("format", r"'a': has comfy format 'float8_e4m3fn'; only 'int8_tensorwise' is read"),
        ("json", r"'a': its quantization settings are not a JSON object"),
        ("scales", r"'a': its scales are None"),
        ("rows", r"'a': its scales are \('F32', \(95, 1\)\), not 96"),
        ("codes", r"'a': its codes are \('F32', \(96, 512\)\), not an int8 matrix"),
        ("divides", r"'a': in_features K=512 is not a multiple of the group 1024"),
        ("power", r"'a': rotation 'regular:512'"),
        ("gone", r"'b': its comfy_quant is missing"),
    ],
)
def test_c4_damage_is_refused_by_name(folder, tmp_path, weight, damage, message) -> None:
    path = comfy_file(folder, tmp_path, {"a.weight": weight, "b.weight": weight + 1}, "regular:256")
    tensors, metadata = load_file(path), metadata_of(path)

    def say(settings: object, header: bool = True) -> None:
        tensors["a.comfy_quant"] = torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)
        if header:
            metadata.pop("_quantization_metadata")

    if damage == "stripped":
        del tensors["a.comfy_quant"]
        metadata = {}
    elif damage == "group":
        say(SETTINGS | {"convrot_groupsize": 64}, header=False)
    elif damage == "record":
        say(SETTINGS | {"convrot_groupsize": 64})
    elif damage == "format":
        say({"format": "float8_e4m3fn"})
    elif damage == "json":
        say([1])
    elif damage == "scales":
        del tensors["a.weight_scale"]
    elif damage == "rows":
        tensors["a.weight_scale"] = tensors["a.weight_scale"][1:].clone()
    elif damage == "codes":
        tensors["a.weight"] = tensors["a.weight"].float()
    elif damage in ("divides", "power"):
        say(SETTINGS | {"convrot_groupsize": 1024 if damage == "divides" else 512})
        metadata.pop("hadaquant")
    elif damage == "gone":
        for name in [name for name in tensors if name.startswith("b.")]:
            del tensors[name]
        metadata.pop("_quantization_metadata")
    change(path, tensors, metadata)
    for use in (describe, lambda path: hq.load(path, nn.Sequential())):
        with pytest.raises(HadaquantError, match=message):
            use(path)


def test_s7_a_comfy_file_is_not_quantized_again(folder, tmp_path, weight) -> None:
    path = comfy_file(folder, tmp_path, {"a.weight": weight}, "regular:256")
    with pytest.raises(AlreadyQuantized, match="layout 'comfy'"):
        hq.quantize_checkpoint(path, tmp_path / "again.safetensors", "int8")


class TestHyperFlow:
    @pytest.fixture
    def path(self, tmp_path, weight) -> Path:
        q = hq.quantize(weight, "int8", rotation="regular:256")
        save_file({"0.qweight": q.codes, "0.wscale": q.scales}, tmp_path / "h.safetensors")
        return tmp_path / "h.safetensors"

    def test_reads_with_the_rotation_it_is_told(self, path, weight) -> None:
        layer = hq.load(path, nn.Sequential(nn.Linear(K, N, bias=False)), rotation="regular:256")[0]
        expected = hq.quantize(weight, "int8", rotation="regular:256").dequantize()
        assert torch.equal(layer.dequantized_weight(), expected)
        assert describe(path, "regular:256").layers[0].rotation == "regular:256"

    def test_refuses_to_guess(self, path) -> None:
        with pytest.raises(CheckpointError, match="does not say how they are rotated; say rotation='regular:256'"):
            hq.load(path, nn.Sequential(nn.Linear(K, N, bias=False)))

    def test_a_rotation_that_does_not_fit(self, path) -> None:
        with pytest.raises(HadaquantError, match="'0': in_features K=512 is not a multiple of the group 1024"):
            describe(path, "regular:1024")

    def test_half_a_pair(self, path) -> None:
        change(path, {"0.wscale": load_file(path)["0.wscale"]}, {})
        with pytest.raises(HadaquantError, match="'0': its codes are None"):
            describe(path, "regular:256")

    def test_other_layouts_say_their_rotation_themselves(self, folder, tmp_path, weight) -> None:
        for layout in ("native", "comfy"):
            out = tmp_path / f"{layout}.safetensors"
            source = folder({"0.weight": weight}, name=layout)
            hq.quantize_checkpoint(source, out, "int8", "regular:256", layout=layout)
            with pytest.raises(CheckpointError, match="says its rotation itself"):
                hq.load(out, nn.Sequential(nn.Linear(K, N, bias=False)), rotation="regular:256")

    def test_it_is_not_written(self, folder, tmp_path, weight) -> None:
        with pytest.raises(CheckpointError, match="is read, not written"):
            hq.quantize_checkpoint(folder({"a.weight": weight}), tmp_path / "o", "int8", layout="hyperflow")


def test_folders_keep_a_plain_loader_out(llama_folder, tmp_path) -> None:
    """A folder in the comfy layout holds int8 under names of plain weights: transformers must not find it."""
    transformers = pytest.importorskip("transformers")
    hq.quantize_checkpoint(llama_folder, tmp_path / "out", "int8", "regular:16", layout="comfy")
    assert "model.layers.0.mlp.up_proj.weight" in read_all(tmp_path / "out")
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert hq.load(tmp_path / "out").model.layers[0].mlp.up_proj.rotation.group == 16
