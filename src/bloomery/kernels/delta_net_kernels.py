"""Triton kernels of the gated delta net: one for decodes, three for prefill chunks.

A decode is one program per value head, which holds the state of the head in registers: the whole
state, or with many decodes one slice of it after another.

A prefill is computed in chunks of CHUNK positions with matrix products. Within a chunk with keys K,
values V, cumulative log decays G and write strengths beta, all positions depend on each other by
the triangular matrix

    A[i, j] = beta[i] * exp(G[i] - G[j]) * (K[i] . K[j])    for j < i

`prepare_chunks_kernel` inverts I + A, for all chunks at once: U = inverse (beta V) are the values
to write if the state before the chunk was zero, and W = inverse (beta exp(G) K) takes off what a
state S before the chunk holds already: U - W S is what the chunk writes. `scan_chunks_kernel` then
goes from chunk to chunk with the state in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bloomery.fusion import NormPrologue
from bloomery.kernels.causal_conv import convolve_history, convolve_input
from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    next_power_of_2,
    pdl_options,
    tl,
    wait_for_previous,
)
from bloomery.kernels.state_cache import RecurrentMetadata, StateView, load_state_rows
from bloomery.spec import GatedDeltaNetSpec

SEQUENCES = 16  # that a program looks at together to find its chunk
CHUNK = 64  # positions; also written in prepare_chunks_kernel as 4 blocks of 16


@dataclass(frozen=True)
class DeltaNetTiling:
    """Launch parameters of the kernels; benchmarks/recurrent.py compares others."""

    decode_warps: int = 8
    # With this many decodes or more, a program takes a state in slices of value dims. Fewer
    # registers let several programs share a multiprocessor: one computes while another waits.
    many_decodes: int = 8
    decode_slice: int = 32
    slice_warps: int = 4
    prepare_warps: int = 8
    value_slice: int = 32  # value dims of one program of the scan
    scan_warps: int = 8
    scan_stages: int = 2
    solve_precision: str = "tf32"  # of products of triangular matrices, for 16-bit inputs


TILING = DeltaNetTiling()


def decode_delta_net_triton(
    projected: torch.Tensor,
    spec: GatedDeltaNetSpec,
    conv: torch.Tensor,
    decay: torch.Tensor,
    dt_bias: torch.Tensor,
    norm: NormPrologue,
    views: tuple[StateView, StateView],
    metadata: RecurrentMetadata,
    out: torch.Tensor,
    tiling: DeltaNetTiling = TILING,
) -> None:
    """Compute the decodes of a step: conv, gates, delta rule and gated norm in one kernel."""
    conv_view, scan_view = views
    value_block = next_power_of_2(spec.value_dim)
    has_many = metadata.num_decodes >= tiling.many_decodes
    decode_delta_net_kernel[(metadata.num_decodes, spec.num_value_heads)](
        projected,
        conv,
        decay,
        dt_bias,
        norm.weight,
        scan_view.memory,
        conv_view.blocks,
        scan_view.blocks,
        metadata.query_start_loc,
        metadata.seq_lens,
        out,
        projected.stride(0),
        scan_view.memory.stride(0),
        conv_view.blocks.stride(0),
        norm.eps,
        spec.key_dim**-0.5,
        spec.beta_scale,
        NUM_KEY_HEADS=spec.num_key_heads,
        NUM_VALUE_HEADS=spec.num_value_heads,
        KEY_DIM=spec.key_dim,
        VALUE_DIM=spec.value_dim,
        TILED=spec.tiled_heads,
        WIDTH=spec.conv_width,
        CONV_ROWS=conv_view.rows_per_block,
        SCAN_ROWS=scan_view.rows_per_block,
        KEY_BLOCK=next_power_of_2(spec.key_dim),
        VALUE_BLOCK=value_block,
        SLICE=min(tiling.decode_slice, value_block) if has_many else value_block,
        num_warps=tiling.slice_warps if has_many else tiling.decode_warps,
        **pdl_options(projected.device),
    )


@jit
def find_key_head(
    head, NUM_KEY_HEADS: tl.constexpr, NUM_VALUE_HEADS: tl.constexpr, TILED: tl.constexpr
):
    """The key head that a value head uses."""
    if TILED:
        return head % NUM_KEY_HEADS
    return head // (NUM_VALUE_HEADS // NUM_KEY_HEADS)


@jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@jit
def decode_delta_net_kernel(
    projected,  # [tokens, row_stride]: q | k | v | gate | beta | decay
    conv,  # [channels, WIDTH]
    decay,  # [value heads]
    dt_bias,  # [value heads]
    norm_weight,  # [VALUE_DIM] or None
    memory,
    conv_blocks,
    scan_blocks,
    query_start_loc,
    seq_lens,
    out,  # [tokens, value heads * VALUE_DIM]
    row_stride,
    block_stride,
    pieces_stride,
    eps,
    scale,
    beta_scale,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILED: tl.constexpr,
    WIDTH: tl.constexpr,
    CONV_ROWS: tl.constexpr,
    SCAN_ROWS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SLICE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes one value head of one sequence, SLICE value dims at a time."""
    launch_dependents(PDL)
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start_loc + sequence)
    has_token = tl.load(query_start_loc + sequence + 1) > token
    position = tl.load(seq_lens + sequence) - 1
    if has_token & (position >= 0):
        KEYS: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
        VALUES: tl.constexpr = NUM_VALUE_HEADS * VALUE_DIM
        key_head = find_key_head(head, NUM_KEY_HEADS, NUM_VALUE_HEADS, TILED)
        row = projected + token.to(tl.int64) * row_stride
        scan_blocks += sequence * pieces_stride
        conv_blocks += sequence * pieces_stride
        key = tl.arange(0, KEY_BLOCK)
        value = tl.arange(0, VALUE_BLOCK)
        is_key = key < KEY_DIM
        is_value = value < VALUE_DIM
        SLICES: tl.constexpr = VALUE_BLOCK // SLICE
        in_slice = tl.arange(0, SLICE)
        state_row = load_state_rows(
            scan_blocks, head * KEY_DIM + key, SCAN_ROWS, VALUE_DIM, block_stride, is_key
        )
        pointers = memory + state_row[:, None] + in_slice[None, :]
        next_state = load_state_slice(pointers, 0, key, in_slice, position, KEY_DIM, VALUE_DIM)
        # q and k in one vector, which has at least as many elements as the program has threads:
        # then each element is computed once. A shorter one would be computed by every warp.
        both = tl.arange(0, 2 * KEY_BLOCK)
        is_used = both % KEY_BLOCK < KEY_DIM
        qk_channel = both // KEY_BLOCK * KEYS + key_head * KEY_DIM + both % KEY_BLOCK
        v_channel = 2 * KEYS + head * VALUE_DIM + value
        qk = convolve_history(
            conv, memory, conv_blocks, qk_channel, is_used, position, block_stride, WIDTH, CONV_ROWS
        )
        v = convolve_history(
            conv, memory, conv_blocks, v_channel, is_value, position, block_stride, WIDTH, CONV_ROWS
        )
        head_decay = tl.load(decay + head)
        step_bias = tl.load(dt_bias + head)
        wait_for_previous(PDL)
        gate = tl.load(row + 2 * KEYS + VALUES + head * VALUE_DIM + value, mask=is_value, other=0.0)
        beta = tl.load(row + 2 * KEYS + 2 * VALUES + head).to(tl.float32)
        step = tl.load(row + 2 * KEYS + 2 * VALUES + NUM_VALUE_HEADS + head).to(tl.float32)
        qk_input = tl.load(row + qk_channel, mask=is_used, other=0.0).to(tl.float32)
        v_input = tl.load(row + v_channel, mask=is_value, other=0.0).to(tl.float32)
        log_decay = head_decay * softplus(step + step_bias)
        beta = beta_scale / (1.0 + tl.exp(-beta))
        qk = convolve_input(
            qk_input,
            qk,
            conv,
            memory,
            conv_blocks,
            qk_channel,
            is_used,
            position,
            block_stride,
            WIDTH,
            CONV_ROWS,
        )
        v = convolve_input(
            v_input,
            v,
            conv,
            memory,
            conv_blocks,
            v_channel,
            is_value,
            position,
            block_stride,
            WIDTH,
            CONV_ROWS,
        )
        v = v / (1.0 + tl.exp(-v))
        qk = tl.reshape(qk / (1.0 + tl.exp(-qk)), (2, KEY_BLOCK))
        qk = qk * tl.rsqrt(tl.sum(qk * qk, 1) + 1e-6)[:, None]
        is_q = tl.arange(0, 2)[:, None] == 0
        q = tl.sum(tl.where(is_q, qk, 0.0), 0) * scale
        k = tl.sum(tl.where(is_q, 0.0, qk), 0)
        factor = tl.exp(log_decay)
        # Rows of these tiles are slices.
        slice_row = tl.arange(0, SLICES)[:, None]
        values = tl.reshape(v, (SLICES, SLICE))
        outputs = tl.zeros([SLICES, SLICE], tl.float32)
        for i in tl.static_range(SLICES):
            state = next_state * factor
            if i + 1 < SLICES:
                next_state = load_state_slice(
                    pointers, (i + 1) * SLICE, key, in_slice, position, KEY_DIM, VALUE_DIM
                )
            own_v = tl.sum(tl.where(slice_row == i, values, 0.0), 0)
            error = beta * (own_v - tl.sum(state * k[:, None], 0))
            state += k[:, None] * error[None, :]
            is_stored = is_key[:, None] & (i * SLICE + in_slice < VALUE_DIM)[None, :]
            tl.store(pointers + i * SLICE, state, mask=is_stored)
            own_y = tl.sum(state * q[:, None], 0)
            outputs = tl.where(slice_row == i, own_y[None, :], outputs)
        y = tl.reshape(outputs, (VALUE_BLOCK,))
        y = y * tl.rsqrt(tl.sum(y * y, 0) / VALUE_DIM + eps)
        if norm_weight is not None:
            y = y * tl.load(norm_weight + value, mask=is_value, other=0.0)
        gate = gate.to(tl.float32)
        y = y * gate / (1.0 + tl.exp(-gate))
        result = out + token.to(tl.int64) * VALUES + head * VALUE_DIM + value
        tl.store(result, y.to(out.dtype.element_ty), mask=is_value)
    else:
        wait_for_previous(PDL)


