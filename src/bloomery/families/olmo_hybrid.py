"""OLMo Hybrid: OLMo 3's post-norm attention in every fourth layer, without positions in published
models, and gated delta nets with pre-norms in the others.
"""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_mlp, read_model
from bloomery.families.llama import DEFAULTS
from bloomery.families.olmo2 import OLMO2_NAMES, read_post_norm_layer
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.recurrent import read_recurrent_layers
from bloomery.families.rope import read_rope
from bloomery.spec import GatedDeltaNetSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec, SplitTensors


def name_tensors(parts: str, suffix: str) -> SplitTensors:
    return SplitTensors(tuple(f"linear_attn.{part}_{suffix}" for part in parts))


OLMO_HYBRID_NAMES = replace(
    OLMO2_NAMES,
    recurrent_in=name_tensors("qkvgba", "proj"),
    recurrent_out="linear_attn.o_proj",
    recurrent_conv=name_tensors("qkv", "conv1d"),
    extra={
        **OLMO2_NAMES.extra,
        "attn_norm": "attention_layer_norm",
        "mlp_norm": "feedforward_layer_norm",
        "recurrent_norm": "linear_attn.o_norm",
        "A_log": "linear_attn.A_log",
        "dt_bias": "linear_attn.dt_bias",
    },
)
OLMO_HYBRID = DEFAULTS | defaults(
    vocab=100352, hidden=3840, heads=30, context=65536, linear_conv_kernel_dim=4
)


def read_optional_rope(config: ConfigReader) -> RopeSpec | None:
    """Read the rope; a base that is stated as null means that there is none."""
    sections = (config.section("rope_parameters"), config)
    stated = [section for section in sections if "rope_theta" in section.values]
    if stated and stated[0].get("rope_theta") is None:
        return None
    return read_rope(config, config.head_dim())


def read_mixer(config: ConfigReader) -> GatedDeltaNetSpec:
    config.require("hidden_act", "silu")
    num_heads = config.size("num_attention_heads")
    num_key_heads = config.size("linear_num_key_heads", num_heads)
    key_dim = 3 * config.size("hidden_size") // (4 * num_key_heads)
    key_dim = config.size("linear_key_head_dim", key_dim)
    return GatedDeltaNetSpec(
        num_key_heads,
        config.size("linear_num_value_heads", num_heads),
        key_dim,
        config.size("linear_value_head_dim", 2 * key_dim),
        config.size("linear_conv_kernel_dim"),
        norm=NormSpec("rms", 1e-5),
        beta_scale=2.0 if config.flag("linear_allow_neg_eigval", True) else 1.0,
    )


def read_olmo_hybrid(config: ConfigReader) -> ModelSpec:
    norm = NormSpec("rms", config.number("rms_norm_eps"))
    position = read_optional_rope(config)
    attention_layer = read_post_norm_layer(config, qk_norm_over="all", position=position)
    mixer = read_mixer(config)
    recurrent_layer = LayerSpec(
        None, read_mlp(config), recurrent=mixer, attn_norm=norm, mlp_norm=norm
    )
    last = len(config.layers()) - 1
    is_recurrent = read_recurrent_layers(
        config, lambda i: i % 4 != 3 and not (last < 3 and i == last)
    )
    layers = [recurrent_layer if flag else attention_layer for flag in is_recurrent]
    return read_model(config, layers)


FAMILIES = {"olmo_hybrid": ModelFamily(read_olmo_hybrid, OLMO_HYBRID_NAMES, OLMO_HYBRID)}
