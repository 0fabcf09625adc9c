"""A tiny language model on the disk, as it is and quantized."""

from types import SimpleNamespace

import pytest
from tiny_llama import byte_tokenizer, tiny_llama

from hadaquant.checkpoint import quantize_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """``source``, and ``plain`` and ``rotated`` made of it in INT8; ``text`` of 720 bytes."""
    root = tmp_path_factory.mktemp("tiny")
    folders = SimpleNamespace(
        source=root / "source", plain=root / "int8", rotated=root / "int8-rotated", text=root / "text.txt"
    )
    tiny_llama().save_pretrained(folders.source)
    byte_tokenizer().save_pretrained(folders.source)
    quantize_checkpoint(folders.source, folders.plain, "int8", "none")
    quantize_checkpoint(folders.source, folders.rotated, "int8", "regular:64")
    folders.text.write_text("The quick brown fox jumps over the lazy dog. " * 16)
    return folders
