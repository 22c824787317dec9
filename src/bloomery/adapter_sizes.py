"""How large LoRA adapters are: what a device slot holds for each linear layer of a model.

`bloomery plan` counts adapters from the model's spec before a weight is read.
models/adapter_memory.py allocates them for the layers that were loaded, and takes as much. Pure
arithmetic: no torch, no files.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from bloomery.layout import UNSHARDED, TensorParallelLayout, WeightShard, gate_size, qkv_sizes
from bloomery.spec import (
    AttentionSpec,
    LayerSpec,
    MambaSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RecurrentSpec,
    recurrent_in_sizes,
    recurrent_out_size,
)

ALIGNMENT = 64  # values: the matrices of a slot begin at whole cache lines
RANK_MULTIPLE = {"cpu": 8, "cuda": 16}  # ranks are padded to what the kernels compute at once
# In which kernels leave a shrunk row of a large step. It is MAX_SPLITS of kernels/lora.py, which
# cannot be imported here; tests/test_adapter_sizes.py compares the two.
MAX_PARTIAL_SUMS = 8


class AdapterValues(NamedTuple):
    """Numbers of values of one adapter on one device, grouped by how a step uses them."""

    matrices: int  # a step with a token of the adapter reads all of them
    experts: int = 0  # of these it reads what its tokens are routed to
    head: int = 0  # it reads them if such a token is sampled


NO_VALUES = AdapterValues(0)


@dataclass(frozen=True)
class AdaptedLinear:
    """A linear layer that adapters may change, as one tensor parallel rank has it."""

    num_parts: int  # layers of the adapter that it consists of, each with an A of its own
    outputs: int
    inputs: int
    num_experts: int = 0  # 0: it is no layer of experts

    def slot_values(self, padded_rank: int) -> int:
        """Values of A, B and bias in a device slot."""
        num_matrices = self.num_experts or 1
        a = num_matrices * self.num_parts * padded_rank * self.inputs
        b = num_matrices * self.outputs * padded_rank
        return align(a) + align(b) + align(self.outputs)

    def adapter_values(self, rank: int) -> int:
        """Values of A and B of an adapter of this rank."""
        return (self.num_experts or 1) * rank * (self.num_parts * self.inputs + self.outputs)


class AdapterSizes:
    """The sizes of the adapters of a model's decoder layers, on one tensor parallel rank."""

    def __init__(
        self,
        model: ModelSpec,
        layout: TensorParallelLayout = TensorParallelLayout(),  # noqa: B008 (it is frozen)
    ):
        self.linears: Counter[AdaptedLinear] = Counter()
        for layer, count in Counter(model.layers).items():
            for linear in list_adapted_linears(layer, model.hidden, layout):
                self.linears[linear] += count

    def slot_values(self, padded_rank: int) -> int:
        """Values of one device slot."""
        return sum(
            count * linear.slot_values(padded_rank) for linear, count in self.linears.items()
        )

    def step_bytes(self, num_tokens: int, padded_rank: int, value_bytes: int) -> int:
        """Bytes that the adapters of a large step take besides the base model."""
        return count_step_bytes(list(self.linears), num_tokens, padded_rank, value_bytes)

    def adapter_values(self, rank: int) -> AdapterValues:
        """Values of an adapter of this rank that changes every linear layer."""
        matrices = 0
        experts = 0
        for linear, count in self.linears.items():
            values = count * linear.adapter_values(rank)
            if linear.num_experts:
                experts += values
            else:
                matrices += values
        return AdapterValues(matrices, experts)


def count_step_bytes(
    linears: Sequence[AdaptedLinear], num_tokens: int, padded_rank: int, value_bytes: int
) -> int:
    """Bytes that adapters of these layers take in a step of at least some hundred tokens.

    One layer runs at a time. The head has the most outputs, but it runs for the last tokens of
    sequences only, so it is not among the layers.
    """
    most_outputs = max((linear.outputs for linear in linears), default=0)
    most_parts = max((linear.num_parts for linear in linears), default=0)
    partial_sums = MAX_PARTIAL_SUMS * most_parts * padded_rank  # in float32
    return num_tokens * (most_outputs * value_bytes + partial_sums * 4)


