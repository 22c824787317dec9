"""One decoder for every family: a spec says what it is, Weights where its tensors are.

The forward pass reads as the equations do. It knows nothing of batches and sequences: `tokens` and `positions` are
flat, and what belongs together is the attention plan's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bloomery.attention.base import Backend
from bloomery.kernels.gemv import Norm
from bloomery.layers.attention import AttentionBlock, Context
from bloomery.layers.embedding import Embedding, Head
from bloomery.layers.linear import Add, Linear, finish
from bloomery.layers.mlp import MlpBlock
from bloomery.layers.moe import MoeBlock
from bloomery.layers.norm import Stream, normalize, value
from bloomery.layers.rope import table
from bloomery.models.weights import Weights
from bloomery.native.team import team
from bloomery.parallel.groups import ALONE, Group
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
    group: Group = ALONE  # where both blocks of a parallel layer are parts of one sum

    def __call__(self, x: Stream, cache: torch.Tensor, context: Context) -> Stream:
        if self.spec.parallel:
            return self._parallel(x, cache, context)
        add = Add(context.kept(x), self.spec.residual_scale)
        if self.attn_post_norm is None:
            x = self.attention(x, cache, context, self.attn_norm, add)
        else:
            x = finish(
                normalize(self.attention(x, cache, context, self.attn_norm), self.attn_post_norm),
                add,
            )
        x = x if self.attn_sum_norm is None else normalize(x, self.attn_sum_norm)
        add = Add(x, self.spec.residual_scale)
        if self.mlp_post_norm is None:
            x = self.mlp(x, self.mlp_norm, add)
        else:
            x = finish(normalize(self.mlp(x, self.mlp_norm), self.mlp_post_norm), add)
        return x if self.mlp_sum_norm is None else normalize(x, self.mlp_sum_norm)

    def _parallel(self, x: Stream, cache: torch.Tensor, context: Context) -> Stream:
        """Both blocks read the same input and add to the same residual."""
        if self.group.size > 1:
            return self._summed(x, cache, context)
        if self.mlp_norm is not None:
            summed = self.attention(x, cache, context, self.attn_norm, Add(context.kept(x)))
            return self.mlp(value(context.kept(x)), self.mlp_norm, Add(summed))
        normed = normalize(x, self.attn_norm)
        summed = self.attention(normed, cache, context, None, Add(context.kept(x)))
        return self.mlp(context.kept(normed), None, Add(summed))

    def _summed(self, x: Stream, cache: torch.Tensor, context: Context) -> Stream:
        """Both blocks' parts, added up over the ranks at once."""
        normed = normalize(x, self.attn_norm)
        attended = value(self.attention(normed, cache, context))
        read = (
            context.kept(normed)
            if self.mlp_norm is None
            else normalize(context.kept(x), self.mlp_norm)
        )
        return finish(self.group.sum(attended + value(self.mlp(read))), Add(context.kept(x)))


