"""Embeddings equal the pooled last hidden state of transformers, however they are scheduled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bloomery.engine.state_pool import StatePool
from bloomery.messages import PoolingType, TokenOutput
from bloomery.sampling import build_embedding_request
from tests.parity.cases import CASES, VOCAB, ParityCase, make_checkpoint
from tests.parity.serve import (
    build_engine_loop,
    build_plan,
    greedy_request,
    output_token_ids,
    run_requests,
)
from tests.parity.test_families import random_tokens, reference_greedy

NAMES = ("llama", "opt-350m", "gemma2", "qwen3_5_text")
EMBEDDING_CASES = [case for case in CASES if case.name in NAMES]


@pytest.fixture(scope="module", params=EMBEDDING_CASES, ids=lambda case: case.name)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ParityCase, Path, Any]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return request.param, folder, make_checkpoint(request.param, folder)


def reference_embedding(model: Any, prompt: list[int], pooling: PoolingType) -> torch.Tensor:
    with torch.no_grad():
        states = model.base_model(torch.tensor([prompt])).last_hidden_state[0]  # [tokens, width]
    pooled = states.mean(0) if pooling == "mean" else states[-1]
    return torch.nn.functional.normalize(pooled, dim=0)


def embedding_error(outputs: list[TokenOutput], expected: torch.Tensor) -> float:
    (output,) = outputs
    assert output.finish == "stop" and output.ids == ()
    return float((torch.tensor(output.embedding) - expected).abs().max())


def test_embeddings_batched_with_generation(checkpoint: tuple[ParityCase, Path, Any]) -> None:
    case, folder, model = checkpoint
    stem = random_tokens(case.prompt - 4, seed=1)
    prompts = [stem + random_tokens(4, seed=i) for i in range(2, 5)]
    # Room for two sequences: the others wait or are preempted.
    num_pages = -(-(case.prompt + 8) // 4) * 2 + 1
    loop = build_engine_loop(
        build_plan(
            folder,
            case.prompt + 8,
            block_size=4,
            max_num_batched_tokens=7,
            max_num_seqs=5,
            kv_cache_gib=0.01,
        ),
        num_pages,
    )
    # This request leaves a prefix in the prefix cache.
    run_requests(loop, [greedy_request("before", prompts[0], 2)])
    inputs: list[tuple[list[int], PoolingType]] = [
        (prompt, kind) for prompt in prompts for kind in ("mean", "last")
    ]
    one_token = prompts[0][:1]
    longest = random_tokens(case.prompt + 8, seed=9)
    inputs += [(one_token, "mean"), (longest, "last")]
    requests = [
        build_embedding_request(
            prompt, kind, id=str(i), vocab_size=VOCAB, max_model_len=case.prompt + 8
        )
        for i, (prompt, kind) in enumerate(inputs)
    ]
    outputs = run_requests(
        loop, [*requests[:3], greedy_request("answer", prompts[1], 6), *requests[3:]]
    )
    for request, (prompt, kind) in zip(requests, inputs, strict=True):
        assert (
            embedding_error(outputs[request.id], reference_embedding(model, prompt, kind)) < 1e-5
        ), (request.id, kind)
    assert output_token_ids(outputs["answer"]) == reference_greedy(model, [prompts[1]], 6)[0]
    # A mean needs every position; the last token can use the prefix cache.
    assert outputs["0"][0].cached == 0 and outputs["1"][0].cached > 0
    pool = loop.scheduler.block_pool
    assert pool.num_free_blocks == pool.num_blocks


def test_a_preempted_mean_starts_again(checkpoint: tuple[ParityCase, Path, Any]) -> None:
    """The prompt computes one position per step while another request fills the KV cache."""
    case, folder, model = checkpoint
    prompt = random_tokens(24, seed=3)
    loop = build_engine_loop(
        build_plan(
            folder, 24, block_size=4, max_num_batched_tokens=2, max_num_seqs=2, kv_cache_gib=0.01
        )
    )
    pool = loop.scheduler.block_pool
    room = pool.count_held_blocks(24, 2) + 1  # for one sequence and a block
    if isinstance(pool, StatePool):
        room += pool.state_blocks  # and for the state of the other one
        pool.cache.take_blocks(pool.num_blocks - room)
    else:
        pool._take_blocks(pool.num_blocks - room)
    request = build_embedding_request(prompt, "mean", id="0", vocab_size=VOCAB, max_model_len=24)
    outputs = run_requests(loop, [greedy_request("answer", prompt[:4], 20), request])
    assert embedding_error(outputs["0"], reference_embedding(model, prompt, "mean")) < 1e-5
    assert loop.scheduler.num_preemptions > 0, "nothing was preempted"
