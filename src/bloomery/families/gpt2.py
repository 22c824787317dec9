"""GPT-2: learned positions, weights stored as [in, out]."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_attention, read_model, read_ungated_mlp
from bloomery.families.reader import ConfigReader, defaults
from bloomery.spec import FusedTensor, LayerSpec, ModelSpec, NormSpec, TensorNames

NAMES = TensorNames(
    embed="transformer.wte",
    layer="transformer.h.{i}.",
    final_norm="transformer.ln_f",
    head="lm_head",
    attn_qkv=FusedTensor("attn.c_attn"),
    attn_out="attn.c_proj",
    mlp_up="mlp.c_fc",
    mlp_down="mlp.c_proj",
    extra={"positions": "transformer.wpe", "attn_norm": "ln_1", "mlp_norm": "ln_2"},
    transposed=True,
    prefixes=("transformer.", ""),
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)
DEFAULTS = defaults(
    vocab=50257, hidden=768, layers=12, heads=12, context=1024, tied=True
) | defaults(activation_function="gelu_new")


def read_gpt2(config: ConfigReader, num_kv_heads: int | None = None) -> ModelSpec:
    config.require("add_cross_attention", False)
    norm = NormSpec("layer", config.number("layer_norm_epsilon", 1e-5), bias=True)
    mlp = read_ungated_mlp(config, "activation_function")
    attention = read_attention(config, position=None, bias=True, out_bias=True)
    if num_kv_heads is not None:
        attention = replace(attention, num_kv_heads=num_kv_heads)
    scale = config.head_dim() ** -0.5 if config.flag("scale_attn_weights", True) else 1.0
    scale_by_depth = config.flag("scale_attn_by_inverse_layer_idx", False)
    # reorder_and_upcast_attn asks for float32 scores, which are always used here.
    layers = []
    for i in config.layers():
        scaled = replace(attention, scale=scale / (i + 1) if scale_by_depth else scale)
        layers.append(LayerSpec(scaled, mlp, attn_norm=norm, mlp_norm=norm))
    positions = config.size("max_position_embeddings")
    return read_model(config, layers, final_norm=norm, positions=positions)


FAMILIES = {
    "gpt2": ModelFamily(read_gpt2, NAMES, DEFAULTS),
}
