"""A product of dozens of tokens with a matrix of fewer bits: unpacked in registers, multiplied by the matrix units.

The weights are the left factor, straight from registers; the tokens, which are few, the right one. A word holds eight
columns of a row, and which columns meet in one step of the matrix units is free to choose: so step j takes code j of
sixteen neighbouring words, and the tokens are put into that order beforehand (`arrange`), where their sums are taken
too. Codes stay what a mask makes of them, 128 + code in bfloat16 or 1024 + code in float16; scales, and what is too
much, are applied to the sums of a block of columns. Where several scales fall into a block, its tokens come once for
each with zeros in the others' places: the matrix units have time.

Short matrices are cut along their columns as well, and the parts added up in their order. This file must not know
layers, formats or what a model is.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from bloomery.kernels.launch import begin, jit, overlap, power_of_two, processors, tl, wait
from bloomery.kernels.packed import Codebook, Grid, Packed
from bloomery.kernels.packed_gemv import Layout, layout

WIDTH = 128  # columns taken at once
PROGRAMS = 5  # a processor should have, at the least


class Tiling(NamedTuple):
    tokens: int
    outputs: int
    warps: int
    stages: int
    splits: int


@lru_cache(maxsize=4096)
def tiling(tokens: int, rows: int, columns: int, scales: int, count: int) -> Tiling:
    """For `count` processors; the more `scales` fall into one block of columns, the more memory the tokens take."""
    wide = min(max(16, power_of_two(tokens)), 128 // scales)
    programs = -(-rows // 64) * -(-tokens // wide)
    splits = 1
    while programs * splits < PROGRAMS * count and columns // WIDTH >= 8 * splits and splits < 8:
        splits *= 2
    return Tiling(wide, 64, 2 if wide <= 64 else 4, 4 if scales == 1 else 3, splits)


def possible(packed: Packed) -> bool:
    how, (_, columns) = layout(packed), packed.shape
    fits = how.group % WIDTH == 0 or (how.kind != "fp8" and how.group in (32, 64)) or how.group >= columns
    return columns % WIDTH == 0 and packed.codes.is_contiguous() and fits and how.bits in (4, 8)


def packed_product(
    x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None, cut: Tiling | None = None
) -> torch.Tensor:
    """The kernels: x [tokens, in] -> [tokens, out]."""
    (tokens, columns), rows, how = x.shape, packed.shape[0], layout(packed)
    cut = cut or tiling(tokens, rows, columns, max(1, WIDTH // how.group), processors(x.device))
    order = packed.order if isinstance(packed, Grid) else None
    x, sums = arrange(x, how, order)
    out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    parts = out
    if cut.splits > 1:
        parts = torch.empty(cut.splits, tokens, rows, dtype=torch.float32, device=x.device)
    planes = byte_planes(packed.table, x.dtype) if isinstance(packed, Codebook) else x
    blocks = columns // WIDTH
    codes = how.codes.view(torch.int32 if how.bits == 4 else torch.int8 if how.signed else torch.uint8)
    packed_gemm_kernel[(-(-rows // cut.outputs), -(-tokens // cut.tokens), cut.splits)](
        x, codes, how.scale, x if how.zero is None else how.zero, x if sums is None else sums,
        x if how.table is None else how.table, planes, x if bias is None else bias, parts, tokens,
        ROWS=rows, COLUMNS=columns, KIND=how.kind, BITS=how.bits, GROUP=min(how.group, columns), TALL=how.tall,
        ZERO=how.zero is not None, SIGNED=how.signed, BIAS=bias is not None, EACH=-(-blocks // cut.splits),
        SPLIT=cut.splits > 1, LANES=x.is_cuda, BLOCK_OUT=cut.outputs, BLOCK_IN=cut.tokens, STAGES=cut.stages,
        num_warps=cut.warps, **overlap(x.device),
    )  # fmt: skip
    if cut.splits > 1:
        add_up_kernel[(tokens, -(-rows // 1024))](
            parts, out if bias is None else bias, out, ROWS=rows, SPLITS=cut.splits, BIAS=bias is not None, WIDTH=1024,
            num_warps=4, **overlap(x.device),
        )  # fmt: skip
    return out


def byte_planes(table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[8] int32: the low bytes of the sixteen values in x's dtype, then the high ones."""
    return table.to(dtype).view(torch.uint8).view(16, 2).t().contiguous().view(torch.int32).flatten()


