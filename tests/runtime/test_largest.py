"""The step that memory is kept for is as large as a step can be, and one that a real batch could be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bloomery.artifacts.locate import locate
from bloomery.attention.base import AttentionMetadata
from bloomery.attention.torch_paged import TorchPaged
from bloomery.messages import ResolvedSampling, NewRequestData
from bloomery.models.load import load
from bloomery.runtime import sampler as sampling
from bloomery.runtime.largest import Largest, largest_step
from bloomery.runtime.sampler import Sampler
from tests.parity.cases import CASES, make_checkpoint
from tests.parity.serve import plan

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["llama", "bloom", "mixtral", "gemma2"])
@pytest.mark.parametrize(
    "tokens, sequences, length", [(64, 4, 40), (16, 8, 40), (100, 2, 30), (33, 3, 16)]
)
def test_it_is_as_large_as_limits_allow(
    name: str,
    tokens: int,
    sequences: int,
    length: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_checkpoint(next(case for case in CASES if case.name == name), tmp_path)
    decoder = load(locate(str(tmp_path)), "auto", torch.float32, CPU).decoder
    wanted = replace(
        plan(tmp_path, length), max_num_batched_tokens=tokens, max_num_seqs=sequences, block_size=4
    )
    decoder.reach(length)
    seen: list[AttentionMetadata] = []
    drawn: list[tuple[int, int]] = []

    class Watched(TorchPaged):
        def plan(self, ragged: AttentionMetadata):  # type: ignore[no-untyped-def]
            seen.append(ragged)
            return super().plan(ragged)

    sample = Sampler.sample

    def watch(self: Sampler, logits: torch.Tensor, asked):  # type: ignore[no-untyped-def]
        drawn.append((len(logits), max(position for _, position, _ in asked)))
        return sample(self, logits, asked)

    monkeypatch.setattr(Sampler, "sample", watch)
    assert (
        largest_step(decoder, Watched(), wanted, torch.float32, captured=8) == 0
    )  # a CPU has no such limit
    assert max(sum(ragged.counts) for ragged in seen) >= min(tokens, sequences * length)
    assert max(ragged.lengths[0] for ragged in seen) == length
    assert drawn == [(sequences, length - 1)]
    for ragged in seen:
        assert list(ragged.counts) == sorted(ragged.counts) and all(
            end <= length for end in ragged.lengths
        )
        at = 0
        for i, (count, end) in enumerate(zip(ragged.counts, ragged.lengths, strict=True)):
            for position in range(end - count, end):
                slot = int(ragged.tables[i, position // 4]) * 4 + position % 4
                assert int(ragged.positions[at]) == position and int(ragged.slots[at]) == slot
                at += 1
        assert at == len(ragged.positions) == int(ragged.starts[-1])
    largest = Largest(decoder, TorchPaged(), wanted, torch.float32)
    slots = largest.ragged(largest.prompts(largest.positions)).slots.tolist()
    assert (
        len(set(slots)) == len(slots) == largest.positions
    )  # prompts of one step do not share a place


def test_lines_in_parts_give_the_same_tokens_and_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = 60
    lines = 23
    wishes = [
        ResolvedSampling(),
        ResolvedSampling(0.0),
        ResolvedSampling(0.8, top_p=0.7),
        ResolvedSampling(1.2, top_k=9, logprobs=4),
    ]
    wishes += [
        ResolvedSampling(0.9, typical_p=0.6, logprobs=2),
        ResolvedSampling(0.7, top_p=0.9, repetition_penalty=1.3),
    ]
    logits = torch.randn(lines, vocab, generator=torch.Generator().manual_seed(0)) * 3

    def drawn() -> object:
        sampler = Sampler(lines, vocab)
        for row in range(lines):
            tokens = tuple(range(row % 7 + 1))
            sampler.admit(
                row,
                NewRequestData(
                    tokens, len(tokens), replace(wishes[row % len(wishes)], seed=row), ()
                ),
            )
        found = sampler.sample(logits, [(row, row % 7 + 1, ()) for row in range(lines)])
        return found.collect(), sampler.prompt_logprobs(logits, list(range(lines)), 3)

    whole = drawn()
    for some in (1, 2, 5):
        monkeypatch.setattr(sampling, "CHUNK", some * vocab)
        assert drawn() == whole
