"""RMS and layer norm over the last axis, in float32 whatever the input."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """A weight of more than one axis, as [heads, dim], norms the last axis and scales each head by its own row."""
    wide = x.float()
    if weight is not None and weight.dim() > 1:
        wide = F.layer_norm(wide, x.shape[-1:], None, None, eps) * weight
        return (wide if bias is None else wide + bias).to(x.dtype)
    return F.layer_norm(wide, x.shape[-1:], weight, bias, eps).to(x.dtype)
