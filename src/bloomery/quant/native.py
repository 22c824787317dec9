"""Matrices that native CPU kernels read, GGUF's blocks; and packed products as such blocks, of 32.

Of a grid of up to four bits the same codes and scales; the offset of a block, a zero times a scale, is rounded to half
precision: an error of less than a hundredth of a step. What such blocks cannot say (tables, 8-bit floats, act-order) is
rounded to eight bits, 127 steps to the largest of a block: a small part of what the format's own rounding cost, and
many times faster than to unpack before every product. The products' inputs are rounded to eight bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from bloomery.kernels.cpu import phrase
from bloomery.kernels.gemv import After, Norm
from bloomery.kernels.packed import Grid, unpack
from bloomery.native import ops
from bloomery.native.team import team
from bloomery.quant.int8 import int8

WIDTH = 32
NORMAL = 2.0**-14  # below it half precision has fewer digits


@dataclass(frozen=True)
class BlocksReady:
    """Weights as native kernels read them. Activations are rounded to eight bits, with a scale for every 32."""

    matrix: ops.Matrix

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return ops.gather(self.matrix, rows)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if team().takes(x, bias):
            return ops.linear(self.matrix, x, bias)
        y = ops.linear(self.matrix, x.float().contiguous())
        return (y if bias is None else y + bias).to(x.dtype)

    def phrase(
        self, x: torch.Tensor, bias: torch.Tensor | None, before: Norm | None, after: After
    ) -> torch.Tensor | None:
        return phrase(self.matrix, x, bias, before, after)

    def reference(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The same product without rounding the activations, from the values the blocks stand for."""
        return F.linear(x, self.gather(torch.arange(self.matrix.rows)), bias)


class Unpackable(Protocol):
    """What kernels.packed knows, or more."""

    @property
    def codes(self) -> torch.Tensor: ...
    @property
    def shape(self) -> tuple[int, int]: ...


def native(
    packed: Unpackable, dtype: torch.dtype, panels: Iterator[torch.Tensor]
) -> BlocksReady | None:
    """None where there are no such kernels, or rows are not whole blocks. `panels`: its values, some rows at a time."""
    width = packed.shape[1]
    if (
        not team().active
        or packed.codes.device.type != "cpu"
        or dtype != torch.float32
        or width % WIDTH
    ):
        return None
    if isinstance(packed, Grid) and packed.order is None and packed.group % WIDTH == 0:
        if packed.bits <= 4:
            return ready("Q4_1", fours(packed), width)
        if (
            packed.codes.dtype == torch.int8
            and packed.zero is None
            and packed.scale.min() >= NORMAL
        ):
            return ready("Q8_0", eights(packed), width)
    segment = rounded(packed.shape, panels)
    return None if segment is None else BlocksReady(ops.Matrix(width, [segment]))


def rounded(shape: tuple[int, int], panels: Iterator[torch.Tensor]) -> ops.Segment | None:
    """Values, some rows at a time, in blocks of eight bits; None where they are too small for scales of half floats."""
    (rows, width) = shape
    row = 0
    largest = 0.0
    blocks = torch.empty(rows, width // WIDTH * (2 + WIDTH), dtype=torch.uint8)
    for panel in panels:
        part = int8(panel.reshape(-1, WIDTH))
        blocks[row : row + len(panel)] = eights(part).view(len(panel), -1)
        row = row + len(panel)
        largest = max(largest, float(part.scale.max()))
    return ops.segment("Q8_0", blocks, width) if largest >= NORMAL / 8 else None


def ready(kind: str, blocks: torch.Tensor, width: int) -> BlocksReady:
    return BlocksReady(ops.Matrix(width, [ops.segment(kind, blocks, width)]))


def fours(packed: Grid) -> torch.Tensor:
    """Scale, offset, and 32 codes of which the last 16 lie in the high halves: uint8 [rows, bytes]."""
    codes = unpack(packed.codes, packed.bits).unflatten(1, (-1, WIDTH))
    nibbles = codes[..., : WIDTH // 2] | codes[..., WIDTH // 2 :] << 4
    zero = torch.full_like(packed.scale, packed.middle) if packed.zero is None else packed.zero
    offset = -(zero.float() * packed.scale.float())
    return torch.cat([each(packed, packed.scale), each(packed, offset), nibbles], -1).flatten(1)


def eights(packed: Grid) -> torch.Tensor:
    codes = packed.codes.view(torch.uint8).unflatten(1, (-1, WIDTH))
    return torch.cat([each(packed, packed.scale), codes], -1).flatten(1)


def each(packed: Grid, values: torch.Tensor) -> torch.Tensor:
    """A half float a block, as bytes: [rows, blocks, 2]."""
    return values.half().repeat_interleave(packed.group // WIDTH, 1)[..., None].view(torch.uint8)
