"""Mamba-1: the selective scan, in which every channel has a state of its own.

For each channel with state S [state size], at each position:

    S = exp(dt * A) * S + dt * x * B
    out = (S . C + D * x) * silu(gate)
"""

from __future__ import annotations

import torch

from bloomery.kernels.causal_conv import apply_silu
from bloomery.kernels.state_cache import (
    RecurrentMetadata,
    StateView,
    iterate_positions,
    read_states,
    write_states,
)


def selective_scan_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor,
    decay: torch.Tensor,
    skip: torch.Tensor,
    view: StateView,
    metadata: RecurrentMetadata,
) -> torch.Tensor:
    """x, dt, gate [tokens, inner], b, c [tokens, state size] -> [tokens, inner] in float32.

    decay [inner, state size] is A, skip [inner] is D; updates the states.
    """
    x, dt, b, c = x.float(), dt.float(), b.float(), c.float()
    scans = read_states(view, metadata)
    out = torch.zeros_like(x)
    for sequences, tokens in iterate_positions(metadata):
        step = dt[tokens][..., None]
        scan = scans[sequences] * torch.exp(step * decay)
        scan = scan + step * x[tokens][..., None] * b[tokens][:, None]
        scans[sequences] = scan
        out[tokens] = (scan * c[tokens][:, None]).sum(-1)
    write_states(view, metadata, scans)
    return (out + x * skip) * apply_silu(gate.float())
