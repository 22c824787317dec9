"""A product for one token (or a few) that streams its weights once and does what surrounds it on the way.

At one token a product is bound by the weights' bytes, so everything else must hide behind them: a norm of the input
is recomputed by every program, for the input is small; activation, residual, turning and storing of q, k and v happen
on the sums while they are still in registers. Weights go from memory to registers in 16-byte loads, one tile ahead,
and the first tile is asked for before the previous kernel has ended, so that the memory never idles between kernels.
Sums are in float32. Beyond a few tokens the arithmetic of this kernel costs more than the bytes: `pays` says when.

This file must not know layers, formats or what a model is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from bloomery.kernels.activation import ACTIVATIONS, activated, gate_reference
from bloomery.kernels.launch import begin, fused, jit, overlap, power_of_two, tl, wait
from bloomery.kernels.norm import layer_norm_reference, rms_norm_reference
from bloomery.kernels.store import Turn, turn_and_store_reference

FEW = 4  # tokens
WIDEST = 65536  # inputs: the loop over them is unrolled


class Norm(NamedTuple):
    kind: Literal["rms", "layer"]
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float


class Residual(NamedTuple):
    """tensor + scale * y"""

    tensor: torch.Tensor
    scale: float = 1.0


class Activation(NamedTuple):
    """name(y), or name(gate) * up where the rows of the weights are gate | up"""

    name: str
    gated: bool


class Heads(NamedTuple):
    """The rows of the weights are q | k | v: q and k are turned, k and v go to the cache, q is the result."""

    cache: torch.Tensor  # [2, slots, kv heads, dim]
    slots: torch.Tensor  # [tokens]
    turn: Turn


After = Residual | Activation | Heads | None


class Tiling(NamedTuple):
    """How the work is cut: a program makes `outputs` results (from twice as many rows where rows pair up) and reads
    `inputs` columns of them at once."""

    outputs: int
    inputs: int
    warps: int


# Measured inside whole decode steps; (rows, columns of the weights) -> the best cut. See benchmarks/products.py tune.
TILINGS: Mapping[tuple[int, int], Tiling] = {
    (6144, 4096): Tiling(2, 1024, 2),
    (4096, 4096): Tiling(8, 2048, 4),
    (28672, 4096): Tiling(2, 4096, 8),
    (4096, 14336): Tiling(4, 1024, 4),
    (128256, 4096): Tiling(4, 4096, 8),
    (3072, 2048): Tiling(4, 2048, 4),
    (2048, 2048): Tiling(4, 1024, 2),
    (16384, 2048): Tiling(2, 1024, 2),
    (2048, 8192): Tiling(4, 4096, 4),
    (128256, 2048): Tiling(8, 2048, 4),
    (6400, 6144): Tiling(4, 2048, 4),
    (6144, 6144): Tiling(4, 2048, 4),
    (24576, 6144): Tiling(8, 2048, 4),
    (6144, 24576): Tiling(2, 4096, 4),
    (49152, 6144): Tiling(8, 2048, 4),
    (12288, 4096): Tiling(8, 1024, 4),
    (16384, 4096): Tiling(8, 2048, 4),
    (4096, 16384): Tiling(4, 8192, 8),
    (250880, 4096): Tiling(8, 2048, 4),
}


def tiling(rows: int, columns: int, paired: bool, itemsize: int, tokens: int = 1) -> Tiling:
    """Without a measurement: four rows at a time, 128 bytes of them a thread, tiles that end where the row does.

    Several tokens need registers for their sums: half as many bytes.
    """
    if tokens == 1 and itemsize == 2 and (rows, columns) in TILINGS:
        return TILINGS[rows, columns]
    inputs = 8192 // itemsize if tokens == 1 else 2048 // itemsize
    while inputs > 1024 // itemsize and columns % inputs:
        inputs //= 2
    if columns % inputs:  # no large power of two divides it: one ragged tile
        inputs = min(power_of_two(columns), 4096 // itemsize)
    return Tiling(
        2 if paired else 4, inputs, max(1, inputs * itemsize // (1024 if tokens == 1 else 512))
    )


def pays(
    tokens: int, weight: torch.Tensor, before: Norm | None = None, after: After = None
) -> bool:
    """Whether this is the faster way. From two tokens on only for the plain sums of few outputs."""
    if not fused(weight) or not possible(weight, after) or tokens > FEW:
        return False
    return (
        tokens == 1
        or (before is None and isinstance(after, Residual))
        or (tokens == 2 and after is None)
    )


def possible(weight: torch.Tensor, after: After = None) -> bool:
    columns = weight.shape[-1]
    if columns % 8 or columns > WIDEST or not weight.is_contiguous():
        return False
    if isinstance(after, Heads):
        plain = after.turn.norm is None and after.turn.clip is None
        whole = (
            after.cache[0].is_contiguous() and after.cache.element_size() > 1
        )  # 8 bits need a head's largest number
        return plain and after.cache.shape[-1] % 2 == 0 and whole
    return True


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    before: Norm | None = None,
    after: After = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """after(before(x) @ weight.T + bias): x [tokens, in], weight [out, in] -> [tokens, out] of `dtype` (default x's).

    With Heads, q [tokens, heads, dim] comes back.
    """
    call = product_rows if pays(len(x), weight, before, after) else product_reference
    return call(x, weight, bias, before, after, dtype)


def product_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    before: Norm | None = None,
    after: After = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    if before is not None and before.kind == "rms":
        x = rms_norm_reference(x, before.weight, before.eps)
    elif before is not None:
        x = layer_norm_reference(x, before.weight, before.bias, before.eps)
    y = F.linear(x, weight, bias)
    match after:
        case Residual(tensor, scale):
            y = torch.add(tensor, y, alpha=scale)
        case Activation(name, gated):
            y = gate_reference(y, name) if gated else ACTIVATIONS[name](y)
        case Heads(cache, slots, turn):
            y = turn_and_store_reference(y, cache, slots, turn)
    return y if dtype is None else y.to(dtype)


def product_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    before: Norm | None = None,
    after: After = None,
    dtype: torch.dtype | None = None,
    cut: Tiling | None = None,
    visits: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernel. `shift` is what `shifts` gives, for whoever keeps it.

    With `visits`, numbers of experts, weight is [experts, out, in]: visit i multiplies its own expert by line i of x,
    or by the line of its token, and makes line i of the result; `after` is an Activation or nothing.
    """
    x = x.contiguous()
    (tokens, columns) = x.shape
    rows = weight.shape[-2]
    lines = tokens if visits is None else visits.numel()
    paired = isinstance(after, Heads) or (isinstance(after, Activation) and after.gated)
    outputs = rows // 2 if paired else rows
    experts, share = (0, 1) if visits is None else (len(weight), lines // tokens)
    tokens = tokens if visits is None else 1
    cut = cut or tiling(rows, columns, paired, weight.element_size(), tokens)
    norm = before or Norm("rms", None, None, 0.0)
    if norm.kind == "layer" and shift is None:
        shift = shifts(weight, norm)
    given = (visits, bias, norm.weight, shift)
    end = ends(x, after, rows, (lines, outputs), dtype or x.dtype)
    gemv_kernel[(-(-outputs // cut.outputs), lines if experts else 1)](
        x,
        weight,
        *(x if part is None else part for part in given),
        *end.tensors,
        norm.eps,
        *end.numbers,
        OUTPUTS=outputs,
        COLUMNS=columns,
        TOKENS=tokens,
        TOKENS_UP=power_of_two(tokens),
        EXPERTS=experts,
        SHARE=share,
        BIAS=bias is not None,
        NORM=None if before is None else norm.kind,
        NORM_WEIGHT=norm.weight is not None,
        PAIRED=paired,
        ROWS=rows,
        **end.choices,
        EACH=16 // weight.element_size(),
        BLOCK_OUT=cut.outputs,
        BLOCK_IN=cut.inputs,
        num_warps=cut.warps,
        **overlap(x.device),
    )
    return end.tensors[-1]


def shifts(weight: torch.Tensor, norm: Norm) -> torch.Tensor:
    """What a layer norm's weight and bias add to a product whatever its input: [2, rows], W @ w and W @ b."""
    columns = weight.shape[-1]
    ones = torch.ones(columns, device=weight.device) if norm.weight is None else norm.weight.float()
    vectors = torch.stack(
        (ones, torch.zeros_like(ones) if norm.bias is None else norm.bias.float()), 1
    )
    return torch.cat([panel.float() @ vectors for panel in weight.split(256)]).t().contiguous()


class Ends(NamedTuple):
    """What the kernel needs behind the sums."""

    tensors: tuple[torch.Tensor, ...]  # residual or cache, slots, positions, cos, sin, out
    numbers: tuple[float, int]  # scale of the residual, distance of values from keys
    choices: dict[str, str | int | bool | None]


def ends(
    x: torch.Tensor, after: After, rows: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Ends:
    kind = ""
    activation = ""
    tensors = (x, x, x, x, x)
    numbers = (1.0, 0)
    heads = kv_heads = turned = 0
    dim = 2
    interleaved = False
    tables = False
    match after:
        case Residual(tensor, scale):
            kind = "add"
            tensors = (tensor.contiguous(), x, x, x, x)
            numbers = (scale, 0)
        case Activation(activation, _):
            kind = "activate"
        case Heads(cache, slots, turn):
            kind = "heads"
            tables = turn.positions is not None
            interleaved = turn.interleaved
            kv_heads, dim = cache.shape[2:]
            heads = rows // dim - 2 * kv_heads
            cos, sin = turn.angles or (x, x)
            turned = 2 * cos.shape[-1] if turn.angles else 0
            tensors = (cache, slots, slots if turn.positions is None else turn.positions, cos, sin)
            numbers = (1.0, cache.stride(0))
            shape = (len(x), heads, dim)
    choices: dict[str, str | int | bool | None] = {
        "AFTER": kind,
        "ACTIVATION": activation,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "TURNED": turned,
        "INTERLEAVED": interleaved,
        "TABLES": tables,
    }
    return Ends((*tensors, torch.empty(shape, dtype=dtype, device=x.device)), numbers, choices)


@jit
def gemv_kernel(
    x,
    weight,
    visits,
    bias,
    norm_weight,
    shift,
    other,
    slots,
    positions,
    cos,
    sin,
    out,
    eps,
    scale,
    half,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    TOKENS_UP: tl.constexpr,
    EXPERTS: tl.constexpr,
    SHARE: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    NORM_WEIGHT: tl.constexpr,
    PAIRED: tl.constexpr,
    ROWS: tl.constexpr,
    AFTER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TABLES: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles are [tokens, outputs, inputs], and [1, 1, inputs] for what they share: all in the weights' own layout.

    A norm costs next to nothing, for its statistics come along and are applied to the sums: with mean m and deviation d
    of x, W @ ((x - m) / d * w + b) = (W @ (x * w) - m * (W @ w)) / d + W @ b, of which W @ w and W @ b are known
    beforehand. Float32 has digits to spare for the difference unless the mean is hundreds of deviations.
    """
    begin(PDL)
    if EXPERTS > 0:
        wait(PDL)  # the experts are news of this step
        visit = tl.program_id(1).to(tl.int64)
        expert = tl.load(visits + visit).to(tl.int64)
        expert = tl.where((expert >= 0) & (expert < EXPERTS), expert, 0)
        weight += expert * (OUTPUTS * (2 if PAIRED else 1) * COLUMNS)
        x += visit // SHARE * COLUMNS
        out += visit * OUTPUTS
    p = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    first, second = rows_of(tl.minimum(p, OUTPUTS - 1), OUTPUTS, DIM, TURNED, INTERLEAVED, AFTER)
    m = tl.arange(0, TOKENS_UP)
    k = tl.arange(0, BLOCK_IN)[None, None, :]
    at_first = weight + first.to(tl.int64)[None, :, None] * COLUMNS + k
    at_second = weight + second.to(tl.int64)[None, :, None] * COLUMNS + k
    at_x = x + tl.minimum(m, TOKENS - 1)[:, None, None] * COLUMNS + k
    a = tile(at_first, 0, k, COLUMNS, BLOCK_IN, "evict_first")
    b = a
    if PAIRED:
        b = tile(at_second, 0, k, COLUMNS, BLOCK_IN, "evict_first")
    if EXPERTS == 0:
        wait(PDL)
    y = tl.zeros([TOKENS_UP, BLOCK_OUT, BLOCK_IN // EACH], tl.float32)
    z = y
    square = tl.zeros([TOKENS_UP, 1, BLOCK_IN // EACH], tl.float32)
    total = square
    for k0 in tl.static_range(0, COLUMNS, BLOCK_IN):
        a_now = a.to(tl.float32)
        b_now = b.to(tl.float32)
        if k0 + BLOCK_IN < COLUMNS:
            a = tile(at_first, k0 + BLOCK_IN, k, COLUMNS, BLOCK_IN, "evict_first")
            if PAIRED:
                b = tile(at_second, k0 + BLOCK_IN, k, COLUMNS, BLOCK_IN, "evict_first")
        v = tile(at_x, k0, k, COLUMNS, BLOCK_IN, "").to(tl.float32)
        if NORM is not None:
            square += folded(v * v, TOKENS_UP, 1, BLOCK_IN, EACH)
        if NORM == "layer":
            total += folded(v, TOKENS_UP, 1, BLOCK_IN, EACH)
        if NORM_WEIGHT:
            v *= tile(norm_weight + k, k0, k, COLUMNS, BLOCK_IN, "")
        y += folded(a_now * v, TOKENS_UP, BLOCK_OUT, BLOCK_IN, EACH)
        if PAIRED:
            z += folded(b_now * v, TOKENS_UP, BLOCK_OUT, BLOCK_IN, EACH)
    y = tl.sum(y, 2)
    z = tl.sum(z, 2)
    if NORM == "rms":
        root = tl.rsqrt(tl.sum(square, 2) / COLUMNS + eps)
        y = y * root
        z = z * root
    if NORM == "layer":
        mean = tl.sum(total, 2) / COLUMNS
        root = tl.rsqrt(tl.maximum(tl.sum(square, 2) / COLUMNS - mean * mean, 0.0) + eps)
        y = (y - mean * tl.load(shift + first)[None, :]) * root + tl.load(shift + ROWS + first)[
            None, :
        ]
        if PAIRED:
            z = (z - mean * tl.load(shift + second)[None, :]) * root + tl.load(
                shift + ROWS + second
            )[None, :]
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
        scale,
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
def finish(
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
    scale,
    half,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIRED: tl.constexpr,
    AFTER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TABLES: tl.constexpr,
):
    """What stands behind the sums y (and z, where rows pair up) [tokens m, results p], and the storing of it."""
    here = (m < TOKENS)[:, None] & (p < OUTPUTS)[None, :]
    if AFTER == "heads":
        turned_and_stored(
            y,
            z,
            p,
            m,
            here,
            other,
            slots,
            positions,
            cos,
            sin,
            out,
            half,
            TOKENS,
            HEADS,
            KV_HEADS,
            DIM,
            TURNED,
            INTERLEAVED,
            TABLES,
        )
    else:
        at = m[:, None] * OUTPUTS + p[None, :]
        if AFTER == "activate":
            y = activated(y, ACTIVATION)
            if PAIRED:
                y = y * z
        elif AFTER == "add":
            y = tl.load(other + at, mask=here, other=0.0).to(tl.float32) + scale * y
        tl.store(out + at, y.to(out.dtype.element_ty), mask=here)


@jit
def rows_of(
    p,
    OUTPUTS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    AFTER: tl.constexpr,
):
    """The two rows of the weights behind result p: gate and up, or the two dimensions of a head that turn together."""
    if AFTER == "heads":
        head = p // (DIM // 2) * DIM
        j = p % (DIM // 2)
        if INTERLEAVED:
            return head + 2 * j, head + 2 * j + 1
        else:
            turns = j < TURNED // 2
            low = head + tl.where(turns, j, j + TURNED // 2)
            return low, low + tl.where(turns, TURNED // 2, (DIM - TURNED) // 2)
    else:
        return p, p + OUTPUTS


@jit
def tile(
    at, k0: tl.constexpr, k, COLUMNS: tl.constexpr, BLOCK_IN: tl.constexpr, EVICT: tl.constexpr
):
    """A block at column k0; zeros past the end of the row."""
    if k0 + BLOCK_IN <= COLUMNS:
        return tl.load(at + k0, eviction_policy=EVICT)
    else:
        return tl.load(at + k0, mask=k0 + k < COLUMNS, other=0.0, eviction_policy=EVICT)


@jit
def folded(t, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, EACH: tl.constexpr):
    """[A, B, C] summed over the EACH neighbours that one thread holds: no exchange between threads."""
    return tl.sum(tl.reshape(t, (A, B, C // EACH, EACH)), 3)


@jit
def turned_and_stored(
    y,
    z,
    p,
    m,
    here,
    cache,
    slots,
    positions,
    cos,
    sin,
    out,
    half,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TABLES: tl.constexpr,
):
    """y and z [tokens, pairs] are the two dimensions of each pair of the heads q | k | v."""
    low, high = rows_of(p, 0, DIM, TURNED, INTERLEAVED, "heads")
    head = p // (DIM // 2)
    j = p % (DIM // 2)
    if TURNED > 0:
        turns = here & ((j < TURNED // 2) & (head < HEADS + KV_HEADS))[None, :]
        row = tl.load(positions + m, mask=m < TOKENS, other=0) if TABLES else m
        at = row[:, None] * (TURNED // 2) + j[None, :]
        c = tl.load(cos + at, mask=turns, other=1.0)
        s = tl.load(sin + at, mask=turns, other=0.0)
        y, z = y * c - z * s, y * s + z * c
    q = here & (head < HEADS)[None, :]
    at = m[:, None] * (HEADS * DIM) + low[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=q)
    tl.store(out + at + (high - low)[None, :], z.to(out.dtype.element_ty), mask=q)
    is_key = head < HEADS + KV_HEADS
    column = low - tl.where(is_key, HEADS, HEADS + KV_HEADS) * DIM
    slot = tl.load(slots + m, mask=m < TOKENS, other=0).to(tl.int64)
    at = (
        slot[:, None] * (KV_HEADS * DIM)
        + (column + tl.where(is_key, 0, 1).to(tl.int64) * half)[None, :]
    )
    kv = here & (head >= HEADS)[None, :]
    tl.store(cache + at, y.to(cache.dtype.element_ty), mask=kv)
    tl.store(cache + at + (high - low)[None, :], z.to(cache.dtype.element_ty), mask=kv)