def arrange(x: torch.Tensor, how: Layout, order: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x as the kernel wants it, and its sums over the columns of a scale, or of a block [columns / those, tokens]."""
    mixed, summed = how.bits == 4, how.kind == "grid" and (how.bits == 4 or how.zero is not None)
    if not mixed and not summed and order is None:
        return x.contiguous(), None
    x = x.contiguous()
    tokens, columns = x.shape
    unit = min(how.group, WIDTH)
    out = torch.empty_like(x)
    sums = torch.empty(columns // unit, tokens, dtype=torch.float32, device=x.device)
    arrange_kernel[(tokens, -(-columns // 1024))](
        x, out if order is None else order, out, sums, tokens, COLUMNS=columns, MIXED=mixed, ORDER=order is not None,
        UNIT=unit, WIDTH=1024, num_warps=4, **overlap(x.device),
    )  # fmt: skip
    return out, sums


@jit(do_not_specialize=["tokens"])
def arrange_kernel(
    x, order, out, sums, tokens,
    COLUMNS: tl.constexpr, MIXED: tl.constexpr, ORDER: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Column 8 i + j of a block of 128 goes to place 16 j + i."""
    begin(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = k < COLUMNS
    source = k
    if ORDER:
        source = tl.load(order + k, mask=inside, other=0)
    v = tl.load(x + token * COLUMNS + source, mask=inside, other=0.0)
    place = k
    if MIXED:
        place = k // 128 * 128 + k % 8 * 16 + k % 128 // 8
    tl.store(out + token * COLUMNS + place, v, mask=inside)
    each = tl.sum(tl.reshape(v.to(tl.float32), (WIDTH // UNIT, UNIT)), 1)
    u = tl.program_id(1) * (WIDTH // UNIT) + tl.arange(0, WIDTH // UNIT)
    tl.store(sums + u * tokens + token, each, mask=u < COLUMNS // UNIT)


@jit(do_not_specialize=["tokens"])
def packed_gemm_kernel(
    x, codes, scale, zero, sums, table, planes, bias, out, tokens,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    TALL: tl.constexpr, ZERO: tl.constexpr, SIGNED: tl.constexpr, BIAS: tl.constexpr, EACH: tl.constexpr,
    SPLIT: tl.constexpr, LANES: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_OUT outputs of BLOCK_IN tokens, over EACH blocks of 128 columns. Sums are [outputs, tokens]."""
    begin(PDL)
    n = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    m = tl.program_id(1) * BLOCK_IN + tl.arange(0, BLOCK_IN)
    row, token = tl.minimum(n, ROWS - 1), tl.minimum(m, tokens - 1)
    first = tl.program_id(2) * EACH
    last = tl.minimum(first + EACH, COLUMNS // 128)
    at_scale = row // TALL * (COLUMNS // GROUP)
    HALVES: tl.constexpr = 1 if GROUP >= 128 else 128 // GROUP
    OFFSET: tl.constexpr = KIND == "grid" and (BITS == 4 or ZERO)
    DIRECT: tl.constexpr = GROUP == COLUMNS and not OFFSET
    PLACES: tl.constexpr = 16 if BITS == 4 else 128
    i = tl.arange(0, PLACES)
    at_codes = codes + row.to(tl.int64)[:, None] * (COLUMNS // 128 * PLACES) + i[None, :]
    at_x = x + token.to(tl.int64)[None, :] * COLUMNS + i[:, None]
    wait(PDL)
    y = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    for b in tl.range(first, last, num_stages=STAGES):
        w = tl.load(at_codes + b * PLACES)
        for h in tl.static_range(HALVES):
            acc = y if DIRECT else tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
            if BITS == 4:
                if KIND == "codebook":
                    low, high = looked_up(w, planes, table, x.dtype.element_ty, LANES)
                for j in tl.static_range(8):
                    if KIND == "codebook":
                        a = one_of(low if j < 4 else high, j % 4, x.dtype.element_ty)
                    else:
                        a = masked(w, j, x.dtype.element_ty)
                    if HALVES == 1:
                        v = tl.load(at_x + b * 128 + j * 16)
                    else:
                        v = tl.load(at_x + b * 128 + j * 16, mask=(i // (16 // HALVES) == h)[:, None], other=0.0)
                    acc = tl.dot(a, v, acc)
            else:
                acc = tl.dot(eight_bits(w, x.dtype.element_ty, KIND, SIGNED), tl.load(at_x + b * 128), acc)
            if OFFSET:
                less = excess(x.dtype.element_ty, BITS) + middle(zero, at_scale, b, h, BITS, GROUP, ZERO, HALVES)
                acc -= less[:, None] * tl.load(sums + (b * HALVES + h) * tokens + token)[None, :]
            if DIRECT:
                y = acc
            else:
                y += acc * tl.load(scale + at_scale + (b * 128 + h * (128 // HALVES)) // GROUP).to(tl.float32)[:, None]
    if DIRECT:
        y = y * tl.load(scale + at_scale).to(tl.float32)[:, None]
    here = (n < ROWS)[:, None] & (m < tokens)[None, :]
    at = m.to(tl.int64)[None, :] * ROWS + n[:, None]
    if SPLIT:
        tl.store(out + tl.program_id(2).to(tl.int64) * tokens * ROWS + at, y, mask=here)
    else:
        if BIAS:
            y += tl.load(bias + row).to(tl.float32)[:, None]
        tl.store(out + at, y.to(out.dtype.element_ty), mask=here)


@jit
def masked(w, j: tl.constexpr, TYPE: tl.constexpr):
    """128 + code j, or 1024 + code j in float16."""
    MAGIC: tl.constexpr = 0x4300 if tl.bfloat16 == TYPE else 0x6400
    return (((w >> (4 * j)) & 15) | MAGIC).to(tl.int16).to(TYPE, bitcast=True)


@jit
def excess(TYPE: tl.constexpr, BITS: tl.constexpr):
    """What `masked` and `eight_bits` have more than the code."""
    if BITS == 8:
        return -128.0
    elif tl.bfloat16 == TYPE:
        return 128.0
    else:
        return 1024.0


@jit
def middle(
    zero, at, b, h: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, HALVES: tl.constexpr
):
    if ZERO:
        return tl.load(zero + at + (b * 128 + h * (128 // HALVES)) // GROUP).to(tl.float32)
    else:
        return (at * 0 + (1 << (BITS - 1))).to(tl.float32)


@jit
def eight_bits(w, TYPE: tl.constexpr, KIND: tl.constexpr, SIGNED: tl.constexpr):
    """8-bit floats, or codes less 128."""
    if KIND == "fp8":
        return w.to(tl.float8e4nv, bitcast=True).to(TYPE)
    elif SIGNED:
        return w.to(TYPE)
    else:
        return (w ^ 128).to(tl.int8, bitcast=True).to(TYPE)


@jit
def one_of(values, j: tl.constexpr, TYPE: tl.constexpr):
    return (values >> (16 * j)).to(tl.int16).to(TYPE, bitcast=True)


@jit
def looked_up(w, planes, table, TYPE: tl.constexpr, LANES: tl.constexpr):
    """The values of the eight codes of w, four in an int64."""
    if LANES:
        return four_values(w, planes), four_values(w >> 16, planes)
    else:
        return four_loaded(w, table, TYPE), four_loaded(w >> 16, table, TYPE)


@jit
def four_loaded(w, table, TYPE: tl.constexpr):
    values = (w * 0).to(tl.int64)
    for j in tl.static_range(4):
        value = tl.load(table + ((w >> (4 * j)) & 15)).to(TYPE).to(tl.int16, bitcast=True)
        values |= (value.to(tl.int64) & 0xFFFF) << (16 * j)
    return values


@jit
def four_values(w, planes):
    """Of the four lowest codes of w. Sixteen values are too many for one permutation of bytes: both halves of the table
    are asked, low and high bytes apart, and the fourth bit of each code chooses between the answers."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 sel, which, la, lb, ha, hb;
        and.b32 sel, $1, 0x7777;
        shr.u32 which, $1, 1;
        lop3.b32 which, which, 0x4444, 0x3210, 0xEA;
        prmt.b32 la, $2, $3, sel;
        prmt.b32 lb, $4, $5, sel;
        prmt.b32 ha, $6, $7, sel;
        prmt.b32 hb, $8, $9, sel;
        prmt.b32 la, la, lb, which;
        prmt.b32 ha, ha, hb, which;
        prmt.b32 lb, la, ha, 0x5140;
        prmt.b32 hb, la, ha, 0x7362;
        mov.b64 $0, {lb, hb};
        }""",
        "=l,r,r,r,r,r,r,r,r,r",
        [
            w, tl.load(planes), tl.load(planes + 1), tl.load(planes + 2), tl.load(planes + 3),
            tl.load(planes + 4), tl.load(planes + 5), tl.load(planes + 6), tl.load(planes + 7),
        ],
        tl.int64, True, 1,
    )  # fmt: skip


@jit
def add_up_kernel(
    parts, bias, out, ROWS: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    wait(PDL)
    token, tokens = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    y = tl.zeros([WIDTH], tl.float32)
    for part in tl.static_range(SPLITS):
        y += tl.load(parts + (part * tokens + token) * ROWS + i, mask=i < ROWS, other=0.0)
    if BIAS:
        y += tl.load(bias + i, mask=i < ROWS, other=0.0).to(tl.float32)
    tl.store(out + token * ROWS + i, y.to(out.dtype.element_ty), mask=i < ROWS)
