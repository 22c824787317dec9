"""A product of hundreds of tokens with a matrix of 4 or 8 bits: weights unpacked while matrix units multiply others.

Arithmetic counts here, and what the matrix units wait for is lost. They read the weights, their left factor, from
registers: of 16 columns those are unpacked while the 16 before are multiplied, by the same threads, so that the next
product begins the moment one is done. Tokens and codes come by the copy engine into slots of shared memory, some
columns each, and a slot is filled again as soon as nobody reads it; what comes next may belong to the program's next
tile. The tokens stay in their order, for of every thread the matrix units want pairs of neighbouring columns, and a
pair of codes is read at once.

Tiles are taken in turn by as many programs as there are processors; of those that are left each program takes an equal
stretch, and who has a tile's first columns adds up what others made of it. Written in Gluon, Triton's lower floor,
where layouts, waits and copies are spelled out and no interpreter runs: its reference is packed.dequantize, by way of
benchmarks/packed.py check. Without it (`gluon` is None) kernels/packed_gemm multiplies. This file must not know layers,
formats or what a model is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeGuard

import torch

from bloomery.kernels.launch import hopper, overlap, processors
from bloomery.kernels.packed import Grid, Packed
from bloomery.kernels.packed_gemm import STRETCH, asynchronous

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if hasattr(tma, "async_load"):  # what they are called since Triton 3.7
        barrier = gl.barrier
        fetch = tma.async_load
        put = tma.async_store
    else:
        barrier = gl.thread_barrier
        fetch = tma.async_copy_global_to_shared
        put = tma.async_copy_shared_to_global
except ImportError:
    gluon = gl = None


def jit(function: Callable | None = None, **options: Any) -> Any:
    if gluon is None:
        return function if function is not None else lambda function: function
    return gluon.jit(function, **options)


OUTPUTS = 128  # of a tile


class Cut(NamedTuple):
    tokens: int  # of a tile
    span: int  # columns of a slot
    slots: int


TALL = Cut(256, 64, 4)
HALF = Cut(128, 128, 4)
# In columns of a tile of TALL: what a column of HALF takes, by bits; what it takes to add up stretches of either.
SMALL = {8: 0.66, 4: 0.75}
ADDING = {TALL: 1000, HALF: 450}
MOST = {
    8: 2048,
    4: 1024,
}  # bits -> tokens from more of which on unpacking all weights beforehand costs less


@lru_cache(maxsize=4096)
def cut_for(tokens: int, rows: int, columns: int, bits: int, count: int) -> Cut | None:
    """The quicker for `count` processors, by times measured on an H200 (benchmarks/packed.py bench); None: other
    kernels are quicker, or this one cannot."""
    down = -(-rows // OUTPUTS)
    if columns % 512 or not 64 < tokens <= MOST[bits]:
        return None
    if max(2, -(-tokens // 128)) * down * columns < STRETCH * count:
        return None
    if tokens <= 128:
        return None if bits == 4 and down >= count and columns < 6144 else HALF

    def time(cut: Cut) -> float:
        turn = cut.span * cut.slots
        most = -(
            -down * -(-tokens // cut.tokens) * (columns // turn) // count
        )  # turns of a program
        return most * turn * (1 if cut == TALL else SMALL[bits]) + ADDING[cut]

    return min(TALL, HALF, key=time)


def possible(packed: Packed, dtype: torch.dtype) -> TypeGuard[Grid]:
    """Whether the kernel can: codes of 8 bits with one scale a row, of 4 with one for 128 columns, 256 or a multiple of
    512, so that slots of a turn share theirs."""
    if (
        gluon is None
        or not isinstance(packed, Grid)
        or packed.order is not None
        or dtype.itemsize != 2
    ):
        return False
    if packed.shape[0] % 16 or not packed.codes.is_contiguous() or packed.codes.data_ptr() % 16:
        return False
    if not hopper(packed.codes.device) or not asynchronous(packed.codes.device):
        return False
    if packed.bits == 8:
        return (
            packed.codes.dtype == torch.int8
            and packed.group == packed.shape[1]
            and packed.zero is None
        )
    return packed.bits == 4 and (packed.group in (128, 256) or packed.group % 512 == 0)


def plan(tokens: int, packed: Packed, dtype: torch.dtype) -> Cut | None:
    """How to cut a product; None: it is not for this file."""
    if tokens <= 64 or not possible(packed, dtype):
        return None
    return cut_for(tokens, *packed.shape, packed.bits, processors(packed.codes.device))


def woven_product(
    x: torch.Tensor,
    packed: Packed,
    bias: torch.Tensor | None = None,
    cut: Cut | None = None,
    programs: int = 0,
) -> torch.Tensor:
    """The kernel: x [tokens, in] -> [tokens, out]. `programs`: at most one a processor, which 0 stands for, since they
    wait for each other."""
    if not possible(packed, x.dtype):
        raise TypeError(
            "this matrix has no interleaved product: packed_woven.possible says which have"
        )
    x = x.contiguous()
    (rows, columns) = packed.shape
    cut = cut or plan(len(x), packed, x.dtype) or TALL
    count = programs or processors(x.device)
    if count > processors(x.device) or columns % (cut.span * cut.slots):
        raise ValueError(
            f"{count} programs, {columns} columns: at most one a processor, and whole turns"
        )
    out = torch.empty(len(x), rows, dtype=x.dtype, device=x.device)
    rounds, rest = divmod(-(-len(x) // cut.tokens) * -(-rows // OUTPUTS), count)
    rest *= columns // (cut.slots * cut.span)
    sums = torch.empty(
        count if rest else 1, OUTPUTS, cut.tokens, dtype=torch.float32, device=x.device
    )
    codes = packed.codes.view(torch.int16) if packed.bits == 8 else packed.codes
    woven_kernel[(count,)](
        block(x, cut.tokens, cut.span),
        block(codes, OUTPUTS, cut.span // 2),
        block(out, cut.tokens, OUTPUTS),
        packed.scale,
        packed.scale if packed.zero is None else packed.zero,
        out if bias is None else bias,
        sums,
        given(x.device),
        len(x),
        rows,
        columns,
        rounds,
        rest,
        -(-rest // count),
        BITS=packed.bits,
        GROUP=packed.group if packed.bits == 4 else 0,
        ZERO=packed.zero is not None,
        BIAS=bias is not None,
        N=cut.tokens,
        SPAN=cut.span,
        SLOTS=cut.slots,
        **assembly(packed.bits, x.dtype),
        num_warps=8,
        **overlap(x.device),
    )
    return out


@cache
def given(device: torch.device) -> torch.Tensor:
    """Which programs have given a piece: zeros between launches. One for all of a device, so no two products may run at
    once: whoever calls them, in this process, does so on one stream of the device."""
    return torch.zeros(processors(device), dtype=torch.int32, device=device)


def block(matrix: torch.Tensor, lines: int, width: int) -> Any:
    """A matrix of which the copy engine moves blocks."""
    size = matrix.element_size()
    layout = gl.NVMMASharedLayout(min(width * size, 128), 8 * size, 2)
    return TensorDescriptor(
        matrix, list(matrix.shape), list(matrix.stride()), [lines, width], layout
    )


@lru_cache
def assembly(bits: int, dtype: torch.dtype) -> dict[str, str]:
    """UNPACK: two weights of a pair of codes; of 4 bits further operands say what is multiplied by, added then, and
    taken off before. DOUBLE: a float, rounded, in both halves of a word."""
    short = dtype == torch.bfloat16
    kind, magic = ("bf16x2", "0x43004300") if short else ("f16x2", "0x64006400")
    if bits == 4:
        lines = ["mad.lo.u32 v, $1, 0x1001, 0;", f"lop3.b32 v, v, 0x000f000f, {magic}, 0xEA;"]
        lines += [f"sub.rn.{kind} v, v, $4;", f"fma.rn.{kind} $0, v, $2, $3;"]
    elif short:  # seven bits beside the exponent; the eighth counts -128
        lines = ["prmt.b32 u, $1, 0, 0x4140;", f"lop3.b32 v, u, 0x007f007f, {magic}, 0xEA;"]
        lines += [f"lop3.b32 u, u, 0x00800080, {magic}, 0xEA;", f"sub.rn.{kind} $0, v, u;"]
    else:
        lines = ["prmt.b32 u, $1, 0, 0x4140;", "xor.b32 u, u, 0x00800080;"]
        lines += [
            f"lop3.b32 v, u, 0x00ff00ff, {magic}, 0xEA;",
            "mov.b32 u, 0x64806480;",
            f"sub.rn.{kind} $0, v, u;",
        ]
    return {"UNPACK": braced(lines), "DOUBLE": f"cvt.rn.{kind}.f32 $0, $1, $1;"}


def braced(lines: list[str]) -> str:
    return "\n".join(["{", ".reg .b32 v, u;", *lines, "}"])


# ---- which tile, which columns: a program's work is a row of stretches ----------------------------------------------


@jit
def stretch(i, work):
    """The i-th: its tile, its first and its last turn. A turn is all slots once."""
    p, count, rounds, start, end, turns, _ = work
    left = start // turns + i - rounds
    first = gl.where(i < rounds, 0, gl.maximum(start, left * turns) - left * turns)
    last = gl.where(i < rounds, turns, gl.minimum(end, (left + 1) * turns) - left * turns)
    return gl.where(i < rounds, i * count + p, rounds * count + left), first, last


@jit
def begun(i, work, N: gl.constexpr, SLOTS: gl.constexpr):
    """What is to be fetched: row, token, slot's columns, where they end; of which stretch."""
    tile, first, last = stretch(i, work)
    across = work[6]
    return tile // across * 128, tile % across * N, first * SLOTS, last * SLOTS, i


