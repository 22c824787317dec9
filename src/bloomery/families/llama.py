"""Llama: RMS norms, rope, grouped heads and a gated MLP."""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_model
from bloomery.families.reader import ConfigReader, defaults
from bloomery.spec import ModelSpec, SplitTensors, TensorNames

NAMES = TensorNames(
    embed="model.embed_tokens",
    layer="model.layers.{i}.",
    final_norm="model.norm",
    head="lm_head",
    attn_qkv=SplitTensors(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    attn_out="self_attn.o_proj",
    mlp_up=SplitTensors(("mlp.gate_proj", "mlp.up_proj")),
    mlp_down="mlp.down_proj",
    extra={
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
    },
    prefixes=("model.", ""),
    ignored=("*.rotary_emb.inv_freq",),
)

DEFAULTS = defaults(
    vocab=32000, hidden=4096, mlp=11008, layers=32, heads=32, context=2048
) | defaults(hidden_act="silu", rms_norm_eps=1e-6)


def read_llama(config: ConfigReader) -> ModelSpec:
    return read_model(config, [read_layer(config)] * len(config.layers()))


FAMILIES = {"llama": ModelFamily(read_llama, NAMES, DEFAULTS)}
