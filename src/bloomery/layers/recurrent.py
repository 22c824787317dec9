"""The recurrent mixers of decoder layers: gated delta net, Mamba-2, Mamba-1 and short convolution.

Each projects its input, runs a convolution and a scan that continue from the states of the step's
sequences, and projects back. Only the states know which tokens belong to which sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from bloomery.fusion import NormPrologue
from bloomery.kernels.causal_conv import apply_silu, causal_conv_reference
from bloomery.kernels.gated_delta_net import DeltaNetWeights, gated_delta_net
from bloomery.kernels.mamba import selective_scan_reference
from bloomery.kernels.mamba2 import Mamba2Weights, gate_mamba2_reference, mamba2
from bloomery.kernels.short_conv import ShortConvWeights, short_conv
from bloomery.kernels.state_cache import LayerStates, view_states
from bloomery.layers.linear import AddResidual, LinearLayer, ResidualStream, apply_norm
from bloomery.native.thread_pool import ThreadPool
from bloomery.parallel.groups import CommunicationGroup
from bloomery.spec import GatedDeltaNetSpec, Mamba2Spec, MambaSpec, ShortConvSpec, state_parts


class RecurrentMixer(Protocol):
    """What a mixer computes between its projections."""

    def __call__(self, projected: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """projected [tokens, input rows] -> [tokens, inputs of the output projection]."""
        ...


class RecurrentBlock:
    """Input projection, a recurrent mixer, and output projection."""

    def __init__(self, project_in: LinearLayer, mixer: RecurrentMixer, project_out: LinearLayer):
        self.project_in = project_in
        self.mixer = mixer
        self.project_out = project_out

    def __call__(
        self,
        x: ResidualStream,
        states: LayerStates,
        output_rows: torch.Tensor | None = None,
        prologue: NormPrologue | None = None,
        epilogue: AddResidual | None = None,
    ) -> ResidualStream:
        """x [tokens, hidden] -> [tokens, hidden], of the output rows only."""
        y = self.mixer(self.project_in(x, prologue), states)
        if output_rows is not None:
            y = y[output_rows]
            self.project_out.select_adapters(output_rows)
        if epilogue is None:
            return self.project_out(y)
        return self.project_out(y, None, epilogue)


@dataclass(frozen=True)
class DeltaNetMixer:
    """A gated delta net; `spec` is this rank's part."""

    spec: GatedDeltaNetSpec
    weights: DeltaNetWeights
    pool: ThreadPool | None = None

    def __call__(self, projected: torch.Tensor, states: LayerStates) -> torch.Tensor:
        return gated_delta_net(projected, self.spec, self.weights, states)


@dataclass(frozen=True)
class Mamba2Mixer:
    """Mamba-2; `spec` is this rank's part.

    group: ranks that hold the other parts of a norm over all heads.
    """

    spec: Mamba2Spec
    weights: Mamba2Weights
    norm_weight: torch.Tensor | None = None  # [inner] in float32
    group: CommunicationGroup | None = None
    pool: ThreadPool | None = None

    def __call__(self, projected: torch.Tensor, states: LayerStates) -> torch.Tensor:
        y = mamba2(projected, self.spec, self.weights, states)
        gate = projected[:, : y.shape[1]]
        mean_square = None
        if self.group is not None:
            mean_square = self._mean_square(y, gate, self.group)
        return gate_mamba2_reference(y, gate, self.spec, self.norm_weight, mean_square)

    def _mean_square(
        self, y: torch.Tensor, gate: torch.Tensor, group: CommunicationGroup
    ) -> torch.Tensor:
        """The mean square of what is normed, over all ranks: [tokens, 1]."""
        normed = y.float()
        if not self.spec.gate_after_norm:
            normed = normed * apply_silu(gate.float() * self.spec.part_scales[0])
        return group.all_reduce(normed.square().mean(-1, keepdim=True)) / group.size


@dataclass(frozen=True)
class MambaMixer:
    """Mamba-1; `spec` is this rank's part. All vectors are in float32."""

    spec: MambaSpec
    conv: torch.Tensor  # [inner, width]
    conv_bias: torch.Tensor | None
    project_x: LinearLayer  # inner -> dt | B | C
    project_dt: LinearLayer  # dt rank -> inner
    decay: torch.Tensor  # [inner, state size]: A
    skip: torch.Tensor  # [inner]: D
    norms: tuple[NormPrologue | None, NormPrologue | None, NormPrologue | None]  # of dt, B, C
    pool: ThreadPool | None = None

    def __call__(self, projected: torch.Tensor, states: LayerStates) -> torch.Tensor:
        spec = self.spec
        metadata = states.metadata
        conv_view, scan_view = view_states(states.memory, metadata.state_blocks, state_parts(spec))
        x, gate = projected.chunk(2, -1)
        convolved = causal_conv_reference(x, self.conv, self.conv_bias, conv_view, metadata)
        x = apply_silu(convolved).to(projected.dtype)
        sizes = (spec.dt_rank, spec.state_size, spec.state_size)
        dt, b, c = (
            apply_norm(part.contiguous(), norm, self.pool)
            for part, norm in zip(self.project_x(x).split(sizes, -1), self.norms, strict=True)
        )
        dt = F.softplus(self.project_dt(dt).float())
        y = selective_scan_reference(x, dt, b, c, gate, self.decay, self.skip, scan_view, metadata)
        return y.to(projected.dtype)


@dataclass(frozen=True)
class ShortConvMixer:
    """A gated short convolution; `spec` is this rank's part."""

    spec: ShortConvSpec
    weights: ShortConvWeights
    pool: ThreadPool | None = None

    def __call__(self, projected: torch.Tensor, states: LayerStates) -> torch.Tensor:
        return short_conv(projected, self.spec, self.weights, states)
