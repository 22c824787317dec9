"""GPT-2: learned positions, weights stored as [in, out]. GPT-BigCode (SantaCoder, StarCoder): the same, stored the
usual way, with one key-value head for all or QKV fused head by head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bloomery.families import Family
from bloomery.families.reader import Reader
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
DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257,
    "max_position_embeddings": 1024,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "activation_function": "gelu_new",
}


def gpt2(c: Reader) -> Model:
    c.must("add_cross_attention", False)
    hidden, heads, positions = c.size("hidden_size"), c.size("num_attention_heads"), c.size("max_position_embeddings")
    kv_heads = 1 if c.flag("multi_query", False) else heads
    c.must("num_key_value_heads", kv_heads)
    norm = Norm("layer", c.number("layer_norm_epsilon", 1e-5), bias=True)
    scale = c.head_dim() ** -0.5 if c.flag("scale_attn_weights", True) else 1.0
    by_depth = c.flag("scale_attn_by_inverse_layer_idx", False)

    def layer(i: int) -> Layer:
        return Layer(
            # reorder_and_upcast_attn changes the order of the sums only: scores are float32 here in any case
            attention=Attention(
                heads,
                kv_heads,
                c.head_dim(),
                bias=True,
                out_bias=True,
                scale=scale / (i + 1) if by_depth else scale,
            ),
            mlp=Mlp(
                c.size("intermediate_size", 4 * hidden), c.activation("activation_function"), gated=False, bias=True
            ),
            attn_norm=norm,
            mlp_norm=norm,
        )

    return Model(
        vocab=c.size("vocab_size"),
        hidden=hidden,
        layers=tuple(map(layer, c.layers())),
        final_norm=norm,
        context=positions,
        positions=positions,
        tied=c.flag("tie_word_embeddings", True),
    )


def bigcode_names(c: Reader) -> Names:
    grouped = not c.flag("multi_query")
    return replace(NAMES, attn_qkv=Fused("attn.c_attn", grouped), transposed=False)


BIGCODE = DEFAULTS | {"activation_function": "gelu_pytorch_tanh", "multi_query": True}
FAMILIES = {"gpt2": Family(gpt2, NAMES, DEFAULTS), "gpt_bigcode": Family(gpt2, bigcode_names, BIGCODE)}
