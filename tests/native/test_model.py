"""The embedded model from its 4-bit blocks: close to the float32 reference of the same weights, in any batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bloomery import LLM, SamplingParams
from bloomery.artifacts.locate import locate
from bloomery.models.load import load
from bloomery.native.team import team
from bloomery.quant.native import BlocksReady
from tests.parity.serve import decoder_logits

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "embedded.json").read_text(encoding="utf-8")
)
TEXTS = [entry["prompt_ids"] + entry["ids"] for entry in GOLDEN[:4]]


@pytest.fixture(scope="module")
def llm(crew: object) -> Iterator[LLM]:
    made = LLM(None, threads=2, kv_cache_gib=0.3, max_model_len=1024)
    yield made
    made.close()


def distributions(native: bool) -> torch.Tensor:
    decoder = load(locate(None), "auto", torch.float32, torch.device("cpu"), native=native).decoder
    assert isinstance(decoder.layers[0].mlp.down.matrix, BlocksReady) == native
    return torch.cat([decoder_logits(decoder, text, len(text)) for text in TEXTS]).log_softmax(-1)


def test_eight_bit_activations_change_little(crew: object) -> None:
    """Measured over all golden texts: see `benchmarks/laptop.py agreement`. The bounds leave room for these few."""
    ours = distributions(native=True)
    team().stop()
    theirs = distributions(native=False)
    team().start(2)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.94
    assert divergence.mean() < 0.01 and divergence.max() < 0.5


def answers(llm: LLM, prompts: list[str], **wishes: object) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=24, ignore_eos=True, **wishes)
    return [
        tuple(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)
    ]


def test_alone_or_together(llm: LLM) -> None:
    """A recorded step of one line and of six say the same, greedy or drawn."""
    prompts = [entry["prompt"] for entry in GOLDEN[:6]]
    for wishes in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}):
        together = answers(llm, prompts, **wishes)
        assert [answers(llm, [prompt], **wishes)[0] for prompt in prompts] == together


def test_picked_natively_or_by_the_sampler(llm: LLM) -> None:
    """A row that asks for log-probabilities takes the way of the logits; its tokens are the same."""
    prompts = [entry["prompt"] for entry in GOLDEN[:3]]
    wishes = {"temperature": 1.0, "top_k": 40, "seed": 3}
    assert answers(llm, prompts, **wishes) == answers(llm, prompts, **wishes, logprobs=1)
