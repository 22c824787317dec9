"""Simulates a fleet of engines on a trace: real scheduler, policy and loop, in virtual time.

Only the device is simulated. A step takes as long as roofline.py predicts, which may be calibrated
on measured steps. KV cache blocks, prefix cache, preemption, routing and steps in flight are those
of the real engine.
"""

from __future__ import annotations

import heapq
import json
import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.cache_groups import count_held_blocks, longest_sequence
from bloomery.config import EngineConfig, EnginePlan, resolve_plan
from bloomery.engine.build import build_engine
from bloomery.engine.executor import refuse_adapter
from bloomery.engine.routing import PrefixAffinityRouter
from bloomery.errors import ConfigError, InvalidRequest, PromptTooLong
from bloomery.hardware import StepCalibration
from bloomery.messages import (
    AdapterInfo,
    EngineCapacity,
    EngineRequest,
    ResolvedSampling,
    SampledTokens,
    ScheduledStep,
    StepOutput,
)
from bloomery.roofline import Roofline, count_step_work
from bloomery.tools.bench.summary import (
    GoodputTargets,
    RequestRecord,
    format_table,
    summarize_records,
)
from bloomery.tools.bench.workload import RequestArrival, read_trace
from bloomery.tools.plan.estimate import PlacedModel

GREEDY = ResolvedSampling(temperature=0.0)
OUTPUT_TOKEN = 7  # every simulated output consists of this token id

FloatArray = np.ndarray[Any, Any]


