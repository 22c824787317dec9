"""The checkpoint read by canonical name: the model pulls what it needs, stating the shape it expects.

The one place where stored layouts are undone: q, k and v apart or fused, grouped by head or not, transposed or
not, experts one by one or stacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from bloomery.kernels.gemv import Norm as NormWeights
from bloomery.layers.linear import Linear
from bloomery.models.checkpoint import Source
from bloomery.quant.base import Range, Stored
from bloomery.quant.dense import Dense
from bloomery.spec import Attention, Fused, Names, Norm, Split


class Weights:
    def __init__(self, source: Source, names: Names, dtype: torch.dtype, device: torch.device):
        self.source, self.names, self.dtype, self.device = source, names, dtype, device
        self.parameters = 0  # values pulled so far

    def vector(self, name: str, size: int | tuple[int, int]) -> torch.Tensor:
        """A norm's weight or a bias; small, so in float32."""
        shape = (size,) if isinstance(size, int) else size
        return self._pull(name, shape).load(torch.float32, self.device)

    def table(self, name: str, rows: int, cols: int) -> torch.Tensor:
        """An embedding."""
        return self._pull(f"{name}.weight", (rows, cols)).load(self.dtype, self.device)

    def _pull(self, name: str, shape: tuple[int, ...], transposed: bool = False, expert: int | None = None) -> Stored:
        self.parameters += prod(shape)
        return self.source.tensor(name, shape, transposed, expert)

    def norm(self, spec: Norm | None, name: str, size: int | tuple[int, int]) -> NormWeights | None:
        if spec is None:
            return None
        weight = self._each(f"{name}.weight", size) if spec.weight else None
        if weight is not None and spec.unit_offset:
            weight = 1 + weight
        bias = self._each(f"{name}.bias", size) if spec.bias else None
        return NormWeights(spec.kind, weight, bias, spec.eps)

    def _each(self, name: str, size: int | tuple[int, int]) -> torch.Tensor:
        """A norm's vector; one with {h} in its name is kept head by head."""
        if "{h}" not in name or isinstance(size, int):
            return self.vector(name, size)
        return torch.stack([self.vector(name.format(h=h), size[1]) for h in range(size[0])])

    def outside(self, name: str, outputs: int, inputs: int, bias: bool = False) -> Linear:
        """A product that is not part of a layer; never transposed."""
        weight = Dense(self._pull(f"{name}.weight", (outputs, inputs)))
        vector = self._pull(f"{name}.bias", (outputs,)).load(self.dtype, self.device) if bias else None
        return Linear(weight.prepare(self.dtype, self.device), vector)

    def linear(
        self,
        prefix: str,
        stored: str | Split | Fused,
        parts: Sequence[int],
        inputs: int,
        bias: bool,
        heads: Attention | None = None,
    ) -> Linear:
        """The product whose outputs are `parts`, in that order, however the checkpoint keeps them."""
        weight = Dense(self._stored(prefix, stored, "weight", parts, inputs, heads))
        vector = self._stored(prefix, stored, "bias", parts, None, heads) if bias else None
        return Linear(
            weight.prepare(self.dtype, self.device), None if vector is None else vector.load(self.dtype, self.device)
        )

    def experts(
        self, prefix: str, stored: str | Split | Fused, experts: Sequence[int], parts: Sequence[int], inputs: int
    ) -> torch.Tensor:
        """One product an expert, stacked: [experts, sum of parts, inputs]."""
        names = self.names
        first, *others = (
            self._stored(
                prefix + names.experts.format(e=e), stored, "weight", parts, inputs,
                expert=e if names.stacked_experts else None,
            )
            for e in experts
        )  # fmt: skip
        return first.cat(others).load(self.dtype, self.device).unflatten(0, (len(experts), -1))

    def _stored(
        self,
        prefix: str,
        stored: str | Split | Fused,
        kind: str,
        parts: Sequence[int],
        inputs: int | None,
        heads: Attention | None = None,
        expert: int | None = None,
    ) -> Stored:
        def pull(name: str, rows: int) -> Stored:
            shape = (rows,) if inputs is None else (rows, inputs)
            transposed = self.names.transposed and kind == "weight"
            return self._pull(f"{prefix}{name}.{kind}", shape, transposed, expert)

        if isinstance(stored, Split):
            first, *others = map(pull, stored.names, parts)
            return first.cat(others)
        tensor = pull(stored.name if isinstance(stored, Fused) else stored, sum(parts))
        if isinstance(stored, Fused) and stored.grouped and heads is not None:
            tensor = tensor.rows(grouped_ranges(heads))
        return tensor


def grouped_ranges(spec: Attention) -> list[Range]:
    """Rows of all q, all k, all v inside a matrix stored as [kv_head][its q heads, k, v][head_dim]."""
    share, dim = spec.num_heads // spec.num_kv_heads, spec.head_dim
    width = share + 2
    groups = range(spec.num_kv_heads)

    def span(head: int, count: int) -> Range:
        return head * dim, (head + count) * dim

    return [
        *(span(g * width, share) for g in groups),
        *(span(g * width + share, 1) for g in groups),
        *(span(g * width + share + 1, 1) for g in groups),
    ]
