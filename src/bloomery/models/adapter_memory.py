"""The device memory of LoRA adapters: a few slots, each of which holds one adapter.

While a model is loaded, every linear layer is registered as a target that adapters may change. Then
the memory of all slots is allocated at once. The matrices of a slot lie together, so that an
adapter comes from host memory as a whole and not layer by layer. A target also says what the layer
is called in checkpoints, which is how adapter_files.py finds its matrices.

Few adapters change the embedding or the head, and every step of every other adapter would pay for
it. So the targets outside of the decoder layers have a block of their own, which is allocated for
the first adapter that needs it. Only steps with such an adapter read it, so captured steps of other
adapters stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from bloomery.adapter_sizes import (
    NO_VALUES,
    AdaptedLinear,
    AdapterValues,
    align,
    count_step_bytes,
    pad_rank,
)
from bloomery.kernels.lora import SHRUNK_COPIES, AdapterBatch
from bloomery.layout import UNSHARDED, WeightShard
from bloomery.models.adapter_staging import StagingRing
from bloomery.quant.base import PreparedWeight
from bloomery.quant.lora import EmbeddingAdapters, LinearAdapters, TableAdapters
from bloomery.spec import AttentionSpec, FusedTensor, RecurrentSpec, SplitTensors

# Bytes of GPU memory that must be left beside what adapters need outside of the decoder layers.
# Steps with them compute some logits twice and have CUDA graphs of their own. Chosen.
OUTER_MARGIN_BYTES = 1 << 30


@dataclass(frozen=True)
class AdapterTarget:
    """A linear layer that adapters may change, and this rank's part of it."""

    prefix: str  # of the names of its decoder layer; "" outside of the decoder layers
    stored: str | SplitTensors | FusedTensor  # its name in the checkpoint
    parts: tuple[int, ...]  # rows of the layers that it consists of
    inputs: int
    shard: WeightShard
    adapters: LinearAdapters
    mixer: AttentionSpec | RecurrentSpec | None = None  # whose input projection it is
    is_expert: bool = False
    is_embedding: bool = False  # its inputs are token ids, and A is a table of them
    bias: torch.Tensor | None = None  # this rank's part of the base model's bias


@dataclass(frozen=True)
class TableTarget:
    """The token embedding or the head, which adapters may replace."""

    name: str  # in the checkpoint
    shape: tuple[int, int]  # [vocab, width], of all ranks
    tables: TableAdapters
    matrix: PreparedWeight  # this rank's part of the base model's table
    has_bias: bool = False


@dataclass
class ConvertedAdapter:
    """One adapter in host memory, converted for this rank: what a device slot will hold."""

    values: torch.Tensor  # [values of a slot], for the decoder layers
    outer_values: torch.Tensor | None = None  # for the targets outside of them, if it changes any
    tables: dict[int, torch.Tensor] = field(default_factory=dict)  # by index of the table target
    rank: int = 0
    num_targets: int = 0
    own_values: AdapterValues = NO_VALUES  # without the padding of the slot

    @property
    def changes_outer(self) -> bool:
        """Whether it changes anything outside of the decoder layers."""
        return self.outer_values is not None or bool(self.tables)

    @property
    def num_bytes(self) -> int:
        outer_bytes = 0 if self.outer_values is None else self.outer_values.nbytes
        table_bytes = sum(table.nbytes for table in self.tables.values())
        return self.values.nbytes + outer_bytes + table_bytes