@jit
def onward(at, work, N: gl.constexpr, SLOTS: gl.constexpr):
    n, m, k, last, i = at
    k += 1
    if k == last:
        n, m, k, last, i = begun(i + 1, work, N, SLOTS)
    return n, m, k, last, i


# ---- slots: tokens, codes, and whether either is there --------------------------------------------------------------


@jit
def slot(x, codes):
    tokens = gl.allocate_shared_memory(x.dtype, x.block_type.shape, x.layout)
    weights = gl.allocate_shared_memory(codes.dtype, codes.block_type.shape, codes.layout)
    there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    here = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(there, count=1)
    mbarrier.init(here, count=1)
    return tokens, weights, there, here


@jit
def announce(x, codes, slot, wanted):
    mbarrier.expect(slot[2], x.block_type.nbytes, wanted)
    mbarrier.expect(slot[3], codes.block_type.nbytes, wanted)


@jit
def fetch_tokens(x, slot, at, wanted):
    fetch(x, [at[1], at[2] * x.block_type.shape[1]], slot[2], slot[0], wanted)


@jit
def fetch_codes(codes, slot, at, wanted):
    fetch(codes, [at[0], at[2] * codes.block_type.shape[1]], slot[3], slot[1], wanted)


# ---- weights --------------------------------------------------------------------------------------------------------


