"""Qwen3-Next: the layers of Qwen3.5 with experts, and input projections fused by key head."""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.qwen2_moe import MOE_NAMES, QWEN2_MOE, mix_dense_and_moe, read_gated_moe
from bloomery.families.qwen3_5 import HYBRID, build_hybrid, read_hybrid_layers
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.recurrent import delta_net_names
from bloomery.spec import ModelSpec, SplitTensors

FUSED_BY_HEAD = SplitTensors(
    ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"), parts=(4, 2), grouped=(True, True)
)
QWEN3_NEXT = (
    QWEN2_MOE
    | HYBRID
    | defaults(layers=48, kv_heads=2, num_experts=512, num_experts_per_tok=10)
    | defaults(moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True)
)


def read_qwen3_next(config: ConfigReader) -> ModelSpec:
    layers = read_hybrid_layers(config)
    return build_hybrid(config, mix_dense_and_moe(config, layers, read_gated_moe(config)))


FAMILIES = {
    "qwen3_next": ModelFamily(
        read_qwen3_next, delta_net_names(MOE_NAMES, FUSED_BY_HEAD), QWEN3_NEXT
    )
}
