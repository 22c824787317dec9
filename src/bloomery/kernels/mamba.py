"""Mamba-1: the selective scan, in which every channel has a state of its own.

For each channel with state S [state size], at each position:

    S = exp(dt * A) * S + dt * x * B
    out = (S . C + D * x) * silu(gate)
"""

from __future__ import annotations

import torch

from bloomery.kernels.causal_conv import apply_silu
from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    next_power_of_2,
    pdl_options,
    tl,
    use_triton,
    wait_for_previous,
)
from bloomery.kernels.state_cache import (
    RecurrentMetadata,
    StateView,
    iterate_positions,
    load_state_rows,
    read_states,
    write_states,
)

CHANNELS = 32  # of one program


def selective_scan(
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

    decay [inner, state size] is A, skip [inner] is D; updates the states. dt is positive.
    """
    if not use_triton(x):
        return selective_scan_reference(x, dt, b, c, gate, decay, skip, view, metadata)
    return selective_scan_triton(x, dt, b, c, gate, decay, skip, view, metadata)


def selective_scan_triton(
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
    """One kernel for decodes and prefill chunks alike."""
    tokens, inner = x.shape
    out = torch.empty(tokens, inner, dtype=torch.float32, device=x.device)
    selective_scan_kernel[(len(metadata.seq_lens), -(-inner // CHANNELS))](
        x,
        dt,
        b,
        c,
        gate,
        decay,
        skip,
        view.memory,
        view.blocks,
        metadata.query_start_loc,
        metadata.seq_lens,
        out,
        gate.stride(0),
        inner,
        view.memory.stride(0),
        view.blocks.stride(0),
        STATE_SIZE=decay.shape[1],
        SCAN_ROWS=view.rows_per_block,
        CHANNELS=CHANNELS,
        STATE_BLOCK=next_power_of_2(decay.shape[1]),
        num_warps=1,
        **pdl_options(x.device),
    )
    return out


@jit
def selective_scan_kernel(
    x,  # [tokens, inner], as dt
    dt,
    b,  # [tokens, STATE_SIZE], as c
    c,
    gate,  # [tokens, gate_stride]
    decay,
    skip,
    memory,
    state_pieces,
    query_start_loc,
    seq_lens,
    out,
    gate_stride,
    inner,
    block_stride,
    pieces_stride,
    STATE_SIZE: tl.constexpr,
    SCAN_ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program goes through the positions of a sequence, for some channels."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    sequence = tl.program_id(0)
    begin = tl.load(query_start_loc + sequence)
    end = tl.load(query_start_loc + sequence + 1)
    seq_len = tl.load(seq_lens + sequence)
    if end > begin:
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        state = tl.arange(0, STATE_BLOCK)
        used = channel < inner
        is_state = state < STATE_SIZE
        tile = used[:, None] & is_state[None, :]
        state_row = load_state_rows(
            state_pieces + sequence * pieces_stride,
            channel,
            SCAN_ROWS,
            STATE_SIZE,
            block_stride,
            used,
        )
        pointers = memory + state_row[:, None] + state[None, :]
        continues = state * 0 + seq_len > end - begin
        scan = tl.load(pointers, mask=tile & continues[None, :], other=0.0)
        factor = tl.load(
            decay + channel[:, None] * STATE_SIZE + state[None, :], mask=tile, other=0.0
        )
        through = tl.load(skip + channel, mask=used, other=0.0)
        for index in range(begin, end):
            token = begin.to(tl.int64) + (index - begin)
            value = tl.load(x + token * inner + channel, mask=used, other=0.0).to(tl.float32)
            step = tl.load(dt + token * inner + channel, mask=used, other=0.0).to(tl.float32)
            key = tl.load(b + token * STATE_SIZE + state, mask=is_state, other=0.0)
            query = tl.load(c + token * STATE_SIZE + state, mask=is_state, other=0.0)
            open_gate = tl.load(gate + token * gate_stride + channel, mask=used, other=0.0)
            open_gate = open_gate.to(tl.float32)
            scan = scan * tl.exp(step[:, None] * factor)
            scan += (step * value)[:, None] * key.to(tl.float32)[None, :]
            y = tl.sum(scan * query.to(tl.float32)[None, :], 1) + through * value
            y = y * open_gate / (1.0 + tl.exp(-open_gate))
            tl.store(out + token * inner + channel, y, mask=used)
        if seq_len > 0:
            tl.store(pointers, scan, mask=tile)


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
    """The same as `selective_scan`, in torch, position by position."""
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
