"""Every model family over real rank processes gives the tokens of one process.

The everyday run takes families that differ in what is split, with tensor and pipeline parallelism
at once. `pytest -m slow` takes all families in all layouts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bloomery.config import EnginePlan
from bloomery.engine.executor import Executor
from bloomery.executors.local import LocalExecutor
from bloomery.executors.multiprocess import MultiprocessExecutor
from tests.parallel.engines import start_engine_loop
from tests.parity.cases import CASES, VOCAB, ParityCase, make_checkpoint
from tests.parity.serve import build_plan, greedy_request, output_token_ids, run_requests

NUM_TOKENS = 8
BLOCK_SIZE = 4
EVERYDAY = {
    "bloom-residual-after-norm",  # ALiBi, residuals behind the norms
    "gpt_bigcode-mqa",  # one KV head
    "falcon-40b",  # parallel attention and MLP
    "qwen2_moe",  # experts
    "gpt_oss",  # biases of experts, interleaved gate and up, sinks
    "laguna-window",  # heads that differ by layer, gates
    "llama4_text",  # stacked experts, input and output dimension swapped
    "gemma2",  # norms behind the blocks, two cache groups
    "cohere2",  # several block tables in a cache group
    "opt-350m",  # learned positions
    "olmo2",  # norms of q and k
    "cohere-normed",  # norms of q and k per head, parallel blocks
    "qwen3_next",  # gated delta nets, whose projections are fused by head
    "zamba2-adapted",  # blocks that layers share, which read the embeddings
    "falcon_h1-multiplied",  # attention and Mamba-2 in one layer, whose sum is all-reduced
    "nemotron_h-latent",  # Mamba-2, experts in a latent space, one block per layer
    "llama",  # none of these
}


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()


def generate(executor: Executor, plan: EnginePlan, case: ParityCase) -> list[list[int]]:
    """Complete four prompts with a common prefix.

    The prompts are computed in chunked prefill with prefix hits, and the KV cache has room for
    about two of them.
    """
    max_len = case.prompt + NUM_TOKENS
    num_pages = -(-max_len // BLOCK_SIZE) + 2 * -(-max_len // (2 * BLOCK_SIZE))
    loop, _ = start_engine_loop(executor, plan, num_pages)
    prefix = random_tokens(case.prompt - 4, seed=0)
    prompts = [prefix + random_tokens(4, seed=1 + i) for i in range(4)]
    requests = [greedy_request(str(i), prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)]
    outputs = run_requests(loop, requests[:1]) | run_requests(loop, requests[1:])
    return [output_token_ids(outputs[request.id]) for request in requests]


def check_parity(
    case: ParityCase,
    tp: int,
    pp: int,
    folder: Path,
    rank_executors: dict[int, MultiprocessExecutor],
) -> None:
    make_checkpoint(case, folder)
    max_len = max(case.length, case.prompt + NUM_TOKENS)

    def plan(tp: int, pp: int) -> EnginePlan:
        return build_plan(
            folder,
            max_len,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=7,
            max_num_seqs=5,
            kv_cache_gib=0.01,
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
        )

    expected = generate(LocalExecutor(), plan(1, 1), case)
    assert generate(rank_executors[tp * pp], plan(tp, pp), case) == expected


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in EVERYDAY], ids=lambda case: case.name
)
def test_tensor_and_pipeline_parallel_at_once(
    case: ParityCase, tmp_path: Path, rank_executors: dict[int, MultiprocessExecutor]
) -> None:
    check_parity(case, 2, 2, tmp_path, rank_executors)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_layouts(
    case: ParityCase,
    tp: int,
    pp: int,
    tmp_path: Path,
    rank_executors: dict[int, MultiprocessExecutor],
) -> None:
    check_parity(case, tp, pp, tmp_path, rank_executors)
