"""GGUF's blocks kept in their own bits: the numbers and scales of the file, interleaved for the kernels that read them.

On a CPU with native kernels a matrix is never expanded; rows and columns are moves of whole blocks. Elsewhere, for a
type the kernels do not know, or where a shard cuts a block in two, the matrix is expanded as it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bloomery.kernels.cpu import phrase
from bloomery.kernels.gemv import After, Norm
from bloomery.native import ops
from bloomery.native.team import team
from bloomery.quant.base import Piece, Product, Range, Ready, Stored, Tensors
from bloomery.quant.dense import Dense


@dataclass(frozen=True)
class Blocks:
    """Weights still in their file."""

    weight: Stored  # [out, in]

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.weight.shape
        return rows, cols

    def rows(self, ranges: Sequence[Range]) -> Blocks:
        return Blocks(self.weight.rows(ranges))

    def cols(self, start: int, end: int) -> Blocks:
        return Blocks(self.weight.cols(start, end))

    def cat(self, others: Sequence[Blocks]) -> Blocks:
        return Blocks(self.weight.cat([other.weight for other in others]))

    def prepare(self, dtype: torch.dtype, device: torch.device) -> Ready:
        kept = device.type == "cpu" and dtype == torch.float32 and team().active
        if kept and all(packable(piece) for piece in self.weight.pieces):
            return BlocksReady(ops.Matrix(self.shape[1], [packed(piece) for piece in self.weight.pieces]))
        return Dense(self.weight).prepare(dtype, device)

    def dense(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.weight.load(dtype, device)


class BlocksFormat:
    """A tensor a product, as `name.weight`."""

    def matrix(self, tensors: Tensors, product: Product) -> Blocks:
        return Blocks(tensors.tensor(f"{product.name}.weight", product.shape, product.transposed, product.expert))


def packable(piece: Piece) -> bool:
    if piece.blocks is None or piece.cols is None or piece.blocks.kind not in ops.PACKED:
        return False
    return piece.cols[0] % piece.blocks.values == 0 and piece.cols[1] % piece.blocks.values == 0


def packed(piece: Piece) -> tuple[torch.Tensor, int, int]:
    """A segment of a native matrix."""
    blocks, cols = piece.blocks, piece.cols
    if blocks is None or cols is None:
        raise ValueError("a piece without blocks")
    start, end = (col // blocks.values * blocks.bytes for col in cols)
    data = ops.pack(blocks.kind, blocks.read(piece.rows)[:, start:end], cols[1] - cols[0])
    return data, piece.height, ops.PACKED[blocks.kind][1]


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