@dataclass
class VirtualClock:
    """A clock that moves only when it is set. Calling it returns the time in seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class SimulatedResult:
    """A pending step. Reading its result moves the clock to the end of the step."""

    clock: VirtualClock
    end: float
    output: StepOutput

    def provide_masks(self, masks: object) -> None:
        raise AssertionError("simulated requests have no grammars")

    def result(self) -> StepOutput:
        self.clock.now = max(self.clock.now, self.end)
        return self.output


class SimulatedExecutor:
    """An executor that only predicts how long each step takes.

    Each pipeline stage works on one step at a time.
    """

    def __init__(self, roofline: Roofline, clock: VirtualClock):
        self.roofline = roofline
        self.clock = clock
        self.stages = roofline.pp
        self.free_time = 0.0  # when the first stage can take the next step
        self.busy_seconds = 0.0
        self.num_steps = 0

    def start(self, plan: Any) -> EngineCapacity:
        raise NotImplementedError("a simulated device has nothing to load")

    def submit(self, step: ScheduledStep) -> SimulatedResult:
        """Predict when the step ends. The first stage is free again before that."""
        seconds = self.roofline.expected_seconds(*count_step_work(step.requests))
        begin = max(self.clock.now, self.free_time)
        stage_seconds = seconds / self.stages
        self.free_time = begin + stage_seconds
        self.busy_seconds += stage_seconds
        self.num_steps += 1
        samples = [
            SampledTokens(chunk.sequence, (OUTPUT_TOKEN,)) for chunk in step.chunks if chunk.samples
        ]
        decoded = (OUTPUT_TOKEN,) * len(step.decodes)
        return SimulatedResult(
            self.clock, begin + seconds, StepOutput(tuple(samples), None, decoded)
        )

    def load_adapter(self, name: str, path: str) -> Future[AdapterInfo]:
        return refuse_adapter("the simulator runs no LoRA adapters")

    def unload_adapter(self, name: str) -> None:
        pass

    def close(self) -> None:
        pass


class SimulatedReplica:
    """One engine with its own clock."""

    def __init__(self, settings: EnginePlan, capacity: EngineCapacity, roofline: Roofline):
        self.clock = VirtualClock()
        self.executor = SimulatedExecutor(roofline, self.clock)
        # Every pipeline stage needs a step of its own to be busy.
        steps_in_flight = max(settings.steps_in_flight, capacity.stages)
        plan = replace(settings, steps_in_flight=steps_in_flight)
        self.loop = build_engine(plan, self.executor, capacity, self.clock)
        self.scheduler = self.loop.scheduler
        self.block_pool = self.scheduler.block_pool
        self.max_len = longest_sequence(
            capacity.cache_groups,
            capacity.blocks,
            capacity.block_size,
            capacity.max_num_batched_tokens,
            capacity.max_model_len,
        )
        self.num_open = 0  # requests that have not ended


class SimulatedFleet:
    """Replicas of one engine behind a router."""

    def __init__(self, placed: PlacedModel, config: EngineConfig | None = None):
        layout = placed.layout
        max_context = placed.max_context()
        if not max_context:
            raise ConfigError(
                f"the model does not fit {layout.devices} x {placed.hardware.title}; "
                "see `bloomery plan`"
            )
        settings = resolve_plan(
            config or EngineConfig(),
            name="",
            path="",
            kind="",
            dtype="bfloat16",
            device="cpu" if placed.hardware.is_cpu else "cuda",
            context=max_context,
        )
        capacity = compute_replica_capacity(placed, settings)
        self.replicas = [
            SimulatedReplica(settings, capacity, placed.roofline) for _ in range(layout.replicas)
        ]
        self.router = PrefixAffinityRouter(len(self.replicas))
        # By session: the tokens of its last prompt and output.
        self.session_tokens: dict[str, tuple[int, ...]] = {}

    def route(self, request: EngineRequest) -> SimulatedReplica:
        """Choose the replica by the rule that the server uses for its replicas."""
        loads = {number: replica.num_open for number, replica in enumerate(self.replicas)}
        return self.replicas[self.router.choose(request, loads)]

    def run(self, arrivals: Sequence[RequestArrival]) -> list[RequestRecord]:
        """Serve all requests and return their records, in the order of `arrivals`."""
        records = [RequestRecord(0.0, arrival.prompt) for arrival in arrivals]
        queue = ArrivalQueue(arrivals)
        while True:
            busy = [replica for replica in self.replicas if replica.loop.busy]
            replica = min(busy, key=lambda replica: replica.clock.now, default=None)
            if replica is None:
                if not queue.pending:
                    return records
                window_end = queue.next_time
            else:
                window_end = replica.clock.now + replica.loop.compute_batching_window()
            if queue.pending and queue.next_time <= window_end:
                time, index = queue.pop()
                if not self._submit(arrivals[index], records[index], time, index):
                    queue.release_next_of_session(index, time)
            elif replica is not None:
                replica.clock.now = window_end
                for index in self._run_step(replica, records):
                    queue.release_next_of_session(index, replica.clock.now)

    def _submit(
        self, arrival: RequestArrival, record: RequestRecord, time: float, index: int
    ) -> bool:
        """Submit a request. Returns False if it was refused."""
        record.sent = time
        max_len = self.replicas[0].max_len
        max_tokens = min(arrival.output, max_len - arrival.prompt)  # as the server limits it
        try:
            if max_tokens < 1:
                raise PromptTooLong(
                    f"a prompt of {arrival.prompt} tokens leaves no room in {max_len}"
                )
            prompt = self._prompt_tokens(arrival, index)
            request = EngineRequest(
                str(index), prompt, GREEDY, max_tokens, priority=arrival.priority
            )
            replica = self.route(request)
            replica.clock.now = max(replica.clock.now, time)
            replica.loop.add(request)
        except InvalidRequest as error:
            record.error = str(error)
            record.done = time
            return False
        replica.num_open += 1
        return True

    def _prompt_tokens(self, arrival: RequestArrival, index: int) -> tuple[int, ...]:
        """Create a prompt whose first `prefix` tokens repeat the session's last exchange.

        No other request contains the remaining tokens.
        """
        prefix_len = min(arrival.prefix, arrival.prompt - 1)
        prefix = self.session_tokens.get(arrival.session, ())[:prefix_len]
        unique_token = index + OUTPUT_TOKEN + 1
        prompt = prefix + (unique_token,) * (arrival.prompt - len(prefix))
        if arrival.session:
            self.session_tokens[arrival.session] = prompt + (OUTPUT_TOKEN,) * arrival.output
        return prompt

    @staticmethod
    def _run_step(replica: SimulatedReplica, records: Sequence[RequestRecord]) -> list[int]:
        """Run one step of a replica and return the indices of the requests that have ended."""
        ended_indices = []
        outputs = replica.loop.step()
        now = replica.clock.now
        for output in outputs:
            index = int(output.request)
            record = records[index]
            if output.ids:
                record.output_tokens += len(output.ids)
                record.piece_times.append(now)
            if output.finish:
                record.done = now
                record.error = output.error
                replica.num_open -= 1
                ended_indices.append(index)
        return ended_indices


def compute_replica_capacity(placed: PlacedModel, settings: EnginePlan) -> EngineCapacity:
    """Return what one engine of the fleet can hold."""
    block_size = settings.block_size
    groups = placed.cache_layout.groups
    block_bytes = placed.kv_block_bytes * block_size / placed.page_size
    blocks_that_fit = int(placed.free_kv_bytes // block_bytes)
    blocks_per_sequence = count_held_blocks(
        groups, settings.max_model_len, block_size, settings.max_num_batched_tokens
    )
    return EngineCapacity(
        blocks=min(blocks_that_fit, blocks_per_sequence * settings.max_num_seqs),
        block_size=block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        vocab=placed.model.vocab,
        stages=placed.layout.pp,
        expected_steps=placed.roofline.reference_steps(),
        cache_groups=groups,
    )


class ArrivalQueue:
    """Requests of a trace in order of time.

    A request without an arrival time follows the previous one of its session.
    """

    def __init__(self, arrivals: Sequence[RequestArrival]):
        self.arrivals = arrivals
        self.pending: list[tuple[float, int]] = []  # heap of (time, index)
        # By session: requests that wait for the end of the previous request of their session.
        self.following: dict[str, deque[int]] = defaultdict(deque)
        known_sessions: set[str] = set()
        for index, arrival in enumerate(arrivals):
            if arrival.arrival is not None:
                heapq.heappush(self.pending, (arrival.arrival, index))
            elif arrival.session not in known_sessions:
                # The first request of a session waits for no other request.
                heapq.heappush(self.pending, (arrival.after, index))
            else:
                self.following[arrival.session].append(index)
            known_sessions.add(arrival.session)

    @property
    def next_time(self) -> float:
        return self.pending[0][0]

    def pop(self) -> tuple[float, int]:
        return heapq.heappop(self.pending)

    def release_next_of_session(self, index: int, now: float) -> None:
        """Schedule the request that follows request `index`, which has just ended."""
        following = self.following.get(self.arrivals[index].session)
        if following:
            next_index = following.popleft()
            next_time = now + self.arrivals[next_index].after
            heapq.heappush(self.pending, (next_time, next_index))


# ---- calibration -------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step. The field names are the keys of a calibration file."""

    tokens: int
    attended: int  # keys that all its sequences attend to
    sampled: int  # sequences that sample a token
    seconds: float
    pairs: int | None = None  # query-key pairs, for prefill chunks

    @property
    def work(self) -> tuple[int, int, int, int | None]:
        """The arguments of Roofline.expected_seconds."""
        return self.tokens, self.attended, self.sampled, self.pairs


