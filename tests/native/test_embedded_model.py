"""The embedded model from its 4-bit blocks: close to float32 of the same weights, in any batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bloomery import LLM, SamplingParams
from bloomery.artifacts.locate import locate_model
from bloomery.models.load import load_model
from bloomery.native.thread_pool import ThreadPool
from bloomery.quant.native import NativeWeight
from tests.parity.serve import decoder_logits

GOLDEN_FILE = Path(__file__).parent.parent / "golden" / "embedded.json"
GOLDEN = json.loads(GOLDEN_FILE.read_text(encoding="utf-8"))
TEXTS = [entry["prompt_ids"] + entry["ids"] for entry in GOLDEN[:4]]


@pytest.fixture(scope="module")
def llm(pool: ThreadPool) -> Iterator[LLM]:
    llm = LLM(None, threads=2, kv_cache_gib=0.3, max_model_len=1024)
    yield llm
    llm.close()


def token_logprobs(pool: ThreadPool | None) -> torch.Tensor:
    """Log-probabilities [positions, vocab] of the golden texts, with or without native kernels."""
    native = pool is not None
    decoder = load_model(
        locate_model(None),
        "auto",
        torch.float32,
        torch.device("cpu"),
        keep_gguf_blocks=native,
        pool=pool,
    ).decoder
    assert isinstance(decoder.layers[0].mlp.down.matrix, NativeWeight) == native
    logits = [decoder_logits(decoder, text, len(text)) for text in TEXTS]
    return torch.cat(logits).log_softmax(-1)


def test_rounding_activations_changes_little(pool: ThreadPool) -> None:
    """`benchmarks/laptop.py agreement` measures all golden texts; these bounds leave some room."""
    native = token_logprobs(pool)
    reference = token_logprobs(None)
    divergence = (reference.exp() * (reference - native)).sum(-1)
    same_token = native.argmax(-1) == reference.argmax(-1)
    if pool.largest_activation > 127:  # 15 bits
        assert same_token.float().mean() > 0.99
        assert divergence.max() < 1e-3
        return
    assert same_token.float().mean() > 0.94
    assert divergence.mean() < 0.01 and divergence.max() < 0.5


def generate_ids(llm: LLM, prompts: list[str], **options: object) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=24, ignore_eos=True, **options)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_a_batch_of_one_and_of_six_give_the_same_tokens(llm: LLM) -> None:
    """Greedy and sampled, from traced decode steps."""
    prompts = [entry["prompt"] for entry in GOLDEN[:6]]
    for options in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}):
        together = generate_ids(llm, prompts, **options)
        one_by_one = [generate_ids(llm, [prompt], **options)[0] for prompt in prompts]
        assert one_by_one == together


def test_native_sampling_and_the_sampler_give_the_same_tokens(llm: LLM) -> None:
    """A request for log-probabilities is sampled from its logits, outside of the trace."""
    prompts = [entry["prompt"] for entry in GOLDEN[:3]]
    options = {"temperature": 1.0, "top_k": 40, "seed": 3}
    with_logprobs = generate_ids(llm, prompts, **options, logprobs=1)
    assert generate_ids(llm, prompts, **options) == with_logprobs
