"""Matrices that native CPU kernels read, GGUF's blocks; and grids as such blocks, of 32.

Of a grid the same codes and scales; the offset of a block, a zero times a scale, is rounded to half precision: an error
of less than a hundredth of a step. The products' inputs are rounded to eight bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bloomery.kernels.cpu import phrase
from bloomery.kernels.gemv import After, Norm
from bloomery.kernels.packed import Grid, unpack
from bloomery.native import ops
from bloomery.native.team import team

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


def native(packed: object, dtype: torch.dtype) -> BlocksReady | None:
    """None where there are no such kernels, or these blocks cannot say it."""
    if not isinstance(packed, Grid) or packed.codes.device.type != "cpu" or dtype != torch.float32:
        return None
    if not team().active or packed.order is not None or packed.shape[1] % WIDTH or packed.group % WIDTH:
        return None
    if packed.bits == 4:
        return ready("Q4_1", fours(packed), packed.shape[1])
    if packed.bits == 8 and packed.codes.dtype == torch.int8 and packed.zero is None and packed.scale.min() >= NORMAL:
        return ready("Q8_0", eights(packed), packed.shape[1])
    return None


def ready(kind: str, blocks: torch.Tensor, width: int) -> BlocksReady:
    return BlocksReady(ops.Matrix(width, [(ops.pack(kind, blocks, width), len(blocks), ops.PACKED[kind][1])]))


def fours(packed: Grid) -> torch.Tensor:
    """Scale, offset, and 32 codes of which the last 16 lie in the high halves: uint8 [rows, bytes]."""
    codes = unpack(packed.codes, 4).unflatten(1, (-1, WIDTH))
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
