"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL, served as text: a Qwen2, Qwen3 or Qwen3-MoE inside."""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.llama import NAMES
from bloomery.families.moe import name_stacked_experts
from bloomery.families.qwen2 import QWEN, read_qwen2
from bloomery.families.qwen2_moe import MOE_NAMES, QWEN2_MOE
from bloomery.families.qwen3 import QWEN3, read_qwen3, read_qwen3_moe
from bloomery.families.reader import defaults
from bloomery.families.vision import build_vision_family

QWEN2_VL = (
    QWEN
    | defaults(vocab=152064, hidden=8192, mlp=29568, layers=80, heads=64, kv_heads=8)
    | defaults(rms_norm_eps=1e-5, rope_theta=1e6, max_window_layers=80)
)
QWEN3_VL = QWEN3 | defaults(context=128000, rope_theta=5e5)
QWEN3_VL_MOE = QWEN2_MOE | defaults(
    context=128000, rope_theta=5e5, tied=True, norm_topk_prob=True, sliding_window=None
)
QWEN3_VL_MOE_NAMES = name_stacked_experts(MOE_NAMES, "mlp.experts")
UNTIED = defaults(tied=False)


QWEN2_TEXT = dict.fromkeys(
    ("qwen2_5_vl_text", "qwen2_vl_text", "qwen2_5_vl", "qwen2_vl"),
    ModelFamily(read_qwen2, NAMES, QWEN2_VL),
)
QWEN3_TEXT = {"qwen3_vl_text": ModelFamily(read_qwen3, NAMES, QWEN3_VL)}
QWEN3_MOE_TEXT = {
    "qwen3_vl_moe_text": ModelFamily(read_qwen3_moe, QWEN3_VL_MOE_NAMES, QWEN3_VL_MOE)
}

FAMILIES = {
    "qwen2_vl": build_vision_family(QWEN2_TEXT, NAMES),
    "qwen2_5_vl": build_vision_family(QWEN2_TEXT, NAMES),
    "qwen3_vl": build_vision_family(QWEN3_TEXT, NAMES),
    "qwen3_vl_moe": build_vision_family(QWEN3_MOE_TEXT, QWEN3_VL_MOE_NAMES, UNTIED),
}
