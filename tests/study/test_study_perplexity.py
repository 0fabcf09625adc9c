"""Perplexity against sums done by hand, and what it refuses."""

import math

import pytest
import torch
from tiny_llama import byte_tokenizer, tiny_llama
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

import hadaquant as hq
from hadaquant.errors import CheckpointError, LayerError, ShapeError
from hadaquant.study import Comparison, Gain, Perplexity, perplexity
from hadaquant.study.perplexity import read_tokens


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(256, (70,), generator=torch.Generator().manual_seed(0))


def result(*losses):
    return Perplexity(losses=torch.tensor(losses, dtype=torch.float64), windows=1, seconds=2.0)


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


# ---- beside the full model -------------------------------------------------------------------------


def test_divergence_and_agreement_by_hand(model, ids):
    other = tiny_llama()
    hq.quantize_(other, "mxfp4", "none")
    found = perplexity(other, ids, 32, lambda tokens: model(tokens).logits)
    divergence, agreement = [], []
    for window in (ids[:32], ids[32:64]):
        with torch.no_grad():
            p, q = (m(window[None]).logits[0, :-1].double().softmax(-1) for m in (model, other))
        divergence += (p * (p / q).log()).sum(-1).tolist()
        agreement += (p.argmax(-1) == q.argmax(-1)).double().tolist()
    torch.testing.assert_close(found.divergence, torch.tensor(divergence, dtype=torch.float64), rtol=1e-4, atol=1e-5)
    assert found.agreement.tolist() == agreement and 0 < sum(agreement) < 62
    fields = found.to_dict()
    assert fields["agreement"] == pytest.approx(sum(agreement) / 62)
    low, high = fields["divergence_interval"]
    assert 0 < low < fields["divergence"] < high


def test_a_model_beside_itself_does_not_diverge(model, ids):
    found = perplexity(model, ids, 32, lambda tokens: model(tokens).logits)
    assert found.divergence.abs().max() == 0 and found.agreement.min() == 1


# ---- gain ------------------------------------------------------------------------------------------


def test_gain_is_paired():
    before, after = result(1.0, 5.0, 9.0, 3.0), result(0.9, 4.8, 8.9, 2.8)
    gain = Comparison.of(before, after)
    assert gain.loss.mean == pytest.approx(0.15)
    # resamples of the differences 0.1, 0.2, 0.1, 0.2, not of the losses, which are 1 to 9
    assert gain.loss.low == pytest.approx(0.1) and gain.loss.high == pytest.approx(0.2)
    assert gain.divergence is None and gain.helps == "yes"
    assert Comparison.of(after, before).helps == "no"


def test_gain_is_no_difference_where_its_interval_holds_zero():
    assert Gain(mean=0.1, low=-0.01, high=0.21).helps == "no difference"
    assert Gain(mean=0.0, low=0.0, high=0.0).helps == "no difference"
    assert Gain(mean=math.nan, low=math.nan, high=math.nan).helps == "no difference"


def test_loss_and_divergence_speak_together():
    better, worse, unsure = (
        Gain(mean=1, low=0.5, high=2),
        Gain(mean=-1, low=-2, high=-0.5),
        Gain(mean=0, low=-1, high=1),
    )
    for loss, divergence, helps in (
        (better, better, "yes"),
        (unsure, better, "yes"),
        (better, unsure, "yes"),
        (unsure, worse, "no"),
        (unsure, unsure, "no difference"),
        (better, worse, "no difference"),
        (worse, None, "no"),
    ):
        assert Comparison(loss=loss, divergence=divergence).helps == helps


def test_interval_has_the_width_of_the_normal_one():
    gen = torch.Generator().manual_seed(3)
    losses = torch.randn(40 * 50, dtype=torch.float64, generator=gen) + 3
    found = Perplexity(losses=losses, windows=40, seconds=1.0)
    low, high = found.over_windows(losses)
    windows = losses.view(40, 50).mean(1)
    half = 1.96 * (windows.std() / 40**0.5).item()
    assert low == pytest.approx(found.nll - half, abs=0.15 * half)
    assert high == pytest.approx(found.nll + half, abs=0.15 * half)
    assert found.interval == (math.exp(low), math.exp(high))


def test_few_windows_are_cut_into_pieces():
    # two windows of the same mean: whole windows would leave no width
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0] * 2)
    low, high = Perplexity(losses=losses, windows=2, seconds=1.0).over_windows(losses)
    assert low < 2.0 and high > 3.0


def test_gain_needs_one_text():
    with pytest.raises(ShapeError, match="use one text"):
        Comparison.of(result(1.0, 2.0), result(1.0))


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
    with pytest.raises(CheckpointError, match="no such file; check the path"):
        read_tokens(text, tokenizer)
    text.write_text("short")
    with pytest.raises(CheckpointError, match="5 tokens, window 512; give more text or a smaller --window"):
        read_tokens(text, tokenizer)
    with pytest.raises(CheckpointError, match=r"it is shorter than one window: .*; call again"):
        read_tokens(text, tokenizer, longer="call again")
    text.write_text("a longer text")
    with pytest.raises(
        CheckpointError, match=r"its first 6 tokens are shorter .*; give more --tokens or a smaller --window"
    ):
        read_tokens(text, tokenizer, window=8, tokens=6)
    text.write_text("")
    with pytest.raises(CheckpointError, match="0 tokens"):
        read_tokens(text, tokenizer)
    text.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="cannot be read as text"):
        read_tokens(text, tokenizer)
