"""Loads the weights of a model: the decoder requests each weight with the shape it expects.

Only this file handles the layouts of checkpoints: q, k, v and gate separate or fused, grouped by
head or not, gate and up by turns or not, transposed or not, experts separate or stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Protocol, Self, TypeVar

import torch
import torch.nn.functional as F

from bloomery.errors import UnsupportedModel
from bloomery.fusion import NormPrologue
from bloomery.layers.linear import LinearLayer, LowRankPart
from bloomery.layout import (
    UNSHARDED,
    TensorParallelLayout,
    WeightShard,
    gate_size,
    qkv_sizes,
)
from bloomery.models.adapter_memory import AdapterMemory
from bloomery.models.checkpoint import WeightSource
from bloomery.native.thread_pool import ThreadPool
from bloomery.parallel.groups import CommunicationGroup
from bloomery.quant.base import (
    CheckpointTensors,
    LinearSpec,
    PreparedWeight,
    WeightFormat,
    WeightMatrix,
)
from bloomery.quant.dense import DenseFormat, DenseMatrix, prepare_dense
from bloomery.quant.lazy_tensor import LazyTensor, Range
from bloomery.spec import (
    AttentionSpec,
    FusedTensor,
    GatedDeltaNetSpec,
    MlpSpec,
    NormSpec,
    RecurrentSpec,
    SplitTensors,
    TensorNames,
    recurrent_in_sizes,
)


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
        adapter_memory: AdapterMemory | None = None,
    ):
        """`adapter_memory`: linear layers are registered there for LoRA adapters."""
        self.source = source
        self.names = names
        self.dtype = dtype
        self.device = device
        self.format = format or DenseFormat()
        self.layout = layout
        self.pool = pool
        self.adapter_memory = adapter_memory
        self.loaded_bytes = 0
        self.expert_bytes = 0  # of these, the matrices of experts
        # What was loaded, by its names in the checkpoint: several layers may share it.
        self.vectors: dict[str, torch.Tensor] = {}
        self.matrices: dict[tuple[str, ...], tuple[PreparedWeight, torch.Tensor | None]] = {}

    # ---- vectors ----

    def vector(self, name: str, shape: int | tuple[int, int]) -> torch.Tensor:
        """Load a norm's weight or bias, in float32."""
        name = self.names.locate(name)
        if name not in self.vectors:
            stored = self.source.tensor(name, (shape,) if isinstance(shape, int) else shape)
            self.vectors[name] = self._load_tensor(stored, torch.float32)
        return self.vectors[name]

    def bias(self, name: str, size: int, shard: WeightShard = UNSHARDED) -> torch.Tensor:
        """Load the bias of a linear layer, in the model's dtype."""
        stored = select_rows(self._stored_vector(name, size), shard)
        return self._load_tensor(stored, self.dtype)

    def number(self, name: str) -> float:
        """Load a single number."""
        return float(self.vector(name, 1))

    def expert_vector(self, name: str, num_experts: int) -> torch.Tensor:
        """Load one number for each expert, in float32; it is stored as a vector or as one row."""
        stored = self.source.tensor(name, (1, num_experts))
        return self._load_tensor(stored, torch.float32)[0]

    def elements(self, name: str, shape: tuple[int, ...], rows: Range) -> torch.Tensor:
        """Load rows of a small tensor in float32, stored in any shape with these elements."""
        name = self.names.locate(name)
        stored_shape = shape
        if name in self.source.names():
            stored_shape = self.source.shape(name)
        if prod(stored_shape) != prod(shape) or len(stored_shape) > 2:
            stored_shape = shape  # the source explains what is wrong with it
        stored = self.source.tensor(name, stored_shape)
        return self._load_tensor(stored, torch.float32).reshape(shape)[slice(*rows)]

    def stacked_elements(
        self, prefix: str, stored: str | SplitTensors, suffix: str, parts: Sequence[int], width: int
    ) -> torch.Tensor:
        """Load the convolution of all parts, or its bias, in float32: [channels, width]."""
        if isinstance(stored, SplitTensors):
            names = stored.names
            heights = self._stored_heights(prefix, names, suffix) or list(parts)
        else:
            names = (stored,)
            heights = [sum(parts)]
        return torch.cat(
            [
                self.elements(f"{prefix}{name}{suffix}", (rows, width), (0, rows))
                for name, rows in zip(names, heights, strict=True)
            ]
        )

    def _stored_heights(self, prefix: str, names: Sequence[str], suffix: str) -> list[int]:
        """The rows of tensors that are stacked: tools divide them otherwise than into parts."""
        full_names = [self.names.locate(f"{prefix}{name}{suffix}") for name in names]
        if not all(name in self.source.names() for name in full_names):
            return []
        return [self.source.shape(name)[0] for name in full_names]

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

    def _stored_vector(self, name: str, size: int) -> LazyTensor:
        return self.source.tensor(self.names.locate(name), (size,))

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
        shard: WeightShard = UNSHARDED,
        group: CommunicationGroup | None = None,
        low_rank: int = 0,
    ) -> LinearLayer:
        """Load a linear layer of a decoder layer.

        Its outputs are `parts` in this order, however the checkpoint stores them. `shard` is the
        part that this rank holds; results are summed over the ranks of `group`. `low_rank`: the
        rank of the part that is added to the product.
        """

        def load_bias() -> torch.Tensor | None:
            def read_bias(name: str, rows: int) -> LazyTensor:
                bias_name = find_bias_name(self.source, self.names.locate(prefix + name))
                stored_bias = self.source.tensor(bias_name, (rows,))
                return stored_bias.deinterleave() if is_interleaved(stored) else stored_bias

            if not bias:
                return None
            # A rank that leaves the bias to another one finds the tensor, too: it is not unused.
            arranged = arrange_parts(read_bias, stored, parts)
            if not shard.bias:
                return None
            return self._load_tensor(select_rows(arranged, shard), self.dtype)

        def load_matrix() -> PreparedWeight:
            matrix = self._stored_matrix(prefix, stored, parts, inputs)
            return self._prepare(select_shard(matrix, shard))

        prepared, loaded_bias = self._load_once(prefix, stored, load_matrix, load_bias)
        adapters = None
        if self.adapter_memory is not None:
            adapters = self.adapter_memory.add_linear(
                prefix, stored, parts, inputs, shard, loaded_bias
            )
        linear = LinearLayer(prepared, loaded_bias, group, self.pool, adapters)
        return self._add_low_rank(linear, prefix, stored, parts, inputs, shard, low_rank)

    def qkv_linear(self, prefix: str, spec: AttentionSpec, inputs: int) -> LinearLayer:
        """Load this rank's part of the QKV projection; its outputs are q | k | v | gate.

        The gate shares the matrix, so that it takes no additional kernel.
        """
        names = self.names
        shard = self.layout.qkv(spec)
        separate_gate = spec.gate is not None and spec.gate.stored == "separate"

        def load_matrix() -> PreparedWeight:
            read_matrix = self._matrix_reader(prefix, inputs)
            matrix = arrange_qkv(read_matrix, names.attn_qkv, spec)
            if separate_gate:
                matrix = matrix.cat([read_matrix(names.extra["attn_gate"], gate_size(spec))])
            return self._prepare(select_shard(matrix, shard))

        def load_bias() -> torch.Tensor | None:
            return self._qkv_bias(prefix, spec, separate_gate) if spec.bias else None

        prepared, bias = self._load_once(prefix, names.attn_qkv, load_matrix, load_bias)
        parts = [*qkv_sizes(spec), *([gate_size(spec)] if spec.gate else [])]
        adapters = None
        if self.adapter_memory is not None:
            adapters = self.adapter_memory.add_linear(
                prefix, names.attn_qkv, parts, inputs, shard, bias, spec
            )
        linear = LinearLayer(prepared, bias, None, self.pool, adapters)
        return self._add_low_rank(
            linear, prefix, names.attn_qkv, parts, inputs, shard, spec.low_rank
        )

    def _qkv_bias(self, prefix: str, spec: AttentionSpec, separate_gate: bool) -> torch.Tensor:
        """Load this rank's part of the bias of the QKV projection."""

        def read_bias(name: str, rows: int) -> LazyTensor:
            return self._stored_vector(f"{prefix}{name}.bias", rows)

        arranged = arrange_qkv(read_bias, self.names.attn_qkv, spec)
        ungated = replace(spec, gate=None) if separate_gate else spec
        bias = self._load_tensor(select_rows(arranged, self.layout.qkv(ungated)), self.dtype)
        if separate_gate:  # its projection has no bias
            bias = F.pad(bias, (0, gate_size(self.layout.attention(spec))))
        return bias

    def recurrent_in(
        self, prefix: str, spec: RecurrentSpec, inputs: int, has_bias: bool
    ) -> LinearLayer:
        """Load this rank's part of a recurrent mixer's input projection.

        Its outputs are in the order of the mixer's parts.
        """
        stored = self.names.recurrent_in
        shard = self.layout.recurrent_in(spec)
        bias = None
        if has_bias:

            def read_bias(name: str, rows: int) -> LazyTensor:
                return self._stored_vector(f"{prefix}{name}.bias", rows)

            arranged = arrange_recurrent_in(read_bias, stored, spec)
            bias = self._load_tensor(select_rows(arranged, shard), self.dtype)
        matrix = arrange_recurrent_in(self._matrix_reader(prefix, inputs), stored, spec)
        prepared = self._prepare(select_shard(matrix, shard))
        adapters = None
        if self.adapter_memory is not None:
            adapters = self.adapter_memory.add_linear(
                prefix, stored, recurrent_in_sizes(spec), inputs, shard, bias, spec
            )
        return LinearLayer(prepared, bias, None, self.pool, adapters)

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

    def adapt_outer_linear(
        self,
        linear: LinearLayer,
        name: str,
        outputs: int,
        inputs: int,
        shard: WeightShard = UNSHARDED,
    ) -> LinearLayer:
        """Let adapters change a linear layer outside of the decoder layers."""
        if self.adapter_memory is None:
            return linear
        adapters = self.adapter_memory.add_linear("", name, (outputs,), inputs, shard, linear.bias)
        return replace(linear, adapters=adapters)

    def experts(
        self,
        prefix: str,
        stored: str | SplitTensors | FusedTensor,
        num_experts: int,
        parts: Sequence[int],
        inputs: int,
        shard: WeightShard = UNSHARDED,
        shared: Sequence[WeightMatrix] = (),
    ) -> PreparedWeight:
        """Load the matrices of all experts, stacked: [experts * sum of parts, inputs].

        `shard` is the part of each expert that this rank holds. Shared experts of the same shape
        come last.
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
        others += [select_shard(matrix, shard) for matrix in shared]
        prepared = self._prepare(first.cat(others))
        # The meter counts shared experts with the rest of the weights, not with the experts.
        self.expert_bytes += prepared.nbytes * num_experts // (1 + len(others))
        return prepared

    def has_dense_experts(self, prefix: str, mlp: MlpSpec, shared: MlpSpec, hidden: int) -> bool:
        """Whether the experts and the shared expert are stored as floats of one type."""
        names = self.names
        expert = 0 if names.stacked_experts else None
        first = prefix + names.experts.format(e=0)
        up_parts = [mlp.size] * (1 + mlp.gated)
        matrices = (
            self._stored_matrix(first, names.expert_up, up_parts, hidden, expert),
            self._stored_matrix(first, names.expert_down, [hidden], mlp.size, expert),
            *self._open_shared_expert(prefix, shared, hidden),
        )
        dtypes = {
            matrix.weight.dtype if isinstance(matrix, DenseMatrix) else None for matrix in matrices
        }
        return len(dtypes) == 1 and None not in dtypes

    def split_shared_expert(
        self, prefix: str, spec: MlpSpec, size: int, hidden: int
    ) -> tuple[list[WeightMatrix], list[WeightMatrix]]:
        """Open the shared expert as experts of `size`: up and down of each."""
        up, down = self._open_shared_expert(prefix, spec, hidden)
        starts = range(0, spec.size, size)
        offsets = (0, spec.size) if spec.gated else (0,)
        ups = [up.rows([(i + start, i + start + size) for i in offsets]) for start in starts]
        return ups, [down.cols(start, start + size) for start in starts]

    def _open_shared_expert(
        self, prefix: str, spec: MlpSpec, hidden: int
    ) -> tuple[WeightMatrix, WeightMatrix]:
        """Open the up and down projections of the shared expert."""
        names = self.names
        up_parts = [spec.size] * (1 + spec.gated)
        up = self._stored_matrix(prefix, names.shared_up, up_parts, hidden)
        return up, self._stored_matrix(prefix, names.shared_down, [hidden], spec.size)

    def expert_bias(
        self,
        prefix: str,
        stored: str | SplitTensors | FusedTensor,
        num_experts: int,
        parts: Sequence[int],
        shard: WeightShard = UNSHARDED,
    ) -> torch.Tensor | None:
        """Load the biases of all experts, [experts, sum of parts], in the model's dtype.

        `shard` is the part of each expert that this rank holds. Returns None if another rank has
        the biases.
        """
        names = names_of(stored)
        sizes = parts if len(names) > 1 else [sum(parts)]
        stored_columns = [
            self._open_expert_bias(prefix + self.names.experts + name, num_experts, size)
            for name, size in zip(names, sizes, strict=True)
        ]
        if not shard.bias:
            return None
        columns = [
            torch.cat([tensor.load(self.dtype, self.device).view(-1, size) for tensor in tensors])
            for tensors, size in zip(stored_columns, sizes, strict=True)
        ]
        bias = torch.cat(columns, 1)
        if is_interleaved(stored):
            bias = torch.cat((bias[:, ::2], bias[:, 1::2]), 1)
        if shard.rows is not None:
            bias = torch.cat([bias[:, start:end] for start, end in shard.rows], 1)
        self.loaded_bytes += bias.nbytes
        return bias

    def _open_expert_bias(self, name: str, num_experts: int, size: int) -> list[LazyTensor]:
        """Find the bias of that name: one tensor [experts, size], or one [size] for each expert."""
        source = self.source
        if self.names.stacked_experts:
            return [source.tensor(find_bias_name(source, name), (num_experts, size))]
        return [
            source.tensor(find_bias_name(source, name.format(e=expert)), (size,))
            for expert in range(num_experts)
        ]

    def _load_once(
        self,
        prefix: str,
        stored: str | SplitTensors | FusedTensor,
        load_matrix: Callable[[], PreparedWeight],
        load_bias: Callable[[], torch.Tensor | None],
    ) -> tuple[PreparedWeight, torch.Tensor | None]:
        """Load a matrix and its bias unless a layer that shares them has done it."""
        names = tuple(self.names.locate(prefix + name) for name in names_of(stored))
        if names not in self.matrices:
            self.matrices[names] = (load_matrix(), load_bias())
        return self.matrices[names]

    def _add_low_rank(
        self,
        linear: LinearLayer,
        prefix: str,
        stored: str | SplitTensors | FusedTensor,
        parts: Sequence[int],
        inputs: int,
        shard: WeightShard,
        rank: int,
    ) -> LinearLayer:
        """Add the product of two narrow matrices to a layer, for each tensor that is stored.

        The wider one of several tensors is block-diagonal, so that one product serves all. They
        stay in full precision, because they are small.
        """
        if not rank:
            return linear
        names = names_of(stored)
        sizes = parts if len(names) > 1 else [sum(parts)]

        def load(name: str, shape: tuple[int, int]) -> torch.Tensor:
            spec = LinearSpec(self.names.locate(prefix + name), shape, unquantized=True)
            matrix = self.format.open_matrix(self.source, spec)
            return matrix.load_dense(self.dtype, self.device)

        down = torch.cat([load(f"{name}.low_rank_down", (rank, inputs)) for name in names])
        ups = [
            load(f"{name}.low_rank_up", (size, rank))
            for name, size in zip(names, sizes, strict=True)
        ]
        up = torch.block_diag(*ups)
        if shard.rows is not None:
            up = torch.cat([up[start:end] for start, end in shard.rows])
        self.loaded_bytes += down.nbytes + up.nbytes
        pool = self.pool
        low_rank = LowRankPart(
            LinearLayer(prepare_dense(down, self.dtype, pool), pool=pool),
            LinearLayer(prepare_dense(up, self.dtype, pool), linear.bias, pool=pool),
        )
        return replace(linear, bias=None, low_rank=low_rank)

    def _stored_matrix(
        self,
        prefix: str,
        stored: str | SplitTensors | FusedTensor,
        parts: Sequence[int],
        inputs: int,
        expert: int | None = None,
    ) -> WeightMatrix:
        reader = self._matrix_reader(prefix, inputs, expert, is_interleaved(stored))
        return arrange_parts(reader, stored, parts)

    def _matrix_reader(
        self, prefix: str, inputs: int, expert: int | None = None, interleaved: bool = False
    ) -> Callable[[str, int], WeightMatrix]:
        """Return a function that opens the matrix of a name, given its rows."""
        extra = self.names.extra
        unquantized = (extra.get("router"), extra.get("shared_gate"))
        is_stacked = expert is not None
        transposed = self.names.transposed_experts if is_stacked else self.names.transposed

        def read_matrix(name: str, rows: int) -> WeightMatrix:
            spec = LinearSpec(
                self.names.locate(f"{prefix}{name}"),
                (rows, inputs),
                transposed,
                expert,
                unquantized=name in unquantized,
            )
            tensors: CheckpointTensors = self.source
            if interleaved:
                tensors = DeinterleavedTensors(self.source, rows)
            return self.format.open_matrix(tensors, spec)

        return read_matrix

    def _prepare(self, matrix: WeightMatrix) -> PreparedWeight:
        prepared = matrix.prepare(self.dtype, self.device, self.pool)
        self.loaded_bytes += prepared.nbytes
        return prepared


class DeinterleavedTensors:
    """The tensors of a matrix whose rows are gate and up by turns, with all gate rows first.

    Weight formats see only tensors in the usual order. A format that does not store the outputs
    along the rows of its tensors cannot be read so.
    """

    def __init__(self, tensors: CheckpointTensors, rows: int):
        self.tensors = tensors
        self.rows = rows

    def tensor(
        self, name: str, shape: Sequence[int], transposed: bool = False, expert: int | None = None
    ) -> LazyTensor:
        stored = self.tensors.tensor(name, shape, transposed, expert)
        if shape[0] != self.rows:
            raise UnsupportedModel(
                f"{name}: gate and up rows by turns cannot be separated in this weight format; "
                "use a checkpoint in full precision or in MXFP4"
            )
        return stored.deinterleave()

    def has(self, name: str) -> bool:
        return self.tensors.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors.shape(name)


class RowArrangeable(Protocol):
    """The operations that weight matrices and biases have in common."""

    def rows(self, ranges: Sequence[Range]) -> Self: ...
    def cat(self, others: Sequence[Self]) -> Self: ...


T = TypeVar("T", bound=RowArrangeable)


def name_of(stored: str | FusedTensor) -> str:
    """Return the name of a matrix that is one tensor."""
    return stored.name if isinstance(stored, FusedTensor) else stored


def names_of(stored: str | SplitTensors | FusedTensor) -> tuple[str, ...]:
    """Return the names of the tensors that a matrix consists of."""
    return stored.names if isinstance(stored, SplitTensors) else (name_of(stored),)


def is_interleaved(stored: str | SplitTensors | FusedTensor) -> bool:
    """Whether the stored rows are gate and up by turns."""
    return isinstance(stored, FusedTensor) and stored.interleaved


def find_bias_name(tensors: CheckpointTensors, name: str) -> str:
    """Return the name of a layer's bias: tensors without `.weight` have biases without `.bias`."""
    short_name = f"{name}_bias"
    return short_name if tensors.has(short_name) else f"{name}.bias"


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
) -> T:
    """Concatenate the `parts` by rows; `read(name, rows)` reads one tensor of the checkpoint."""
    if isinstance(stored, SplitTensors):
        first, *others = map(read, stored.names, parts)
        return first.cat(others)
    if isinstance(stored, FusedTensor):
        return read(stored.name, sum(parts))
    return read(stored, sum(parts))