def pad_rank(rank: int, device: str) -> int:
    """Round a rank up to what the kernels of a device compute at once."""
    multiple = RANK_MULTIPLE.get(device, 1)
    return -(-rank // multiple) * multiple


def align(count: int) -> int:
    """Round a number of values up to a whole cache line."""
    return -(-count // ALIGNMENT) * ALIGNMENT


# ---- the layers that adapters may change ---------------------------------------------------------


def list_adapted_linears(
    layer: LayerSpec, hidden: int, layout: TensorParallelLayout
) -> list[AdaptedLinear]:
    """Return the linear layers of a decoder layer, as models/weights.py loads them."""
    linears = []
    attention_inputs = hidden
    if layer.shared_block is not None:
        attention_inputs = 2 * hidden
        linears.append(_divide([hidden], hidden))
    if layer.attention is not None:
        linears += _attention_linears(layer.attention, hidden, attention_inputs, layout)
    if layer.recurrent is not None:
        linears += _recurrent_linears(layer.recurrent, hidden, layout)
    if isinstance(layer.mlp, MlpSpec):
        linears += _mlp_linears(layer.mlp, hidden, layout)
    elif layer.mlp is not None:
        linears += _moe_linears(layer.mlp, hidden, layout)
    return linears


def _divide(
    parts: Sequence[int], inputs: int, shard: WeightShard = UNSHARDED, num_experts: int = 0
) -> AdaptedLinear:
    """Return a rank's part of a linear layer whose outputs are `parts`."""
    rows = shard.rows or ((0, sum(parts)),)
    last_row = max(end for _, end in rows) - 1
    num_parts = bisect_right(list(accumulate(parts)), last_row) + 1
    if shard.cols is not None:
        inputs = shard.cols[1] - shard.cols[0]
    return AdaptedLinear(num_parts, sum(end - start for start, end in rows), inputs, num_experts)


def _attention_linears(
    spec: AttentionSpec, hidden: int, inputs: int, layout: TensorParallelLayout
) -> Iterator[AdaptedLinear]:
    parts = [*qkv_sizes(spec), *([gate_size(spec)] if spec.gate else [])]
    yield _divide(parts, inputs, layout.qkv(spec))
    yield _divide([hidden], spec.num_heads * spec.head_dim, layout.out(spec))


def _recurrent_linears(
    spec: RecurrentSpec, hidden: int, layout: TensorParallelLayout
) -> Iterator[AdaptedLinear]:
    out_shard = layout.recurrent_out(spec)
    yield _divide(recurrent_in_sizes(spec), hidden, layout.recurrent_in(spec))
    yield _divide([hidden], recurrent_out_size(spec), out_shard)
    if isinstance(spec, MambaSpec):
        yield _divide([spec.dt_rank + 2 * spec.state_size], spec.inner, out_shard)
        channels = WeightShard(rows=(layout.split_evenly(spec.inner),))
        yield _divide([spec.inner], spec.dt_rank, channels)


def _mlp_linears(
    spec: MlpSpec, hidden: int, layout: TensorParallelLayout, num_experts: int = 0
) -> Iterator[AdaptedLinear]:
    parts = [spec.size, spec.size] if spec.gated else [spec.size]
    yield _divide(parts, hidden, layout.up(spec), num_experts)
    yield _divide([hidden], spec.size, layout.down(spec), num_experts)


def _moe_linears(
    spec: MoeSpec, hidden: int, layout: TensorParallelLayout
) -> Iterator[AdaptedLinear]:
    yield _divide([spec.num_experts], hidden)  # the router
    if spec.shared is not None:
        yield from _mlp_linears(spec.shared, hidden, layout)
    if spec.shared_gate:
        yield _divide([1], hidden)
    if spec.latent is not None:
        yield _divide([spec.latent], hidden)
        yield _divide([hidden], spec.latent)
    yield from _mlp_linears(spec.mlp, spec.latent or hidden, layout, spec.num_experts)
