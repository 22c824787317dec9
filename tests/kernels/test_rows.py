"""The kernels that gather a step's inputs and advance its rows, under the interpreter.

Each is compared with its torch reference.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from random import Random

import pytest
import torch

from bloomery.kernels.launch import triton_interpreted
from bloomery.kernels.rows import (
    advance_kernel,
    advance_reference,
    gather_decode_kernel,
    gather_decode_reference,
    gather_mixed_kernel,
    gather_mixed_reference,
)

pytestmark = pytest.mark.skipif(
    not triton_interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
)

NUM_ROWS = 9
PADDING_ROW = NUM_ROWS  # follows the rows of requests
NUM_TABLES = 3
TABLE_WIDTH = 5
BLOCK_SIZE = 4
MAX_LEN = TABLE_WIDTH * BLOCK_SIZE


def random_integers(seed: int) -> Callable[..., torch.Tensor]:
    """Return a function that makes int32 tensors of integers below a bound."""
    generator = torch.Generator().manual_seed(seed)

    def make(bound: int, *shape: int) -> torch.Tensor:
        return torch.randint(bound, shape, generator=generator, dtype=torch.int32)

    return make


def assert_same_used_blocks(
    block_tables: torch.Tensor, expected: torch.Tensor, seq_lens: torch.Tensor
) -> None:
    """Compare block tables as far as sequences use them; the rest has no meaning."""
    for sequence, seq_len in enumerate(seq_lens.tolist()):
        used = slice(-(-seq_len // BLOCK_SIZE))
        assert torch.equal(block_tables[:, sequence, used], expected[:, sequence, used])


@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_gather_and_advance_of_decodes(num_slots: int) -> None:
    integers = random_integers(num_slots)
    last_tokens = integers(1000, NUM_ROWS + 1)
    positions = integers(MAX_LEN, NUM_ROWS + 1)
    block_tables = integers(50, NUM_TABLES, NUM_ROWS + 1, TABLE_WIDTH)
    generator = torch.Generator().manual_seed(num_slots)
    rows = torch.randperm(NUM_ROWS, generator=generator)[:num_slots].int()
    rows[-1] = PADDING_ROW
    expected = gather_decode_reference(rows, last_tokens, positions, block_tables, BLOCK_SIZE)
    outputs = torch.full((3 + NUM_TABLES, num_slots), -1, dtype=torch.int32)
    batch_tables = torch.full((NUM_TABLES, num_slots, TABLE_WIDTH), -1, dtype=torch.int32)
    gather_decode_kernel[(num_slots, NUM_TABLES)](
        rows,
        last_tokens,
        positions,
        block_tables,
        outputs,
        batch_tables,
        num_slots,
        NUM_ROWS + 1,
        TABLE_WIDTH,
        BLOCK_SIZE=BLOCK_SIZE,
        CHUNK=2,
        PDL=False,
    )
    for output, expected_output in zip(outputs[:3], expected[:3], strict=True):
        assert torch.equal(output, expected_output)
    assert torch.equal(outputs[3:], expected.slot_mapping)
    assert_same_used_blocks(batch_tables, expected.block_tables, expected.seq_lens)

    tokens = integers(1000, num_slots)
    expected_last_tokens = last_tokens.clone()
    expected_positions = positions.clone()
    advance_reference(rows, tokens, expected.seq_lens, expected_last_tokens, expected_positions)
    new_last_tokens = last_tokens.clone()
    new_positions = positions.clone()
    advance_kernel[(-(-num_slots // 2),)](
        rows,
        tokens,
        expected.seq_lens,
        new_last_tokens,
        new_positions,
        num_slots,
        PADDING_ROW,
        WIDTH=2,
        PDL=False,
    )
    assert torch.equal(new_last_tokens, expected_last_tokens)
    assert torch.equal(new_positions, expected_positions)
    assert expected_last_tokens[PADDING_ROW] == last_tokens[PADDING_ROW]
    assert expected_positions[PADDING_ROW] == positions[PADDING_ROW]


@pytest.mark.parametrize("seed", range(8))
def test_gather_of_decodes_and_prefill_chunks(seed: int) -> None:
    rng = Random(seed)
    num_decodes = rng.choice((0, 3, 6))
    num_prefills = 4
    integers = random_integers(seed)
    last_tokens = integers(1000, NUM_ROWS + 1)
    positions = integers(MAX_LEN, NUM_ROWS + 1)
    block_tables = integers(50, NUM_TABLES, NUM_ROWS + 1, TABLE_WIDTH)
    positions[PADDING_ROW] = 0
    rows = rng.sample(range(NUM_ROWS), NUM_ROWS)
    used_decodes = rng.randint(0, num_decodes)
    used_prefills = rng.randint(0, num_prefills - 1)
    unused_prefills = num_prefills - used_prefills
    chunk_lens = [rng.randint(1, 7) for _ in range(used_prefills)]
    seq_lens = [rng.randint(chunk_len, MAX_LEN) for chunk_len in chunk_lens]
    starts = list(accumulate(chunk_lens, initial=used_decodes))
    num_tokens = starts[-1] + rng.choice((0, 5))
    packed = [
        *rows[:used_decodes],
        *[PADDING_ROW] * (num_decodes - used_decodes),
        *[PADDING_ROW] * num_prefills,  # no chunk samples a token
        *rows[NUM_ROWS - used_prefills :],
        *[PADDING_ROW] * unused_prefills,
        *starts,
        *[starts[-1]] * (unused_prefills - 1),
        num_tokens,
        *seq_lens,
        *[0] * unused_prefills,
        *(rng.randrange(1000) for _ in range(num_tokens)),
    ]
    inputs = (torch.tensor(packed, dtype=torch.int32), last_tokens, positions, block_tables)
    expected = gather_mixed_reference(*inputs, BLOCK_SIZE, num_decodes, num_prefills, num_tokens)
    num_sequences = num_decodes + num_prefills
    num_slots = NUM_TABLES * num_tokens
    outputs = torch.full((2 * num_tokens + num_slots + 3 * num_sequences + 1,), -1).int()
    batch_tables = torch.full((NUM_TABLES, num_sequences, TABLE_WIDTH), -1, dtype=torch.int32)
    gather_mixed_kernel[(num_sequences, NUM_TABLES)](
        *inputs,
        outputs,
        batch_tables,
        num_decodes,
        num_prefills,
        num_tokens,
        NUM_ROWS + 1,
        TABLE_WIDTH,
        BLOCK_SIZE=BLOCK_SIZE,
        CHUNK=4,
        PDL=False,
    )
    parts = outputs.split(
        (num_sequences, num_sequences, num_sequences + 1, num_tokens, num_tokens, num_slots)
    )
    for name, part in zip(expected._fields, parts, strict=False):
        assert torch.equal(part, getattr(expected, name).flatten()), name
    assert_same_used_blocks(batch_tables, expected.block_tables, expected.seq_lens)
