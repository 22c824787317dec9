"""ITL of decode streams while long prompts arrive: does chunked prefill keep it near the target?

    PYTHONPATH=src python3 benchmarks/long_prompts.py llama-8b   # a GPU: 64 streams, 8,000 tokens
    PYTHONPATH=src python3 benchmarks/long_prompts.py embedded   # two CPU cores: 4 streams, 600

First one stream runs alone. The target ITL is derived from its batch-1 steps. Then streams run in a
closed loop. Once they all decode, long prompts (16 output tokens) arrive one after the other. The
script prints the ITL of the streams before and while prompts arrive, the target ITL, and the TTFT
of the prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from mixed_latency import parse_pairs
from offline import SHAPES

from bloomery import AsyncLLM, SamplingParams
from bloomery.engine.chunk_planner import LatencyTargets
from tests.engine.virtual_device import percentile


class PromptLoad(NamedTuple):
    """The number of decode streams, and the length of the long prompts."""

    num_streams: int
    prompt_tokens: int


GPU_LOAD = PromptLoad(64, 8000)
CPU_LOAD = PromptLoad(4, 600)


def create_engine(args: argparse.Namespace) -> AsyncLLM:
    """Create an engine with random weights of a shape, or with the embedded model."""
    options = parse_pairs(args.option)
    model = None
    if args.shape != "embedded":
        folder = Path(tempfile.mkdtemp()) / args.shape
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        model = str(folder)
        options = {"load_format": "dummy", "max_model_len": 16384, **options}
    return AsyncLLM(
        model, skip_tokenizer_init=True, enable_prefix_caching=False, policy=args.policy, **options
    )


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all phases and return the figures."""
    engine = create_engine(args)
    load = CPU_LOAD if args.shape == "embedded" else GPU_LOAD
    rng = random.Random(1)
    vocab = engine.capacity.vocab
    itls: dict[str, list[float]] = {"alone": [], "before": [], "during": []}
    phase = "warm-up"

    async def request(num_prompt: int, num_output: int, is_stream: bool) -> float:
        """Send one request and return its TTFT."""
        prompt = [rng.randrange(10, vocab - 10) for _ in range(num_prompt)]
        params = SamplingParams(
            temperature=0.0, max_tokens=num_output, ignore_eos=True, detokenize=False
        )
        begin = time.perf_counter()
        last = begin
        ttft = 0.0
        async for _ in engine.stream({"prompt_token_ids": prompt}, params):
            now = time.perf_counter()
            if not ttft:
                ttft = now - begin
            elif is_stream and phase in itls:
                itls[phase].append(now - last)
            last = now
        return ttft

    async def repeat_stream() -> None:
        while phase != "after":
            await request(64, 256, True)

    await request(64, 32, True)
    phase = "alone"
    await request(64, 128, True)
    phase = "warm-up"
    tasks = [asyncio.create_task(repeat_stream()) for _ in range(load.num_streams)]
    await asyncio.sleep(args.seconds / 2)
    phase = "before"
    await asyncio.sleep(args.seconds)
    phase = "during"
    prompt_ttfts = []
    end = time.perf_counter() + args.seconds
    while time.perf_counter() < end:
        prompt_ttfts.append(await request(load.prompt_tokens, 16, False))
    phase = "after"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    figures: dict[str, Any] = {
        "shape": args.shape,
        "policy": args.policy,
        "streams": load.num_streams,
        "prompt_tokens": load.prompt_tokens,
        "prompts": len(prompt_ttfts),
    }
    for name, values in itls.items():
        figures[f"itl_ms_{name}"] = {
            f"p{percent}": round(1e3 * percentile(values, percent / 100), 2)
            for percent in (50, 90, 99)
        }
    if args.policy == "fair":
        targets = LatencyTargets(inter_token_seconds=engine.plan.target_inter_token_seconds)
        target_ms = 1e3 * targets.compute_inter_token_target(percentile(itls["alone"], 0.5))
        figures["target_itl_ms"] = round(target_ms, 2)
        figures["itl_p99_over_target"] = round(figures["itl_ms_during"]["p99"] / target_ms, 2)
    figures["prompt_ttft_s"] = round(percentile(prompt_ttfts, 0.5), 3)
    engine.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=[*SHAPES, "embedded"])
    parser.add_argument("--policy", choices=("fair", "fcfs"), default="fair")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each phase")
    parser.add_argument(
        "--option", action="append", default=[], help="NAME=VALUE for AsyncLLM(...)"
    )
    print(json.dumps(asyncio.run(measure(parser.parse_args()))), flush=True)


if __name__ == "__main__":
    main()
