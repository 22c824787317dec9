"""Triton kernels of Mamba-2: decodes, prefill chunks, and the gated norm.

A prefill goes from chunk to chunk of positions with the state S in registers. Within a chunk,
with cumulative log decays G and inputs X = dt * x:

    out = exp(G) (C S) + (lower triangle of (C B) * exp(G[i] - G[j])) X
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bloomery.kernels.causal_conv import convolve_history, convolve_input
from bloomery.kernels.delta_net_kernels import softplus
from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    next_power_of_2,
    pdl_options,
    tl,
    wait_for_previous,
)
from bloomery.kernels.state_cache import RecurrentMetadata, StateView, load_state_rows
from bloomery.spec import Mamba2Spec


@dataclass(frozen=True)
class Mamba2Tiling:
    """Launch parameters of the scan; benchmarks/recurrent.py compares others."""

    chunk: int = 64  # positions
    head_slice: int = 32  # head dims of one program
    warps: int = 8
    stages: int = 2


TILING = Mamba2Tiling()


def decode_mamba2_triton(
    projected: torch.Tensor,
    spec: Mamba2Spec,
    conv: torch.Tensor,
    conv_bias: torch.Tensor | None,
    factors: torch.Tensor | None,
    scan_vectors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    views: tuple[StateView, StateView],
    metadata: RecurrentMetadata,
    out: torch.Tensor,
) -> None:
    """Compute the decodes of a step; scan_vectors are A, the bias of dt, and D."""
    conv_view, scan_view = views
    decode_mamba2_kernel[(metadata.num_decodes, spec.num_heads)](
        projected,
        conv,
        conv_bias,
        factors,
        *scan_vectors,
        scan_view.memory,
        conv_view.blocks,
        scan_view.blocks,
        metadata.query_start_loc,
        metadata.seq_lens,
        out,
        projected.stride(0),
        scan_view.memory.stride(0),
        conv_view.blocks.stride(0),
        spec.part_scales[4],
        *spec.dt_limit,
        HEADS=spec.num_heads,
        HEAD_DIM=spec.head_dim,
        STATE_SIZE=spec.state_size,
        GROUPS=spec.num_groups,
        WIDTH=spec.conv_width,
        CONV_ROWS=conv_view.rows_per_block,
        SCAN_ROWS=scan_view.rows_per_block,
        HEAD_BLOCK=next_power_of_2(spec.head_dim),
        STATE_BLOCK=next_power_of_2(spec.state_size),
        num_warps=4,
        **pdl_options(projected.device),
    )


@jit
def load_scaled(pointers, factors, channel, mask):
    """Load inputs of the convolution and multiply them by their factors, if there are any."""
    x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    if factors is not None:
        x *= tl.load(factors + channel, mask=mask, other=0.0)
    return x


@jit
def select_row(x, row: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr):
    """Elements row * WIDTH to (row + 1) * WIDTH - 1 of a vector of LENGTH elements."""
    rows = tl.reshape(x, (LENGTH // WIDTH, WIDTH))
    is_row = tl.arange(0, LENGTH // WIDTH)[:, None] == row
    return tl.sum(tl.where(is_row, rows, 0.0), 0)


@jit
def decode_mamba2_kernel(
    projected,  # [tokens, row_stride]: gate | x | B | C | dt
    conv,  # [channels, WIDTH]
    conv_bias,  # [channels] or None
    factors,  # [channels] or None
    decay,  # [HEADS]
    dt_bias,  # [HEADS]
    skip,  # [HEADS]
    memory,
    conv_blocks,
    scan_blocks,
    query_start_loc,
    seq_lens,
    out,  # [tokens, HEADS * HEAD_DIM]
    row_stride,
    block_stride,
    pieces_stride,
    dt_scale,
    dt_least,
    dt_most,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    CONV_ROWS: tl.constexpr,
    SCAN_ROWS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes one head of one sequence."""
    launch_dependents(PDL)
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start_loc + sequence)
    has_token = tl.load(query_start_loc + sequence + 1) > token
    position = tl.load(seq_lens + sequence) - 1
    if has_token & (position >= 0):
        INNER: tl.constexpr = HEADS * HEAD_DIM
        row = projected + token.to(tl.int64) * row_stride + INNER
        scan_blocks += sequence * pieces_stride
        conv_blocks += sequence * pieces_stride
        index = tl.arange(0, HEAD_BLOCK)
        state = tl.arange(0, STATE_BLOCK)
        is_head = index < HEAD_DIM
        is_state = state < STATE_SIZE
        tile = is_head[:, None] & is_state[None, :]
        state_row = load_state_rows(
            scan_blocks, head * HEAD_DIM + index, SCAN_ROWS, STATE_SIZE, block_stride, is_head
        )
        pointers = memory + state_row[:, None] + state[None, :]
        continues = state * 0 + position > 0
        scan = tl.load(pointers, mask=tile & continues[None, :], other=0.0)
        # x, B and C in one vector, which has at least as many elements as the program has threads:
        # then each element is computed once. A shorter one would be computed by every warp.
        PART: tl.constexpr = HEAD_BLOCK if HEAD_BLOCK > STATE_BLOCK else STATE_BLOCK
        place = tl.arange(0, 4 * PART)
        part = place // PART
        offset = place % PART
        is_used = (offset < tl.where(part == 0, HEAD_DIM, STATE_SIZE)) & (part < 3)
        group = INNER + head // (HEADS // GROUPS) * STATE_SIZE
        channel = tl.where(part == 0, head * HEAD_DIM, group + (part - 1) * GROUPS * STATE_SIZE)
        channel += offset
        xbc = convolve_history(
            conv, memory, conv_blocks, channel, is_used, position, block_stride, WIDTH, CONV_ROWS
        )
        if conv_bias is not None:
            xbc += tl.load(conv_bias + channel, mask=is_used, other=0.0)
        head_decay = tl.load(decay + head)
        step_bias = tl.load(dt_bias + head)
        head_skip = tl.load(skip + head)
        wait_for_previous(PDL)
        xbc = convolve_input(
            load_scaled(row + channel, factors, channel, is_used),
            xbc,
            conv,
            memory,
            conv_blocks,
            channel,
            is_used,
            position,
            block_stride,
            WIDTH,
            CONV_ROWS,
        )
        xbc = xbc / (1.0 + tl.exp(-xbc))
        x = select_row(xbc, 0, 4 * PART, HEAD_BLOCK)
        b = select_row(xbc, PART // STATE_BLOCK, 4 * PART, STATE_BLOCK)
        c = select_row(xbc, 2 * PART // STATE_BLOCK, 4 * PART, STATE_BLOCK)
        dt = tl.load(row + INNER + 2 * GROUPS * STATE_SIZE + head).to(tl.float32)
        dt = softplus(dt * dt_scale + step_bias)
        dt = tl.minimum(tl.maximum(dt, dt_least), dt_most)
        scan = scan * tl.exp(dt * head_decay) + (dt * x)[:, None] * b[None, :]
        tl.store(pointers, scan, mask=tile)
        y = tl.sum(scan * c[None, :], 1) + x * head_skip
        result = out + token.to(tl.int64) * INNER + head * HEAD_DIM + index
        tl.store(result, y.to(out.dtype.element_ty), mask=is_head)
    else:
        wait_for_previous(PDL)


def prefill_mamba2_triton(
    projected: torch.Tensor,
    convolved: torch.Tensor,
    spec: Mamba2Spec,
    scan_vectors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    view: StateView,
    metadata: RecurrentMetadata,
    out: torch.Tensor,
    tiling: Mamba2Tiling = TILING,
) -> None:
    """Compute the prefill chunks of a step, given x, B and C after the convolution."""
    first = metadata.num_decodes
    num_prefills = len(metadata.seq_lens) - first
    in_float32 = projected.dtype == torch.float32
    head_slice = min(tiling.head_slice, max(next_power_of_2(spec.head_dim), 16))
    scan_mamba2_kernel[(num_prefills, spec.num_heads, -(-spec.head_dim // head_slice))](
        projected,
        convolved,
        *scan_vectors,
        view.memory,
        view.blocks,
        metadata.query_start_loc,
        metadata.seq_lens,
        out,
        projected.stride(0),
        view.memory.stride(0),
        view.blocks.stride(0),
        first,
        spec.part_scales[4],
        *spec.dt_limit,
        HEADS=spec.num_heads,
        HEAD_DIM=spec.head_dim,
        STATE_SIZE=spec.state_size,
        GROUPS=spec.num_groups,
        SCAN_ROWS=view.rows_per_block,
        HEAD_BLOCK=head_slice,
        STATE_BLOCK=max(next_power_of_2(spec.state_size), 16),
        CHUNK=64 if in_float32 else tiling.chunk,
        PRECISION="ieee" if in_float32 else "tf32",
        num_warps=tiling.warps,
        num_stages=1 if in_float32 else tiling.stages,
        **pdl_options(projected.device),
    )


@jit(do_not_specialize=["first_sequence"])
def scan_mamba2_kernel(
    projected,
    convolved,  # [tokens, x | B | C]
    decay,
    dt_bias,
    skip,
    memory,
    state_pieces,
    query_start_loc,
    seq_lens,
    out,
    row_stride,
    block_stride,
    pieces_stride,
    first_sequence,
    dt_scale,
    dt_least,
    dt_most,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    SCAN_ROWS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program goes through the chunks of a sequence, for some dims of one head."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    sequence = first_sequence + tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(query_start_loc + sequence)
    end = tl.load(query_start_loc + sequence + 1)
    seq_len = tl.load(seq_lens + sequence)
    if end > begin:
        INNER: tl.constexpr = HEADS * HEAD_DIM
        CHANNELS: tl.constexpr = INNER + 2 * GROUPS * STATE_SIZE
        index = tl.program_id(2) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
        state = tl.arange(0, STATE_BLOCK)
        is_head = index < HEAD_DIM
        is_state = state < STATE_SIZE
        tile = is_state[:, None] & is_head[None, :]  # transposed, as the products take it
        state_row = load_state_rows(
            state_pieces + sequence * pieces_stride,
            head * HEAD_DIM + index,
            SCAN_ROWS,
            STATE_SIZE,
            block_stride,
            is_head,
        )
        pointers = memory + state_row[None, :] + state[:, None]
        continues = index * 0 + seq_len > end - begin
        scan = tl.load(pointers, mask=tile & continues[None, :], other=0.0)
        place = tl.arange(0, CHUNK)
        below = place[:, None] >= place[None, :]
        bias = tl.load(dt_bias + head)
        head_decay = tl.load(decay + head)
        head_skip = tl.load(skip + head)
        for first in range(begin, end, CHUNK):
            token = (first + place).to(tl.int64)
            inside = token < end
            dt_column = INNER + CHANNELS + head
            dt = tl.load(projected + token * row_stride + dt_column, mask=inside, other=0.0)
            dt = softplus(dt.to(tl.float32) * dt_scale + bias)
            dt = tl.where(inside, tl.minimum(tl.maximum(dt, dt_least), dt_most), 0.0)
            total = tl.cumsum(dt * head_decay, 0)
            final = tl.sum(dt * head_decay, 0)
            row = convolved + token[:, None] * CHANNELS
            head_tile = inside[:, None] & is_head[None, :]
            state_tile = inside[:, None] & is_state[None, :]
            x = tl.load(row + head * HEAD_DIM + index[None, :], mask=head_tile, other=0.0)
            group = INNER + head // (HEADS // GROUPS) * STATE_SIZE + state[None, :]
            b = tl.load(row + group, mask=state_tile, other=0.0)
            c = tl.load(row + group + GROUPS * STATE_SIZE, mask=state_tile, other=0.0)
            scores = tl.dot(c, tl.trans(b), input_precision=PRECISION)
            ratio = tl.exp(tl.where(below, total[:, None] - total[None, :], 0.0))
            scores = tl.where(below, scores * ratio * dt[None, :], 0.0)
            y = tl.dot(c, scan.to(c.dtype), input_precision=PRECISION)
            y *= tl.exp(total)[:, None]
            y += tl.dot(scores.to(x.dtype), x, input_precision=PRECISION)
            wide = x.to(tl.float32)
            weighted = wide * (dt * tl.exp(final - total))[:, None]
            scan = scan * tl.exp(final)
            scan += tl.dot(tl.trans(b), weighted.to(b.dtype), input_precision=PRECISION)
            y += head_skip * wide
            result = out + token[:, None] * INNER + head * HEAD_DIM + index[None, :]
            tl.store(result, y.to(out.dtype.element_ty), mask=head_tile)
        if seq_len > 0:
            tl.store(pointers, scan, mask=tile)


def gate_mamba2_triton(
    y: torch.Tensor, projected: torch.Tensor, spec: Mamba2Spec, weight: torch.Tensor | None
) -> torch.Tensor:
    """Gate and norm y [tokens, inner]; the gate is the first columns of projected."""
    tokens, inner = y.shape
    parts = 1 if spec.norm is None else spec.norm_groups
    out = torch.empty_like(y)
    block = next_power_of_2(inner // parts)
    gate_mamba2_kernel[(tokens, parts)](
        y,
        projected,
        weight,
        out,
        projected.stride(0),
        inner,
        inner // parts,
        spec.part_scales[0],
        0.0 if spec.norm is None else spec.norm.eps,
        NORMED=spec.norm is not None,
        GATE_LAST=spec.gate_after_norm,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
        **pdl_options(y.device),
    )
    return out


@jit
def gate_mamba2_kernel(
    y,
    gate,
    weight,
    out,
    row_stride,
    inner,
    size,
    gate_scale,
    eps,
    NORMED: tl.constexpr,
    GATE_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program gates and norms one part of one token."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, BLOCK)
    used = offset < size
    column = tl.program_id(1) * size + offset
    value = tl.load(y + token * inner + column, mask=used, other=0.0).to(tl.float32)
    factor = tl.load(gate + token * row_stride + column, mask=used, other=0.0).to(tl.float32)
    factor *= gate_scale
    factor = factor / (1.0 + tl.exp(-factor))
    if not GATE_LAST:
        value *= factor
    if NORMED:
        value *= tl.rsqrt(tl.sum(value * value, 0) / size + eps)
        if weight is not None:
            value *= tl.load(weight + column, mask=used, other=0.0)
    if GATE_LAST:
        value *= factor
    tl.store(out + token * inner + column, value.to(out.dtype.element_ty), mask=used)
