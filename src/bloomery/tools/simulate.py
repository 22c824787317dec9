"""What a fleet would do before it exists: the real scheduler, policy and loop, in virtual time.

A composition root. Only the device is imagined: a step takes as long as roofline.py expects, after calibration on
measured steps if there are any. Everything else (blocks, prefix cache, preemption, steps in flight) is the engine's.
"""

from __future__ import annotations

import heapq
import json
import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.tools.bench.load import Arrival, read
from bloomery.tools.bench.summary import Record, Targets, summarise, table
from bloomery.config import Config, Plan, resolve
from bloomery.engine.blocks import Blocks
from bloomery.engine.loop import Loop
from bloomery.engine.policy import policy_for
from bloomery.engine.scheduler import Scheduler
from bloomery.errors import ConfigError, InvalidRequest, PromptTooLong
from bloomery.messages import (
    EngineCapacity,
    EngineRequest,
    SampledTokens,
    ResolvedSampling,
    ScheduledStep,
    StepOutput,
)
from bloomery.tools.plan.forecast import Placed
from bloomery.roofline import Calibration, Roofline, work

GREEDY = ResolvedSampling(temperature=0.0)
ANSWER = 7  # the token every answer is made of


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Due:
    """A step's result, and when it is there."""

    clock: Clock
    at: float
    output: StepOutput

    def result(self) -> StepOutput:
        self.clock.now = max(self.clock.now, self.at)
        return self.output


class Imagined:
    """An executor whose device only knows how long things take. Stages of a pipeline hold one step each."""

    def __init__(self, roofline: Roofline, clock: Clock):
        self.roofline = roofline
        self.clock = clock
        self.stages = roofline.pp
        self.free = self.busy = 0.0
        self.steps = 0

    def start(self, plan: Any) -> EngineCapacity:
        raise NotImplementedError("an imagined device has nothing to load")

    def submit(self, step: ScheduledStep) -> Due:
        spent = self.roofline.expected(*work(step.requests))
        begun = max(self.clock.now, self.free)
        self.free = begun + spent / self.stages
        self.busy += spent / self.stages
        self.steps += 1
        drawn = tuple(
            [SampledTokens(item.sequence, (ANSWER,)) for item in step.chunks if item.samples]
        )
        output = StepOutput(drawn, None, (ANSWER,) * len(step.decodes))
        return Due(self.clock, begun + spent, output)

    def spare(self) -> int:
        return 0

    def close(self) -> None:
        pass


class Replica:
    def __init__(self, settings: Plan, capacity: EngineCapacity, roofline: Roofline):
        self.clock = Clock()
        self.executor = Imagined(roofline, self.clock)
        self.blocks = Blocks(capacity.blocks, capacity.block_size, settings.prefix_cache)
        policy = policy_for(settings, capacity)
        stages = capacity.stages
        self.scheduler = Scheduler(
            self.blocks, capacity.max_num_batched_tokens, capacity.max_num_seqs, policy, stages
        )
        self.loop = Loop(self.scheduler, self.executor, max(settings.depth, stages), self.clock)
        self.longest = min(capacity.max_length, capacity.blocks * capacity.block_size)
        self.load = 0  # tokens promised and not out yet


