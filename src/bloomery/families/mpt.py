"""MPT: ALiBi or learned positions, usually no bias anywhere, optional clipping of q, k and v."""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.dense import read_model
from bloomery.families.reader import ConfigReader, defaults
from bloomery.spec import (
    AlibiSpec,
    AttentionSpec,
    FusedTensor,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    TensorNames,
)

NAMES = TensorNames(
    embed="transformer.wte",
    layer="transformer.blocks.{i}.",
    final_norm="transformer.norm_f",
    head="lm_head",
    attn_qkv=FusedTensor("attn.Wqkv"),
    attn_out="attn.out_proj",
    mlp_up="ffn.up_proj",
    mlp_down="ffn.down_proj",
    extra={"positions": "transformer.wpe", "attn_norm": "norm_1", "mlp_norm": "norm_2"},
    prefixes=("transformer.", ""),
)
DEFAULTS = defaults(vocab=50368, hidden=2048, layers=24, heads=16, context=2048, tied=True)
LAYER_NORMS = {"low_precision_layernorm": "layer", "layernorm": "layer"}
IS_MULTI_QUERY = {"multihead_attention": False, "multiquery_attention": True}


def read_mpt_attention(config: ConfigReader, bias: bool) -> AttentionSpec:
    section = config.section("attn_config")
    for switch in ("qk_ln", "qk_gn", "prefix_lm", "attn_uses_sequence_id", "rope"):
        section.require(switch, False)
    section.require("fused_qkv", True)
    section.require("sliding_window_size", -1)
    num_heads = config.size("num_attention_heads")
    multi_query = section.choice("attn_type", IS_MULTI_QUERY, "multihead_attention")
    position = None
    if section.flag("alibi", True):
        position = AlibiSpec(max_bias=section.number("alibi_bias_max", 8))
    return AttentionSpec(
        num_heads,
        1 if multi_query else num_heads,
        config.head_dim(),
        position,
        bias=bias,
        out_bias=bias,
        scale=section.optional_number("softmax_scale"),
        clip=section.optional_number("clip_qkv") or None,
    )


def read_mpt(config: ConfigReader) -> ModelSpec:
    hidden = config.size("hidden_size")
    bias = not config.flag("no_bias", True)
    context = config.size("max_position_embeddings")
    for key, supported in (("ffn_type", "mptmlp"), ("ffn_hidden_size", None), ("ffn_act_fn", None)):
        config.section("ffn_config").require(key, supported)
    config.choice("norm_type", LAYER_NORMS, "low_precision_layernorm")
    norm = NormSpec("layer", config.number("layer_norm_epsilon", 1e-5), bias)
    attention = read_mpt_attention(config, bias)
    mlp = MlpSpec(config.size("expansion_ratio", 4) * hidden, "gelu", gated=False, bias=bias)
    # ALiBi replaces learned positions.
    has_learned_positions = config.flag("learned_pos_emb", True) and attention.position is None
    if config.get("logit_scale") == "inv_sqrt_d_model":
        logit_scale = hidden**-0.5
    else:
        logit_scale = config.number("logit_scale", 1.0)
    layer = LayerSpec(attention, mlp, attn_norm=norm, mlp_norm=norm)
    return read_model(
        config,
        [layer] * len(config.layers()),
        final_norm=norm,
        positions=context if has_learned_positions else 0,
        logit_scale=logit_scale,
    )


FAMILIES = {"mpt": ModelFamily(read_mpt, NAMES, DEFAULTS)}
