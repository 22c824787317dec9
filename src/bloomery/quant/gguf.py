"""GGUF's blocks kept in their own bits: the codes and scales of the file, laid out for the kernels that read them.

On a CPU in float32 these are the native ones, for which blocks are interleaved; a type they do not know, and a shard
that cuts a block in two, is rounded to eight bits. Without them the matrix is expanded as it is read, for there it is
the fastest. Elsewhere blocks become what kernels.packed knows, and only what that cannot say is expanded: other types,
and shards cut inside of 16 columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from bloomery.native import ops
from bloomery.native.team import team
from bloomery.quant.base import Piece, Product, Ready, Tensors
from bloomery.quant.dense import Dense, DenseFormat
from bloomery.quant.gguf_blocks import STEPS
from bloomery.quant.native import WIDTH, BlocksReady, rounded
from bloomery.quant.onload import in_panels
from bloomery.quant.packed import FINEST, Held, as_ready, cut


class Blocks(Dense):
    """Weights whose file has them in blocks."""

    def prepare(self, dtype: torch.dtype, device: torch.device) -> Ready:
        pieces = self.weight.pieces
        if device.type == "cpu" and dtype == torch.float32:
            if (
                team().active
                and self.shape[1] % WIDTH == 0
                and all(piece.blocks for piece in pieces)
            ):
                found = [
                    packed(piece) if packable(piece) else self.rounded(piece) for piece in pieces
                ]
                segments = [segment for segment in found if segment is not None]
                if len(segments) == len(pieces):
                    return BlocksReady(ops.Matrix(self.shape[1], segments))
        elif any(map(gridded, pieces)):
            return as_ready(self.held(dtype, device), dtype)
        return super().prepare(dtype, device)

    def held(self, dtype: torch.dtype, device: torch.device) -> Iterator[Held]:
        """Piece by piece, as any kernel but the native ones reads them."""
        for piece in self.weight.pieces:
            if gridded(piece):
                yield from matrices(piece, device)
            else:
                yield replace(self.weight, pieces=(piece,)).load(dtype, device)

    def rounded(self, piece: Piece) -> ops.Segment | None:
        """Of a type that native kernels do not know, or cut through its blocks."""
        part = replace(self.weight, pieces=(piece,))
        whole = [(0, piece.height)]
        return rounded(
            (piece.height, self.shape[1]),
            in_panels(part, whole, self.shape[1], torch.device("cpu")),
        )


class BlocksFormat:
    """A tensor a product, as `name.weight`."""

    def matrix(self, tensors: Tensors, product: Product) -> Blocks:
        return Blocks(DenseFormat().matrix(tensors, product).weight)


# ---- for kernels.packed --------------------------------------------------------------------------


def gridded(piece: Piece) -> bool:
    known = piece.blocks is not None and piece.blocks.kind in STEPS
    return known and piece.cols is not None and all(col % FINEST == 0 for col in piece.cols)


def matrices(piece: Piece, device: torch.device) -> Iterator[Held]:
    """A panel of rows at a time, taken apart on the device."""
    blocks = piece.blocks
    cols = piece.cols
    if blocks is None or cols is None:
        raise ValueError("a piece without blocks")
    # blocks that hold the columns
    first = cols[0] // blocks.values
    last = -(-cols[1] // blocks.values)
    start, end, width = (
        *(col - first * blocks.values for col in cols),
        (last - first) * blocks.values,
    )
    raw = blocks.raw.cols(first * blocks.bytes, last * blocks.bytes)
    for panel in in_panels(raw, [piece.rows], width, device):
        whole = STEPS[blocks.kind](panel.view(-1, blocks.bytes)).matrix(len(panel))
        yield whole if (start, end) == (0, width) else cut(whole, start, end, blocks.kind)


# ---- for native kernels --------------------------------------------------------------------------


def packable(piece: Piece) -> bool:
    if piece.blocks is None or piece.cols is None or piece.blocks.kind not in ops.PACKED:
        return False
    return piece.cols[0] % piece.blocks.values == 0 and piece.cols[1] % piece.blocks.values == 0


def packed(piece: Piece) -> ops.Segment:
    blocks = piece.blocks
    cols = piece.cols
    if blocks is None or cols is None:
        raise ValueError("a piece without blocks")
    start, end = (col // blocks.values * blocks.bytes for col in cols)
    raw = blocks.raw.pieces[0].read(piece.rows, (start, end))  # a view of the file
    return ops.segment(blocks.kind, raw, cols[1] - cols[0])
