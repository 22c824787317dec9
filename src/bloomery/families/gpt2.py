"""GPT-2: learned positions, weights stored as [in, out]."""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.llama import read_model
from bloomery.families.reader import ConfigReader, defaults
from bloomery.spec import (
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
    hidden = config.size("hidden_size")
    num_heads = config.size("num_attention_heads")
    norm = NormSpec("layer", config.number("layer_norm_epsilon", 1e-5), bias=True)
    mlp = MlpSpec(
        config.size("intermediate_size", 4 * hidden),
        config.activation("activation_function"),
        gated=False,
        bias=True,
    )
    scale = config.head_dim() ** -0.5 if config.flag("scale_attn_weights", True) else 1.0
    scale_by_depth = config.flag("scale_attn_by_inverse_layer_idx", False)
    # reorder_and_upcast_attn asks for float32 scores, which are always used here.
    layers = []
    for i in config.layers():
        attention = AttentionSpec(
            num_heads,
            num_kv_heads or num_heads,
            config.head_dim(),
            bias=True,
            out_bias=True,
            scale=scale / (i + 1) if scale_by_depth else scale,
        )
        layers.append(LayerSpec(attention, mlp, attn_norm=norm, mlp_norm=norm))
    positions = config.size("max_position_embeddings")
    return read_model(config, layers, final_norm=norm, positions=positions)


FAMILIES = {
    "gpt2": ModelFamily(read_gpt2, NAMES, DEFAULTS),
}
