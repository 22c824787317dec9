"""Both layouts of rope parameters, every scaling, and its factors compared to transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import transformers as tf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bloomery.errors import UnsupportedModel
from bloomery.families import describe_config
from bloomery.spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    YarnScaling,
)

SIZES = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
BASE = SIZES | {"max_position_embeddings": 256}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHORT_FACTORS = [1.0 + i / 10 for i in range(8)]
LONG_FACTORS = [1.0 + i for i in range(8)]

SCALINGS: list[tuple[dict[str, Any], Any]] = [
    ({"rope_type": "default"}, None),
    ({"rope_type": "linear", "factor": 4.0}, LinearScaling(4.0)),
    ({"rope_type": "dynamic", "factor": 2.0}, DynamicScaling(2.0, 256)),
    ({"rope_type": "llama3", **LLAMA3}, Llama3Scaling(8.0, 1.0, 4.0, 64)),
    (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        YarnScaling(4.0, 64, attention_factor=0.1 * math.log(4) + 1),
    ),
    (
        {"rope_type": "yarn", "factor": 4.0},
        YarnScaling(4.0, 256, attention_factor=0.1 * math.log(4) + 1),
    ),
    (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "attention_factor": 0.7,
            "beta_fast": 16,
            "truncate": False,
        },
        YarnScaling(4.0, 256, beta_fast=16.0, attention_factor=0.7, truncate=False),
    ),
    (
        {"rope_type": "yarn", "factor": 4.0, "mscale": 1.2, "mscale_all_dim": 0.7},
        YarnScaling(4.0, 256, attention_factor=(0.12 * math.log(4) + 1) / (0.07 * math.log(4) + 1)),
    ),
    (
        {
            "rope_type": "longrope",
            "short_factor": SHORT_FACTORS,
            "long_factor": LONG_FACTORS,
            "original_max_position_embeddings": 64,
        },
        LongRopeScaling(
            tuple(SHORT_FACTORS),
            tuple(LONG_FACTORS),
            64,
            *[math.sqrt(1 + math.log(4) / math.log(64))] * 2,
        ),
    ),
    (
        {
            "rope_type": "longrope",
            "short_factor": SHORT_FACTORS,
            "long_factor": LONG_FACTORS,
            "factor": 1.0,
        },
        LongRopeScaling(tuple(SHORT_FACTORS), tuple(LONG_FACTORS), 256),
    ),
]


def read_rope(config: dict[str, Any]) -> RopeSpec:
    rope = describe_config(config).model.layers[0].attention.position
    assert isinstance(rope, RopeSpec)
    return rope


@pytest.mark.parametrize("scaling, expected", SCALINGS, ids=[str(i) for i in range(len(SCALINGS))])
def test_both_layouts_agree(scaling: dict[str, Any], expected: Any) -> None:
    expected_rope = RopeSpec(16, 5000.0, scaling=expected)
    assert read_rope(BASE | {"rope_parameters": scaling | {"rope_theta": 5000.0}}) == expected_rope
    assert read_rope(BASE | {"rope_scaling": scaling, "rope_theta": 5000.0}) == expected_rope
    oldest = {"type" if name == "rope_type" else name: value for name, value in scaling.items()}
    assert read_rope(BASE | {"rope_scaling": oldest, "rope_theta": 5000.0}) == expected_rope


@pytest.mark.parametrize(
    "scaling, expected",
    [pair for pair in SCALINGS if isinstance(pair[1], YarnScaling | LongRopeScaling)],
)
def test_attention_factors_agree_with_transformers(scaling: dict[str, Any], expected: Any) -> None:
    config = tf.LlamaConfig(**BASE | {"rope_parameters": scaling | {"rope_theta": 5000.0}})
    _, attention_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    assert attention_factor == pytest.approx(
        expected.attention_factor
        if isinstance(expected, YarnScaling)
        else expected.long_attention_factor
    )


def test_longrope_with_stated_attention_factors() -> None:
    scaling = {
        "type": "su",
        "short_factor": SHORT_FACTORS,
        "long_factor": LONG_FACTORS,
        "short_mscale": 1.1,
        "long_mscale": 1.3,
    }
    rope = read_rope(
        BASE | {"rope_scaling": scaling, "original_max_position_embeddings": 64}
    ).scaling
    assert isinstance(rope, LongRopeScaling)
    assert (rope.original_context, rope.short_attention_factor, rope.long_attention_factor) == (
        64,
        1.1,
        1.3,
    )


def test_old_phi_3_config_calls_longrope_yarn() -> None:
    scaling = {"type": "yarn", "short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}
    rope = read_rope(
        BASE
        | {"model_type": "phi3", "rope_scaling": scaling, "original_max_position_embeddings": 64}
    )
    assert isinstance(rope.scaling, LongRopeScaling) and rope.scaling.original_context == 64


REFUSED = [
    ({"rope_type": "mrope", "factor": 2.0}, "rope_scaling.rope_type 'mrope'"),
    ({"type": "proportional"}, "rope_scaling.type 'proportional'"),
    ({"rope_type": "default", "mrope_section": [1, 2]}, "rope_scaling.mrope_section"),
    ({"rope_type": "linear"}, "rope_scaling.factor is missing"),
    ({"rope_type": "linear", "factor": 0}, "rope_scaling.factor must be above 0"),
    ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "rope_type and type contradict"),
    ({"rope_type": "dynamic", "factor": "2"}, "rope_scaling.factor must be a number"),
    ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 0.5}, "low_freq_factor"),
    (
        {"rope_type": "longrope", "short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS[1:]},
        "long_factor must hold 8",
    ),
    (
        {"rope_type": "longrope", "short_factor": ["1"] * 8, "long_factor": LONG_FACTORS},
        "short_factor must be a list",
    ),
    ("linear", "rope_scaling must be an object"),
]


@pytest.mark.parametrize("scaling, message", REFUSED, ids=[message for _, message in REFUSED])
def test_unknown_scalings_are_refused_by_name(scaling: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel, match="^config.json: ") as caught:
        describe_config(BASE | {"rope_scaling": scaling})
    assert message in str(caught.value)


def test_gemma_3_has_rope_parameters_per_layer_type() -> None:
    flat = {"rope_type": "linear", "factor": 8.0}
    with pytest.raises(UnsupportedModel, match="rope_parameters.factor"):
        describe_config({"model_type": "gemma3_text", "rope_parameters": flat})
    nested = {
        "full_attention": flat | {"rope_theta": 300.0},
        "sliding_attention": {"rope_theta": 200.0},
    }
    layers = describe_config({"model_type": "gemma3_text", "rope_parameters": nested}).model.layers
    assert layers[0].attention.position == RopeSpec(256, 200.0)
    assert layers[5].attention.position == RopeSpec(256, 300.0, scaling=LinearScaling(8.0))
