"""Hunyuan A13B: a Llama with norms on q and k after rope, and experts beside a shared one."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_mlp, read_model
from bloomery.families.llama import DEFAULTS
from bloomery.families.moe import build_moe_names
from bloomery.families.reader import ConfigReader, defaults
from bloomery.spec import ModelSpec, MoeSpec, NormSpec

HUNYUAN_MOE_NAMES = build_moe_names(
    "mlp.gate.wg",
    "mlp.shared_mlp",
    q_norm="self_attn.query_layernorm",
    k_norm="self_attn.key_layernorm",
)
HUNYUAN_MOE = DEFAULTS | defaults(vocab=290943, rms_norm_eps=1e-5, num_experts=1)


def read_hunyuan_moe(config: ConfigReader) -> ModelSpec:
    for switch in ("use_qk_norm", "use_mixed_mlp_moe", "norm_topk_prob"):
        config.require(switch, True)
    config.require("use_cla", False)
    config.require("moe_layer_num_skipped", 0)
    mlp = read_mlp(config)
    # The published files repeat the size of the experts for each layer.
    for name, supported in (("moe_intermediate_size", mlp.size), ("num_shared_expert", 1)):
        if set(config.layer_sizes(name, supported)) != {supported}:
            raise config.error(name, f"is not supported, only {supported}")
    norm = NormSpec("rms", config.number("rms_norm_eps"))
    layer = read_layer(config, qk_norm=norm, qk_norm_after_rope=True)
    moe = MoeSpec(config.size("num_experts"), 1, mlp, shared=mlp)
    layers = [
        replace(layer, mlp=replace(moe, top_k=top_k)) for top_k in config.layer_sizes("moe_topk", 1)
    ]
    return read_model(config, layers)


FAMILIES = {"hunyuan_v1_moe": ModelFamily(read_hunyuan_moe, HUNYUAN_MOE_NAMES, HUNYUAN_MOE)}
