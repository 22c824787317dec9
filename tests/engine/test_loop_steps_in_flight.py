"""The engine loop with several steps in flight: their number, measured times, batching window."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest

from bloomery.engine.block_pool import BlockPool
from bloomery.engine.engine_process import EngineProcess
from bloomery.engine.executor import PendingStep
from bloomery.engine.loop import MAX_QUEUED_SECONDS, MAX_STEPS_IN_FLIGHT, EngineLoop
from bloomery.engine.policy import FairPolicy, FcfsPolicy, Policy
from bloomery.engine.scheduler import Scheduler, compute_step_features
from bloomery.engine.step_time import StepFeatures
from bloomery.ipc import EngineHello, EngineMessage
from bloomery.messages import (
    EngineCapacity,
    EngineRequest,
    ResolvedSampling,
    ScheduledStep,
    StepOutput,
    StepTiming,
)
from tests.chaos.fake_engine import fake_plan
from tests.engine.fake_executor import VOCAB, FakeExecutor, reference_tokens
from tests.engine.random_engine import check_block_pool
from tests.engine.test_step_time import gpu_seconds

# ---- measured step times and the batching window -------------------------------------------------

MAX_NUM_SEQS = 16


class TimedDevice(FakeExecutor):
    """Runs queued steps on its own clock. The host is sometimes late to read a result."""

    def __init__(self, stall_probability: float = 0.0) -> None:
        super().__init__(16)
        self.stall_probability = stall_probability
        self.now = 0.0
        self.free_time = 0.0  # when the last queued step ends
        self.queue: deque[tuple[StepOutput, float]] = deque()  # with the time of its end
        self.rng = random.Random(5)

    def clock(self) -> float:
        return self.now

    def submit(self, step: ScheduledStep) -> TimedDevice:  # type: ignore[override]
        seconds = gpu_seconds(compute_step_features(step.requests))
        idle = max(self.now - self.free_time, 0.0) if self.free_time else 0.0
        self.free_time = max(self.free_time, self.now) + seconds
        timing = StepTiming(steps=1, device=seconds, idle=idle)
        self.queue.append((replace(self.run(step), timing=timing), self.free_time))
        return self

    def result(self) -> StepOutput:
        output, end = self.queue.popleft()
        self.now = max(self.now, end)
        if self.rng.random() < self.stall_probability:
            self.now += 0.05
        return output


def create_fair_loop(device: TimedDevice) -> tuple[EngineLoop, FairPolicy]:
    policy = FairPolicy(MAX_NUM_SEQS, 4000)
    scheduler = Scheduler(BlockPool(4000, 16), 2048, MAX_NUM_SEQS, policy)
    return EngineLoop(scheduler, device, 2, device.clock), policy


@pytest.mark.parametrize("has_device_timing", [True, False])
def test_a_late_host_does_not_spoil_the_step_time_model(has_device_timing: bool) -> None:
    """The device reports its own times. With the host's clock alone the model would be wrong."""
    device = TimedDevice(stall_probability=0.6)
    loop, policy = create_fair_loop(device)
    if not has_device_timing:
        result = device.result
        device.result = lambda: replace(result(), timing=None)  # type: ignore[method-assign]
    rng = random.Random(1)
    for i in range(120):
        prompt = tuple(rng.randrange(7) for _ in range(rng.choice((10, 300, 1500))))
        loop.add(EngineRequest(str(i), prompt, ResolvedSampling(), 40))
    while loop.busy:
        loop.step()
    steps = [
        StepFeatures(1, 500),
        StepFeatures(MAX_NUM_SEQS, 10_000),
        StepFeatures(500, 5_000, 100_000),
        StepFeatures(1500, 5_000, 1_000_000),
    ]
    errors = [abs(policy.step_time.predict(step) / gpu_seconds(step) - 1) for step in steps]
    assert (max(errors) < 0.15) is has_device_timing


