"""Running streams while long prompts arrive: does anybody's next token wait for a stranger's prompt?

    PYTHONPATH=src python3 benchmarks/long_prompts.py llama-8b        # a GPU: 64 streams, prompts of 8,000 tokens
    PYTHONPATH=src python3 benchmarks/long_prompts.py embedded        # two cores: 4 streams, prompts of 600

Streams run in a closed loop; once they flow, long prompts (16 tokens out) arrive one after the other. Prints the time
between two tokens of the streams without and with prompts arriving, the target, and the prompts' own first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path

from mixed_latency import percentile
from offline import SHAPES, number


async def drive(args: argparse.Namespace) -> dict:
    from bloomery import AsyncLLM, SamplingParams

    options = {name: number(value) for name, value in (pair.split("=", 1) for pair in args.option)}
    small = args.shape == "embedded"
    model = None
    if not small:
        folder = Path(tempfile.mkdtemp()) / args.shape
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        model = str(folder)
        options = {"load_format": "dummy", "max_model_len": 16384, **options}
    engine = AsyncLLM(
        model, skip_tokenizer_init=True, enable_prefix_caching=False, policy=args.policy, **options
    )
    chance = random.Random(1)
    vocab = engine.front.stack.capacity.vocab
    streams, prompt = (4, 600) if small else (64, 8000)
    phases: dict[str, list[float]] = {"before": [], "during": []}
    phase = "warming"
    stop = False

    async def one(length: int, out: int, watched: bool) -> float:
        ids = [chance.randrange(10, vocab - 10) for _ in range(length)]
        params = SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True, detokenize=False)
        begun = last = time.perf_counter()
        first = 0.0
        async for _ in engine.stream({"prompt_token_ids": ids}, params):
            now = time.perf_counter()
            if not first:
                first = now - begun
            elif watched and phase in phases:
                phases[phase].append(now - last)
            last = now
        return first

    async def stream() -> None:
        while not stop:
            await one(64, 256, True)

    tasks = [asyncio.create_task(stream()) for _ in range(streams)]
    await asyncio.sleep(args.seconds / 2)
    phase = "before"
    await asyncio.sleep(args.seconds)
    phase = "during"
    firsts = []
    begun = time.perf_counter()
    while time.perf_counter() < begun + args.seconds:
        firsts.append(await one(prompt, 16, False))
    phase = "after"
    stop = True
    policy = engine.front.stack.loop.scheduler.policy
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    found = {
        "shape": args.shape,
        "policy": args.policy,
        "streams": streams,
        "prompt": prompt,
        "prompts": len(firsts),
    }
    for name, gaps in phases.items():
        found[name] = {
            f"p{share}": round(1e3 * percentile(gaps, share / 100), 2) for share in (50, 90, 99)
        }
    if args.policy == "fair":
        found["target"] = round(1e3 * policy.aims.target(policy.pace.lone), 2)
        found["times_target_p99"] = round(found["during"]["p99"] / found["target"], 2)
    found["prompt_first_token_s"] = round(percentile(firsts, 0.5), 3)
    engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=[*SHAPES, "embedded"])
    parser.add_argument("--policy", choices=("fair", "fcfs"), default="fair")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase")
    parser.add_argument(
        "--option", action="append", default=[], help="NAME=VALUE for AsyncLLM(...)"
    )
    print(json.dumps(asyncio.run(drive(parser.parse_args()))), flush=True)


if __name__ == "__main__":
    main()