def arrange_qkv(
    read: Callable[[str, int], T], stored: SplitTensors | FusedTensor, spec: AttentionSpec
) -> T:
    """Return the rows q | k | v of the checkpoint, and those of a gate that is packed in q."""
    sizes = qkv_sizes(spec)
    packed_gate = spec.gate is not None and spec.gate.stored == "packed"
    if packed_gate:
        sizes[0] += gate_size(spec)
    if isinstance(stored, SplitTensors):
        stored = SplitTensors(stored.names[: len(sizes)])
    arranged = arrange_parts(read, stored, sizes)
    if packed_gate:
        return arranged.rows(unpacked_gate_ranges(spec))
    if isinstance(stored, FusedTensor) and stored.grouped:
        return arranged.rows(ungrouped_qkv_ranges(spec))
    return arranged


def arrange_recurrent_in(
    read: Callable[[str, int], T], stored: str | SplitTensors | FusedTensor, spec: RecurrentSpec
) -> T:
    """Return the rows of a recurrent mixer's input projection, part after part."""
    sizes = recurrent_in_sizes(spec)
    if not isinstance(stored, SplitTensors):
        return arrange_parts(read, stored, sizes)
    counts = stored.parts or (1,) * len(stored.names)
    ends = list(accumulate(counts))
    tensors = [sizes[end - count : end] for count, end in zip(counts, ends, strict=True)]
    arranged = arrange_parts(read, stored, [sum(parts) for parts in tensors])
    if not any(stored.grouped):
        return arranged
    assert isinstance(spec, GatedDeltaNetSpec)
    groups = [spec.num_key_heads if grouped else 1 for grouped in stored.grouped]
    return arranged.rows(ungrouped_recurrent_ranges(tensors, groups))


