"""Every family and rope scaling compared with transformers, on tiny random checkpoints.

First logits are compared, then greedy tokens from the real engine: paged KV cache, chunked prefill
of 7 tokens, a batch of 5, prefix hits, and a KV cache so small that sequences are preempted.
Windows are shorter than the prompts, so their layers give blocks back while sequences run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bloomery.artifacts.locate import locate_model
from bloomery.describe import describe_model
from bloomery.roofline import count_parameters
from tests.parity.cases import (
    CASES,
    ROUTER_BIASES,
    VOCAB,
    ParityCase,
    count_positions,
    make_checkpoint,
    reference_logits,
)
from tests.parity.serve import (
    build_engine_loop,
    build_plan,
    greedy_request,
    output_token_ids,
    prompt_logits,
    run_requests,
)

MAX_TOKENS = 32


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ParityCase, Path, Any]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return request.param, folder, make_checkpoint(request.param, folder)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_logits_equal_transformers(checkpoint: tuple[ParityCase, Path, Any]) -> None:
    case, folder, model = checkpoint
    tokens = random_tokens(case.prompt)
    expected = reference_logits(model, torch.tensor([tokens]), case.prompt)
    actual = prompt_logits(folder, tokens, case.length)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_parameters_are_counted(checkpoint: tuple[ParityCase, Path, Any]) -> None:
    _, folder, model = checkpoint
    if hasattr(model.config, "vision_config"):
        pytest.skip("only the text part is counted")
    router_biases = [
        buffer for name, buffer in model.named_buffers() if name.endswith(ROUTER_BIASES)
    ]
    expected = sum(tensor.numel() for tensor in [*model.parameters(), *router_biases])
    described = describe_model(locate_model(str(folder)))
    assert count_parameters(described.model).total == expected


@torch.no_grad()
def reference_greedy(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Continue prompts of equal length, as one batch."""
    output = model(torch.tensor(prompts), use_cache=True)
    tokens = [output.logits[:, -1].argmax(-1)]
    while len(tokens) < count:
        cache = output.past_key_values
        length = len(prompts[0]) + len(tokens)
        positions = count_positions(model, length - 1, length)
        output = model(tokens[-1][:, None], past_key_values=cache, use_cache=True, **positions)
        tokens.append(output.logits[:, -1].argmax(-1))
    return torch.stack(tokens, 1).tolist()


def test_greedy_tokens_of_the_engine_equal_transformers(
    checkpoint: tuple[ParityCase, Path, Any],
) -> None:
    """Five prompts with a common prefix; the first one runs ahead, so the others hit its blocks."""
    case, folder, model = checkpoint
    prefix = random_tokens(case.prompt - 4, seed=1)
    prompts = [prefix + random_tokens(4, seed=i) for i in range(2, 7)]
    expected = reference_greedy(model, prompts, MAX_TOKENS)
    longest = case.prompt + MAX_TOKENS
    max_model_len = case.length
    count = min(MAX_TOKENS, max_model_len - case.prompt)
    num_pages = -(-longest // 4) + 2 * -(-longest // 8)  # room for about two sequences
    loop = build_engine_loop(
        build_plan(
            folder,
            max_model_len,
            block_size=4,
            max_num_batched_tokens=7,
            max_num_seqs=5,
            kv_cache_gib=0.01,
        ),
        num_pages,
    )
    pool = loop.scheduler.block_pool
    num_blocks = pool.num_blocks
    first = run_requests(loop, [greedy_request("0", prompts[0], count)])
    others = run_requests(loop, [greedy_request(str(i), prompts[i], count) for i in range(1, 5)])
    for i, outputs in enumerate([first["0"], *others.values()]):
        assert output_token_ids(outputs) == expected[i][:count], f"prompt {i}"
    assert all(outputs[-1].cached > 0 for outputs in others.values()), "no prefix was hit"
    if pool.windows:
        # Sequences take less room here, so the pool must be smaller for preemptions.
        room = 3 * pool.count_held_blocks(longest, 7) // 2
        taken = pool._take_blocks(num_blocks - room)
        again = run_requests(loop, [greedy_request(str(i), prompts[i], count) for i in range(5)])
        for i, outputs in enumerate(again.values()):
            assert output_token_ids(outputs) == expected[i][:count], f"prompt {i}"
        pool.free_blocks += taken
    assert loop.scheduler.num_preemptions > 0, "nothing was preempted"
    assert pool.num_free_blocks == num_blocks
