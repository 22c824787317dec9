"""Every family and rope scaling against transformers, on tiny random checkpoints: logits, then whole engines.

The engine runs are the real thing: paged cache, chunks of 7 tokens, a batch of 5, prefix hits and a cache so small
that sequences are preempted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.cases import CASES, VOCAB, Case, make_checkpoint, reference_logits
from tests.parity.serve import engine, greedy, ids, logits, plan, run

TOKENS = 32


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, Path, Any]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return request.param, folder, make_checkpoint(request.param, folder)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_logits(made: tuple[Case, Path, Any]) -> None:
    case, folder, model = made
    tokens = random_tokens(case.prompt)
    want = reference_logits(model, torch.tensor([tokens]), case.prompt)
    got = logits(folder, tokens, case.length)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def reference_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    with torch.no_grad():
        answer = model(torch.tensor([prompt]), use_cache=True)
        out = [int(answer.logits[0, -1].argmax())]
        while len(out) < count:
            answer = model(
                torch.tensor([[out[-1]]]), past_key_values=answer.past_key_values, use_cache=True
            )
            out.append(int(answer.logits[0, -1].argmax()))
    return out


def test_greedy_through_the_engine(made: tuple[Case, Path, Any]) -> None:
    """Five prompts with a common beginning; the first goes ahead, so that the others hit its blocks."""
    case, folder, model = made
    stem = random_tokens(case.prompt - 4, seed=1)
    prompts = [stem + random_tokens(4, seed=i) for i in range(2, 7)]
    want = [reference_greedy(model, prompt, TOKENS) for prompt in prompts]
    longest = case.prompt + TOKENS
    served = min(case.length, longest) if case.length < longest else case.length
    count = min(TOKENS, served - case.prompt)
    small = -(-longest // 4) + 2 * -(-longest // 8)  # room for about two sequences
    loop = engine(
        plan(
            folder,
            served,
            block_size=4,
            max_num_batched_tokens=7,
            max_num_seqs=5,
            kv_cache_gib=0.01,
        ),
        small,
    )
    first = run(loop, [greedy("0", prompts[0], count)])
    rest = run(loop, [greedy(str(i), prompts[i], count) for i in range(1, 5)])
    for i, prompt_news in enumerate([first["0"], *rest.values()]):
        assert ids(prompt_news) == want[i][:count], f"prompt {i}"
    assert loop.scheduler.preemptions > 0, "nothing was preempted"
    assert all(news[-1].cached > 0 for news in rest.values()), "no prefix was hit"
    assert loop.scheduler.blocks.available == small