def create_long_requests() -> list[EngineRequest]:
    return [
        EngineRequest(str(i), (1, 2, 3) * 2000, ResolvedSampling(), 400)
        for i in range(MAX_NUM_SEQS // 2)
    ]


def test_the_next_step_stays_open_for_new_requests() -> None:
    device = TimedDevice()
    loop, _ = create_fair_loop(device)
    max_idle = 0.0
    for request in create_long_requests():
        loop.add(request)
    for step in range(300):
        window = loop.compute_batching_window()
        device.now += window
        if device.queue:
            max_idle = max(max_idle, device.now - device.free_time)
        if step == 250:
            loop.add(EngineRequest("new", (1, 2), ResolvedSampling(), 4))
        outputs = loop.step()
        if step == 251:
            # The step in flight at the arrival has ended, and the new request was in the next one.
            assert "new" in [output.request for output in outputs]
    assert window > 0
    assert max_idle <= 0, f"the device was idle for {max_idle} s"


class TimedChannel:
    """Messages that arrive at given times. Waiting for them lets time pass."""

    def __init__(self, device: TimedDevice):
        self.device = device
        self.arrivals: deque[tuple[float, EngineMessage]] = deque()

    def send(self, message: EngineMessage) -> None:
        pass

    def receive(self, timeout_seconds: float | None) -> list[EngineMessage]:
        end = self.device.now + (timeout_seconds or 0.0)
        if self.arrivals and self.arrivals[0][0] <= end:
            time, message = self.arrivals.popleft()
            self.device.now = max(self.device.now, time)
            return [message]
        self.device.now = end
        return []


class SubmittedStep(NamedTuple):
    """When a step was submitted. Times are virtual seconds."""

    time: float
    device_free_time: float
    num_chunks: int


def test_an_early_arrival_does_not_submit_the_next_step_early() -> None:
    """Two requests arrive within one step. Both must be part of the next step."""
    device = TimedDevice()
    channel = TimedChannel(device)
    submitted: list[SubmittedStep] = []
    capacity = EngineCapacity(4000, 16, MAX_NUM_SEQS, 2048, 8000, 7)
    hello = EngineHello(1, fake_plan())
    engine = EngineProcess(channel, hello, device, capacity, device.clock)
    submit = engine.loop.executor.submit

    def recording_submit(step: ScheduledStep) -> PendingStep:
        submitted.append(SubmittedStep(device.now, device.free_time, len(step.chunks)))
        return submit(step)

    engine.loop.executor.submit = recording_submit  # type: ignore[method-assign]
    engine.handle_messages(list(create_long_requests()))
    while len(submitted) < 250:
        engine.run_once()
    step_end = device.free_time
    for i in (1, 2):
        request = EngineRequest(f"new {i}", (1, 2), ResolvedSampling(), 4)
        channel.arrivals.append((device.now + 1e-4 * i, request))
    num_before = len(submitted)
    while channel.arrivals or len(submitted) < num_before + 3:
        engine.run_once()
    joined = next(step for step in submitted[num_before:] if step.num_chunks)
    assert joined.num_chunks == 2
    assert joined.time <= max(joined.device_free_time, step_end)


# ---- more steps in flight while no row can change ------------------------------------------------


class ConstantTimeExecutor(FakeExecutor):
    """Steps of constant virtual time, one after another. Reading a result computes its step."""

    def __init__(self, block_size: int, step_seconds: float):
        super().__init__(block_size)
        self.step_seconds = step_seconds
        self.now = 0.0
        self.free_time = 0.0
        self.in_flight: list[tuple[ScheduledStep, float]] = []  # with the time of its end
        self.first_step_times: dict[int, float] = {}  # by sequence: begin of its first step
        self.max_in_flight = 0

    def clock(self) -> float:
        return self.now

    def submit(self, step: ScheduledStep) -> ConstantTimeExecutor:  # type: ignore[override]
        begin = max(self.now, self.free_time)
        self.free_time = begin + self.step_seconds
        for request in step.requests:
            self.first_step_times.setdefault(request.sequence, begin)
        self.in_flight.append((step, self.free_time))
        self.max_in_flight = max(self.max_in_flight, len(self.in_flight))
        return self

    def result(self) -> StepOutput:
        step, end = self.in_flight.pop(0)
        self.now = max(self.now, end)
        return self.run(step)


class CheckedScheduler(Scheduler):
    """Asserts that steps beyond the usual number in flight preempt no sequence."""

    usual_in_flight = 2

    def schedule(self, now: float = 0.0) -> ScheduledStep | None:
        is_extra = len(self.in_flight) >= self.usual_in_flight
        before = (self.num_preemptions, self.pending_victim)
        step = super().schedule(now)
        assert not is_extra or before == (self.num_preemptions, self.pending_victim)
        return step


def create_checked_loop(
    executor: ConstantTimeExecutor,
    max_in_flight: int = 2,
    num_blocks: int = 400,
    max_num_seqs: int = 4,
    fair: bool = False,
) -> EngineLoop:
    policy: Policy = FairPolicy(max_num_seqs, num_blocks) if fair else FcfsPolicy()
    block_pool = BlockPool(num_blocks, executor.page_size)
    scheduler = CheckedScheduler(block_pool, 64, max_num_seqs, policy)
    scheduler.usual_in_flight = max_in_flight
    return EngineLoop(scheduler, executor, max_in_flight, executor.clock)  # type: ignore[arg-type]


@pytest.mark.parametrize("fair", [False, True])
@pytest.mark.parametrize(
    ("step_seconds", "expected_in_flight"),
    [(1e-4, MAX_STEPS_IN_FLIGHT), (0.8e-3, 5), (1.3e-3, 3), (1.5e-3, 2), (3e-3, 2), (0.05, 2)],
)
def test_short_steps_are_queued_up_to_the_time_limit(
    step_seconds: float, expected_in_flight: int, fair: bool
) -> None:
    executor = ConstantTimeExecutor(4, step_seconds)
    loop = create_checked_loop(executor, fair=fair)
    for name in "abc":
        loop.add(EngineRequest(name, (1, 2, 3), ResolvedSampling(), 60))
    for _ in range(30):
        loop.step()
    assert executor.max_in_flight == expected_in_flight


@pytest.mark.parametrize(
    "reason", ["one step in flight", "a stop token", "a waiting request", "a chunked prefill"]
)
def test_no_extra_steps_are_queued_while_the_batch_may_change(reason: str) -> None:
    executor = ConstantTimeExecutor(4, 1e-4)
    max_in_flight = 1 if reason == "one step in flight" else 2
    max_num_seqs = 2 if reason == "a waiting request" else 4
    loop = create_checked_loop(executor, max_in_flight, 600, max_num_seqs)
    for name in "abc":
        has_stop = reason == "a stop token" and name == "b"
        is_long = reason == "a chunked prefill" and name == "c"
        # The token VOCAB never comes.
        stop_ids = [VOCAB] if has_stop else []
        prompt = (1, 2, 3) * (500 if is_long else 1)
        loop.add(EngineRequest(name, prompt, ResolvedSampling(), 30, tuple(stop_ids)))
    for _ in range(20):
        loop.step()
        assert executor.max_in_flight <= max_in_flight


def test_a_new_request_waits_for_queued_steps_no_longer_than_the_limit() -> None:
    executor = ConstantTimeExecutor(4, 0.7e-3)
    loop = create_checked_loop(executor)
    loop.add(EngineRequest("a", (1, 2, 3), ResolvedSampling(), 200))
    for step in range(60):
        if step == 40:
            arrival_time = executor.now
            loop.add(EngineRequest("b", (4, 5), ResolvedSampling(), 5))
        loop.step()
    assert executor.max_in_flight == 5
    wait_seconds = executor.first_step_times[1] - arrival_time
    assert 2 * executor.step_seconds < wait_seconds <= MAX_QUEUED_SECONDS + 1e-9


class RandomArrival(NamedTuple):
    """A request, the step at which it arrives, and when it is aborted."""

    step: int
    request: EngineRequest
    abort_after: int | None  # output tokens; None: not aborted


def random_arrivals(rng: Random) -> list[RandomArrival]:
    arrivals = []
    for number in range(rng.randrange(2, 9)):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30)))
        request = EngineRequest(
            str(number),
            prompt,
            ResolvedSampling(),
            rng.randrange(1, 40),
            stop_ids=rng.choice([(), (), (), (3,)]),
            deadline=rng.choice([None, None, None, 0.02]),
        )
        step = rng.randrange(60)
        abort_after = rng.choice([None, None, rng.randrange(1, 20)])
        arrivals.append(RandomArrival(step, request, abort_after))
    return arrivals


