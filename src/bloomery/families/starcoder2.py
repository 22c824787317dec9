"""StarCoder2: Llama's attention with layer norms, biases and an ungated MLP."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_attention, read_model, read_ungated_mlp
from bloomery.families.llama import DEFAULTS, NAMES
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.window import read_layer_windows
from bloomery.spec import LayerSpec, ModelSpec, NormSpec

STARCODER2_NAMES = replace(NAMES, mlp_up="mlp.c_fc", mlp_down="mlp.c_proj")
STARCODER2 = (
    DEFAULTS
    | defaults(vocab=49152, hidden=3072, mlp=12288, layers=30, heads=24, kv_heads=2, context=4096)
    | defaults(tied=True, hidden_act="gelu_pytorch_tanh")
)


def read_starcoder2(config: ConfigReader) -> ModelSpec:
    config.require("norm_type", "layer_norm")
    config.require("mlp_type", "default")
    bias = config.flag("use_bias", True)
    norm = NormSpec("layer", config.number("norm_epsilon", 1e-5), bias=True)
    mlp = read_ungated_mlp(config, bias=bias)
    windows = read_layer_windows(config)
    layers = []
    for window in windows:
        attention = read_attention(config, bias=bias, out_bias=bias, window=window)
        layers.append(LayerSpec(attention, mlp, attn_norm=norm, mlp_norm=norm))
    return read_model(config, layers, final_norm=norm)


FAMILIES = {"starcoder2": ModelFamily(read_starcoder2, STARCODER2_NAMES, STARCODER2)}
