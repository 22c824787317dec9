"""Recurrent mixers in the real engine: chunks of any size, and conversations that go on.

A state is updated in place. It must come to the same whether a prompt is computed position by
position or at once, and a sequence can resume only where its state was kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bloomery.engine.loop import EngineLoop
from tests.parity.cases import CASES, VOCAB, make_checkpoint
from tests.parity.serve import (
    build_engine_loop,
    build_plan,
    greedy_request,
    output_token_ids,
    run_requests,
)

# A model for each kind of mixer; Falcon-H1 has attention beside it in every layer, Zamba2 has a
# block before it in some.
NAMES = ["qwen3_5_text", "falcon_h1-multiplied", "jamba", "lfm2-biased", "zamba2-adapted"]
PAGE = 4
PROMPT = 90
MAX_TOKENS = 8
MAX_LEN = 128


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("checkpoint")
    case = next(case for case in CASES if case.name == request.param)
    return folder, make_checkpoint(case, folder)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def start_loop(folder: Path, **options: Any) -> EngineLoop:
    plan = build_plan(folder, MAX_LEN, block_size=PAGE, kv_cache_gib=0.01, **options)
    return build_engine_loop(plan)


def generate(loop: EngineLoop, prompt: list[int], name: str) -> tuple[list[int], int]:
    """Return the greedy tokens, and how many positions of the prompt were in the prefix cache."""
    outputs = run_requests(loop, [greedy_request(name, prompt, MAX_TOKENS)])[name]
    return output_token_ids(outputs), outputs[-1].cached


@torch.no_grad()
def reference_greedy(model: Any, prompt: list[int]) -> list[int]:
    """Continue the prompt, each time in one pass over everything."""
    tokens = list(prompt)
    for _ in range(MAX_TOKENS):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_chunks_of_any_size_give_the_same_tokens(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    prompt = random_tokens(PROMPT)
    expected = reference_greedy(model, prompt)
    for chunk in (1, 7, 64, 128):
        loop = start_loop(folder, max_num_batched_tokens=chunk, max_num_seqs=1)
        tokens, _ = generate(loop, prompt, "a")
        assert tokens == expected, f"chunks of {chunk}"


def test_a_conversation_resumes_at_the_end_of_its_last_answer(
    checkpoint: tuple[Path, Any],
) -> None:
    """With reasoning removed from the history, it resumes before the end of the last prompt."""
    folder, model = checkpoint
    loop = start_loop(folder, max_num_batched_tokens=64, max_num_seqs=2)
    first = random_tokens(30)
    answer, cached = generate(loop, first, "first")
    assert cached == 0
    second = [*first, *answer, *random_tokens(6, seed=1)]
    tokens, cached = generate(loop, second, "second")
    assert cached == len(first) + len(answer) - 1  # the last token was sampled, not computed
    assert tokens == reference_greedy(model, second)
    shortened = [*first, *answer[-3:], *random_tokens(5, seed=2)]
    tokens, cached = generate(loop, shortened, "shortened")
    assert cached == (len(first) - 1) // PAGE * PAGE
    assert tokens == reference_greedy(model, shortened)
    edited = [*second[:34], *random_tokens(20, seed=3)]
    expected = reference_greedy(model, edited)
    for attempt in range(2):  # the second one resumes at the end of the first one's prompt
        tokens, cached = generate(loop, edited, f"edited {attempt}")
        assert tokens == expected
    assert cached >= (len(edited) - 1) // PAGE * PAGE
