"""Gains of norms, fitted to the full model's predictions."""

import copy

import pytest
import torch
from tiny_llama import tiny_llama
from torch import nn

import hadaquant as hq
from hadaquant.calibrate import fit_gains_, token_batches
from hadaquant.errors import LayerError


def batches():
    ids = torch.randint(0, 256, (16 * 64,), generator=torch.Generator().manual_seed(5))
    return token_batches(ids, 64, 16, 4)


def divergence(full, model, data):
    with torch.no_grad():
        p, q = (torch.cat([m(x).logits for x in data]).log_softmax(-1) for m in (full, model))
    return (p.exp() * (p - q)).sum(-1).mean().item()


def quantized():
    model = tiny_llama()
    hq.quantize_(model, "mxfp4", "sylvester:32")
    return model


def test_predictions_come_nearer_and_only_gains_change():
    full, model, data = tiny_llama(), quantized(), batches()
    before, state = divergence(full, model, data), copy.deepcopy(model.state_dict())
    losses = fit_gains_(model, full, data, steps=30, rate=1e-2)
    assert len(losses) == 30
    assert divergence(full, model, data) < 0.97 * before
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]) == ("norm" not in name), name


def test_the_first_loss_is_the_divergence():
    full, model, data = tiny_llama(), quantized(), batches()[:1]
    expected = divergence(full, model, data)
    assert fit_gains_(model, full, data, steps=1)[0] == pytest.approx(expected, rel=1e-4)


def test_a_seed_gives_the_same_gains():
    data, found = batches(), []
    for seed in (0, 0, 1):
        model = quantized()
        fit_gains_(model, tiny_llama(), data, steps=6, seed=seed)
        found.append(model.model.norm.weight.detach())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_who_needs_gradients_stays_as_it_was():
    model = quantized()
    model.model.embed_tokens.weight.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    fit_gains_(model, tiny_llama(), batches(), steps=2)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert all(p.grad is None for p in model.parameters())


def test_small_steps_are_not_lost_in_bfloat16():
    full, model, data = tiny_llama().to(torch.bfloat16), quantized().to(torch.bfloat16), batches()
    before = model.model.norm.weight.detach().clone()
    fit_gains_(model, full, data, steps=20, rate=1e-3)  # a step is less than half a unit of bfloat16 at 1
    assert model.model.norm.weight.dtype == torch.bfloat16
    assert not torch.equal(model.model.norm.weight, before)


def test_refusals():
    full, data = tiny_llama(), batches()
    with pytest.raises(LayerError, match="no batches"):
        fit_gains_(quantized(), full, [])
    with pytest.raises(LayerError, match="no norm with a gain"):
        fit_gains_(nn.Sequential(nn.Linear(4, 4)), full, data)
    model = quantized()
    model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(LayerError, match="loss at step 0 is nan"):
        fit_gains_(model, full, data)
