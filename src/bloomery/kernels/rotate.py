"""Rotary positions: pairs of a head's dimensions turned by the angle of their position."""

from __future__ import annotations

import torch


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """x [tokens, heads, dim]; cos and sin [tokens, turned / 2] in float32; dimensions past `turned` stay."""
    turned = 2 * cos.shape[-1]
    wide = x[..., :turned].float()
    cos = cos[:, None]
    sin = sin[:, None]
    if interleaved:  # a pair is a complex number, and turning it a product
        pairs = torch.view_as_complex(wide.contiguous().unflatten(-1, (-1, 2)))
        out = torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
    else:
        a, b = wide.chunk(2, -1)
        out = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    out = out.to(x.dtype)
    return out if turned == x.shape[-1] else torch.cat((out, x[..., turned:]), -1)