def pairs(SPAN):
    """Who holds which pairs of a slot's codes [128, SPAN / 2]: what the matrix units want of him."""
    registers = [[8, 0], [0, 4], [0, 8], [0, 16], [0, 32]][: {16: 2, 64: 4, 128: 5}[SPAN]]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    warps = [[16, 0], [32, 0], [64, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [128, SPAN // 2])


pairs = pairs if gluon is None else gluon.constexpr_function(pairs)


@jit
def scales(
    scale,
    zero,
    n,
    column,
    rows,
    columns,
    BITS: gl.constexpr,
    GROUP: gl.constexpr,
    ZERO: gl.constexpr,
):
    """As they lie in memory, of the rows from n on and the group that the column is in."""
    if BITS == 8:
        return 0, 0
    else:
        row = gl.minimum(n + gl.arange(0, 128, gl.SliceLayout(1, pairs(16))), rows - 1)
        at = row * (columns // GROUP) + gl.minimum(column, columns - 1) // GROUP
        s = gl.load(scale + at)
        return s, gl.load(zero + at) if ZERO else s


@jit
def prepared(
    s, z, TYPE: gl.constexpr, BITS: gl.constexpr, ZERO: gl.constexpr, DOUBLE: gl.constexpr
):
    """By what to multiply, what to add then, what to take off before: two floats a word. The whole part of the zero is
    taken off before anything is rounded."""
    if BITS == 8:
        return 0, 0, 0
    else:
        s = s.to(gl.float32)
        z = z.to(gl.float32) if ZERO else s * 0 + 8.0
        near = gl.minimum(
            gl.maximum((z + 12582912.0) - 12582912.0, 0.0), 127.0
        )  # 1.5 * 2 ** 23: no fraction fits
        ABOVE: gl.constexpr = 128.0 if gl.bfloat16 == TYPE else 1024.0
        return twice(s, DOUBLE), twice((near - z) * s, DOUBLE), twice(ABOVE + near, DOUBLE)


@jit
def twice(s, DOUBLE: gl.constexpr):
    return gl.expand_dims(gl.inline_asm_elementwise(DOUBLE, "=r,f", [s], gl.int32, False, 1), 1)


@jit
def pieces(codes, SPAN: gl.constexpr):
    """A slot's pairs, of 16 columns each [128, 8], a pair a word."""
    w = codes.load(pairs(SPAN))
    w = w.to(gl.uint16, bitcast=True).to(gl.int32) if w.dtype == gl.int16 else w.to(gl.int32)
    return quarters(w) if SPAN == 64 else quarters(halves(w)[0]) + quarters(halves(w)[1])


@jit
def quarters(w):
    left, right = halves(w)
    return halves(left) + halves(right)


@jit
def halves(w):
    left, right = gl.split(gl.permute(gl.reshape(w, [w.shape[0], 2, w.shape[1] // 2]), (0, 2, 1)))
    return left, right


@jit
def unpacked(w, how, BITS: gl.constexpr, UNPACK: gl.constexpr):
    """Pairs [128, 8] -> weights, two a word. `how`: see `prepared`."""
    w = gl.convert_layout(w, pairs(16), assert_trivial=True)
    if BITS == 8:
        return gl.inline_asm_elementwise(UNPACK, "=r,r", [w], gl.int32, False, 1)
    else:
        return gl.inline_asm_elementwise(
            UNPACK, "=r,r,r,r,r", [w, how[0], how[1], how[2]], gl.int32, False, 1
        )


@jit
def factor(v, TYPE: gl.constexpr, A: gl.constexpr):
    """Words [128, 8] -> [128, 16], where the matrix units read them."""
    even = (v & 0xFFFF).to(gl.int16).to(TYPE, bitcast=True)
    odd = (v >> 16).to(gl.int16).to(TYPE, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [128, 16]), A, assert_trivial=True)


# ---- the kernel -----------------------------------------------------------------------------------------------------


@jit
def summed(
    x,
    codes,
    slots,
    scale,
    zero,
    s,
    z,
    n,
    first,
    last,
    at,
    ahead,
    total,
    phase,
    rows,
    columns,
    work,
    BITS: gl.constexpr,
    GROUP: gl.constexpr,
    ZERO: gl.constexpr,
    UNPACK: gl.constexpr,
    DOUBLE: gl.constexpr,
    SPAN: gl.constexpr,
    SLOTS: gl.constexpr,
    MMA: gl.constexpr,
):
    """The rows from n on times the tokens of a stretch, over its turns; what is fetched next; the slots' phase. s, z:
    the first columns' scales."""
    TYPE: gl.constexpr = x.dtype
    N: gl.constexpr = x.block_type.shape[0]
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    STEPS: gl.constexpr = SPAN // 16
    EVERY: gl.constexpr = (
        min(GROUP // SPAN, SLOTS) if BITS == 4 else SLOTS
    )  # slots with the same scales
    how = prepared(s, z, TYPE, BITS, ZERO, DOUBLE)
    s, z = scales(scale, zero, n, (first * SLOTS + EVERY) * SPAN, rows, columns, BITS, GROUP, ZERO)
    y = gl.zeros([128, N], gl.float32, MMA)
    mbarrier.wait(slots[0][3], phase)
    w = pieces(slots[0][1], SPAN)
    v = unpacked(w[0], how, BITS, UNPACK)
    before = v
    mbarrier.wait(slots[0][2], phase)
    for turn in range(first, last):
        for q in gl.static_range(SLOTS):
            # Behind a stretch's last slot are codes of other rows: read again, with their scales.
            coming = slots[(q + 1) % SLOTS]
            flip = phase ^ ((q + 1) // SLOTS)
            more = (turn + 1 < last) | (q + 1 < SLOTS)
            then = w
            next_how = how
            for f in gl.static_range(STEPS):
                tokens = slots[q][0].slice(16 * f, 16, 1).permute((1, 0))
                y = warpgroup_mma(factor(v, TYPE, A), tokens, y, is_async=True)
                if f == 1:  # all products with the slot before are done
                    free = slots[(q + SLOTS - 1) % SLOTS]
                    announce(x, codes, free, ahead < total)
                    barrier()
                    fetch_codes(codes, free, at, ahead < total)
                    fetch_tokens(x, free, at, ahead < total)
                    at = onward(at, work, N, SLOTS)
                    ahead += 1
                if f == STEPS - 2:
                    mbarrier.wait(coming[3], flip, more)
                    then = pieces(coming[1], SPAN)
                    if (q + 1) % SLOTS % EVERY == 0:
                        next_how = prepared(s, z, TYPE, BITS, ZERO, DOUBLE)
                        column = (turn * SLOTS + q + 1 + EVERY) * SPAN
                        s, z = scales(scale, zero, n, column, rows, columns, BITS, GROUP, ZERO)
                if f == STEPS - 1:
                    w = then
                    how = next_how
                now = v
                v = unpacked(w[(f + 1) % STEPS], how, BITS, UNPACK)
                if f == STEPS - 1:
                    mbarrier.wait(coming[2], flip, more)
                # What the product before read stays where it was until that is done.
                y, before = warpgroup_mma_wait(1, deps=(y, before))
                before = now
        phase ^= 1
    return warpgroup_mma_wait(0, deps=(y,)), at, ahead, phase


@jit
def squares(sums, p, N: gl.constexpr, MMA: gl.constexpr):
    """Where a program's piece lies [128, N]: by squares of 8 by 8, of which a warp holds every one whole."""
    n = gl.arange(0, 128, gl.SliceLayout(1, MMA))
    m = gl.arange(0, N, gl.SliceLayout(0, MMA))
    lines = sums + p.to(gl.int64) * (128 * N) + (n // 16 * 64 + n // 8 % 2 * 512 + n % 8 * 8)
    return gl.expand_dims(lines, 1) + gl.expand_dims(m // 8 * 1024 + m % 8, 0)


@jit
def gathered(y, sums, given, p, last, N: gl.constexpr, MMA: gl.constexpr):
    """With the pieces of the programs after p, always from the last on: it ends with another tile, so it gave its piece
    first. What is taken may be given again."""
    for q in range(last, p, -1):
        while gl.atomic_cas(given + q, 1, 0, sem="acquire") == 0:
            pass
        y += gl.load(squares(sums, q, N, MMA), cache_modifier=".cg")
    return y


@jit(do_not_specialize=["tokens", "rounds", "rest", "each"])
def woven_kernel(
    x,
    codes,
    out,
    scale,
    zero,
    bias,
    sums,
    given,
    tokens,
    rows,
    columns,
    rounds,
    rest,
    each,
    BITS: gl.constexpr,
    GROUP: gl.constexpr,
    ZERO: gl.constexpr,
    BIAS: gl.constexpr,
    N: gl.constexpr,
    SPAN: gl.constexpr,
    SLOTS: gl.constexpr,
    UNPACK: gl.constexpr,
    DOUBLE: gl.constexpr,
    PDL: gl.constexpr,
):
    """`rounds` whole tiles a program, then `each` turns of the `rest`, those of the tiles that are left: no more than a
    tile has, so they are of two at the most. A tile belongs to who has its first turn, with which he ends; the others
    give what they made of it, sums[p], before anything else they might wait for. Only programs that come later are
    waited for, and of those that are on their way all but one end without: none is kept from ever starting."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N, 16])
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1
        )
    slots = (slot(x, codes),)
    for _ in gl.static_range(SLOTS - 1):
        slots = slots + (slot(x, codes),)  # type: ignore[assignment]
    tile_out = gl.allocate_shared_memory(x.dtype, [N, 128], out.layout)
    p = gl.program_id(0)
    count = gl.num_programs(0)
    turns = columns // (SLOTS * SPAN)
    start = gl.minimum(p * each, rest)
    end = gl.minimum((p + 1) * each, rest)
    across = (tokens + N - 1) // N
    work = (p, count, rounds, start, end, turns, across)
    total = SLOTS * (rounds * turns + end - start)
    for q in gl.static_range(SLOTS - 1):
        announce(x, codes, slots[q], q < total)
    fence_async_shared()
    barrier()
    early = begun(0, work, N, SLOTS)
    for q in gl.static_range(SLOTS - 1):
        fetch_codes(codes, slots[q], early, q < total)
        early = onward(early, work, N, SLOTS)
    n, _, k, _, _ = begun(0, work, N, SLOTS)
    s, z = scales(scale, zero, n, k * SPAN, rows, columns, BITS, GROUP, ZERO)
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)
    at = begun(0, work, N, SLOTS)
    for q in gl.static_range(SLOTS - 1):
        fetch_tokens(x, slots[q], at, q < total)
        at = onward(at, work, N, SLOTS)
    ahead = SLOTS - 1
    phase = 0
    for i in range(rounds + 2):
        tile, first, last = stretch(i, work)
        if first < last:
            n = tile // across * 128
            line = gl.minimum(n + gl.arange(0, 128, gl.SliceLayout(1, MMA)), rows - 1)
            times = gl.load(scale + line) if BITS == 8 else line
            plus = gl.load(bias + line) if BIAS else line
            y, at, ahead, phase = summed(
                x,
                codes,
                slots,
                scale,
                zero,
                s,
                z,
                n,
                first,
                last,
                at,
                ahead,
                total,
                phase,
                rows,
                columns,
                work,
                BITS,
                GROUP,
                ZERO,
                UNPACK,
                DOUBLE,
                SPAN,
                SLOTS,
                MMA,
            )
            following = begun(i + 1, work, N, SLOTS)
            s, z = scales(
                scale, zero, following[0], following[2] * SPAN, rows, columns, BITS, GROUP, ZERO
            )
            if first > 0:
                gl.store(squares(sums, p, N, MMA), y)
                barrier()
                gl.atomic_xchg(given + p, 1, sem="release")
            else:
                if last < turns:
                    y = gathered(
                        y, sums, given, p, ((tile - rounds * count + 1) * turns - 1) // each, N, MMA
                    )
                if BITS == 8:
                    y = y * gl.expand_dims(times.to(gl.float32), 1)
                if BIAS:
                    y = y + gl.expand_dims(plus.to(gl.float32), 1)
                tma.store_wait(0)
                tile_out.store(gl.permute(y.to(x.dtype), (1, 0)))
                fence_async_shared()
                put(out, [tile % across * N, n], tile_out)
    tma.store_wait(0)
