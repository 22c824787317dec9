"""GLM 4: a Llama with interleaved rope on half of each head, biases on q, k and v, and a fused
gate|up tensor. The models of April 2025 (glm4) also have norms after both blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_model
from bloomery.families.llama import DEFAULTS, NAMES
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_rope
from bloomery.spec import FusedTensor, ModelSpec, NormSpec

GLM_NAMES = replace(NAMES, mlp_up=FusedTensor("mlp.gate_up_proj"))
GLM4_NAMES = replace(
    GLM_NAMES,
    extra={
        **NAMES.extra,
        "attn_post_norm": "post_self_attn_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
    },
)
GLM = (
    DEFAULTS
    | defaults(vocab=151552, mlp=13696, layers=40, kv_heads=2, context=131072, head_dim=128)
    | defaults(rms_norm_eps=1.5625e-7, attention_bias=True, partial_rotary_factor=0.5)
)


def read_glm(config: ConfigReader, **changes: Any) -> ModelSpec:
    """Read a model; keywords go to its layers."""
    position = read_rope(config, config.head_dim(), partial=True, interleaved=True)
    layer = replace(read_layer(config, position=position, out_bias=False), **changes)
    return read_model(config, [layer] * len(config.layers()))


def read_glm4(config: ConfigReader) -> ModelSpec:
    norm = NormSpec("rms", config.number("rms_norm_eps"))
    return read_glm(config, attn_post_norm=norm, mlp_post_norm=norm)


FAMILIES = {
    "glm": ModelFamily(read_glm, GLM_NAMES, GLM),
    "glm4": ModelFamily(read_glm4, GLM4_NAMES, GLM),
}
