"""The two ends of a step that feeds itself: rows to inputs, tokens back to rows.

A row's state is its last token, that token's position, and its block table. The last row is nobody's: lines that only
pad a batch point at it, and it never advances. `fetch` begins a step of rows that all go on by one, `gather` one that
has chunks of prompts as well; `advance` ends both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bloomery.kernels.launch import begin, fused, jit, overlap, tl, wait
from bloomery.native import ops
from bloomery.native.team import team

WIDTH = 256  # rows that a program of `advance` takes


class Inputs(NamedTuple):
    ids: torch.Tensor  # [lines]
    positions: torch.Tensor  # [lines]
    slots: torch.Tensor  # [lines] where the new keys and values go
    ends: torch.Tensor  # [lines] length of each sequence, the new position included
    tables: torch.Tensor  # [lines, blocks]


def fetch(
    rows: torch.Tensor,
    last: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
) -> Inputs:
    """rows [lines] -> the inputs of a step that computes each row's next position."""
    if team().active and not rows.is_cuda:
        return Inputs(*ops.fetch(rows, last, positions, tables, block_size))
    if not fused(rows):
        return fetch_reference(rows, last, positions, tables, block_size)
    lines = len(rows)
    width = tables.shape[1]
    out = rows.new_empty(4, lines)
    blocks = rows.new_empty(lines, width)
    fetch_kernel[(lines,)](
        rows,
        last,
        positions,
        tables,
        out,
        blocks,
        lines,
        width,
        SIZE=block_size,
        CHUNK=1024,
        num_warps=4,
        **overlap(rows.device),
    )
    ids, at, slots, ends = out.unbind(0)
    return Inputs(ids, at, slots, ends, blocks)


