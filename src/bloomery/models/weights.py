"""Loads the weights of a model: the decoder requests each weight with the shape it expects.

Only this file handles the layouts of checkpoints: q, k and v separate or fused, grouped by head or
not, transposed or not, experts separate or stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self, TypeVar

import torch

from bloomery.fusion import NormPrologue
from bloomery.layers.linear import LinearLayer
from bloomery.layout import UNSHARDED, TensorParallelLayout, WeightShard
from bloomery.models.checkpoint import WeightSource
from bloomery.native.thread_pool import ThreadPool
from bloomery.parallel.groups import CommunicationGroup
from bloomery.quant.base import LinearSpec, PreparedWeight, WeightFormat, WeightMatrix
from bloomery.quant.dense import DenseFormat
from bloomery.quant.lazy_tensor import LazyTensor, Range
from bloomery.spec import AttentionSpec, FusedTensor, NormSpec, SplitTensors, TensorNames


class ModelWeights:
    """Loads the weights of one rank onto its device."""

    def __init__(
        self,
        source: WeightSource,
        names: TensorNames,
        dtype: torch.dtype,
        device: torch.device,
        format: WeightFormat | None = None,
        layout: TensorParallelLayout = TensorParallelLayout(),  # noqa: B008 (it is frozen)
        pool: ThreadPool | None = None,
    ):
        self.source = source
        self.names = names
        self.dtype = dtype
        self.device = device
        self.format = format or DenseFormat()
        self.layout = layout
        self.pool = pool
        self.loaded_bytes = 0

    # ---- vectors ----

    def vector(self, name: str, shape: int | tuple[int, int]) -> torch.Tensor:
        """Load a norm's weight or bias, in float32."""
        if isinstance(shape, int):
            stored = self.source.tensor(name, (shape,))
        else:
            stored = self.source.tensor(name, shape)
        return self._load_tensor(stored, torch.float32)

    def bias(self, name: str, size: int, shard: WeightShard = UNSHARDED) -> torch.Tensor:
        """Load the bias of a linear layer, in the model's dtype."""
        stored = select_rows(self.source.tensor(name, (size,)), shard)
        return self._load_tensor(stored, self.dtype)

    def position_table(self, name: str, rows: int, cols: int) -> torch.Tensor:
        """Load learned position embeddings."""
        return self._load_tensor(self.source.tensor(f"{name}.weight", (rows, cols)), self.dtype)

    def norm(
        self,
        spec: NormSpec | None,
        name: str,
        shape: int | tuple[int, int],
        heads: Range = (0, 0),
    ) -> NormPrologue | None:
        """Load a norm. With a shape [heads, dim] each head has its own weights; loads `heads`."""
        if spec is None:
            return None
        weight = self._norm_vector(f"{name}.weight", shape, heads) if spec.weight else None
        if weight is not None and spec.unit_offset:
            weight = 1 + weight
        bias = self._norm_vector(f"{name}.bias", shape, heads) if spec.bias else None
        return NormPrologue(spec.kind, weight, bias, spec.eps)

    def _norm_vector(self, name: str, shape: int | tuple[int, int], heads: Range) -> torch.Tensor:
        """Load a norm's weight or bias; a name with {h} has one tensor for each head."""
        if isinstance(shape, int):
            return self.vector(name, shape)
        if "{h}" not in name:
            return self.vector(name, shape)[slice(*heads)]
        return torch.stack([self.vector(name.format(h=h), shape[1]) for h in range(*heads)])

    def _load_tensor(self, stored: LazyTensor, dtype: torch.dtype) -> torch.Tensor:
        loaded = stored.load(dtype, self.device)
        self.loaded_bytes += loaded.nbytes
        return loaded

    # ---- matrices ----

    def linear(
        self,
        prefix: str,
        stored: str | SplitTensors | FusedTensor,
        parts: Sequence[int],
        inputs: int,
        bias: bool,
        heads: AttentionSpec | None = None,
        shard: WeightShard = UNSHARDED,
        group: CommunicationGroup | None = None,
    ) -> LinearLayer:
        """Load a linear layer of a decoder layer.

        Its outputs are `parts` in this order, however the checkpoint stores them. `shard` is the
        part that this rank holds; results are summed over the ranks of `group`.
        """
        loaded_bias = None
        if bias and shard.bias:

            def read_bias(name: str, rows: int) -> LazyTensor:
                return self.source.tensor(f"{prefix}{name}.bias", (rows,))

            arranged = arrange_parts(read_bias, stored, parts, heads)
            loaded_bias = self._load_tensor(select_rows(arranged, shard), self.dtype)
        matrix = self._stored_matrix(prefix, stored, parts, inputs, heads)
        prepared = self._prepare(select_shard(matrix, shard))
        return LinearLayer(prepared, loaded_bias, group, self.pool)

    def outer_linear(
        self,
        name: str,
        outputs: int,
        inputs: int,
        bias: bool = False,
        shard: WeightShard = UNSHARDED,
    ) -> LinearLayer:
        """Load an embedding, or a linear layer outside of the decoder layers; never transposed."""
        spec = LinearSpec(name, (outputs, inputs), in_decoder_layer=False)
        matrix = self.format.open_matrix(self.source, spec)
        loaded_bias = self.bias(f"{name}.bias", outputs, shard) if bias else None
        prepared = self._prepare(select_shard(matrix, shard))
        return LinearLayer(prepared, loaded_bias, None, self.pool)

    def experts(
        self,
        prefix: str,
        stored: str | SplitTensors | FusedTensor,
        num_experts: int,
        parts: Sequence[int],
        inputs: int,
        shard: WeightShard = UNSHARDED,
    ) -> PreparedWeight:
        """Load the matrices of all experts, stacked: [experts * sum of parts, inputs].

        `shard` is the part of each expert that this rank holds.
        """
        matrices = []
        for expert in range(num_experts):
            matrix = self._stored_matrix(
                prefix + self.names.experts.format(e=expert),
                stored,
                parts,
                inputs,
                expert=expert if self.names.stacked_experts else None,
            )
            matrices.append(select_shard(matrix, shard))
        first, *others = matrices
        return self._prepare(first.cat(others))

    def _stored_matrix(
        self,
        prefix: str,
        stored: str | SplitTensors | FusedTensor,
        parts: Sequence[int],
        inputs: int,
        heads: AttentionSpec | None = None,
        expert: int | None = None,
    ) -> WeightMatrix:
        extra = self.names.extra
        unquantized = (extra.get("router"), extra.get("shared_gate"))

        def read_matrix(name: str, rows: int) -> WeightMatrix:
            spec = LinearSpec(
                f"{prefix}{name}",
                (rows, inputs),
                self.names.transposed,
                expert,
                unquantized=name in unquantized,
            )
            return self.format.open_matrix(self.source, spec)

        return arrange_parts(read_matrix, stored, parts, heads)

    def _prepare(self, matrix: WeightMatrix) -> PreparedWeight:
        prepared = matrix.prepare(self.dtype, self.device, self.pool)
        self.loaded_bytes += prepared.nbytes
        return prepared


