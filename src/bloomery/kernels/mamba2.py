"""Mamba-2: convolution, the state space recurrence per head, and a gated norm.

For each head with state S [head dim, state size], at each position:

    S = exp(dt * A) * S + dt * x B
    out = S C + D * x
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bloomery.kernels.causal_conv import (
    ConvHeads,
    ConvInput,
    apply_silu,
    causal_conv_reference,
    conv_prefills_triton,
)
from bloomery.kernels.launch import use_triton
from bloomery.kernels.mamba2_kernels import (
    TILING,
    Mamba2Tiling,
    decode_mamba2_triton,
    gate_mamba2_triton,
    prefill_mamba2_triton,
)
from bloomery.kernels.state_cache import (
    LayerStates,
    iterate_positions,
    read_states,
    view_states,
    write_states,
)
from bloomery.spec import Mamba2Spec, recurrent_in_sizes, state_parts


@dataclass(frozen=True)
class Mamba2Weights:
    """The weights of a Mamba-2 mixer besides its projections and its norm, all in float32."""

    conv: torch.Tensor  # [channels of x | B | C, width]
    conv_bias: torch.Tensor | None
    decay: torch.Tensor  # [heads]: A, negative
    dt_bias: torch.Tensor  # [heads]
    skip: torch.Tensor  # [heads]: D
    factors: torch.Tensor | None = None  # [channels] of x | B | C, as spec.part_scales says


def mamba2(
    projected: torch.Tensor, spec: Mamba2Spec, weights: Mamba2Weights, states: LayerStates
) -> torch.Tensor:
    """projected [tokens, gate | x | B | C | dt] -> [tokens, heads * head dim], without the gate."""
    if use_triton(projected):
        return mamba2_triton(projected, spec, weights, states)
    return mamba2_reference(projected, spec, weights, states)


def mamba2_triton(
    projected: torch.Tensor,
    spec: Mamba2Spec,
    weights: Mamba2Weights,
    states: LayerStates,
    tiling: Mamba2Tiling = TILING,
) -> torch.Tensor:
    """One kernel for the decodes, three for the prefill chunks."""
    metadata = states.metadata
    conv_view, scan_view = view_states(states.memory, metadata.state_pieces, state_parts(spec))
    inner = spec.num_heads * spec.head_dim
    vectors = (weights.decay, weights.dt_bias, weights.skip)
    conv = (weights.conv, weights.conv_bias)
    out = projected.new_empty(len(projected), inner)
    if metadata.num_decodes:
        views = (conv_view, scan_view)
        decode_mamba2_triton(projected, spec, *conv, weights.factors, vectors, views, metadata, out)
    if metadata.num_decodes < len(metadata.seq_lens):
        heads = ConvHeads(
            num_narrow=spec.num_heads,
            num_wide=2 * spec.num_groups,
            narrow=spec.head_dim,
            wide=spec.state_size,
        )
        source = ConvInput(projected, inner, weights.factors)
        convolved = conv_prefills_triton(source, *conv, heads, conv_view, metadata)
        prefill_mamba2_triton(projected, convolved, spec, vectors, scan_view, metadata, out, tiling)
    return out


def mamba2_reference(
    projected: torch.Tensor, spec: Mamba2Spec, weights: Mamba2Weights, states: LayerStates
) -> torch.Tensor:
    """The same as `mamba2`, in torch, position by position."""
    metadata = states.metadata
    conv_view, scan_view = view_states(states.memory, metadata.state_pieces, state_parts(spec))
    sizes = recurrent_in_sizes(spec)
    xbc = projected[:, sizes[0] : sum(sizes[:4])].float()
    dt = projected[:, sum(sizes[:4]) :].float()
    if weights.factors is not None:
        xbc = xbc * weights.factors
    convolved = causal_conv_reference(xbc, weights.conv, weights.conv_bias, conv_view, metadata)
    x, b, c = apply_silu(convolved).split(sizes[1:4], -1)
    x = x.unflatten(-1, (-1, spec.head_dim))
    heads_per_group = spec.num_heads // spec.num_groups
    b = b.unflatten(-1, (-1, spec.state_size)).repeat_interleave(heads_per_group, 1)
    c = c.unflatten(-1, (-1, spec.state_size)).repeat_interleave(heads_per_group, 1)
    dt = F.softplus(dt * spec.part_scales[4] + weights.dt_bias).clamp(*spec.dt_limit)
    retained = torch.exp(dt * weights.decay)
    scans = read_states(scan_view, metadata)
    scans = scans.view(len(scans), spec.num_heads, spec.head_dim, spec.state_size)
    out = torch.zeros_like(x)
    for sequences, tokens in iterate_positions(metadata):
        step = (x * dt[..., None])[tokens][..., None] * b[tokens][..., None, :]
        scan = scans[sequences] * retained[tokens][..., None, None] + step
        scans[sequences] = scan
        out[tokens] = (scan * c[tokens][..., None, :]).sum(-1)
    write_states(scan_view, metadata, scans.flatten(1, 2))
    out = out + x * weights.skip[:, None]
    return out.flatten(1).to(projected.dtype)


def gate_mamba2(
    y: torch.Tensor, projected: torch.Tensor, spec: Mamba2Spec, weight: torch.Tensor | None
) -> torch.Tensor:
    """Gate and norm y [tokens, inner]; the gate is the first columns of projected."""
    if use_triton(y):
        return gate_mamba2_triton(y, projected, spec, weight)
    return gate_mamba2_reference(y, projected[:, : y.shape[1]], spec, weight)


def gate_mamba2_reference(
    y: torch.Tensor,
    gate: torch.Tensor,
    spec: Mamba2Spec,
    weight: torch.Tensor | None,
    mean_square: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gate and norm y [tokens, inner] in parts of inner / norm_groups.

    `mean_square` [tokens, 1] replaces that of y, where other ranks have the rest of the norm.
    """
    factor = apply_silu(gate.float() * spec.part_scales[0])
    gated = y.float()
    if spec.norm is None:
        return (gated * factor).to(y.dtype)
    if not spec.gate_after_norm:
        gated = gated * factor
    parts = gated.unflatten(-1, (spec.norm_groups, -1))
    if mean_square is None:
        mean_square = parts.square().mean(-1, keepdim=True)
    else:
        mean_square = mean_square[..., None]
    normed = (parts * torch.rsqrt(mean_square + spec.norm.eps)).flatten(1)
    if weight is not None:
        normed = normed * weight
    if spec.gate_after_norm:
        normed = normed * factor
    return normed.to(y.dtype)
