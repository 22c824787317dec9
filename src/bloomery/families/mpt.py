"""MPT: ALiBi or learned positions, usually no bias anywhere, optional clipping of q, k and v."""

from __future__ import annotations

from bloomery.families import Family
from bloomery.families.llama import model
from bloomery.families.reader import Reader, defaults
from bloomery.spec import Alibi, Attention, Fused, Layer, Mlp, Model, Names, Norm

NAMES = Names(
    embed="transformer.wte",
    layer="transformer.blocks.{i}.",
    final_norm="transformer.norm_f",
    head="lm_head",
    attn_qkv=Fused("attn.Wqkv"),
    attn_out="attn.out_proj",
    mlp_up="ffn.up_proj",
    mlp_down="ffn.down_proj",
    extra={"positions": "transformer.wpe", "attn_norm": "norm_1", "mlp_norm": "norm_2"},
    prefixes=("transformer.", ""),
)
DEFAULTS = defaults(vocab=50368, hidden=2048, layers=24, heads=16, context=2048, tied=True)
ONE_OR_ALL = {"multihead_attention": False, "multiquery_attention": True}


def attention(c: Reader, bias: bool) -> Attention:
    a = c.under("attn_config")
    heads = c.size("num_attention_heads")
    for switch in ("qk_ln", "qk_gn", "prefix_lm", "attn_uses_sequence_id", "rope"):
        a.must(switch, False)
    a.must("fused_qkv", True)
    a.must("sliding_window_size", -1)
    return Attention(
        heads,
        1 if a.choice("attn_type", ONE_OR_ALL, "multihead_attention") else heads,
        c.head_dim(),
        Alibi(max_bias=a.number("alibi_bias_max", 8)) if a.flag("alibi", True) else None,
        bias=bias,
        out_bias=bias,
        scale=a.optional_number("softmax_scale"),
        clip=a.optional_number("clip_qkv") or None,
    )


def mpt(c: Reader) -> Model:
    hidden = c.size("hidden_size")
    bias = not c.flag("no_bias", True)
    context = c.size("max_position_embeddings")
    for key, wanted in (("ffn_type", "mptmlp"), ("ffn_hidden_size", None), ("ffn_act_fn", None)):
        c.under("ffn_config").must(key, wanted)
    c.choice(
        "norm_type",
        {"low_precision_layernorm": "layer", "layernorm": "layer"},
        "low_precision_layernorm",
    )
    norm = Norm("layer", c.number("layer_norm_epsilon", 1e-5), bias)
    block = attention(c, bias)
    mlp = Mlp(c.size("expansion_ratio", 4) * hidden, "gelu", gated=False, bias=bias)
    learned = (
        c.flag("learned_pos_emb", True) and block.position is None
    )  # ALiBi takes the place of learned ones
    scale = (
        hidden**-0.5 if c.get("logit_scale") == "inv_sqrt_d_model" else c.number("logit_scale", 1.0)
    )
    layers = [Layer(block, mlp, attn_norm=norm, mlp_norm=norm)] * len(c.layers())
    return model(c, layers, final_norm=norm, positions=context if learned else 0, logit_scale=scale)


FAMILIES = {"mpt": Family(mpt, NAMES, DEFAULTS)}
