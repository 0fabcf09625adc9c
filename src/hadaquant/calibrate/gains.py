"""Gains of a quantized model's norms, fitted so that it predicts what the full model predicts.

What rounding does to a whole model is partly systematic, so a few numbers that stay in full precision can make up for
some of it ("norm tweaking", Li et al., arXiv:2309.02784). Codes, scales and the files' layout stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hadaquant.calibrate.blocks import Forward, causal_lm, data_of, evaluating
from hadaquant.errors import LayerError
from hadaquant.nn.convert import holds_nonfinite
from hadaquant.nn.linear import RotatedLinear

#: Steps over which the rate rises from 0; after them it falls to 0 in a line.
WARM_UP = 5


def fit_gains_(
    model: nn.Module,
    full: nn.Module,
    batches: Iterable[Any],
    *,
    steps: int = 100,
    rate: float = 4e-3,
    seed: int = 0,
    forward: Forward = causal_lm,
    progress: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Fit the one-dimensional weights of a model's norms, in place, by Adam; nothing else changes.

    Coded activations pass gradients as if they were not coded. Memory holds both models and what autograd keeps of
    one batch.

    Args:
        model: with its linears quantized, see :func:`calibrate_`.
        full: the same model before that.
        batches: what both are run on, see :func:`token_batches`; each step takes one of them at random.
        steps: of Adam.
        rate: the largest change of a step, in means of a norm's magnitudes.
        seed: of the order of the batches.
        forward: runs a model on a batch; gives logits [..., vocabulary], or an object that has ``logits``.
        progress: called after each step with its number and its loss.

    Returns:
        KL(full ‖ model) in nats a token before each step, on that step's batch.

    Raises:
        LayerError: no batches, the model has no norm with a gain, or a weight of one of the models or a loss is NaN
            or Inf.
    """
    name, batches = type(model).__name__, list(batches)
    if not batches:
        raise LayerError(layer=name, rule="there are no batches to fit gains on", fix="give token_batches of a text")
    gains = list(gains_of(model).values())
    if not gains:
        raise LayerError(layer=name, rule="it has no norm with a gain", fix="leave the gains out")
    check_finite(full)
    check_finite(model)
    # float32 copies, so that small steps are not lost in a short dtype
    masters = [p.detach().to(torch.float32, copy=True) for p in gains]
    optimizer = torch.optim.Adam([{"params": [m], "scale": m.abs().mean().item()} for m in masters], betas=(0.9, 0.95))
    random = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    with evaluating(model, full), _only(model, gains):
        for step in range(steps):
            batch = batches[int(torch.randint(len(batches), (), generator=random))]
            loss = _divergence(full, model, batch, forward)
            losses.append(loss.item())
            if not torch.isfinite(loss):
                fix = "use fewer steps, or leave the gains out" if step else "leave the gains out"
                raise LayerError(layer=name, rule=f"its loss at step {step} is {losses[-1]}", fix=fix)
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = rate * group["scale"] * min(1.0, (step + 1) / WARM_UP) * (1 - step / steps)
            for gain, master in zip(gains, masters, strict=True):
                master.grad = None if gain.grad is None else gain.grad.to(torch.float32)
                gain.grad = None
            optimizer.step()
            for gain, master in zip(gains, masters, strict=True):
                gain.data.copy_(master)
            if progress is not None:
                progress(step, losses[-1])
    return losses


def gains_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of one dimension, which are those of norms, by their names in the model."""
    weights = {f"{name}.weight".lstrip("."): m._parameters.get("weight") for name, m in model.named_modules()}
    return {n: p for n, p in weights.items() if p is not None and p.dim() == 1 and p.is_floating_point()}


def check_finite(model: nn.Module) -> None:
    """Refuse a model that predicts nothing because of a weight, that of a quantized linear decoded.

    Raises:
        LayerError: names the weight that holds NaN or Inf.
    """
    for name, module in model.named_modules():
        # PyTorch has no isfinite for numbers of one byte
        weights = {key: p for key, p in module.named_parameters(recurse=False) if p.dtype.itemsize > 1}
        if isinstance(module, RotatedLinear):
            weights = {"weight": module.quantized_weight().dequantize(), **weights}
        wrong = [key for key, weight in weights.items() if holds_nonfinite(weight)]
        # a buffer may hold -Inf rightly: masks do
        wrong += [key for key, b in module.named_buffers(recurse=False) if not b.is_meta and b.isnan().any()]
        if wrong:
            fix = "mend it, or leave the gains out"
            raise LayerError(layer=f"{name}.{wrong[0]}".lstrip("."), rule="it holds NaN or Inf", fix=fix)


class _only:
    """Within, these parameters of a model need gradients, and no others."""

    def __init__(self, model: nn.Module, wanted: list[nn.Parameter]) -> None:
        self.before = {p: p.requires_grad for p in model.parameters() if p.is_floating_point()}
        self.wanted = wanted

    def __enter__(self) -> None:
        for p in self.before:
            p.requires_grad_(any(p is w for w in self.wanted))

    def __exit__(self, *_: object) -> None:
        for p, needed in self.before.items():
            p.requires_grad_(needed)


def _divergence(full: nn.Module, model: nn.Module, batch: Any, forward: Forward) -> Tensor:
    """KL(full ‖ model) in nats a token."""

    def log_probabilities(m: nn.Module) -> Tensor:
        output = forward(m, batch)
        return data_of(getattr(output, "logits", output)).to(torch.float32).log_softmax(-1).flatten(0, -2)

    with torch.no_grad():
        target = log_probabilities(full)
    with torch.enable_grad():
        return functional.kl_div(log_probabilities(model), target, reduction="batchmean", log_target=True)
