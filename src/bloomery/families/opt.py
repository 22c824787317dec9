"""OPT (and Galactica): learned positions offset by two. The 350M model norms each sum and projects its embeddings."""

from __future__ import annotations

from bloomery.families import Family
from bloomery.families.llama import model
from bloomery.families.reader import Reader, defaults
from bloomery.spec import Attention, Layer, Mlp, Model, Names, Norm, Split

NAMES = Names(
    embed="model.decoder.embed_tokens",
    layer="model.decoder.layers.{i}.",
    final_norm="model.decoder.final_layer_norm",
    head="lm_head",
    attn_qkv=Split(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
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
DEFAULTS = defaults(vocab=50272, hidden=768, mlp=3072, layers=12, heads=12, context=2048, tied=True)
OFFSET = 2  # rows of the position table before the first token's


def opt(c: Reader) -> Model:
    hidden = c.size("hidden_size")
    heads = c.size("num_attention_heads")
    bias = c.flag("enable_bias", True)
    affine = c.flag("layer_norm_elementwise_affine", True)
    before = c.flag("do_layer_norm_before", True)
    removed = c.flag("_remove_final_layer_norm", False)
    norm = Norm("layer", 1e-5, bias=affine, weight=affine)
    narrow = c.size("word_embed_proj_dim", hidden)
    layer = Layer(
        attention=Attention(heads, heads, c.head_dim(), bias=bias, out_bias=bias),
        mlp=Mlp(
            c.size("intermediate_size"),
            c.activation("activation_function", "relu"),
            gated=False,
            bias=bias,
        ),
        attn_norm=norm if before else None,
        mlp_norm=norm if before else None,
        attn_sum_norm=None if before else norm,
        mlp_sum_norm=None if before else norm,
    )
    return model(
        c,
        [layer] * len(c.layers()),
        final_norm=norm if before and not removed else None,
        embed_dim=narrow if narrow != hidden else None,
        positions=c.size("max_position_embeddings") + OFFSET,
        position_offset=OFFSET,
    )


FAMILIES = {"opt": Family(opt, NAMES, DEFAULTS)}
