"""Weights in full precision: the format every other one is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bloomery.kernels.gemv import After, Norm, pays, product_rows
from bloomery.quant.base import Product, Range, Stored, Tensors

FEW = 48  # tokens up to which a CPU's matrix library is a quarter faster with the weights on the left


@dataclass(frozen=True)
class Dense:
    """Weights still in their file."""

    weight: Stored  # [out, in]

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.weight.shape
        return rows, cols

    def rows(self, ranges: Sequence[Range]) -> Dense:
        return Dense(self.weight.rows(ranges))

    def cols(self, start: int, end: int) -> Dense:
        return Dense(self.weight.cols(start, end))

    def cat(self, others: Sequence[Dense]) -> Dense:
        return Dense(self.weight.cat([other.weight for other in others]))

    def prepare(self, dtype: torch.dtype, device: torch.device) -> DenseReady:
        return DenseReady(self.dense(dtype, device))

    def dense(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.weight.load(dtype, device)


class DenseFormat:
    """A tensor a product, as `name.weight`."""

    def matrix(self, tensors: Tensors, product: Product) -> Dense:
        name, shape, transposed, expert, _ = product
        return Dense(tensors.tensor(f"{name}.weight", shape, transposed, expert))


@dataclass(frozen=True)
class DenseReady:
    """Weights on the device."""

    weight: torch.Tensor  # [out, in]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weight[rows]

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.device.type == "cpu" and 1 < len(x) <= FEW:
            y = (self.weight @ x.t()).t()
            return (y if bias is None else y + bias).contiguous()
        return F.linear(x, self.weight, bias)

    def phrase(
        self, x: torch.Tensor, bias: torch.Tensor | None, before: Norm | None, after: After
    ) -> torch.Tensor | None:
        return product_rows(x, self.weight, bias, before, after) if pays(len(x), self.weight, before, after) else None
