"""Latency of short requests among long ones, through AsyncLLM, with the fair and fcfs policies.

    PYTHONPATH=src python3 benchmarks/mixed_latency.py llama-8b --plot mixed.svg   # a GPU
    PYTHONPATH=src python3 benchmarks/mixed_latency.py embedded --plot mixed.svg   # two CPU cores
    PYTHONPATH=src python3 benchmarks/mixed_latency.py virtual                     # no GPU

Long requests run in a closed loop (2,000 prompt tokens, 512 output tokens, 256 requests at once).
Short requests (32 prompt tokens, 16 output tokens) arrive at random, 5 per second. The embedded
model gets a smaller load. Weights are random. Each policy runs in its own process, one after the
other, because an engine keeps its memory. The plot shows the latency of every short request and the
ITL of the long ones.

`virtual` runs the GPU's load in real time through the real API, engine process, loop and scheduler,
with an executor that only waits as long as an H200 would (tests/engine/virtual_device.py). It shows
the influence of the host on the figures, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from offline import SHAPES, parse_value

from bloomery import AsyncLLM, SamplingParams
from bloomery.config import EnginePlan
from bloomery.engine.engine_process import run_engine_process
from bloomery.engine.loop import describe_timing
from bloomery.executors.local import LocalExecutor
from bloomery.messages import (
    EngineCapacity,
    SampledTokens,
    ScheduledStep,
    StepOutput,
    StepTiming,
)
from bloomery.tools.plot import ChartSeries, draw_chart
from tests.engine.virtual_device import (
    CPU_MIXED_LOAD,
    GPU_MIXED_LOAD,
    H200,
    MixedLoad,
    VirtualDevice,
    percentile,
)

# A model that is never run. It is so small that the KV cache of all requests needs little memory.
TINY_SHAPE = SHAPES["llama-1b"] | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 1000,
}
VIRTUAL_OPTIONS = {
    "device": "cpu",
    "max_num_seqs": 272,
    "max_num_batched_tokens": 8192,
    "kv_cache_gib": 0.3,
    "steps_in_flight": 2,
}
ENGINE_FLAG = "--engine-process"  # this script is then the engine process of `virtual`
# For the 8B shape on an H200. Latencies are seconds; short_p99_x is a multiple of the solo time.
TARGETS = {"short_p99_x": 4.0, "long_tok_s": 4636, "long_itl_p99": 0.065}
COLUMNS = (
    "short_p50",
    "short_p99",
    "short_p99_x",
    "long_tok_s",
    "long_itl_p50",
    "long_itl_p99",
    "overhead",
)


class WaitingExecutor:
    """An executor in real time. A result is returned when a virtual device would be done."""

    def __init__(self, device: VirtualDevice = H200, seed: int = 0):
        self.device = device
        self.rng = random.Random(seed)
        self.free_time = 0.0

    def start(self, plan: EnginePlan) -> EngineCapacity:
        """Load the tiny model, only to learn how many blocks of its KV cache fit."""
        return LocalExecutor().start(plan)

    def submit(self, step: ScheduledStep) -> DelayedResult:
        requests = step.requests
        seconds = self.device.step_seconds(requests, self.rng)
        begin = max(time.monotonic(), self.free_time)
        idle = begin - self.free_time if self.free_time else 0.0
        self.free_time = begin + seconds
        samples = [SampledTokens(request.sequence, (2,)) for request in requests if request.samples]
        timing = StepTiming(steps=1, device=seconds, idle=idle)
        return DelayedResult(StepOutput(tuple(samples), timing), self.free_time)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class DelayedResult:
    """A pending step. Reading its result sleeps until the step would have ended."""

    output: StepOutput
    end: float  # seconds on the monotonic clock

    def result(self) -> StepOutput:
        time.sleep(max(self.end - time.monotonic(), 0.0))
        return self.output


class VirtualLLM(AsyncLLM):
    """AsyncLLM with an engine process whose executor only waits."""

    engine_command = (sys.executable, __file__, ENGINE_FLAG)


def create_engine(shape: str, policy: str, options: dict[str, Any]) -> AsyncLLM:
    """Create an engine with random weights of a shape, or with the embedded model."""
    model = None
    if shape != "embedded":
        folder = Path(tempfile.mkdtemp()) / shape
        folder.mkdir()
        model_config = TINY_SHAPE if shape == "virtual" else SHAPES[shape]
        (folder / "config.json").write_text(json.dumps(model_config))
        model = str(folder)
        options = {"load_format": "dummy", "max_model_len": 8192, **options}
    engine_class = AsyncLLM
    if shape == "virtual":
        engine_class = VirtualLLM
        options = options | VIRTUAL_OPTIONS
    return engine_class(
        model, skip_tokenizer_init=True, enable_prefix_caching=False, policy=policy, **options
    )


class RequestTimes(NamedTuple):
    """The times of one request, in seconds."""

    ttft: float
    total: float
    num_tokens: int


class MixedLoadRun:
    """One policy under the mixed load."""

    def __init__(self, engine: AsyncLLM, load: MixedLoad, seconds: float):
        self.engine = engine
        self.load = load
        self.seconds = seconds
        self.rng = random.Random(1)
        self.vocab = engine.capacity.vocab
        self.begin = 0.0
        self.short: list[RequestTimes] = []
        self.long: list[RequestTimes] = []
        self.long_itls: list[float] = []

    async def run(self) -> dict[str, Any]:
        """Run the load and return the figures that its requests give."""
        short_tokens = self.load.short_tokens
        for _ in range(3):
            await self.request(short_tokens)
        solo_runs = [await self.request(short_tokens) for _ in range(10)]
        solo_seconds = statistics.median([times.total for times in solo_runs])
        self.begin = time.perf_counter()
        tasks = [asyncio.create_task(self.repeat_long()) for _ in range(self.load.num_long)]
        while not self.is_over:
            await asyncio.sleep(self.rng.expovariate(self.load.short_rate))
            tasks.append(asyncio.create_task(self.run_short()))
        await asyncio.gather(*tasks)
        wall_seconds = time.perf_counter() - self.begin
        latencies = [times.total for times in self.short]
        long_tokens = sum(times.num_tokens for times in self.long)
        return {
            "longs": self.load.num_long,
            "seconds": wall_seconds,
            "solo_s": solo_seconds,
            "shorts": len(self.short),
            "short_p50": percentile(latencies, 0.5),
            "short_p90": percentile(latencies, 0.9),
            "short_p99": percentile(latencies, 0.99),
            "short_p99_x": percentile(latencies, 0.99) / solo_seconds,
            "short_ttft_p99": percentile([times.ttft for times in self.short], 0.99),
            "long_tok_s": long_tokens / wall_seconds,
            "long_itl_p50": percentile(self.long_itls, 0.5),
            "long_itl_p99": percentile(self.long_itls, 0.99),
            "long_itl_max": max(self.long_itls),
            "long_ttft_p99": percentile([times.ttft for times in self.long], 0.99),
        }

    @property
    def is_over(self) -> bool:
        return time.perf_counter() >= self.begin + self.seconds

    async def request(
        self, num_tokens: tuple[int, int], itls: list[float] | None = None
    ) -> RequestTimes:
        """Send one request of (prompt, output) tokens and wait for its end.

        Its inter-token latencies are appended to `itls`.
        """
        num_prompt, num_output = num_tokens
        prompt = [self.rng.randrange(10, self.vocab - 10) for _ in range(num_prompt)]
        params = SamplingParams(
            temperature=0.0, max_tokens=num_output, ignore_eos=True, detokenize=False
        )
        begin = time.perf_counter()
        last = begin
        ttft = 0.0
        num_received = 0
        async for piece in self.engine.stream({"prompt_token_ids": prompt}, params):
            now = time.perf_counter()
            num_received += len(piece.token_ids)
            if not ttft:
                ttft = now - begin
            elif itls is not None:
                itls.append(now - last)
            last = now
        return RequestTimes(ttft, last - begin, num_received)

    async def repeat_long(self) -> None:
        while not self.is_over:
            self.long.append(await self.request(self.load.long_tokens, self.long_itls))

    async def run_short(self) -> None:
        self.short.append(await self.request(self.load.short_tokens))


async def measure_policy(
    shape: str,
    policy: str,
    load: MixedLoad,
    seconds: float,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return the figures and the points of the plot for one policy."""
    engine = create_engine(shape, policy, options)
    run = MixedLoadRun(engine, load, seconds)
    figures = {"shape": shape, "policy": policy, **await run.run()}
    stats = engine.stats
    figures["overhead"] = stats.scheduling_overhead_seconds / figures["seconds"]
    figures["preemptions"] = stats.preemptions
    figures["timing"] = describe_timing(stats.timing)
    for name, value in figures.items():
        if isinstance(value, float):
            figures[name] = round(value, 4)
    itls = sorted(run.long_itls)
    points = {
        "short": sorted(times.total for times in run.short),
        "itls": itls[:: max(len(itls) // 2000, 1)],
    }
    engine.close()
    return {"figures": figures, "points": points}


def plot_runs(runs: dict[str, dict[str, Any]], solo_seconds: float) -> str:
    """Draw the cumulative distributions of short latencies and of long ITLs as an SVG."""

    def cumulative(values: list[float]) -> list[tuple[float, float]]:
        return [(1000 * value, 100 * (i + 1) / len(values)) for i, value in enumerate(values)]

    solo_ms = 1000 * solo_seconds
    short = [ChartSeries(name, cumulative(run["points"]["short"])) for name, run in runs.items()]
    short.append(ChartSeries("alone", [(solo_ms, 0.0), (solo_ms, 100.0)], dashed=True))
    itls = [ChartSeries(name, cumulative(run["points"]["itls"])) for name, run in runs.items()]
    return stack_charts(
        draw_chart("Short requests, end to end", "ms", "% done within", short, log_x=True),
        draw_chart("Long requests, ITL", "ms", "% within", itls, log_x=True),
    )


def stack_charts(*charts: str) -> str:
    """Put SVG charts below each other."""
    heights = [int(re.findall(r'viewBox="0 0 \d+ (\d+)"', chart)[0]) for chart in charts]
    offsets = accumulate(heights, initial=0)
    parts = [
        chart.replace("<svg ", f'<svg y="{y}" height="{height}" ', 1)
        for chart, y, height in zip(charts, offsets, heights, strict=False)
    ]
    view_box = f"0 0 640 {sum(heights)}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view_box}">{"".join(parts)}</svg>'


def print_comparison(runs: dict[str, dict[str, Any]], shape: str) -> None:
    """Print one row per policy, and the throughput of fair relative to fcfs."""
    print(f"\n{'':12}" + "".join(f"{column:>14}" for column in COLUMNS))
    for name, run in runs.items():
        print(f"{name:12}" + "".join(f"{run['figures'][column]:14.4g}" for column in COLUMNS))
    if shape == "llama-8b":
        print(f"targets: {TARGETS}, and long_tok_s within 7 % of fcfs")
    if {"fair", "fcfs"} <= runs.keys():
        fair, fcfs = (runs[name]["figures"]["long_tok_s"] for name in ("fair", "fcfs"))
        print(f"long requests: {100 * (fair / fcfs - 1):+.1f} % throughput against fcfs")


def run_in_subprocess(policy: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run this script for one policy and return what it measured."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run.json"
        command = [sys.executable, __file__, args.shape]
        command += [f"--policy={policy}", f"--seconds={args.seconds}", f"--output={output}"]
        command += [f"--option={option}" for option in args.option]
        if args.longs:
            command.append(f"--longs={args.longs}")
        subprocess.run(command, check=True)
        return json.loads(output.read_text())


def parse_pairs(pairs: list[str]) -> dict[str, Any]:
    """Parse NAME=VALUE options."""
    split = (pair.split("=", 1) for pair in pairs)
    return {name: parse_value(value) for name, value in split}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=[*SHAPES, "embedded", "virtual"])
    parser.add_argument(
        "--policy", choices=("fair", "fcfs"), action="append", help="default: both policies"
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="duration of the load")
    parser.add_argument("--longs", type=int, help="number of long requests at once")
    parser.add_argument("--plot", type=Path, help="write the plot to this SVG file")
    parser.add_argument(
        "--option", action="append", default=[], help="NAME=VALUE for AsyncLLM(...)"
    )
    # A child process writes the figures of one policy to this file.
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.output:
        load = CPU_MIXED_LOAD if args.shape == "embedded" else GPU_MIXED_LOAD
        if args.longs:
            load = load._replace(num_long=args.longs)
        options = parse_pairs(args.option)
        measurement = measure_policy(args.shape, args.policy[0], load, args.seconds, options)
        args.output.write_text(json.dumps(asyncio.run(measurement)))
        return
    runs = {}
    for policy in args.policy or ("fair", "fcfs"):
        runs[policy] = run_in_subprocess(policy, args)
        print(json.dumps(runs[policy]["figures"]), flush=True)
    print_comparison(runs, args.shape)
    if args.plot:
        solo_seconds = next(iter(runs.values()))["figures"]["solo_s"]
        args.plot.write_text(plot_runs(runs, solo_seconds))


if __name__ == "__main__":
    if ENGINE_FLAG in sys.argv:
        sys.exit(run_engine_process(int(sys.argv[-1]), lambda plan, report: WaitingExecutor()))
    main()
