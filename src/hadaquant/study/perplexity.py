"""Perplexity of causal language models, token by token, so that two models can be compared in pairs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hadaquant.errors import CheckpointError, LayerError, PredictionError, ShapeError
from hadaquant.nn import RotatedLinear
from hadaquant.study.bootstrap import Interval, mean_interval
from hadaquant.study.metrics import Helps

#: Units of text that are resampled, at least: with fewer windows, each is cut into equal pieces.
UNITS = 32

#: ``full(tokens)``: logits [1, window, vocabulary] of the unquantized model for int64 [1, window].
Full = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Perplexity:
    """What a model loses on a text.

    Attributes:
        losses: float64 [P] negative log-likelihood in nats of each predicted token, in text order.
        windows: that the text was cut into; P is a multiple of it.
        divergence: float64 [P], KL(full ‖ model) in nats of the distributions of each predicted token;
            None where there was no full model beside it.
        agreement: float64 [P], 1 where both models find the same token most likely, else 0; or None.
        seconds: spent in the model.
    """

    losses: Tensor
    windows: int
    seconds: float
    divergence: Tensor | None = None
    agreement: Tensor | None = None

    @property
    def nll(self) -> float:
        """Mean loss in nats a token."""
        return self.losses.mean().item()

    @property
    def perplexity(self) -> float:
        """exp(nll); inf where float64 overflows."""
        return _exp(self.nll)

    @property
    def interval(self) -> Interval:
        """Interval of the perplexity over the text's windows, bootstrapped."""
        return Interval(*map(_exp, self.over_windows(self.losses)))

    @property
    def tokens_per_second(self) -> float:
        """Predicted tokens a second."""
        return self.losses.numel() / self.seconds

    def over_windows(self, values: Tensor) -> Interval:
        """Interval of the mean of [P] values: a bootstrap over windows, or over pieces of them; see :data:`UNITS`."""
        return mean_interval(*self._pieces(values))

    @property
    def pieces(self) -> tuple[Tensor, Tensor]:
        """Sums of losses and numbers of tokens of what is resampled: windows, or pieces of them; see :data:`UNITS`."""
        return self._pieces(self.losses)

    def _pieces(self, values: Tensor) -> tuple[Tensor, Tensor]:
        windows = values.view(self.windows, -1)
        units = windows.tensor_split(min(-(-UNITS // self.windows), windows.shape[1]), 1)
        sums = torch.cat([unit.sum(1) for unit in units])
        return sums, torch.cat([torch.full((self.windows,), unit.shape[1]) for unit in units])

    def to_dict(self) -> dict[str, Any]:
        """Figures for JSON, without the single tokens."""
        found: dict[str, Any] = {
            "perplexity": self.perplexity,
            "interval": list(self.interval),
            "nll": self.nll,
            "predicted_tokens": self.losses.numel(),
            "windows": self.windows,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
        }
        for name, values in (("divergence", self.divergence), ("agreement", self.agreement)):
            if values is not None:
                found[name] = values.mean().item()
                found[f"{name}_interval"] = list(self.over_windows(values))
        return found


def _exp(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf


@dataclass(frozen=True, kw_only=True)
class Gain:
    """By how much one model is better than another on the same tokens, in nats a token.

    ``mean``: positive where the second model is better. ``low``, ``high``: its interval, a bootstrap over windows of
    the pairs' differences. The pairs share the text, whose variance drops out.
    """

    mean: float
    low: float
    high: float

    @property
    def helps(self) -> Helps:
        """On which side of zero the whole interval lies."""
        if self.low > 0:
            return "yes"
        return "no" if self.high < 0 else "no difference"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two models on the same tokens: the fall in loss, and in distance from the full model where that was beside both.

    The loss is what counts; the distance says more of a short text, because it does not depend on which token came.
    """

    loss: Gain
    divergence: Gain | None = None

    @classmethod
    def of(cls, before: Perplexity, after: Perplexity) -> Comparison:
        """From ``before`` to ``after``.

        Raises:
            ShapeError: they were measured on different numbers of tokens.
        """
        if before.losses.shape != after.losses.shape:
            raise ShapeError(
                what="losses", found=tuple(after.losses.shape), expected=tuple(before.losses.shape), fix="use one text"
            )

        def gain(old: Tensor, new: Tensor) -> Gain:
            low, high = before.over_windows(old - new)
            return Gain(mean=(old - new).mean().item(), low=low, high=high)

        both = before.divergence is not None and after.divergence is not None
        return cls(
            loss=gain(before.losses, after.losses),
            divergence=gain(before.divergence, after.divergence) if both else None,  # type: ignore[arg-type]
        )

    @property
    def helps(self) -> Helps:
        """What one of the two says for sure and the other does not deny."""
        said: set[Helps] = {gain.helps for gain in (self.loss, self.divergence) if gain is not None}
        said.discard("no difference")
        return said.pop() if len(said) == 1 else "no difference"

    def to_dict(self) -> dict[str, Any]:
        """Fields for JSON."""
        return {**asdict(self), "helps": self.helps}


@torch.inference_mode()
def perplexity(model: nn.Module, ids: Tensor, window: int = 512, full: Full | None = None) -> Perplexity:
    """Mean loss of a causal model over windows that do not overlap.

    Each window of ``window`` tokens stands alone and predicts its tokens 2 to ``window``. Tokens
    after the last whole window are not used.

    Args:
        model: ``model(input_ids).logits`` is [1, window, vocabulary]. It is put into eval mode.
        ids: int64 [T] token ids.
        window: tokens a window, two or more.
        full: the unquantized model, to compare each prediction with.

    Raises:
        ShapeError: fewer tokens than a window, or a window that predicts nothing.
        PredictionError: the model predicts NaN, or gives a token that comes no chance at all.
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
    rows, seconds = [], 0.0
    windows = ids.to(device)[: ids.numel() // window * window].view(-1, window)
    for tokens in windows:
        start = time.perf_counter()
        logits = logits_of(model, tokens[None])[0, :-1].to(torch.float32)
        losses = functional.cross_entropy(logits, tokens[1:], reduction="none")
        _check_finite(model, losses, len(rows) + 1)
        rows.append([losses.to("cpu", torch.float64)])
        seconds += time.perf_counter() - start
        if full is not None:
            rows[-1] += _compared(full(tokens[None])[0, :-1].to(torch.float32), logits)
    columns = [torch.cat(column) for column in zip(*rows, strict=True)]
    names = ("losses", "divergence", "agreement")
    return Perplexity(**dict(zip(names, columns, strict=False)), windows=len(windows), seconds=seconds)


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """[1, window, vocabulary] of int64 [1, window]."""
    return model(tokens, use_cache=False).logits


def _compared(full: Tensor, logits: Tensor) -> list[Tensor]:
    """KL(full ‖ model) and whether the most likely token is the same, of each row of logits."""
    p, q = full.log_softmax(-1), logits.log_softmax(-1)
    divergence = functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    agreement = full.argmax(-1) == logits.argmax(-1)
    return [column.to("cpu", torch.float64) for column in (divergence, agreement)]


def _check_finite(model: nn.Module, losses: Tensor, window: int) -> None:
    wrong = int((~losses.isfinite()).sum())
    if wrong:
        why = f"{culprit} holds NaN or Inf" if (culprit := _nonfinite(model)) else "all of its weights are finite"
        raise PredictionError(model=type(model).__name__, wrong=wrong, predicted=losses.numel(), window=window, why=why)


def _nonfinite(model: nn.Module) -> str | None:
    """The first module whose own weights hold NaN or Inf, those of a quantized linear decoded."""
    for name, module in model.named_modules():
        weights = [*module.parameters(recurse=False)]
        if isinstance(module, RotatedLinear):
            weights.append(module.quantized_weight().dequantize())  # type: ignore[arg-type]
        if any(w.is_floating_point() and not w.isfinite().all() for w in weights):
            return name
    return None


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


def read_tokens(
    text: Path,
    tokenizer: Any,
    window: int = 512,
    tokens: int | None = None,
    longer: str = "give more text or a smaller --window",
) -> Tensor:
    """int64 [T] token ids of a UTF-8 text, the first ``tokens`` of them if given; no special tokens.

    ``longer``: what to do about a text that is too short.

    Raises:
        CheckpointError: the file is missing, is not UTF-8, or is shorter than a window.
    """
    try:
        content = text.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(path=text, rule="no such file", fix="check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(path=text, rule=f"cannot be read as text ({error})", fix="give a UTF-8 file") from error
    # verbose=False: the text is longer than a context on purpose
    ids = torch.tensor(tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"][:tokens])
    if ids.numel() < window:
        cut = tokens is not None and ids.numel() == tokens
        what = f"its first {tokens} tokens are" if cut else "it is"
        raise CheckpointError(
            path=text,
            rule=f"{what} shorter than one window: {ids.numel()} tokens, window {window}",
            fix="give more --tokens or a smaller --window" if cut else longer,
        )
    return ids.to(torch.int64)
