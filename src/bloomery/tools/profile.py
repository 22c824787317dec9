"""`bloomery profile MODEL`: where a step's time goes, by torch's profiler; and, apart from it, how long steps take.

A profile gives insight and no measurement: times in it are not published. `--record` measures the same engine with no
profiler in sight, steps of many sizes, as `bloomery plan --simulate TRACE --calibration FILE` wants them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from bloomery.config import at_least, destination
from bloomery.engine.executor import Announced
from bloomery.engine.loop import Loop
from bloomery.errors import ConfigError
from bloomery.messages import EngineCapacity, EngineRequest, ResolvedSampling, ScheduledStep
from bloomery.roofline import work

GREEDY = ResolvedSampling(temperature=0.0)


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps",
        type=at_least(1),
        default=16,
        metavar="N",
        help="decode steps to profile (default 16)",
    )
    parser.add_argument(
        "--batch", type=at_least(1), default=8, metavar="N", help="sequences in each (default 8)"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=at_least(1),
        default=128,
        metavar="N",
        help="their prompts (default 128)",
    )
    parser.add_argument(
        "--trace",
        type=destination,
        default=Path("trace.json"),
        metavar="FILE",
        help="for chrome://tracing",
    )
    parser.add_argument(
        "--record",
        type=destination,
        metavar="FILE",
        help="no profiler: measured steps, as JSON lines",
    )


def run(llm: Any, args: argparse.Namespace) -> int:
    stack = llm.front.stack
    loop = stack.loop
    capacity = stack.capacity
    if args.record:
        rows = list(recorded(loop, capacity))
        args.record.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{len(rows)} sizes of step in {args.record}")
        return 0
    unroll(getattr(stack.executor, "worker", None))
    print(profile(loop, capacity, args.batch, args.prompt_tokens, args.steps, args.trace))
    print(
        f"\nThe trace is in {args.trace}. Under a profiler everything is slower: never publish times from here."
    )
    return 0


def start(loop: Loop, capacity: EngineCapacity, batch: int, prompt: int, output: int) -> list[str]:
    """Put a batch into the engine, and run until everybody has a first token."""
    if batch > capacity.max_num_seqs or prompt + output > capacity.max_length:
        raise ConfigError(
            f"{batch} sequences of {prompt + output} tokens: this engine takes {capacity.max_num_seqs} of at most "
            f"{capacity.max_length}"
        )
    names = [f"profile {i}" for i in range(batch)]
    for i, name in enumerate(names):
        ids = tuple((37 * i + 11 * k) % (capacity.vocab - 20) + 10 for k in range(prompt))
        loop.add(
            EngineRequest(
                name, ids, GREEDY, output, salt=f"{name}, sequence {loop.scheduler.next_id}"
            )
        )  # no prefix hits
    without = set(names)
    while without:
        without -= {news.request for news in loop.step() if news.ids}
    return names


def stop(loop: Loop, names: list[str]) -> None:
    for name in names:
        loop.abort(name)
    while loop.busy:
        loop.step()


class Named:
    """Native functions that a profiler sees by name."""

    def __init__(self, library: Any):
        self.library = library

    def __getattr__(self, name: str) -> Any:
        from torch.profiler import record_function

        function = getattr(self.library, name)

        def told(*arguments: Any) -> Any:
            with record_function(name):
                return function(*arguments)

        return told if name.startswith("native_") else function


def unroll(worker: Any) -> None:
    """On a CPU a recorded step is one call, of which a profiler sees nothing: from now on its operations are done one
    after another, each by name. `worker` is None where it lives in other processes."""
    from bloomery.native.team import team
    from bloomery.runtime.replay import Plainly, Recorded

    if worker is not None and isinstance(worker.decode.runs, Recorded):
        worker.decode.runs = Plainly()
        team().call = cast(Any, Named(team().call))


def profile(
    loop: Loop, capacity: EngineCapacity, batch: int, prompt: int, steps: int, trace: Path
) -> str:
    """The kernel table of so many decode steps; the trace goes to a file."""
    import torch
    from torch.profiler import ProfilerActivity

    names = start(loop, capacity, batch, prompt, steps + 16)
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    for _ in range(3):
        loop.step()
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(steps):
            loop.step()
        if cuda:
            torch.cuda.synchronize()
    stop(loop, names)
    profiler.export_chrome_trace(str(trace))
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    return str(profiler.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60))


# ---- steps measured ----------------------------------------------------------------------------------


PROMPTS = (16, 64, 256, 1024, 4096)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Clock = Callable[[], float]


def recorded(
    loop: Loop,
    capacity: EngineCapacity,
    prompts: Sequence[int] = PROMPTS,
    batches: Sequence[int] = BATCHES,
    clock: Clock = time.perf_counter,
    repeat: int = 8,
) -> Iterator[dict[str, float]]:
    """Prompts alone and batches decoding, each size once; the median of several like steps."""
    steps: deque[ScheduledStep] = deque()  # handed to the executor, oldest first
    ours = Loop(loop.scheduler, Announced(loop.executor, steps.append), loop.depth)
    longest = capacity.max_length - repeat - 8
    for length in sorted(
        {min(length, longest, capacity.max_num_batched_tokens) for length in prompts}
    ):
        times = []
        for _ in range(3):
            steps.clear()
            begun = clock()
            names = start(ours, capacity, 1, length, 1)
            times.append(clock() - begun)
            step = steps[0]
            stop(ours, names)
        yield {**work(step.requests)._asdict(), "seconds": statistics.median(times)}
    room = capacity.blocks * capacity.block_size
    for batch in (n for n in batches if n <= capacity.max_num_seqs):
        for length in (32, 512):
            short = (
                batch * length <= 4 * capacity.max_num_batched_tokens
            )  # minutes of prompts teach nothing
            if (
                short
                and length + 16 <= longest
                and batch * (length + repeat + 16 + capacity.block_size) <= room
            ):
                yield decoding(ours, steps, capacity, batch, length, clock, repeat)


def decoding(
    loop: Loop,
    steps: deque[ScheduledStep],
    capacity: EngineCapacity,
    batch: int,
    length: int,
    clock: Clock,
    repeat: int,
) -> dict[str, float]:
    names = start(loop, capacity, batch, length, repeat + 16)
    loop.step()
    while len(steps) > len(loop.flight):
        steps.popleft()
    times = []
    last = clock()
    for _ in range(repeat):
        loop.step()
        now = clock()
        times.append(now - last)
        last = now
    step = steps[repeat // 2]
    stop(loop, names)
    steps.clear()
    return {**work(step.requests)._asdict(), "seconds": statistics.median(times)}
