"""JetBrains' Mellum 2: a Qwen3 with experts, and windows that have their own rope."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_model
from bloomery.families.llama import DEFAULTS
from bloomery.families.moe import build_moe_names, put_experts, read_experts, read_sparse_layers
from bloomery.families.qwen3 import read_qk_norm_layer
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_layer_rope
from bloomery.families.window import read_layer_windows
from bloomery.spec import ModelSpec, RouterSpec

MELLUM_NAMES = replace(build_moe_names("mlp.gate"), ignored=("*.rotary_emb.inv_freq", "mtp.*"))
MELLUM = (
    DEFAULTS
    | defaults(vocab=98304, hidden=2304, mlp=7168, layers=28, kv_heads=4, head_dim=128)
    | defaults(context=131072, sliding_window=1024, num_experts=64, num_experts_per_tok=8)
    | defaults(moe_intermediate_size=896)
)


def read_mellum(config: ConfigReader) -> ModelSpec:
    layers = []
    for window in read_layer_windows(config, lambda i: False):
        position = read_layer_rope(config, window, theta=5e5, local_theta=1e4)
        layers.append(read_qk_norm_layer(config, window=window, position=position))
    is_sparse = read_sparse_layers(config, lambda i: True)
    router = RouterSpec(normalize=config.flag("norm_topk_prob", True))
    moe = read_experts(config, router)
    return read_model(config, put_experts(layers, moe, is_sparse))


FAMILIES = {"mellum": ModelFamily(read_mellum, MELLUM_NAMES, MELLUM)}
