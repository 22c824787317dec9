"""GPT-J: interleaved rotary on part of each head, both blocks behind one norm, a biased head."""

from __future__ import annotations

from bloomery.families import Family
from bloomery.families.llama import model
from bloomery.families.reader import Reader, defaults
from bloomery.spec import Attention, Layer, Mlp, Model, Names, Norm, Rope, Split

NAMES = Names(
    embed="transformer.wte",
    layer="transformer.h.{i}.",
    final_norm="transformer.ln_f",
    head="lm_head",
    attn_qkv=Split(("attn.q_proj", "attn.k_proj", "attn.v_proj")),
    attn_out="attn.out_proj",
    mlp_up="mlp.fc_in",
    mlp_down="mlp.fc_out",
    extra={"attn_norm": "ln_1"},
    prefixes=("transformer.", ""),
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)
DEFAULTS = defaults(
    vocab=50400,
    hidden=4096,
    layers=28,
    heads=16,
    context=2048,
    rotary_dim=64,
    activation_function="gelu_new",
)


def gptj(c: Reader) -> Model:
    for switch in ("rotary", "scale_attn_weights"):
        c.must(switch, True)
    hidden = c.size("hidden_size")
    heads = c.size("num_attention_heads")
    norm = Norm("layer", c.number("layer_norm_epsilon", 1e-5), bias=True)
    layer = Layer(
        attention=Attention(
            heads, heads, c.head_dim(), Rope(c.size("rotary_dim"), interleaved=True)
        ),
        mlp=Mlp(
            c.size("intermediate_size", 4 * hidden),
            c.activation("activation_function"),
            gated=False,
            bias=True,
        ),
        attn_norm=norm,
        parallel=True,
    )
    return model(c, [layer] * len(c.layers()), final_norm=norm, head_bias=True)


FAMILIES = {"gptj": Family(gptj, NAMES, DEFAULTS)}
