"""Short requests among long ones, at the engine's async API: who waits how long? Fair beside first come, first served.

    PYTHONPATH=src python3 benchmarks/mixed_latency.py llama-8b --plot mixed.svg     # a GPU, random weights
    PYTHONPATH=src python3 benchmarks/mixed_latency.py embedded --plot mixed.svg     # two cores, scaled down
    PYTHONPATH=src python3 benchmarks/mixed_latency.py imagined                      # no GPU: see below

Long requests in a closed loop (2,000 in, 512 out, 256 at once), short ones (32 in, 16 out) arriving at random, 5 a
second. Each policy is a process of its own, one after the other: an engine keeps its memory for itself. The plot has
every short request's time, in order, and every gap between two tokens of a long one.

`imagined` is the GPU's load on the real API, loop and scheduler, in real time, before a device that takes what
policy.py says of an H200: it shows what the host does to the figures, and nothing of a card.
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
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from offline import SHAPES, number


@dataclass(frozen=True)
class Load:
    longs: int
    long: tuple[int, int]  # tokens in, tokens out
    short: tuple[int, int]
    rate: float  # short ones a second


GPU = Load(256, (2000, 512), (32, 16), 5.0)
TWO_CORES = Load(6, (160, 48), (8, 6), 0.4)
NOBODY = SHAPES[
    "llama-1b"
] | {  # a model so small that a cache for everybody is nothing; it never runs
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 1000,
}
TARGETS = {
    "short_p99_x": 4.0,
    "long_tok_s": 4636,
    "long_gap_p99": 0.065,
}  # on an H200, for the 8B shape


def percentile(values: list[float], share: float) -> float:
    return (
        sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")
    )


async def drive(
    shape: str, policy: str, load: Load, seconds: float, options: dict, aims: dict
) -> dict:
    from bloomery import AsyncLLM, SamplingParams

    model = None
    if shape != "embedded":
        folder = Path(tempfile.mkdtemp()) / shape
        folder.mkdir()
        (folder / "config.json").write_text(
            json.dumps(NOBODY if shape == "imagined" else SHAPES[shape])
        )
        model = str(folder)
        options = {"load_format": "dummy", "max_model_len": 8192, **options}
    if shape == "imagined":
        options |= {
            "device": "cpu",
            "max_num_seqs": 272,
            "max_num_batched_tokens": 8192,
            "kv_cache_gib": 0.3,
        }
    engine = AsyncLLM(
        model, skip_tokenizer_init=True, enable_prefix_caching=False, policy=policy, **options
    )
    stack = engine.front.stack
    chance = random.Random(1)
    if shape == "imagined":
        from policy import Imagined

        stack.loop.executor = Imagined()
        stack.loop.depth = 2
    if aims and policy == "fair":
        fair = stack.loop.scheduler.policy
        fair.aims = replace(fair.aims, **aims)
    vocab = stack.capacity.vocab
    gaps: list[float] = []

    async def one(
        lengths: tuple[int, int], between: list[float] | None = None
    ) -> tuple[float, float, int]:
        prompt = [chance.randrange(10, vocab - 10) for _ in range(lengths[0])]
        params = SamplingParams(
            temperature=0.0, max_tokens=lengths[1], ignore_eos=True, detokenize=False
        )
        begun = last = time.perf_counter()
        first = count = 0.0
        async for piece in engine.stream({"prompt_token_ids": prompt}, params):
            now = time.perf_counter()
            count += len(piece.token_ids)
            if not first:
                first = now - begun
            elif between is not None:
                between.append(now - last)
            last = now
        return first, last - begun, int(count)

    for _ in range(3):
        await one(load.short)
    solo = statistics.median([(await one(load.short))[1] for _ in range(10)])
    begun = time.perf_counter()
    tokens = 0
    shorts = []
    first_long = []

    async def long() -> None:
        nonlocal tokens
        while time.perf_counter() < begun + seconds:
            first, _, count = await one(load.long, gaps)
            tokens += count
            first_long.append(first)

    async def short() -> None:
        shorts.append(await one(load.short))

    tasks = [asyncio.create_task(long()) for _ in range(load.longs)]
    while time.perf_counter() < begun + seconds:
        await asyncio.sleep(chance.expovariate(load.rate))
        tasks.append(asyncio.create_task(short()))
    await asyncio.gather(*tasks)
    wall = time.perf_counter() - begun
    whole = [end for _, end, _ in shorts]
    from bloomery.engine.gauge import words

    found = {
        "shape": shape,
        "policy": policy,
        "longs": load.longs,
        "seconds": round(wall, 1),
        "solo_s": round(solo, 4),
        "shorts": len(shorts),
        "short_p50": percentile(whole, 0.5),
        "short_p90": percentile(whole, 0.9),
        "short_p99": percentile(whole, 0.99),
        "short_p99_x": percentile(whole, 0.99) / solo,
        "short_first_p99": percentile([first for first, _, _ in shorts], 0.99),
        "long_tok_s": tokens / wall,
        "long_gap_p50": percentile(gaps, 0.5),
        "long_gap_p99": percentile(gaps, 0.99),
        "long_gap_max": max(gaps),
        "long_first_p99": percentile(first_long, 0.99),
        "tax": stack.loop.scheduler.policy.tax / wall,
        "preemptions": stack.loop.scheduler.preemptions,
        "meter": words(stack.loop.timing),
    }
    if policy == "fair":
        found["prices"] = stack.loop.scheduler.policy.pace.prices
    found = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in found.items()
    }
    points = {"short": sorted(whole), "gaps": sorted(gaps)[:: max(len(gaps) // 2000, 1)]}
    engine.close()
    return {"found": found, "points": points}


def plot(runs: dict[str, dict], solo: float) -> str:
    """Both distributions, as the share of requests or gaps that took no longer."""
    from bloomery.tools.plot import Series, chart

    def shares(values: list[float]) -> list[tuple[float, float]]:
        return [(1000 * value, 100 * (i + 1) / len(values)) for i, value in enumerate(values)]

    shorts = [Series(name, shares(run["points"]["short"])) for name, run in runs.items()]
    shorts.append(Series("alone", [(1000 * solo, 0.0), (1000 * solo, 100.0)], dashed=True))
    gaps = [Series(name, shares(run["points"]["gaps"])) for name, run in runs.items()]
    upper = chart("Short requests, whole answer", "ms", "% done within", shorts, log_x=True)
    lower = chart("Long requests, between two tokens", "ms", "% within", gaps, log_x=True)
    return stacked(upper, lower)


def stacked(*charts: str) -> str:
    """One below the other."""
    tall = [int(re.findall(r'viewBox="0 0 \d+ (\d+)"', chart)[0]) for chart in charts]
    places = zip(charts, accumulate(tall, initial=0), tall, strict=False)
    parts = [
        chart.replace("<svg ", f'<svg y="{y}" height="{height}" ', 1) for chart, y, height in places
    ]
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {sum(tall)}">{"".join(parts)}</svg>'


def verdict(runs: dict[str, dict], shape: str) -> None:
    columns = (
        "short_p50",
        "short_p99",
        "short_p99_x",
        "long_tok_s",
        "long_gap_p50",
        "long_gap_p99",
        "tax",
    )
    print(f"\n{'':12}" + "".join(f"{column:>14}" for column in columns))
    for name, run in runs.items():
        print(f"{name:12}" + "".join(f"{run['found'][column]:14.4g}" for column in columns))
    if shape == "llama-8b":
        print(f"to reach: {TARGETS}, and long_tok_s within 7 % of fcfs")
    if {"fair", "fcfs"} <= runs.keys():
        ratio = runs["fair"]["found"]["long_tok_s"] / runs["fcfs"]["found"]["long_tok_s"]
        print(
            f"long requests: {100 * (ratio - 1):+.1f} % of tokens a second against first come, first served"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=[*SHAPES, "embedded", "imagined"])
    parser.add_argument("--policy", choices=("fair", "fcfs"), action="append")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--longs", type=int)
    parser.add_argument("--plot", type=Path)
    parser.add_argument(
        "--option", action="append", default=[], help="NAME=VALUE for AsyncLLM(...)"
    )
    parser.add_argument(
        "--aim", action="append", default=[], help="NAME=VALUE of policy.Aims: tax=0.1, stretch=4"
    )
    parser.add_argument(
        "--into", type=Path, help=argparse.SUPPRESS
    )  # one policy's figures, for the command that asked
    args = parser.parse_args()
    load = TWO_CORES if args.shape == "embedded" else GPU
    if args.longs:
        load = Load(args.longs, load.long, load.short, load.rate)
    if args.into:
        options, aims = (
            {name: number(value) for name, value in (p.split("=", 1) for p in pairs)}
            for pairs in (args.option, args.aim)
        )
        run = asyncio.run(drive(args.shape, args.policy[0], load, args.seconds, options, aims))
        args.into.write_text(json.dumps(run))
        return
    runs = {}
    for policy in args.policy or ("fair", "fcfs"):
        with tempfile.TemporaryDirectory() as folder:
            into = Path(folder) / "run.json"
            more = [f"--option={option}" for option in args.option] + [
                f"--aim={aim}" for aim in args.aim
            ]
            more += [f"--longs={args.longs}"] if args.longs else []
            command = [
                sys.executable,
                __file__,
                args.shape,
                f"--policy={policy}",
                f"--seconds={args.seconds}",
                *more,
            ]
            subprocess.run([*command, f"--into={into}"], check=True)
            runs[policy] = json.loads(into.read_text())
        print(json.dumps(runs[policy]["found"]), flush=True)
    verdict(runs, args.shape)
    if args.plot:
        args.plot.write_text(plot(runs, next(iter(runs.values()))["found"]["solo_s"]))


if __name__ == "__main__":
    main()
