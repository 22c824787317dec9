"""The worker gives the same tokens on every step path, and restores torch's thread count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from bloomery.engine.executor import PendingStep
from bloomery.engine.loop import EngineLoop
from bloomery.executors.local import LocalExecutor
from bloomery.messages import EngineRequest, ResolvedSampling, ScheduledStep, TokenLogprob
from bloomery.runtime.worker import single_torch_thread
from tests.parity.cases import CASES, VOCAB, make_checkpoint
from tests.parity.serve import build_engine_loop, build_plan, run_requests

OPTIONS = {
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "block_size": 4,
    "kv_cache_gib": 0.01,
    "steps_in_flight": 2,
}


class ExplicitExecutor(LocalExecutor):
    """Lists every decode as a ScheduledRequest, so the host lays out every step."""

    def submit(self, step: ScheduledStep) -> PendingStep:
        return super().submit(ScheduledStep(step.requests, step.finished))


# Every sampling parameter; requests get random mixes of them.
PARAMETERS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.4, "presence_penalty": -0.3},
    {"logprobs": 0},
    {"logprobs": 4},
    {"prompt_logprobs": 1},
    {"top_p": 0.7},
    {"top_k": 9},
    {"min_p": 0.1},
    {"typical_p": 0.6},
    {"logit_bias": ((3, 4.0), (9, -50.0))},
    {"allowed_token_ids": tuple(range(3, 40, 2))},
    {"bad_words": ((5,), (7, 9), (9, 7, 9))},
    {"min_tokens": 3},
    {"watermark": (0.5, 3.0)},
)


def make_requests(seed: int, mixed: bool) -> list[EngineRequest]:
    """Greedy and sampled requests; with `mixed` each has some of all sampling parameters."""
    random = Random(seed)
    requests = []
    for number in range(9):
        options: dict[str, Any] = {"temperature": random.choice((0.0, 0.9)), "seed": number}
        if mixed:
            for parameters in random.sample(PARAMETERS, number % 5):
                options |= parameters
        prompt = tuple(random.randrange(3, VOCAB) for _ in range(random.randint(1, 20)))
        sampling = ResolvedSampling(**options)
        stop_ids = (2, 11) if "min_tokens" in options else ()
        requests.append(
            EngineRequest(str(number), prompt, sampling, random.randint(3, 14), stop_ids)
        )
    return requests


def generate(loop: EngineLoop, requests: list[EngineRequest]) -> dict[str, list[Any]]:
    """Return the token ids of each request, each with its rounded log-probabilities."""
    outputs = run_requests(loop, requests)
    return {
        name: [
            (output.ids, round_logprobs(output.logprobs), round_logprobs(output.prompt_logprobs))
            for output in entries
        ]
        for name, entries in outputs.items()
    }


def round_logprobs(entries: tuple[TokenLogprob, ...]) -> list[Any]:
    return [
        (entry.token, round(entry.logprob, 3), [token for token, _ in entry.top])
        for entry in entries
    ]


def make_llama(folder: Path) -> None:
    make_checkpoint(next(case for case in CASES if case.name == "llama"), folder)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("cpu_kernels", [False, True])
def test_self_feeding_steps_give_the_tokens_of_host_built_steps(
    cpu_kernels: bool, mixed: bool, tmp_path: Path
) -> None:
    make_llama(tmp_path)
    settings = build_plan(tmp_path, 64, cpu_kernels=cpu_kernels, **OPTIONS)
    requests = make_requests(3, mixed)
    expected = generate(build_engine_loop(settings, executor=ExplicitExecutor()), requests)
    loop = build_engine_loop(settings)
    assert generate(loop, requests) == expected
    assert loop.executor.worker.cpu_traced == cpu_kernels  # type: ignore[attr-defined]


@pytest.mark.parametrize("cpu_kernels", [False, True])
def test_a_request_gets_the_tokens_and_logprobs_that_it_gets_alone(
    cpu_kernels: bool, tmp_path: Path
) -> None:
    """In a batch of random mixes of all parameters, with preemption by a small KV cache."""
    make_llama(tmp_path)
    options = OPTIONS | {"prefix_cache": True}
    settings = build_plan(tmp_path, 64, cpu_kernels=cpu_kernels, **options)
    for seed in (5, 6):
        requests = make_requests(seed, True)
        small_loop = build_engine_loop(settings, pages=14)
        together = generate(small_loop, requests)
        assert small_loop.scheduler.num_preemptions > 0
        loop = build_engine_loop(settings)
        for request in requests:
            assert generate(loop, [request])[request.id] == together[request.id]


@pytest.mark.parametrize("cpu_kernels", [False, True])
def test_tokens_do_not_depend_on_the_number_of_steps_in_flight(
    cpu_kernels: bool, tmp_path: Path
) -> None:
    make_llama(tmp_path)
    long_request = EngineRequest("long", (5, 6, 7), ResolvedSampling(temperature=0.8, seed=1), 40)
    requests = [*make_requests(3, True), long_request]
    results = []
    for steps_in_flight in (1, 2, 8):
        options = OPTIONS | {"steps_in_flight": steps_in_flight}
        loop = build_engine_loop(build_plan(tmp_path, 64, cpu_kernels=cpu_kernels, **options))
        max_in_flight = 0
        for request in requests:
            loop.add(request)
        tokens: dict[str, list[int]] = {request.id: [] for request in requests}
        while loop.busy:
            for output in loop.step():
                tokens[output.request] += output.ids
            max_in_flight = max(max_in_flight, len(loop.in_flight) + 1)
        upper_limit = 8 if steps_in_flight > 1 else 1
        assert steps_in_flight <= max_in_flight <= upper_limit
        results.append(tokens)
    assert results[0] == results[1] == results[2]


@pytest.fixture
def two_torch_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("two_torch_threads")
def test_single_torch_thread_restores_the_number_of_threads() -> None:
    with single_torch_thread(True):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with single_torch_thread(False):
        assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="within"), single_torch_thread(True):
        raise ValueError("within")
    assert torch.get_num_threads() == 2
