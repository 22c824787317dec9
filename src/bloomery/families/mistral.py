"""Mistral: a Llama with a sliding window. Ministral: a Mistral whose layers may differ in it.
Ministral 3: a Mistral whose queries grow with their position. Mixtral: a Mistral with a mixture of
experts. Mistral Small 3 is the text part of a vision model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bloomery.families import ModelFamily
from bloomery.families.llama import DEFAULTS, NAMES, read_layer, read_mlp, read_model
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import find_rope_section, read_original_context, read_rope
from bloomery.families.vision import read_text_part, text_names
from bloomery.families.window import read_layer_windows
from bloomery.spec import LayerSpec, ModelSpec, MoeSpec, QueryScaling, SplitTensors

MISTRAL = DEFAULTS | defaults(mlp=14336, kv_heads=8, context=131072, sliding_window=4096)
MIXTRAL = MISTRAL | defaults(
    rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None, num_experts=8, num_experts_per_tok=2
)
MISTRAL3 = (
    MISTRAL
    | defaults(vocab=131072, hidden=5120, mlp=32768, layers=40, head_dim=128, rms_norm_eps=1e-5)
    | defaults(rope_theta=1e9, sliding_window=None)
)
MINISTRAL3 = (
    MISTRAL
    | defaults(vocab=131072, layers=34, head_dim=128, context=262144, rms_norm_eps=1e-5)
    | defaults(rope_theta=1e6, sliding_window=None)
    | defaults(
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    )
)
MIXTRAL_NAMES = replace(
    NAMES,
    extra={**NAMES.extra, "router": "block_sparse_moe.gate"},
    experts="block_sparse_moe.experts.{e}.",
    expert_up=SplitTensors(("w1", "w3")),
    expert_down="w2",
)


def read_window_layers(config: ConfigReader, **changes: Any) -> list[LayerSpec]:
    """Read the layers; keywords go to their attention."""
    windows = read_layer_windows(config)
    return [read_layer(config, window=window, **changes) for window in windows]


def read_mistral(config: ConfigReader) -> ModelSpec:
    return read_model(config, read_window_layers(config))


def read_ministral3(config: ConfigReader) -> ModelSpec:
    section = find_rope_section(config)
    # These files repeat the context among the values of the rope.
    other_keys = ("llama_4_scaling_beta", "max_position_embeddings")
    rope = read_rope(config, config.head_dim(), other_keys=other_keys)
    section.size("max_position_embeddings", config.size("max_position_embeddings"))
    scaling = QueryScaling(
        section.number("llama_4_scaling_beta"), read_original_context(config, section)
    )
    return read_model(config, read_window_layers(config, position=rope, query_scaling=scaling))


def read_mixtral(config: ConfigReader) -> ModelSpec:
    moe = MoeSpec(config.size("num_experts"), config.size("num_experts_per_tok"), read_mlp(config))
    layers = [replace(layer, mlp=moe) for layer in read_window_layers(config)]
    return read_model(config, layers)


def read_mistral3(config: ConfigReader) -> ModelSpec:
    readers = {"mistral": (read_mistral, MISTRAL3), "ministral3": (read_ministral3, MINISTRAL3)}
    return read_text_part(config, readers)


FAMILIES = {
    "mistral": ModelFamily(read_mistral, NAMES, MISTRAL),
    "ministral": ModelFamily(read_mistral, NAMES, MISTRAL),
    "ministral3": ModelFamily(read_ministral3, NAMES, MINISTRAL3),
    "mixtral": ModelFamily(read_mixtral, MIXTRAL_NAMES, MIXTRAL),
    "mistral3": ModelFamily(read_mistral3, text_names(NAMES), defaults(tied=True)),
}
