"""OLMo 2: norms only after each block, and norms on q and k over all heads at once.

OLMo 3: a window in three of four layers, and rope scaling only in the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bloomery.families import ModelFamily
from bloomery.families.dense import read_attention, read_mlp, read_model
from bloomery.families.llama import DEFAULTS, NAMES
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_layer_rope
from bloomery.families.window import read_layer_windows
from bloomery.spec import LayerSpec, ModelSpec, NormSpec

OLMO2_NAMES = replace(
    NAMES,
    extra={
        "attn_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
    },
)
OLMO2 = DEFAULTS | defaults(vocab=50304, rms_norm_eps=1e-5)


OLMO3 = OLMO2 | defaults(sliding_window=4096)


def read_post_norm_layer(config: ConfigReader, **changes: Any) -> LayerSpec:
    """Read a layer with an RMS norm after each block; keywords go to the attention."""
    norm = NormSpec("rms", config.number("rms_norm_eps"))
    attention = read_attention(config, qk_norm=norm, **changes)
    return LayerSpec(attention, read_mlp(config), attn_post_norm=norm, mlp_post_norm=norm)


def read_olmo2(config: ConfigReader) -> ModelSpec:
    layer = read_post_norm_layer(config, qk_norm_over="all")
    return read_model(config, [layer] * len(config.layers()))


def read_olmo3(config: ConfigReader) -> ModelSpec:
    theta = config.number("rope_theta", 5e5)
    layers = []
    for window in read_layer_windows(config, lambda i: (i + 1) % 4 != 0):
        position = read_layer_rope(config, window, theta, theta)
        layers.append(
            read_post_norm_layer(config, qk_norm_over="all", position=position, window=window)
        )
    return read_model(config, layers)


FAMILIES = {
    "olmo2": ModelFamily(read_olmo2, OLMO2_NAMES, OLMO2),
    "olmo3": ModelFamily(read_olmo3, OLMO2_NAMES, OLMO3),
}
