"""Any checkpoint rounded while it is read: a panel of rows at a time, on the device, so that no dense matrix ever is.

Embedding and head take eight bits in every format: they are the last to be rounded and the first to be missed. Routers
stay as they are: they are small, and a token sent to the wrong expert is no rounding error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from bloomery.kernels.packed import Packed
from bloomery.quant.base import Product, Range, Stored, Tensors, ahead
from bloomery.quant.dense import DenseFormat
from bloomery.quant.packed import Held, PackedMatrix, joined, kept, within

Pack = Callable[[torch.Tensor], Packed]  # float32 [rows, in]; rows do not know of each other
PANEL = 1 << 24  # values rounded at once: fewer, and the host is what is waited for
CACHED = 1 << 19  # the same on a CPU
AHEAD = 16  # panels on their way while one is rounded


@dataclass(frozen=True)
class OnLoad:
    inside: Pack  # of layers
    outside: Pack

    def matrix(self, tensors: Tensors, product: Product) -> PackedMatrix:
        if product.precise:
            return kept(tensors, product)
        weight = DenseFormat().matrix(tensors, product).weight
        pack = self.inside if product.inside else self.outside

        def read(ranges: Sequence[Range], dtype: torch.dtype, device: torch.device) -> Held:
            loaded = in_panels(weight, ranges, product.shape[1], device)
            return joined(
                [pack(panel.float()) for panel in loaded]
            )  # widened where it is, not on the way there

        return PackedMatrix.whole(product, read)


def in_panels(
    stored: Stored, ranges: Sequence[Range], width: int, device: torch.device
) -> Iterator[torch.Tensor]:
    """These rows of `width` values, as the file has them."""
    cpu = device.type == "cpu"
    height = max(1, (CACHED if cpu else PANEL) // width)
    begun = (stored.rows(panel).begin(stored.dtype, device) for panel in panels(ranges, height))
    return ahead(begun, 1 if cpu else AHEAD)


def panels(ranges: Sequence[Range], height: int) -> Iterator[list[Range]]:
    total = sum(end - start for start, end in ranges)
    for row in range(0, total, height):
        yield list(within(ranges, row, min(row + height, total)))
