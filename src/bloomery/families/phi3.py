"""Phi-3 and 4: a Llama with fused q|k|v and gate|up tensors and longrope scaling."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_model
from bloomery.families.llama import DEFAULTS, NAMES
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_rope
from bloomery.families.window import read_layer_windows
from bloomery.spec import FusedTensor, ModelSpec

PHI3_NAMES = replace(
    NAMES, attn_qkv=FusedTensor("self_attn.qkv_proj"), mlp_up=FusedTensor("mlp.gate_up_proj")
)
PHI3 = (
    DEFAULTS
    | defaults(vocab=32064, hidden=3072, mlp=8192, context=4096)
    | defaults(original_max_position_embeddings=4096, rms_norm_eps=1e-5)
)


def read_phi3(config: ConfigReader) -> ModelSpec:
    position = read_rope(config, config.head_dim(), partial=True)
    windows = read_layer_windows(config)
    layers = [
        read_layer(config, position=position, bias=False, out_bias=False, window=window)
        for window in windows
    ]
    return read_model(config, layers)


FAMILIES = {"phi3": ModelFamily(read_phi3, PHI3_NAMES, PHI3)}
