"""One token at a time through a Llama model of transformers, with a fixed cache: what a CUDA graph can hold."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from hadaquant import RotatedLinear, share_input
from hadaquant.front import rms_norm, silu_mul


class Decoder:
    """Greedy decoding at batch 1. All state lies in fixed tensors, so that :meth:`step` can be captured.

    ``front_ends``: the norms and SiLU(gate) · up run inside the kernels that quantize what they give, and linears
    that read one input quantize it once. For models of RotatedLinear layers.
    """

    def __init__(self, model: nn.Module, length: int, front_ends: bool = False) -> None:
        self.model, config = model, model.config
        self.front_ends = front_ends
        if front_ends:
            for layer in model.model.layers:
                share_input([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj])
                share_input([layer.mlp.gate_proj, layer.mlp.up_proj])
        embedding = model.get_input_embeddings().weight
        self.side = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        new = {"device": embedding.device}
        self.ids = torch.zeros(1, dtype=torch.long, **new)
        self.position = torch.zeros(1, dtype=torch.long, **new)
        self.places = torch.arange(length, **new)
        shape = (config.num_hidden_layers, config.num_key_value_heads, length, self.side)
        self.keys, self.values = (torch.zeros(shape, dtype=embedding.dtype, **new) for _ in range(2))
        # by the CPU, since each device has its own sine
        rotary = copy.deepcopy(model.model.rotary_emb).cpu()
        cos, sin = rotary(embedding[:1].cpu(), self.places[None].cpu())
        self.cos, self.sin = cos[0].to(embedding.device), sin[0].to(embedding.device)  # [length, side]

    def reset(self, token: int) -> None:
        """Begin with a token."""
        self.ids.fill_(token)
        self.position.zero_()
        self.keys.zero_()
        self.values.zero_()

    def step(self) -> Tensor:
        """Read the token at the present position, put the most likely next one in its place, move on.

        Returns the logits [1, vocabulary].
        """
        h = functional.embedding(self.ids, self.model.get_input_embeddings().weight)  # [1, hidden]
        cos, sin = (t.index_select(0, self.position) for t in (self.cos, self.sin))
        seen = (self.places <= self.position)[None, None]
        for layer, keys, values in zip(self.model.model.layers, self.keys, self.values, strict=True):
            attn, mlp = layer.self_attn, layer.mlp
            q, k, v = self.normed(layer.input_layernorm, h, attn.q_proj, attn.k_proj, attn.v_proj)
            h = h + attn.o_proj(self.attention(q, k, v, cos, sin, seen, keys, values))
            gate, up = self.normed(layer.post_attention_layernorm, h, mlp.gate_proj, mlp.up_proj)
            if self.front_ends:
                h = h + mlp.down_proj(gate, front_end=silu_mul(up))
            else:
                h = h + mlp.down_proj(functional.silu(gate) * up)
        logits = self.model.lm_head(self.model.model.norm(h))
        self.ids.copy_(logits.argmax(-1))
        self.position += 1
        return logits

    def normed(self, norm: nn.Module, h: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
        """Linears of the norm of h."""
        if self.front_ends:
            front_end = rms_norm(norm.weight, norm.variance_epsilon)
            return tuple(linear(h, front_end=front_end) for linear in linears)
        x = norm(h)
        return tuple(linear(x) for linear in linears)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, seen: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Attention of one token over all before it, which it joins: q [1, hidden] -> [1, hidden]."""
        q, k = (rotated(t.view(-1, 1, self.side), cos, sin) for t in (q, k))
        keys.index_copy_(1, self.position, k)
        values.index_copy_(1, self.position, v.view(-1, 1, self.side))
        y = functional.scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=seen[None], enable_gqa=True
        )
        return y.view(1, -1)

    def generate(self, prompt: list[int], tokens: int) -> tuple[Tensor, Tensor]:
        """Greedy tokens [tokens] behind a prompt, and their logits [tokens, vocabulary]."""
        self.reset(prompt[0])
        made, seen = [], []
        for i in range(len(prompt) + tokens - 1):
            logits = self.step()
            if i + 1 < len(prompt):
                self.ids.fill_(prompt[i + 1])
            else:
                made.append(self.ids.clone())
                seen.append(logits)
        return torch.cat(made), torch.cat(seen)


class _Norm(nn.Module):
    """RMSNorm in float64."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt() * self.weight


def in_double(model: nn.Module) -> nn.Module:
    """A model of RotatedLinear layers, all but them in float64.

    They read float32 and give float32. Two devices sum in different orders, but what they read is then the same unless
    a float64 difference of 1e-16 crosses a float32 boundary: what is left to differ is the linears.
    """
    model = model.double()
    for name, module in list(model.named_modules()):
        if isinstance(module, RotatedLinear):
            module.register_forward_pre_hook(lambda _, arguments: (arguments[0].float(), *arguments[1:]))
            module.register_forward_hook(lambda _, arguments, y: y.double())
        elif hasattr(module, "variance_epsilon"):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, _Norm(module))
    return model


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on [heads, 1, side]."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin
