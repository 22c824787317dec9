"""Rotary positions: pairs of a head's dimensions turned by the angle of their position."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [tokens, heads, dim]; cos and sin [tokens, turned / 2] in float32; dimensions past `turned` stay."""
    turned = 2 * cos.shape[-1]
    wide = x[..., :turned].float()
    cos, sin = cos[:, None], sin[:, None]
    if interleaved:
        a, b = wide[..., ::2], wide[..., 1::2]
        out = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    else:
        a, b = wide.chunk(2, -1)
        out = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    out = out.to(x.dtype)
    return out if turned == x.shape[-1] else torch.cat((out, x[..., turned:]), -1)
