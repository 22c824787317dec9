"""The causal convolution of recurrent mixers, continued from the last inputs of each sequence.

Every channel is a filter of its own: y[p] = bias + sum of weight[j] * x[p - width + 1 + j]. The
state has the last `width` inputs, that of position p in column p % width (spec.state_parts).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

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
    load_state_rows,
    read_states,
    write_states,
)

TOKENS_PER_PROGRAM = 32
SEQUENCES = 16  # that a program looks at together to find those of its tokens


def causal_conv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    view: StateView,
    metadata: RecurrentMetadata,
) -> torch.Tensor:
    """Convolve x [tokens, channels] with weight [channels, width]; returns float32, updates states.

    Tokens that belong to no sequence get zeros.
    """
    width = weight.shape[1]
    query_lens, seq_lens = metadata.host_lengths()
    states = read_states(view, metadata)
    x = x.float()
    out = torch.zeros_like(x)
    first = 0
    for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        start = max(seq_len - query_len, 0)
        if not query_len:
            continue
        past = torch.arange(start - width + 1, start, device=x.device) % width
        new = x[first : first + query_len]
        inputs = torch.cat((states[index][:, past], new.T), 1)  # [channels, width - 1 + new]
        out[first : first + query_len] = F.conv1d(
            inputs[None], weight[:, None], bias, groups=len(weight)
        )[0].T
        end = start + query_len
        last = torch.arange(end - width, end, device=x.device) % width
        states[index][:, last] = inputs[:, -width:]
        first += query_len
    write_states(view, metadata, states)
    return out


def apply_silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    view: StateView,
    metadata: RecurrentMetadata,
) -> torch.Tensor:
    """Convolve x [tokens, channels], which may be columns of a projection, and apply silu."""
    if not use_triton(x):
        convolved = causal_conv_reference(x, weight, bias, view, metadata)
        return apply_silu(convolved).to(x.dtype)
    heads = ConvHeads(0, -(-len(weight) // CONV_TILE), 0, CONV_TILE)
    # Chunks may have one position, so the decodes need no kernel of their own.
    chunks = replace(metadata, num_decodes=0)
    return conv_prefills_triton(ConvInput(x, 0), weight, bias, heads, view, chunks)


CONV_TILE = 128  # channels of one program, where they are not in heads


class ConvHeads(NamedTuple):
    """Channels of a convolution in heads; the first `num_normed` heads are scaled to length 1.

    Of these, the first `num_scaled` are then multiplied by `scale`.
    """

    num_narrow: int  # leading heads of `narrow` channels; all others have `wide` channels
    num_wide: int
    narrow: int
    wide: int
    num_normed: int = 0
    num_scaled: int = 0
    scale: float = 1.0
    norm_eps: float = 0.0


class ConvInput(NamedTuple):
    """How the input of a convolution is read: rows of a projection, perhaps with factors."""

    projected: torch.Tensor  # [tokens, row]
    first: int  # column of the first channel
    factors: torch.Tensor | None = None  # [channels]


def conv_prefills_triton(
    source: ConvInput,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    heads: ConvHeads,
    view: StateView,
    metadata: RecurrentMetadata,
    silu: bool = True,
) -> torch.Tensor:
    """Convolve the prefill chunks of a step; returns [tokens, channels] of all tokens.

    The rows of decodes are not written. Updates the states of the chunks.
    """
    projected = source.projected
    num_tokens = len(projected)
    channels, width = weight.shape
    out = projected.new_empty(num_tokens, channels)
    num_sequences = len(metadata.seq_lens)
    first = metadata.num_decodes
    pdl = pdl_options(projected.device)
    state = (view.memory, view.blocks, view.memory.stride(0), view.blocks.stride(0))
    conv_prefill_kernel[(-(-num_tokens // TOKENS_PER_PROGRAM), heads.num_narrow + heads.num_wide)](
        projected,
        weight,
        bias,
        source.factors,
        *state,
        metadata.query_start_loc,
        metadata.seq_lens,
        out,
        num_tokens,
        projected.stride(0),
        source.first,
        channels,
        first,
        num_sequences,
        heads.scale,
        heads.norm_eps,
        NUM_NARROW=heads.num_narrow,
        NARROW=heads.narrow,
        WIDE=heads.wide,
        NUM_NORMED=heads.num_normed,
        NUM_SCALED=heads.num_scaled,
        WIDTH=width,
        SILU=silu,
        ROWS_PER_BLOCK=view.rows_per_block,
        TOKENS=TOKENS_PER_PROGRAM,
        BLOCK=next_power_of_2(max(heads.narrow if heads.num_narrow else 1, heads.wide)),
        SEQUENCES=SEQUENCES,
        num_warps=4,
        **pdl,
    )
    store_conv_states_kernel[(num_sequences - first, -(-channels // CHANNELS_PER_PROGRAM))](
        projected,
        source.factors,
        *state,
        metadata.query_start_loc,
        metadata.seq_lens,
        projected.stride(0),
        source.first,
        channels,
        first,
        WIDTH=width,
        ROWS_PER_BLOCK=view.rows_per_block,
        CHANNELS=CHANNELS_PER_PROGRAM,
        COLUMNS=next_power_of_2(width),
        num_warps=4,
        **pdl,
    )
    return out


CHANNELS_PER_PROGRAM = 256


@jit(do_not_specialize=["num_tokens", "first_sequence", "num_sequences"])
def conv_prefill_kernel(
    projected,  # [num_tokens, row_stride]
    weight,  # [channels, WIDTH]
    bias,  # [channels] or None
    factors,  # [channels] or None
    memory,
    state_pieces,  # [sequences, ...]
    block_stride,
    pieces_stride,
    query_start_loc,
    seq_lens,
    out,  # [num_tokens, channels]
    num_tokens,
    row_stride,
    first_column,
    channels,
    first_sequence,
    num_sequences,
    scale,
    norm_eps,
    NUM_NARROW: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
    NUM_NORMED: tl.constexpr,
    NUM_SCALED: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    ROWS_PER_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program convolves TOKENS tokens of one head, which may be of several sequences."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    first_channel = head * NARROW
    size = NARROW
    if head >= NUM_NARROW:
        first_channel = NUM_NARROW * NARROW + (head - NUM_NARROW) * WIDE
        size = WIDE
    sequence = first_sequence + tl.zeros((TOKENS,), tl.int32)
    for start in range(first_sequence, num_sequences, SEQUENCES):
        index = start + tl.arange(0, SEQUENCES)
        is_sequence = index < num_sequences
        ends = tl.load(query_start_loc + index + 1, mask=is_sequence, other=num_tokens)
        has_ended = is_sequence[None, :] & (ends[None, :] <= token[:, None])
        sequence += tl.sum(has_ended.to(tl.int32), 1)
    first_token = tl.load(query_start_loc + first_sequence)
    inside = (token >= first_token) & (token < num_tokens) & (sequence < num_sequences)
    sequence = tl.where(inside, sequence, first_sequence)
    begin = tl.load(query_start_loc + sequence)
    end = tl.load(query_start_loc + sequence + 1)
    start = tl.load(seq_lens + sequence) - (end - begin)  # position of the first new token
    offset = tl.arange(0, BLOCK)
    channel = first_channel + offset
    used = (offset < size) & (channel < channels)
    tile = inside[:, None] & used[None, :]
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=used, other=0.0)[None, :]
    factor = tl.full((BLOCK,), 1.0, tl.float32)
    if factors is not None:
        factor = tl.load(factors + channel, mask=used, other=0.0)
    for tap in tl.static_range(WIDTH):
        source = token - (WIDTH - 1) + tap
        x = tl.load(
            projected + source.to(tl.int64)[:, None] * row_stride + first_column + channel[None, :],
            mask=tile & (source >= begin)[:, None],
            other=0.0,
        ).to(tl.float32)
        tap_weight = tl.load(weight + channel * WIDTH + tap, mask=used, other=0.0)
        total += x * (factor * tap_weight)[None, :]
    # Only the first tokens of a chunk that continues a sequence read its state.
    reads_state = inside & (start > 0) & (token - begin < WIDTH - 1)
    if tl.max(reads_state.to(tl.int32), 0) > 0:
        state_row = load_state_rows(
            state_pieces + sequence[:, None] * pieces_stride,
            channel[None, :],
            ROWS_PER_BLOCK,
            WIDTH,
            block_stride,
            tile & reads_state[:, None],
        )
        for tap in tl.static_range(WIDTH - 1):
            source = token - (WIDTH - 1) + tap
            column = (start + source - begin + WIDTH) % WIDTH
            old = tl.load(
                memory + state_row + column[:, None],
                mask=tile & (reads_state & (source < begin))[:, None],
                other=0.0,
            )
            tap_weight = tl.load(weight + channel * WIDTH + tap, mask=used, other=0.0)
            total += old * tap_weight[None, :]
    y = total
    if SILU:
        y = total / (1.0 + tl.exp(-total))
    if head < NUM_NORMED:
        y = y * tl.rsqrt(tl.sum(y * y, 1) + norm_eps)[:, None]
        if head < NUM_SCALED:
            y = y * scale
    tl.store(
        out + token.to(tl.int64)[:, None] * channels + channel[None, :],
        y.to(out.dtype.element_ty),
        mask=inside[:, None] & used[None, :],
    )


@jit(do_not_specialize=["first_sequence"])
def store_conv_states_kernel(
    projected,
    factors,
    memory,
    state_pieces,
    block_stride,
    pieces_stride,
    query_start_loc,
    seq_lens,
    row_stride,
    first_column,
    channels,
    first_sequence,
    WIDTH: tl.constexpr,
    ROWS_PER_BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program stores the last inputs of some channels of one sequence."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    sequence = first_sequence + tl.program_id(0)
    begin = tl.load(query_start_loc + sequence)
    end = tl.load(query_start_loc + sequence + 1)
    seq_len = tl.load(seq_lens + sequence)
    if (seq_len > 0) & (end > begin):
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        used = channel < channels
        column = tl.arange(0, COLUMNS)
        # The last position of each column.
        age = (seq_len - 1 - column % WIDTH + WIDTH) % WIDTH
        token = end - 1 - age
        is_new = (token >= begin) & (column < WIDTH)
        x = tl.load(
            projected + token.to(tl.int64)[None, :] * row_stride + first_column + channel[:, None],
            mask=used[:, None] & is_new[None, :],
            other=0.0,
        ).to(tl.float32)
        if factors is not None:
            x *= tl.load(factors + channel, mask=used, other=0.0)[:, None]
        begins = column * 0 + seq_len <= end - begin
        state_row = load_state_rows(
            state_pieces + sequence * pieces_stride,
            channel,
            ROWS_PER_BLOCK,
            WIDTH,
            block_stride,
            used,
        )
        # A sequence that begins also clears the columns before its first position.
        stored = (is_new | begins) & (column < WIDTH)
        tl.store(
            memory + state_row[:, None] + column[None, :], x, mask=used[:, None] & stored[None, :]
        )


# A decode kernel reads the states and the metadata of its sequence before it waits for the input
# projection (launch.py): in a step, no other kernel writes them, and the last one that writes the
# metadata (gather_state_pieces) is never overtaken.


@jit
def convolve_history(
    weight,
    memory,
    state_pieces,  # of the sequence
    channel,  # [N]
    used,  # [N]
    position,
    block_stride,
    WIDTH: tl.constexpr,
    ROWS_PER_BLOCK: tl.constexpr,
):
    """What the earlier inputs of some channels add to the position's output, [N].

    One-dimensional throughout: a tile of channels and columns would impose its layout on the state.
    """
    state_row = load_state_rows(state_pieces, channel, ROWS_PER_BLOCK, WIDTH, block_stride, used)
    continues = used & (channel * 0 + position > 0)
    total = channel * 0.0
    for tap in tl.static_range(WIDTH - 1):
        column = (position % WIDTH + 1 + tap) % WIDTH
        old = tl.load(memory + state_row + column, mask=continues, other=0.0)
        total += old * tl.load(weight + channel * WIDTH + tap, mask=used, other=0.0)
    return total


@jit
def convolve_input(
    x,  # [N] inputs of the position
    history,  # [N] from convolve_history
    weight,
    memory,
    state_pieces,
    channel,
    used,
    position,
    block_stride,
    WIDTH: tl.constexpr,
    ROWS_PER_BLOCK: tl.constexpr,
):
    """The output of the convolution without silu, [N]; stores the inputs.

    Several programs may do so for the same channels: none overwrites what another one reads.
    """
    state_row = load_state_rows(state_pieces, channel, ROWS_PER_BLOCK, WIDTH, block_stride, used)
    place = position % WIDTH
    tl.store(memory + state_row + place, x, mask=used)
    for tap in tl.static_range(WIDTH - 1):
        # The first position of a sequence clears the columns before it.
        column = (place + 1 + tap) % WIDTH
        begins = used & (channel * 0 + position == 0)
        tl.store(memory + state_row + column, channel * 0.0, mask=begins)
    return history + x * tl.load(weight + channel * WIDTH + WIDTH - 1, mask=used, other=0.0)
