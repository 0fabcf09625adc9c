"""Perplexity against sums done by hand, and what it refuses."""

import math

import pytest
import torch
from tiny_llama import byte_tokenizer, tiny_llama
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

import hadaquant as hq
from hadaquant.errors import CheckpointError, LayerError, ShapeError
from hadaquant.study import Gain, Perplexity, perplexity
from hadaquant.study.perplexity import read_tokens


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(256, (70,), generator=torch.Generator().manual_seed(0))


def result(*losses):
    return Perplexity(losses=torch.tensor(losses, dtype=torch.float64), seconds=2.0)


def test_mean_loss_of_predicted_tokens(model, ids):
    found = perplexity(model, ids, window=32)
    expected = []
    for window in (ids[:32], ids[32:64]):  # the last six tokens fill no window
        with torch.no_grad():
            p = model(window[None]).logits[0].double().softmax(-1)
        expected += [-math.log(p[i, window[i + 1]]) for i in range(31)]
    assert found.losses.shape == (62,) and found.losses.dtype == torch.float64
    torch.testing.assert_close(found.losses, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5)
    assert found.nll == pytest.approx(sum(expected) / 62, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(found.nll))
    assert found.tokens_per_second == pytest.approx(62 / found.seconds)


def test_windows_do_not_see_each_other(model, ids):
    whole, second = perplexity(model, ids, 32), perplexity(model, ids[32:], 32)
    torch.testing.assert_close(whole.losses[31:], second.losses)


class Uniform(nn.Module):
    """Every token equally likely."""

    def __init__(self, vocabulary):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 4)
        self.head = nn.Linear(4, vocabulary)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids, use_cache):
        return CausalLMOutput(logits=self.head(self.embed(ids)))


def test_perplexity_of_a_uniform_model_is_its_vocabulary(ids):
    assert perplexity(Uniform(300), ids, 16).perplexity == pytest.approx(300, rel=1e-5)


def test_quantized_model(ids):
    losses = {}
    for rotation in (None, "none", "regular:64"):
        model = tiny_llama()
        if rotation is not None:
            hq.quantize_(model, "int8", rotation)
        losses[rotation] = perplexity(model, ids, 32)
    for rotation in ("none", "regular:64"):
        assert not torch.equal(losses[rotation].losses, losses[None].losses)
        # INT8 moves each of these logits, of order 10, by a few per cent at most
        assert losses[rotation].nll == pytest.approx(losses[None].nll, rel=0.05)


def test_weights_stay_as_they_are(model, ids):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    perplexity(model, ids, 32)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


# ---- gain ------------------------------------------------------------------------------------------


def test_gain_is_paired():
    before, after = result(1.0, 5.0, 9.0, 3.0), result(0.9, 4.8, 8.9, 2.8)
    gain = Gain.of(before, after)
    assert gain.mean == pytest.approx(0.15)
    assert gain.error == pytest.approx(torch.tensor([0.1, 0.2, 0.1, 0.2]).std().item() / 2)
    assert gain.helps == "yes"
    assert Gain.of(after, before).helps == "no"


def test_gain_within_two_standard_errors_is_no_difference():
    assert Gain(mean=0.1, error=0.06).helps == "no difference"
    assert Gain(mean=-0.1, error=0.06).helps == "no difference"
    assert Gain(mean=0.1, error=0.04).helps == "yes"
    assert Gain(mean=0.0, error=0.0).helps == "no difference"
    assert Gain(mean=math.nan, error=math.nan).helps == "no difference"


def test_gain_needs_one_text():
    with pytest.raises(ShapeError, match="use one text"):
        Gain.of(result(1.0, 2.0), result(1.0))


def test_perplexity_beyond_float64_is_infinite():
    assert result(1000.0).perplexity == math.inf


# ---- refusals --------------------------------------------------------------------------------------


def test_too_few_tokens(model, ids):
    with pytest.raises(ShapeError, match=r"\[71 or more\]"):
        perplexity(model, ids, 71)
    with pytest.raises(ShapeError, match="window"):
        perplexity(model, ids, 1)


def test_a_model_without_linears(ids):
    with pytest.raises(LayerError, match="holds no linear"):
        perplexity(nn.Sequential(nn.Embedding(256, 8)), ids, 32)


def test_tokens_of_another_tokenizer(ids):
    with pytest.raises(LayerError, match="embeds 100 tokens"):
        perplexity(tiny_llama(vocabulary=100), ids, 32)


def test_read_tokens(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("naïve text", encoding="utf-8")
    tokenizer = byte_tokenizer()
    ids = read_tokens(text, tokenizer, window=4)
    assert ids.dtype == torch.int64 and tokenizer.decode(ids) == "naïve text"
    assert torch.equal(read_tokens(text, tokenizer, window=4, tokens=5), ids[:5])


def test_read_tokens_refuses(tmp_path):
    text, tokenizer = tmp_path / "text.txt", byte_tokenizer()
    with pytest.raises(CheckpointError, match="No such file"):
        read_tokens(text, tokenizer)
    text.write_text("short")
    with pytest.raises(CheckpointError, match="it is shorter than one window: 5 tokens, window 512"):
        read_tokens(text, tokenizer)
    text.write_text("a longer text")
    with pytest.raises(CheckpointError, match="its first 6 tokens are shorter than one window"):
        read_tokens(text, tokenizer, window=8, tokens=6)
    text.write_text("")
    with pytest.raises(CheckpointError, match="0 tokens"):
        read_tokens(text, tokenizer)
    text.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="cannot be read as text"):
        read_tokens(text, tokenizer)
