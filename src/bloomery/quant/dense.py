"""Weights in full precision: the format every other one is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
import torch.nn.functional as F

from bloomery.kernels.cpu import phrase
from bloomery.kernels.gemv import Activation, After, Norm, pays, product_rows, shifts
from bloomery.native import ops
from bloomery.native.team import team
from bloomery.quant.base import Product, Range, Ready, Stored, Tensors, part

# which the GPU's library puts behind a product of many tokens
GELU = Activation("gelu_tanh", gated=False)
MANY = 256
NATIVE = (
    4  # tokens up to which our own kernel reads the weights fastest; a recorded step has no other
)
FEW = (
    48  # tokens up to which a CPU's matrix library is a quarter faster with the weights on the left
)


@dataclass(frozen=True)
class Dense:
    """Weights still in their file."""

    weight: Stored  # [out, in]

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.weight.shape
        return rows, cols

    def rows(self, ranges: Sequence[Range]) -> Self:
        return replace(self, weight=self.weight.rows(ranges))

    def cols(self, start: int, end: int) -> Self:
        return replace(self, weight=self.weight.cols(start, end))

    def cat(self, others: Sequence[Self]) -> Self:
        return replace(self, weight=self.weight.cat([other.weight for other in others]))

    def prepare(self, dtype: torch.dtype, device: torch.device) -> Ready:
        return DenseReady.of(self.weight.begin(dtype, device).tensor)  # nobody looks at it yet

    def dense(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.weight.load(dtype, device)


class DenseFormat:
    """A tensor a product, as `name.weight`."""

    def matrix(self, tensors: Tensors, product: Product) -> Dense:
        name = f"{product.name}.weight"
        return Dense(
            part(tensors, name, product.shape, transposed=product.transposed, expert=product.expert)
        )


@dataclass(frozen=True)
class DenseReady:
    """Weights on the device."""

    weight: torch.Tensor  # [out, in]
    native: ops.Matrix | None = None  # the same for a CPU's own kernels
    shifts: dict[int, torch.Tensor] = field(
        default_factory=dict, compare=False
    )  # by the norm in front of the product

    @classmethod
    def of(cls, weight: torch.Tensor) -> DenseReady:
        return cls(weight, ops.Matrix.dense(weight) if team().takes(weight) else None)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weight[rows]

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.native is not None and (y := self.phrase(x, bias, None, None)) is not None:
            return y
        if x.device.type == "cpu" and 1 < len(x) <= FEW:
            y = (self.weight @ x.t()).t()
            return (y if bias is None else y + bias).contiguous()
        return F.linear(x, self.weight, bias)

    def phrase(
        self, x: torch.Tensor, bias: torch.Tensor | None, before: Norm | None, after: After
    ) -> torch.Tensor | None:
        if self.native is not None and (len(x) <= NATIVE or team().arena is not None):
            return phrase(self.native, x, bias, before, after)
        if before is None and bias is not None and after == GELU and x.is_cuda and len(x) > MANY:
            return torch._addmm_activation(bias, x, self.weight.t(), use_gelu=True)
        if not pays(len(x), self.weight, before, after):
            return None
        shift = None
        if before is not None and before.kind == "layer":
            if id(before) not in self.shifts:
                self.shifts[id(before)] = shifts(self.weight, before)
            shift = self.shifts[id(before)]
        return product_rows(x, self.weight, bias, before, after, shift=shift)
