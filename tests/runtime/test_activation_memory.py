"""Activation memory: the measured step is valid and as large as the limits allow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bloomery.artifacts.locate import locate_model
from bloomery.attention.base import AttentionMetadata
from bloomery.attention.torch_paged import TorchPagedAttention
from bloomery.models.load import load_model
from bloomery.runtime.activation_memory import (
    LOGITS_CHUNK,
    LargestStep,
    measure_activation_memory,
)
from tests.parity.cases import CASES, make_checkpoint
from tests.parity.serve import build_plan

CPU = torch.device("cpu")
BLOCK_SIZE = 4


class SpyAttention(TorchPagedAttention):
    """Records the layout of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[AttentionMetadata] = []

    def prepare(self, metadata: AttentionMetadata) -> Any:
        self.steps.append(metadata)
        return super().prepare(metadata)


@pytest.mark.parametrize("name", ["llama", "bloom", "mixtral", "gemma2", "zamba2"])
@pytest.mark.parametrize(
    ("max_tokens", "max_num_seqs", "max_len"),
    [(64, 4, 40), (16, 8, 40), (100, 2, 30), (33, 3, 16)],
)
def test_the_measured_step_is_as_large_as_the_limits_allow(
    name: str,
    max_tokens: int,
    max_num_seqs: int,
    max_len: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_checkpoint(next(case for case in CASES if case.name == name), tmp_path)
    decoder = load_model(locate_model(str(tmp_path)), "auto", torch.float32, CPU).decoder
    limits = replace(
        build_plan(tmp_path, max_len),
        max_num_batched_tokens=max_tokens,
        max_num_seqs=max_num_seqs,
        block_size=BLOCK_SIZE,
    )
    decoder.build_rope_cache(max_len)
    num_logits: list[int] = []
    original_logits = decoder.logits

    def spy_logits(hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        num_logits.append(len(hidden))
        return original_logits(hidden, **options)

    monkeypatch.setattr(decoder, "logits", spy_logits)
    backend = SpyAttention()
    memory = measure_activation_memory(decoder, backend, limits, torch.float32, captured_tokens=8)
    assert memory == (0, 0)  # on a CPU nothing is reserved
    query_lens = [step.host_query_lens for step in backend.steps]
    seq_lens = [step.host_seq_lens for step in backend.steps]
    assert max(map(sum, query_lens)) >= min(max_tokens, max_num_seqs * max_len)
    assert max(lengths[0] for lengths in seq_lens) == max_len
    assert max(num_logits) == max(max_num_seqs, LOGITS_CHUNK)
    for step in backend.steps:
        check_layout(step, max_len)
    largest = LargestStep(decoder, TorchPagedAttention(), limits, torch.float32)
    prompts = largest.split_into_prompts(largest.num_tokens)
    slots = largest.build_metadata(prompts).slot_mapping.tolist()
    # Prompts of one step do not share a slot.
    assert len(set(slots)) == len(slots) == largest.num_tokens


def check_layout(step: AttentionMetadata, max_len: int) -> None:
    """Compare positions and slots with the lengths and block tables."""
    query_lens = step.host_query_lens
    seq_lens = step.host_seq_lens
    assert list(query_lens) == sorted(query_lens)
    assert all(seq_len <= max_len for seq_len in seq_lens)
    token = 0
    for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for position in range(seq_len - query_len, seq_len):
            block = int(step.block_tables[i, position // BLOCK_SIZE])
            slot = block * BLOCK_SIZE + position % BLOCK_SIZE
            assert int(step.positions[token]) == position
            assert int(step.slot_mapping[token]) == slot
            token += 1
    assert token == len(step.positions) == int(step.query_start_loc[-1])
