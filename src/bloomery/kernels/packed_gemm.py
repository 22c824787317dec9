"""A product of dozens of tokens with a matrix of fewer bits: unpacked in registers, multiplied by the matrix units.

The weights are the left factor, straight from registers; the tokens, which are few, the right one. A thread reads 16
neighbouring bytes of a row, four threads 64, and what the matrix units want of a thread for a step over 16 columns are
four numbers of a row. Which columns meet in one step is free to choose: so they are those that a mask finds in one go
(`places`), and the tokens are put into that order beforehand. No number ever passes between threads.

A masked code beside a fixed exponent is a float, 128 + code in bfloat16 or 1024 + code in float16; two at a time a
subtraction makes the code of it, exactly, and a multiplication with addition the weight. A row's only scale waits for
the sums. Short matrices are cut along their columns as well, and the parts added up in their order. Where tokens are
so many that arithmetic counts, tiles are taken in turn by as many programs as there are processors (`stream_kernel`),
and of those that are left each program takes an equal stretch: none waits for the last. This file must not know
layers, formats or what a model is.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import torch

from bloomery.kernels.launch import begin, hopper, jit, overlap, power_of_two, processors, tl, wait
from bloomery.kernels.packed import Grid, Packed
from bloomery.kernels.packed_gemv import Layout, largest, layout

MOST = 8  # splits
STRETCH = 1200  # columns of a tile that are worth a program


class Tiling(NamedTuple):
    tokens: int
    outputs: int
    warps: int
    stages: int
    splits: int  # of the columns; 0: as many programs as processors share the tiles
    turn: int = (
        1  # times 64 bytes of a row that are read at once; the columns of a split are a multiple
    )


# Tokens of a tile -> stages -> programs of 128 outputs of 4 bits that a processor has room for.
BESIDE: Mapping[int, Mapping[int, int]] = {32: {3: 3}, 64: {3: 3, 4: 2, 6: 1}, 128: {3: 2, 4: 1}}


@lru_cache(maxsize=4096)
def tiling(tokens: int, rows: int, units: int, kind: str, bits: int, count: int) -> Tiling:
    """For `count` processors and rows of `units` times 64 bytes; measured (benchmarks/packed.py tune)."""
    wide = min(max(16, power_of_two(tokens)), 128)
    slow = kind == "codebook"  # registers and instructions that another row would need
    if bits == 4 and not slow and wide >= 32:
        return filling(wide, -(-rows // 128) * -(-tokens // wide), units, count)
    eight = bits == 8 and wide <= 32 and not (wide == 16 and rows >= 128 * count)
    outputs = 64 if eight or (slow and wide <= 64) else 128
    programs = -(-rows // outputs) * -(-tokens // wide)
    many = 5 if (outputs == 64 and wide <= 32) or (wide == 16 and bits == 4) else 2.5
    waves = 3 if tokens > 128 else 1.4 if wide == 128 or (wide == 64 and bits == 8) else many
    least = (
        4 if wide == 16 and bits == 4 and not slow else 6 if slow or wide <= 32 else 12
    )  # units worth a program
    splits = 1
    while programs * splits < waves * count and units >= 2 * least * splits and splits < MOST:
        splits *= 2
    if (
        bits == 8 and wide <= 64 and units % (2 * splits) == 0
    ):  # of one at once too few to unpack some meanwhile
        return Tiling(wide, outputs, 4, 3, splits, 2)
    stages = (
        (6 if bits == 8 else 4 if slow else 3)
        if wide <= 32
        else 4
        if bits == 8 and wide == 128
        else 3
    )
    return Tiling(wide, outputs, 4, stages, splits)


def sharing(tokens: int, rows: int, columns: int, bits: int, count: int) -> Tiling | None:
    """For more tokens than `tiling` has in a tile, and a Hopper's memory; None: a program would have too little."""
    tiles = -(-tokens // 256) * -(-rows // 128)
    if tokens <= 128 or tiles * columns < STRETCH * count:
        return None
    return Tiling(256, 128, 8, 4 if bits == 8 else 3, 0)


def filling(wide: int, programs: int, units: int, count: int) -> Tiling:
    """The cut of 4-bit codes that keeps processors busiest: what rounds of programs fill, less what it takes to get
    under way (some units' time), and a quarter where a processor has but one program, which waits for itself."""
    start = 3 if wide == 32 else 7
    places = BESIDE[wide]

    def busy(stages: int, splits: int) -> float:
        rounds = programs * splits / (places[stages] * count)
        filled = rounds / max(1, ceil(rounds - 0.05)) * (0.75 if places[stages] == 1 else 1.0)
        return filled * units / (units + start * splits)

    cuts = [
        (stages, splits)
        for stages in places
        for splits in (1, 2, 4, MOST)
        if units >= 4 * splits or splits == 1
    ]
    stages, splits = max(cuts, key=lambda cut: busy(*cut))
    return Tiling(wide, 128, 4, stages, splits)


def unit(bits: int) -> int:
    """Columns of 64 bytes."""
    return 512 // bits


def possible(packed: Packed) -> bool:
    """Whether the kernel can: rows of whole 64 bytes, of which no thread's 16 straddle two scales."""
    how = layout(packed)
    (_, columns) = packed.shape
    if how.bits not in (4, 8) or columns % unit(how.bits) or not packed.codes.is_contiguous():
        return False
    each = unit(how.bits)
    return how.group >= columns or how.group % each == 0 or how.group in (each // 2, each // 4)


def packed_product(
    x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None, cut: Tiling | None = None
) -> torch.Tensor:
    """The kernels: x [tokens, in] -> [tokens, out]."""
    (tokens, columns) = x.shape
    rows = packed.shape[0]
    how = layout(packed)
    units = columns // unit(how.bits)
    count = processors(x.device)
    if cut is None and hopper(x.device):
        cut = sharing(tokens, rows, columns, how.bits, count)
    cut = cut or tiling(tokens, rows, units, how.kind, how.bits, count)
    x = arranged(x, how, packed.order if isinstance(packed, Grid) else None)
    out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    if cut.splits == 0:
        return streamed(x, packed, bias, cut, out, count)
    parts = out
    if cut.splits > 1:
        parts = torch.empty(cut.splits, tokens, rows, dtype=torch.float32, device=x.device)
    packed_gemm_kernel[(-(-tokens // cut.tokens), -(-rows // cut.outputs), cut.splits)](
        x,
        how.codes.view(torch.int16),
        how.scale,
        x if how.zero is None else how.zero,
        x if how.table is None else how.table,
        x if bias is None else bias,
        parts,
        tokens,
        rows,
        columns,
        -(-units // cut.splits),
        BIAS=bias is not None,
        SPLIT=cut.splits > 1,
        **choices(packed, x.dtype, x.device),
        BLOCK_OUT=cut.outputs,
        BLOCK_IN=cut.tokens,
        WARPS=cut.warps,
        STAGES=cut.stages,
        TURN=cut.turn,
        num_warps=cut.warps,
        **overlap(x.device),
    )
    if cut.splits > 1:
        add_up_kernel[(tokens, -(-rows // 1024))](
            parts,
            out if bias is None else bias,
            out,
            rows,
            SPLITS=cut.splits,
            BIAS=bias is not None,
            WIDTH=1024,
            num_warps=4,
            **overlap(x.device),
        )
    return out


def streamed(
    x: torch.Tensor,
    packed: Packed,
    bias: torch.Tensor | None,
    cut: Tiling,
    out: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """x, arranged, times the matrix into `out`, by `count` programs."""
    (tokens, columns) = x.shape
    rows = packed.shape[0]
    how = layout(packed)
    turns = columns // (unit(how.bits) * cut.turn)
    rounds, rest = divmod(-(-tokens // cut.tokens) * -(-rows // cut.outputs), count)
    parts = torch.empty(
        2 * count if rest else 1, cut.tokens, cut.outputs, dtype=torch.float32, device=x.device
    )
    stream_kernel[(count,)](
        x,
        how.codes.view(torch.int16),
        how.scale,
        x if how.zero is None else how.zero,
        x if how.table is None else how.table,
        x if bias is None else bias,
        out,
        parts,
        tokens,
        rows,
        columns,
        rounds,
        rest * turns,
        BIAS=bias is not None,
        **choices(packed, x.dtype, x.device),
        BLOCK_OUT=cut.outputs,
        BLOCK_IN=cut.tokens,
        WARPS=cut.warps,
        STAGES=cut.stages,
        TURN=cut.turn,
        num_warps=cut.warps,
        **overlap(x.device),
    )
    if rest:
        gather(parts, bias, out, turns, rounds, rest)
    return out


def gather(
    parts: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    turns: int,
    rounds: int,
    rest: int,
) -> None:
    """What programs, parts [2 * programs, tokens, outputs], have added to the last `rest` tiles, each of so many turns;
    before those came `rounds` tiles of every program."""
    (programs, wide, outputs) = parts.shape
    (tokens, rows) = out.shape
    gather_kernel[(rest, wide // 16)](
        parts,
        out if bias is None else bias,
        out,
        tokens,
        rows,
        turns,
        rounds,
        rest * turns,
        programs // 2,
        BIAS=bias is not None,
        BLOCK_OUT=outputs,
        BLOCK_IN=wide,
        LINES=16,
        num_warps=4,
        **overlap(out.device),
    )


def choices(
    packed: Packed, dtype: torch.dtype, device: torch.device
) -> dict[str, str | int | bool | None]:
    """What the kernel is told of a packed matrix. GROUP 0: a row has one scale; TALL 0: all have. LATE: a row's only
    scale waits for the sums."""
    how = layout(packed)
    (rows, columns) = packed.shape
    late = how.bits == 8 and how.group >= columns and how.zero is None
    return {
        "KIND": how.kind,
        "BITS": how.bits,
        "GROUP": how.group if how.group < columns else 0,
        "TALL": how.tall if how.tall < rows else 0,
        "NEST": how.nest,
        "ZERO": how.zero is not None,
        "SIGNED": how.signed,
        "LATE": late,
        "ASSEMBLY": None
        if not hopper(device)
        else assembly(how.kind, how.bits, how.signed, dtype, late, asynchronous(device)),
    }


@lru_cache
def asynchronous(device: torch.device) -> bool:
    """Whether the matrix units read their left factor from registers while the program goes on: Hopper's do."""
    return torch.cuda.get_device_capability(device)[0] == 9


def arranged(x: torch.Tensor, how: Layout, order: torch.Tensor | None) -> torch.Tensor:
    """x in the order of `places`."""
    x = x.contiguous()
    tokens, columns = x.shape
    out = torch.empty_like(x)
    arrange_kernel[(tokens, -(-columns // 2048))](
        x,
        out if order is None else order,
        out,
        columns,
        BITS=how.bits,
        ORDER=order is not None,
        WIDTH=2048,
        num_warps=4,
        **overlap(x.device),
    )
    return out


@jit
def places(k, BITS: tl.constexpr):
    """The column that stands at place k. A place is (units, pairs of codes of a halfword, words of a thread, one of a
    pair, threads, halves of a word); a column (units, threads, words of a thread, halves of a word, codes of one)."""
    EACH: tl.constexpr = 16 // BITS
    half = k % 2
    thread = k // 2 % 4
    one = k // 8 % 2
    word = k // 16 % 4
    pair = k // 64 % (EACH // 2)
    return (
        k // (32 * EACH) * (32 * EACH)
        + thread * (8 * EACH)
        + word * (2 * EACH)
        + half * EACH
        + 2 * pair
        + one
    )


@jit
def arrange_kernel(
    x,
    order,
    out,
    columns,
    BITS: tl.constexpr,
    ORDER: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait(PDL)
    at = tl.program_id(0).to(tl.int64) * columns
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    source = places(k, BITS)
    if ORDER:
        source = tl.load(order + source, mask=k < columns, other=0)
    tl.store(out + at + k, tl.load(x + at + source, mask=k < columns, other=0.0), mask=k < columns)


@jit(do_not_specialize=["tokens", "each"])
def packed_gemm_kernel(
    x,
    codes,
    scale,
    zero,
    table,
    bias,
    out,
    tokens,
    rows,
    columns,
    each,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TALL: tl.constexpr,
    NEST: tl.constexpr,
    ZERO: tl.constexpr,
    SIGNED: tl.constexpr,
    BIAS: tl.constexpr,
    LATE: tl.constexpr,
    SPLIT: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    TURN: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_OUT outputs of BLOCK_IN tokens, over `each` times 64 bytes."""
    begin(PDL)
    n0 = tl.program_id(1) * BLOCK_OUT
    n = n0 + tl.arange(0, BLOCK_OUT)
    m = tl.program_id(0) * BLOCK_IN + tl.arange(0, BLOCK_IN)
    first = tl.program_id(2) * each
    last = tl.minimum(first + each, columns // (512 // BITS))
    y = summed(
        x,
        tl.minimum(m, tokens - 1),
        codes,
        scale,
        zero,
        table,
        n0,
        rows,
        first,
        last,
        columns,
        KIND,
        BITS,
        GROUP,
        TALL,
        NEST,
        ZERO,
        SIGNED,
        LATE,
        ASSEMBLY,
        BLOCK_OUT,
        BLOCK_IN,
        WARPS,
        STAGES,
        TURN,
        PDL,
    )
    here = (n < rows)[:, None] & (m < tokens)[None, :]
    at = m.to(tl.int64)[None, :] * rows + n[:, None]
    if SPLIT:
        tl.store(out + tl.program_id(2).to(tl.int64) * tokens * rows + at, y, mask=here)
    else:
        if BIAS:
            y += tl.load(bias + tl.minimum(n, rows - 1)).to(tl.float32)[:, None]
        tl.store(out + at, y.to(out.dtype.element_ty), mask=here)


@jit(do_not_specialize=["tokens", "rounds", "work"])
def stream_kernel(
    x,
    codes,
    scale,
    zero,
    table,
    bias,
    out,
    parts,
    tokens,
    rows,
    columns,
    rounds,
    work,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TALL: tl.constexpr,
    NEST: tl.constexpr,
    ZERO: tl.constexpr,
    SIGNED: tl.constexpr,
    LATE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    TURN: tl.constexpr,
    PDL: tl.constexpr,
):
    """`rounds` whole tiles a program, then its stretch of the `work`, turns of the tiles that are left: less than a
    tile, so it touches two at the most, of which parts[2 * program] and the next hold what it added."""
    begin(PDL)
    wait(PDL)
    p = tl.program_id(0)
    count = tl.num_programs(0)
    turns = columns // (512 // BITS * TURN)
    across = (tokens + BLOCK_IN - 1) // BLOCK_IN
    start = p * work // count
    end = (p + 1) * work // count
    for i in range(rounds + 2):
        left = start // turns + i - rounds
        first = tl.where(i < rounds, 0, tl.maximum(start, left * turns) - left * turns)
        last = tl.where(i < rounds, turns, tl.minimum(end, (left + 1) * turns) - left * turns)
        tile = tl.where(i < rounds, i * count + p, rounds * count + left)
        if first < last:
            n0 = tile // across * BLOCK_OUT
            m = tile % across * BLOCK_IN + tl.arange(0, BLOCK_IN)
            y = summed(
                x,
                tl.minimum(m, tokens - 1),
                codes,
                scale,
                zero,
                table,
                n0,
                rows,
                first * TURN,
                last * TURN,
                columns,
                KIND,
                BITS,
                GROUP,
                TALL,
                NEST,
                ZERO,
                SIGNED,
                LATE,
                ASSEMBLY,
                BLOCK_OUT,
                BLOCK_IN,
                WARPS,
                STAGES,
                TURN,
                False,
            )
            n = n0 + tl.arange(0, BLOCK_OUT)
            if i < rounds:
                if BIAS:
                    y += tl.load(bias + tl.minimum(n, rows - 1)).to(tl.float32)[:, None]
                at = m.to(tl.int64)[None, :] * rows + n[:, None]
                tl.store(
                    out + at,
                    y.to(out.dtype.element_ty),
                    mask=(n < rows)[:, None] & (m < tokens)[None, :],
                )
            else:
                at_part = parts + (2 * p + i - rounds).to(tl.int64) * (BLOCK_OUT * BLOCK_IN)
                tl.store(
                    at_part
                    + tl.arange(0, BLOCK_IN)[None, :] * BLOCK_OUT
                    + tl.arange(0, BLOCK_OUT)[:, None],
                    y,
                )


@jit(do_not_specialize=["tokens", "turns", "rounds", "work", "count"])
def gather_kernel(
    parts,
    bias,
    out,
    tokens,
    rows,
    turns,
    rounds,
    work,
    count,
    BIAS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """LINES tokens of a tile that several programs have made, added up in their order."""
    begin(PDL)
    wait(PDL)
    left = tl.program_id(0)
    across = (tokens + BLOCK_IN - 1) // BLOCK_IN
    tile = rounds * count + left
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)
    m = tile % across * BLOCK_IN + line
    n = tile // across * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inside = line[:, None] * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[None, :]
    p = left * turns * count // work
    while (p + 1) * work // count <= left * turns:  # divisions round down
        p += 1
    y = tl.zeros([LINES, BLOCK_OUT], tl.float32)
    start = p * work // count
    while start < (left + 1) * turns and p < count:
        end = (p + 1) * work // count
        if start < end:  # less work than programs leaves some without
            y += tl.load(
                parts
                + (2 * p + left - start // turns).to(tl.int64) * (BLOCK_OUT * BLOCK_IN)
                + inside
            )
        start = end
        p += 1
    if BIAS:
        y += tl.load(bias + tl.minimum(n, rows - 1)).to(tl.float32)[None, :]
    at = m.to(tl.int64)[:, None] * rows + n[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=(m < tokens)[:, None] & (n < rows)[None, :])


@jit
def summed(
    x,
    token,
    codes,
    scale,
    zero,
    table,
    n,
    end,
    first,
    last,
    columns,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TALL: tl.constexpr,
    NEST: tl.constexpr,
    ZERO: tl.constexpr,
    SIGNED: tl.constexpr,
    LATE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    TURN: tl.constexpr,
    PDL: tl.constexpr,
):
    """The rows from n to `end` times these tokens, over 64 bytes from the first to the last, TURN of them a turn of the
    loop: [BLOCK_OUT, BLOCK_IN] in float32."""
    UNIT: tl.constexpr = 512 // BITS
    TYPE: tl.constexpr = x.dtype.element_ty
    row = tl.minimum(n + tl.arange(0, BLOCK_OUT), end - 1)
    at_codes = (
        codes + row.to(tl.int64)[:, None] * (columns // UNIT * 32) + tl.arange(0, 32)[None, :]
    )
    at_x = x + token.to(tl.int64)[:, None] * columns + tl.arange(0, 64)[None, :]
    s, z = scales(
        scale,
        zero,
        table,
        n,
        end,
        first,
        columns,
        KIND,
        GROUP,
        TALL,
        NEST,
        ZERO,
        UNIT,
        BLOCK_OUT,
        WARPS,
    )
    planes = (0, 0, 0, 0, 0, 0, 0, 0)
    if KIND == "codebook":
        planes = byte_planes(table, TYPE)
    wait(PDL)
    y = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    for turn in tl.range(first, last, TURN, num_stages=STAGES):
        for b in tl.static_range(TURN):
            w = tl.load(at_codes + (turn + b) * 32)
            now = s
            less = z
            if GROUP > 0:  # one ahead
                s, z = scales(
                    scale,
                    zero,
                    table,
                    n,
                    end,
                    tl.minimum(turn + b + 1, last - 1),
                    columns,
                    KIND,
                    GROUP,
                    TALL,
                    NEST,
                    ZERO,
                    UNIT,
                    BLOCK_OUT,
                    WARPS,
                )
            v = weights(w, now, less, planes, table, TYPE, KIND, BITS, ZERO, SIGNED, LATE, ASSEMBLY)
            for pair in tl.static_range(UNIT // 64):
                a = fragment(v[2 * pair], v[2 * pair + 1], BLOCK_OUT, WARPS)
                y = tl.dot(a, tl.trans(tl.load(at_x + (turn + b) * UNIT + pair * 64)), y)
    y = tl.permute(
        tl.reshape(y, (BLOCK_OUT // (16 * WARPS), WARPS, 2, 8, BLOCK_IN)), (0, 2, 1, 3, 4)
    )
    y = tl.reshape(y, (BLOCK_OUT, BLOCK_IN))
    if LATE:
        y = y * tl.load(scale + shared(row, TALL)).to(tl.float32)[:, None]
    return y


@jit
def fragment(even, odd, BLOCK_OUT: tl.constexpr, WARPS: tl.constexpr):
    """[outputs, 32] twice -> [outputs, 64]: what a thread has read becomes what the matrix units want of that thread.
    Rows are then (.., warps, of two the one, 8) where they were (.., of two the one, warps, 8)."""
    v = tl.reshape(tl.join(even, odd), (BLOCK_OUT // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 2))
    return tl.reshape(tl.permute(v, (0, 2, 1, 3, 5, 7, 4, 6)), (BLOCK_OUT, 64))


@jit
def shared(row, TALL: tl.constexpr):
    if TALL == 0:
        return row * 0
    else:
        return row // TALL


@jit
def scales(
    scale,
    zero,
    table,
    n,
    end,
    b,
    columns,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    TALL: tl.constexpr,
    NEST: tl.constexpr,
    ZERO: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Of 64 bytes of the rows from n on, scales and zeros in float32: [outputs, 1, 2 or 4]. Never more of them at once
    than half the threads are, so that Triton has every thread load its own rather than pass them on."""
    s, z = of_rows(
        scale, zero, table, n, end, b, columns, KIND, GROUP, TALL, NEST, ZERO, UNIT, WARPS
    )
    if BLOCK_OUT > 16 * WARPS:
        n += 16 * WARPS
        t, u = of_rows(
            scale, zero, table, n, end, b, columns, KIND, GROUP, TALL, NEST, ZERO, UNIT, WARPS
        )
        s = tl.reshape(tl.permute(tl.join(s, t), (2, 0, 1)), (BLOCK_OUT, s.shape[1]))
        z = tl.reshape(tl.permute(tl.join(z, u), (2, 0, 1)), (BLOCK_OUT, z.shape[1]))
    return s, z


@jit
def of_rows(
    scale,
    zero,
    table,
    n,
    end,
    b,
    columns,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    TALL: tl.constexpr,
    NEST: tl.constexpr,
    ZERO: tl.constexpr,
    UNIT: tl.constexpr,
    WARPS: tl.constexpr,
):
    row = tl.minimum(n + tl.arange(0, 16 * WARPS), end - 1)[:, None]
    at = shared(row, TALL)
    if GROUP > 0:
        at = at * ((columns + GROUP - 1) // GROUP) + b * UNIT // GROUP
    k = b * UNIT
    s, z = loaded(scale, zero, table, at, row, k, columns, KIND, NEST, ZERO)
    if GROUP > 0 and GROUP * 4 == UNIT:
        s, z = loaded(
            scale, zero, table, at + tl.arange(0, 4)[None, :], row, k, columns, KIND, NEST, ZERO
        )
    elif GROUP > 0 and GROUP * 2 == UNIT:
        t, u = loaded(scale, zero, table, at + 1, row, k, columns, KIND, NEST, ZERO)
        s = tl.reshape(tl.join(s, t), (16 * WARPS, 2))
        z = tl.reshape(tl.join(z, u), (16 * WARPS, 2))
    return s, z


@jit
def loaded(
    scale,
    zero,
    table,
    at,
    row,
    k,
    columns,
    KIND: tl.constexpr,
    NEST: tl.constexpr,
    ZERO: tl.constexpr,
):
    if KIND == "codebook" and ZERO:
        s = largest(scale, zero, table, at, row, k, columns, NEST)
        return s, s
    else:
        s = tl.load(scale + at).to(tl.float32)
        return s, tl.load(zero + at).to(tl.float32) if ZERO else s


@jit
def spread(s, TYPE: tl.constexpr):
    """[outputs, spans] -> [outputs, 32]."""
    v = tl.broadcast_to(s.to(TYPE)[:, :, None], (s.shape[0], s.shape[1], 32 // s.shape[1]))
    return tl.reshape(v, (s.shape[0], 32))


# ---- weights of 64 bytes: two or four of [outputs, 32], one for each code of a halfword -----------------------------


@jit
def weights(
    w,
    s,
    z,
    planes,
    table,
    TYPE: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    SIGNED: tl.constexpr,
    LATE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    if KIND == "grid" and not ZERO:
        z = z * 0 + (1 << (BITS - 1))
    if ASSEMBLY is None:
        even = plainly(w, 0, s, z, table, TYPE, KIND, BITS, SIGNED, LATE)
        odd = plainly(w, 1, s, z, table, TYPE, KIND, BITS, SIGNED, LATE)
        if BITS == 8:
            return even, odd
        else:
            third = plainly(w, 2, s, z, table, TYPE, KIND, BITS, SIGNED, LATE)
            return even, odd, third, plainly(w, 3, s, z, table, TYPE, KIND, BITS, SIGNED, LATE)
    else:
        by = spread(s, TYPE)
        if KIND == "codebook":
            return tl.inline_asm_elementwise(
                ASSEMBLY,
                "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
                [
                    w,
                    by,
                    planes[0],
                    planes[1],
                    planes[2],
                    planes[3],
                    planes[4],
                    planes[5],
                    planes[6],
                    planes[7],
                ],
                (by.dtype, by.dtype, by.dtype, by.dtype),
                True,
                2,
            )
        elif KIND == "fp8":
            return tl.inline_asm_elementwise(
                ASSEMBLY, "=&r,=&r,r,r", [w, by], (by.dtype, by.dtype), True, 2
            )
        elif BITS == 8:
            more = spread((128.0 - z) * s, TYPE)
            return tl.inline_asm_elementwise(
                ASSEMBLY, "=&r,=&r,r,r,r", [w, by, more], (by.dtype, by.dtype), True, 2
            )
        else:  # the whole part of the zero is taken off before anything is rounded
            near = tl.minimum(tl.maximum(tl.floor(z + 0.5), 0.0), 127.0)
            above: tl.constexpr = 128.0 if tl.bfloat16 == TYPE else 1024.0
            less = spread(above + near, TYPE)
            more = spread((near - z) * s, TYPE)
            return tl.inline_asm_elementwise(
                ASSEMBLY,
                "=&r,=&r,=&r,=&r,r,r,r,r",
                [w, by, more, less],
                (by.dtype, by.dtype, by.dtype, by.dtype),
                True,
                2,
            )


@jit
def plainly(
    w,
    q: tl.constexpr,
    s,
    z,
    table,
    TYPE: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    SIGNED: tl.constexpr,
    LATE: tl.constexpr,
):
    """Code q of every halfword, as `assembly` has it."""
    code = (w.to(tl.int32) >> (BITS * q)) & ((1 << BITS) - 1)
    if KIND == "codebook":
        v = tl.load(table + code)
    elif KIND == "fp8":
        v = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif SIGNED:
        v = (code ^ 128).to(tl.float32) - spread(z, tl.float32)
    else:
        v = code.to(tl.float32) - spread(z, tl.float32)
    if not LATE:
        v = v * spread(s, tl.float32)
    return v.to(TYPE)


@lru_cache
def assembly(
    form: str, bits: int, signed: bool, dtype: torch.dtype, late: bool, waits: bool
) -> str:
    """Two or four pairs of weights out of a word of codes, two at a time throughout. Operands: the pairs; the word, the
    scale, what is to be added after it (of a grid), what is to be taken off before (of 4 bits) or the table's bytes.

    `waits`: the registers of the turn before may still be read by matrix units, which Triton does not see to.
    """
    short = dtype == torch.bfloat16
    kind = "bf16x2" if short else "f16x2"
    pairs = 4 if bits == 4 else 2
    word, scale, more, less = (f"${pairs + i}" for i in range(4))
    lines = [".reg .b32 w, t, u, m, la, lb, ha, hb, v0, v1, v2, v3;"]
    lines += ["wgmma.wait_group.sync.aligned 0;"] * waits + [f"mov.b32 w, {word};"]
    if form == "codebook":
        lines += LOOKED_UP
    elif (
        form == "fp8"
    ):  # the bits moved to where they belong; what is wrong with the exponent is a factor
        shift, mask, factor = (
            (4, "0x07f007f0", "0x7b807b80") if short else (1, "0x3f803f80", "0x5c005c00")
        )
        for q in range(2):
            lines += [
                f"shl.b32 t, w, {8 - 8 * q};",
                "and.b32 u, t, 0x80008000;",
                f"shr.u32 t, t, {shift};",
            ]
            lines += [
                f"lop3.b32 v{q}, t, {mask}, u, 0xEA;",
                f"mov.b32 m, {factor};",
                f"mul.rn.{kind} v{q}, v{q}, m;",
            ]
    elif bits == 4:
        for q in range(4):
            lines += [
                f"shr.u32 t, w, {4 * q};",
                f"lop3.b32 v{q}, t, 0x000f000f, {MAGIC[short]}, 0xEA;",
            ]
            lines += [f"sub.rn.{kind} v{q}, v{q}, {less};"]
    else:  # bfloat16 has seven bits beside the exponent; the eighth counts -128
        lines += ["xor.b32 w, w, 0x80808080;"] * (short != signed)
        low, high = ("0x007f007f", "0x00800080") if short else ("0x00ff00ff", "0x00800080")
        for q in range(2):
            lines += [f"shr.u32 t, w, {8 * q};", f"lop3.b32 v{q}, t, {low}, {MAGIC[short]}, 0xEA;"]
            lines += [
                f"lop3.b32 u, t, {high}, {MAGIC[short]}, 0xEA;"
                if short
                else "mov.b32 u, 0x64806480;"
            ]
            lines += [f"sub.rn.{kind} v{q}, v{q}, u;"]
    for q in range(pairs):
        if late:
            lines.append(f"mov.b32 ${q}, v{q};")
        else:
            times = f"fma.rn.{kind} ${q}, v{q}, {scale}, {more};"
            lines.append(times if form == "grid" else f"mul.rn.{kind} ${q}, v{q}, {scale};")
    return "\n".join(["{", *lines, "}"])


MAGIC = {
    True: "0x43004300",
    False: "0x64006400",
}  # 128 in bfloat16, 1024 in float16: the last bit counts one
# Sixteen values are too many for one permutation of bytes: both halves of the table are asked, low and high bytes
# apart, and the fourth bit of each code chooses between the answers. First bytes 0 and 2 of the word, then 1 and 3.
LOOKED_UP = [
    line.format(bytes=0x4420 + 0x11 * half, first=2 * half, second=2 * half + 1)
    for half in range(2)
    for line in (
        "prmt.b32 m, w, 0, {bytes};",
        "shr.u32 u, m, 1;",
        "and.b32 m, m, 0x7777;",
        "lop3.b32 u, u, 0x4444, 0x3210, 0xEA;",
        "prmt.b32 la, $6, $8, m;",
        "prmt.b32 lb, $10, $12, m;",
        "prmt.b32 ha, $14, $16, m;",
        "prmt.b32 hb, $18, $20, m;",
        "prmt.b32 la, la, lb, u;",
        "prmt.b32 ha, ha, hb, u;",
        "prmt.b32 v{first}, la, ha, 0x6240;",
        "prmt.b32 v{second}, la, ha, 0x7351;",
    )
]


@jit
def byte_planes(table, TYPE: tl.constexpr):
    """The low bytes of the sixteen values, four in a word, then the high ones."""
    a, e = four_bytes(table, TYPE)
    b, f = four_bytes(table + 4, TYPE)
    c, g = four_bytes(table + 8, TYPE)
    d, h = four_bytes(table + 12, TYPE)
    return a, b, c, d, e, f, g, h


@jit
def four_bytes(table, TYPE: tl.constexpr):
    low = 0
    high = 0
    for j in tl.static_range(4):
        value = tl.load(table + j).to(TYPE).to(tl.uint16, bitcast=True).to(tl.int32)
        low |= (value & 255) << (8 * j)
        high |= (value >> 8) << (8 * j)
    return low, high


@jit
def add_up_kernel(
    parts,
    bias,
    out,
    rows,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    tokens = tl.num_programs(0).to(tl.int64)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    y = tl.zeros([WIDTH], tl.float32)
    for part in tl.static_range(SPLITS):
        y += tl.load(parts + (part * tokens + token) * rows + i, mask=i < rows, other=0.0)
    if BIAS:
        y += tl.load(bias + i, mask=i < rows, other=0.0).to(tl.float32)
    tl.store(out + token * rows + i, y.to(out.dtype.element_ty), mask=i < rows)
