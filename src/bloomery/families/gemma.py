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
from bloomery.families.rope import read_rope_section
from bloomery.families.window import read_layer_windows
from bloomery.spec import LayerSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec

GEMMA = defaults(
    vocab=256000,
    hidden=3072,
    mlp=24576,
    layers=28,
    heads=16,
    kv_heads=16,
    context=8192,
    tied=True,
    head_dim=256,
)
GEMMA2 = GEMMA | defaults(
    hidden=2304,
    mlp=9216,
    layers=26,
    heads=8,
    kv_heads=4,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    final_logit_softcapping=30.0,
    attn_logit_softcapping=50.0,
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
# The text part of a vision model: its vision tower and projector are not read.
TEXT_NAMES = replace(
    GEMMA2_NAMES,
    embed="language_model.model.embed_tokens",
    layer="language_model.model.layers.{i}.",
    final_norm="language_model.model.norm",
    head="language_model.lm_head",
    prefixes=("language_model.model.", "model.language_model.", "model.", ""),
    ignored=("*vision_tower.*", "*multi_modal_projector.*"),
)


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
    layers = []
    for window in read_layer_windows(config, lambda i: (i + 1) % period != 0):
        position = read_layer_rope(config, window)
        layers.append(
            read_sandwich_layer(config, window=window, qk_norm=read_norm(config), position=position)
        )
    return build_gemma(config, layers)


def read_layer_rope(config: ConfigReader, window: int | None) -> RopeSpec:
    """Read the rope of a layer. Window layers have their own theta and ignore rope_scaling."""
    parameters = config.section("rope_parameters")
    scaling = config.section("rope_scaling")
    head_dim = config.head_dim()
    unknown = sorted(set(parameters.values) - {"sliding_attention", "full_attention"})
    if unknown:
        raise parameters.error(
            unknown[0], "is not known: sliding_attention and full_attention have one object each"
        )
    if window is not None:
        theta = config.number("rope_local_base_freq", 1e4)
        section = parameters.section("sliding_attention")
        return read_rope_section(config, section, head_dim, theta)
    theta = config.number("rope_theta", 1e6)
    section = scaling if scaling.values else parameters.section("full_attention")
    return read_rope_section(config, section, head_dim, theta)


def read_gemma3(config: ConfigReader) -> ModelSpec:
    text = config.section("text_config", GEMMA3)
    text.require("model_type", "gemma3_text")
    model = read_gemma3_text(text)
    return replace(model, tied=config.flag("tie_word_embeddings", model.tied))


FAMILIES = {
    "gemma": ModelFamily(read_gemma, NAMES, GEMMA),
    "gemma2": ModelFamily(read_gemma2, GEMMA2_NAMES, GEMMA2),
    "gemma3_text": ModelFamily(read_gemma3_text, GEMMA2_NAMES, GEMMA3),
    "gemma3": ModelFamily(read_gemma3, TEXT_NAMES),
}
