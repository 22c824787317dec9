"""Shows where the time of a decode step goes on one GPU: every kernel of the captured CUDA graph.

    PYTHONPATH=src:. python3 benchmarks/step_profile.py gpt-oss-20b 1:32 64:128 --layers 6

Each workload is ROWS:CONTEXT, a batch of random prompts of that length that is then decoded. The
weights are random and of the shape's sizes (benchmarks/offline.py). --layers N keeps the first N
layers, which shortens the start; a layer's kernels do not depend on it. With --adapters N the rows
have N random LoRA adapters in turn (of rank 16 on all projections; Llama shapes).

The kernels of one replay of the step's graph are recorded by torch's profiler and averaged over
replays. Launches of the same kernel with the same grid are one line of the table:

    calls   launches per step
    us      time of one launch, from its start to its end
    adds    what one launch adds to the step: from the latest end before it to its own end. Kernels
            overlap (programmatic dependent launch), so this is what the step would save without it.
    step    what all of them add to one step, and the share of the step

Below it are the bytes that the parts of a step have to read, at the rate of a large copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.offline import SHAPES, create_engine, measure_experts, parse_value

PROFILED_TOKENS = 24  # tokens of each request while the profiler records
TIMED_TOKENS = 128  # tokens of each request for the time without the profiler
MIN_GRAPH_KERNELS = 8  # a launch with fewer kernels is not a step's graph


class KernelRun(NamedTuple):
    """One kernel of a replay. Times are in microseconds."""

    name: str
    grid: tuple[int, ...]
    threads: int
    registers: int
    start: float
    end: float


class KernelCost(NamedTuple):
    """What launches of one kernel with one grid cost a step."""

    calls: int
    duration: float  # of one launch
    added: float  # by one launch to the step
    first: KernelRun


def read_replays(trace: Path) -> list[list[KernelRun]]:
    """The kernels of each graph launch of a trace, in order, of the kind that is most frequent."""
    by_launch: dict[int, list[KernelRun]] = defaultdict(list)
    for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]:
        if event.get("cat") != "kernel":
            continue
        details = event["args"]
        threads = 1
        for width in details["block"]:
            threads *= width
        run = KernelRun(
            event["name"],
            tuple(details["grid"]),
            threads,
            details["registers per thread"],
            event["ts"],
            event["ts"] + event["dur"],
        )
        by_launch[details["correlation"]].append(run)
    replays = defaultdict(list)
    for runs in by_launch.values():
        runs.sort(key=lambda run: run.start)
        if len(runs) >= MIN_GRAPH_KERNELS:
            replays[len(runs)].append(runs)
    if not replays:
        raise SystemExit("the profiler recorded no kernels of a CUDA graph")
    return max(replays.values(), key=lambda same: len(same) * len(same[0]))


def summarize(replays: list[list[KernelRun]]) -> list[KernelCost]:
    """Average the launches of each kernel over the replays, in the order of their first launch."""
    durations: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    added: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    first: dict[tuple[Any, ...], KernelRun] = {}
    for runs in replays:
        latest_end = runs[0].start
        for run in runs:
            key = (run.name, run.grid, run.threads)
            first.setdefault(key, run)
            durations[key].append(run.end - run.start)
            added[key].append(max(0.0, run.end - latest_end))
            latest_end = max(latest_end, run.end)
    return [
        KernelCost(
            round(len(durations[key]) / len(replays)),
            statistics.fmean(durations[key]),
            statistics.fmean(added[key]),
            run,
        )
        for key, run in first.items()
    ]


def print_costs(costs: list[KernelCost], replays: list[list[KernelRun]]) -> None:
    """Print the table."""
    spans = [runs[-1].end - runs[0].start for runs in replays]
    total = statistics.median(spans)
    print(
        f"{'kernel':44}{'grid':>16}{'thr':>5}{'regs':>5}{'calls':>6}{'us':>8}{'adds':>8}{'step':>9}"
    )
    for calls, duration, added, run in costs:
        grid = "x".join(map(str, run.grid))
        name = run.name.replace("void ", "")[:43]
        print(
            f"{name:44}{grid:>16}{run.threads:5d}{run.registers:5d}{calls:6d}{duration:8.2f}"
            f"{added:8.2f}{calls * added:9.1f} {calls * added / total:6.1%}"
        )
    num_kernels = len(replays[0])
    print(
        f"one replay: {total:.1f} us, {num_kernels} kernels, median of {len(replays)}", flush=True
    )


def print_floors(llm: Any, rows: int, context: int) -> None:
    """Print the bytes that the parts of a step read, and their time at the rate of a copy."""
    from benchmarks.kernels import HBM_BYTES_PER_SECOND
    from bloomery.roofline import kv_bytes
    from bloomery.spec import state_parts

    decoder = llm.executor.worker.decoder
    expert_bytes, used_share = measure_experts(decoder)
    read_share = 1 - (1 - used_share) ** rows
    attention_blocks = [layer.attention for layer in decoder.layers if layer.attention]
    recurrent_blocks = [layer.recurrent for layer in decoder.layers if layer.recurrent]
    state_values = sum(
        part.rows * part.width for spec in decoder.spec.recurrents for part in state_parts(spec)
    )
    parts = {
        "qkv": sum(block.qkv.matrix.nbytes for block in attention_blocks),
        "o": sum(block.out.matrix.nbytes for block in attention_blocks),
        "recurrent in": sum(block.project_in.matrix.nbytes for block in recurrent_blocks),
        "recurrent out": sum(block.project_out.matrix.nbytes for block in recurrent_blocks),
        "states": 8 * rows * state_values,
        "experts": round(expert_bytes * read_share),
        "kv cache": rows * kv_bytes(decoder.spec, context),
    }
    dense = [layer.mlp for layer in decoder.layers if hasattr(layer.mlp, "up")]
    parts["mlp"] = sum(mlp.up.matrix.nbytes + mlp.down.matrix.nbytes for mlp in dense)
    parts["head"] = decoder.head.linear.matrix.nbytes
    shown = [
        f"{name} {nbytes / 1e6:.0f} MB {nbytes / HBM_BYTES_PER_SECOND * 1e6:.1f} us"
        for name, nbytes in parts.items()
        if nbytes
    ]
    print(f"floors: {', '.join(shown)}", flush=True)


def generate(
    llm: Any, rows: int, context: int, num_tokens: int, adapters: Sequence[Any] = ()
) -> float:
    """Decode random prompts, which have these adapters in turn, and return the seconds."""
    from bloomery import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
    )
    prompts = [
        {"prompt_token_ids": [11 + (7919 * i + 31 * j) % 30000 for j in range(context)]}
        for i in range(rows)
    ]
    chosen = [adapters[i % len(adapters)] for i in range(rows)] if adapters else None
    start = time.perf_counter()
    llm.generate(prompts, [params] * rows, use_tqdm=False, lora_request=chosen)
    return time.perf_counter() - start


def profile_rows(
    llm: Any, rows: int, context: int, folder: Path, adapters: Sequence[Any] = ()
) -> None:
    """Print the table of one workload."""
    from torch.profiler import ProfilerActivity, profile

    generate(llm, rows, context, 4, adapters)
    short = generate(llm, rows, context, 8, adapters)
    long = generate(llm, rows, context, 8 + TIMED_TOKENS, adapters)
    milliseconds = (long - short) / TIMED_TOKENS * 1e3
    print(f"\n{rows} rows behind {context} tokens: {milliseconds:.3f} ms a step")
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        generate(llm, rows, context, PROFILED_TOKENS, adapters)
    trace = folder / f"{rows}.json"
    recorded.export_chrome_trace(str(trace))
    replays = read_replays(trace)
    print_costs(summarize(replays), replays)
    print_floors(llm, rows, context + PROFILED_TOKENS)


def keep_layers(config: dict[str, Any], layers_key: str, num_layers: int) -> dict[str, Any]:
    """Shorten a config to its first layers, with everything that it lists per layer."""
    all_layers = config[layers_key]
    shortened = {
        key: value[:num_layers] if isinstance(value, list) and len(value) == all_layers else value
        for key, value in config.items()
    }
    return {**shortened, layers_key: num_layers}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("work", nargs="+", help="ROWS:CONTEXT")
    parser.add_argument("--layers", type=int, help="keep the first layers only")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--adapters", type=int, default=0, metavar="N")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE for LLM(...)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    config = dict(SHAPES[args.shape])
    layers_key = "n_layer" if "n_layer" in config else "num_hidden_layers"
    if args.layers is not None:
        config = keep_layers(config, layers_key, args.layers)
    (folder / "config.json").write_text(json.dumps(config))
    options: dict[str, Any] = {"quantization": args.quantization}
    for pair in args.option:
        name, _, value = pair.partition("=")
        options[name] = parse_value(value)
    adapters: list[Any] = []
    if args.adapters:
        from benchmarks.lora import write_adapter
        from bloomery import LoRARequest

        path = write_adapter(args.shape, folder / "adapter", layers=config[layers_key])
        options |= {"enable_lora": True, "max_loras": args.adapters}
        adapters = [LoRARequest(f"adapter {i}", i + 1, str(path)) for i in range(args.adapters)]
    start = time.perf_counter()
    llm = create_engine("bloomery", folder, options)
    seconds = time.perf_counter() - start
    print(
        f"{args.shape}, {config[layers_key]} layers, {args.quantization}: ready in {seconds:.1f} s"
    )
    for work in args.work:
        rows, context = map(int, work.split(":"))
        profile_rows(llm, rows, context, folder, adapters)


if __name__ == "__main__":
    main()