class SlotMemory:
    """The matrices of some targets in all slots: one block [slots, values of a slot]."""

    def __init__(self, padded_rank: int):
        self.padded_rank = padded_rank
        self.targets: list[AdapterTarget] = []
        self.values: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.values is None else self.values.nbytes

    @property
    def is_allocated(self) -> bool:
        return self.values is not None

    def allocate(self, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the block, once every target is known."""
        self.values = torch.zeros(num_slots, self.slot_size(), dtype=dtype, device=device)
        for target, matrices in zip(self.targets, self.split(self.values)):
            target.adapters.bind(*matrices)

    def release(self) -> None:
        """Free the block."""
        self.values = None
        for target in self.targets:
            target.adapters.matrices = None

    def slot_size(self) -> int:
        """The number of values in one slot."""
        return sum(
            align(prod(shape))
            for target in self.targets
            for shape in target.adapters.shapes(self.padded_rank)
        )

    def split(self, values: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Return views of A, B and bias of each target, for values [..., values of a slot]."""
        views = []
        first = 0
        for target in self.targets:
            matrices = []
            for shape in target.adapters.shapes(self.padded_rank):
                part = values[..., first : first + prod(shape)]
                matrices.append(part.unflatten(-1, shape))
                first += align(prod(shape))
            views.append(tuple(matrices))
        return views


class AdapterMemory:
    """The slots of one rank, and the targets of its part of the model."""

    def __init__(self, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device):
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.dtype = dtype
        self.device = device
        self.padded_rank = pad_rank(max_rank, device.type)
        self.batch = AdapterBatch()
        self.layers = SlotMemory(self.padded_rank)
        self.outer = SlotMemory(self.padded_rank)  # targets outside of the decoder layers
        self.embeddings: list[EmbeddingAdapters] = []
        self.tables: list[TableTarget] = []
        self.outer_slots: set[int] = set()  # whose adapters change anything outside of the layers
        # Memory outside of the decoder layers that an adapter in a slot has needed.
        self.used_parts: set[SlotMemory | TableAdapters] = set()
        self.staging: StagingRing | None = None  # None: on a CPU

    # ---- registration, while the model is loaded ----

    def add_linear(
        self,
        prefix: str,
        stored: str | SplitTensors | FusedTensor,
        parts: Sequence[int],
        inputs: int,
        shard: WeightShard = UNSHARDED,
        bias: torch.Tensor | None = None,
        mixer: AttentionSpec | RecurrentSpec | None = None,
        num_experts: int | None = None,
    ) -> LinearAdapters:
        """Register a linear layer, or with `num_experts` the matrices of all experts of a block."""
        row_parts = select_row_parts(parts, shard)
        own_inputs = inputs if shard.cols is None else shard.cols[1] - shard.cols[0]
        adapters = LinearAdapters(
            self.batch, own_inputs, row_parts, num_experts or 1, is_outer=not prefix
        )
        target = AdapterTarget(
            prefix,
            stored,
            tuple(parts),
            inputs,
            shard,
            adapters,
            mixer,
            is_expert=num_experts is not None,
            bias=bias,
        )
        memory = self.layers if prefix else self.outer
        memory.targets.append(target)
        return adapters

    def add_embedding(
        self, name: str, vocab: int, width: int, first_id: int, end_id: int, matrix: PreparedWeight
    ) -> EmbeddingAdapters:
        """Register the token embedding; this rank has the ids from first_id to end_id."""
        num_ids = end_id - first_id
        embedding = EmbeddingAdapters(self.batch, first_id, num_ids, width)
        shard = WeightShard(cols=(first_id, end_id))
        self.outer.targets.append(
            AdapterTarget("", name, (width,), vocab, shard, embedding.linear, is_embedding=True)
        )
        self.embeddings.append(embedding)
        self.tables.append(TableTarget(name, (vocab, width), embedding.tables, matrix))
        return embedding

    def add_head(
        self,
        name: str,
        vocab: int,
        width: int,
        first_id: int,
        end_id: int,
        matrix: PreparedWeight,
        has_bias: bool,
    ) -> TableAdapters:
        """Register the head as a table; its low-rank adapters are those of a linear layer."""
        tables = TableAdapters(self.batch, first_id, end_id - first_id, width)
        self.tables.append(TableTarget(name, (vocab, width), tables, matrix, has_bias))
        return tables

    # ---- memory ----

    @property
    def targets(self) -> list[AdapterTarget]:
        return self.layers.targets + self.outer.targets

    @property
    def nbytes(self) -> int:
        return self.layers.nbytes + self.outer.nbytes

    def allocate(self) -> None:
        """Allocate the slots of the decoder layers, once every target is known."""
        self.layers.allocate(self.num_slots, self.dtype, self.device)
        if self.device.type == "cuda":
            largest = max(self.layers.slot_size(), self.outer.slot_size())
            self.staging = StagingRing(largest * self.dtype.itemsize)
            self._allocate_shrunk()

    def _allocate_shrunk(self) -> None:
        """Allocate what the programs of fused kernels share.

        Layers outside of the decoder layers may run several times in a step.
        """
        adapters = [target.adapters for target in self.layers.targets]
        if not adapters:
            return
        self.batch.num_slots = self.num_slots
        self.batch.side_stream = torch.cuda.Stream(self.device)
        sizes = [SHRUNK_COPIES * layer.num_parts * self.padded_rank for layer in adapters]
        shrunk = torch.zeros(sum(sizes), dtype=torch.float32, device=self.device)
        self.batch.shrunk = shrunk
        for layer, values in zip(adapters, shrunk.split(sizes)):
            layer.shrunk = values.view(SHRUNK_COPIES, -1)

    def step_bytes(self, num_tokens: int) -> int:
        """Bytes that the adapters of a large step take besides the base model."""
        layers = [target.adapters for target in self.layers.targets]
        linears = [
            AdaptedLinear(layer.num_parts, len(layer.row_parts), layer.inputs) for layer in layers
        ]
        return count_step_bytes(linears, num_tokens, self.padded_rank, self.dtype.itemsize)

    def check_outer_memory(self, adapter: ConvertedAdapter) -> str | None:
        """Return why there is no room for what the adapter needs and no earlier one did, if so.

        That are the low-rank targets outside of the decoder layers and whole tables, in all slots.
        """
        missing = [part for part in self._outer_parts(adapter) if not part.is_allocated]
        if not missing or self.device.type != "cuda":
            return None
        num_values = self.num_slots * sum(part.slot_size() for part in missing)
        needed = num_values * self.dtype.itemsize
        free, _ = torch.cuda.mem_get_info(self.device)
        if needed + OUTER_MARGIN_BYTES <= free:
            return None
        return (
            f"it changes the embedding or the head, for which {self.num_slots} slots need "
            f"{needed / 2**30:.1f} GiB and steps {OUTER_MARGIN_BYTES / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB are free; start the server with a lower "
            "--gpu-memory-utilization or with fewer --max-loras"
        )

    def allocate_outer(self, adapter: ConvertedAdapter) -> None:
        """Allocate what an adapter needs outside of the decoder layers and no earlier one did.

        If there is no memory for all of it, none is allocated.
        """
        missing = [part for part in self._outer_parts(adapter) if not part.is_allocated]
        try:
            for part in missing:
                part.allocate(self.num_slots, self.dtype, self.device)
        except Exception:
            for part in missing:
                part.release()
            raise
        if self.outer in missing:
            for embedding in self.embeddings:
                low_rank = embedding.linear.matrices
                assert low_rank is not None
                embedding.lookup = view_lookup(low_rank.a)

    def note_outer(self, adapter: ConvertedAdapter) -> bool:
        """Note that steps read what the adapter needs outside of the decoder layers.

        Returns whether it is the first adapter to need some of it. Captured steps with such
        adapters do not know that memory.
        """
        new_parts = set(self._outer_parts(adapter)) - self.used_parts
        self.used_parts |= new_parts
        return bool(new_parts)

    def _outer_parts(self, adapter: ConvertedAdapter) -> list[SlotMemory | TableAdapters]:
        """Return whose memory an adapter needs outside of the decoder layers."""
        parts: list[SlotMemory | TableAdapters] = []
        if adapter.outer_values is not None:
            parts.append(self.outer)
        return parts + [self.tables[index].tables for index in adapter.tables]

    def load(self, slot: int, adapter: ConvertedAdapter) -> bool:
        """Copy an adapter into a slot, before anything that is queued later.

        Returns whether captured steps do not know its memory: see `note_outer`.
        """
        assert self.layers.values is not None
        self.allocate_outer(adapter)
        is_first = self.note_outer(adapter)
        self._copy(adapter.values, self.layers.values[slot])
        if self.outer.values is not None:
            if adapter.outer_values is None:
                self.outer.values[slot].zero_()
            else:
                self._copy(adapter.outer_values, self.outer.values[slot])
        for index, target in enumerate(self.tables):
            tables = target.tables
            if tables.tables is None or tables.active is None:
                continue
            table = adapter.tables.get(index)
            if table is not None:
                self._copy(table, tables.tables[slot])
            tables.active[slot] = int(table is not None)
        if adapter.changes_outer:
            self.outer_slots.add(slot)
        else:
            self.outer_slots.discard(slot)
        return is_first

    def _copy(self, values: torch.Tensor, slot: torch.Tensor) -> None:
        """Copy values of an adapter from host memory into a part of a slot."""
        if self.staging is None:
            slot.copy_(values)
        else:
            self.staging.copy(values, slot)


def select_row_parts(parts: Sequence[int], shard: WeightShard) -> list[int]:
    """Return the part of each row of a shard."""
    rows = [part for part, size in enumerate(parts) for _ in range(size)]
    if shard.rows is None:
        return rows
    return [part for start, end in shard.rows for part in rows[start:end]]


def view_lookup(a: torch.Tensor) -> torch.Tensor:
    """View the A of an embedding, [slots, 1, rank, ids], as the table [slots, ids, rank].

    It is stored as that table, so that the values of one token lie together.
    """
    slots, _, rank, num_ids = a.shape
    return a.as_strided((slots, num_ids, rank), (a.stride(0), rank, 1))
