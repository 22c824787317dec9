"""The two ends of a decode step that feeds itself: rows to inputs, tokens back to rows.

A row's state is its last token, that token's position, and its block table. The last row is nobody's: lines that only
pad a batch point at it, and it never advances.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bloomery.kernels.launch import begin, fused, jit, overlap, tl, wait
from bloomery.native import ops
from bloomery.native.team import team


class Inputs(NamedTuple):
    ids: torch.Tensor  # [lines]
    positions: torch.Tensor  # [lines]
    slots: torch.Tensor  # [lines] where the new keys and values go
    ends: torch.Tensor  # [lines] length of each sequence, the new position included
    tables: torch.Tensor  # [lines, blocks]


def fetch(
    rows: torch.Tensor, last: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, block_size: int
) -> Inputs:
    """rows [lines] -> the inputs of a step that computes each row's next position."""
    if team().active and not rows.is_cuda:
        return Inputs(*ops.fetch(rows, last, positions, tables, block_size))
    if not fused(rows):
        return fetch_reference(rows, last, positions, tables, block_size)
    lines, width = len(rows), tables.shape[1]
    out = rows.new_empty(4, lines)
    blocks = rows.new_empty(lines, width)
    fetch_kernel[(lines,)](
        rows, last, positions, tables, out, blocks, lines, width, SIZE=block_size, CHUNK=1024, num_warps=4,
        **overlap(rows.device),
    )  # fmt: skip
    ids, at, slots, ends = out.unbind(0)
    return Inputs(ids, at, slots, ends, blocks)


def fetch_reference(
    rows: torch.Tensor, last: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, block_size: int
) -> Inputs:
    index = rows.long()
    at, blocks = positions[index], tables[index]
    block = blocks.gather(1, (at // block_size).long()[:, None])[:, 0]
    return Inputs(last[index], at, block * block_size + at % block_size, at + 1, blocks)


@jit
def fetch_kernel(
    rows, last, positions, tables, out, blocks, lines, width,
    SIZE: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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


def advance(rows: torch.Tensor, tokens: torch.Tensor, last: torch.Tensor, positions: torch.Tensor) -> None:
    """Each row's new last token, one position on; in place."""
    if team().active and not rows.is_cuda:
        ops.advance(rows, tokens, last, positions)
        return
    if not fused(rows):
        advance_reference(rows, tokens, last, positions)
        return
    lines = len(rows)
    width = 1 << max(lines - 1, 1).bit_length()
    advance_kernel[(1,)](
        rows, tokens, last, positions, lines, len(last) - 1, WIDTH=width, num_warps=4, **overlap(rows.device)
    )


def advance_reference(rows: torch.Tensor, tokens: torch.Tensor, last: torch.Tensor, positions: torch.Tensor) -> None:
    real = rows != len(last) - 1
    index = rows.long()
    last[index] = torch.where(real, tokens.to(last.dtype), last[index])
    positions[index] = torch.where(real, positions[index] + 1, positions[index])


@jit
def advance_kernel(rows, tokens, last, positions, lines, nobody, WIDTH: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    wait(PDL)
    line = tl.arange(0, WIDTH)
    row = tl.load(rows + line, mask=line < lines, other=nobody).to(tl.int64)
    real = row != nobody
    tl.store(last + row, tl.load(tokens + line, mask=real, other=0).to(last.dtype.element_ty), mask=real)
    tl.store(positions + row, tl.load(positions + row, mask=real, other=0) + 1, mask=real)
