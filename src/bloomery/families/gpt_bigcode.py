"""GPT-BigCode (SantaCoder, StarCoder): a GPT-2 with multi-query attention, or QKV fused by head."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.gpt2 import DEFAULTS, NAMES, read_gpt2
from bloomery.families.reader import ConfigReader
from bloomery.spec import (
    FusedTensor,
    ModelSpec,
    TensorNames,
)

BIGCODE = DEFAULTS | {"activation_function": "gelu_pytorch_tanh", "multi_query": True}


def build_bigcode_names(config: ConfigReader) -> TensorNames:
    return replace(
        NAMES,
        attn_qkv=FusedTensor("attn.c_attn", grouped=not config.flag("multi_query")),
        transposed=False,
    )


def read_gpt_bigcode(config: ConfigReader) -> ModelSpec:
    num_kv_heads = 1 if config.flag("multi_query") else config.size("num_attention_heads")
    config.require("num_key_value_heads", num_kv_heads)
    return read_gpt2(config, num_kv_heads)


FAMILIES = {
    "gpt_bigcode": ModelFamily(read_gpt_bigcode, build_bigcode_names, BIGCODE),
}
