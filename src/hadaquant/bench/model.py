"""Contests of ``block`` and ``block_linears``: a diffusion transformer of FLUX's size, with random weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from hadaquant.bench.cases import Case
from hadaquant.bench.contest import Contest, Variant, far
from hadaquant.bench.products import DTYPE, check_linear
from hadaquant.bench.timing import Call, timings_of
from hadaquant.front import ada_norm, gelu_tanh
from hadaquant.nn import RotatedLinear, quantize_

HEAD = 128
EPS = 1e-6
#: How far a step whose norms and activations are computed inside the quantizing kernels, in float32 throughout,
#: may be from one that rounds them to bfloat16 in between: the codes of a few per cent of them move by one.
FUSED_ERROR = 0.03


class Block(nn.Module):
    """Attention and an MLP, each behind a LayerNorm that t modulates and in front of a gate."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.modulation = nn.Parameter(torch.randn(6, hidden) * hidden**-0.5)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, t: Tensor, front_ends: bool) -> Tensor:
        """x [1, tokens, hidden], t [6, hidden] -> [1, tokens, hidden].

        ``front_ends``: norms and GELU inside the kernels that quantize what they give.
        """
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = (self.modulation + t).unbind(0)
        if front_ends:
            x = x + gate * self.out(attention(self.qkv(x, front_end=ada_norm(scale, shift, EPS))))
            h = self.up(x, front_end=ada_norm(mlp_scale, mlp_shift, EPS))
            return x + mlp_gate * self.down(h, front_end=gelu_tanh())
        x = x + gate * self.out(attention(self.qkv(modulated(x, scale, shift))))
        h = self.up(modulated(x, mlp_scale, mlp_shift))
        return x + mlp_gate * self.down(functional.gelu(h, approximate="tanh"))


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """LayerNorm without weights, then times 1 + scale, plus shift."""
    return functional.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift


def attention(qkv: Tensor) -> Tensor:
    """[1, tokens, 3 · hidden] -> [1, tokens, hidden], heads of 128."""
    q, k, v = qkv.unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Transformer(nn.Module):
    """Blocks in a row."""

    def __init__(self, blocks: int, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(blocks))

    def forward(self, x: Tensor, t: Tensor, front_ends: bool = False) -> Tensor:
        """x [1, tokens, hidden], t [6, hidden] -> [1, tokens, hidden]."""
        for block in self.blocks:
            x = block(x, t, front_ends)
        return x


def compiled_by_block(model: Transformer) -> Callable[[Tensor, Tensor, bool], Tensor]:
    """The model with its block compiled, once for all blocks."""
    torch._dynamo.reset()
    blocks = [torch.compile(block, dynamic=False) for block in model.blocks]

    def run(x: Tensor, t: Tensor, front_ends: bool) -> Tensor:
        for block in blocks:
            x = block(x, t, front_ends)
        return x

    return run


class Models:
    """A model in bfloat16, the same quantized, and inputs, built once for a contest."""

    def __init__(self, case: Case, device: torch.device) -> None:
        count, tokens, hidden = case.shape
        with torch.device(device):
            self.dense = Transformer(count, hidden).to(DTYPE).eval()
            self.x = torch.randn(1, tokens, hidden, dtype=DTYPE)
            self.t = torch.randn(6, hidden, dtype=DTYPE) * 0.2
        self.ours = copy.deepcopy(self.dense)
        quantize_(self.ours, case.format, case.rotation, skip=())
        self.linear_flops = sum(2 * tokens * m.weight.numel() for m in linears(self.dense))
        self.flops = self.linear_flops + count * 4 * tokens**2 * hidden

    def inputs(self) -> list[Tensor]:
        """What each linear of the dense model reads in a step."""
        found: list[Tensor] = []
        hooks = [m.register_forward_pre_hook(lambda _, given: found.append(given[0])) for m in linears(self.dense)]
        self.dense(self.x, self.t)
        for hook in hooks:
            hook.remove()
        return found

    def check(self) -> str | None:
        """The first block's linears, on what they truly read, against the reference."""
        dense, ours = linears(self.dense)[:4], linears(self.ours)[:4]
        for plain, layer, x in zip(dense, ours, self.inputs(), strict=False):
            if not isinstance(layer, RotatedLinear) or not isinstance(plain, nn.Linear):
                return f"{layer} was not quantized"
            oracle = RotatedLinear.from_linear(plain, layer.format, layer.rotation, backend="reference")
            wrong = check_linear(layer, oracle, x.flatten(0, -2))
            if wrong:
                return wrong
        return None


def linears(model: nn.Module) -> list[nn.Linear | RotatedLinear]:
    """All linears, in the order in which they run."""
    return [m for m in model.modules() if isinstance(m, nn.Linear | RotatedLinear)]


def block(case: Case, device: torch.device) -> Contest:
    """A whole step: attention, norms and activations are the same everywhere, unless they are front ends."""
    models = Models(case, device)

    def step(model: nn.Module, front_ends: bool = False) -> Call:
        return partial(model, models.x, models.t, front_ends)

    def ours_front_ends() -> Variant:
        call = step(models.ours, front_ends=True)
        return Variant([call], lambda: far(call(), step(models.ours)(), FUSED_ERROR))

    def compiled(model: Transformer, front_ends: bool) -> Variant:
        call = partial(compiled_by_block(model), models.x, models.t, front_ends)
        return Variant([call], lambda: far(call(), step(model)(), FUSED_ERROR))

    variants: dict[str, Callable[[], Variant]] = {
        "ours": lambda: Variant([step(models.ours)], models.check),
        "ours_front_ends": ours_front_ends,
        "torch_bf16": lambda: Variant([step(models.dense)]),
    }
    if device.type == "cuda":
        variants["ours_compile"] = partial(compiled, models.ours, front_ends=True)
        variants["torch_compile"] = partial(compiled, models.dense, front_ends=False)
    return Contest(variants, timings_of(device), flops=models.flops)


def block_linears(case: Case, device: torch.device) -> Contest:
    """The step's linears alone, one after another, each on what it truly reads."""
    models = Models(case, device)
    inputs = models.inputs()

    def over(model: nn.Module) -> Call:
        pairs = list(zip(linears(model), inputs, strict=True))

        def call() -> None:
            for layer, x in pairs:
                layer(x)

        return call

    variants: dict[str, Callable[[], Variant]] = {
        "ours": lambda: Variant([over(models.ours)], models.check),
        "torch_bf16": lambda: Variant([over(models.dense)]),
    }
    return Contest(variants, timings_of(device), flops=models.linear_flops)
