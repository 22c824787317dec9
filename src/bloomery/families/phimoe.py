"""Phi-3.5-MoE: a Mixtral with biased layer norms, whose two experts are chosen by SparseMixer."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_model
from bloomery.families.llama import DEFAULTS
from bloomery.families.mixtral import MIXTRAL_NAMES
from bloomery.families.moe import read_experts
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.window import read_layer_windows
from bloomery.spec import ModelSpec, NormSpec, RouterSpec

PHIMOE = (
    DEFAULTS
    | defaults(vocab=32064, mlp=6400, kv_heads=8, context=131072, rms_norm_eps=1e-5, rope_theta=1e6)
    | defaults(num_experts=16, num_experts_per_tok=2)
)


def read_phimoe(config: ConfigReader) -> ModelSpec:
    config.require("num_experts_per_tok", 2)  # SparseMixer chooses two
    # The noise of training widens the range of logits that share the weight.
    jitter = config.number("router_jitter_noise", 0.01)
    router = RouterSpec(score="sparsemixer", normalize=False, threshold=2 * jitter)
    moe = read_experts(config, router, "intermediate_size")
    norm = NormSpec("layer", config.number("rms_norm_eps"), bias=True)
    windows = read_layer_windows(config)
    layers = [
        replace(read_layer(config, window=window), mlp=moe, attn_norm=norm, mlp_norm=norm)
        for window in windows
    ]
    return read_model(config, layers, final_norm=norm, head_bias=config.flag("lm_head_bias", False))


FAMILIES = {"phimoe": ModelFamily(read_phimoe, MIXTRAL_NAMES, PHIMOE)}
