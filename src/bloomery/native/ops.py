"""Tensors in, tensors out: what kernels ask of the team. Shapes and meanings are those of the torch functions they
stand in for; callers have asked `team().takes`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from bloomery.native.team import address, team

NORMS = {None: 0, "rms": 1, "layer": 2}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
NOTHING, ADD, ACTIVATE, GATE = range(4)
ADD_SCALED, MULTIPLY, TIMES, PLUS, TANH, ACTIVATED, GATED = range(7)
Pair = tuple[torch.Tensor, torch.Tensor]

# GGUF's types that panels are made of: their number in pack.c, and the kind of the panels in products.c.
PACKED = {
    "Q4_0": (0, 0),
    "Q4_1": (1, 1),
    "Q4_K": (2, 2),
    "Q8_0": (3, 3),
    "Q5_0": (4, 3),
    "Q5_1": (5, 4),
    "Q5_K": (6, 5),
    "Q6_K": (7, 6),
}
FLOAT32 = 16
PANEL = 8  # rows
KEPT = {torch.float32: 0, torch.float16: 1, torch.int8: 2}  # what keys and values may be kept in


Segment = tuple[torch.Tensor, int, int]  # bytes or floats, rows, kind


class Matrix:
    """[rows, columns] weights as products.c knows them: segments from top to bottom."""

    def __init__(self, columns: int, segments: Sequence[Segment]):
        self.rows = sum(rows for _, rows, _ in segments)
        self.columns = columns
        self.segments = tuple(segments)
        count = len(segments)
        data = (ctypes.c_void_p * count)(*(tensor.data_ptr() for tensor, _, _ in segments))
        rows = (ctypes.c_int64 * count)(*(rows for _, rows, _ in segments))
        kinds = (ctypes.c_int64 * count)(*(kind for _, _, kind in segments))
        self.free = team().call.matrix_free
        self.handle = team().call.matrix_make(self.rows, columns, count, data, rows, kinds)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self.free(self.handle)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor, _, _ in self.segments)

    @property
    def halves(self) -> bool:
        """Whether row i of the first half and of the second stand at the same place of two panels."""
        half = self.rows // 2
        row = 0
        met = self.rows % 2 == 0
        for _, rows, _ in self.segments:
            met = (
                met
                and (rows % PANEL == 0 or row + rows == self.rows)
                and (row == half or not row < half < row + rows)
            )
            row += rows
        return met and half % PANEL == 0

    @classmethod
    def dense(cls, weight: torch.Tensor) -> Matrix:
        return cls(weight.shape[1], [(weight, weight.shape[0], FLOAT32)])


def pack(kind: str, blocks: torch.Tensor, columns: int) -> torch.Tensor:
    """Rows of GGUF blocks, uint8 [rows, bytes], as panels of the same values."""
    number, _ = PACKED[kind]
    rows = len(blocks)
    call = team().call
    out = team().lasting(call.native_packed_bytes(number, rows, columns))
    call.native_pack(number, blocks.data_ptr(), rows, columns, blocks.stride(0), out.data_ptr())
    return out


def segment(kind: str, blocks: torch.Tensor, columns: int) -> Segment:
    return pack(kind, blocks, columns), len(blocks), PACKED[kind][1]


def linear(
    matrix: Matrix,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: tuple[str, torch.Tensor | None, torch.Tensor | None, float] | None = None,
    residual: tuple[torch.Tensor, float] | None = None,
    activation: tuple[str, bool] | None = None,
) -> torch.Tensor:
    """norm (kind, weight, bias, eps) -> product -> bias -> residual + scale * y, or an activation, gated or not."""
    kind, weight, shift, eps = norm or (None, None, None, 0.0)
    other, scale = residual or (None, 1.0)
    name, gated = activation or ("silu", False)
    after = ADD if residual else NOTHING if activation is None else GATE if gated else ACTIVATE
    out = team().empty((len(x), matrix.rows // 2 if after == GATE else matrix.rows))
    team().call.native_linear(
        matrix.handle,
        address(x),
        len(x),
        address(bias),
        NORMS[kind],
        eps,
        address(weight),
        address(shift),
        after,
        ACTIVATIONS[name],
        address(other),
        scale,
        address(out),
    )
    return out


def gather(matrix: Matrix, ids: torch.Tensor) -> torch.Tensor:
    out = team().empty((len(ids), matrix.columns))
    team().call.native_gather(matrix.handle, address(ids), len(ids), 1.0, address(out))
    return out


def norm(
    x: torch.Tensor, kind: str, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Over the last axis; weights [columns], or [groups, columns] for rows that take them in turn."""
    out = team().empty(tuple(x.shape))
    columns = x.shape[-1]
    shaped = weight if weight is not None else bias
    groups = 1 if shaped is None else shaped.numel() // columns
    team().call.native_norm(
        address(x),
        x.numel() // columns,
        columns,
        NORMS[kind],
        eps,
        address(weight),
        address(bias),
        groups,
        address(out),
    )
    return out


