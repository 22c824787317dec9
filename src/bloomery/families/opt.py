"""OPT and Galactica: learned positions with an offset of two. The 350M model normalises each
residual sum and projects its embeddings.
"""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.dense import read_attention, read_model, read_ungated_mlp
from bloomery.families.reader import ConfigReader, defaults
from bloomery.spec import LayerSpec, ModelSpec, NormSpec, SplitTensors, TensorNames

NAMES = TensorNames(
    embed="model.decoder.embed_tokens",
    layer="model.decoder.layers.{i}.",
    final_norm="model.decoder.final_layer_norm",
    head="lm_head",
    attn_qkv=SplitTensors(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    attn_out="self_attn.out_proj",
    mlp_up="fc1",
    mlp_down="fc2",
    extra={
        "positions": "model.decoder.embed_positions",
        "project_in": "model.decoder.project_in",
        "project_out": "model.decoder.project_out",
        "attn_norm": "self_attn_layer_norm",
        "mlp_norm": "final_layer_norm",
        "attn_sum_norm": "self_attn_layer_norm",
        "mlp_sum_norm": "final_layer_norm",
    },
    prefixes=("model.", ""),
)
DEFAULTS = defaults(
    vocab=50272, hidden=768, mlp=3072, layers=12, heads=12, context=2048, tied=True
) | defaults(activation_function="relu")
POSITION_OFFSET = 2  # row of the position table that the first token uses


def read_opt(config: ConfigReader) -> ModelSpec:
    hidden = config.size("hidden_size")
    bias = config.flag("enable_bias", True)
    affine = config.flag("layer_norm_elementwise_affine", True)
    norm_first = config.flag("do_layer_norm_before", True)
    final_norm_removed = config.flag("_remove_final_layer_norm", False)
    norm = NormSpec("layer", 1e-5, bias=affine, weight=affine)
    embed_dim = config.size("word_embed_proj_dim", hidden)
    layer = LayerSpec(
        attention=read_attention(config, position=None, bias=bias, out_bias=bias),
        mlp=read_ungated_mlp(config, "activation_function", bias),
        attn_norm=norm if norm_first else None,
        mlp_norm=norm if norm_first else None,
        attn_sum_norm=None if norm_first else norm,
        mlp_sum_norm=None if norm_first else norm,
    )
    return read_model(
        config,
        [layer] * len(config.layers()),
        final_norm=norm if norm_first and not final_norm_removed else None,
        embed_dim=embed_dim if embed_dim != hidden else None,
        positions=config.size("max_position_embeddings") + POSITION_OFFSET,
        position_offset=POSITION_OFFSET,
    )


FAMILIES = {"opt": ModelFamily(read_opt, NAMES, DEFAULTS)}
