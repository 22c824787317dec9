"""StableLM: a Llama with biased layer norms and partial rope; some models have norms on q and k
with a weight per head.
"""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_attention, read_mlp, read_model
from bloomery.families.llama import DEFAULTS, NAMES
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_rope
from bloomery.spec import LayerSpec, ModelSpec, NormSpec

STABLELM_NAMES = replace(
    NAMES,
    extra={
        **NAMES.extra,
        "q_norm": "self_attn.q_layernorm.norms.{h}",
        "k_norm": "self_attn.k_layernorm.norms.{h}",
    },
)
STABLELM = DEFAULTS | defaults(
    vocab=50304, hidden=2560, mlp=6912, kv_heads=32, context=4096, partial_rotary_factor=0.25
)


def read_stablelm(config: ConfigReader) -> ModelSpec:
    norm = NormSpec("layer", config.number("layer_norm_eps", 1e-5), bias=True)
    parallel = config.flag("use_parallel_residual", False)
    attention = read_attention(
        config,
        position=read_rope(config, config.head_dim(), partial=True),
        bias=config.flag("use_qkv_bias", False),
        out_bias=False,
        qk_norm=replace(norm, bias=False) if config.flag("qk_layernorm", False) else None,
        qk_norm_over="each",
    )
    layer = LayerSpec(
        attention,
        read_mlp(config),
        attn_norm=norm,
        mlp_norm=None if parallel else norm,
        parallel=parallel,
    )
    return read_model(config, [layer] * len(config.layers()), final_norm=norm)


FAMILIES = {"stablelm": ModelFamily(read_stablelm, STABLELM_NAMES, STABLELM)}
