"""StarCoder2: Llama's attention with layer norms, biases and a plain MLP."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import Family
from bloomery.families.llama import DEFAULTS, NAMES, attention, model
from bloomery.families.reader import Reader, defaults
from bloomery.families.window import windows
from bloomery.spec import Layer, Mlp, Model, Norm

STARCODER2_NAMES = replace(NAMES, mlp_up="mlp.c_fc", mlp_down="mlp.c_proj")
STARCODER2 = DEFAULTS | defaults(
    vocab=49152,
    hidden=3072,
    mlp=12288,
    layers=30,
    heads=24,
    kv_heads=2,
    context=4096,
    tied=True,
    hidden_act="gelu_pytorch_tanh",
)


def starcoder2(c: Reader) -> Model:
    c.must("norm_type", "layer_norm")
    c.must("mlp_type", "default")
    bias = c.flag("use_bias", True)
    norm = Norm("layer", c.number("norm_epsilon", 1e-5), bias=True)
    mlp = Mlp(c.size("intermediate_size"), c.activation("hidden_act"), gated=False, bias=bias)
    sizes = windows(c, lambda i: c.get("sliding_window") is not None)
    blocks = (attention(c, bias=bias, out_bias=bias, window=size) for size in sizes)
    return model(
        c, [Layer(block, mlp, attn_norm=norm, mlp_norm=norm) for block in blocks], final_norm=norm
    )


FAMILIES = {"starcoder2": Family(starcoder2, STARCODER2_NAMES, STARCODER2)}
