"""Perplexity of causal language models, token by token, so that two models can be compared in pairs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hadaquant.errors import CheckpointError, LayerError, ShapeError
from hadaquant.nn import RotatedLinear
from hadaquant.study.metrics import Helps

#: Standard errors that a mean difference must exceed to count: about one chance in twenty otherwise.
SURE = 2.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Perplexity:
    """What a model loses on a text.

    Attributes:
        losses: float64 [P] negative log-likelihood in nats of each predicted token, in text order.
        seconds: spent in the model.
    """

    losses: Tensor
    seconds: float

    @property
    def nll(self) -> float:
        """Mean loss in nats a token."""
        return self.losses.mean().item()

    @property
    def perplexity(self) -> float:
        """exp(nll); inf where float64 overflows."""
        return math.exp(self.nll) if self.nll < 700 else math.inf

    @property
    def tokens_per_second(self) -> float:
        """Predicted tokens a second."""
        return self.losses.numel() / self.seconds


@dataclass(frozen=True, kw_only=True)
class Gain:
    """By how much one model's loss lies below another's on the same tokens.

    ``mean``: nats a token, positive where the second model is better. ``error``: the standard error
    of that mean over tokens. The pairs share the text, whose variance therefore drops out.
    """

    mean: float
    error: float

    @classmethod
    def of(cls, before: Perplexity, after: Perplexity) -> Gain:
        """The gain from ``before`` to ``after``.

        Raises:
            ShapeError: they were measured on different numbers of tokens.
        """
        if before.losses.shape != after.losses.shape:
            raise ShapeError(
                what="losses", found=tuple(after.losses.shape), expected=tuple(before.losses.shape), fix="use one text"
            )
        fall = before.losses - after.losses
        return cls(mean=fall.mean().item(), error=(fall.std() / math.sqrt(fall.numel())).item())

    @property
    def helps(self) -> Helps:
        """Whether the mean is beyond :data:`SURE` standard errors, and on which side."""
        if abs(self.mean) <= SURE * self.error or math.isnan(self.mean):
            return "no difference"
        return "yes" if self.mean > 0 else "no"


@torch.inference_mode()
def perplexity(model: nn.Module, ids: Tensor, window: int = 512) -> Perplexity:
    """Mean loss of a causal model over windows that do not overlap.

    Each window of ``window`` tokens stands alone and predicts its tokens 2 to ``window``. Tokens
    after the last whole window are not used.

    Args:
        model: ``model(input_ids).logits`` is [1, window, vocabulary]. It is put into eval mode.
        ids: int64 [T] token ids.
        window: tokens a window, two or more.

    Raises:
        ShapeError: fewer tokens than a window, or a window that predicts nothing.
        LayerError: the model has no linears, or no embedding for one of the ids.
    """
    if window < 2:
        raise ShapeError(what="window", found=window, expected="2 or more", fix="512 is usual")
    if ids.dim() != 1 or ids.numel() < window:
        raise ShapeError(
            what="ids", found=tuple(ids.shape), expected=f"[{window} or more]", fix="give more text or a smaller window"
        )
    _check_model(model, ids)
    device = next(model.parameters()).device
    model.eval()
    losses, start = [], time.perf_counter()
    for tokens in ids.to(device)[: ids.numel() // window * window].view(-1, window):
        logits = model(tokens[None], use_cache=False).logits[0, :-1].to(torch.float32)
        losses.append(functional.cross_entropy(logits, tokens[1:], reduction="none").to("cpu", torch.float64))
    return Perplexity(losses=torch.cat(losses), seconds=time.perf_counter() - start)


def _check_model(model: nn.Module, ids: Tensor) -> None:
    name = type(model).__name__
    if not any(isinstance(m, nn.Linear | RotatedLinear) for m in model.modules()):
        raise LayerError(layer=name, rule="it holds no linear", fix="give a causal language model")
    embedding = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if embedding is not None and ids.max() >= embedding.num_embeddings:
        raise LayerError(
            layer=name,
            rule=f"it embeds {embedding.num_embeddings} tokens, but the text holds token id {int(ids.max())}",
            fix="evaluate models that share one tokenizer",
        )


def read_tokens(text: Path, tokenizer: Any, window: int = 512, tokens: int | None = None) -> Tensor:
    """int64 [T] token ids of a UTF-8 text, the first ``tokens`` of them if given; no special tokens.

    Raises:
        CheckpointError: the file is missing, is not UTF-8, or is shorter than a window.
    """
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(path=text, rule=f"cannot be read as text ({error})", fix="give a UTF-8 file") from error
    # verbose=False: the text is longer than a context on purpose
    ids = torch.tensor(tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"][:tokens])
    if ids.numel() < window:
        what = f"its first {tokens} tokens are" if tokens is not None and ids.numel() == tokens else "it is"
        raise CheckpointError(
            path=text,
            rule=f"{what} shorter than one window: {ids.numel()} tokens, window {window}",
            fix="give more text, more --tokens or a smaller --window",
        )
    return ids.to(torch.int64)