def read_steps(path: Path) -> list[MeasuredStep]:
    """Read a calibration file: one JSON object per line."""
    try:
        lines = path.read_text().splitlines()
        return [MeasuredStep(**json.loads(line)) for line in lines if line.strip()]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}: {error}; each line needs tokens, attended, sampled and seconds, "
            "and for prefill chunks pairs"
        ) from None


def calibrate(roofline: Roofline, steps: Sequence[MeasuredStep]) -> StepCalibration:
    """Fit four constants of the roofline to measured steps, by least squares on relative errors.

    Three constants are linear: seconds per step, slowdown of the roofline, seconds per sequence.
    The fourth is the ratio of compute to memory efficiency: the best of 41 values from 0.2 to 5.
    """
    if len(steps) < 4:
        raise ConfigError(
            f"{len(steps)} measured steps are too few to calibrate on; give more, of several sizes"
        )
    best_fit: tuple[float, StepCalibration] | None = None
    for ratio in np.geomspace(0.2, 5, 41):
        fit = _fit_calibration(copy(roofline), steps, float(ratio))
        if fit is not None and (best_fit is None or fit[0] < best_fit[0]):
            best_fit = fit
    if best_fit is None:
        raise ConfigError(
            "the measured steps do not grow with their work; measure steps of several sizes"
        )
    _, calibration = best_fit
    return calibration


