"""Rotary position embeddings: a table of cos and sin per RopeSpec, built once for max_model_len.

Factors that scale queries by their position are a table as well.

Every angle depends only on its own position, so cached keys stay valid however a prompt was split
into chunks. Two scalings depend on the current length in other implementations; here they do not.
Dynamic scaling uses, for position p, the base of length p + 1. LongRoPE uses its long factors if
and only if max_model_len exceeds the original context.
"""

from __future__ import annotations

import math

import torch

from bloomery.spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    QueryScaling,
    RopeSpec,
    YarnScaling,
)


def build_rope_table(rope: RopeSpec, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, each [max_len, dim / 2] in float32."""
    positions = torch.arange(max_len, dtype=torch.float32)[:, None]
    magnitude = 1.0
    match rope.scaling:
        case None:
            frequencies = base_frequencies(rope)
        case LinearScaling(factor):
            frequencies = base_frequencies(rope) / factor
        case DynamicScaling():
            frequencies = dynamic_frequencies(rope, rope.scaling, positions)
        case Llama3Scaling():
            frequencies = llama3_frequencies(rope, rope.scaling)
        case YarnScaling():
            frequencies = yarn_frequencies(rope, rope.scaling)
            magnitude = rope.scaling.attention_factor
        case LongRopeScaling() as scaling:
            if max_len > scaling.original_context:
                factors = scaling.long_factor
                magnitude = scaling.long_attention_factor
            else:
                factors = scaling.short_factor
                magnitude = scaling.short_attention_factor
            frequencies = base_frequencies(rope) / torch.tensor(factors)
    angles = positions * frequencies
    return angles.cos() * magnitude, angles.sin() * magnitude


def build_query_scales(scaling: QueryScaling, max_len: int) -> torch.Tensor:
    """Return the factor of a query at each position: [max_len] in float32."""
    positions = torch.arange(max_len, dtype=torch.float32)
    periods = torch.floor((positions + scaling.offset) / scaling.period)
    return 1 + scaling.beta * torch.log1p(periods)


def base_frequencies(rope: RopeSpec, theta: float | torch.Tensor | None = None) -> torch.Tensor:
    """Return frequencies [..., dim / 2] in radians per position; theta may be a column of bases."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    base = rope.theta if theta is None else theta
    return 1.0 / (base**exponents)


def dynamic_frequencies(
    rope: RopeSpec, scaling: DynamicScaling, positions: torch.Tensor
) -> torch.Tensor:
    """Dynamic NTK scaling: the base grows with the position beyond the original context."""
    length = (positions + 1).clamp(min=scaling.original_context)
    growth = scaling.factor * length / scaling.original_context - (scaling.factor - 1)
    return base_frequencies(rope, rope.theta * growth ** (rope.dim / (rope.dim - 2)))


def llama3_frequencies(rope: RopeSpec, scaling: Llama3Scaling) -> torch.Tensor:
    """Llama 3 scaling: low frequencies are divided by the factor, high ones stay as they are."""
    frequencies = base_frequencies(rope)
    slowed = frequencies / scaling.factor
    wavelength = 2 * math.pi / frequencies
    longest = scaling.original_context / scaling.low_freq_factor
    shortest = scaling.original_context / scaling.high_freq_factor
    ramp_width = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / ramp_width
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    unblended = torch.where(wavelength > longest, slowed, frequencies)
    in_between = (wavelength <= longest) & (wavelength >= shortest)
    return torch.where(in_between, blended, unblended)


def yarn_frequencies(rope: RopeSpec, scaling: YarnScaling) -> torch.Tensor:
    """YaRN scaling: a linear ramp over the dimensions between unscaled and scaled frequencies."""

    def dimension_of(rotations: float) -> float:
        """Return the (fractional) pair with this many rotations over the original context."""
        wavelength = scaling.original_context / (rotations * 2 * math.pi)
        return rope.dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low = dimension_of(scaling.beta_fast)
    high = dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rope.dim - 1)
    pairs = torch.arange(rope.dim // 2, dtype=torch.float32)
    ramp = (pairs - low) / max(high - low, 0.001)
    unscaled = 1 - ramp.clamp(0, 1)
    frequencies = base_frequencies(rope)
    return frequencies / scaling.factor * (1 - unscaled) + frequencies * unscaled
