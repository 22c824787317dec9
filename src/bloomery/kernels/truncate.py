"""Which candidates remain: min_p, then top_k, then top_p, then typical_p, each over what the one before it left.

- min_p keeps what is at least min_p times as likely as the best.
- top_k keeps exactly k: in the order of kernels/order, so the lowest ids among equals.
- top_p keeps a candidate while the likelier ones together stay below top_p of the mass.
- typical_p orders by distance from the entropy, likelier first among equals, and keeps by the same rule as top_p.

All sums are running sums in float64, to which trailing zeros add nothing: a line's result does not depend on how wide
its neighbours make the tensor. This file must not know rows or requests.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def kept(
    z: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    typical_p: torch.Tensor | None,
    total: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """z [lines, width] float64: log-probabilities less the best one, best first. Parameters [lines, 1]; top_k 0 is off.

    `total` [lines, 1] is the mass of all that min_p leaves, exp(z) summed, for lines without top_k. Returns what is
    kept [lines, width] and whether `width` was enough to know [lines]: the borders lie inside.
    """
    width = z.shape[-1]
    keep = z >= min_p.log()
    keep &= (torch.arange(width, device=z.device) < top_k) | (top_k == 0)
    mass = torch.where(keep, z.exp(), 0.0)
    running = mass.cumsum(-1)
    counted = (top_k > 0) & (top_k <= width)
    whole = running[:, -1:] if total is None else torch.where(top_k > 0, running[:, -1:], total)
    keep &= (_before(running) < top_p * whole) | (top_p >= 1)
    sure = counted | ((top_k == 0) & (top_p < 1) & (running[:, -1:] >= top_p * whole))
    if typical_p is not None:
        keep &= _typical(z, torch.where(keep, mass, 0.0), typical_p)
    return keep, sure.squeeze(-1)


def _typical(z: torch.Tensor, mass: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    whole = mass.cumsum(-1)[:, -1:]
    share = mass / whole
    present = mass > 0
    surprise = torch.where(present, whole.log() - z, 0.0)
    entropy = (share * surprise).cumsum(-1)[:, -1:]
    distance = torch.where(present, (surprise - entropy).abs(), torch.inf)
    order = distance.sort(dim=-1, stable=True).indices
    keep = _before(share.gather(-1, order).cumsum(-1)) < typical_p
    return torch.zeros_like(keep).scatter(-1, order, keep) | (typical_p >= 1)


def _before(running: torch.Tensor) -> torch.Tensor:
    return F.pad(running[:, :-1], (1, 0))