def _fit_calibration(
    roofline: Roofline, steps: Sequence[MeasuredStep], compute_ratio: float
) -> tuple[float, StepCalibration] | None:
    """Return the squared error and the best constants for one ratio of compute to memory.

    Returns None if the steps do not grow with their work. Changes the calibration of
    `roofline`.
    """
    original = roofline.calibration
    roofline.calibration = replace(
        original,
        memory_efficiency=1.0,
        compute_efficiency=compute_ratio,
        kernel_gap_seconds=0.0,
        step_overhead_seconds=0.0,
        eager_launch_seconds=0.0,
        mixed_seconds_per_layer=0.0,
        sequence_seconds_per_layer=0.0,
    )
    seconds = np.array([step.seconds for step in steps])
    ones = np.ones(len(steps))
    floors = [roofline.expected_seconds(*step.work) for step in steps]
    num_sampled = [step.sampled for step in steps]
    columns = np.stack([ones, floors, num_sampled], 1) / seconds[:, None]
    coefficients = _non_negative_least_squares(columns)
    step_seconds, slowdown, sequence_seconds = map(float, coefficients)
    if slowdown <= 0:
        return None
    calibration = replace(
        original,
        memory_efficiency=1 / slowdown,
        compute_efficiency=compute_ratio / slowdown,
        kernel_gap_seconds=0.0,
        step_overhead_seconds=step_seconds,
        sequence_seconds_per_layer=sequence_seconds / len(roofline.model.layers),
    )
    squared_error = float(np.square(columns @ coefficients - 1).sum())
    return squared_error, calibration


def _non_negative_least_squares(columns: FloatArray) -> FloatArray:
    """Fit a target of ones without negative coefficients.

    Drops the column with the most negative coefficient until none is negative.
    """
    used_columns = list(range(columns.shape[1]))
    coefficients = np.zeros(columns.shape[1])
    target = np.ones(len(columns))
    while used_columns:
        solution, *_ = np.linalg.lstsq(columns[:, used_columns], target, rcond=None)
        if (solution >= 0).all():
            coefficients[used_columns] = solution
            break
        del used_columns[int(solution.argmin())]
    return coefficients


# ---- the command -------------------------------------------------------------------------------


def simulate_trace(
    placed: PlacedModel,
    arrivals: Sequence[RequestArrival],
    config: EngineConfig,
    targets: GoodputTargets,
) -> dict[str, Any]:
    """Simulate a trace and return a summary like that of `bloomery bench`."""
    fleet = SimulatedFleet(placed, config)
    summary = summarize_records(fleet.run(arrivals), targets)
    span = max(replica.clock.now for replica in fleet.replicas) or 1.0
    executors = [replica.executor for replica in fleet.replicas]
    busy_seconds = sum(executor.busy_seconds for executor in executors)
    summary["steps"] = sum(executor.num_steps for executor in executors)
    summary["device_busy"] = round(busy_seconds / span / len(executors), 4)
    summary["preemptions"] = sum(replica.scheduler.num_preemptions for replica in fleet.replicas)
    return summary


def run_simulation(
    placed: PlacedModel, trace: Path, calibration: Path | None, as_json: bool
) -> int:
    """Simulate a trace with both policies and print the results. Returns the exit status."""
    if calibration is not None:
        placed.roofline.calibration = calibrate(placed.roofline, read_steps(calibration))
    arrivals = read_trace(trace)
    results = {
        policy: simulate_trace(placed, arrivals, EngineConfig(policy=policy), GoodputTargets())
        for policy in ("fair", "fcfs")
    }
    if as_json:
        print(json.dumps(results, indent=1))
        return 0
    print(
        f"{len(arrivals):,} requests of {trace.name} on {placed.layout}, "
        f"{placed.hardware.title}, in virtual time\n"
    )
    print(format_table(results))
    for policy, result in results.items():
        for reason, count in result["errors"].items():
            print(f"{policy}: {count} x {reason}", file=sys.stderr)
    return 0