class Decoder:
    """All of a model, or what one rank has of it: some layers, and of these what the group's layout leaves here.

    The first stage of a pipeline has the embedding, the last one the head; `spec` is of the part that is here.
    """

    def __init__(
        self, model: Model, weights: Weights, group: Group = ALONE, layers: range | None = None
    ):
        self.whole = model
        layers = range(len(model.layers)) if layers is None else layers
        spec = self.spec = replace(
            model, layers=tuple(weights.layout.layer(model.layers[i]) for i in layers)
        )
        self.device = weights.device
        self.dtype = weights.dtype
        self.first = layers.start == 0
        self.last = layers.stop == len(model.layers)
        # In the model's own precision: Gemma was trained with a rounded factor.
        self.embed_scale = float(torch.tensor(spec.embed_scale, dtype=self.dtype))
        names = weights.names
        extra = weights.names.extra
        width = spec.hidden
        begins = self.first
        ends = self.last
        self.embed = embedding(spec, weights, group) if begins else None
        self.positions = (
            weights.table(extra["positions"], spec.positions, width)
            if begins and spec.positions
            else None
        )
        narrow = spec.embed_dim  # of embeddings that are projected to the model's width and back
        self.project_in = (
            weights.outside(extra["project_in"], width, narrow) if begins and narrow else None
        )
        self.embed_norm = (
            weights.norm(spec.embed_norm, extra.get("embed_norm", ""), width) if begins else None
        )
        self.layers = [
            decoder_layer(model.layers[i], width, weights, names.layer.format(i=i), group)
            for i in layers
        ]
        self.project_out = (
            weights.outside(extra["project_out"], narrow, width) if ends and narrow else None
        )
        self.final_norm = weights.norm(spec.final_norm, names.final_norm, width) if ends else None
        self.head = head(spec, weights, self.embed, group) if ends else None
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
        wanted: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """tokens, positions, slots [n] -> hidden states [n, hidden], normed and ready for `logits`.

        `wanted` [m]: only these lines' states are asked for. The others end with the last layer's keys and values.
        `hidden` [n, hidden]: what the layers before have made of the tokens, where these are elsewhere; from a decoder
        without the last layer come such states again.
        """
        x: Stream = self._embedded(tokens, positions) if hidden is None else hidden
        context = self._context(positions, slots, backend, plan)
        for layer, cache in zip(self.layers, caches, strict=True):
            final = self.last and layer is self.layers[-1]
            x = layer(x, cache, replace(context, keep=wanted) if final else context)
        return normalize(x, self.final_norm)

    def _embedded(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.embed is None:
            raise RuntimeError(
                "this part of the model begins behind the embedding: it needs hidden states"
            )
        x = self.embed(tokens)
        if self.embed_scale != 1.0:
            x = x * self.embed_scale
        if self.project_in is not None:
            x = self.project_in(x)
        if self.positions is not None:
            x = x + self.positions[positions + self.spec.position_offset]
        return normalize(x, self.embed_norm)

    def _context(
        self, positions: torch.Tensor, slots: torch.Tensor, backend: Backend, plan: Any
    ) -> Context:
        if positions.is_cuda or team().active:  # kernels look the angles up themselves
            return Context(backend, plan, slots, self.ropes, positions)
        angles = {rope: (cos[positions], sin[positions]) for rope, (cos, sin) in self.ropes.items()}
        return Context(backend, plan, slots, angles, None)

    def features(self, state: torch.Tensor) -> torch.Tensor:
        """A pooled state [hidden] as others know the last hidden state: in the width of the embeddings."""
        if self.project_out is None:
            return state
        return self.project_out(state[None].to(self.dtype))[0].float()

    def logits(self, hidden: torch.Tensor, wide: bool = True) -> torch.Tensor:
        """[n, hidden] -> [n, vocab]; call it only for positions that are asked for.

        In float32, unless not `wide` and nothing is left to compute: then as the product gives them.
        """
        if self.head is None:
            raise RuntimeError("this part of the model ends before the head")
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        logits = self.head(hidden)
        cap = self.spec.logit_softcap
        if not wide and self.spec.logit_scale == 1.0 and cap is None:
            return logits
        logits = logits.float()
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        return logits if cap is None else cap * torch.tanh(logits / cap)


def embedding(spec: Model, weights: Weights, group: Group) -> Embedding:
    part = weights.layout.table(spec.vocab)
    matrix = weights.outside(
        weights.names.embed, spec.vocab, spec.embed_dim or spec.hidden, part=part
    ).matrix
    return Embedding(matrix, *weights.layout.words(spec.vocab), group)


def head(spec: Model, weights: Weights, embed: Embedding | None, group: Group) -> Head:
    """A checkpoint that says tied and stores a head all the same means the one it stores."""
    name = weights.names.head
    part = weights.layout.table(spec.vocab)
    if not spec.tied or f"{name}.weight" in weights.source.names():
        linear = weights.outside(
            name, spec.vocab, spec.embed_dim or spec.hidden, spec.head_bias, part
        )
    else:
        bias = weights.bias(f"{name}.bias", spec.vocab, part) if spec.head_bias else None
        linear = Linear((embed or embedding(spec, weights, group)).matrix, bias)
    return Head(linear, spec.vocab, group)


def decoder_layer(
    spec: Layer, hidden: int, weights: Weights, prefix: str, group: Group = ALONE
) -> DecoderLayer:
    def norm(role: str) -> Norm | None:
        return weights.norm(getattr(spec, role), prefix + weights.names.extra.get(role, ""), hidden)

    inner = ALONE if spec.parallel else group  # parts of one sum are not added up one by one
    return DecoderLayer(
        spec,
        attention_block(spec.attention, hidden, weights, prefix, inner),
        moe_block(spec.mlp, hidden, weights, prefix, inner)
        if isinstance(spec.mlp, Moe)
        else mlp_block(spec.mlp, hidden, weights, prefix, inner),
        norm("attn_norm"),
        norm("attn_post_norm"),
        norm("mlp_norm"),
        norm("mlp_post_norm"),
        norm("attn_sum_norm"),
        norm("mlp_sum_norm"),
        group,
    )


def attention_block(
    spec: Attention, hidden: int, weights: Weights, prefix: str, group: Group
) -> AttentionBlock:
    names = weights.names
    dim = spec.head_dim
    layout = weights.layout
    parts = [heads * dim for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
    q_heads, kv_heads = layout.heads(spec)

    def norm(role: str, heads: int, own: tuple[int, int]) -> Norm | None:
        sizes: dict[str, int | tuple[int, int]] = {
            "head": dim,
            "each": (heads, dim),
            "all": heads * dim,
        }
        return weights.norm(
            spec.qk_norm, prefix + names.extra.get(role, ""), sizes[spec.qk_norm_over], own
        )

    return AttentionBlock(
        spec,
        weights.linear(
            prefix, names.attn_qkv, parts, hidden, spec.bias, heads=spec, part=layout.qkv(spec)
        ),
        weights.linear(
            prefix,
            names.attn_out,
            [hidden],
            parts[0],
            spec.out_bias,
            part=layout.out(spec),
            group=group,
        ),
        norm("q_norm", spec.num_heads, q_heads),
        norm("k_norm", spec.num_kv_heads, kv_heads),
        layout,
    )


def mlp_block(
    spec: Mlp,
    hidden: int,
    weights: Weights,
    prefix: str,
    group: Group,
    up: str | Split | Fused | None = None,
    down: str | None = None,
) -> MlpBlock:
    names = weights.names
    parts = [spec.size] * (2 if spec.gated else 1)
    layout = weights.layout
    return MlpBlock(
        spec,
        weights.linear(prefix, up or names.mlp_up, parts, hidden, spec.bias, part=layout.up(spec)),
        weights.linear(
            prefix,
            down or names.mlp_down,
            [hidden],
            spec.size,
            spec.bias,
            part=layout.down(spec),
            group=group,
        ),
    )


def moe_block(spec: Moe, hidden: int, weights: Weights, prefix: str, group: Group) -> MoeBlock:
    names = weights.names
    places = range(spec.experts)
    layout = weights.layout
    up = weights.experts(
        prefix, names.expert_up, places, [spec.mlp.size] * 2, hidden, layout.up(spec.mlp)
    )
    down = weights.experts(
        prefix, names.expert_down, places, [hidden], spec.mlp.size, layout.down(spec.mlp)
    )
    shared = gate = None
    if (
        spec.shared is not None
    ):  # its part is added to the other experts', and all of it summed once
        shared = mlp_block(
            spec.shared, hidden, weights, prefix, ALONE, names.shared_up, names.shared_down
        )
    if spec.shared_gate:
        gate = weights.linear(prefix, names.extra["shared_gate"], [1], hidden, False)
    router = weights.linear(prefix, names.extra["router"], [spec.experts], hidden, False)
    return MoeBlock(spec, router, up, down, shared, gate, group)
