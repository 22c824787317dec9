"""GPT-2: learned positions, weights stored as [in, out]. GPT-BigCode (SantaCoder, StarCoder): the same with one
key-value head for all, or QKV fused head by head."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import Family
from bloomery.families.llama import model
from bloomery.families.reader import Reader, defaults
from bloomery.spec import Attention, Fused, Layer, Mlp, Model, Names, Norm

NAMES = Names(
    embed="transformer.wte",
    layer="transformer.h.{i}.",
    final_norm="transformer.ln_f",
    head="lm_head",
    attn_qkv=Fused("attn.c_attn"),
    attn_out="attn.c_proj",
    mlp_up="mlp.c_fc",
    mlp_down="mlp.c_proj",
    extra={"positions": "transformer.wpe", "attn_norm": "ln_1", "mlp_norm": "ln_2"},
    transposed=True,
    prefixes=("transformer.", ""),
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)
DEFAULTS = defaults(
    vocab=50257,
    hidden=768,
    layers=12,
    heads=12,
    context=1024,
    tied=True,
    activation_function="gelu_new",
)
BIGCODE = DEFAULTS | {"activation_function": "gelu_pytorch_tanh", "multi_query": True}


def gpt2(c: Reader, kv_heads: int | None = None) -> Model:
    c.must("add_cross_attention", False)
    hidden = c.size("hidden_size")
    heads = c.size("num_attention_heads")
    norm = Norm("layer", c.number("layer_norm_epsilon", 1e-5), bias=True)
    mlp = Mlp(
        c.size("intermediate_size", 4 * hidden),
        c.activation("activation_function"),
        gated=False,
        bias=True,
    )
    scale = c.head_dim() ** -0.5 if c.flag("scale_attn_weights", True) else 1.0
    by_depth = c.flag("scale_attn_by_inverse_layer_idx", False)
    # reorder_and_upcast_attn asks for float32 scores, which are the rule here
    blocks = (
        Attention(
            heads, kv_heads or heads, c.head_dim(), bias=True, out_bias=True, scale=scale / depth
        )
        for depth in (i + 1 if by_depth else 1 for i in c.layers())
    )
    layers = [Layer(block, mlp, attn_norm=norm, mlp_norm=norm) for block in blocks]
    return model(c, layers, final_norm=norm, positions=c.size("max_position_embeddings"))


def bigcode_names(c: Reader) -> Names:
    return replace(
        NAMES, attn_qkv=Fused("attn.c_attn", grouped=not c.flag("multi_query")), transposed=False
    )


def gpt_bigcode(c: Reader) -> Model:
    kv_heads = 1 if c.flag("multi_query") else c.size("num_attention_heads")
    c.must("num_key_value_heads", kv_heads)
    return gpt2(c, kv_heads)


FAMILIES = {
    "gpt2": Family(gpt2, NAMES, DEFAULTS),
    "gpt_bigcode": Family(gpt_bigcode, bigcode_names, BIGCODE),
}