class Fleet:
    """Replicas, who goes to which, and what became of everybody."""

    def __init__(self, placed: Placed, config: Config | None = None):
        layout = placed.layout
        longest = placed.longest()
        if not longest:
            raise ConfigError(
                f"the model does not fit {layout.devices} x {placed.machine.title}; see `bloomery plan`"
            )
        device = "cpu" if placed.machine.cpu else "cuda"
        settings = resolve(
            config or Config(),
            name="",
            path="",
            kind="",
            dtype="bfloat16",
            device=device,
            context=longest,
        )
        size = settings.block_size
        most = -(-settings.max_length // size) * settings.max_num_seqs
        capacity = EngineCapacity(
            blocks=min(int(placed.room // placed.sequence_bytes(size)), most),
            block_size=size,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_length=settings.max_length,
            vocab=placed.model.vocab,
            stages=layout.pp,
            expected=placed.roofline.usual(),
        )
        self.replicas = [
            Replica(settings, capacity, placed.roofline) for _ in range(layout.replicas)
        ]
        self.homes: dict[str, int] = {}  # session -> replica that has its prefix
        self.said: dict[
            str, tuple[int, ...]
        ] = {}  # session -> tokens of its last request and of the answer

    def route(self, arrival: Arrival) -> Replica:
        """To the replica that knows the session unless it is far busier than the idlest; otherwise to the idlest."""
        idlest = min(range(len(self.replicas)), key=lambda i: self.replicas[i].load)
        home = self.homes.get(arrival.session, idlest) if arrival.prefix else idlest
        if self.replicas[home].load > 2 * self.replicas[idlest].load + 8192:
            home = idlest
        if arrival.session:
            self.homes[arrival.session] = home
        return self.replicas[home]

    def run(self, arrivals: Sequence[Arrival]) -> list[Record]:
        """Everybody's record, in the order of `arrivals`."""
        records = [Record(0.0, arrival.prompt) for arrival in arrivals]
        later: dict[str, deque[int]] = defaultdict(deque)
        coming: list[tuple[float, int]] = []
        known: set[str] = set()  # sessions: who is the first of one follows nobody
        for i, arrival in enumerate(arrivals):
            if arrival.arrival is not None or arrival.session not in known:
                heapq.heappush(
                    coming, (arrival.after if arrival.arrival is None else arrival.arrival, i)
                )
            else:
                later[arrival.session].append(i)
            known.add(arrival.session)
        while True:
            busy = [replica for replica in self.replicas if replica.loop.busy]
            next_up = min(busy, key=lambda replica: replica.clock.now) if busy else None
            patience = next_up.loop.patience() if next_up else 0.0
            if coming and (next_up is None or coming[0][0] <= next_up.clock.now + patience):
                at, i = heapq.heappop(coming)
                if not self._enter(arrivals[i], records[i], at, i):
                    self._follow(arrivals, i, at, later, coming)
            elif next_up is not None:
                next_up.clock.now += patience
                for i in self._advance(next_up, records):
                    self._follow(arrivals, i, next_up.clock.now, later, coming)
            else:
                return records

    def _enter(self, arrival: Arrival, record: Record, at: float, i: int) -> bool:
        replica = self.route(arrival)
        replica.clock.now = max(replica.clock.now, at)
        record.sent = at
        output = min(
            arrival.output, replica.longest - arrival.prompt
        )  # as a server cuts an answer short
        try:
            if output < 1:
                raise PromptTooLong(
                    f"a prompt of {arrival.prompt} tokens leaves no room in {replica.longest}"
                )
            replica.loop.add(
                EngineRequest(
                    str(i), self._prompt(arrival, i), GREEDY, output, priority=arrival.priority
                )
            )
        except InvalidRequest as refusal:
            record.error = str(refusal)
            record.done = at
            return False
        replica.load += arrival.prompt + output
        return True

    def _prompt(self, arrival: Arrival, i: int) -> tuple[int, ...]:
        """Token ids that begin like the session's last exchange for `prefix` tokens, and like nobody else's after."""
        known = self.said.get(arrival.session, ())[: min(arrival.prefix, arrival.prompt - 1)]
        prompt = known + (i + ANSWER + 1,) * (arrival.prompt - len(known))
        if arrival.session:
            self.said[arrival.session] = prompt + (ANSWER,) * arrival.output
        return prompt

    @staticmethod
    def _advance(replica: Replica, records: Sequence[Record]) -> list[int]:
        """One step of a replica; who is done."""
        ended = []
        for news in replica.loop.step():
            i = int(news.request)
            record = records[i]
            if news.ids:
                record.tokens += len(news.ids)
                record.stamps.append(replica.clock.now)
            if news.finish:
                record.done = replica.clock.now
                record.error = news.error
                replica.load -= record.prompt + record.tokens
                ended.append(i)
        return ended

    @staticmethod
    def _follow(
        arrivals: Sequence[Arrival],
        i: int,
        now: float,
        later: dict[str, deque[int]],
        coming: list[tuple[float, int]],
    ) -> None:
        """The session's next request, once the former is answered."""
        waiting = later.get(arrivals[i].session)
        if waiting:
            following = waiting.popleft()
            heapq.heappush(coming, (now + arrivals[following].after, following))


# ---- calibration -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    tokens: int
    attended: int
    sampled: int
    seconds: float
    pairs: int | None = None

    @property
    def work(self) -> tuple[int, int, int, int | None]:
        return self.tokens, self.attended, self.sampled, self.pairs


def read_steps(path: Path) -> list[Measured]:
    try:
        return [
            Measured(**json.loads(line)) for line in path.read_text().splitlines() if line.strip()
        ]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}: {error}; a line is tokens, attended, sampled, seconds and, of chunks, pairs"
        ) from None


def calibrate(roofline: Roofline, steps: Sequence[Measured]) -> Calibration:
    """Four constants by least squares on the relative error: a step, its floors' slowdown, a sequence, and how much
    better the device computes than it reads (the one that is not linear: the best of a row of values)."""
    if len(steps) < 4:
        raise ConfigError(
            f"{len(steps)} measured steps are too few to calibrate on; give more, of several sizes"
        )
    found = [_fitted(copy(roofline), steps, float(ratio)) for ratio in np.geomspace(0.2, 5, 41)]
    best = min((one for one in found if one is not None), key=lambda one: one[0], default=None)
    if best is None:
        raise ConfigError(
            "the measured steps do not grow with their work; measure steps of several sizes"
        )
    return best[1]


def _fitted(
    trial: Roofline, steps: Sequence[Measured], ratio: float
) -> tuple[float, Calibration] | None:
    """The best constants for one ratio of compute to memory, and their error."""
    before = trial.calibration
    trial.calibration = replace(
        before, memory=1.0, compute=ratio, launch=0.0, step=0.0, eager=0.0, mixed=0.0, sequence=0.0
    )
    seconds = np.array([s.seconds for s in steps])
    floors = [trial.expected(*s.work) for s in steps]
    columns = (
        np.stack([np.ones(len(steps)), floors, [s.sampled for s in steps]], 1) / seconds[:, None]
    )
    step, slow, sequence = map(float, prices := _no_negatives(columns))
    if slow <= 0:
        return None
    each = sequence / len(trial.model.layers)
    found = replace(
        before, memory=1 / slow, compute=ratio / slow, launch=0.0, step=step, sequence=each
    )
    return float(np.square(columns @ prices - 1).sum()), found


def _no_negatives(columns: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Least squares for a target of ones with no price below zero: drop the worst until none is."""
    used = list(range(columns.shape[1]))
    while used:
        found, *_ = np.linalg.lstsq(columns[:, used], np.ones(len(columns)), rcond=None)
        if (found >= 0).all():
            break
        del used[int(found.argmin())]
    prices = np.zeros(columns.shape[1])
    if used:
        prices[used] = found
    return prices


# ---- the command -----------------------------------------------------------------------------------


def simulated(
    placed: Placed, arrivals: Sequence[Arrival], config: Config, targets: Targets
) -> dict[str, Any]:
    fleet = Fleet(placed, config)
    result = summarise(fleet.run(arrivals), targets)
    span = max(replica.clock.now for replica in fleet.replicas) or 1.0
    executors = [replica.executor for replica in fleet.replicas]
    result["steps"] = sum(executor.steps for executor in executors)
    result["device_busy"] = round(
        sum(executor.busy for executor in executors) / span / len(executors), 4
    )
    result["preemptions"] = sum(replica.scheduler.preemptions for replica in fleet.replicas)
    return result


def run(placed: Placed, trace: Path, calibration: Path | None, as_json: bool) -> int:
    if calibration is not None:
        placed.roofline.calibration = calibrate(placed.roofline, read_steps(calibration))
    arrivals = read(trace)
    policies = ("fair", "fcfs")
    results = {
        policy: simulated(placed, arrivals, Config(policy=policy), Targets()) for policy in policies
    }
    if as_json:
        print(json.dumps(results, indent=1))
        return 0
    print(
        f"{len(arrivals):,} requests of {trace.name} on {placed.layout}, {placed.machine.title}, in virtual time\n"
    )
    print(table(results))
    for policy, result in results.items():
        for why, count in result["errors"].items():
            print(f"{policy}: {count} x {why}", file=sys.stderr)
    return 0
