"""Shapes of captured steps, and the data that the host sends for a mixed step."""

from __future__ import annotations

import numpy as np
import pytest

from bloomery.runtime.step_batch import (
    MAX_MIXED_TOKENS,
    MIXED_DECODE_SLOTS,
    NUM_PREFILL_SLOTS,
    CaptureSizes,
    mixed_shape,
    pack_mixed_step,
    round_up,
    sampling_shape,
)

NO_ROWS = np.zeros(0, np.int32)


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens"), [(4, 512), (64, 2048), (272, 8192), (300, 300)]
)
def test_every_possible_shape_is_captured_beforehand(
    max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    max_tokens = min(max_num_batched_tokens, MAX_MIXED_TOKENS)
    sizes = CaptureSizes.for_graphs(max_num_seqs, max_tokens)
    captured = sizes.mixed_shapes()
    assert len(set(captured)) == len(captured)
    assert captured[0] == mixed_shape(max_num_seqs, max_tokens, False)
    for num_decodes in range(max_num_seqs + 1):
        for num_tokens in range(num_decodes + 1, max_tokens + 1, 7):
            slots = round_up(num_decodes, sizes.mixed_decodes)
            tokens = round_up(num_tokens, sizes.mixed_tokens)
            assert mixed_shape(slots, tokens, False) in captured
            few_decodes = num_decodes <= MIXED_DECODE_SLOTS[0]
            assert mixed_shape(slots, tokens, True) in captured or not few_decodes
            assert sizes.pad_mixed(num_decodes, num_tokens, 5000) in captured
            mixed = sizes.pad_mixed(num_decodes, num_tokens, 5)
            assert mixed in captured
            assert sampling_shape(mixed.num_sequences) in sizes.sampling_shapes(False, True)
    decodes = sizes.decode_shapes()
    assert decodes[0].num_decodes == max_num_seqs
    for num_decodes in range(1, max_num_seqs + 1):
        padded = round_up(num_decodes, sizes.decodes)
        assert any(shape.num_decodes == padded for shape in decodes)
        assert sampling_shape(padded) in sizes.sampling_shapes(True, False)


def test_without_capture_sizes_a_step_is_not_padded() -> None:
    shape = CaptureSizes().pad_mixed(3, 17, 5000)
    assert shape == mixed_shape(3, 17, False)
    assert CaptureSizes().mixed_shapes() == [] and CaptureSizes().decode_shapes() == []


def test_an_empty_mixed_step_is_all_padding() -> None:
    packed = pack_mixed_step(NO_ROWS, (), mixed_shape(3, 5, False), padding_row=9).tolist()
    num_rows = 3 + 2 * NUM_PREFILL_SLOTS
    assert packed[:num_rows] == [9] * num_rows
    starts = packed[num_rows : num_rows + NUM_PREFILL_SLOTS + 1]
    assert starts == [0] * NUM_PREFILL_SLOTS + [5]
    assert packed[3 + 3 * NUM_PREFILL_SLOTS + 1 :] == [0] * (NUM_PREFILL_SLOTS + 5)
