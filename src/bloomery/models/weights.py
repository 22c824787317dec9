"""The checkpoint read by canonical name: the model pulls what it needs, stating the shape it expects.

The one place where stored layouts are undone: q, k and v apart or fused, grouped by head or not, transposed or
not, experts one by one or stacked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bloomery.layers.linear import Linear
from bloomery.layers.norm import Normalize
from bloomery.models.checkpoint import Source
from bloomery.quant.base import Range, Stored
from bloomery.quant.dense import Dense
from bloomery.spec import Attention, Fused, Names, Norm, Split


class Weights:
    def __init__(self, source: Source, names: Names, dtype: torch.dtype, device: torch.device):
        self.source, self.names, self.dtype, self.device = source, names, dtype, device

    def vector(self, name: str, size: int | tuple[int, int]) -> torch.Tensor:
        """A norm's weight or a bias; small, so in float32."""
        shape = (size,) if isinstance(size, int) else size
        return self.source.tensor(name, shape).load(torch.float32, self.device)

    def table(self, name: str, rows: int, cols: int) -> torch.Tensor:
        """An embedding."""
        return self.source.tensor(f"{name}.weight", (rows, cols)).load(self.dtype, self.device)

    def norm(self, spec: Norm | None, name: str, size: int | tuple[int, int]) -> Normalize | None:
        if spec is None:
            return None
        weight = self.vector(f"{name}.weight", size) if spec.weight else None
        if weight is not None and spec.unit_offset:
            weight = 1 + weight
        return Normalize(spec, weight, self.vector(f"{name}.bias", size) if spec.bias else None)

    def linear(
        self,
        prefix: str,
        stored: str | Split | Fused,
        parts: Sequence[int],
        inputs: int,
        bias: bool,
        heads: Attention | None = None,
        expert: int | None = None,
    ) -> Linear:
        """The product whose outputs are `parts`, in that order, however the checkpoint keeps them."""
        weight = Dense(self._stored(prefix, stored, "weight", parts, inputs, heads, expert))
        vector = self._stored(prefix, stored, "bias", parts, None, heads, expert) if bias else None
        return Linear(
            weight.prepare(self.dtype, self.device), None if vector is None else vector.load(self.dtype, self.device)
        )

    def _stored(
        self,
        prefix: str,
        stored: str | Split | Fused,
        kind: str,
        parts: Sequence[int],
        inputs: int | None,
        heads: Attention | None,
        expert: int | None,
    ) -> Stored:
        def pull(name: str, rows: int) -> Stored:
            shape = (rows,) if inputs is None else (rows, inputs)
            transposed = self.names.transposed and kind == "weight"
            return self.source.tensor(f"{prefix}{name}.{kind}", shape, transposed=transposed, expert=expert)

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
