"""A product of few tokens with a matrix of fewer bits, and what stands around it: kernels/gemv for packed weights.

The fewer the bytes, the more the unpacking counts: a memory that delivers 4.2 TB/s brings eight and a half thousand
billion 4-bit codes a second, and a card has about four instructions for each. So no code is ever converted. Where
`by_dots` says so, the tokens' numbers are rounded to 16 bits of the largest of their chunk instead (short floats have
fewer), and the card multiplies and adds four bytes of codes at once, with the high and with the low bytes of them.
Elsewhere a code is masked where it stands: its bits are a float below the least normal one, the code times a power of
two that its place gives, and the tokens' numbers come multiplied by the rest. 8-bit floats are converted by the card,
two at a time. A codebook's values lie in the lanes of a warp, and a code is the lane to ask.

A thread reads 16 bytes of a row at once and all numbers of a token that belong to them; nothing passes between threads
before the last sum. Scales are applied to the sums of those 16 bytes, or to the whole sum where a row has but one.

This file must not know layers, formats or what a model is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from bloomery.kernels.gemv import Activation, After, Heads, Norm, ends, finish, rows_of
from bloomery.kernels.launch import begin, hopper, jit, overlap, power_of_two, tl, wait
from bloomery.kernels.packed import BLOCK, Codebook, Fp8, Grid, Packed


class Tiling(NamedTuple):
    """A program makes `outputs` results (from twice as many rows where rows pair up) and reads `chunks` of 16 bytes of
    each row at once: 32 chunks a warp."""

    outputs: int
    chunks: int
    warps: int
    ahead: bool = False  # tokens are read one turn ahead, which takes registers


# Measured (benchmarks/packed.py tune); (rows, bytes of a row) -> the best cut. By dots:
DOTS: Mapping[tuple[int, int], Tiling] = {
    (6400, 3072): Tiling(4, 64, 2),
    (6144, 3072): Tiling(8, 64, 2, True),
    (24576, 3072): Tiling(16, 64, 2),
    (6144, 12288): Tiling(16, 128, 4),
    (6144, 2048): Tiling(8, 128, 4),
    (4096, 2048): Tiling(16, 128, 4),
    (28672, 2048): Tiling(8, 128, 4),
    (4096, 7168): Tiling(8, 128, 4),
    (6400, 6144): Tiling(4, 128, 4),
    (6144, 6144): Tiling(8, 128, 4),
    (24576, 6144): Tiling(16, 128, 4),
    (6144, 24576): Tiling(16, 128, 4),
    (6144, 4096): Tiling(8, 128, 4),
    (4096, 4096): Tiling(4, 128, 4, True),
    (28672, 4096): Tiling(8, 128, 4),
    (4096, 14336): Tiling(4, 128, 4),
}


# By masks, and of codebooks.
TILINGS: Mapping[tuple[int, int], Tiling] = {
    (6400, 3072): Tiling(4, 64, 2, True),
    (6144, 3072): Tiling(8, 64, 2, True),
    (24576, 3072): Tiling(8, 64, 2),
    (6144, 12288): Tiling(8, 128, 4, True),
    (6144, 2048): Tiling(8, 128, 4),
    (4096, 2048): Tiling(4, 128, 4),
    (28672, 2048): Tiling(8, 128, 4),
    (4096, 7168): Tiling(8, 128, 4, True),
}


# The same of 8-bit floats, which take more instructions.
FLOATS: Mapping[tuple[int, int], Tiling] = {
    (6400, 6144): Tiling(4, 128, 4),
    (6144, 6144): Tiling(8, 128, 4),
    (24576, 6144): Tiling(8, 128, 4),
    (6144, 24576): Tiling(8, 128, 4),
    (6144, 4096): Tiling(4, 64, 2, True),
    (4096, 4096): Tiling(4, 128, 4),
    (28672, 4096): Tiling(4, 128, 4),
    (4096, 14336): Tiling(4, 128, 4, True),
}


class Layout(NamedTuple):
    """What the kernel is told of a packed matrix."""

    kind: str  # grid, codebook or fp8
    bits: int
    codes: torch.Tensor  # [out, in * bits / 8], of any 8-bit type
    scale: torch.Tensor
    zero: torch.Tensor | None  # of a grid; of a codebook whose scales are codes: Codebook.outer
    table: torch.Tensor | None
    group: int  # columns that share a scale
    tall: int  # rows that do
    signed: bool
    nest: int = 0  # columns that share a factor of their scales; 0: all


def layout(packed: Packed) -> Layout:
    codes = packed.codes
    columns = packed.shape[1]
    match packed:
        case Grid():
            signed = packed.codes.dtype == torch.int8
            return Layout(
                "grid", packed.bits, codes, packed.scale, packed.zero, None, packed.group, 1, signed
            )
        case Codebook():
            given = packed.absmax, packed.outer, packed.table
            nest = packed.nest if packed.nest < columns else 0
            return Layout("codebook", 4, codes, *given, packed.block, 1, False, nest)
        case Fp8():
            whole = packed.shape[0] if packed.scale.numel() == 1 else 1
            tall, group = (BLOCK, BLOCK) if packed.blocks else (whole, columns)
            return Layout("fp8", 8, codes, packed.scale, None, None, group, tall, False)


def possible(packed: Packed, after: After = None) -> bool:
    """Whether the kernel can: rows of whole 16 bytes, none of which straddles two scales."""
    if isinstance(packed, Grid) and (packed.order is not None or packed.bits not in (4, 8)):
        return False
    codes = packed.codes
    columns = packed.shape[1]
    each = 16 * columns // max(codes.shape[1], 1)
    group = (
        BLOCK
        if isinstance(packed, Fp8)
        else packed.block
        if isinstance(packed, Codebook)
        else packed.group
    )
    if codes.shape[1] % 16 or not codes.is_contiguous() or (group < columns and group % each):
        return False
    if isinstance(after, Heads):
        plain = after.turn.norm is None and after.turn.clip is None
        whole = (
            after.cache[0].is_contiguous() and after.cache.element_size() > 1
        )  # 8 bits need a head's largest number
        return plain and after.cache.shape[-1] % 2 == 0 and whole
    return True


def tiling(rows: int, width: int, paired: bool, tokens: int = 1, kind: str = "grid") -> Tiling:
    """For rows of `width` bytes, as measured or by a rule."""
    measured = {"dots": DOTS, "fp8": FLOATS}.get(kind, TILINGS)
    if tokens == 1 and (rows, width) in measured:
        return measured[rows, width]
    chunks = width // 16
    size = 128 if chunks >= 512 or chunks == 128 else 64
    while size > 32 and chunks < size:
        size //= 2
    outputs = 4 if paired and chunks > size else 8
    return Tiling(outputs, size, size // 32, tokens == 1 and chunks > size and rows < 16384)


def by_dots(how: Layout, dtype: torch.dtype) -> bool:
    """Whether codes are multiplied four at a time, as whole numbers: 16 bits hold what short floats say."""
    return how.kind == "grid" and dtype.itemsize == 2


def packed_rows(
    x: torch.Tensor,
    packed: Packed,
    bias: torch.Tensor | None = None,
    before: Norm | None = None,
    after: After = None,
    cut: Tiling | None = None,
    visits: torch.Tensor | None = None,
    experts: int = 0,
) -> torch.Tensor:
    """The kernel: after(before(x) @ matrix.T + bias), where a norm before is of the root mean square.

    With `visits` the matrix is that of so many experts, one below the other: see gemv.product_rows.
    """
    x = x.contiguous()
    (tokens, columns) = x.shape
    rows = packed.shape[0] // max(experts, 1)
    how = layout(packed)
    lines = tokens if visits is None else visits.numel()
    share = lines // tokens
    tokens = tokens if visits is None else 1
    paired = isinstance(after, Heads) or (isinstance(after, Activation) and after.gated)
    outputs = rows // 2 if paired else rows
    dots = by_dots(how, x.dtype)
    cut = cut or tiling(rows, how.codes.shape[1], paired, tokens, "dots" if dots else how.kind)
    end = ends(x, after, rows, (lines, outputs), x.dtype)
    weight = None if before is None else before.weight
    given = (how.zero, how.table, visits, bias, weight)
    packed_gemv_kernel[(-(-outputs // cut.outputs), lines if experts else 1)](
        x,
        how.codes.view(torch.int32),
        how.scale,
        *(x if part is None else part for part in given),
        *end.tensors,
        0.0 if before is None else before.eps,
        *end.numbers,
        OUTPUTS=outputs,
        COLUMNS=columns,
        TOKENS=tokens,
        TOKENS_UP=power_of_two(tokens),
        EXPERTS=experts,
        SHARE=share,
        KIND=how.kind,
        BITS=how.bits,
        GROUP=how.group,
        TALL=how.tall,
        NEST=how.nest,
        ZERO=how.zero is not None,
        SIGNED=how.signed,
        BIAS=bias is not None,
        NORM=before is not None,
        NORM_WEIGHT=weight is not None,
        PAIRED=paired,
        **end.choices,
        DOTS=dots,
        AHEAD=cut.ahead,
        BLOCK_OUT=cut.outputs,
        LANES=hopper(x.device) if how.kind == "fp8" else x.is_cuda,
        BLOCK_IN=cut.chunks,
        num_warps=cut.warps,
        **overlap(x.device),
    )
    return end.tensors[-1]


@jit
def packed_gemv_kernel(
    x,
    codes,
    scale,
    zero,
    table,
    visits,
    bias,
    norm_weight,
    other,
    slots,
    positions,
    cos,
    sin,
    out,
    eps,
    factor,
    half,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    TOKENS_UP: tl.constexpr,
    EXPERTS: tl.constexpr,
    SHARE: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TALL: tl.constexpr,
    NEST: tl.constexpr,
    ZERO: tl.constexpr,
    SIGNED: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    NORM_WEIGHT: tl.constexpr,
    PAIRED: tl.constexpr,
    AFTER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TABLES: tl.constexpr,
    LANES: tl.constexpr,
    DOTS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles are [chunks, tokens, outputs], so that a warp lies along the chunks: 16 bytes of a row, EACH columns."""
    begin(PDL)
    EACH: tl.constexpr = 128 // BITS
    CHUNKS: tl.constexpr = COLUMNS // EACH
    GROUPED: tl.constexpr = GROUP < COLUMNS
    p = tl.program_id(0).to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = (
        p if OUTPUTS % BLOCK_OUT == 0 else tl.minimum(p, OUTPUTS - 1)
    )  # else rows are as far apart as they look
    first, second = rows_of(row, OUTPUTS, DIM, TURNED, INTERLEAVED, AFTER)
    if EXPERTS > 0:
        wait(PDL)  # the experts are news of this step
        visit = tl.program_id(1).to(tl.int64)
        expert = tl.load(visits + visit)
        expert = tl.where((expert >= 0) & (expert < EXPERTS), expert, 0) * (
            OUTPUTS * (2 if PAIRED else 1)
        )
        first = first + expert
        second = second + expert
        x += visit // SHARE * COLUMNS
        out += visit * OUTPUTS
    m = tl.arange(0, TOKENS_UP)
    c = tl.arange(0, BLOCK_IN)
    i = c[:, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    at_first = codes + first[None, None, :, None] * (CHUNKS * 4) + i
    at_second = codes + second[None, None, :, None] * (CHUNKS * 4) + i
    a = chunk(at_first, 0, c, CHUNKS)
    b = a
    a_scale, a_zero = scales(
        scale, zero, table, first, 0, c, KIND, COLUMNS, EACH, GROUP, TALL, NEST, ZERO
    )
    b_scale = a_scale
    b_zero = a_zero
    if PAIRED:
        b = chunk(at_second, 0, c, CHUNKS)
        b_scale, b_zero = scales(
            scale, zero, table, second, 0, c, KIND, COLUMNS, EACH, GROUP, TALL, NEST, ZERO
        )
    values = c[:, None, None]
    if KIND == "codebook":
        values = tl.load(table + c % 16)[:, None, None]
    wait(PDL)
    at_x = x + tl.minimum(m, TOKENS - 1)[None, :, None, None] * COLUMNS
    at_x += c[:, None, None, None] * EACH + tl.arange(0, 8)[None, None, None, :]
    if AHEAD:
        x0, x1, x2, x3 = tokens_of(at_x, 0, c, COLUMNS, EACH)
    y = tl.zeros([BLOCK_IN, TOKENS_UP, BLOCK_OUT], tl.float32)
    z = y
    square = tl.zeros([BLOCK_IN, TOKENS_UP, 1], tl.float32)
    plain = square  # sums of x: without groups over all chunks
    for c0 in tl.range(0, CHUNKS, BLOCK_IN, num_stages=1):
        a_now = a
        b_now = b
        a_by = a_scale
        b_by = b_scale
        a_less = a_zero
        b_less = b_zero
        if AHEAD:
            now0 = x0
            now1 = x1
            now2 = x2
            now3 = x3
            x0, x1, x2, x3 = tokens_of(at_x, c0 + BLOCK_IN, c, COLUMNS, EACH)
        else:
            now0, now1, now2, now3 = tokens_of(at_x, c0, c, COLUMNS, EACH)
        a = chunk(at_first, c0 + BLOCK_IN, c, CHUNKS)
        if GROUPED:
            a_scale, a_zero = scales(
                scale,
                zero,
                table,
                first,
                c0 + BLOCK_IN,
                c,
                KIND,
                COLUMNS,
                EACH,
                GROUP,
                TALL,
                NEST,
                ZERO,
            )
        if PAIRED:
            b = chunk(at_second, c0 + BLOCK_IN, c, CHUNKS)
            if GROUPED:
                b_scale, b_zero = scales(
                    scale,
                    zero,
                    table,
                    second,
                    c0 + BLOCK_IN,
                    c,
                    KIND,
                    COLUMNS,
                    EACH,
                    GROUP,
                    TALL,
                    NEST,
                    ZERO,
                )
        a0, a1, a2, a3 = four(a_now, BLOCK_OUT, BLOCK_IN, SIGNED)
        b0, b1, b2, b3 = four(b_now, BLOCK_OUT, BLOCK_IN, SIGNED)
        if GROUPED:
            y_part = tl.zeros([BLOCK_IN, TOKENS_UP, BLOCK_OUT], tl.float32)
            z_part = y_part
            plain = tl.zeros([BLOCK_IN, TOKENS_UP, 1], tl.float32)
        else:
            y_part = y
            z_part = z
        at_weight = (
            norm_weight
            + (c0 + c)[:, None, None, None] * EACH
            + tl.arange(0, 8)[None, None, None, :]
        )
        inside = ((c0 + c) * EACH < COLUMNS)[:, None, None, None]
        if DOTS:
            v0, square = given(
                now0, square, at_weight, inside, NORM, NORM_WEIGHT, TOKENS_UP, BLOCK_IN
            )
            v1, square = given(
                now1, square, at_weight + 8, inside, NORM, NORM_WEIGHT, TOKENS_UP, BLOCK_IN
            )
            v2 = v0
            v3 = v1
            if BITS == 4:
                v2, square = given(
                    now2, square, at_weight + 16, inside, NORM, NORM_WEIGHT, TOKENS_UP, BLOCK_IN
                )
                v3, square = given(
                    now3, square, at_weight + 24, inside, NORM, NORM_WEIGHT, TOKENS_UP, BLOCK_IN
                )
            unit, high, low, all_high, all_low = in_bytes(v0, v1, v2, v3, BITS, LANES)
            none = tl.zeros([BLOCK_IN, TOKENS_UP, BLOCK_OUT], tl.int32)
            y_part += unit * dots((a0, a1, a2, a3), high, low, none, BITS, LANES)
            if PAIRED:
                z_part += unit * dots((b0, b1, b2, b3), high, low, none, BITS, LANES)
            plain += unit * (all_high * 256 + all_low).to(tl.float32)
        else:
            for piece in tl.static_range(EACH // 8):
                now = pick4(now0, now1, now2, now3, piece)
                v, square = given(
                    now,
                    square,
                    at_weight + piece * 8,
                    inside,
                    NORM,
                    NORM_WEIGHT,
                    TOKENS_UP,
                    BLOCK_IN,
                )
                if KIND == "grid":
                    plain += (v[0] + v[1] + v[2] + v[3]) + (v[4] + v[5] + v[6] + v[7])
                    v = placed(v, BITS)
                if BITS == 4:
                    y_part = eight4(
                        y_part, pick4(a0, a1, a2, a3, piece), v, values, table, KIND, LANES
                    )
                    if PAIRED:
                        z_part = eight4(
                            z_part, pick4(b0, b1, b2, b3, piece), v, values, table, KIND, LANES
                        )
                else:
                    left = pick4(a0, a1, a2, a3, 2 * piece)
                    right = pick4(a0, a1, a2, a3, 2 * piece + 1)
                    y_part = eight8(y_part, left, right, v, KIND, LANES)
                    if PAIRED:
                        left = pick4(b0, b1, b2, b3, 2 * piece)
                        right = pick4(b0, b1, b2, b3, 2 * piece + 1)
                        z_part = eight8(z_part, left, right, v, KIND, LANES)
        if GROUPED:
            y += a_by * centred(y_part, plain, a_less, KIND, BITS, ZERO, DOTS)
            if PAIRED:
                z += b_by * centred(z_part, plain, b_less, KIND, BITS, ZERO, DOTS)
        else:
            y = y_part
            z = z_part
    y = tl.sum(y, 0)
    z = tl.sum(z, 0)
    if not GROUPED:
        plain = tl.sum(plain, 0)
        a_scale, a_zero = whole(scale, zero, first, TALL, ZERO)
        y = a_scale * centred(y, plain, a_zero, KIND, BITS, ZERO, DOTS)
        if PAIRED:
            b_scale, b_zero = whole(scale, zero, second, TALL, ZERO)
            z = b_scale * centred(z, plain, b_zero, KIND, BITS, ZERO, DOTS)
    if NORM:
        root = tl.rsqrt(tl.sum(square, 0) / COLUMNS + eps)
        y = y * root
        z = z * root
    if BIAS:
        y += tl.load(bias + first)[None, :].to(tl.float32)
        z += tl.load(bias + second)[None, :].to(tl.float32)
    finish(
        y,
        z,
        p,
        m,
        other,
        slots,
        positions,
        cos,
        sin,
        out,
        factor,
        half,
        OUTPUTS,
        TOKENS,
        PAIRED,
        AFTER,
        ACTIVATION,
        HEADS,
        KV_HEADS,
        DIM,
        TURNED,
        INTERLEAVED,
        TABLES,
    )


@jit
def chunk(at, c0, c, CHUNKS: tl.constexpr):
    """[chunks, 1, outputs, 4 words] from chunk c0 on; zeros past the end of the row."""
    inside = (c0 + c < CHUNKS)[:, None, None, None]
    return tl.load(at + c0 * 4, mask=inside, other=0, eviction_policy="evict_first")


@jit
def four(words, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, SIGNED: tl.constexpr):
    """The four words of every chunk, each [chunks, 1, outputs]. Signed bytes become those of 128 more."""
    if SIGNED:
        words = words ^ -2139062144
    even, odd = tl.split(tl.reshape(words, (BLOCK_IN, 1, BLOCK_OUT, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@jit
def pick4(a, b, c, d, i: tl.constexpr):
    if i < 2:
        return a if i == 0 else b
    else:
        return c if i == 2 else d


@jit
def tokens_of(at, c0, c, COLUMNS: tl.constexpr, EACH: tl.constexpr):
    """The numbers of every chunk from c0 on, eight at a time, each [chunks, tokens, 1, 8]; zeros past the end."""
    inside = ((c0 + c) * EACH < COLUMNS)[:, None, None, None]
    first = tl.load(at + c0 * EACH, mask=inside, other=0.0)
    second = tl.load(at + c0 * EACH + 8, mask=inside, other=0.0)
    if EACH == 32:
        third = tl.load(at + c0 * EACH + 16, mask=inside, other=0.0)
        return first, second, third, tl.load(at + c0 * EACH + 24, mask=inside, other=0.0)
    else:
        return first, second, c, c


@jit
def eight(v, TOKENS_UP: tl.constexpr, BLOCK_IN: tl.constexpr):
    """[chunks, tokens, 1, 8] as eight of [chunks, tokens, 1] in float32."""
    even, odd = tl.split(tl.reshape(v.to(tl.float32), (BLOCK_IN, TOKENS_UP, 1, 2, 2, 2)))
    even_low, even_high = tl.split(even)  # columns 0 4, 2 6
    odd_low, odd_high = tl.split(odd)  # 1 5, 3 7
    v0, v4 = tl.split(even_low)
    v2, v6 = tl.split(even_high)
    v1, v5 = tl.split(odd_low)
    v3, v7 = tl.split(odd_high)
    return v0, v1, v2, v3, v4, v5, v6, v7


@jit
def given(
    now,
    square,
    at_weight,
    inside,
    NORM: tl.constexpr,
    NORM_WEIGHT: tl.constexpr,
    TOKENS_UP: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Eight columns of every chunk, times the norm's weights; and the sum of the squares of what they were."""
    v = eight(now, TOKENS_UP, BLOCK_IN)
    if NORM:
        square += v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3]
        square += v[4] * v[4] + v[5] * v[5] + v[6] * v[6] + v[7] * v[7]
    if NORM_WEIGHT:
        v = times(v, eight(tl.load(at_weight, mask=inside, other=0.0), 1, BLOCK_IN))
    return v, square


@jit
def times(v, g):
    return (
        v[0] * g[0],
        v[1] * g[1],
        v[2] * g[2],
        v[3] * g[3],
        v[4] * g[4],
        v[5] * g[5],
        v[6] * g[6],
        v[7] * g[7],
    )


@jit
def placed(v, BITS: tl.constexpr):
    """Multiplied by what makes up for the place of their codes: a code that starts at bit b of a word is 2 ** (b - 149)
    times itself when read as a float; the product is left with 2 ** -45. What starts at bit 24 is read at 16."""
    ONE: tl.constexpr = 2.0**104
    if BITS == 4:
        return (
            v[0] * ONE,
            v[1] * (ONE / 2**4),
            v[2] * (ONE / 2**8),
            v[3] * (ONE / 2**12),
            v[4] * (ONE / 2**16),
            v[5] * (ONE / 2**20),
            v[6] * (ONE / 2**16),
            v[7] * (ONE / 2**20),
        )
    else:
        return (
            v[0] * ONE,
            v[1] * (ONE / 2**8),
            v[2] * (ONE / 2**16),
            v[3] * (ONE / 2**16),
            v[4] * ONE,
            v[5] * (ONE / 2**8),
            v[6] * (ONE / 2**16),
            v[7] * (ONE / 2**16),
        )


@jit
def masked(w, mask: tl.constexpr):
    """As a float: below the least normal one, or in its binade, where numbers are as far apart."""
    return (w & mask).to(tl.float32, bitcast=True)


@jit
def eight4(acc, w, v, values, table, KIND: tl.constexpr, LANES: tl.constexpr):
    """The eight codes of w, times v."""
    if KIND == "grid":
        for j in tl.static_range(6):
            acc += masked(w, 15 << (4 * j)) * v[j]
        w = w >> 8
        acc += masked(w, 15 << 16) * v[6]
        acc += masked(w, 15 << 20) * v[7]
    else:
        for j in tl.static_range(8):
            acc += looked_up(w >> (4 * j), values, table, LANES) * v[j]
    return acc


@jit
def looked_up(w, values, table, LANES: tl.constexpr):
    """The table's value for the lowest four bits. Lane l of every half warp holds value l: `values` by chunks."""
    if LANES:
        return tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 0x101f, 0xffffffff;",
            "=f,f,r",
            [values, w],
            tl.float32,
            True,
            1,
        )
    else:
        return tl.load(table + (w & 15))


@jit
def eight8(acc, left, right, v, KIND: tl.constexpr, LANES: tl.constexpr):
    """The four bytes of each word, times v."""
    if KIND == "fp8" and LANES:
        a = floats(left)
        b = floats(right)
        for j in tl.static_range(4):
            acc += a[j] * v[j]
        for j in tl.static_range(4):
            acc += b[j] * v[4 + j]
    else:
        for j in tl.static_range(4):
            acc += byte(left, j, KIND) * v[j]
        for j in tl.static_range(4):
            acc += byte(right, j, KIND) * v[4 + j]
    return acc


@jit
def floats(w):
    """The four 8-bit floats of a word, which the card converts two at a time."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 l, h, p, q, r, s;
        .reg .b32 a, b;
        mov.b32 {l, h}, $4;
        cvt.rn.f16x2.e4m3x2 a, l;
        cvt.rn.f16x2.e4m3x2 b, h;
        mov.b32 {p, q}, a;
        mov.b32 {r, s}, b;
        cvt.f32.f16 $0, p;
        cvt.f32.f16 $1, q;
        cvt.f32.f16 $2, r;
        cvt.f32.f16 $3, s;
        }""",
        "=&f,=&f,=&f,=&f,r",
        [w],
        (tl.float32, tl.float32, tl.float32, tl.float32),
        True,
        1,
    )


@jit
def byte(w, j: tl.constexpr, KIND: tl.constexpr):
    """Byte j as a float: as `placed` has it, or what an 8-bit float means."""
    if KIND == "fp8":
        return (((w << (24 - 8 * j)) >> 4) & -2014314496).to(tl.float32, bitcast=True) * 2.0**120
    elif j < 3:
        return masked(w, 255 << (8 * j))
    else:
        return masked(w >> 8, 255 << 16)


@jit
def in_bytes(v0, v1, v2, v3, BITS: tl.constexpr, LANES: tl.constexpr):
    """Numbers of a chunk, each [chunks, tokens, 1], in 16 bits: what one counts (no number where one is none), the high
    and the low bytes that meet each word of codes (of 4 bits the even columns, then the odd), and the sums of both."""
    most = tl.maximum(largest_of(v0), largest_of(v1), propagate_nan=tl.PropagateNan.ALL)
    if BITS == 4:
        most = tl.maximum(most, largest_of(v2), propagate_nan=tl.PropagateNan.ALL)
        most = tl.maximum(most, largest_of(v3), propagate_nan=tl.PropagateNan.ALL)
    by = 32767.0 / tl.maximum(most, 1e-30)
    h0, l0, h1, l1 = four_and_four(v0, by, BITS, LANES)
    h2, l2, h3, l3 = four_and_four(v1, by, BITS, LANES)
    if BITS == 4:
        h4, l4, h5, l5 = four_and_four(v2, by, BITS, LANES)
        h6, l6, h7, l7 = four_and_four(v3, by, BITS, LANES)
        return with_sums(
            most, (h0, h1, h2, h3, h4, h5, h6, h7), (l0, l1, l2, l3, l4, l5, l6, l7), 8, LANES
        )
    else:
        return with_sums(most, (h0, h1, h2, h3), (l0, l1, l2, l3), 4, LANES)


@jit
def with_sums(most, high, low, COUNT: tl.constexpr, LANES: tl.constexpr):
    ones = high[0] * 0 + 0x01010101
    all_high = high[0] * 0
    all_low = high[0] * 0
    for i in tl.static_range(COUNT):
        all_high = dot4(all_high, ones, high[i], True, LANES)
        all_low = dot4(all_low, ones, low[i], False, LANES)
    return most / 32767.0, high, low, all_high, all_low


@jit
def largest_of(v):
    most = tl.abs(v[0])
    for j in tl.static_range(1, 8):
        most = tl.maximum(most, tl.abs(v[j]), propagate_nan=tl.PropagateNan.ALL)
    return most


@jit
def four_and_four(v, by, BITS: tl.constexpr, LANES: tl.constexpr):
    """High and low bytes of v * by: of columns 0, 2, 4, 6 and of 1, 3, 5, 7 for codes of 4 bits, else of neighbours."""
    if BITS == 4:
        h, l = bytes_of(v[0], v[2], v[4], v[6], by, LANES)
        m, n = bytes_of(v[1], v[3], v[5], v[7], by, LANES)
    else:
        h, l = bytes_of(v[0], v[1], v[2], v[3], by, LANES)
        m, n = bytes_of(v[4], v[5], v[6], v[7], by, LANES)
    return h, l, m, n


@jit
def bytes_of(a, b, c, d, by, LANES: tl.constexpr):
    """Beside the exponent of 2 ** 23 the nearest whole number of a * by needs no conversion."""
    MAGIC: tl.constexpr = 12582912.0
    a = (a * by + MAGIC).to(tl.int32, bitcast=True)
    b = (b * by + MAGIC).to(tl.int32, bitcast=True)
    c = (c * by + MAGIC).to(tl.int32, bitcast=True)
    d = (d * by + MAGIC).to(tl.int32, bitcast=True)
    if LANES:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u;
            prmt.b32 t, $2, $3, 0x5410;
            prmt.b32 u, $4, $5, 0x5410;
            prmt.b32 $0, t, u, 0x7531;
            prmt.b32 $1, t, u, 0x6420;
            }""",
            "=&r,=&r,r,r,r,r",
            [a, b, c, d],
            (tl.int32, tl.int32),
            True,
            1,
        )
    else:
        high = (
            ((a >> 8) & 255)
            | (((b >> 8) & 255) << 8)
            | (((c >> 8) & 255) << 16)
            | (((d >> 8) & 255) << 24)
        )
        return high, (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | ((d & 255) << 24)


@jit
def dots(w, high, low, none, BITS: tl.constexpr, LANES: tl.constexpr):
    """Sums of codes times whole numbers, of each chunk [chunks, tokens, outputs]: below 2 ** 24 of 4 bits, so exact."""
    h = none
    l = none
    for i in tl.static_range(4):
        if BITS == 4:
            even = w[i] & 0x0F0F0F0F
            odd = (w[i] >> 4) & 0x0F0F0F0F
            h = dot4(dot4(h, even, high[2 * i], True, LANES), odd, high[2 * i + 1], True, LANES)
            l = dot4(dot4(l, even, low[2 * i], False, LANES), odd, low[2 * i + 1], False, LANES)
        else:
            h = dot4(h, w[i], high[i], True, LANES)
            l = dot4(l, w[i], low[i], False, LANES)
    return (h * 256 + l).to(tl.float32)


@jit
def dot4(acc, w, v, SIGNED: tl.constexpr, LANES: tl.constexpr):
    """acc + the four bytes of w times those of v, which may be signed."""
    if LANES:
        NAME: tl.constexpr = (
            "dp4a.u32.s32 $0, $1, $2, $3;" if SIGNED else "dp4a.u32.u32 $0, $1, $2, $3;"
        )
        return tl.inline_asm_elementwise(NAME, "=r,r,r,r", [w, v, acc], tl.int32, True, 1)
    else:
        for j in tl.static_range(4):
            part = ((v << (24 - 8 * j)) >> 24) if SIGNED else ((v >> (8 * j)) & 255)
            acc = acc + ((w >> (8 * j)) & 255) * part
        return acc


@jit
def centred(
    sums,
    plain,
    zero,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    DOTS: tl.constexpr,
):
    """Sums of values, from sums of codes as they were read, and the sum of x."""
    if KIND != "grid":
        return sums
    else:
        FACTOR: tl.constexpr = 1.0 if DOTS else 2.0**45
        return sums * FACTOR - plain * (zero if ZERO else (1 << (BITS - 1)))


@jit
def scales(
    scale,
    zero,
    table,
    rows,
    c0,
    c,
    KIND: tl.constexpr,
    COLUMNS: tl.constexpr,
    EACH: tl.constexpr,
    GROUP: tl.constexpr,
    TALL: tl.constexpr,
    NEST: tl.constexpr,
    ZERO: tl.constexpr,
):
    """Of every chunk from c0 on, [chunks, 1, outputs]."""
    groups: tl.constexpr = (COLUMNS + GROUP - 1) // GROUP
    g = tl.minimum((c0 + c) * EACH // GROUP, groups - 1)
    at = (rows // TALL)[None, None, :] * groups + g[:, None, None]
    if KIND == "codebook" and ZERO:
        s = largest(
            scale, zero, table, at, rows[None, None, :], g[:, None, None] * GROUP, COLUMNS, NEST
        )
        return s, s
    else:
        s = tl.load(scale + at).to(tl.float32)
        return s, tl.load(zero + at).to(tl.float32) if ZERO else s


@jit
def largest(codes, outer, table, at, row, column, columns, NEST: tl.constexpr):
    """The largest magnitude whose code is the one `at`, of a block at that column. NEST 0: a row has one factor."""
    value = tl.load(table + 16 + tl.load(codes + at))
    if NEST == 0:
        return value * tl.load(outer + 2 * row + 1) + tl.load(outer + 2 * row)
    else:
        at_row = outer + row * (1 + (columns + NEST - 1) // NEST)
        return value * tl.load(at_row + 1 + column // NEST) + tl.load(at_row)


@jit
def whole(scale, zero, rows, TALL: tl.constexpr, ZERO: tl.constexpr):
    """Of whole rows, [1, outputs]."""
    s = tl.load(scale + rows // TALL)[None, :].to(tl.float32)
    if ZERO:
        return s, tl.load(zero + rows)[None, :].to(tl.float32)
    else:
        return s, s
