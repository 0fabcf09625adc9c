"""The decoder that is timed in CUDA graphs says what transformers says."""

import runpy
from pathlib import Path

import pytest
import torch

import hadaquant as hq

ROOT = Path(__file__).parents[2]
pytest.importorskip("transformers")


@pytest.mark.parametrize("quantized", [False, True])
def test_the_decoder_generates_the_tokens_of_generate(quantized, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    decoding = runpy.run_path(str(ROOT / "benchmarks" / "decoding.py"))
    model = runpy.run_path(str(ROOT / "tests" / "study" / "tiny_llama.py"))["tiny_llama"]().eval()
    if quantized:
        hq.quantize_(model, "int8", "regular:64")
    prompt = [5, 90, 17, 33]
    made = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=12,
        min_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
    )
    with torch.inference_mode():
        mine, logits = decoding["Decoder"](model, 32).generate(prompt, 12)
        assert torch.equal(mine, made[0, len(prompt) :])
        if quantized:  # in float32, front ends change the order of a norm's sum alone
            assert torch.equal(decoding["Decoder"](model, 32, front_ends=True).generate(prompt, 12)[0], mine)
        double = decoding["Decoder"](decoding["in_double"](model), 32)
        first = double.generate(prompt, 1)[1]
        assert first.dtype == torch.float64
        # codes of near-ties turn, where layers are quantized
        assert (first - logits[:1]).norm() < (0.05 if quantized else 1e-5) * logits[:1].norm()
