"""GPT-NeoX (Pythia, RedPajama): partial rope, two norms, parallel or sequential blocks."""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.dense import read_attention, read_model, read_ungated_mlp
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_rope
from bloomery.spec import FusedTensor, LayerSpec, ModelSpec, NormSpec, TensorNames

NAMES = TensorNames(
    embed="gpt_neox.embed_in",
    layer="gpt_neox.layers.{i}.",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    attn_qkv=FusedTensor("attention.query_key_value", grouped=True),
    attn_out="attention.dense",
    mlp_up="mlp.dense_h_to_4h",
    mlp_down="mlp.dense_4h_to_h",
    extra={"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    prefixes=("gpt_neox.", ""),
    ignored=("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"),
)
DEFAULTS = defaults(
    vocab=50432, hidden=6144, mlp=24576, layers=44, heads=64, context=2048
) | defaults(partial_rotary_factor=0.25, hidden_act="gelu")


def read_gpt_neox(config: ConfigReader) -> ModelSpec:
    bias = config.flag("attention_bias", True)
    norm = NormSpec("layer", config.number("layer_norm_eps", 1e-5), bias=True)
    position = read_rope(config, config.head_dim(), partial=True)
    layer = LayerSpec(
        attention=read_attention(config, position=position, bias=bias, out_bias=bias),
        mlp=read_ungated_mlp(config),
        attn_norm=norm,
        mlp_norm=norm,
        parallel=config.flag("use_parallel_residual", True),
    )
    return read_model(config, [layer] * len(config.layers()), final_norm=norm)


FAMILIES = {"gpt_neox": ModelFamily(read_gpt_neox, NAMES, DEFAULTS)}
