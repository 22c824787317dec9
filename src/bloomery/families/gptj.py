"""GPT-J: interleaved rope on a part of each head, parallel blocks behind one norm, a head bias."""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.dense import read_attention, read_model, read_ungated_mlp
from bloomery.families.reader import ConfigReader, defaults
from bloomery.spec import LayerSpec, ModelSpec, NormSpec, RopeSpec, SplitTensors, TensorNames

NAMES = TensorNames(
    embed="transformer.wte",
    layer="transformer.h.{i}.",
    final_norm="transformer.ln_f",
    head="lm_head",
    attn_qkv=SplitTensors(("attn.q_proj", "attn.k_proj", "attn.v_proj")),
    attn_out="attn.out_proj",
    mlp_up="mlp.fc_in",
    mlp_down="mlp.fc_out",
    extra={"attn_norm": "ln_1"},
    prefixes=("transformer.", ""),
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)
DEFAULTS = defaults(
    vocab=50400, hidden=4096, layers=28, heads=16, context=2048, rotary_dim=64
) | defaults(activation_function="gelu_new")


def read_gptj(config: ConfigReader) -> ModelSpec:
    for switch in ("rotary", "scale_attn_weights"):
        config.require(switch, True)
    norm = NormSpec("layer", config.number("layer_norm_epsilon", 1e-5), bias=True)
    position = RopeSpec(config.size("rotary_dim"), interleaved=True)
    layer = LayerSpec(
        attention=read_attention(config, position=position),
        mlp=read_ungated_mlp(config, "activation_function"),
        attn_norm=norm,
        parallel=True,
    )
    return read_model(config, [layer] * len(config.layers()), final_norm=norm, head_bias=True)


FAMILIES = {"gptj": ModelFamily(read_gptj, NAMES, DEFAULTS)}
