"""Gemma: a Llama with norms stored as 1 + weight, scaled embeddings and gated GELU."""

from __future__ import annotations

from bloomery.families import Family
from bloomery.families.llama import NAMES, attention, model
from bloomery.families.reader import ACTIVATIONS, Reader, defaults
from bloomery.spec import Layer, Mlp, Model, Norm

GEMMA = defaults(
    vocab=256000, hidden=3072, mlp=24576, layers=28, heads=16, kv_heads=16, context=8192, tied=True, head_dim=256
)


def norm_of(c: Reader) -> Norm:
    return Norm("rms", c.number("rms_norm_eps", 1e-6), unit_offset=True)


def around(c: Reader, layers: list[Layer]) -> Model:
    return model(
        c,
        layers,
        final_norm=norm_of(c),
        embed_scale=c.size("hidden_size") ** 0.5,
        logit_softcap=c.optional_number("final_logit_softcapping"),
    )


def gemma(c: Reader) -> Model:
    c.must("use_bidirectional_attention", False)
    # Gemma's first files say gelu and mean its tanh form.
    activation = c.choice("hidden_act", {**ACTIVATIONS, "gelu": "gelu_tanh"}, "gelu_pytorch_tanh")
    mlp, norm = Mlp(c.size("intermediate_size"), activation), norm_of(c)
    return around(c, [Layer(attention(c), mlp, attn_norm=norm, mlp_norm=norm)] * len(c.layers()))


FAMILIES = {"gemma": Family(gemma, NAMES, GEMMA)}