def elements(
    rule: int,
    x: torch.Tensor,
    y: torch.Tensor | None = None,
    number: float = 0.0,
    activation: str = "silu",
) -> torch.Tensor:
    shape = tuple(x.shape) if rule != GATED else (*x.shape[:-1], x.shape[-1] // 2)
    out = team().empty(shape)
    team().call.native_elements(
        rule,
        address(x),
        address(y),
        out.numel(),
        shape[-1],
        number,
        ACTIVATIONS[activation],
        address(out),
    )
    return out


def copy(to: torch.Tensor, source: torch.Tensor) -> None:
    team().call.native_copy(address(to), address(source), to.nbytes)


def shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """Whole numbers, each plus `by`."""
    out = team().empty(tuple(x.shape), torch.int64)
    team().call.native_shift(address(x), x.numel(), by, address(out))
    return out


def keeps(cache: torch.Tensor) -> bool:
    """Whether keys and values may be kept so; what is narrower than floats is taken eight at a time."""
    return (
        cache.dtype in KEPT
        and cache.is_contiguous()
        and (cache.dtype == torch.float32 or cache.shape[-1] % 8 == 0)
    )


def turn_and_store(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    angles: Pair | None,
    positions: torch.Tensor | None,
    interleaved: bool,
    norm: str | None,
    weights: Pair | None,
    eps: float,
    clip: float | None,
) -> torch.Tensor:
    kv_heads, dim = cache.shape[2:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    cos, sin = angles or (None, None)
    q_weight, k_weight = weights or (None, None)
    q = team().empty((len(qkv), heads, dim))
    team().call.native_turn(
        address(qkv),
        len(qkv),
        heads,
        kv_heads,
        dim,
        address(cos),
        address(sin),
        0 if cos is None else 2 * cos.shape[-1],
        address(positions),
        interleaved,
        NORMS[norm],
        address(q_weight),
        address(k_weight),
        q_weight is not None and q_weight.dim() > 1,
        eps,
        clip or 0.0,
        address(slots),
        address(q),
        address(cache),
        cache.stride(0),
        KEPT[cache.dtype],
    )
    return q


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    items: torch.Tensor,
    singles: int,
    largest: int,
    tables: torch.Tensor,
    block_size: int,
    ends: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    slopes: torch.Tensor | None,
    window: int | None,
) -> torch.Tensor:
    """items [n, 4]: sequence, first token, first position, count; the first `singles` have one token each."""
    _, heads, dim = q.shape
    out = team().empty((len(q), heads * dim))
    team().call.native_attend(
        address(q),
        address(cache),
        cache.stride(0),
        KEPT[cache.dtype],
        heads,
        cache.shape[2],
        dim,
        address(items),
        singles,
        len(items) - singles,
        largest,
        address(tables),
        tables.shape[1],
        block_size,
        address(ends),
        scale,
        softcap or 0.0,
        address(slopes),
        window or 0,
        1e3 * len(q) * heads,
        address(out),
    )
    return out


def fetch(
    lines: torch.Tensor,
    last: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, ...]:
    """ids, positions, slots, ends [lines] and blocks [lines, width]: what a step that feeds itself begins with."""
    count = len(lines)
    width = tables.shape[1]
    out = [team().empty((count,), torch.int64) for _ in range(4)]
    blocks = team().empty((count, width), torch.int64)
    team().call.native_fetch(
        address(lines),
        count,
        address(last),
        address(positions),
        address(tables),
        width,
        block_size,
        *map(address, out),
        address(blocks),
    )
    return *out, blocks


def advance(
    lines: torch.Tensor, tokens: torch.Tensor, last: torch.Tensor, positions: torch.Tensor
) -> None:
    team().call.native_advance(
        address(lines),
        len(lines),
        address(tokens),
        address(last),
        address(positions),
        len(last) - 1,
    )


def pick(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    numbers: torch.Tensor,
    stride: int,
    top_k: torch.Tensor,
    seeds: torch.Tensor,
) -> torch.Tensor:
    """numbers: float64, of row r at r * stride: temperature, top_p, min_p."""
    tokens = team().empty((len(logits),), torch.int64)
    team().call.native_pick(
        address(logits),
        len(logits),
        logits.shape[1],
        address(rows),
        address(positions),
        address(numbers),
        stride,
        address(top_k),
        address(seeds),
        address(tokens),
    )
    return tokens


def own(words: torch.Tensor, first: int, end: int) -> torch.Tensor:
    rows = team().empty((len(words),), torch.int64)
    team().call.native_own(address(words), len(words), first, end, address(rows))
    return rows


def blank(x: torch.Tensor, words: torch.Tensor, first: int, end: int) -> None:
    """In place."""
    team().call.native_blank(address(words), len(words), x.shape[1], first, end, address(x))
