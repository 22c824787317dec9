"""Embeddings against transformers' last hidden state: in chunks, beside others, preempted, with a prefix or without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bloomery.messages import PoolingType, TokenOutput
from bloomery.sampling import embedding_request
from tests.parity.cases import CASES, VOCAB, Case, make_checkpoint
from tests.parity.serve import engine, greedy, ids, plan, run
from tests.parity.test_families import random_tokens, reference_greedy

NAMES = ("llama", "opt-350m", "gemma2")
SHOWN = [case for case in CASES if case.name in NAMES]


@pytest.fixture(scope="module", params=SHOWN, ids=lambda case: case.name)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, Path, Any]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return request.param, folder, make_checkpoint(request.param, folder)


def reference(model: Any, prompt: list[int], pooling: PoolingType) -> torch.Tensor:
    with torch.no_grad():
        states = model.base_model(torch.tensor([prompt])).last_hidden_state[0]  # [tokens, width]
    pooled = states.mean(0) if pooling == "mean" else states[-1]
    return torch.nn.functional.normalize(pooled, dim=0)


def far(news: list[TokenOutput], want: torch.Tensor) -> float:
    (only,) = news
    assert only.finish == "stop" and only.ids == ()
    return float((torch.tensor(only.embedding) - want).abs().max())


def test_embeddings_beside_answers(made: tuple[Case, Path, Any]) -> None:
    case, folder, model = made
    stem = random_tokens(case.prompt - 4, seed=1)
    prompts = [stem + random_tokens(4, seed=i) for i in range(2, 5)]
    blocks = -(-(case.prompt + 8) // 4) * 2 + 1  # for two sequences: others wait or are preempted
    loop = engine(
        plan(
            folder,
            case.prompt + 8,
            block_size=4,
            max_num_batched_tokens=7,
            max_num_seqs=5,
            kv_cache_gib=0.01,
        ),
        blocks,
    )
    run(loop, [greedy("before", prompts[0], 2)])  # leaves its prefix in the cache
    wishes: list[tuple[list[int], PoolingType]] = [
        (prompt, kind) for prompt in prompts for kind in ("mean", "last")
    ]
    wishes += [
        (prompts[0][:1], "mean"),
        (random_tokens(case.prompt + 8, seed=9), "last"),
    ]  # one token; all there is room for
    asked = [
        embedding_request(prompt, kind, id=str(i), vocab=VOCAB, max_length=case.prompt + 8)
        for i, (prompt, kind) in enumerate(wishes)
    ]
    news = run(loop, [*asked[:3], greedy("answer", prompts[1], 6), *asked[3:]])
    for request, (prompt, kind) in zip(asked, wishes, strict=True):
        assert far(news[request.id], reference(model, prompt, kind)) < 1e-5, (request.id, kind)
    assert ids(news["answer"]) == reference_greedy(model, prompts[1], 6)
    assert news["0"][0].cached == 0 and news["1"][0].cached > 0, (
        "a mean needs every position, a last token does not"
    )
    assert loop.scheduler.blocks.available == blocks


def test_a_preempted_mean_begins_anew(made: tuple[Case, Path, Any]) -> None:
    """It crawls along, a position a step, beside an answer that outgrows the cache: half a sum is lost with its row."""
    case, folder, model = made
    prompt = random_tokens(24, seed=3)
    loop = engine(
        plan(folder, 24, block_size=4, max_num_batched_tokens=2, max_num_seqs=2, kv_cache_gib=0.01),
        7,
    )
    request = embedding_request(prompt, "mean", id="0", vocab=VOCAB, max_length=24)
    news = run(loop, [greedy("answer", prompt[:4], 20), request])
    assert far(news["0"], reference(model, prompt, "mean")) < 1e-5
    assert loop.scheduler.preemptions > 0, "nothing was preempted"
