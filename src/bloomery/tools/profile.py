"""`bloomery profile MODEL`: the kernels of a step by torch's profiler, and measured step times.

Times under a profiler are too long to publish. `--record` measures steps of many sizes on the same
engine without a profiler, in the format of `bloomery plan --simulate TRACE --calibration FILE`.
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

from bloomery.cache_groups import count_held_blocks
from bloomery.config import at_least, output_file
from bloomery.engine.loop import EngineLoop
from bloomery.errors import ConfigError
from bloomery.messages import EngineCapacity, EngineRequest, ResolvedSampling, ScheduledStep
from bloomery.roofline import count_step_work

GREEDY = ResolvedSampling(temperature=0.0)
NUM_WARMUP_STEPS = 3
NUM_PREFILLS = 3  # measurements of each prompt length
NUM_DECODES = 8  # measured decode steps of each batch
SPARE_TOKENS = 16  # output tokens beyond the measured steps, so that no sequence ends during them
PROMPT_LENGTHS = (16, 64, 256, 1024, 4096)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DECODE_CONTEXTS = (32, 512)

Clock = Callable[[], float]


def add_flags(parser: argparse.ArgumentParser) -> None:
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
        help="tokens of each prompt (default 128)",
    )
    parser.add_argument(
        "--trace",
        type=output_file,
        default=Path("trace.json"),
        metavar="FILE",
        help="where to write the trace, for chrome://tracing",
    )
    parser.add_argument(
        "--record",
        type=output_file,
        metavar="FILE",
        help="no profiler: write measured steps as JSON lines",
    )


def run_profile(llm: Any, args: argparse.Namespace) -> int:
    loop = llm.loop
    capacity = llm.capacity
    if args.record:
        rows = list(measure_steps(loop, capacity))
        args.record.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"wrote {len(rows)} measured steps to {args.record}")
        return 0
    disable_cpu_trace(getattr(llm.executor, "worker", None))
    print(profile_steps(loop, capacity, args.batch, args.prompt_tokens, args.steps, args.trace))
    print(
        f"\nThe trace is in {args.trace}. Under a profiler everything is slower: "
        "never publish times from here."
    )
    return 0


def start_batch(
    loop: EngineLoop, capacity: EngineCapacity, batch: int, prompt_len: int, output_len: int
) -> list[str]:
    """Add a batch of requests and step until each has its first token. Returns their ids."""
    length = prompt_len + output_len
    if batch > capacity.max_num_seqs or length > capacity.max_model_len:
        raise ConfigError(
            f"{batch} sequences of {length} tokens: this engine takes {capacity.max_num_seqs} of "
            f"at most {capacity.max_model_len}"
        )
    request_ids = [f"profile {i}" for i in range(batch)]
    for i, request_id in enumerate(request_ids):
        prompt = tuple(
            (37 * i + 11 * position) % (capacity.vocab - 20) + 10 for position in range(prompt_len)
        )
        salt = f"{request_id}, sequence {loop.scheduler.next_id}"  # prevents prefix hits
        loop.add(EngineRequest(request_id, prompt, GREEDY, output_len, cache_salt=salt))
    prefilling = set(request_ids)
    while prefilling:
        prefilling -= {output.request for output in loop.step() if output.ids}
    return request_ids


def stop_batch(loop: EngineLoop, request_ids: list[str]) -> None:
    for request_id in request_ids:
        loop.abort(request_id)
    while loop.busy:
        loop.step()


# ---- profile -------------------------------------------------------------------------------------


class ProfiledLibrary:
    """A library of CPU kernels whose calls a profiler sees by name."""

    def __init__(self, library: Any):
        self.library = library

    def __getattr__(self, name: str) -> Any:
        from torch.profiler import record_function

        function = getattr(self.library, name)
        if not name.startswith("native_"):
            return function

        def call_profiled(*arguments: Any) -> Any:
            with record_function(name):
                return function(*arguments)

        return call_profiled


def disable_cpu_trace(worker: Any) -> None:
    """Run a CPU's operations one by one instead of replaying a recorded trace.

    A profiler would see a replayed step as a single call. `worker` is None when it lives in
    another process.
    """
    from bloomery.runtime.runner import EagerRunner

    if worker is not None and worker.cpu_traced:
        worker.runner.work_runner = EagerRunner()
        worker.pool.library = cast(Any, ProfiledLibrary(worker.pool.library))


def profile_steps(
    loop: EngineLoop,
    capacity: EngineCapacity,
    batch: int,
    prompt_len: int,
    num_steps: int,
    trace: Path,
) -> str:
    """Profile decode steps, write the trace to a file, and return the table of kernels."""
    import torch
    from torch.profiler import ProfilerActivity

    request_ids = start_batch(loop, capacity, batch, prompt_len, num_steps + SPARE_TOKENS)
    has_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU]
    if has_gpu:
        activities.append(ProfilerActivity.CUDA)
    for _ in range(NUM_WARMUP_STEPS):
        loop.step()
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(num_steps):
            loop.step()
        if has_gpu:
            torch.cuda.synchronize()
    stop_batch(loop, request_ids)
    profiler.export_chrome_trace(str(trace))
    order = "self_cuda_time_total" if has_gpu else "self_cpu_time_total"
    return str(profiler.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60))


# ---- measured steps ------------------------------------------------------------------------------


def measure_steps(
    loop: EngineLoop,
    capacity: EngineCapacity,
    prompt_lengths: Sequence[int] = PROMPT_LENGTHS,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    clock: Clock = time.perf_counter,
) -> Iterator[dict[str, float]]:
    """Yield the median time of prefill steps of one prompt and of decode steps of batches.

    Each entry holds the counts of StepWork and "seconds".
    """
    submitted: deque[ScheduledStep] = deque()  # oldest first
    recording_loop = EngineLoop(
        loop.scheduler, loop.executor, loop.max_in_flight, on_submit=submitted.append
    )
    max_prompt = capacity.max_model_len - NUM_DECODES - 8
    max_prefill = min(max_prompt, capacity.max_num_batched_tokens)
    for length in sorted({min(length, max_prefill) for length in prompt_lengths}):
        yield measure_prefill(recording_loop, submitted, capacity, length, clock)
    for batch in batch_sizes:
        if batch > capacity.max_num_seqs:
            continue
        for length in DECODE_CONTEXTS:
            sequence_positions = length + NUM_DECODES + SPARE_TOKENS + capacity.block_size
            # A batch whose prefill takes more than a few steps would take minutes on a CPU.
            is_quick = batch * length <= 4 * capacity.max_num_batched_tokens
            fits = length + SPARE_TOKENS <= max_prompt
            num_blocks = count_held_blocks(
                capacity.cache_groups,
                sequence_positions,
                capacity.block_size,
                capacity.max_num_batched_tokens,
            )
            if is_quick and fits and batch * num_blocks <= capacity.blocks:
                yield measure_decode(recording_loop, submitted, capacity, batch, length, clock)


def measure_prefill(
    loop: EngineLoop,
    submitted: deque[ScheduledStep],
    capacity: EngineCapacity,
    length: int,
    clock: Clock,
) -> dict[str, float]:
    """The median time of the prefill of one prompt."""
    times = []
    for _ in range(NUM_PREFILLS):
        submitted.clear()
        start = clock()
        request_ids = start_batch(loop, capacity, 1, length, 1)
        times.append(clock() - start)
        step = submitted[0]
        stop_batch(loop, request_ids)
    return describe_step(step, times)


def measure_decode(
    loop: EngineLoop,
    submitted: deque[ScheduledStep],
    capacity: EngineCapacity,
    batch: int,
    length: int,
    clock: Clock,
) -> dict[str, float]:
    """The median time of consecutive decode steps of one batch."""
    request_ids = start_batch(loop, capacity, batch, length, NUM_DECODES + SPARE_TOKENS)
    loop.step()
    while len(submitted) > len(loop.in_flight):
        submitted.popleft()  # keep the steps that the measured calls will wait for
    times = []
    last = clock()
    for _ in range(NUM_DECODES):
        loop.step()
        now = clock()
        times.append(now - last)
        last = now
    step = submitted[NUM_DECODES // 2]
    stop_batch(loop, request_ids)
    submitted.clear()
    return describe_step(step, times)


def describe_step(step: ScheduledStep, times: Sequence[float]) -> dict[str, float]:
    work = count_step_work(step.requests)
    return {**work._asdict(), "seconds": statistics.median(times)}
