"""Masks of grammars: the kernel does to the rows what its reference does."""

from __future__ import annotations

import pytest
import torch

from bloomery.kernels.grammar_masks import (
    UNUSED,
    SentMasks,
    apply_masks_reference,
    launch_apply_masks,
)
from bloomery.kernels.launch import triton_interpreted
from bloomery.kernels.sampling_rows import (
    BIASED,
    FLAGS,
    PENALIZED_FLAG,
    PERMITTED,
    PERMITTED_FLAG,
    SamplingRows,
)

CPU = torch.device("cpu")


@pytest.mark.skipif(not triton_interpreted(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("vocab_size", [37, 4096, 40_001])
def test_masks_reach_their_rows_and_no_others(vocab_size: int) -> None:
    states = [SamplingRows.allocate(6, vocab_size) for _ in range(2)]
    num_words = states[0].bits.shape[2]
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, states[0].bits.shape, generator=generator)
    sent = SentMasks.allocate(4, num_words, CPU)
    sent.masks.copy_(torch.randint(-(2**31), 2**31, sent.masks.shape, generator=generator))
    for state, apply in zip(states, (apply_masks_reference, launch_apply_masks), strict=True):
        state.bits.copy_(bits)
        state.ints[3, FLAGS] = PENALIZED_FLAG
        sent.rows.copy_(torch.tensor([3, 0, UNUSED, 5]))
        for _ in range(2):  # the second time there is no mask any more
            apply(sent, state, 3)  # the last place is not used
            state.bits[0] = bits[0]
        assert sent.rows.tolist() == [UNUSED, UNUSED, UNUSED, 5]
    expected, actual = states
    assert torch.equal(actual.bits, expected.bits)
    assert torch.equal(actual.ints, expected.ints)
    assert torch.equal(actual.bits[3, PERMITTED], sent.masks[0])
    assert torch.equal(actual.bits[3, BIASED], bits[3, BIASED].to(torch.int32))
    assert actual.ints[:, FLAGS].tolist() == [
        PERMITTED_FLAG,
        0,
        0,
        PENALIZED_FLAG | PERMITTED_FLAG,
        0,
        0,
    ]


def test_a_buffer_is_copied_up_to_its_last_mask() -> None:
    source = SentMasks.allocate(3, 2, CPU)
    source.rows.copy_(torch.tensor([4, 1, UNUSED]))
    source.masks.copy_(torch.tensor([[1, 2], [3, 4], [5, 6]]))
    target = SentMasks.allocate(3, 2, CPU)
    target.copy_from(source, 2)
    assert target.rows.tolist() == [4, 1, UNUSED]
    assert target.masks.tolist() == [[1, 2], [3, 4], [UNUSED, UNUSED]]
