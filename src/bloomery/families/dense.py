"""Building blocks of all families: attention, MLPs, layers and models with the keys of Llama.

It defines no family.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from bloomery.families.reader import ConfigReader
from bloomery.families.rope import read_rope
from bloomery.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec


def read_attention(config: ConfigReader, **changes: Any) -> AttentionSpec:
    """Read the attention of a Llama config; keywords replace what a family does differently."""
    num_heads = config.size("num_attention_heads")
    bias = config.flag("attention_bias", False)
    attention = AttentionSpec(
        num_heads,
        config.size("num_key_value_heads", num_heads),
        config.head_dim(),
        bias=bias,
        out_bias=bias,
    )
    if "position" not in changes:
        changes["position"] = read_rope(config, attention.head_dim)
    return replace(attention, **changes)


def read_mlp(config: ConfigReader, size_key: str = "intermediate_size") -> MlpSpec:
    return MlpSpec(
        config.size(size_key),
        config.activation("hidden_act"),
        bias=config.flag("mlp_bias", False),
    )


def read_ungated_mlp(
    config: ConfigReader,
    activation_key: str = "hidden_act",
    bias: bool = True,
    size_key: str = "intermediate_size",
) -> MlpSpec:
    """Read an MLP without a gate, which is four times as wide as the model if nothing is stated."""
    size = config.size(size_key, 4 * config.size("hidden_size"))
    return MlpSpec(size, config.activation(activation_key), gated=False, bias=bias)


def read_layer(config: ConfigReader, **changes: Any) -> LayerSpec:
    """Read a layer with an RMS norm before each block; keywords go to the attention."""
    norm = NormSpec("rms", config.number("rms_norm_eps"))
    return LayerSpec(
        read_attention(config, **changes), read_mlp(config), attn_norm=norm, mlp_norm=norm
    )


def change_attention(layer: LayerSpec, **changes: Any) -> LayerSpec:
    """Return the layer, which has attention, with these values of it replaced."""
    assert layer.attention is not None
    return replace(layer, attention=replace(layer.attention, **changes))


def read_model(config: ConfigReader, layers: Iterable[LayerSpec], **changes: Any) -> ModelSpec:
    """Build the model around these layers; keywords replace what a family does differently."""
    model = ModelSpec(
        vocab=config.size("vocab_size"),
        hidden=config.size("hidden_size"),
        layers=tuple(layers),
        final_norm=NormSpec("rms", config.number("rms_norm_eps", 1e-6)),
        context=config.size("max_position_embeddings"),
        tied=config.flag("tie_word_embeddings", False),
    )
    return replace(model, **changes)
