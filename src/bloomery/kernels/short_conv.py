"""The gated short convolution of LFM2: C * conv(B * x), without an activation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bloomery.kernels.causal_conv import causal_conv_reference
from bloomery.kernels.state_cache import LayerStates, view_states
from bloomery.spec import ShortConvSpec, state_parts


@dataclass(frozen=True)
class ShortConvWeights:
    """The convolution, in float32."""

    conv: torch.Tensor  # [channels, width]
    conv_bias: torch.Tensor | None


def short_conv(
    projected: torch.Tensor, spec: ShortConvSpec, weights: ShortConvWeights, states: LayerStates
) -> torch.Tensor:
    """projected [tokens, B | C | x] -> [tokens, size]."""
    return short_conv_reference(projected, spec, weights, states)


def short_conv_reference(
    projected: torch.Tensor, spec: ShortConvSpec, weights: ShortConvWeights, states: LayerStates
) -> torch.Tensor:
    """The same as `short_conv`, in torch."""
    (view,) = view_states(states.memory, states.metadata.state_blocks, state_parts(spec))
    b, c, x = projected.float().chunk(3, -1)
    convolved = causal_conv_reference(b * x, weights.conv, weights.conv_bias, view, states.metadata)
    return (c * convolved).to(projected.dtype)
