"""One decoder for every family: a spec says what it is, Weights where its tensors are.

The forward pass reads as the equations do. It knows nothing of batches and sequences: `tokens` and `positions` are
flat, and what belongs together is the attention plan's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bloomery.attention.base import Backend
from bloomery.kernels.gemv import Norm
from bloomery.layers.attention import AttentionBlock, Context
from bloomery.layers.linear import Add, Linear, finish
from bloomery.layers.mlp import MlpBlock
from bloomery.layers.moe import MoeBlock
from bloomery.layers.norm import Stream, normalize, value
from bloomery.layers.rope import table
from bloomery.models.weights import Weights
from bloomery.quant.base import Ready
from bloomery.spec import Attention, Fused, Layer, Mlp, Model, Moe, Rope, Split


@dataclass(frozen=True)
class DecoderLayer:
    spec: Layer
    attention: AttentionBlock
    mlp: MlpBlock | MoeBlock
    attn_norm: Norm | None
    attn_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp_post_norm: Norm | None
    attn_sum_norm: Norm | None
    mlp_sum_norm: Norm | None

    def __call__(self, x: Stream, cache: torch.Tensor, context: Context) -> Stream:
        if self.spec.parallel:
            return self._parallel(x, cache, context)
        add = Add(x, self.spec.residual_scale)
        if self.attn_post_norm is None:
            x = self.attention(x, cache, context, self.attn_norm, add)
        else:
            x = finish(normalize(self.attention(x, cache, context, self.attn_norm), self.attn_post_norm), add)
        x = x if self.attn_sum_norm is None else normalize(x, self.attn_sum_norm)
        add = Add(x, self.spec.residual_scale)
        if self.mlp_post_norm is None:
            x = self.mlp(x, self.mlp_norm, add)
        else:
            x = finish(normalize(self.mlp(x, self.mlp_norm), self.mlp_post_norm), add)
        return x if self.mlp_sum_norm is None else normalize(x, self.mlp_sum_norm)

    def _parallel(self, x: Stream, cache: torch.Tensor, context: Context) -> Stream:
        """Both blocks read the same input and add to the same residual."""
        if self.mlp_norm is not None:
            summed = self.attention(x, cache, context, self.attn_norm, Add(x))
            return self.mlp(value(x), self.mlp_norm, Add(summed))
        normed = normalize(x, self.attn_norm)
        return self.mlp(normed, None, Add(self.attention(normed, cache, context, None, Add(x))))


class Decoder:
    def __init__(self, spec: Model, weights: Weights):
        self.spec, self.device, self.dtype = spec, weights.device, weights.dtype
        names, extra, width = weights.names, weights.names.extra, spec.embed_dim or spec.hidden
        self.embed = weights.outside(names.embed, spec.vocab, width).matrix
        # In the model's own precision: Gemma was trained with a rounded factor.
        self.embed_scale = float(torch.tensor(spec.embed_scale, dtype=self.dtype))
        self.positions = weights.table(extra["positions"], spec.positions, spec.hidden) if spec.positions else None
        self.project_in = self.project_out = None
        if spec.embed_dim is not None:
            self.project_in = weights.outside(extra["project_in"], spec.hidden, width)
            self.project_out = weights.outside(extra["project_out"], width, spec.hidden)
        self.embed_norm = weights.norm(spec.embed_norm, extra.get("embed_norm", ""), spec.hidden)
        self.layers = [
            decoder_layer(layer, spec.hidden, weights, names.layer.format(i=i)) for i, layer in enumerate(spec.layers)
        ]
        self.final_norm = weights.norm(spec.final_norm, names.final_norm, spec.hidden)
        self.head = head(spec, weights, self.embed)
        self.ropes: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = {}

    def reach(self, length: int) -> None:
        """Make the position tables for sequences of at most `length`; before the first forward pass."""
        for rope in {layer.attention.position for layer in self.spec.layers}:
            if isinstance(rope, Rope):
                cos, sin = table(rope, length)
                self.ropes[rope] = cos.to(self.device), sin.to(self.device)

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        caches: Sequence[torch.Tensor],
        backend: Backend,
        plan: Any,
    ) -> torch.Tensor:
        """tokens, positions, slots [n] -> hidden states [n, hidden], normed and ready for `logits`."""
        embedded = self.embed.gather(tokens)
        x: Stream = embedded if self.embed_scale == 1.0 else embedded * self.embed_scale
        if self.project_in is not None:
            x = self.project_in(x)
        if self.positions is not None:
            x = value(x) + self.positions[positions + self.spec.position_offset]
        x = normalize(x, self.embed_norm)
        context = self._context(positions, slots, backend, plan)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, context)
        return normalize(x, self.final_norm)

    def _context(self, positions: torch.Tensor, slots: torch.Tensor, backend: Backend, plan: Any) -> Context:
        if positions.is_cuda:  # kernels look the angles up themselves
            return Context(backend, plan, slots, self.ropes, positions)
        angles = {rope: (cos[positions], sin[positions]) for rope, (cos, sin) in self.ropes.items()}
        return Context(backend, plan, slots, angles, None)

    def logits(self, hidden: torch.Tensor, wide: bool = True) -> torch.Tensor:
        """[n, hidden] -> [n, vocab]; call it only for positions that are asked for.

        In float32, unless not `wide` and nothing is left to compute: then as the product gives them.
        """
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        logits, cap = self.head(hidden), self.spec.logit_softcap
        if not wide and self.spec.logit_scale == 1.0 and cap is None:
            return logits
        logits = logits.float()
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        return logits if cap is None else cap * torch.tanh(logits / cap)


def head(spec: Model, weights: Weights, embed: Ready) -> Linear:
    """A checkpoint that says tied and stores a head all the same means the one it stores."""
    name, width = weights.names.head, spec.embed_dim or spec.hidden
    if not spec.tied or f"{name}.weight" in weights.source.names():
        return weights.outside(name, spec.vocab, width, spec.head_bias)
    bias = weights.vector(f"{name}.bias", spec.vocab).to(weights.dtype) if spec.head_bias else None
    return Linear(embed, bias)


def decoder_layer(spec: Layer, hidden: int, weights: Weights, prefix: str) -> DecoderLayer:
    def norm(role: str) -> Norm | None:
        return weights.norm(getattr(spec, role), prefix + weights.names.extra.get(role, ""), hidden)

    return DecoderLayer(
        spec,
        attention_block(spec.attention, hidden, weights, prefix),
        moe_block(spec.mlp, hidden, weights, prefix)
        if isinstance(spec.mlp, Moe)
        else mlp_block(spec.mlp, hidden, weights, prefix),
        norm("attn_norm"), norm("attn_post_norm"), norm("mlp_norm"), norm("mlp_post_norm"),
        norm("attn_sum_norm"), norm("mlp_sum_norm"),
    )  # fmt: skip


def attention_block(spec: Attention, hidden: int, weights: Weights, prefix: str) -> AttentionBlock:
    names, dim = weights.names, spec.head_dim
    parts = [heads * dim for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]

    def norm(role: str, heads: int) -> Norm | None:
        sizes: dict[str, int | tuple[int, int]] = {"head": dim, "each": (heads, dim), "all": heads * dim}
        size = sizes[spec.qk_norm_over]
        return weights.norm(spec.qk_norm, prefix + names.extra.get(role, ""), size)

    return AttentionBlock(
        spec,
        weights.linear(prefix, names.attn_qkv, parts, hidden, spec.bias, heads=spec),
        weights.linear(prefix, names.attn_out, [hidden], parts[0], spec.out_bias),
        norm("q_norm", spec.num_heads),
        norm("k_norm", spec.num_kv_heads),
    )


def mlp_block(
    spec: Mlp,
    hidden: int,
    weights: Weights,
    prefix: str,
    up: str | Split | Fused | None = None,
    down: str | None = None,
) -> MlpBlock:
    names, parts = weights.names, [spec.size] * (2 if spec.gated else 1)
    return MlpBlock(
        spec,
        weights.linear(prefix, up or names.mlp_up, parts, hidden, spec.bias),
        weights.linear(prefix, down or names.mlp_down, [hidden], spec.size, spec.bias),
    )


def moe_block(spec: Moe, hidden: int, weights: Weights, prefix: str) -> MoeBlock:
    names, places = weights.names, range(spec.experts)
    up = weights.experts(prefix, names.expert_up, places, [spec.mlp.size] * 2, hidden)
    down = weights.experts(prefix, names.expert_down, places, [hidden], spec.mlp.size)
    shared = gate = None
    if spec.shared is not None:
        shared = mlp_block(spec.shared, hidden, weights, prefix, names.shared_up, names.shared_down)
    if spec.shared_gate:
        gate = weights.linear(prefix, names.extra["shared_gate"], [1], hidden, False)
    router = weights.linear(prefix, names.extra["router"], [spec.experts], hidden, False)
    return MoeBlock(spec, router, up, down, shared, gate)
