"""Gemma: a Llama with norms stored as 1 + weight, scaled embeddings and gated GELU."""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.dense import read_attention, read_model
from bloomery.families.llama import NAMES
from bloomery.families.reader import ACTIVATIONS, ConfigReader, defaults
from bloomery.spec import LayerSpec, MlpSpec, ModelSpec, NormSpec

GEMMA = defaults(
    vocab=256000, hidden=3072, mlp=24576, layers=28, heads=16, kv_heads=16, context=8192
) | defaults(tied=True, head_dim=256)


def read_norm(config: ConfigReader) -> NormSpec:
    return NormSpec("rms", config.number("rms_norm_eps", 1e-6), unit_offset=True)


def build_gemma(config: ConfigReader, layers: list[LayerSpec]) -> ModelSpec:
    """Build a model with scaled embeddings and capped logits."""
    return read_model(
        config,
        layers,
        final_norm=read_norm(config),
        embed_scale=config.size("hidden_size") ** 0.5,
        logit_softcap=config.optional_number("final_logit_softcapping"),
    )


def read_gemma(config: ConfigReader) -> ModelSpec:
    config.require("use_bidirectional_attention", False)
    # The first Gemma files say gelu and mean gelu_tanh.
    activation = config.choice(
        "hidden_act", {**ACTIVATIONS, "gelu": "gelu_tanh"}, "gelu_pytorch_tanh"
    )
    mlp = MlpSpec(config.size("intermediate_size"), activation)
    norm = read_norm(config)
    layer = LayerSpec(read_attention(config), mlp, attn_norm=norm, mlp_norm=norm)
    return build_gemma(config, [layer] * len(config.layers()))


FAMILIES = {
    "gemma": ModelFamily(read_gemma, NAMES, GEMMA),
}
