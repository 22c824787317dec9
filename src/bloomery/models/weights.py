"""The checkpoint read by canonical name: the model pulls what it needs, stating the shape it expects.

The one place where stored layouts are undone: q, k and v apart or fused, grouped by head or not, transposed or
not, experts one by one or stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self, TypeVar

import torch

from bloomery.kernels.gemv import Norm as NormWeights
from bloomery.layers.linear import Linear
from bloomery.layout import WHOLE, Layout, Part
from bloomery.models.checkpoint import Source
from bloomery.parallel.groups import ALONE, Group
from bloomery.quant.base import Format, Matrix, Product, Range, Ready, Stored
from bloomery.quant.dense import DenseFormat
from bloomery.spec import Attention, Fused, Names, Norm, Split


class Weights:
    def __init__(
        self,
        source: Source,
        names: Names,
        dtype: torch.dtype,
        device: torch.device,
        format: Format | None = None,
        layout: Layout = Layout(),  # frozen
    ):
        self.source = source
        self.names = names
        self.dtype = dtype
        self.device = device
        self.format = format or DenseFormat()
        self.layout = layout
        self.bytes = 0  # of what has been loaded

    def vector(self, name: str, size: int | tuple[int, int]) -> torch.Tensor:
        """A norm's weight or a bias; small, so in float32."""
        shape = (size,) if isinstance(size, int) else size
        return self._loaded(self.source.tensor(name, shape), torch.float32)

    def table(self, name: str, rows: int, cols: int) -> torch.Tensor:
        """Learned positions."""
        return self._loaded(self.source.tensor(f"{name}.weight", (rows, cols)), self.dtype)

    def _loaded(self, stored: Stored, dtype: torch.dtype) -> torch.Tensor:
        loaded = stored.load(dtype, self.device)
        self.bytes += loaded.nbytes
        return loaded

    def _prepared(self, matrix: Matrix) -> Ready:
        ready = matrix.prepare(self.dtype, self.device)
        self.bytes += ready.nbytes
        return ready

    def norm(
        self, spec: Norm | None, name: str, size: int | tuple[int, int], heads: Range = (0, 0)
    ) -> NormWeights | None:
        """A norm of which each head has its own is that of these heads."""
        if spec is None:
            return None
        weight = self._each(f"{name}.weight", size, heads) if spec.weight else None
        if weight is not None and spec.unit_offset:
            weight = 1 + weight
        bias = self._each(f"{name}.bias", size, heads) if spec.bias else None
        return NormWeights(spec.kind, weight, bias, spec.eps)

    def _each(self, name: str, size: int | tuple[int, int], heads: Range) -> torch.Tensor:
        """A norm's vector; one with {h} in its name is kept head by head."""
        if isinstance(size, int):
            return self.vector(name, size)
        if "{h}" not in name:
            return self.vector(name, size)[slice(*heads)]
        return torch.stack([self.vector(name.format(h=h), size[1]) for h in range(*heads)])

    def outside(
        self, name: str, outputs: int, inputs: int, bias: bool = False, part: Part = WHOLE
    ) -> Linear:
        """An embedding, or a product that is not part of a layer; never transposed."""
        matrix = self.format.matrix(self.source, Product(name, (outputs, inputs), inside=False))
        vector = self.bias(f"{name}.bias", outputs, part) if bias else None
        return Linear(self._prepared(kept(matrix, part)), vector)

    def bias(self, name: str, size: int, part: Part = WHOLE) -> torch.Tensor:
        """A bias beside a product, in the product's own precision."""
        return self._loaded(of_rows(self.source.tensor(name, (size,)), part), self.dtype)

    def linear(
        self,
        prefix: str,
        stored: str | Split | Fused,
        parts: Sequence[int],
        inputs: int,
        bias: bool,
        heads: Attention | None = None,
        part: Part = WHOLE,
        group: Group = ALONE,
    ) -> Linear:
        """The product whose outputs are `parts`, in that order, however the checkpoint keeps them.

        `part` is what this rank keeps of it, `group` those with whom its results must be added up.
        """
        vector = None
        if bias and part.bias:
            tensor = self.source.tensor
            found = arranged(
                lambda name, rows: tensor(f"{prefix}{name}.bias", (rows,)), stored, parts, heads
            )
            vector = self._loaded(of_rows(found, part), self.dtype)
        matrix = kept(self._matrix(prefix, stored, parts, inputs, heads), part)
        return Linear(self._prepared(matrix), vector, group)

    def experts(
        self,
        prefix: str,
        stored: str | Split | Fused,
        experts: Sequence[int],
        parts: Sequence[int],
        inputs: int,
        part: Part = WHOLE,
    ) -> Ready:
        """One product an expert, stacked: [experts * sum of parts, inputs]; of each what this rank keeps."""
        names = self.names
        every = (
            self._matrix(
                prefix + names.experts.format(e=e),
                stored,
                parts,
                inputs,
                expert=e if names.stacked_experts else None,
            )
            for e in experts
        )
        first, *others = (kept(matrix, part) for matrix in every)
        return self._prepared(first.cat(others))

    def _matrix(
        self,
        prefix: str,
        stored: str | Split | Fused,
        parts: Sequence[int],
        inputs: int,
        heads: Attention | None = None,
        expert: int | None = None,
    ) -> Matrix:
        def pull(name: str, rows: int) -> Matrix:
            precise = name in (self.names.extra.get("router"), self.names.extra.get("shared_gate"))
            product = Product(
                f"{prefix}{name}", (rows, inputs), self.names.transposed, expert, precise=precise
            )
            return self.format.matrix(self.source, product)

        return arranged(pull, stored, parts, heads)


class Arrangeable(Protocol):
    """What a matrix and a bias have in common."""

    def rows(self, ranges: Sequence[Range]) -> Self: ...
    def cat(self, others: Sequence[Self]) -> Self: ...


T = TypeVar("T", bound=Arrangeable)


def of_rows(whole: T, part: Part) -> T:
    return whole if part.rows is None else whole.rows(part.rows)


def kept(matrix: Matrix, part: Part) -> Matrix:
    """What a rank keeps of a matrix."""
    matrix = of_rows(matrix, part)
    return matrix if part.cols is None else matrix.cols(*part.cols)


def arranged(
    pull: Callable[[str, int], T],
    stored: str | Split | Fused,
    parts: Sequence[int],
    heads: Attention | None,
) -> T:
    """`parts` one after another, pulled by name and number of rows from wherever they lie."""
    if isinstance(stored, Split):
        first, *others = map(pull, stored.names, parts)
        return first.cat(others)
    whole = pull(stored.name if isinstance(stored, Fused) else stored, sum(parts))
    return (
        whole.rows(grouped_ranges(heads))
        if isinstance(stored, Fused) and stored.grouped and heads
        else whole
    )


def grouped_ranges(spec: Attention) -> list[Range]:
    """Rows of all q, all k, all v inside a matrix stored as [kv_head][its q heads, k, v][head_dim]."""
    share = spec.num_heads // spec.num_kv_heads
    dim = spec.head_dim
    width = share + 2
    groups = range(spec.num_kv_heads)

    def span(head: int, count: int) -> Range:
        return head * dim, (head + count) * dim

    return [
        *(span(g * width, share) for g in groups),
        *(span(g * width + share, 1) for g in groups),
        *(span(g * width + share + 1, 1) for g in groups),
    ]
