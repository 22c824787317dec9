"""What queueing more short steps ahead is worth, in virtual time: the real loop and scheduler, an imagined small model.

    PYTHONPATH=src python3 benchmarks/ahead.py

The host takes a while for every step and is now and then held up; people ask, are answered, and ask again. Two loops:
one with two steps in flight, and the engine's own. Answers end at a length that is known, by a token the engine knows
of, or by what it cannot foresee, as where a stop string is found in the text: only then does it run ahead of somebody
who ends. Every figure is of the simulation.
"""

from __future__ import annotations

import argparse
import heapq
import random
from dataclasses import dataclass

from bloomery.engine.blocks import Blocks
from bloomery.engine.loop import Loop
from bloomery.engine.policy import Aims, FairPolicy
from bloomery.engine.scheduler import Scheduler
from bloomery.messages import (
    EngineRequest,
    SampledTokens,
    ResolvedSampling,
    ScheduledStep,
    StepOutput,
    StepTiming,
)

# tokens
END = 2
OTHER = 3
PROMPT = 32
LONGEST = 1024


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Imagined:
    """A 1B model's steps on an H200, and a host that queues them and reads their results; seconds."""

    fixed = 0.78e-3
    line = 8.3e-6
    chunk = 0.6e-3
    # by the host, each step
    queued = 0.2e-3
    read = 0.15e-3
    # how often it is held up, and for how long
    held = 1 / 200
    shortest = 0.5e-3
    longest = 4e-3

    def __init__(self, clock: Clock, mean: int, seed: int):
        self.clock = clock
        self.mean = mean
        self.chance = random.Random(seed)
        self.free = self.busy = self.idle = 0.0

    def spend(self, seconds: float) -> None:
        more = (
            self.chance.uniform(self.shortest, self.longest)
            if self.chance.random() < self.held / 2
            else 0.0
        )
        self.clock.now += seconds + more

    def submit(self, step: ScheduledStep) -> Later:
        self.spend(self.queued)
        positions = len(step.decodes) + sum(item.count for item in step.chunks)
        seconds = self.fixed + self.line * positions + self.chunk * bool(step.chunks)
        begun = max(self.clock.now, self.free)
        idle = begun - self.free
        self.free = begun + seconds
        self.busy = self.busy + seconds
        self.idle = self.idle + idle
        drawn = tuple(
            [SampledTokens(item.sequence, (self.draw(),)) for item in step.chunks if item.samples]
        )
        tokens = tuple([self.draw() for _ in step.decodes])
        return Later(
            self, StepOutput(drawn, StepTiming(steps=1, device=seconds), tokens), self.free
        )

    def draw(self) -> int:
        return END if self.chance.random() < 1 / self.mean else OTHER


@dataclass(frozen=True)
class Later:
    device: Imagined
    output: StepOutput
    end: float

    def result(self) -> StepOutput:
        self.device.clock.now = max(self.device.clock.now, self.end)
        self.device.spend(self.device.read)
        return self.output


class Two(Loop):
    def _wants_more(self) -> bool:
        return len(self.flight) < self.depth


def crowd(
    kind: type[Loop], people: int, pause: float, mean: int, ends: str, seconds: float, seed: int
) -> list[str]:
    """Tokens a second, idle share, milliseconds to the first token: in the mean, and for the slowest in a hundred."""
    clock = Clock()
    rows = 64
    device = Imagined(clock, mean, seed)
    scheduler = Scheduler(Blocks(8000, 64, False), 8192, rows, FairPolicy(rows, 8000, Aims()))
    loop = kind(scheduler, device, 2, clock)  # type: ignore[arg-type]
    coming = [(device.chance.uniform(0, 0.05), number) for number in range(people)]
    heapq.heapify(coming)
    asked = dict[str, float]()
    waits = list[float]()
    tokens = 0
    nobody = 0.0
    while clock.now < seconds:
        if not loop.busy and coming[0][0] > clock.now:
            clock.now, before = coming[0][0], clock.now
            nobody += clock.now - max(before, device.free)
        while coming and coming[0][0] <= clock.now:
            when, number = heapq.heappop(coming)
            asked[str(number)] = when
            answer = mean if ends == "length" else LONGEST
            stops = (END,) if ends == "token" else ()
            loop.add(EngineRequest(str(number), (1,) * PROMPT, ResolvedSampling(), answer, stops))
        for news in loop.step():
            tokens += len(news.ids)
            if not news.position:
                waits.append(clock.now - asked[news.request])
            if news.finish or (ends == "string" and END in news.ids):
                loop.abort(news.request)
                again = clock.now + (device.chance.expovariate(1 / pause) if pause else 0.0)
                heapq.heappush(coming, (again, int(news.request)))
    waits.sort()
    idle = (device.idle - nobody) / clock.now
    mean_wait = sum(waits) / len(waits)
    slow = waits[int(0.99 * len(waits))]
    return [
        f"{tokens / clock.now:10,.0f}",
        f"{idle:8.2%}",
        f"{1e3 * mean_wait:8.2f}",
        f"{1e3 * slow:8.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="virtual")
    args = parser.parse_args()
    print(
        f"{'people':>8} {'pause s':>8} {'answer':>8} {'ends':>6} {'loop':>8}   tokens/s     idle first ms    p99 ms"
    )
    for people, pause, mean in (
        (1, 0.0, 256),
        (1, 0.0, 64),
        (1, 0.5, 64),
        (8, 0.0, 256),
        (8, 0.2, 64),
        (32, 0.0, 256),
    ):
        for ends in ("length", "token", "string"):
            for name, kind in (("two", Two), ("ahead", Loop)):
                found = crowd(kind, people, pause, mean, ends, args.seconds, 1)
                print(f"{people:8} {pause:8} {mean:8} {ends:>6} {name:>8} {' '.join(found)}")


if __name__ == "__main__":
    main()
