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
from bloomery.kernels.causal_conv import apply_silu, causal_conv
from bloomery.kernels.gated_delta_net import DeltaNetWeights, gated_delta_net
from bloomery.kernels.mamba import selective_scan
from bloomery.kernels.mamba2 import Mamba2Weights, gate_mamba2, gate_mamba2_reference, mamba2
from bloomery.kernels.select_rows import select_rows
from bloomery.kernels.short_conv import ShortConvWeights, short_conv
from bloomery.kernels.state_cache import LayerStates, count_part_blocks, view_states
from bloomery.layers.linear import AddResidual, LinearLayer, ResidualStream, apply_norm
from bloomery.native import recurrent_ops
from bloomery.native.ops import NormedColumns, norm_columns
from bloomery.native.recurrent_ops import ConvColumns, NativeStates
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
        projected = self.project_in(x, prologue)
        y = self.mixer(projected, states)
        for wave in states.metadata.later_waves:
            # Only deterministic mode has later waves, and only CPUs run it. A GPU would need the
            # operation of torch between two waves: without it, the decode kernel of the second
            # wave could read states before that of the first has written them (kernels/launch.py).
            is_later = wave.seq_lens[:, None] > 0
            later = self.mixer(projected, LayerStates(states.memory, wave))
            y = torch.where(is_later, later, y)
        if output_rows is not None:
            y = select_rows(y, output_rows, self.project_out.pool)
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
        native = find_native_states(self.pool, projected, states)
        spec = self.spec
        weights = self.weights
        if (
            self.pool is None
            or native is None
            or not recurrent_ops.supports_heads(spec.key_dim, spec.value_dim)
            or not recurrent_ops.supports_width(spec.conv_width)
        ):
            return gated_delta_net(projected, spec, weights, states)
        columns = ConvColumns(0)
        convolved = recurrent_ops.convolve(
            self.pool, projected, columns, weights.conv, None, native, silu=True
        )
        return recurrent_ops.delta_net(
            self.pool,
            projected,
            convolved,
            spec,
            weights.decay,
            weights.dt_bias,
            weights.norm.weight,
            native,
            count_part_blocks(state_parts(spec)[0], native.memory.shape[1]),
        )


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
        y = self._scan_natively(projected, states)
        if y is None:
            y = mamba2(projected, self.spec, self.weights, states)
        elif self.pool is not None and self.group is None:
            return recurrent_ops.gate_norm(self.pool, y, projected, self.spec, self.norm_weight)
        if self.group is None:
            return gate_mamba2(y, projected, self.spec, self.norm_weight)
        gate = projected[:, : y.shape[1]]
        mean_square = self._mean_square(y, gate, self.group)
        return gate_mamba2_reference(y, gate, self.spec, self.norm_weight, mean_square)

    def _scan_natively(self, projected: torch.Tensor, states: LayerStates) -> torch.Tensor | None:
        """Convolve and scan with native CPU kernels; None if they do not cover the mixer."""
        spec = self.spec
        weights = self.weights
        native = find_native_states(self.pool, projected, states)
        if self.pool is None or native is None or not recurrent_ops.supports_width(spec.conv_width):
            return None
        columns = ConvColumns(spec.num_heads * spec.head_dim)
        convolved = recurrent_ops.convolve(
            self.pool,
            projected,
            columns,
            weights.conv,
            weights.conv_bias,
            native,
            silu=True,
            factors=weights.factors,
        )
        return recurrent_ops.scan_mamba2(
            self.pool,
            projected,
            convolved,
            spec,
            weights.decay,
            weights.dt_bias,
            weights.skip,
            native,
            count_part_blocks(state_parts(spec)[0], native.memory.shape[1]),
        )

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
        conv_view, scan_view = view_states(states.memory, metadata.state_pieces, state_parts(spec))
        native = find_native_states(self.pool, projected, states)
        if native is not None and recurrent_ops.supports_width(spec.conv_width):
            return self._scan_natively(projected, native)
        x, gate = projected.chunk(2, -1)
        x = causal_conv(x, self.conv, self.conv_bias, conv_view, metadata)
        sizes = (spec.dt_rank, spec.state_size, spec.state_size)
        dt, b, c = (
            apply_norm(part.contiguous(), norm, self.pool)
            for part, norm in zip(self.project_x(x).split(sizes, -1), self.norms, strict=True)
        )
        dt = F.softplus(self.project_dt(dt).float())
        y = selective_scan(x, dt, b, c, gate, self.decay, self.skip, scan_view, metadata)
        return y.to(projected.dtype)

    def _scan_natively(self, projected: torch.Tensor, native: NativeStates) -> torch.Tensor:
        """The same with native CPU kernels."""
        assert self.pool is not None
        x = recurrent_ops.convolve(
            self.pool, projected, ConvColumns(0), self.conv, self.conv_bias, native, silu=True
        )
        projected_x = self.project_x(x)
        first = 0
        parts = []
        sizes = (self.spec.dt_rank, self.spec.state_size, self.spec.state_size)
        for size, norm in zip(sizes, self.norms, strict=True):
            columns = NormedColumns(first, 1, size, norm, slice(None))
            parts.append(norm_columns(self.pool, projected_x, [columns]))
            first += size
        dt, b, c = parts
        return recurrent_ops.selective_scan(
            self.pool,
            x,
            self.project_dt(dt),
            b,
            c,
            projected,
            self.decay,
            self.skip,
            native,
            count_part_blocks(state_parts(self.spec)[0], native.memory.shape[1]),
        )


@dataclass(frozen=True)
class ShortConvMixer:
    """A gated short convolution; `spec` is this rank's part."""

    spec: ShortConvSpec
    weights: ShortConvWeights
    pool: ThreadPool | None = None

    def __call__(self, projected: torch.Tensor, states: LayerStates) -> torch.Tensor:
        native = find_native_states(self.pool, projected, states)
        size = self.spec.size
        weights = self.weights
        if (
            self.pool is None
            or native is None
            or not recurrent_ops.supports_width(self.spec.conv_width)
        ):
            return short_conv(projected, self.spec, weights, states)
        return recurrent_ops.convolve(
            self.pool,
            projected,
            ConvColumns(x=2 * size, before=0, after=size),
            weights.conv,
            weights.conv_bias,
            native,
            silu=False,
        )


def find_native_states(
    pool: ThreadPool | None, projected: torch.Tensor, states: LayerStates
) -> NativeStates | None:
    """The states as native CPU kernels take them; None if these do not accept the tensors."""
    metadata = states.metadata
    if pool is None or not pool.accepts(projected, states.memory):
        return None
    start_loc = None
    if metadata.num_decodes < len(metadata.seq_lens):
        start_loc = metadata.query_start_loc
    integers = (metadata.state_pieces, metadata.seq_lens, start_loc)
    if any(x is not None and x.dtype != torch.int64 for x in integers):
        return None
    return NativeStates(states.memory, metadata.state_pieces, start_loc, metadata.seq_lens)
