"""Native CPU operations of recurrent mixers: each takes tensors and calls a kernel of recurrent.c.

They take float32 tensors and a layer's states. While a trace is recorded on the pool, an operation
is recorded and its result is not computed yet.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bloomery.native.thread_pool import ThreadPool, data_pointer
from bloomery.spec import GatedDeltaNetSpec, Mamba2Spec

MAX_HEAD = 1024  # floats of a key or value in recurrent.c
MAX_CONV_WIDTH = 8


class NativeStates(NamedTuple):
    """The states of a step as C sees them."""

    memory: torch.Tensor  # [blocks, values] float32
    blocks: torch.Tensor  # [sequences, blocks of a state] int64
    start_loc: torch.Tensor | None  # [sequences + 1] int64; None: one new position each
    seq_lens: torch.Tensor  # [sequences] int64


def supports_width(width: int) -> bool:
    """Whether there is a native convolution of that width."""
    return width <= MAX_CONV_WIDTH


def supports_heads(*sizes: int) -> bool:
    """Whether keys and values of these sizes fit into the buffers of recurrent.c."""
    return max(sizes) <= MAX_HEAD


def gather_state_pieces(
    pool: ThreadPool, rows: torch.Tensor, state_pieces: torch.Tensor
) -> torch.Tensor:
    """rows [slots] int32, state_pieces [tables, all rows, pieces] -> [tables, slots, pieces]."""
    num_tables, num_rows, width = state_pieces.shape
    count = len(rows)
    out = pool.empty((num_tables, count, width), torch.int64)
    pool.library.native_gather_states(
        pool.handle,
        data_pointer(rows),
        count,
        data_pointer(state_pieces),
        num_tables,
        num_rows,
        width,
        data_pointer(out),
    )
    return out


def locate_states(
    states: NativeStates, first_block: int, tokens: int
) -> tuple[int | float | None, ...]:
    """The arguments that every kernel takes last."""
    return (
        data_pointer(states.memory),
        data_pointer(states.blocks),
        states.memory.shape[1],
        states.blocks.stride(0),
        first_block,
        data_pointer(states.start_loc),
        data_pointer(states.seq_lens),
        len(states.seq_lens),
        tokens,
    )


class ConvColumns(NamedTuple):
    """Which columns of a projection a convolution reads; those of factors or None."""

    x: int
    before: int | None = None  # factors of the inputs
    after: int | None = None  # factors of the outputs


def convolve(
    pool: ThreadPool,
    projected: torch.Tensor,
    columns: ConvColumns,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: NativeStates,
    silu: bool,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve columns of projected [tokens, row]; returns [tokens, channels], updates states."""
    tokens, row = projected.shape
    channels, width = weight.shape
    out = pool.empty((tokens, channels))

    def column_pointer(column: int | None) -> int | None:
        if column is None:
            return None
        return projected.data_ptr() + column * projected.element_size()

    pool.library.native_convolution(
        pool.handle,
        column_pointer(columns.x),
        column_pointer(columns.before),
        column_pointer(columns.after),
        data_pointer(factors),
        data_pointer(weight),
        data_pointer(bias),
        data_pointer(out),
        row,
        channels,
        width,
        int(silu),
        *locate_states(states, 0, tokens),
    )
    return out


def delta_net(
    pool: ThreadPool,
    projected: torch.Tensor,
    convolved: torch.Tensor,
    spec: GatedDeltaNetSpec,
    decay: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor | None,
    states: NativeStates,
    first_block: int,
) -> torch.Tensor:
    """The gated delta rule and the gated norm; returns [tokens, value heads * value dim]."""
    tokens, row = projected.shape
    out = pool.empty((tokens, spec.num_value_heads * spec.value_dim))
    pool.library.native_delta_net(
        pool.handle,
        data_pointer(projected),
        data_pointer(convolved),
        data_pointer(decay),
        data_pointer(dt_bias),
        data_pointer(norm_weight),
        data_pointer(out),
        row,
        convolved.shape[1],
        spec.num_key_heads,
        spec.num_value_heads,
        spec.key_dim,
        spec.value_dim,
        int(spec.tiled_heads),
        spec.beta_scale,
        spec.norm.eps,
        *locate_states(states, first_block, tokens),
    )
    return out


def scan_mamba2(
    pool: ThreadPool,
    projected: torch.Tensor,
    convolved: torch.Tensor,
    spec: Mamba2Spec,
    decay: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    states: NativeStates,
    first_block: int,
) -> torch.Tensor:
    """The scan of Mamba-2 without its gate; returns [tokens, heads * head dim]."""
    tokens, row = projected.shape
    out = pool.empty((tokens, spec.num_heads * spec.head_dim))
    pool.library.native_mamba2(
        pool.handle,
        data_pointer(projected),
        data_pointer(convolved),
        data_pointer(decay),
        data_pointer(dt_bias),
        data_pointer(skip),
        data_pointer(out),
        row,
        row - spec.num_heads,
        spec.num_heads,
        spec.head_dim,
        spec.state_size,
        spec.num_groups,
        spec.part_scales[4],
        *spec.dt_limit,
        *locate_states(states, first_block, tokens),
    )
    return out


def selective_scan(
    pool: ThreadPool,
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    projected: torch.Tensor,
    decay: torch.Tensor,
    skip: torch.Tensor,
    states: NativeStates,
    first_block: int,
) -> torch.Tensor:
    """The scan of Mamba-1; dt is before softplus, the gate is the second half of `projected`."""
    tokens, inner = x.shape
    out = pool.empty((tokens, inner))
    pool.library.native_selective_scan(
        pool.handle,
        data_pointer(x),
        data_pointer(dt),
        data_pointer(b),
        data_pointer(c),
        projected.data_ptr() + inner * projected.element_size(),
        data_pointer(decay),
        data_pointer(skip),
        data_pointer(out),
        inner,
        decay.shape[1],
        projected.shape[1],
        *locate_states(states, first_block, tokens),
    )
    return out


def gate_norm(
    pool: ThreadPool,
    y: torch.Tensor,
    projected: torch.Tensor,
    spec: Mamba2Spec,
    weight: torch.Tensor | None,
) -> torch.Tensor:
    """Gate and norm y [tokens, inner]; the gate is the first columns of projected."""
    tokens, inner = y.shape
    parts = 1 if spec.norm is None else spec.norm_groups
    out = pool.empty((tokens, inner))
    pool.library.native_gate_norm(
        pool.handle,
        data_pointer(y),
        data_pointer(projected),
        data_pointer(weight),
        data_pointer(out),
        tokens,
        projected.shape[1],
        parts,
        inner // parts,
        spec.part_scales[0],
        0.0 if spec.norm is None else spec.norm.eps,
        int(spec.norm is not None),
        int(spec.gate_after_norm),
    )
    return out
