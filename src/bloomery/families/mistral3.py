"""Ministral 3: a Mistral whose queries grow with their position. Mistral 3: the text part of a
vision model, which is a Mistral (Mistral Small 3) or a Ministral 3.
"""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.dense import read_model
from bloomery.families.llama import NAMES
from bloomery.families.mistral import MISTRAL, read_mistral, read_window_layers
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import find_rope_section, read_original_context, read_rope
from bloomery.families.vision import build_vision_family
from bloomery.spec import ModelSpec, QueryScaling

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


MINISTRAL = {"ministral3": ModelFamily(read_ministral3, NAMES, MINISTRAL3)}
TEXT = {"mistral": ModelFamily(read_mistral, NAMES, MISTRAL3)} | MINISTRAL
FAMILIES = MINISTRAL | {"mistral3": build_vision_family(TEXT, NAMES, defaults(tied=True))}
