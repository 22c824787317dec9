"""The recurrent mixers: any division of a sequence into chunks gives the same result."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from bloomery.kernels.gated_delta_net import gated_delta_net_reference
from bloomery.kernels.mamba2 import mamba2_reference
from bloomery.kernels.short_conv import short_conv_reference
from bloomery.kernels.state_cache import LayerStates
from bloomery.spec import GatedDeltaNetSpec, Mamba2Spec, RecurrentSpec, ShortConvSpec
from tests.kernels.recurrent_cases import RunMixer, make_case, make_metadata

MIXERS: dict[str, tuple[RecurrentSpec, RunMixer]] = {
    "delta net": (GatedDeltaNetSpec(2, 4, 8, 16), gated_delta_net_reference),
    "mamba2": (Mamba2Spec(4, 8, 16, num_groups=2), mamba2_reference),
    "short conv": (ShortConvSpec(24, bias=True), short_conv_reference),
}
LENGTH = 23


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("chunks", [(1,) * LENGTH, (7, 7, 7, 2), (1, 2, 20)])
def test_chunks_continue_from_the_state(name: str, chunks: Sequence[int]) -> None:
    torch.manual_seed(0)
    spec, mixer = MIXERS[name]
    case = make_case(spec, [LENGTH], [LENGTH])
    expected, _ = case.run(mixer)
    memory = case.states.memory.clone()
    parts = []
    end = 0
    for chunk in chunks:
        start, end = end, end + chunk
        metadata = make_metadata([chunk], [end], case.states.metadata.state_pieces)
        states = LayerStates(memory, metadata)
        parts.append(mixer(case.projected[start:end], spec, case.weights, states))
    assert torch.allclose(torch.cat(parts), expected, atol=1e-5)


@pytest.mark.parametrize("name", MIXERS)
def test_sequences_of_a_step_are_independent(name: str) -> None:
    torch.manual_seed(0)
    spec, mixer = MIXERS[name]
    query_lens = [1, 1, 1, 5, 9]
    case = make_case(spec, query_lens, [1, 4, 8, 5, 12])
    expected, memory = case.run(mixer)
    first = 0
    for index, query_len in enumerate(query_lens):
        metadata = case.states.metadata
        blocks = metadata.state_pieces[index : index + 1]
        alone = make_metadata([query_len], [int(metadata.seq_lens[index])], blocks)
        own_memory = case.states.memory.clone()
        states = LayerStates(own_memory, alone)
        inputs = case.projected[first : first + query_len]
        result = mixer(inputs, spec, case.weights, states)
        assert torch.allclose(result, expected[first : first + query_len], atol=1e-5)
        own_blocks = blocks[0]
        assert torch.allclose(own_memory[own_blocks], memory[own_blocks], atol=1e-5, equal_nan=True)
        first += query_len
