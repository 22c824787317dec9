"""The scheduler: order, prefix sharing, preemption, refusals, pipeline stages, compact decodes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from bloomery.engine.block_pool import BlockPool
from bloomery.engine.loop import EngineLoop
from bloomery.engine.scheduler import Scheduler, compute_step_features
from bloomery.errors import InvalidRequest
from bloomery.messages import (
    EngineRequest,
    ResolvedSampling,
    ScheduledStep,
    StepOutput,
    TokenOutput,
)
from tests.engine.fake_executor import VOCAB, FakeExecutor, reference_tokens


def make_loop(
    num_blocks: int = 32,
    block_size: int = 4,
    max_tokens: int = 16,
    max_num_seqs: int = 8,
    max_in_flight: int = 1,
) -> EngineLoop:
    scheduler = Scheduler(BlockPool(num_blocks, block_size), max_tokens, max_num_seqs)
    return EngineLoop(scheduler, FakeExecutor(block_size), max_in_flight)


def run_to_end(loop: EngineLoop) -> dict[str, list[int]]:
    """Return the output tokens by request."""
    received: dict[str, list[int]] = {}
    while loop.busy:
        for output in loop.step():
            received.setdefault(output.request, []).extend(output.ids)
    return received


# ---- order and prefix sharing --------------------------------------------------------------------


def test_equal_prompts_admitted_together_share_their_blocks() -> None:
    loop = make_loop(max_tokens=64)
    prompt = tuple(i % 7 for i in range(18))
    for name in "abcd":
        loop.add(EngineRequest(name, prompt, ResolvedSampling(), 4))
    step = loop.scheduler.schedule()
    assert step is not None
    assert [request.count for request in step.requests] == [18, 2, 2, 2]
    assert len({request.blocks[:4] for request in step.requests}) == 1


def test_the_second_turn_of_a_chat_computes_only_its_new_tokens() -> None:
    loop = make_loop(max_tokens=64)
    first = EngineRequest("first", tuple(range(7)) * 3, ResolvedSampling(), 5)
    loop.add(first)
    answer = run_to_end(loop)["first"]
    prompt = (*first.prompt, *answer, 1, 2, 3)
    loop.add(EngineRequest("second", prompt, ResolvedSampling(), 2))
    step = loop.scheduler.schedule()
    assert step is not None
    # The hit ends with the last full block. The last token of the answer was never computed.
    assert step.requests[0].start == (len(first.prompt) + len(answer) - 1) // 4 * 4


def test_different_salts_share_no_prefix() -> None:
    loop = make_loop(max_tokens=64)
    prompt = tuple(range(7)) * 3
    loop.add(EngineRequest("mine", prompt, ResolvedSampling(), 2, cache_salt="me"))
    run_to_end(loop)
    loop.add(EngineRequest("yours", prompt, ResolvedSampling(), 2, cache_salt="you"))
    step = loop.scheduler.schedule()
    assert step is not None and step.requests[0].start == 0


def test_prompt_logprobs_bypass_the_prefix_cache() -> None:
    loop = make_loop(max_tokens=64)
    prompt = tuple(range(7)) * 3
    loop.add(EngineRequest("first", prompt, ResolvedSampling(), 2))
    run_to_end(loop)
    loop.add(EngineRequest("second", prompt, ResolvedSampling(prompt_logprobs=0), 2))
    step = loop.scheduler.schedule()
    assert step is not None and step.requests[0].start == 0


def test_fcfs_serves_in_order_of_arrival() -> None:
    loop = make_loop(max_num_seqs=1)
    for name in "abc":
        loop.add(EngineRequest(name, (1, 2, 3), ResolvedSampling(), 3))
    order: list[str] = []
    while loop.busy:
        order += [output.request for output in loop.step() if output.finish]
    assert order == ["a", "b", "c"]


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    loop = make_loop(max_tokens=8)
    loop.add(EngineRequest("short", (1, 2), ResolvedSampling(), 6))
    loop.add(EngineRequest("long", tuple(range(7)) * 4, ResolvedSampling(), 2))
    counts = []
    while loop.busy:
        step = loop.scheduler.schedule()
        if step is None:
            break
        counts.append([request.count for request in step.requests])
        loop.scheduler.update(step, loop.executor.submit(step).result())
    assert counts[:4] == [[2, 6], [1, 7], [1, 7], [1, 7]]


@pytest.mark.parametrize("arrival_step", range(12))
@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_preemption_at_any_step_changes_no_token(arrival_step: int, max_in_flight: int) -> None:
    """A new request takes the blocks of an old one at every possible step."""
    loop = make_loop(num_blocks=9, block_size=4, max_tokens=6, max_in_flight=max_in_flight)
    old = EngineRequest("old", tuple(range(7)) * 2, ResolvedSampling(), 12)
    new = EngineRequest("new", (6, 5, 4, 3) * 3, ResolvedSampling(), 9)
    loop.add(old)
    received: dict[str, list[int]] = {"old": [], "new": []}
    for step in range(200):
        if step == arrival_step:
            loop.add(new)
        for output in loop.step():
            received[output.request] += output.ids
    for request in (old, new):
        assert [*request.prompt, *received[request.id]] == reference_tokens(request)


def test_a_request_that_can_never_fit_is_refused() -> None:
    loop = make_loop(num_blocks=4, block_size=4)
    with pytest.raises(InvalidRequest, match="need 17 cache positions, there are 16") as caught:
        loop.add(EngineRequest("big", (1,) * 10, ResolvedSampling(), 7))
    assert caught.value.field == "max_tokens"


def test_a_request_id_in_use_is_refused() -> None:
    loop = make_loop()
    loop.add(EngineRequest("twice", (1,), ResolvedSampling(), 2))
    with pytest.raises(InvalidRequest, match="already in use"):
        loop.add(EngineRequest("twice", (1,), ResolvedSampling(), 2))


# ---- compact decodes -----------------------------------------------------------------------------
# Steps and results hold decodes as plain numbers. The outputs must be the same as with
# ScheduledRequest and SampledTokens.


def random_arrivals(seed: int) -> list[tuple[int, EngineRequest]]:
    """Return requests with the step of their arrival. Some have a stop token or min_tokens."""
    rng = Random(seed)
    arrivals = []
    for number in range(12):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 18)))
        sampling = ResolvedSampling(min_tokens=rng.choice((0, 3)))
        stop_ids = rng.choice(((), (), (2,)))
        arrival_step = rng.randrange(20)
        max_tokens = rng.randint(1, 24)
        request = EngineRequest(str(number), prompt, sampling, max_tokens, stop_ids)
        arrivals.append((arrival_step, request))
    return arrivals


def run_random_requests(
    executor: FakeExecutor, seed: int, max_in_flight: int, prefix_cache: bool
) -> tuple[list[list[TokenOutput]], Scheduler]:
    """Return the outputs of every step, and the scheduler. One request is aborted."""
    scheduler = Scheduler(BlockPool(12, 4, prefix_cache), 10, 5)
    loop = EngineLoop(scheduler, executor, max_in_flight)
    arrivals = random_arrivals(seed)
    outputs: list[list[TokenOutput]] = []
    while loop.busy or len(outputs) < 20:
        for arrival_step, request in arrivals:
            if arrival_step == len(outputs):
                loop.add(request)
        if len(outputs) == 15:
            loop.abort(next(iter(scheduler.by_request)))
        outputs.append(loop.step())
    return outputs, scheduler


def published_blocks(pool: BlockPool) -> list[dict[bytes, tuple[int, ...]]]:
    return [{digest: page.blocks for digest, page in pages.items()} for pages in pool.published]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_compact_results_give_the_same_outputs(
    seed: int, max_in_flight: int, prefix_cache: bool
) -> None:
    runs = [
        run_random_requests(FakeExecutor(4, compact_output), seed, max_in_flight, prefix_cache)
        for compact_output in (True, False)
    ]
    (compact_outputs, compact), (full_outputs, full) = runs
    assert compact_outputs == full_outputs
    assert published_blocks(compact.block_pool) == published_blocks(full.block_pool)
    assert compact.num_preemptions == full.num_preemptions > 0
    assert any(output.finish == "stop" for step in full_outputs for output in step)


def test_the_features_of_a_step_cover_all_its_requests() -> None:
    scheduler = Scheduler(BlockPool(30, 4), 10, 5)
    for number in range(3):
        prompt = (1, 2, 3) * (number + 1)
        scheduler.add(EngineRequest(str(number), prompt, ResolvedSampling(), 8))
    executor = FakeExecutor(4)
    num_mixed = 0
    while (step := scheduler.schedule()) is not None:
        assert scheduler.in_flight[-1].features == compute_step_features(step.requests)
        num_mixed += bool(step.decodes and step.chunks)
        scheduler.update(step, executor.run(step))
    assert num_mixed


# ---- pipeline stages -----------------------------------------------------------------------------

STAGES = 3


class PipelineExecutor:
    """Computes a step only when its result is read. Until then the step is in flight."""

    def __init__(self, block_size: int):
        self.executor = FakeExecutor(block_size)
        self.in_flight: list[ScheduledStep] = []
        self.max_in_flight = 0
        self.step_sizes: list[int] = []

    def submit(self, step: ScheduledStep) -> PipelineResult:
        unknown = {
            request.sequence
            for other in self.in_flight
            for request in other.requests
            if request.samples
        }
        scheduled = {request.sequence for request in step.requests}
        assert not unknown & scheduled, "scheduled before its last token was known"
        self.in_flight.append(step)
        self.max_in_flight = max(self.max_in_flight, len(self.in_flight))
        self.step_sizes.append(len(step.requests))
        return PipelineResult(self.finish_oldest)

    def finish_oldest(self) -> StepOutput:
        return self.executor.run(self.in_flight.pop(0))


class PipelineResult:
    """A pending step of PipelineExecutor."""

    def __init__(self, result: Callable[[], StepOutput]):
        self.result = result


def test_groups_of_sequences_alternate_and_tokens_are_the_same() -> None:
    executor = PipelineExecutor(4)
    scheduler = Scheduler(BlockPool(200, 4), 64, 16, stages=STAGES)
    loop = EngineLoop(scheduler, executor, STAGES)  # type: ignore[arg-type]
    requests = [EngineRequest(str(i), (i % 5, 1, 2), ResolvedSampling(), 30) for i in range(9)]
    for request in requests:
        loop.add(request)
    received = run_to_end(loop)
    for request in requests:
        assert [*request.prompt, *received[request.id]] == reference_tokens(request)
    assert executor.max_in_flight == STAGES
    steady_sizes = executor.step_sizes[5:-5]
    num_thirds = sum(size == 3 for size in steady_sizes)
    assert num_thirds > 0.8 * len(steady_sizes), "each step holds a third of nine sequences"


def test_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    executor = PipelineExecutor(4)
    scheduler = Scheduler(BlockPool(200, 4), 16, 4, stages=STAGES)
    loop = EngineLoop(scheduler, executor, STAGES)  # type: ignore[arg-type]
    loop.add(EngineRequest("0", tuple(i % 5 for i in range(100)), ResolvedSampling(), 2))
    run_to_end(loop)
    assert executor.max_in_flight == STAGES, "a chunk need not wait for the previous one"
