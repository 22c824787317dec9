"""Bamba: a Llama with Mamba-2 instead of attention in most layers, and rope on half of a head."""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_model
from bloomery.families.llama import DEFAULTS
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.recurrent import MAMBA2, MAMBA_NAMES, put_recurrent, read_mamba2
from bloomery.families.rope import read_rope
from bloomery.spec import ModelSpec

BAMBA = (
    DEFAULTS
    | MAMBA2
    | defaults(vocab=128000, mlp=14336, kv_heads=8, context=262144, rms_norm_eps=1e-5)
    | defaults(partial_rotary_factor=0.5)
)


def read_bamba(config: ConfigReader) -> ModelSpec:
    config.require("hidden_act", "silu")
    position = read_rope(config, config.head_dim(), partial=True)
    config.require("attn_rotary_emb", position.dim)
    layer = read_layer(config, position=position)
    attention_layers = config.list_of("attn_layer_indices", int)
    is_recurrent = [i not in attention_layers for i in config.layers()]
    return read_model(config, put_recurrent(layer, read_mamba2(config), is_recurrent))


FAMILIES = {"bamba": ModelFamily(read_bamba, MAMBA_NAMES, BAMBA)}
