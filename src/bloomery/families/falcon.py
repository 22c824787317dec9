"""Falcon 7B (one key-value head, one norm), 40B and later (grouped heads, one or two norms), and RW
(ALiBi, sequential blocks).
"""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily, bloom
from bloomery.families.dense import read_attention, read_model
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_rope
from bloomery.spec import (
    AlibiSpec,
    FusedTensor,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
    TensorNames,
)

DEFAULTS = defaults(
    vocab=65024, hidden=4544, layers=32, heads=71, context=2048, tied=True
) | defaults(multi_query=True, parallel_attn=True)


def has_two_norms(config: ConfigReader) -> bool:
    """Return whether attention and MLP of a parallel layer have a norm each."""
    if not config.flag("new_decoder_architecture", False):
        return False
    if config.get("num_ln_in_parallel_attn") == 1:
        return False
    config.require("num_ln_in_parallel_attn", 2)
    return True


def build_names(config: ConfigReader) -> TensorNames:
    grouped = config.flag("new_decoder_architecture", False) or not config.flag("multi_query")
    norms = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if has_two_norms(config):
        norms = {"attn_norm": "ln_attn", "mlp_norm": "ln_mlp"}
    return replace(
        bloom.NAMES,
        attn_qkv=FusedTensor("self_attention.query_key_value", grouped),
        extra=norms,
        ignored=("*.rotary_emb.inv_freq", "*.maybe_rotary.inv_freq"),
    )


def read_falcon(config: ConfigReader) -> ModelSpec:
    config.require("apply_residual_connection_post_layernorm", False)
    hidden = config.size("hidden_size")
    num_heads = config.size("num_attention_heads")
    bias = config.flag("bias", False)
    if config.flag("new_decoder_architecture", False):
        config.require("parallel_attn", True)
        num_kv_heads = config.size("num_kv_heads", num_heads)
    else:
        num_kv_heads = 1 if config.flag("multi_query") else num_heads
    parallel = config.flag("parallel_attn")
    norm = NormSpec("layer", config.number("layer_norm_epsilon", 1e-5), bias=True)
    position: AlibiSpec | RopeSpec
    if config.flag("alibi", False):
        # RW scales its slopes together with the scores.
        position = AlibiSpec(scale=config.head_dim() ** -0.5)
    else:
        position = read_rope(config, config.head_dim())
    size = config.size("intermediate_size", config.size("ff_factor", 4) * hidden)
    layer = LayerSpec(
        attention=read_attention(
            config, num_kv_heads=num_kv_heads, position=position, bias=bias, out_bias=bias
        ),
        mlp=MlpSpec(size, config.activation("activation", "gelu"), gated=False, bias=bias),
        attn_norm=norm,
        mlp_norm=norm if has_two_norms(config) or not parallel else None,
        parallel=parallel,
    )
    return read_model(config, [layer] * len(config.layers()), final_norm=norm)


FAMILIES = {"falcon": ModelFamily(read_falcon, build_names, DEFAULTS)}