def ungrouped_recurrent_ranges(
    tensors: Sequence[Sequence[int]], groups: Sequence[int]
) -> list[Range]:
    """Return the rows of each part in tensors whose rows are [group][parts of the group].

    `groups`: their number in each tensor.
    """
    ranges = []
    first = 0
    for parts, num_groups in zip(tensors, groups, strict=True):
        group_rows = sum(parts) // num_groups
        offset = first
        for rows in parts:
            part_rows = rows // num_groups
            for group in range(num_groups):
                start = offset + group * group_rows
                ranges.append((start, start + part_rows))
            offset += part_rows
        first += sum(parts)
    return ranges


def unpacked_gate_ranges(spec: AttentionSpec) -> list[Range]:
    """Return the rows of q, k, v, gate in a matrix of [head][q, gate], all k, all v."""
    q_dim = spec.head_dim
    head_rows = q_dim + gate_size(spec) // spec.num_heads
    q_ranges = []
    gate_ranges = []
    for head in range(spec.num_heads):
        first = head * head_rows
        q_ranges.append((first, first + q_dim))
        gate_ranges.append((first + q_dim, first + head_rows))
    k_first = spec.num_heads * head_rows
    kv_range = (k_first, k_first + sum(qkv_sizes(spec)[1:]))
    return [*q_ranges, kv_range, *gate_ranges]


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
