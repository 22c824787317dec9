"""The gated short convolution of LFM2: C * conv(B * x), without an activation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bloomery.kernels.causal_conv import (
    ConvHeads,
    ConvInput,
    causal_conv_reference,
    conv_prefills_triton,
    convolve_history,
    convolve_input,
)
from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    pdl_options,
    tl,
    use_triton,
    wait_for_previous,
)
from bloomery.kernels.state_cache import LayerStates, view_states
from bloomery.spec import ShortConvSpec, state_parts

CHANNELS = 128  # of one program


@dataclass(frozen=True)
class ShortConvWeights:
    """The convolution, in float32."""

    conv: torch.Tensor  # [channels, width]
    conv_bias: torch.Tensor | None


def short_conv(
    projected: torch.Tensor, spec: ShortConvSpec, weights: ShortConvWeights, states: LayerStates
) -> torch.Tensor:
    """projected [tokens, B | C | x] -> [tokens, size]."""
    if use_triton(projected):
        return short_conv_triton(projected, spec, weights, states)
    return short_conv_reference(projected, spec, weights, states)


def short_conv_triton(
    projected: torch.Tensor, spec: ShortConvSpec, weights: ShortConvWeights, states: LayerStates
) -> torch.Tensor:
    """One kernel for the decodes; prefill chunks use the convolution of the other mixers."""
    metadata = states.metadata
    (view,) = view_states(states.memory, metadata.state_pieces, state_parts(spec))
    if metadata.num_decodes < len(metadata.seq_lens):
        b, c, x = projected.chunk(3, -1)
        heads = ConvHeads(0, -(-spec.size // CHANNELS), 0, CHANNELS)
        source = ConvInput(b * x, 0)
        convolved = conv_prefills_triton(
            source, weights.conv, weights.conv_bias, heads, view, metadata, silu=False
        )
        out = c * convolved
    else:
        out = projected.new_empty(len(projected), spec.size)
    if metadata.num_decodes:
        decode_short_conv_kernel[(metadata.num_decodes, -(-spec.size // CHANNELS))](
            projected,
            weights.conv,
            weights.conv_bias,
            view.memory,
            view.blocks,
            metadata.query_start_loc,
            metadata.seq_lens,
            out,
            view.memory.stride(0),
            view.blocks.stride(0),
            SIZE=spec.size,
            WIDTH=spec.conv_width,
            CONV_ROWS=view.rows_per_block,
            CHANNELS=CHANNELS,
            num_warps=4,
            **pdl_options(projected.device),
        )
    return out


@jit
def decode_short_conv_kernel(
    projected,  # [tokens, B | C | x]
    conv,  # [SIZE, WIDTH]
    conv_bias,  # [SIZE] or None
    memory,
    state_pieces,
    query_start_loc,
    seq_lens,
    out,  # [tokens, SIZE]
    block_stride,
    pieces_stride,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CONV_ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes some channels of one sequence."""
    launch_dependents(PDL)
    sequence = tl.program_id(0)
    token = tl.load(query_start_loc + sequence)
    has_token = tl.load(query_start_loc + sequence + 1) > token
    position = tl.load(seq_lens + sequence) - 1
    if has_token & (position >= 0):
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        used = channel < SIZE
        row = projected + token.to(tl.int64) * (3 * SIZE) + channel
        blocks = state_pieces + sequence * pieces_stride
        y = convolve_history(
            conv, memory, blocks, channel, used, position, block_stride, WIDTH, CONV_ROWS
        )
        if conv_bias is not None:
            y += tl.load(conv_bias + channel, mask=used, other=0.0)
        wait_for_previous(PDL)
        b = tl.load(row, mask=used, other=0.0).to(tl.float32)
        c = tl.load(row + SIZE, mask=used, other=0.0).to(tl.float32)
        x = tl.load(row + 2 * SIZE, mask=used, other=0.0).to(tl.float32)
        y = convolve_input(
            b * x,
            y,
            conv,
            memory,
            blocks,
            channel,
            used,
            position,
            block_stride,
            WIDTH,
            CONV_ROWS,
        )
        result = out + token.to(tl.int64) * SIZE + channel
        tl.store(result, (c * y).to(out.dtype.element_ty), mask=used)
    else:
        wait_for_previous(PDL)


def short_conv_reference(
    projected: torch.Tensor, spec: ShortConvSpec, weights: ShortConvWeights, states: LayerStates
) -> torch.Tensor:
    """The same as `short_conv`, in torch."""
    (view,) = view_states(states.memory, states.metadata.state_pieces, state_parts(spec))
    b, c, x = projected.float().chunk(3, -1)
    convolved = causal_conv_reference(b * x, weights.conv, weights.conv_bias, view, states.metadata)
    return (c * convolved).to(projected.dtype)
