"""Gains of norms, fitted to the full model's predictions."""

import copy

import pytest
import torch
from tiny_llama import tiny_llama
from torch import nn

import hadaquant as hq
from hadaquant.calibrate import fit_gains_, token_batches
from hadaquant.calibrate.blocks import causal_lm
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


def refuse(model, batch):
    raise AssertionError("nothing is to be computed")


@pytest.mark.parametrize("which", ["full", "model"])
@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.rotary_emb.inv_freq"]
)
def test_a_weight_with_nan_is_named_before_anything_is_computed(which, name):
    full, spoilt = tiny_llama(), tiny_llama()
    module, _, key = name.rpartition(".")
    getattr(spoilt.get_submodule(module), key).data.view(-1)[0] = float("nan")
    model = quantized()
    if which == "model":
        model = spoilt
        hq.quantize_(model, "mxfp4", "sylvester:32")
    else:
        full = spoilt
    with pytest.raises(LayerError, match=f"layer '{name}': it holds NaN or Inf; mend it, or leave the gains out"):
        fit_gains_(model, full, batches(), forward=refuse)


def test_a_mask_with_inf_is_no_fault():
    full, model = tiny_llama(), quantized()
    full.model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    assert len(fit_gains_(model, full, batches(), steps=1)) == 1


def test_a_loss_that_is_no_number_where_all_weights_are_finite():
    full, model, data = tiny_llama(), quantized(), batches()

    def overflowing(model, batch):
        return model(batch).logits * float("inf")

    with pytest.raises(LayerError, match="loss at step 0 is nan; leave the gains out"):
        fit_gains_(model, full, data, forward=overflowing)
    with pytest.raises(LayerError, match=r"loss at step \d is (nan|inf); use fewer steps, or leave the gains out"):
        fit_gains_(model, full, data, steps=9, rate=1e38)


@pytest.mark.parametrize("fails", [False, True])
def test_both_models_predict_in_eval_mode_and_keep_their_own(fails):
    full, model = tiny_llama().train(), quantized().train()
    model.model.layers[0].eval()
    before = [[m.training for m in each.modules()] for each in (full, model)]

    def run(each, batch):
        assert not any(m.training for m in each.modules())
        if fails:
            raise KeyboardInterrupt
        return causal_lm(each, batch)

    if fails:
        with pytest.raises(KeyboardInterrupt):
            fit_gains_(model, full, batches(), steps=1, forward=run)
    else:
        fit_gains_(model, full, iter(batches()), steps=1, forward=run)
    assert [[m.training for m in each.modules()] for each in (full, model)] == before