class RowArrangeable(Protocol):
    """The operations that weight matrices and biases have in common."""

    def rows(self, ranges: Sequence[Range]) -> Self: ...
    def cat(self, others: Sequence[Self]) -> Self: ...


T = TypeVar("T", bound=RowArrangeable)


def select_rows(stored: T, shard: WeightShard) -> T:
    """Return the rows of the shard."""
    return stored if shard.rows is None else stored.rows(shard.rows)


def select_shard(matrix: WeightMatrix, shard: WeightShard) -> WeightMatrix:
    """Return the rows and columns of the shard."""
    matrix = select_rows(matrix, shard)
    return matrix if shard.cols is None else matrix.cols(*shard.cols)


def arrange_parts(
    read: Callable[[str, int], T],
    stored: str | SplitTensors | FusedTensor,
    parts: Sequence[int],
    heads: AttentionSpec | None,
) -> T:
    """Concatenate the `parts` by rows; `read(name, rows)` reads one tensor of the checkpoint."""
    if isinstance(stored, SplitTensors):
        first, *others = map(read, stored.names, parts)
        return first.cat(others)
    if isinstance(stored, FusedTensor):
        fused = read(stored.name, sum(parts))
        if stored.grouped and heads is not None:
            return fused.rows(ungrouped_qkv_ranges(heads))
        return fused
    return read(stored, sum(parts))


def ungrouped_qkv_ranges(spec: AttentionSpec) -> list[Range]:
    """Return the rows of all q, all k, all v in a matrix of [kv_head][q heads, k, v][head_dim]."""
    q_heads = spec.num_heads // spec.num_kv_heads
    group_heads = q_heads + 2
    q_ranges = []
    k_ranges = []
    v_ranges = []
    for group in range(spec.num_kv_heads):
        first = group * group_heads * spec.head_dim
        k_first = first + q_heads * spec.head_dim
        v_first = k_first + spec.head_dim
        q_ranges.append((first, k_first))
        k_ranges.append((k_first, v_first))
        v_ranges.append((v_first, v_first + spec.head_dim))
    return [*q_ranges, *k_ranges, *v_ranges]
