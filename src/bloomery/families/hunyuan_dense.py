"""Hunyuan: a Llama with norms on q and k after rope."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_model
from bloomery.families.llama import DEFAULTS, NAMES
from bloomery.families.reader import ConfigReader, defaults
from bloomery.spec import ModelSpec, NormSpec

HUNYUAN_NAMES = replace(
    NAMES,
    extra={
        **NAMES.extra,
        "q_norm": "self_attn.query_layernorm",
        "k_norm": "self_attn.key_layernorm",
    },
)
HUNYUAN = DEFAULTS | defaults(vocab=290943, rms_norm_eps=1e-5)


def read_hunyuan(config: ConfigReader) -> ModelSpec:
    # Published files name the norms of q and k; transformers always has them.
    config.require("use_qk_norm", True)
    config.require("use_cla", False)
    norm = NormSpec("rms", config.number("rms_norm_eps"))
    layer = read_layer(config, qk_norm=norm, qk_norm_after_rope=True)
    return read_model(config, [layer] * len(config.layers()))


FAMILIES = {"hunyuan_v1_dense": ModelFamily(read_hunyuan, HUNYUAN_NAMES, HUNYUAN)}
