"""A model as a chain of blocks, so that one block at a time is enough to follow its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from hadaquant.errors import LayerError

#: ``forward(model, batch)`` runs a model on one batch.
Forward = Callable[[nn.Module, Any], Any]


def causal_lm(model: nn.Module, batch: Tensor) -> Any:
    """Run a causal language model of transformers on int64 [B, T] token ids.

    Raises:
        LayerError: the model is none.
    """
    taken = signature(model.forward).parameters.values()
    if not any(p.name == "use_cache" or p.kind is p.VAR_KEYWORD for p in taken):
        raise LayerError(
            layer=type(model).__name__,
            rule="its forward takes no use_cache, so it is no language model of transformers",
            fix="give forward=, a function of model and batch that runs it",
        )
    return model(batch, use_cache=False)


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Within, models are in eval mode. Then each module is as it was, and one put in its place as it was."""
    before = [{name: m.training for name, m in model.named_modules(remove_duplicate=False)} for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, modes in zip(models, before, strict=True):
            for name, module in model.named_modules(remove_duplicate=False):
                module.training = modes.get(name, module.training)


@dataclass
class Call:
    """How a block is called: all arguments but the first, which is the data."""

    rest: tuple[Any, ...]
    keywords: dict[str, Any]

    def same_as(self, other: Call) -> bool:
        """Whether the arguments have equal values."""
        (mine, shape), (theirs, their_shape) = (tree_flatten((c.rest, c.keywords)) for c in (self, other))
        return shape == their_shape and all(_same(a, b) for a, b in zip(mine, theirs, strict=True))

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        """The block's output data."""
        return data_of(block(x, *self.rest, **self.keywords))

    def to(self, device: torch.device) -> Call:
        """The same arguments on a device."""
        rest, keywords = tree_map(lambda a: a.to(device) if isinstance(a, Tensor) else a, (self.rest, self.keywords))
        return Call(rest, keywords)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
    return a is b or (type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b))


def data_of(output: Any) -> Any:
    """The data of a block's output, which may be the first of several things."""
    return output[0] if isinstance(output, tuple | list) else output


@dataclass
class Chain:
    """Blocks that are called one after the other, each on the output of the one before.

    ``data`` holds the input of the next block for each batch; ``calls`` the other arguments of each
    block, which are the same for all batches.
    """

    blocks: list[tuple[str, nn.Module]]
    calls: list[Call]
    data: list[Tensor]


def find_chain(model: nn.Module, batches: Sequence[Any], forward: Forward) -> Chain | None:
    """The model's chain of blocks with the first block's inputs, or None if the model is not such a chain.

    Blocks are the members of the ``nn.ModuleList`` that holds most parameters. That they form a chain is
    seen by running the first and the last batch.
    """
    blocks = _longest_list(model)
    if not blocks:
        return None
    calls = _trace(model, blocks, batches[0], forward)
    again = calls if len(batches) == 1 else _trace(model, blocks, batches[-1], forward)
    if calls is None or again is None or not all(a.same_as(b) for a, b in zip(calls, again, strict=True)):
        return None
    data = [_input_of(model, blocks[0][1], batch, forward) for batch in batches]
    return Chain(blocks, calls, data)


def _longest_list(model: nn.Module) -> list[tuple[str, nn.Module]]:
    def size(members: nn.ModuleList) -> int:
        return sum(p.numel() for p in members.parameters())

    # the outermost of nested lists is met first, and max keeps the first of equals
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        return []
    name, members = max(lists, key=lambda found: size(found[1]))
    return [(f"{name}.{i}".lstrip("."), block) for i, block in enumerate(members)]


def _trace(model: nn.Module, blocks: list[tuple[str, nn.Module]], batch: Any, forward: Forward) -> list[Call] | None:
    """Each block's call in a run of the model, or None where the blocks form no chain."""
    calls: list[Call] = []
    outputs: list[Any] = []
    order: list[nn.Module] = []

    def before(block: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        chained = bool(args) and isinstance(args[0], Tensor) and (not outputs or args[0] is outputs[-1])
        order.append(block if chained else nn.Identity())
        calls.append(Call(args[1:], dict(keywords)))

    def after(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        outputs[:] = [data_of(output)]

    with ExitStack() as hooks, torch.no_grad():
        for _, block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(block.register_forward_hook(after))
        forward(model, batch)
    same = len(order) == len(blocks) and all(found is block for found, (_, block) in zip(order, blocks, strict=True))
    return calls if same else None


class _Stop(Exception):
    """Ends a run of the model that has given what was wanted."""


def _input_of(model: nn.Module, block: nn.Module, batch: Any, forward: Forward) -> Tensor:
    found: list[Tensor] = []

    def stop(_: nn.Module, args: tuple[Any, ...]) -> None:
        found.append(args[0].detach())
        raise _Stop

    with block.register_forward_pre_hook(stop), torch.no_grad(), suppress(_Stop):
        forward(model, batch)
    return found[0]
