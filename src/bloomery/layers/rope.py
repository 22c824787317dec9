"""Angles of rotary positions: one table of cos and sin a Rope, made once for the length being served.

Every angle is a function of its own position alone, so that cached keys stay valid however a sequence was cut
into chunks. Two scalings that other implementations tie to the length of the moment are pinned accordingly:
Dynamic uses, for position p, the base of length p + 1; LongRope uses its long factors iff the served length exceeds
the original context.
"""

from __future__ import annotations

import math

import torch

from bloomery.spec import Dynamic, Linear, Llama3, LongRope, Rope, Yarn


def frequencies(rope: Rope, theta: float | torch.Tensor | None = None) -> torch.Tensor:
    """[..., dim / 2] turns in radians a position; a column of bases gives a row of frequencies each."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    return 1.0 / ((rope.theta if theta is None else theta) ** exponents)


def table(rope: Rope, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [length, dim / 2], float32."""
    positions = torch.arange(length, dtype=torch.float32)[:, None]
    attention = 1.0
    match rope.scaling:
        case None:
            freqs = frequencies(rope)
        case Linear(factor):
            freqs = frequencies(rope) / factor
        case Dynamic():
            freqs = dynamic(rope, rope.scaling, positions)
        case Llama3():
            freqs = llama3(rope, rope.scaling)
        case Yarn():
            freqs = yarn(rope, rope.scaling)
            attention = rope.scaling.attention
        case LongRope() as s:
            beyond = length > s.original
            freqs = frequencies(rope) / torch.tensor(s.long if beyond else s.short)
            attention = s.long_attention if beyond else s.short_attention
    angles = positions * freqs
    return angles.cos() * attention, angles.sin() * attention


def dynamic(rope: Rope, scaling: Dynamic, positions: torch.Tensor) -> torch.Tensor:
    length = (positions + 1).clamp(min=scaling.original)
    growth = scaling.factor * length / scaling.original - (scaling.factor - 1)
    return frequencies(rope, rope.theta * growth ** (rope.dim / (rope.dim - 2)))


def llama3(rope: Rope, s: Llama3) -> torch.Tensor:
    freqs = frequencies(rope)
    wavelength = 2 * math.pi / freqs
    smooth = (s.original / wavelength - s.low) / (s.high - s.low)
    blended = (1 - smooth) * freqs / s.factor + smooth * freqs
    slow = torch.where(wavelength > s.original / s.low, freqs / s.factor, freqs)
    between = (wavelength <= s.original / s.low) & (wavelength >= s.original / s.high)
    return torch.where(between, blended, slow)


def yarn(rope: Rope, s: Yarn) -> torch.Tensor:
    def dimension(rotations: float) -> float:
        """The (fractional) pair that turns so often over the original context."""
        return (
            rope.dim * math.log(s.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low = dimension(s.beta_fast)
    high = dimension(s.beta_slow)
    if s.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    freqs = frequencies(rope)
    return freqs / s.factor * (1 - keep) + freqs * keep
