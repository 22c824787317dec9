"""What is counted of LoRA adapters from a spec is what every family allocates when it is loaded."""

from __future__ import annotations

import pytest
import torch

from bloomery.adapter_sizes import MAX_PARTIAL_SUMS, AdapterSizes
from bloomery.families import describe_config, resolve_tensor_names
from bloomery.kernels.lora import MAX_PARALLEL_ROWS, count_splits
from bloomery.layout import TensorParallelLayout, supports_tensor_parallel
from bloomery.models.adapter_memory import AdapterMemory
from bloomery.models.checkpoint import DummySource
from bloomery.models.decoder import Decoder
from bloomery.models.weights import ModelWeights
from tests.parity.cases import CASES, ParityCase
from tests.test_roofline import LLAMA

CPU = torch.device("cpu")
SLOTS = 3
RANK = 5


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_slots_take_what_the_spec_says(case: ParityCase) -> None:
    description = describe_config(case.config().to_dict())
    source = DummySource()
    names = resolve_tensor_names(description, source)
    layouts = [TensorParallelLayout()]
    if supports_tensor_parallel(description.model, 2):
        layouts += [TensorParallelLayout(rank, 2) for rank in range(2)]
    for layout in layouts:
        memory = AdapterMemory(SLOTS, RANK, torch.float32, CPU)
        weights = ModelWeights(
            source, names, torch.float32, CPU, layout=layout, adapter_memory=memory
        )
        Decoder(description.model, weights)
        sizes = AdapterSizes(description.model, layout)
        assert memory.nbytes == SLOTS * 4 * sizes.slot_values(memory.padded_rank)
        expected = sizes.step_bytes(1024, memory.padded_rank, 4)
        assert memory.step_bytes(1024) == expected


def test_partial_sums_are_those_of_the_kernels() -> None:
    assert count_splits(MAX_PARALLEL_ROWS + 1, 1 << 20) == MAX_PARTIAL_SUMS


def test_an_adapter_has_the_values_of_peft() -> None:
    """Rank 16 on all layers of Llama 8B: 41.9 million parameters, as PEFT prints them."""
    assert AdapterSizes(LLAMA).adapter_values(16) == (41_943_040, 0, 0)
