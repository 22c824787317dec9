"""The gate on the output of attention: each value, or each head, is multiplied by a factor.

The factor is the sigmoid or the softplus of a projection of the layer's input. The attention
kernels apply the gate to their result before they store it (`gate_factors`). Here is the reference,
and a pass of its own for results that no kernel of ours computes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    next_power_of_2,
    pdl_options,
    tl,
    use_triton,
    wait_for_previous,
)


class OutputGate(NamedTuple):
    """A gate before its activation: [tokens, heads * dim], or [tokens, heads]."""

    values: torch.Tensor
    activation: str  # sigmoid or softplus


def apply_output_gate(x: torch.Tensor, gate: torch.Tensor, activation: str) -> torch.Tensor:
    """Gate x [tokens, heads, dim] by gate [tokens, heads * dim], or [tokens, heads]."""
    if use_triton(x):
        return apply_output_gate_triton(x, gate, activation)
    return apply_output_gate_reference(x, gate, activation)


def apply_output_gate_reference(
    x: torch.Tensor, gate: torch.Tensor, activation: str
) -> torch.Tensor:
    """The torch reference of `apply_output_gate`."""
    gate = gate.float()
    factors = torch.sigmoid(gate) if activation == "sigmoid" else F.softplus(gate)
    return (x.float() * factors.unflatten(-1, (x.shape[1], -1))).to(x.dtype)


def apply_output_gate_triton(x: torch.Tensor, gate: torch.Tensor, activation: str) -> torch.Tensor:
    """Run the kernel."""
    x = x.contiguous()
    tokens, heads, dim = x.shape
    out = torch.empty_like(x)
    apply_output_gate_kernel[(tokens, heads)](
        x,
        gate,
        out,
        gate.stride(0),
        HEADS=heads,
        DIM=dim,
        DIM_POW2=next_power_of_2(dim),
        GATE=activation,
        GATE_DIM=gate.shape[1] // heads,
        num_warps=1,
        **pdl_options(x.device),
    )
    return out


@jit
def apply_output_gate_kernel(
    x,  # [tokens, HEADS, DIM]
    gate,  # [tokens, HEADS * GATE_DIM], rows `gate_stride` apart
    out,  # [tokens, HEADS, DIM]
    gate_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    GATE: tl.constexpr,
    GATE_DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program gates one head of one token."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, DIM_POW2)
    offset = (token * HEADS + head) * DIM + d
    factors = gate_factors(
        gate + token * gate_stride + head * GATE_DIM + tl.minimum(d, GATE_DIM - 1), d < DIM, GATE
    )
    y = tl.load(x + offset, mask=d < DIM, other=0.0).to(tl.float32) * factors
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=d < DIM)


@jit
def gate_factors(gate, mask, GATE: tl.constexpr):
    """Return the factors of these gate values."""
    x = tl.load(gate, mask=mask, other=0.0).to(tl.float32)
    if GATE == "softplus":
        return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    else:
        return tl.sigmoid(x)
