"""The rotary part of config.json -> spec.Rope. Two dialects say the same: `rope_theta` beside `rope_scaling` (older
files), or `rope_parameters` with both inside, possibly one object a kind of layer. Attention factors are worked out
here, so that a spec carries plain numbers. A kind or a key of scaling we do not know is refused: it would bend every
angle."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bloomery.families.reader import REQUIRED, Reader
from bloomery.spec import Dynamic, Linear, Llama3, LongRope, Rope, Yarn

Scaling = Linear | Dynamic | Llama3 | Yarn | LongRope

KNOWN = """
    rope_type type rope_theta partial_rotary_factor factor original_max_position_embeddings attention_factor
    low_freq_factor high_freq_factor beta_fast beta_slow mscale mscale_all_dim truncate short_factor long_factor
    short_mscale long_mscale finetuned
"""


def rope(c: Reader, head_dim: int, *, partial: bool = False, interleaved: bool = False) -> Rope:
    """The rope of a config with one for all layers. `partial`: the family may turn a fraction of the head only."""
    scaling = c.under("rope_scaling")
    scaling = scaling if scaling.values else c.under("rope_parameters")
    turned = read(c, scaling, head_dim, c.number("rope_theta", 10000.0), partial)
    return replace(turned, interleaved=interleaved)


def read(c: Reader, scaling: Reader, head_dim: int, theta: float, partial: bool = False) -> Rope:
    """The rope of one object of parameters; `theta` is that of an object without."""
    unknown = sorted(set(scaling.values) - set(KNOWN.split()))
    if unknown:
        raise scaling.wrong(unknown[0], f"is not known. Known: {', '.join(KNOWN.split())}")
    theta = scaling.number("rope_theta", theta)
    if theta <= 1:
        raise scaling.wrong("rope_theta", f"must be above 1, not {theta}")
    fraction = scaling.number("partial_rotary_factor", c.number("partial_rotary_factor", 1.0))
    if not 0 < fraction <= 1 or (fraction < 1 and not partial):
        raise scaling.wrong("partial_rotary_factor", f"{fraction} is not supported by this family")
    dim = int(head_dim * fraction)
    kind = scaling.choice("rope_type", KINDS, "default")
    return Rope(dim, theta, scaling=kind(c, scaling, dim) if kind else None)


def linear(c: Reader, scaling: Reader, dim: int) -> Scaling:
    return Linear(factor(scaling))


def dynamic(c: Reader, scaling: Reader, dim: int) -> Scaling:
    if dim <= 2:
        raise scaling.wrong("rope_type", f"'dynamic' cannot stretch {dim} dimensions")
    return Dynamic(factor(scaling), c.size("max_position_embeddings"))


def llama3(c: Reader, scaling: Reader, dim: int) -> Scaling:
    low = scaling.number("low_freq_factor")
    high = scaling.number("high_freq_factor")
    if not 0 < low < high:
        raise scaling.wrong("low_freq_factor", f"{low} must be below high_freq_factor {high}")
    return Llama3(factor(scaling), low, high, original(c, scaling))


def yarn(c: Reader, scaling: Reader, dim: int) -> Scaling:
    if "long_factor" in scaling.values:  # Phi-3's first files called their divisors yarn
        return longrope(c, scaling, dim)
    stretch = factor(scaling, c.size("max_position_embeddings") / original(c, scaling))
    scale = scaling.number("mscale", 0.0)
    all_dims = scaling.number("mscale_all_dim", 0.0)
    gain = (
        softening(stretch, scale) / softening(stretch, all_dims)
        if scale and all_dims
        else softening(stretch, 1.0)
    )
    return Yarn(
        stretch,
        original(c, scaling),
        beta_fast=scaling.number("beta_fast", 32.0) or 32.0,
        beta_slow=scaling.number("beta_slow", 1.0) or 1.0,
        attention=scaling.number("attention_factor", gain),
        truncate=scaling.flag("truncate", True),
    )


def longrope(c: Reader, scaling: Reader, dim: int) -> Scaling:
    base = original(c, scaling)
    stretch = scaling.number("factor", c.size("max_position_embeddings") / base)
    gain = math.sqrt(1 + math.log(stretch) / math.log(base)) if stretch > 1 else 1.0
    gain = scaling.number("attention_factor", gain)
    short = scaling.items("short_factor", float)
    long = scaling.items("long_factor", float)
    for name, divisors in (("short_factor", short), ("long_factor", long)):
        if len(divisors) != dim // 2 or not all(0 < divisor < 1e30 for divisor in divisors):
            raise scaling.wrong(name, f"must hold {dim // 2} positive numbers")
    return LongRope(
        short, long, base, scaling.number("short_mscale", gain), scaling.number("long_mscale", gain)
    )


KINDS: Mapping[str, Callable[[Reader, Reader, int], Scaling] | None] = {
    "default": None,
    "linear": linear,
    "dynamic": dynamic,
    "llama3": llama3,
    "yarn": yarn,
    "longrope": longrope,
    "su": longrope,
}


def factor(scaling: Reader, default: Any = REQUIRED) -> float:
    value = scaling.number("factor", default)
    if value <= 0:
        raise scaling.wrong("factor", f"must be above 0, not {value}")
    return value


def original(c: Reader, scaling: Reader) -> int:
    """The context before stretching. Where the file says it at top level too, that one counts."""
    inner = scaling.size("original_max_position_embeddings", c.size("max_position_embeddings"))
    base = c.size("original_max_position_embeddings", inner)
    if base < 2:
        raise scaling.wrong("original_max_position_embeddings", f"{base} is too short to stretch")
    return base


def softening(stretch: float, scale: float) -> float:
    """How much YaRN lengthens cos and sin, so that a longer context does not flatten the softmax."""
    return 0.1 * scale * math.log(stretch) + 1.0 if stretch > 1 else 1.0
