"""A product of hundreds of tokens with a matrix of 4 or 8 bits: weights unpacked while matrix units multiply others.

Arithmetic counts here, and what the matrix units wait for is lost. They read the weights, their left factor, from
registers: of 16 columns those are unpacked while the 16 before are multiplied, by the same threads. Tokens and codes
come by the copy engine into slots of shared memory, some columns each, and a slot is filled again as soon as nobody
reads it; what comes next may belong to the program's next tile. The tokens stay in their order, for of every thread
the matrix units want pairs of neighbouring columns, and a pair of codes is read at once.

Tiles are taken in turn by as many programs as there are processors; of those that are left each program takes an equal
stretch, or they are cut in half and go ahead, each a program (`cuts`). Written in Gluon, Triton's lower floor, where
layouts, waits and copies are spelled out and no interpreter runs: its reference is packed.dequantize, by way of
benchmarks/packed.py check. Without it (`gluon` is None) kernels/packed_gemm multiplies. This file must not know layers,
formats or what a model is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple, TypeGuard

import torch

from bloomery.kernels.launch import hopper, overlap, processors
from bloomery.kernels.packed import Grid, Packed
from bloomery.kernels.packed_gemm import STRETCH, asynchronous, gather

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
        barrier, fetch, put = gl.barrier, tma.async_load, tma.async_store
    else:
        barrier, fetch, put = gl.thread_barrier, tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
except ImportError:
    gluon = gl = None


def jit(function: Callable | None = None, **options: Any) -> Any:
    if gluon is None:
        return function if function is not None else lambda function: function
    return gluon.jit(function, **options)


OUTPUTS = 128  # of a tile


class Cut(NamedTuple):
    """Rows of the matrix, and how they are multiplied."""

    first: int
    end: int
    tokens: int  # of a tile
    span: int  # columns of a slot
    slots: int
    programs: int  # that take its tiles in turn, and share those that are left


TALL, HALF = (256, 64, 4), (128, 128, 4)  # tokens, columns of a slot, slots
SMALL = {8: 0.67, 4: 0.75}  # bits -> what a tile of HALF takes of the time of one of TALL
ADDING = 1900  # columns of a tile of TALL in whose time stretches are added up
MOST = {8: 2048, 4: 1024}  # bits -> tokens from more of which on unpacking all weights beforehand costs less


@lru_cache(maxsize=4096)
def cuts(tokens: int, rows: int, columns: int, bits: int, count: int) -> tuple[Cut, ...] | None:
    """The quickest for `count` processors, by times measured on an H200 (benchmarks/packed.py bench); None: other
    kernels are quicker, or this one cannot."""
    if columns % 512 or not 64 < tokens <= MOST[bits]:
        return None
    down = -(-rows // OUTPUTS)
    if tokens <= 128:
        few = 2 * down * columns < STRETCH * count or (down >= count and (bits == 4 or columns < 6144))
        return None if few else (Cut(0, rows, *HALF, count),)
    across, halves = -(-tokens // 256), -(-tokens // 128)
    rounds, over = divmod(across * down, count)
    lines = rounds * count // across  # of tiles, in whole rounds
    rest = halves * (down - lines)
    shared = across * down / count + ADDING / columns
    whole = max(rounds, 1) if not rounds or not over else inf
    small = rounds + SMALL[bits] if rounds * count % across == 0 and 0 < rest <= count else inf
    if across * down * columns < STRETCH * count:
        return None
    if small < min(shared, whole):
        first = Cut(lines * OUTPUTS, rows, *HALF, rest)
        return (first, Cut(0, lines * OUTPUTS, *TALL, count)) if lines else (first,)
    return (Cut(0, rows, *TALL, min(across * down, count) if whole < shared else count),)


def possible(packed: Packed, dtype: torch.dtype) -> TypeGuard[Grid]:
    """Whether the kernel can: codes of 8 bits with one scale a row, of 4 with one for 128 columns or a multiple."""
    if gluon is None or not isinstance(packed, Grid) or packed.order is not None or dtype.itemsize != 2:
        return False
    if packed.shape[0] % 16 or not packed.codes.is_contiguous() or packed.codes.data_ptr() % 16:
        return False
    if not hopper(packed.codes.device) or not asynchronous(packed.codes.device):
        return False
    if packed.bits == 8:
        return packed.codes.dtype == torch.int8 and packed.group == packed.shape[1] and packed.zero is None
    return packed.bits == 4 and packed.group % 128 == 0


def plan(tokens: int, packed: Packed, dtype: torch.dtype) -> tuple[Cut, ...] | None:
    """The parts of a product; None: it is not for this file."""
    if tokens <= 64 or not possible(packed, dtype):
        return None
    return cuts(tokens, *packed.shape, packed.bits, processors(packed.codes.device))


def woven_product(
    x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None, parts: tuple[Cut, ...] | None = None
) -> torch.Tensor:
    """The kernel: x [tokens, in] -> [tokens, out]. Not planned: stretches of the large tiles."""
    if not possible(packed, x.dtype):
        raise TypeError("this matrix has no interleaved product: packed_woven.possible says which have")
    x, rows = x.contiguous(), packed.shape[0]
    parts = parts or plan(len(x), packed, x.dtype) or (Cut(0, rows, *TALL, processors(x.device)),)
    out = torch.empty(len(x), rows, dtype=x.dtype, device=x.device)
    for cut in parts:
        woven(x, packed, bias, out, cut)
    return out


def woven(x: torch.Tensor, packed: Grid, bias: torch.Tensor | None, out: torch.Tensor, cut: Cut) -> None:
    (tokens, columns), (rows, _) = x.shape, packed.shape
    tiles, turns = -(-tokens // cut.tokens) * -(-(cut.end - cut.first) // OUTPUTS), columns // (cut.slots * cut.span)
    rounds, rest = divmod(tiles, cut.programs)
    sums = torch.empty(2 * cut.programs if rest else 1, OUTPUTS, cut.tokens, dtype=torch.float32, device=x.device)
    codes = packed.codes.view(torch.int16) if packed.bits == 8 else packed.codes
    woven_kernel[(cut.programs,)](
        block(x, cut.tokens, cut.span), block(codes, OUTPUTS, cut.span // 2), block(out, cut.tokens, OUTPUTS),
        packed.scale, packed.scale if packed.zero is None else packed.zero, out if bias is None else bias, sums,
        tokens, cut.first, rows, columns, rounds, rest * turns,
        BITS=packed.bits, GROUP=packed.group if packed.bits == 4 else 0, ZERO=packed.zero is not None,
        BIAS=bias is not None, N=cut.tokens, SPAN=cut.span, SLOTS=cut.slots, **assembly(packed.bits, x.dtype),
        num_warps=8, **overlap(x.device),
    )  # fmt: skip
    if rest:
        gather(sums, bias, out, cut.first, turns, rounds, rest, turned=True)


def block(matrix: torch.Tensor, lines: int, width: int) -> Any:
    """A matrix of which the copy engine moves blocks."""
    size = matrix.element_size()
    layout = gl.NVMMASharedLayout(min(width * size, 128), 8 * size, 2)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [lines, width], layout)


@lru_cache
def assembly(bits: int, dtype: torch.dtype) -> dict[str, str]:
    """SPREAD: a pair of codes to the halves of a word, other bits undefined; UNPACK: two weights of that. Of 4 bits
    further operands say what is multiplied by, added then, and taken off before."""
    short = dtype == torch.bfloat16
    kind, magic = ("bf16x2", "0x43004300") if short else ("f16x2", "0x64006400")
    if bits == 4:
        unpack = [f"lop3.b32 v, $1, 0x000f000f, {magic}, 0xEA;", f"sub.rn.{kind} v, v, $4;"]
        unpack += [f"fma.rn.{kind} $0, v, $2, $3;"]
        return {"SPREAD": "mad.lo.u32 $0, $1, 0x1001, 0;", "UNPACK": braced(unpack)}
    if short:  # seven bits beside the exponent; the eighth counts -128
        unpack = [f"lop3.b32 v, $1, 0x007f007f, {magic}, 0xEA;", f"lop3.b32 u, $1, 0x00800080, {magic}, 0xEA;"]
    else:
        unpack = ["xor.b32 u, $1, 0x00800080;", f"lop3.b32 v, u, 0x00ff00ff, {magic}, 0xEA;"]
        unpack += ["mov.b32 u, 0x64806480;"]
    return {"SPREAD": "prmt.b32 $0, $1, 0, 0x4140;", "UNPACK": braced([*unpack, f"sub.rn.{kind} $0, v, u;"])}


def braced(lines: list[str]) -> str:
    return "\n".join(["{", ".reg .b32 v, u;", *lines, "}"])


# ---- which tile, which columns: a program's work is a row of stretches ----------------------------------------------


@jit
def stretch(i, work):
    """The i-th: its tile, its first and its last turn. A turn is all slots once."""
    p, count, rounds, start, end, turns, _, _ = work
    left = start // turns + i - rounds
    first = gl.where(i < rounds, 0, gl.maximum(start, left * turns) - left * turns)
    last = gl.where(i < rounds, turns, gl.minimum(end, (left + 1) * turns) - left * turns)
    return gl.where(i < rounds, i * count + p, rounds * count + left), first, last


@jit
def begun(i, work, N: gl.constexpr, SLOTS: gl.constexpr):
    """What is to be fetched: row, token, slot's columns, where they end; of which stretch."""
    tile, first, last = stretch(i, work)
    across, row = work[6], work[7]
    return row + tile // across * 128, tile % across * N, first * SLOTS, last * SLOTS, i


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
    lanes, warps = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [64, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [128, SPAN // 2])


pairs = pairs if gluon is None else gluon.constexpr_function(pairs)


@jit
def scales(scale, zero, row, column, columns, BITS: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr):
    """As they lie in memory, of the group that the column is in."""
    if BITS == 8:
        return 0, 0
    else:
        at = row * (columns // GROUP) + gl.minimum(column, columns - 1) // GROUP
        s = gl.load(scale + at)
        return s, gl.load(zero + at) if ZERO else s


@jit
def prepared(s, z, TYPE: gl.constexpr, BITS: gl.constexpr, ZERO: gl.constexpr):
    """By what to multiply, what to add then, what to take off before: two floats a word. The whole part of the zero is
    taken off before anything is rounded."""
    if BITS == 8:
        return 0, 0, 0
    else:
        s = s.to(gl.float32)
        z = z.to(gl.float32) if ZERO else s * 0 + 8.0
        near = gl.minimum(gl.maximum(gl.floor(z + 0.5), 0.0), 127.0)
        ABOVE: gl.constexpr = 128.0 if gl.bfloat16 == TYPE else 1024.0
        return twice(s, TYPE), twice((near - z) * s, TYPE), twice(ABOVE + near, TYPE)


@jit
def twice(s, TYPE: gl.constexpr):
    return gl.expand_dims((s.to(TYPE).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x10001, 1)


@jit
def pieces(codes, SPAN: gl.constexpr, SPREAD: gl.constexpr):
    """A slot's pairs, of 16 columns each [128, 8], a pair a word."""
    w = codes.load(pairs(SPAN))
    w = w.to(gl.uint16, bitcast=True).to(gl.int32) if w.dtype == gl.int16 else w.to(gl.int32)
    w = gl.inline_asm_elementwise(SPREAD, "=r,r", [w], gl.int32, True, 1)
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
def unpacked(w, how, TYPE: gl.constexpr, BITS: gl.constexpr, UNPACK: gl.constexpr, A: gl.constexpr):
    """Pairs [128, 8] -> weights [128, 16], where the matrix units read them. `how`: see `prepared`."""
    w = gl.convert_layout(w, pairs(16), assert_trivial=True)
    if BITS == 8:
        v = gl.inline_asm_elementwise(UNPACK, "=r,r", [w], gl.int32, True, 1)
    else:
        v = gl.inline_asm_elementwise(UNPACK, "=r,r,r,r,r", [w, how[0], how[1], how[2]], gl.int32, True, 1)
    even = (v & 0xFFFF).to(gl.int16).to(TYPE, bitcast=True)
    odd = (v >> 16).to(gl.int16).to(TYPE, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [128, 16]), A, assert_trivial=True)


# ---- the kernel -----------------------------------------------------------------------------------------------------


@jit
def summed(
    x, codes, slots, scale, zero, n, first, last, at, ahead, total, phase, rows, columns, work,
    BITS: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, SPREAD: gl.constexpr, UNPACK: gl.constexpr,
    SPAN: gl.constexpr, SLOTS: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The rows from n on times the tokens of a stretch, over its turns; what is fetched next; the slots' phase."""
    TYPE: gl.constexpr = x.dtype
    N: gl.constexpr = x.block_type.shape[0]
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    EVERY: gl.constexpr = min(GROUP // SPAN, SLOTS) if BITS == 4 else SLOTS  # slots with the same scales
    row = gl.minimum(n + gl.arange(0, 128, gl.SliceLayout(1, pairs(16))), rows - 1)
    s, z = scales(scale, zero, row, first * (SLOTS * SPAN), columns, BITS, GROUP, ZERO)
    how = prepared(s, z, TYPE, BITS, ZERO)
    s, z = scales(scale, zero, row, (first * SLOTS + EVERY) * SPAN, columns, BITS, GROUP, ZERO)
    y = gl.zeros([128, N], gl.float32, MMA)
    mbarrier.wait(slots[0][3], phase)
    w = pieces(slots[0][1], SPAN, SPREAD)
    for turn in range(first, last):
        for q in gl.static_range(SLOTS):
            mbarrier.wait(slots[q][2], phase)
            coming, then, next_how = slots[(q + 1) % SLOTS], w, how
            for f in gl.static_range(SPAN // 16):
                a = unpacked(w[f], how, TYPE, BITS, UNPACK, A)
                y = warpgroup_mma(a, slots[q][0].slice(16 * f, 16, 1).permute((1, 0)), y, is_async=True)
                y = warpgroup_mma_wait(1, deps=(y,))
                if f == 1:  # all products with the slot before are done
                    free = slots[(q + SLOTS - 1) % SLOTS]
                    announce(x, codes, free, ahead < total)
                    fence_async_shared()
                    barrier()
                    fetch_codes(codes, free, at, ahead < total)
                    fetch_tokens(x, free, at, ahead < total)
                    at = onward(at, work, N, SLOTS)
                    ahead += 1
                if f == SPAN // 16 - 2:
                    if (q + 1) % SLOTS % EVERY == 0:
                        next_how = prepared(s, z, TYPE, BITS, ZERO)
                        s, z = scales(
                            scale, zero, row, (turn * SLOTS + q + 1 + EVERY) * SPAN, columns, BITS, GROUP, ZERO
                        )
                    # Behind a stretch's last slot are codes of other rows: read again, with their scales.
                    mbarrier.wait(coming[3], phase ^ ((q + 1) // SLOTS), (turn + 1 < last) | (q + 1 < SLOTS))
                    then = pieces(coming[1], SPAN, SPREAD)
            w, how = then, next_how
        phase ^= 1
    return warpgroup_mma_wait(0, deps=(y,)), at, ahead, phase


@jit(do_not_specialize=["tokens", "row", "rounds", "rest"])
def woven_kernel(
    x, codes, out, scale, zero, bias, sums, tokens, row, rows, columns, rounds, rest,
    BITS: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, BIAS: gl.constexpr, N: gl.constexpr,
    SPAN: gl.constexpr, SLOTS: gl.constexpr, SPREAD: gl.constexpr, UNPACK: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`rounds` whole tiles of the rows from `row` on a program, then its stretch of the `rest`, turns of the tiles that
    are left: less than a tile, so it touches two at the most, of which sums[2 * program] and the next hold what it
    added."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N, 16])
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)
    slots = (slot(x, codes),)
    for _ in gl.static_range(SLOTS - 1):
        slots = slots + (slot(x, codes),)  # type: ignore[assignment]
    tile_out = gl.allocate_shared_memory(x.dtype, [N, 128], out.layout)
    p, count, turns = gl.program_id(0), gl.num_programs(0), columns // (SLOTS * SPAN)
    start, end, across = p * rest // count, (p + 1) * rest // count, (tokens + N - 1) // N
    work = (p, count, rounds, start, end, turns, across, row)
    total = SLOTS * (rounds * turns + end - start)
    for q in gl.static_range(SLOTS - 1):
        announce(x, codes, slots[q], q < total)
    fence_async_shared()
    barrier()
    early = begun(0, work, N, SLOTS)
    for q in gl.static_range(SLOTS - 1):
        fetch_codes(codes, slots[q], early, q < total)
        early = onward(early, work, N, SLOTS)
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)
    at = begun(0, work, N, SLOTS)
    for q in gl.static_range(SLOTS - 1):
        fetch_tokens(x, slots[q], at, q < total)
        at = onward(at, work, N, SLOTS)
    ahead, phase = SLOTS - 1, 0
    for i in range(rounds + 2):
        tile, first, last = stretch(i, work)
        if first < last:
            n = row + tile // across * 128
            y, at, ahead, phase = summed(
                x, codes, slots, scale, zero, n, first, last, at, ahead, total, phase, rows, columns, work,
                BITS, GROUP, ZERO, SPREAD, UNPACK, SPAN, SLOTS, MMA,
            )  # fmt: skip
            line = gl.minimum(n + gl.arange(0, 128, gl.SliceLayout(1, MMA)), rows - 1)
            if BITS == 8:
                y = y * gl.expand_dims(gl.load(scale + line).to(gl.float32), 1)
            if i < rounds:
                if BIAS:
                    y = y + gl.expand_dims(gl.load(bias + line).to(gl.float32), 1)
                tma.store_wait(0)
                tile_out.store(gl.permute(y.to(x.dtype), (1, 0)))
                fence_async_shared()
                put(out, [tile % across * N, n], tile_out)
            else:
                each, m = gl.arange(0, 128, gl.SliceLayout(1, MMA)), gl.arange(0, N, gl.SliceLayout(0, MMA))
                piece = sums + (2 * p + i - rounds).to(gl.int64) * (128 * N)
                gl.store(piece + gl.expand_dims(each, 1) * N + gl.expand_dims(m, 0), y)
    tma.store_wait(0)
