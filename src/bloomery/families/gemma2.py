"""Gemma 2: a Gemma with norms before and after both blocks, a window in every other layer, and soft
caps on scores and logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bloomery.families import ModelFamily
from bloomery.families.dense import read_attention
from bloomery.families.gemma import GEMMA, build_gemma, read_norm
from bloomery.families.llama import NAMES
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.window import read_layer_windows
from bloomery.spec import LayerSpec, MlpSpec, ModelSpec

GEMMA2 = (
    GEMMA
    | defaults(hidden=2304, mlp=9216, layers=26, heads=8, kv_heads=4, query_pre_attn_scalar=256)
    | defaults(sliding_window=4096, final_logit_softcapping=30.0, attn_logit_softcapping=50.0)
)
SANDWICH = {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
GEMMA2_NAMES = replace(NAMES, extra={**NAMES.extra, **SANDWICH})


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


FAMILIES = {
    "gemma2": ModelFamily(read_gemma2, GEMMA2_NAMES, GEMMA2),
}