@jit
def load_state_slice(
    pointers,
    first: tl.constexpr,
    key,
    in_slice,
    position,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Load the value dims of a state from `first` on; a sequence that begins has zeros."""
    is_value = (first + in_slice < VALUE_DIM) & (in_slice * 0 + position > 0)
    mask = (key < KEY_DIM)[:, None] & is_value[None, :]
    return tl.load(pointers + first, mask=mask, other=0.0)


# ---- prefill chunks ------------------------------------------------------------------------------


def prefill_delta_net_triton(
    projected: torch.Tensor,
    convolved: torch.Tensor,
    spec: GatedDeltaNetSpec,
    decay: torch.Tensor,
    dt_bias: torch.Tensor,
    norm: NormPrologue,
    view: StateView,
    metadata: RecurrentMetadata,
    out: torch.Tensor,
    tiling: DeltaNetTiling = TILING,
) -> None:
    """Compute the prefill chunks of a step, given q, k and v after the convolution."""
    num_tokens = len(projected)
    heads = spec.num_value_heads
    first = metadata.num_decodes
    num_sequences = len(metadata.seq_lens)
    num_prefills = num_sequences - first
    device = projected.device
    dtype = projected.dtype
    written = torch.empty(num_tokens, heads, spec.value_dim, dtype=dtype, device=device)
    erased = torch.empty(num_tokens, heads, spec.key_dim, dtype=dtype, device=device)
    log_decays = torch.empty(num_tokens, heads, dtype=torch.float32, device=device)
    raw = torch.empty(num_tokens, heads, spec.value_dim, dtype=dtype, device=device)
    shape = {
        "NUM_KEY_HEADS": spec.num_key_heads,
        "NUM_VALUE_HEADS": heads,
        "KEY_DIM": spec.key_dim,
        "VALUE_DIM": spec.value_dim,
        "TILED": spec.tiled_heads,
        "KEY_BLOCK": max(next_power_of_2(spec.key_dim), 16),
    }
    pdl = pdl_options(device)
    in_float32 = dtype == torch.float32
    max_chunks = num_tokens // CHUNK + num_prefills
    prepare_chunks_kernel[(max_chunks, heads)](
        projected,
        convolved,
        decay,
        dt_bias,
        metadata.query_start_loc,
        written,
        erased,
        log_decays,
        projected.stride(0),
        spec.beta_scale,
        first,
        num_sequences,
        **shape,
        VALUE_BLOCK=max(next_power_of_2(spec.value_dim), 16),
        CHUNK=CHUNK,
        SEQUENCES=SEQUENCES,
        PRECISION="ieee" if in_float32 else tiling.solve_precision,
        num_warps=tiling.prepare_warps,
        **pdl,
    )
    value_slice = min(tiling.value_slice, max(next_power_of_2(spec.value_dim), 16))
    scan_chunks_kernel[(num_prefills, heads, -(-spec.value_dim // value_slice))](
        convolved,
        written,
        erased,
        log_decays,
        view.memory,
        view.blocks,
        metadata.query_start_loc,
        metadata.seq_lens,
        raw,
        view.memory.stride(0),
        view.blocks.stride(0),
        first,
        **shape,
        VALUE_BLOCK=value_slice,
        SCAN_ROWS=view.rows_per_block,
        CHUNK=CHUNK,
        PRECISION="ieee" if in_float32 else "tf32",
        num_warps=tiling.scan_warps,
        num_stages=1 if in_float32 else tiling.scan_stages,
        **pdl,
    )
    rows_per_program = 16
    gate_norm_kernel[(-(-num_tokens * heads // rows_per_program),)](
        raw,
        projected,
        norm.weight,
        metadata.query_start_loc,
        out,
        projected.stride(0),
        norm.eps,
        first,
        num_tokens,
        GATE=sum((2 * spec.num_key_heads * spec.key_dim, heads * spec.value_dim)),
        HEADS=heads,
        VALUE_DIM=spec.value_dim,
        VALUE_BLOCK=next_power_of_2(spec.value_dim),
        ROWS=rows_per_program,
        num_warps=4,
        **pdl,
    )


@jit
def find_chunk(
    index,
    query_start_loc,
    first_sequence,
    num_sequences,
    CHUNK: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """The first token of a chunk and the end of its sequence, both 0 if there is no such chunk.

    index: of the chunk among those of all sequences, which it looks through SEQUENCES at a time.
    """
    first = 0
    last = 0
    num_before = 0  # chunks of the sequences before
    offset = tl.arange(0, SEQUENCES)
    for start in range(first_sequence, num_sequences, SEQUENCES):
        sequence = start + offset
        is_sequence = sequence < num_sequences
        begin = tl.load(query_start_loc + sequence, mask=is_sequence, other=0)
        end = tl.load(query_start_loc + sequence + 1, mask=is_sequence, other=0)
        chunks = (end - begin + CHUNK - 1) // CHUNK
        ends = num_before + tl.cumsum(chunks, 0)
        mine = (ends > index) & (ends - chunks <= index)
        first += tl.sum(tl.where(mine, begin + (index - ends + chunks) * CHUNK, 0), 0)
        last += tl.sum(tl.where(mine, end, 0), 0)
        num_before += tl.sum(chunks, 0)
    return first, last


@jit(do_not_specialize=["first_sequence", "num_sequences"])
def prepare_chunks_kernel(
    projected,
    convolved,  # [tokens, q | k | v], q and k normed
    decay,
    dt_bias,
    query_start_loc,
    written,  # [tokens, value heads, VALUE_DIM]: U
    erased,  # [tokens, value heads, KEY_DIM]: W
    log_decays,  # [tokens, value heads]: G
    row_stride,
    beta_scale,
    first_sequence,
    num_sequences,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILED: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes U, W and G of one chunk and value head."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    first, end = find_chunk(
        tl.program_id(0), query_start_loc, first_sequence, num_sequences, CHUNK, SEQUENCES
    )
    head = tl.program_id(1)
    if first < end:
        KEYS: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
        VALUES: tl.constexpr = NUM_VALUE_HEADS * VALUE_DIM
        CHANNELS: tl.constexpr = 2 * KEYS + VALUES
        key_head = find_key_head(head, NUM_KEY_HEADS, NUM_VALUE_HEADS, TILED)
        place = tl.arange(0, CHUNK)
        token = (first + place).to(tl.int64)
        inside = token < end
        key = tl.arange(0, KEY_BLOCK)
        value = tl.arange(0, VALUE_BLOCK)
        key_tile = inside[:, None] & (key < KEY_DIM)[None, :]
        value_tile = inside[:, None] & (value < VALUE_DIM)[None, :]
        row = convolved + token[:, None] * CHANNELS
        k = tl.load(row + KEYS + key_head * KEY_DIM + key[None, :], mask=key_tile, other=0.0)
        v = tl.load(row + 2 * KEYS + head * VALUE_DIM + value[None, :], mask=value_tile, other=0.0)
        gates = projected + token * row_stride + CHANNELS + VALUES + head
        beta = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
        beta = tl.where(inside, beta_scale / (1.0 + tl.exp(-beta)), 0.0)
        step = tl.load(gates + NUM_VALUE_HEADS, mask=inside, other=0.0).to(tl.float32)
        log_decay = tl.load(decay + head) * softplus(step + tl.load(dt_bias + head))
        total = tl.cumsum(tl.where(inside, log_decay, 0.0), 0)
        tl.store(log_decays + token * NUM_VALUE_HEADS + head, total, mask=inside)
        products = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        below = place[:, None] > place[None, :]
        ratio = tl.exp(tl.where(below, total[:, None] - total[None, :], 0.0))
        triangle = tl.where(below, products * ratio * beta[:, None], 0.0)
        inverse = invert_unit_triangle(triangle, PRECISION)
        inverse = inverse.to(k.dtype)
        values = (v.to(tl.float32) * beta[:, None]).to(k.dtype)
        u = tl.dot(inverse, values, input_precision=PRECISION)
        keys = (k.to(tl.float32) * (beta * tl.exp(total))[:, None]).to(k.dtype)
        w = tl.dot(inverse, keys, input_precision=PRECISION)
        result = token[:, None] * NUM_VALUE_HEADS + head
        tl.store(
            written + result * VALUE_DIM + value[None, :],
            u.to(written.dtype.element_ty),
            mask=value_tile,
        )
        tl.store(
            erased + result * KEY_DIM + key[None, :],
            w.to(erased.dtype.element_ty),
            mask=key_tile,
        )


@jit
def invert_unit_triangle(triangle, PRECISION: tl.constexpr):
    """The inverse of I + triangle, a strictly lower [64, 64] matrix.

    Blocks of 16 on the diagonal are inverted row by row. With D the inverse of I plus these blocks,
    and N = D times the other blocks, I + triangle = (I + blocks)(I + N) and N ** 4 = 0.
    """
    size: tl.constexpr = 16
    place = tl.arange(0, 64)
    same_block = (place // size)[:, None] == (place // size)[None, :]
    block = tl.arange(0, 4)
    is_diagonal = (block[:, None] == block[None, :])[:, None, :, None]
    row = tl.arange(0, size)[None, :, None]
    column = tl.arange(0, size)[None, None, :]
    blocks = tl.sum(tl.where(is_diagonal, tl.reshape(triangle, (4, size, 4, size)), 0.0), 2)
    inverse = tl.where(row == column, 1.0, tl.zeros((4, size, size), tl.float32))
    for i in range(1, size):
        factors = tl.sum(tl.where(row == i, blocks, 0.0), 1)
        update = tl.sum(factors[:, :, None] * inverse, 1)
        inverse = tl.where(row == i, inverse - update[:, None, :], inverse)
    wide = tl.where(is_diagonal, inverse[:, :, None, :], 0.0)
    diagonal = tl.reshape(wide, (64, 64))
    others = tl.where(same_block, 0.0, triangle)
    n = tl.dot(diagonal, others, input_precision=PRECISION)
    identity = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
    square = tl.dot(n, n, input_precision=PRECISION)
    series = tl.dot(identity - n, identity + square, input_precision=PRECISION)
    return tl.dot(series, diagonal, input_precision=PRECISION)


@jit(do_not_specialize=["first_sequence"])
def scan_chunks_kernel(
    convolved,
    written,
    erased,
    log_decays,
    memory,
    state_pieces,
    query_start_loc,
    seq_lens,
    out,  # [tokens, value heads, VALUE_DIM]
    block_stride,
    pieces_stride,
    first_sequence,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILED: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SCAN_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program goes through the chunks of a sequence, for some value dims of one head."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    sequence = first_sequence + tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(query_start_loc + sequence)
    end = tl.load(query_start_loc + sequence + 1)
    seq_len = tl.load(seq_lens + sequence)
    if end > begin:
        KEYS: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
        CHANNELS: tl.constexpr = 2 * KEYS + NUM_VALUE_HEADS * VALUE_DIM
        key_head = find_key_head(head, NUM_KEY_HEADS, NUM_VALUE_HEADS, TILED)
        key = tl.arange(0, KEY_BLOCK)
        value = tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
        is_key = key < KEY_DIM
        is_value = value < VALUE_DIM
        tile = is_key[:, None] & is_value[None, :]
        state_row = load_state_rows(
            state_pieces + sequence * pieces_stride,
            head * KEY_DIM + key,
            SCAN_ROWS,
            VALUE_DIM,
            block_stride,
            is_key,
        )
        pointers = memory + state_row[:, None] + value[None, :]
        continues = value * 0 + seq_len > end - begin
        state = tl.load(pointers, mask=tile & continues[None, :], other=0.0)
        place = tl.arange(0, CHUNK)
        below = place[:, None] >= place[None, :]
        for first in range(begin, end, CHUNK):
            token = (first + place).to(tl.int64)
            inside = token < end
            last = tl.minimum(first + CHUNK, end) - 1
            key_tile = inside[:, None] & is_key[None, :]
            value_tile = inside[:, None] & is_value[None, :]
            row = convolved + token[:, None] * CHANNELS + key_head * KEY_DIM + key[None, :]
            q = tl.load(row, mask=key_tile, other=0.0)
            k = tl.load(row + KEYS, mask=key_tile, other=0.0)
            of_head = token[:, None] * NUM_VALUE_HEADS + head
            w = tl.load(erased + of_head * KEY_DIM + key[None, :], mask=key_tile, other=0.0)
            u = tl.load(written + of_head * VALUE_DIM + value[None, :], mask=value_tile, other=0.0)
            total = tl.load(log_decays + token * NUM_VALUE_HEADS + head, mask=inside, other=0.0)
            final = tl.load(log_decays + last.to(tl.int64) * NUM_VALUE_HEADS + head)
            narrow = state.to(q.dtype)
            new = u.to(tl.float32) - tl.dot(w, narrow, input_precision=PRECISION)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            ratio = tl.exp(tl.where(below, total[:, None] - total[None, :], 0.0))
            scores = tl.where(below & inside[None, :], scores * ratio, 0.0)
            y = tl.dot(q, narrow, input_precision=PRECISION) * tl.exp(total)[:, None]
            y += tl.dot(scores.to(q.dtype), new.to(q.dtype), input_precision=PRECISION)
            remaining = tl.where(inside, tl.exp(final - total), 0.0)
            decayed = (new * remaining[:, None]).to(q.dtype)
            state = state * tl.exp(final)
            state += tl.dot(tl.trans(k), decayed, input_precision=PRECISION)
            result = out + of_head * VALUE_DIM + value[None, :]
            tl.store(result, y.to(out.dtype.element_ty), mask=value_tile)
        if seq_len > 0:
            tl.store(pointers, state, mask=tile)


@jit(do_not_specialize=["first_sequence", "num_tokens"])
def gate_norm_kernel(
    raw,  # [tokens, heads, VALUE_DIM]
    projected,
    norm_weight,
    query_start_loc,
    out,
    row_stride,
    eps,
    first_sequence,
    num_tokens,
    GATE: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program norms and gates ROWS heads of prefill tokens."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // HEADS
    head = row % HEADS
    value = tl.arange(0, VALUE_BLOCK)
    first_token = tl.load(query_start_loc + first_sequence)
    inside = (token >= first_token) & (token < num_tokens)
    tile = inside[:, None] & (value < VALUE_DIM)[None, :]
    y = tl.load(raw + row[:, None] * VALUE_DIM + value[None, :], mask=tile, other=0.0)
    y = y.to(tl.float32)
    gates = projected + token[:, None] * row_stride + GATE + head[:, None] * VALUE_DIM
    gate = tl.load(gates + value[None, :], mask=tile, other=0.0).to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 1) / VALUE_DIM + eps)[:, None]
    if norm_weight is not None:
        y = y * tl.load(norm_weight + value, mask=value < VALUE_DIM, other=0.0)[None, :]
    y = y * gate / (1.0 + tl.exp(-gate))
    tl.store(out + row[:, None] * VALUE_DIM + value[None, :], y.to(out.dtype.element_ty), mask=tile)
