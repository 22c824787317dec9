"""The simulator beside the engine it imitates: one trace in real time through the offline API, then in virtual time.

    PYTHONPATH=src python3 benchmarks/simulate_check.py llama-8b --gpu h200 mixed:256 poisson:12
    PYTHONPATH=src python3 benchmarks/simulate_check.py embedded poisson:1 --lengths 32:16 -n 20 --threads 1

First steps of many sizes are measured and the simulator is calibrated on them; then each trace is served by the same
engine; then it is simulated. mixed:N is N clients in a closed loop (2,000 in, 512 out, three requests for every two of
them) and short requests (32 in, 16 out) at 5 a second. To reach: throughput within 10 %, p99 of the time to first token
within 20 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path

from bloomery import AsyncLLM, SamplingParams
from bloomery.tools.bench import load
from bloomery.tools.bench.load import Arrival
from bloomery.tools.bench.summary import Record, Targets, summarise, table
from bloomery.config import Config
from bloomery.describe import device
from bloomery.engine.policy import FcfsPolicy, policy_for
from bloomery.machines import here
from bloomery.tools.plan.forecast import Layout, Placed
from bloomery.tools.plan.subject import subject
from bloomery.tools.profile import recorded
from bloomery.roofline import PRECISIONS, machine
from bloomery.tools.simulate import Fleet, Measured, calibrate

SHAPES = Path(__file__).parent / "shapes"


def trace_of(name: str, args: argparse.Namespace) -> list[Arrival]:
    kind, _, number = name.partition(":")
    if kind != "mixed":
        return load.pattern(name, args.requests, load.lengths(args.lengths), 1)
    clients = int(number)
    long = load.pattern(f"closed:{clients}", 3 * clients // 2, load.lengths("2000:512"), 1)
    return long + load.pattern("poisson:5", 150, load.lengths("32:16"), 2)


async def served(llm: AsyncLLM, arrivals: list[Arrival], vocab: int) -> list[Record]:
    """The trace in real time: open arrivals at their moment, a session's requests one after another."""
    chance = random.Random(3)
    records = [Record(0.0, arrival.prompt) for arrival in arrivals]
    lines: dict[str, list[int]] = {}
    for i, arrival in enumerate(arrivals):
        lines.setdefault(arrival.session or f" {i}", []).append(i)
    begun = time.perf_counter()

    async def line(members: list[int]) -> None:
        for i in members:
            arrival = arrivals[i]
            record = records[i]
            if arrival.arrival is not None:
                await asyncio.sleep(begun + arrival.arrival - time.perf_counter())
            ids = [chance.randrange(10, vocab - 10) for _ in range(arrival.prompt)]
            params = SamplingParams(
                temperature=0.0, max_tokens=arrival.output, ignore_eos=True, detokenize=False
            )
            record.sent = time.perf_counter()
            async for piece in llm.stream({"prompt_token_ids": ids}, params):
                record.stamps.append(time.perf_counter())
                record.tokens += len(piece.token_ids)
            record.done = time.perf_counter()

    await asyncio.gather(*(line(members) for members in lines.values()))
    return records


def calibration_steps(engine: AsyncLLM) -> list[Measured]:
    """Steps of the engine while nobody asks: its own thread waits meanwhile. A fair policy would cut them."""
    stack = engine.front.stack
    scheduler = stack.loop.scheduler
    scheduler.policy = FcfsPolicy()
    steps = [Measured(**row) for row in recorded(stack.loop, stack.capacity)]
    scheduler.policy = policy_for(stack.plan, stack.capacity)
    return steps


async def real(engine: AsyncLLM, traces: list[list[Arrival]]) -> list[list[Record]]:
    vocab = engine.front.stack.capacity.vocab
    await served(engine, [Arrival(0.0, 32, 8)] * 4, vocab)  # warm
    return [await served(engine, arrivals, vocab) for arrivals in traces]


def compare(name: str, records: list[Record], virtual: list[Record]) -> None:
    results = {
        "measured": summarise(records, Targets()),
        "simulated": summarise(virtual, Targets()),
    }
    speed = [results[kind]["tokens_per_second"] for kind in results]
    first = [results[kind]["first_token_ms"]["p99"] for kind in results]
    print(f"\n{name}\n{table(results)}")
    print(
        f"throughput {speed[1] / speed[0] - 1:+.1%}, first token p99 {first[1] / first[0] - 1:+.1%}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", help="a file of benchmarks/shapes, or embedded")
    parser.add_argument("traces", nargs="+", help="mixed:N, or a pattern of `bloomery bench`")
    parser.add_argument(
        "--gpu", help="the row of the table this GPU is; default: what the driver says"
    )
    parser.add_argument("--lengths", default="sharegpt")
    parser.add_argument("-n", "--requests", type=int, default=300)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    options: dict = {
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "threads": args.threads,
    }
    if args.shape == "embedded":
        name = None
    else:
        folder = Path(tempfile.mkdtemp()) / args.shape
        folder.mkdir()
        (folder / "config.json").write_bytes((SHAPES / f"{args.shape}.json").read_bytes())
        name = str(folder)
        options = options | {"load_format": "dummy"}
    traces = [trace_of(trace, args) for trace in args.traces]
    engine = AsyncLLM(name, **options)
    steps = calibration_steps(engine)
    measured = asyncio.run(real(engine, traces))
    engine.close()
    about = subject(name)
    found = machine(args.gpu) if args.gpu else here(device("auto"))
    precision = PRECISIONS["fp32"] if found.cpu and about.stored.bits == 16 else about.stored
    placed = Placed(about.model, found, precision, 32 if found.cpu else 16, Layout())
    placed.roofline.calibration = calibrate(placed.roofline, steps)
    print(json.dumps({"calibration": str(placed.roofline.calibration), "steps": len(steps)}))
    for trace, arrivals, records in zip(args.traces, traces, measured, strict=True):
        compare(trace, records, Fleet(placed, Config(prefix_cache=False)).run(arrivals))


if __name__ == "__main__":
    main()
