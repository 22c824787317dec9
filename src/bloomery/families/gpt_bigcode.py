"""GPT-BigCode (SantaCoder, StarCoder): GPT-2 with one key-value head for all, or QKV fused head by head."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import Family
from bloomery.families.gpt2 import DEFAULTS, NAMES, gpt2
from bloomery.families.reader import Reader
from bloomery.spec import Fused, Model, Names

BIGCODE = DEFAULTS | {"activation_function": "gelu_pytorch_tanh", "multi_query": True}


def names(c: Reader) -> Names:
    return replace(NAMES, attn_qkv=Fused("attn.c_attn", grouped=not c.flag("multi_query")), transposed=False)


def gpt_bigcode(c: Reader) -> Model:
    kv_heads = 1 if c.flag("multi_query") else c.size("num_attention_heads")
    c.must("num_key_value_heads", kv_heads)
    return gpt2(c, kv_heads)


FAMILIES = {"gpt_bigcode": Family(gpt_bigcode, names, BIGCODE)}
