"""Which adapters of a linear layer a fused kernel may take."""

from __future__ import annotations

import pytest
import torch

from bloomery.kernels.lora import AdapterBatch
from bloomery.quant.lora import LinearAdapters


@pytest.fixture
def layer() -> LinearAdapters:
    """A layer as on a GPU, with the old values of another step in what fused programs share."""
    batch = AdapterBatch()
    batch.shrunk = torch.ones(16)
    layer = LinearAdapters(batch, 4, [0] * 8)
    layer.bind(*(torch.zeros(2, *shape) for shape in layer.shapes(16)))
    layer.shrunk = batch.shrunk.view(1, 16)
    return layer


def test_the_adapter_of_a_step_of_one_row_is_fused(layer: LinearAdapters) -> None:
    slots = torch.tensor([1], dtype=torch.int32)
    layer.batch.begin(slots)
    layer.batch.select(torch.tensor([0]))
    lora = layer.fused()
    assert lora is not None and torch.equal(lora.slots, slots)
    assert not lora.shrunk.any()


def test_the_row_that_is_left_of_a_larger_step_is_not_fused(layer: LinearAdapters) -> None:
    """The last layer keeps the row that samples; nobody has cleared the old values for it."""
    layer.batch.begin(torch.tensor([1, 1, 0], dtype=torch.int32))
    layer.batch.select(torch.tensor([2]))
    assert layer.shrunk is not None and layer.shrunk.any()
    assert layer.fused() is None
