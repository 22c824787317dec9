"""Gemma: a Llama with norms stored as 1 + weight, scaled embeddings and gated GELU.

Gemma 2: norms before and after both blocks, a window in every other layer, soft caps on scores and
logits. Gemma 3: norms on q and k, window layers with their own rope base; also as the text part of
a vision model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bloomery.families import ModelFamily
from bloomery.families.llama import NAMES, read_attention, read_model
from bloomery.families.reader import ACTIVATIONS, ConfigReader, defaults
from bloomery.families.rope import read_layer_rope
from bloomery.families.vision import read_text_part, text_names
from bloomery.families.window import read_layer_windows
from bloomery.spec import LayerSpec, MlpSpec, ModelSpec, NormSpec

GEMMA = defaults(
    vocab=256000, hidden=3072, mlp=24576, layers=28, heads=16, kv_heads=16, context=8192
) | defaults(tied=True, head_dim=256)
GEMMA2 = (
    GEMMA
    | defaults(hidden=2304, mlp=9216, layers=26, heads=8, kv_heads=4, query_pre_attn_scalar=256)
    | defaults(sliding_window=4096, final_logit_softcapping=30.0, attn_logit_softcapping=50.0)
)
GEMMA3 = GEMMA2 | defaults(
    vocab=262208, context=131072, final_logit_softcapping=None, attn_logit_softcapping=None
)
SANDWICH = {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
GEMMA2_NAMES = replace(NAMES, extra={**NAMES.extra, **SANDWICH})


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


def read_sandwich_layer(config: ConfigReader, **changes: Any) -> LayerSpec:
    """Read a layer with norms before and after both blocks; keywords go to the attention."""
    config.require("use_bidirectional_attention", False)
    norm = read_norm(config)
    mlp = MlpSpec(
        config.size("intermediate_size"),
        config.activation("hidden_activation", "gelu_pytorch_tanh"),
    )
    scale = config.size("query_pre_attn_scalar") ** -0.5
    softcap = config.optional_number("attn_logit_softcapping")
    return LayerSpec(
        read_attention(config, scale=scale, softcap=softcap, **changes),
        mlp,
        attn_norm=norm,
        attn_post_norm=norm,
        mlp_norm=norm,
        mlp_post_norm=norm,
    )


def read_gemma2(config: ConfigReader) -> ModelSpec:
    windows = read_layer_windows(config, lambda i: i % 2 == 0)
    return build_gemma(config, [read_sandwich_layer(config, window=window) for window in windows])


def read_gemma3_text(config: ConfigReader) -> ModelSpec:
    period = config.size("sliding_window_pattern", 6)
    theta = config.number("rope_theta", 1e6)
    local_theta = config.number("rope_local_base_freq", 1e4)
    layers = []
    for window in read_layer_windows(config, lambda i: (i + 1) % period != 0):
        position = read_layer_rope(config, window, theta, local_theta)
        layers.append(
            read_sandwich_layer(config, window=window, qk_norm=read_norm(config), position=position)
        )
    return build_gemma(config, layers)


def read_gemma3(config: ConfigReader) -> ModelSpec:
    return read_text_part(config, {"gemma3_text": (read_gemma3_text, GEMMA3)})


FAMILIES = {
    "gemma": ModelFamily(read_gemma, NAMES, GEMMA),
    "gemma2": ModelFamily(read_gemma2, GEMMA2_NAMES, GEMMA2),
    "gemma3_text": ModelFamily(read_gemma3_text, GEMMA2_NAMES, GEMMA3),
    "gemma3": ModelFamily(read_gemma3, text_names(GEMMA2_NAMES)),
}
