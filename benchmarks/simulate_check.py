"""Compares the simulator with the engine: the same traces in real time and in virtual time.

    PYTHONPATH=src python3 benchmarks/simulate_check.py llama-8b --gpu h200 mixed:256 poisson:12
    PYTHONPATH=src python3 benchmarks/simulate_check.py embedded poisson:1 --lengths 32:16 -n 20

First the engine (AsyncLLM) serves each trace in real time. Then this process measures steps of many
sizes and calibrates the simulator on them. Then each trace is simulated. The trace mixed:N has N
clients in a closed loop (2,000 prompt tokens, 512 output tokens, 1.5 N requests in all) and short
requests (32 prompt tokens, 16 output tokens) at 5 per second. Targets: throughput within 10 %, p99
of the TTFT within 20 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from bloomery import LLM, AsyncLLM, SamplingParams
from bloomery.config import EngineConfig, resolve_device
from bloomery.hardware import detect_hardware, find_hardware
from bloomery.roofline import PRECISIONS
from bloomery.tools.bench.summary import (
    GoodputTargets,
    RequestRecord,
    format_table,
    summarize_records,
)
from bloomery.tools.bench.workload import RequestArrival, generate_arrivals, parse_lengths
from bloomery.tools.plan.estimate import DeviceLayout, PlacedModel
from bloomery.tools.plan.model_source import read_model_source
from bloomery.tools.profile import measure_steps
from bloomery.tools.simulate import MeasuredStep, SimulatedFleet, calibrate

SHAPES = Path(__file__).parent / "shapes"


def create_trace(pattern: str, args: argparse.Namespace) -> list[RequestArrival]:
    """Create the arrivals of mixed:N, or of a pattern of `bloomery bench`."""
    kind, _, number = pattern.partition(":")
    if kind != "mixed":
        return generate_arrivals(pattern, args.requests, parse_lengths(args.lengths), 1)
    clients = int(number)
    closed_loop = f"closed:{clients}"
    long = generate_arrivals(closed_loop, 3 * clients // 2, parse_lengths("2000:512"), 1)
    short = generate_arrivals("poisson:5", 150, parse_lengths("32:16"), 2)
    return long + short


async def serve_trace(
    llm: AsyncLLM, arrivals: list[RequestArrival], vocab: int
) -> list[RequestRecord]:
    """Serve a trace in real time. The requests of a session follow each other."""
    rng = random.Random(3)
    records = [RequestRecord(0.0, arrival.prompt) for arrival in arrivals]
    sessions: dict[str, list[int]] = {}
    for index, arrival in enumerate(arrivals):
        sessions.setdefault(arrival.session or f" {index}", []).append(index)
    begin = time.perf_counter()

    async def serve_request(arrival: RequestArrival, record: RequestRecord) -> None:
        if arrival.arrival is not None:
            await asyncio.sleep(begin + arrival.arrival - time.perf_counter())
        prompt = [rng.randrange(10, vocab - 10) for _ in range(arrival.prompt)]
        params = SamplingParams(
            temperature=0.0, max_tokens=arrival.output, ignore_eos=True, detokenize=False
        )
        record.sent = time.perf_counter()
        async for piece in llm.stream({"prompt_token_ids": prompt}, params):
            record.piece_times.append(time.perf_counter())
            record.output_tokens += len(piece.token_ids)
        record.done = time.perf_counter()

    async def serve_session(indices: list[int]) -> None:
        for index in indices:
            await serve_request(arrivals[index], records[index])

    await asyncio.gather(*(serve_session(indices) for indices in sessions.values()))
    return records


def measure_engine_steps(model: str | None, options: dict[str, Any]) -> list[MeasuredStep]:
    """Measure steps of many sizes in this process.

    LLM uses the fcfs policy. The fair policy would split the steps.
    """
    llm = LLM(model, **options)
    steps = [MeasuredStep(**row) for row in measure_steps(llm.loop, llm.capacity)]
    llm.close()
    return steps


async def serve_traces(
    engine: AsyncLLM, traces: list[list[RequestArrival]]
) -> list[list[RequestRecord]]:
    """Serve the traces one after the other, after a warm-up."""
    vocab = engine.capacity.vocab
    await serve_trace(engine, [RequestArrival(0.0, 32, 8)] * 4, vocab)
    return [await serve_trace(engine, arrivals, vocab) for arrivals in traces]


def print_comparison(
    name: str, measured: list[RequestRecord], simulated: list[RequestRecord]
) -> None:
    results = {
        "measured": summarize_records(measured, GoodputTargets()),
        "simulated": summarize_records(simulated, GoodputTargets()),
    }
    measured_speed, simulated_speed = [result["tokens_per_second"] for result in results.values()]
    measured_ttft, simulated_ttft = [result["ttft_ms"]["p99"] for result in results.values()]
    print(f"\n{name}\n{format_table(results)}")
    print(
        f"throughput {simulated_speed / measured_speed - 1:+.1%}, "
        f"TTFT p99 {simulated_ttft / measured_ttft - 1:+.1%}",
        flush=True,
    )


def place_model(model: str | None, gpu: str | None) -> PlacedModel:
    """Place the model on this machine, or on the GPU of the given name."""
    source = read_model_source(model)
    hardware = find_hardware(gpu) if gpu else detect_hardware(resolve_device("auto"))
    precision = source.stored
    kv_bits = 16
    if hardware.is_cpu:
        kv_bits = 32
        if precision.bits == 16:
            precision = PRECISIONS["fp32"]
    return PlacedModel(source.model, hardware, precision, kv_bits, DeviceLayout())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", help="a file of benchmarks/shapes, or embedded")
    parser.add_argument("traces", nargs="+", help="mixed:N, or a pattern of `bloomery bench`")
    parser.add_argument("--gpu", help="name in the hardware table (default: detected)")
    parser.add_argument("--lengths", default="sharegpt", help="as for `bloomery bench`")
    parser.add_argument("-n", "--requests", type=int, default=300, help="requests of a trace")
    parser.add_argument("--threads", type=int, help="CPU threads of the engine")
    args = parser.parse_args()
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "threads": args.threads,
    }
    model = None
    if args.shape != "embedded":
        folder = Path(tempfile.mkdtemp()) / args.shape
        folder.mkdir()
        (folder / "config.json").write_bytes((SHAPES / f"{args.shape}.json").read_bytes())
        model = str(folder)
        options["load_format"] = "dummy"
    traces = [create_trace(pattern, args) for pattern in args.traces]
    engine = AsyncLLM(model, **options)
    measured = asyncio.run(serve_traces(engine, traces))
    engine.close()
    steps = measure_engine_steps(model, options)
    placed = place_model(model, args.gpu)
    placed.roofline.calibration = calibrate(placed.roofline, steps)
    print(json.dumps({"calibration": str(placed.roofline.calibration), "steps": len(steps)}))
    for pattern, arrivals, records in zip(args.traces, traces, measured, strict=True):
        fleet = SimulatedFleet(placed, EngineConfig(prefix_cache=False))
        print_comparison(pattern, records, fleet.run(arrivals))


if __name__ == "__main__":
    main()
