"""Reads the rope parameters of config.json into a RopeSpec.

There are two layouts: `rope_theta` beside `rope_scaling` (older files), or `rope_parameters` with
both inside, possibly one object per kind of layer. Attention factors are computed here, so that a
spec holds plain numbers. An unknown scaling type or key is refused, because it would change every
angle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bloomery.families.reader import REQUIRED, ConfigReader
from bloomery.spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)

KNOWN_KEYS = (
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "alpha",
    "original_max_position_embeddings",
    "attention_factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "short_factor",
    "long_factor",
    "short_mscale",
    "long_mscale",
    "finetuned",
)


def read_rope(
    config: ConfigReader,
    head_dim: int,
    *,
    partial: bool = False,
    interleaved: bool = False,
    other_keys: tuple[str, ...] = (),
) -> RopeSpec:
    """Read a rope that all layers share; `partial`: the family may rotate a part of the head.

    other_keys: keys beside those of the rope that the family reads itself.
    """
    theta = config.number("rope_theta", 10000.0)
    section = find_rope_section(config)
    rope = read_rope_section(config, section, head_dim, theta, partial, other_keys)
    return replace(rope, interleaved=interleaved)


def find_rope_section(config: ConfigReader) -> ConfigReader:
    """Return the object with the parameters of a rope that all layers share."""
    section = config.section("rope_scaling")
    return section if section.values else config.section("rope_parameters")


def read_rope_section(
    config: ConfigReader,
    section: ConfigReader,
    head_dim: int,
    theta: float,
    partial: bool = False,
    other_keys: tuple[str, ...] = (),
) -> RopeSpec:
    """Read the rope of one object of parameters; `theta` applies if the object has none."""
    unknown = sorted(set(section.values) - {*KNOWN_KEYS, *other_keys})
    if unknown:
        raise section.error(unknown[0], f"is not known. Known: {', '.join(KNOWN_KEYS)}")
    theta = section.number("rope_theta", theta)
    if theta <= 1:
        raise section.error("rope_theta", f"must be above 1, not {theta}")
    rotary_dim = config.size("rotary_dim", head_dim)
    default_fraction = config.number("partial_rotary_factor", rotary_dim / head_dim)
    fraction = section.number("partial_rotary_factor", default_fraction)
    if not 0 < fraction <= 1 or (fraction < 1 and not partial):
        raise section.error("partial_rotary_factor", f"{fraction} is not supported by this family")
    dim = int(head_dim * fraction)
    read_scaling = section.choice("rope_type", SCALING_READERS, "default")
    if section.get("alpha"):
        return RopeSpec(dim, read_stretched_theta(section, dim, theta))
    scaling = read_scaling(config, section, dim) if read_scaling else None
    return RopeSpec(dim, theta, scaling=scaling)


def read_stretched_theta(section: ConfigReader, dim: int, theta: float) -> float:
    """Read NTK scaling that is fixed: Hunyuan calls it dynamic, and alpha stretches the base."""
    if section.text("rope_type", "default") != "dynamic" or dim <= 2:
        raise section.error("alpha", f"cannot stretch {dim} dimensions of this rope_type")
    alpha = section.number("alpha")
    if alpha <= 0:
        raise section.error("alpha", f"must be above 0, not {alpha}")
    return theta * float(alpha ** (dim / (dim - 2)))


def read_layer_rope(
    config: ConfigReader,
    window: int | None,
    theta: float,
    local_theta: float,
    partial: bool = False,
) -> RopeSpec:
    """Read the rope of a layer where layers with a window ignore the scaling.

    rope_parameters has one object for each of the two kinds of layers. In older files they are
    `rope_scaling`, with the bases `theta`, and `local_theta` for layers with a window.
    """
    parameters = config.section("rope_parameters")
    scaling = config.section("rope_scaling")
    head_dim = config.head_dim()
    unknown = sorted(set(parameters.values) - {"sliding_attention", "full_attention"})
    if unknown:
        raise parameters.error(
            unknown[0], "is not known: sliding_attention and full_attention have one object each"
        )
    if window is not None:
        section = parameters.section("sliding_attention")
        return read_rope_section(config, section, head_dim, local_theta, partial)
    section = scaling if scaling.values else parameters.section("full_attention")
    return read_rope_section(config, section, head_dim, theta, partial)


def read_linear(config: ConfigReader, section: ConfigReader, dim: int) -> RopeScaling:
    return LinearScaling(read_factor(section))


def read_dynamic(config: ConfigReader, section: ConfigReader, dim: int) -> RopeScaling:
    if dim <= 2:
        raise section.error("rope_type", f"'dynamic' cannot scale {dim} dimensions")
    return DynamicScaling(read_factor(section), config.size("max_position_embeddings"))


def read_llama3(config: ConfigReader, section: ConfigReader, dim: int) -> RopeScaling:
    low = section.number("low_freq_factor")
    high = section.number("high_freq_factor")
    if not 0 < low <= high:
        raise section.error("low_freq_factor", f"{low} must not exceed high_freq_factor {high}")
    factor = read_factor(section)
    return Llama3Scaling(factor, low, high, read_original_context(config, section))


def read_yarn(config: ConfigReader, section: ConfigReader, dim: int) -> RopeScaling:
    if "long_factor" in section.values:  # the first Phi-3 files call longrope "yarn"
        return read_longrope(config, section, dim)
    original = read_original_context(config, section)
    factor = read_factor(section, config.size("max_position_embeddings") / original)
    mscale = section.number("mscale", 0.0)
    mscale_all_dim = section.number("mscale_all_dim", 0.0)
    attention = yarn_attention_factor(factor, 1.0)
    if mscale and mscale_all_dim:
        attention = yarn_attention_factor(factor, mscale)
        attention /= yarn_attention_factor(factor, mscale_all_dim)
    return YarnScaling(
        factor,
        original,
        beta_fast=section.number("beta_fast", 32.0) or 32.0,
        beta_slow=section.number("beta_slow", 1.0) or 1.0,
        attention_factor=section.number("attention_factor", attention),
        truncate=section.flag("truncate", True),
    )


def read_longrope(config: ConfigReader, section: ConfigReader, dim: int) -> RopeScaling:
    original = read_original_context(config, section)
    factor = section.number("factor", config.size("max_position_embeddings") / original)
    attention = 1.0
    if factor > 1:
        attention = math.sqrt(1 + math.log(factor) / math.log(original))
    attention = section.number("attention_factor", attention)
    short = section.list_of("short_factor", float)
    long = section.list_of("long_factor", float)
    for name, divisors in (("short_factor", short), ("long_factor", long)):
        if len(divisors) != dim // 2 or not all(0 < divisor < 1e30 for divisor in divisors):
            raise section.error(name, f"must hold {dim // 2} positive numbers")
    return LongRopeScaling(
        short,
        long,
        original,
        short_attention_factor=section.number("short_mscale", attention),
        long_attention_factor=section.number("long_mscale", attention),
    )


SCALING_READERS: Mapping[str, Callable[[ConfigReader, ConfigReader, int], RopeScaling] | None] = {
    "default": None,
    "linear": read_linear,
    "dynamic": read_dynamic,
    "llama3": read_llama3,
    "yarn": read_yarn,
    "longrope": read_longrope,
    "su": read_longrope,
}


def read_factor(section: ConfigReader, default: Any = REQUIRED) -> float:
    factor = section.number("factor", default)
    if factor <= 0:
        raise section.error("factor", f"must be above 0, not {factor}")
    return factor


def read_original_context(config: ConfigReader, section: ConfigReader) -> int:
    """Return the context before scaling. A value at the top level takes precedence."""
    key = "original_max_position_embeddings"
    nested = section.size(key, config.size("max_position_embeddings"))
    original = config.size(key, nested)
    if original < 2:
        raise section.error(key, f"{original} is too short to scale")
    return original


def yarn_attention_factor(factor: float, mscale: float) -> float:
    """Return YaRN's factor on cos and sin, which keeps a long context from flattening softmax."""
    if factor <= 1:
        return 1.0
    return 0.1 * mscale * math.log(factor) + 1.0
