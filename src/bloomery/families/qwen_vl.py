"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL, served as text: a Qwen2, Qwen3 or Qwen3-MoE inside."""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.llama import NAMES
from bloomery.families.moe import name_stacked_experts
from bloomery.families.qwen2 import QWEN, read_qwen2
from bloomery.families.qwen2_moe import MOE_NAMES, QWEN2_MOE
from bloomery.families.qwen3 import QWEN3, read_qwen3, read_qwen3_moe
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.vision import read_text_part, text_names
from bloomery.spec import ModelSpec

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


def read_qwen2_vl(config: ConfigReader) -> ModelSpec:
    text_types = ("qwen2_5_vl_text", "qwen2_vl_text", "qwen2_5_vl", "qwen2_vl")
    return read_text_part(config, dict.fromkeys(text_types, (read_qwen2, QWEN2_VL)))


def read_qwen3_vl(config: ConfigReader) -> ModelSpec:
    return read_text_part(config, {"qwen3_vl_text": (read_qwen3, QWEN3_VL)})


def read_qwen3_vl_moe(config: ConfigReader) -> ModelSpec:
    return read_text_part(config, {"qwen3_vl_moe_text": (read_qwen3_moe, QWEN3_VL_MOE)})


FAMILIES = {
    "qwen2_vl": ModelFamily(read_qwen2_vl, text_names(NAMES)),
    "qwen2_5_vl": ModelFamily(read_qwen2_vl, text_names(NAMES)),
    "qwen3_vl": ModelFamily(read_qwen3_vl, text_names(NAMES)),
    "qwen3_vl_moe": ModelFamily(read_qwen3_vl_moe, text_names(QWEN3_VL_MOE_NAMES), UNTIED),
}
