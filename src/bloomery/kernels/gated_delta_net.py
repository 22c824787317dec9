"""Gated delta net: convolution, normalised keys, the gated delta rule and a gated norm.

For each value head with state S [key dim, value dim], at each position:

    S = exp(decay) * S
    S = S + k (beta * (v - k S))
    out = norm(q S / sqrt(key dim)) * silu(gate)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bloomery.fusion import NormPrologue
from bloomery.kernels.causal_conv import (
    ConvHeads,
    ConvInput,
    apply_silu,
    causal_conv_reference,
    conv_prefills_triton,
)
from bloomery.kernels.delta_net_kernels import (
    TILING,
    DeltaNetTiling,
    decode_delta_net_triton,
    prefill_delta_net_triton,
)
from bloomery.kernels.launch import use_triton
from bloomery.kernels.state_cache import (
    LayerStates,
    iterate_positions,
    read_states,
    view_states,
    write_states,
)
from bloomery.spec import GatedDeltaNetSpec, recurrent_in_sizes, state_parts

QK_NORM_EPS = 1e-6


@dataclass(frozen=True)
class DeltaNetWeights:
    """The weights of a gated delta net besides its projections, all in float32."""

    conv: torch.Tensor  # [channels of q | k | v, width]
    decay: torch.Tensor  # [value heads]: the factor of softplus, negative
    dt_bias: torch.Tensor  # [value heads]
    norm: NormPrologue  # weight [value dim]


def gated_delta_net(
    projected: torch.Tensor,
    spec: GatedDeltaNetSpec,
    weights: DeltaNetWeights,
    states: LayerStates,
) -> torch.Tensor:
    """projected [tokens, q | k | v | gate | beta | decay] -> [tokens, value heads * value dim]."""
    if use_triton(projected):
        return gated_delta_net_triton(projected, spec, weights, states)
    return gated_delta_net_reference(projected, spec, weights, states)


def gated_delta_net_triton(
    projected: torch.Tensor,
    spec: GatedDeltaNetSpec,
    weights: DeltaNetWeights,
    states: LayerStates,
    tiling: DeltaNetTiling = TILING,
) -> torch.Tensor:
    """One kernel for the decodes, five for the prefill chunks."""
    metadata = states.metadata
    views = view_states(states.memory, metadata.state_pieces, state_parts(spec))
    conv_view, scan_view = views
    values = spec.num_value_heads * spec.value_dim
    gates = (weights.decay, weights.dt_bias, weights.norm)
    out = projected.new_empty(len(projected), values)
    if metadata.num_decodes:
        decode_delta_net_triton(
            projected, spec, weights.conv, *gates, (conv_view, scan_view), metadata, out, tiling
        )
    if metadata.num_decodes < len(metadata.seq_lens):
        heads = ConvHeads(
            num_narrow=2 * spec.num_key_heads,
            num_wide=spec.num_value_heads,
            narrow=spec.key_dim,
            wide=spec.value_dim,
            num_normed=2 * spec.num_key_heads,
            num_scaled=spec.num_key_heads,
            scale=spec.key_dim**-0.5,
            norm_eps=QK_NORM_EPS,
        )
        source = ConvInput(projected, 0)
        convolved = conv_prefills_triton(source, weights.conv, None, heads, conv_view, metadata)
        prefill_delta_net_triton(
            projected, convolved, spec, *gates, scan_view, metadata, out, tiling
        )
    return out


def gated_delta_net_reference(
    projected: torch.Tensor,
    spec: GatedDeltaNetSpec,
    weights: DeltaNetWeights,
    states: LayerStates,
) -> torch.Tensor:
    """The same as `gated_delta_net`, in torch, position by position."""
    metadata = states.metadata
    conv_view, scan_view = view_states(states.memory, metadata.state_pieces, state_parts(spec))
    sizes = recurrent_in_sizes(spec)
    *_, gate, beta, decay = projected.float().split(sizes, -1)
    qkv = projected[:, : sum(sizes[:3])]
    convolved = apply_silu(causal_conv_reference(qkv, weights.conv, None, conv_view, metadata))
    q, k, v = convolved.split(sizes[:3], -1)
    q = normalize_heads(q.unflatten(-1, (-1, spec.key_dim))) * spec.key_dim**-0.5
    k = normalize_heads(k.unflatten(-1, (-1, spec.key_dim)))
    v = v.unflatten(-1, (-1, spec.value_dim))
    key_heads = key_head_of_value_heads(spec, v.device)
    q = q[:, key_heads]
    k = k[:, key_heads]
    retained = torch.exp(weights.decay * F.softplus(decay + weights.dt_bias))
    beta = torch.sigmoid(beta) * spec.beta_scale
    scans = read_states(scan_view, metadata)
    scans = scans.view(len(scans), spec.num_value_heads, spec.key_dim, spec.value_dim)
    out = torch.zeros_like(v)
    for sequences, tokens in iterate_positions(metadata):
        scan = scans[sequences] * retained[tokens][..., None, None]
        key = k[tokens][..., None]  # [sequences, heads, key dim, 1]
        error = v[tokens] - (key * scan).sum(-2)
        scan = scan + key * (beta[tokens][..., None] * error)[..., None, :]
        scans[sequences] = scan
        out[tokens] = (q[tokens][..., None] * scan).sum(-2)
    write_states(scan_view, metadata, scans.flatten(1, 2))
    gated = norm_heads(out, weights.norm) * apply_silu(gate.view_as(out))
    return gated.flatten(1).to(projected.dtype)


def key_head_of_value_heads(spec: GatedDeltaNetSpec, device: torch.device) -> torch.Tensor:
    """The key head that each value head uses."""
    heads = torch.arange(spec.num_value_heads, device=device)
    if spec.tiled_heads:
        return heads % spec.num_key_heads
    return heads // (spec.num_value_heads // spec.num_key_heads)


def normalize_heads(x: torch.Tensor) -> torch.Tensor:
    """Scale each head to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + QK_NORM_EPS)


def norm_heads(x: torch.Tensor, norm: NormPrologue) -> torch.Tensor:
    """RMS norm of the last axis, in float32."""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    return normed if norm.weight is None else normed * norm.weight
