"""Small checkpoints to work on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ckpt_support import write_shards
from safetensors.torch import save_file
from torch import Tensor

#: A folder of no known model: names decide what is a linear.
Folder = Callable[..., Path]


@pytest.fixture
def plain_tensors() -> dict[str, Tensor]:
    """Two blocks of two linears, with everything around that is not one."""
    gen = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen) * 0.05

    tensors = {"embed_tokens.weight": randn(50, 64), "norm.weight": randn(64), "lm_head.weight": randn(50, 64)}
    for i in range(2):
        tensors |= {
            f"layers.{i}.up.weight": randn(96, 64),
            f"layers.{i}.up.bias": randn(96),
            f"layers.{i}.down.weight": randn(64, 96),
            f"layers.{i}.norm.weight": randn(64),
        }
    return tensors


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """``folder(tensors, shards=0)``: writes a model folder and returns its path."""

    def make(tensors: dict[str, Tensor], shards: int = 0, name: str = "model") -> Path:
        path = tmp_path / name
        path.mkdir()
        if shards:
            write_shards(path, tensors, shards)
        else:
            save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return path

    return make


@pytest.fixture(scope="session")
def llama_config() -> object:
    """A Llama of two layers, head and embedding tied."""
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )


@pytest.fixture
def llama(llama_config: object) -> torch.nn.Module:
    """The model of that config, with random weights that depend on nothing else."""
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(llama_config).eval()  # type: ignore[arg-type]


@pytest.fixture
def llama_folder(llama: torch.nn.Module, folder: Folder) -> Path:
    """Its folder: weights without the tied head, config.json, and a tokenizer file."""
    tensors = {name: t.clone() for name, t in llama.state_dict().items() if name != "lm_head.weight"}
    path = folder(tensors, name="llama")
    (path / "config.json").write_text(llama.config.to_json_string())  # type: ignore[union-attr, operator]
    (path / "tokenizer.json").write_bytes(b'{"\xc3\xa9": 1}\r\n')
    return path


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 96), torch.nn.Linear(96, 64, bias=False)
        self.norm = torch.nn.RMSNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.norm = torch.nn.Embedding(50, 64), torch.nn.RMSNorm(64)
        self.lm_head = torch.nn.Linear(64, 50, bias=False)
        self.layers = torch.nn.Sequential(_Block(), _Block())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.norm(self.layers(self.embed_tokens(tokens))))


@pytest.fixture
def plain_model(plain_tensors: dict[str, Tensor]) -> torch.nn.Module:
    """A model whose state_dict is ``plain_tensors``."""
    model = _Model()
    model.load_state_dict(plain_tensors)
    return model