def fetch_reference(
    rows: torch.Tensor,
    last: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
) -> Inputs:
    index = rows.long()
    at = positions[index]
    blocks = tables[index]
    block = blocks.gather(1, (at // block_size).long()[:, None])[:, 0]
    return Inputs(last[index], at, block * block_size + at % block_size, at + 1, blocks)


@jit
def fetch_kernel(
    rows,
    last,
    positions,
    tables,
    out,
    blocks,
    lines,
    width,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait(PDL)
    line = tl.program_id(0)
    row = tl.load(rows + line).to(tl.int64)
    at = tl.load(positions + row)
    block = tl.load(tables + row * width + at // SIZE)
    tl.store(out + line, tl.load(last + row))
    tl.store(out + lines + line, at)
    tl.store(out + 2 * lines + line, block * SIZE + at % SIZE)
    tl.store(out + 3 * lines + line, at + 1)
    used = at // SIZE + 1
    for first in range(0, used, CHUNK):
        place = first + tl.arange(0, CHUNK)
        found = tl.load(tables + row * width + place, mask=place < used, other=0)
        tl.store(blocks + line.to(tl.int64) * width + place, found, mask=place < used)


class Mixed(NamedTuple):
    """Sequences are the lines and, behind them, the prompts; one whose end is 0 is nobody's."""

    ends: torch.Tensor  # [sequences]
    wanted: torch.Tensor  # [sequences] its last token of the step
    starts: torch.Tensor  # [sequences + 1] its first one
    ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    slots: torch.Tensor  # [tokens]
    tables: torch.Tensor  # [sequences, blocks]


def gather(
    sent: torch.Tensor,
    last: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
    lines: int,
    prompts: int,
    tokens: int,
) -> Mixed:
    """Inputs of a step of at most `lines` rows that go on by one, then chunks of `prompts`, `tokens` in all.

    sent: rows of the lines; of each prompt the row it draws for, its row, where its tokens begin (and where the last
    one's end), its length once they are stored, 0 for those that merely fill the step; ids of all tokens, of which
    those of lines are not looked at. There are as many lines in use as tokens before the first prompt.
    """
    sequences = lines + prompts
    width = tables.shape[1]
    if not fused(sent):
        return gather_reference(sent, last, positions, tables, block_size, lines, prompts, tokens)
    out = sent.new_empty(3 * tokens + 3 * sequences + 1)
    blocks = sent.new_empty(sequences, width)
    gather_kernel[(sequences,)](
        sent,
        last,
        positions,
        tables,
        out,
        blocks,
        lines,
        prompts,
        tokens,
        width,
        len(last) - 1,
        SIZE=block_size,
        CHUNK=1024,
        num_warps=4,
        **overlap(sent.device),
    )
    return Mixed(
        *(*out.split((sequences, sequences, sequences + 1, tokens, tokens, tokens)), blocks)
    )


def gather_reference(
    sent: torch.Tensor,
    last: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
    lines: int,
    prompts: int,
    tokens: int,
) -> Mixed:
    rows, _, owners, starts, ends, ids = sent.long().split(
        (lines, prompts, prompts, prompts + 1, prompts, tokens)
    )
    used = int(starts[0])
    going = fetch_reference(rows[:used], last, positions, tables, block_size)
    begins = torch.cat((torch.arange(lines).clamp(max=used), starts))
    owner = torch.repeat_interleave(torch.arange(prompts), starts.diff())
    real = ends[owner] > 0
    at = torch.where(real, ends[owner] - starts[1:][owner] + torch.arange(used, tokens), 0)
    row = torch.where(real, owners[owner], len(last) - 1)
    slots = tables[row, at // block_size] * block_size + at % block_size
    several = torch.where((ends > 0) & (starts.diff() > 0), starts[1:] - 1, 0)
    found = (
        torch.cat((going.ends, ends.new_zeros(lines - used), ends)),
        torch.cat((torch.arange(used), torch.zeros(lines - used, dtype=torch.int64), several)),
        begins,
        torch.cat((going.ids, ids[used:])),
        torch.cat((going.positions, at)),
        torch.cat((going.slots, slots)),
    )
    return Mixed(
        *(*(numbers.to(last.dtype) for numbers in found), tables[torch.cat((rows, owners))])
    )


@jit(do_not_specialize=["lines", "prompts", "tokens", "nobody"])
def gather_kernel(
    sent,
    last,
    positions,
    tables,
    out,
    blocks,
    lines,
    prompts,
    tokens,
    width,
    nobody,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)  # and no `begin`: attention looks at the layout before its own wait
    sequence = tl.program_id(0)
    begins = sent + lines + 2 * prompts
    wanted = out + lines + prompts
    starts = out + 2 * (lines + prompts)
    ids = starts + lines + prompts + 1
    places = ids + tokens
    slots = ids + 2 * tokens
    going = tl.load(begins)
    end = 0
    if sequence < lines:
        row = tl.load(sent + sequence).to(tl.int64)
        if sequence < going:
            at = tl.load(positions + row)
            tl.store(ids + sequence, tl.load(last + row))
            tl.store(places + sequence, at)
            tl.store(
                slots + sequence, tl.load(tables + row * width + at // SIZE) * SIZE + at % SIZE
            )
            end = at + 1
        tl.store(wanted + sequence, tl.where(sequence < going, sequence, 0))
        tl.store(starts + sequence, tl.minimum(sequence, going))
    else:
        prompt = sequence - lines
        row = tl.load(sent + lines + prompts + prompt).to(tl.int64)
        start = tl.load(begins + prompt)
        stop = tl.load(begins + prompt + 1)
        end = tl.load(begins + prompts + 1 + prompt)
        row = tl.where(end > 0, row, nobody)
        for first in range(start, stop, CHUNK):
            token = first + tl.arange(0, CHUNK)
            here = token < stop
            at = tl.where(end > 0, end - stop + token, 0)
            block = tl.load(tables + row * width + at // SIZE, mask=here, other=0)
            tl.store(
                ids + token,
                tl.load(begins + 2 * prompts + 1 + token, mask=here, other=0),
                mask=here,
            )
            tl.store(places + token, at, mask=here)
            tl.store(slots + token, block * SIZE + at % SIZE, mask=here)
        tl.store(wanted + sequence, tl.where((end > 0) & (stop > start), stop - 1, 0))
        tl.store(starts + sequence, start)
        if prompt == prompts - 1:
            tl.store(starts + sequence + 1, stop)
    tl.store(out + sequence, end)
    used = tl.cdiv(end, SIZE)
    for first in range(0, used, CHUNK):
        place = first + tl.arange(0, CHUNK)
        found = tl.load(tables + row * width + place, mask=place < used, other=0)
        tl.store(blocks + sequence.to(tl.int64) * width + place, found, mask=place < used)


def advance(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    ends: torch.Tensor,
    last: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Each row's new last token, which stands at its end [lines]; in place."""
    if team().active and not rows.is_cuda:
        ops.advance(rows, tokens, last, positions)
        return
    if not fused(rows):
        advance_reference(rows, tokens, ends, last, positions)
        return
    lines = len(rows)
    advance_kernel[(-(-lines // WIDTH),)](
        rows,
        tokens,
        ends,
        last,
        positions,
        lines,
        len(last) - 1,
        WIDTH=WIDTH,
        num_warps=4,
        **overlap(rows.device),
    )


def advance_reference(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    ends: torch.Tensor,
    last: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    real = rows != len(last) - 1
    index = rows[real].long()
    last[index] = tokens[real].to(last.dtype)
    positions[index] = ends[real].to(positions.dtype)


@jit(do_not_specialize=["rows", "tokens", "ends", "lines", "nobody"])
def advance_kernel(
    rows, tokens, ends, last, positions, lines, nobody, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    wait(PDL)
    line = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    row = tl.load(rows + line, mask=line < lines, other=nobody).to(tl.int64)
    real = row != nobody
    tl.store(
        last + row, tl.load(tokens + line, mask=real, other=0).to(last.dtype.element_ty), mask=real
    )
    tl.store(positions + row, tl.load(ends + line, mask=real, other=0), mask=real)
