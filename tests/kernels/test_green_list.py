"""Green lists of watermarks: kernels and native code find the tokens of torch's permutation."""

from __future__ import annotations

import pytest
import torch

from bloomery.kernels.green_list import find_green_list
from bloomery.kernels.launch import triton_interpreted
from bloomery.kernels.sampling import SamplingScratch, sample_tokens_triton
from bloomery.kernels.sampling_reference import sample_tokens_reference, unpack_bits
from bloomery.kernels.sampling_rows import GREEN, SampleOutputs, SamplingRows
from bloomery.messages import NewRequestData, ResolvedSampling
from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool
from bloomery.runtime.sampler import Sampler

GAMMAS = (0.0, 0.25, 0.5, 1.0)
# Small vocabularies need a few words of the generator, the largest needs its state three times.
SIZES = [2, 33, 1303]


def sample_watermarked(sampler: Sampler, vocab_size: int, kind: str) -> SamplingRows:
    """Sample one token for a request with each gamma, in rows 1, 2, 3 and 4."""
    for row, gamma in enumerate(GAMMAS, 1):
        prompt = (row % vocab_size, (vocab_size - row) % vocab_size)
        sampling = ResolvedSampling(0.0, watermark=(gamma, 100.0))
        sampler.admit(row, NewRequestData(prompt, 2, sampling, ()))
    sampler.upload_new_requests()
    rows = torch.arange(1, 5, dtype=torch.int32)
    positions = torch.full((4,), 2)
    logits = torch.zeros(4, vocab_size)
    outputs = SampleOutputs.allocate(4, "cpu")
    state = sampler.state
    if kind == "kernels":
        scratch = SamplingScratch.allocate(4, vocab_size, "cpu", segment=1024)
        sample_tokens_triton(logits, rows, positions, state, outputs, scratch)
    elif kind == "native":
        ops.sample_tokens(ThreadPool(1), logits, rows, positions, state, *outputs)
    else:
        sample_tokens_reference(logits, rows, positions, state, outputs)
    for row, gamma in enumerate(GAMMAS, 1):
        green = find_green_list(
            (vocab_size - row) % vocab_size, int(vocab_size * gamma), vocab_size
        )
        first = int(green.min()) if len(green) else 0
        assert int(outputs.tokens[row - 1]) == first
        assert int(state.recent[row, 2]) == first
    return state


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("kind", ["kernels", "native", "reference"])
def test_green_lists_are_those_of_the_permutation(kind: str, vocab_size: int) -> None:
    if kind == "kernels" and not triton_interpreted():
        pytest.skip("needs Triton's interpreter")
    state = sample_watermarked(Sampler(6, vocab_size), vocab_size, kind)
    if kind == "reference":
        return  # it stores no list
    for row, gamma in enumerate(GAMMAS, 1):
        expected = torch.zeros(vocab_size, dtype=torch.bool)
        green = find_green_list(
            (vocab_size - row) % vocab_size, int(vocab_size * gamma), vocab_size
        )
        expected[green] = True
        assert torch.equal(unpack_bits(state.bits[row, GREEN], vocab_size), expected)


def test_a_long_vocabulary_has_the_permutation_of_the_library() -> None:
    """The vocabulary of Llama 3, whose lists TGI computes with torch.randperm."""
    vocab_size = 128_256
    state = sample_watermarked(Sampler(6, vocab_size), vocab_size, "native")
    generator = torch.Generator().manual_seed(15485863 * (vocab_size - 3))
    expected = torch.randperm(vocab_size, generator=generator)[: vocab_size // 2]
    is_green = unpack_bits(state.bits[3, GREEN], vocab_size)
    assert bool(is_green[expected].all())
    assert int(is_green.sum()) == vocab_size // 2