def serve_random_requests(seed: int, max_in_flight: int) -> tuple[ConstantTimeExecutor, int]:
    """Serve random requests and check their tokens. Returns executor and number of preemptions.

    Aborted and expired requests must have received the beginning of the reference tokens.
    """
    rng = Random(seed)
    executor = ConstantTimeExecutor(rng.choice([1, 2, 4]), rng.choice([2e-4, 8e-4]))
    num_blocks = rng.choice([72, 90, 400]) // executor.page_size
    max_num_seqs = rng.choice([2, 4, 8])
    loop = create_checked_loop(
        executor, max_in_flight, num_blocks, max_num_seqs, rng.random() < 0.5
    )
    arrivals = random_arrivals(rng)
    requests = {arrival.request.id: arrival.request for arrival in arrivals}
    abort_after = {arrival.request.id: arrival.abort_after for arrival in arrivals}
    received: dict[str, list[int]] = {request_id: [] for request_id in requests}
    finish_reasons: dict[str, str] = {}
    step = 0
    while arrivals or loop.busy:
        for arrival in [arrival for arrival in arrivals if arrival.step <= step]:
            arrivals.remove(arrival)
            loop.add(arrival.request)
        for output in loop.step():
            request_id = output.request
            tokens = received[request_id]
            assert request_id not in finish_reasons
            assert output.position == len(tokens)
            tokens += output.ids
            if output.finish:
                finish_reasons[request_id] = output.finish
            elif abort_after[request_id] == len(tokens):
                assert loop.abort(request_id)
                finish_reasons[request_id] = "abort"
        check_block_pool(loop.scheduler.block_pool)
        step += 1
    for request_id, request in requests.items():
        expected = reference_tokens(request)[len(request.prompt) :]
        if finish_reasons[request_id] in ("abort", "deadline"):
            expected = expected[: len(received[request_id])]
        assert received[request_id] == expected
    assert loop.scheduler.block_pool.num_free_blocks == num_blocks
    return executor, loop.scheduler.num_preemptions


@pytest.mark.parametrize(
    ("max_in_flight", "expected_in_flight"),
    [(1, 1), (2, MAX_STEPS_IN_FLIGHT), (MAX_STEPS_IN_FLIGHT, MAX_STEPS_IN_FLIGHT)],
)
def test_queued_steps_change_no_token_of_random_requests(
    max_in_flight: int, expected_in_flight: int
) -> None:
    runs = [serve_random_requests(seed, max_in_flight) for seed in range(80)]
    assert max(executor.max_in_flight for executor, _ in runs) == expected_in_flight
    num_preemptions = sum(preemptions for _, preemptions in runs)
    assert num_preemptions > 10, "too few preemptions to test them"
