"""One token at a time through a Llama model of transformers, with a fixed cache: what a CUDA graph can hold."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Decoder:
    """Greedy decoding at batch 1. All state lies in fixed tensors, so that :meth:`step` can be captured."""

    def __init__(self, model: nn.Module, length: int) -> None:
        self.model, config = model, model.config
        embedding = model.get_input_embeddings().weight
        self.heads, self.shared = config.num_attention_heads, config.num_key_value_heads
        self.side = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        new = {"device": embedding.device}
        self.ids = torch.zeros(1, dtype=torch.long, **new)
        self.position = torch.zeros(1, dtype=torch.long, **new)
        self.places = torch.arange(length, **new)
        shape = (config.num_hidden_layers, self.shared, length, self.side)
        self.keys, self.values = (torch.zeros(shape, dtype=embedding.dtype, **new) for _ in range(2))
        cos, sin = model.model.rotary_emb(embedding[:1], self.places[None])
        self.cos, self.sin = cos[0], sin[0]  # [length, side]

    def reset(self, token: int) -> None:
        """Begin with a token."""
        self.ids.fill_(token)
        self.position.zero_()
        self.keys.zero_()
        self.values.zero_()

    def step(self) -> None:
        """Read the token at the present position, put the most likely next one in its place, move on."""
        h = functional.embedding(self.ids, self.model.get_input_embeddings().weight)  # [1, hidden]
        cos, sin = (t.index_select(0, self.position) for t in (self.cos, self.sin))
        seen = (self.places <= self.position)[None, None]
        for layer, keys, values in zip(self.model.model.layers, self.keys, self.values, strict=True):
            h = h + self.attention(layer.self_attn, layer.input_layernorm(h), cos, sin, seen, keys, values)
            x = layer.post_attention_layernorm(h)
            h = h + layer.mlp.down_proj(functional.silu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x))
        logits = self.model.lm_head(self.model.model.norm(h))
        self.ids.copy_(logits.argmax(-1))
        self.position += 1

    def attention(
        self, attn: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Attention of one token over all before it, which it joins."""
        q = rotated(attn.q_proj(x).view(self.heads, 1, self.side), cos, sin)
        k = rotated(attn.k_proj(x).view(self.shared, 1, self.side), cos, sin)
        keys.index_copy_(1, self.position, k)
        values.index_copy_(1, self.position, attn.v_proj(x).view(self.shared, 1, self.side))
        y = functional.scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=seen[None], enable_gqa=True
        )
        return attn.o_proj(y.view(1, -1))

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        """Greedy tokens behind a prompt."""
        self.reset(prompt[0])
        made = []
        for i in range(len(prompt) + tokens - 1):
            self.step()
            if i + 1 < len(prompt):
                self.ids.fill_(prompt[i + 1])
            else:
                made.append(int(self.ids))
        return made


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on [heads, 1, side]."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin
