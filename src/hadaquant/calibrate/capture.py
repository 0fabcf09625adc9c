"""What each linear of a model reads: gathered block by block, so that memory holds one block's share.

>>> model = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])
>>> run = lambda model, x: model[1](model[0](x))
>>> for inputs in capture(model, [torch.ones(2, 8)] * 3, ["0", "1"], gram=True, forward=run):
...     print({name: (s.count, tuple(s.gram.shape)) for name, s in inputs.items()})
{'0': (6, (8, 8))}
{'1': (6, (8, 8))}
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hadaquant.calibrate.blocks import Call, Forward, causal_lm, evaluating, find_chain
from hadaquant.calibrate.inputs import InputStatistics
from hadaquant.errors import DtypeError, LayerError, ShapeError

#: Bytes of sums gathered at a time where the model is no chain of blocks and is run whole.
BUDGET = 1 << 30

#: ``coded(name, x)``: what to gather in place of the input x of a linear, in the original basis.
Coded = Callable[[str, Tensor], Tensor]

#: ``kind(name)``: linears that read one tensor share statistics only if they are of one kind.
Kind = Callable[[str], object]


def token_batches(ids: Tensor, window: int, windows: int, batch: int = 1) -> list[Tensor]:
    """Windows spread evenly over a text, in batches of one size: integers [T] -> list of int64 [batch, window].

    A text that holds fewer windows gives what it holds; the batch shrinks where it does not divide them.

    Raises:
        DtypeError: ``ids`` are no tensor of integers.
        ShapeError: they have not one dimension, or are fewer than a window; or a number is below 1.
    """
    dtype = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
    if not isinstance(dtype, torch.dtype) or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        fix = "give the token ids that a tokenizer makes of a text"
        raise DtypeError(what="ids", found=dtype, expected="a torch.Tensor of integers", fix=fix)
    if min(window, windows, batch) < 1:
        found, fix = f"window={window}, windows={windows}, batch={batch}", "give whole numbers from 1 on"
        raise ShapeError(what="what is asked for", found=found, expected="1 or more of each", fix=fix)
    shape = tuple(ids.shape)
    if len(shape) != 1:
        fix = "flatten it, or pick a row of it: ids.flatten(), ids[0]" if shape else "give the ids of a text"
        raise ShapeError(what="ids", found=shape, expected="one dimension", fix=fix)
    if shape[0] < window:
        fix = "give more text or a smaller window"
        raise ShapeError(what="ids", found=shape, expected=f"[{window} or more]", fix=fix)
    whole = ids[: len(ids) // window * window].to(torch.int64).view(-1, window)
    count = min(windows, whole.shape[0])
    chosen = whole[torch.arange(count) * whole.shape[0] // count]
    return list(chosen.split(next(size for size in range(min(batch, count), 0, -1) if count % size == 0)))


def capture(
    model: nn.Module,
    batches: Iterable[Any],
    linears: Iterable[str],
    *,
    gram: bool = False,
    rows: int = 0,
    coded: Coded | None = None,
    kind: Kind = lambda name: None,
    stepwise: bool = False,
    device: torch.device | str | None = None,
    forward: Forward = causal_lm,
) -> Generator[dict[str, InputStatistics], None, None]:
    """Statistics of the inputs of linears, some linears at a time, in the order the model calls them.

    The caller may replace the linears it was just given: later statistics are of the model so changed.
    Linears of one kind that read the same tensor share one :class:`InputStatistics`. A linear that is never called
    has a ``count`` of 0. Where the model is a chain of blocks (see :func:`find_chain`), memory holds the
    data between two blocks and the sums of one block; other models, and linears outside of the blocks,
    are run whole, for at most :data:`BUDGET` bytes of sums at a time.

    Args:
        model: is in eval mode until the last statistics are given, or the iterator is closed.
        batches: what ``forward`` takes; of one shape, else no blocks are recognized.
        linears: names of modules that have ``in_features``.
        gram, rows: what to gather beside counts and maxima, see :class:`InputStatistics`.
        coded: what to gather in place of an input; the same for all linears of a kind.
        kind: tells apart linears for which ``coded`` differs.
        stepwise: give the linears that read one tensor at a time, instead of a block at a time.
        device: where each block is during its turn; left out, it stays where it is.
        forward: runs the model on a batch.

    Raises:
        LayerError: no batches, or a model that is no language model of transformers without ``forward``.
    """
    batches = list(batches)
    if not batches:
        raise LayerError(
            layer=type(model).__name__, rule="there are no batches to run it on", fix="give token_batches of a text"
        )
    wanted = list(dict.fromkeys(linears))
    gather = _Gather(gram, rows, coded)
    with evaluating(model):
        yield from _steps(model, batches, wanted, gather, kind, stepwise, device, forward)


def _steps(
    model: nn.Module,
    batches: list[Any],
    wanted: list[str],
    gather: _Gather,
    kind: Kind,
    stepwise: bool,
    device: torch.device | str | None,
    forward: Forward,
) -> Iterator[dict[str, InputStatistics]]:
    """What :func:`capture` gives."""
    chain = find_chain(model, batches, forward)
    if chain is not None:
        home = _device(model)
        where = home if device is None else torch.device(device)
        # blocks behind the last that is wanted need not run
        last = max((i for i, (name, _) in enumerate(chain.blocks) if _inside(name, wanted)), default=-1)
        for i, ((name, module), call) in enumerate(zip(chain.blocks[: last + 1], chain.calls, strict=False)):
            mine = _inside(name, wanted)
            wanted = [n for n in wanted if n not in mine]
            module.to(where)
            block = _Block(model, name, call.to(where), chain.data)
            groups = _groups(block, mine, kind)
            for step in [[g] for g in groups] if stepwise else [groups] if groups else []:
                yield gather(block, step)
            if i < last:
                block.advance()
            block.module.to(home)
    if wanted:
        whole = _Whole(model, batches, forward)
        groups = _groups(whole, wanted, kind)
        for step in [[g] for g in groups] if stepwise else _within_budget(whole, groups):
            yield gather(whole, step)


def _inside(block: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if f"{name}.".startswith(f"{block}.")]


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


class _Whole:
    """A model, run on one batch after the other."""

    def __init__(self, model: nn.Module, batches: Sequence[Any], forward: Forward) -> None:
        self.model, self.forward, self.data = model, forward, batches

    def linear(self, name: str) -> nn.Module:
        """The module of a name; the caller may have replaced it since the last time."""
        return self.model.get_submodule(name)

    def run(self, x: Any) -> Any:
        """Run one batch."""
        with torch.no_grad():
            return self.forward(self.model, x)


class _Block:
    """One block of a model, run on the data that the block before it left."""

    def __init__(self, model: nn.Module, name: str, call: Call, data: list[Tensor]) -> None:
        self.model, self.name, self.call, self.data = model, name, call, data

    @property
    def module(self) -> nn.Module:
        """The block; where it is itself a linear, the caller may have replaced it."""
        return self.model.get_submodule(self.name)

    def linear(self, name: str) -> nn.Module:
        """The module of a name; the caller may have replaced it since the last time."""
        return self.model.get_submodule(name)

    def run(self, x: Tensor) -> Tensor:
        """The block's output."""
        with torch.no_grad():
            return self.call.run(self.module, x.to(_device(self.module)))

    def advance(self) -> None:
        """Replace the data by the block's outputs."""
        for i, x in enumerate(self.data):
            self.data[i] = self.run(x).to(x.device)


def _groups(stage: _Whole | _Block, names: Sequence[str], kind: Kind) -> list[list[str]]:
    """Linears that read the same tensors together, in the order of the first batch's calls; then uncalled ones."""
    if not names:
        return []
    read: dict[str, list[Tensor]] = {}
    with _reading(stage, names, lambda name, x: read.setdefault(name, []).append(x)):
        stage.run(stage.data[0])
    groups: dict[object, list[str]] = {}
    for name, tensors in read.items():  # all tensors are alive, so that ids differ
        groups.setdefault((kind(name), *map(id, tensors)), []).append(name)
    return [*groups.values(), *([name] for name in names if name not in read)]


def _within_budget(stage: _Whole | _Block, groups: list[list[str]]) -> Iterator[list[list[str]]]:
    step: list[list[str]] = []
    used = 0
    for group in groups:
        size = 8 * int(stage.linear(group[0]).in_features) ** 2  # type: ignore[arg-type]
        if step and used + size > BUDGET:
            yield step
            step, used = [], 0
        step.append(group)
        used += size
    if step:
        yield step


@contextmanager
def _reading(stage: _Whole | _Block, names: Iterable[str], see: Callable[[str, Tensor], Any]) -> Iterator[None]:
    """Within, ``see(name, x)`` is told of each input x of the linears."""
    with ExitStack() as hooks:
        for name in names:

            def hook(_: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                see(name, args[0])

            hooks.enter_context(stage.linear(name).register_forward_pre_hook(hook))
        yield


@dataclass(frozen=True)
class _Gather:
    """What :func:`capture` was asked to gather."""

    gram: bool
    rows: int
    coded: Coded | None

    def __call__(self, stage: _Whole | _Block, groups: list[list[str]]) -> dict[str, InputStatistics]:
        """Run all batches; the statistics of each linear of some groups."""
        leaders = [group[0] for group in groups]
        found = {name: self._statistics(stage.linear(name)) for name in leaders}

        def add(name: str, x: Tensor) -> None:
            found[name].add(x if self.coded is None else self.coded(name, x))

        with _reading(stage, leaders, add):
            for x in stage.data:
                stage.run(x)
        return {name: found[group[0]] for group in groups for name in group}

    def _statistics(self, linear: nn.Module) -> InputStatistics:
        k = int(linear.in_features)  # type: ignore[arg-type]
        return InputStatistics(k, _device(linear), gram=self.gram, rows=self.rows)
