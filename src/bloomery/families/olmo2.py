"""OLMo 2: norms only after each block, and norms on q and k over all heads at once."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.llama import DEFAULTS, NAMES, read_attention, read_mlp, read_model
from bloomery.families.reader import ConfigReader, defaults
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


def read_olmo2(config: ConfigReader) -> ModelSpec:
    norm = NormSpec("rms", config.number("rms_norm_eps"))
    layer = LayerSpec(
        read_attention(config, qk_norm=norm, qk_norm_over="all"),
        read_mlp(config),
        attn_post_norm=norm,
        mlp_post_norm=norm,
    )
    return read_model(config, [layer] * len(config.layers()))


FAMILIES = {"olmo2": ModelFamily(read_olmo2, OLMO2_NAMES, OLMO2)}
