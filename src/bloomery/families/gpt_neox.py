"""GPT-NeoX (Pythia, RedPajama): partial rotary, two norms that feed one residual in parallel or one after the other."""

from __future__ import annotations

from bloomery.families import Family
from bloomery.families.llama import model
from bloomery.families.reader import Reader, defaults
from bloomery.families.rope import rope
from bloomery.spec import Attention, Fused, Layer, Mlp, Model, Names, Norm

NAMES = Names(
    embed="gpt_neox.embed_in",
    layer="gpt_neox.layers.{i}.",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    attn_qkv=Fused("attention.query_key_value", grouped=True),
    attn_out="attention.dense",
    mlp_up="mlp.dense_h_to_4h",
    mlp_down="mlp.dense_4h_to_h",
    extra={"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    prefixes=("gpt_neox.", ""),
    ignored=("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"),
)
DEFAULTS = defaults(
    vocab=50432,
    hidden=6144,
    mlp=24576,
    layers=44,
    heads=64,
    context=2048,
    partial_rotary_factor=0.25,
)


def gpt_neox(c: Reader) -> Model:
    heads = c.size("num_attention_heads")
    bias = c.flag("attention_bias", True)
    norm = Norm("layer", c.number("layer_norm_eps", 1e-5), bias=True)
    position = rope(c, c.head_dim(), partial=True)
    layer = Layer(
        attention=Attention(heads, heads, c.head_dim(), position, bias=bias, out_bias=bias),
        mlp=Mlp(
            c.size("intermediate_size"), c.activation("hidden_act", "gelu"), gated=False, bias=True
        ),
        attn_norm=norm,
        mlp_norm=norm,
        parallel=c.flag("use_parallel_residual", True),
    )
    return model(c, [layer] * len(c.layers()), final_norm=norm)


FAMILIES = {"gpt_neox": Family(gpt_neox, NAMES, DEFAULTS)}
