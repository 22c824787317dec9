"""Tensor and pipeline parallelism on two CPU cores: one rank, tp 2 and pp 2, one thread per rank.

    python benchmarks/parallel.py [--weights float32 int8] [--rounds 3] [--tokens 12]
                                  [--streams 16] [--layers 16]
    python benchmarks/parallel.py --messages
    python benchmarks/parallel.py --stages

The model has random weights and the shape of Llama-3.2-1B with a smaller vocabulary; --weights
names the formats to measure. Latency is the TPOT of a single stream. Throughput is that of 16
streams together. Both are measured after the prefill. All layouts are loaded at once and take
turns, so a noisy machine disturbs all of them alike. The table holds medians, and the target next
to each speedup. A second table holds the CPU time of the busiest rank: what the clock would show if
no other program used the cores and no rank ever waited for another.

--messages measures all-reduces alone, through torch and through shared memory. --stages shows where
a pipeline is split by measured layer times, and where it would be split by the bytes that are read.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bloomery.artifacts.locate import locate_model
from bloomery.config import EngineConfig
from bloomery.describe import build_engine_plan
from bloomery.engine.build import build_engine
from bloomery.engine.executor import Executor
from bloomery.engine.loop import EngineLoop
from bloomery.executors.select import select_executor
from bloomery.messages import EngineRequest, ResolvedSampling

LAYOUTS = {"one rank": (1, 1), "tp 2": (2, 1), "pp 2": (1, 2)}
TARGET_SPEEDUPS = {("tp 2", "latency"): 1.4, ("pp 2", "throughput"): 1.5}
SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32768,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
PROMPT_TOKENS = 16


class TokenTime(NamedTuple):
    """Seconds per token over all streams."""

    wall: float
    busiest_rank_cpu: float


class LoadedEngine(NamedTuple):
    loop: EngineLoop
    executor: Executor


def create_config(
    folder: Path, weights: str, num_streams: int = 16, tp: int = 1, pp: int = 1
) -> EngineConfig:
    return EngineConfig(
        str(folder),
        load_format="dummy",
        device="cpu",
        threads=1,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        max_model_len=256,
        kv_cache_gib=0.5,
        max_num_seqs=num_streams,
        policy="fcfs",
        prefix_cache=False,
        quantization="auto" if weights == "float32" else weights,
    )


def load_engine(config: EngineConfig) -> LoadedEngine:
    plan, _ = build_engine_plan(config)
    executor = select_executor(plan)
    capacity = executor.start(plan)
    return LoadedEngine(build_engine(plan, executor, capacity), executor)


def rank_cpu_seconds(executor: Executor) -> list[float]:
    """CPU seconds that every rank has used so far."""
    ranks = getattr(executor, "ranks", ())
    pids = [rank.process.pid for rank in ranks] or [os.getpid()]
    # Linux derives the id of a process's CPU clock from its pid.
    return [time.clock_gettime((~pid << 3) | 2) for pid in pids]


def measure_token_time(engine: LoadedEngine, num_streams: int, num_tokens: int) -> TokenTime:
    """Measure from the moment when all streams have their second token to the last token."""
    loop, executor = engine
    for number in range(num_streams):
        prompt = tuple((7 * i + number) % 30000 + 3 for i in range(PROMPT_TOKENS))
        sampling = ResolvedSampling(temperature=0.0)
        loop.add(EngineRequest(str(number), prompt, sampling, num_tokens + 2))
    tokens_by_stream = [0] * num_streams
    begin = 0.0
    measured_tokens = 0
    cpu_before = [0.0]
    while loop.busy:
        for output in loop.step():
            tokens_by_stream[int(output.request)] += len(output.ids)
            if begin:
                measured_tokens += len(output.ids)
        if not begin and min(tokens_by_stream) >= 2:
            begin = time.perf_counter()
            cpu_before = rank_cpu_seconds(executor)
    wall_seconds = time.perf_counter() - begin
    cpu_after = rank_cpu_seconds(executor)
    cpu_seconds = max(after - before for before, after in zip(cpu_before, cpu_after, strict=True))
    return TokenTime(wall_seconds / measured_tokens, cpu_seconds / measured_tokens)


def measure_messages(folder: Path) -> None:
    """Time all-reduces between two processes, with the sizes that steps have."""
    import torch.multiprocessing

    torch.multiprocessing.start_processes(
        run_message_rank, (str(folder / "rendezvous"),), 2, start_method="fork"
    )


def run_message_rank(rank: int, address: str) -> None:
    import torch

    from bloomery.config import bind_network_interface
    from bloomery.executors.multiprocess import LOOPBACK
    from bloomery.native.thread_pool import ThreadPool
    from bloomery.parallel.distributed import rendezvous
    from bloomery.parallel.groups import CommunicationGroup
    from bloomery.parallel.shared_memory import SharedMemoryGroup

    torch.set_num_threads(1)
    bind_network_interface(LOOPBACK)
    cpu = torch.device("cpu")
    group = rendezvous(address, rank, 2, 1, torch.float32, cpu, False, ThreadPool(1)).group
    groups: dict[str, CommunicationGroup] = {"torch": group}
    if isinstance(group, SharedMemoryGroup):
        groups = {"shared memory": group, "torch": group.fallback}
    for num_rows in (1, 16, 512):
        x = torch.zeros(num_rows, SHAPE["hidden_size"])
        for name, candidate in groups.items():
            seconds = median_seconds(lambda candidate=candidate, x=x: candidate.all_reduce(x))
            microseconds = 1e6 * seconds
            if rank == 0:
                kib = x.nbytes / 1024
                print(f"all-reduce of {kib:.0f} KiB through {name}: {microseconds:.0f} us")


def median_seconds(function: Callable[[], object], repeats: int = 200) -> float:
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        samples.append(time.perf_counter() - begin)
    return median(samples)


def show_stages(folder: Path, weights: str) -> None:
    """Print where two stages are split, by measured time and by bytes read."""
    import torch

    from bloomery.layout import split_stages
    from bloomery.models.load import load_model
    from bloomery.native.thread_pool import ThreadPool
    from bloomery.parallel.groups import DeviceMesh
    from bloomery.roofline import count_parameters
    from bloomery.runtime.pipeline_balance import measure_layer_times

    torch.set_num_threads(1)

    def print_split(model: Any, load_layers: Any) -> range:
        layer_times, head_time = measure_layer_times(model, load_layers, DeviceMesh())
        layer_sizes = [
            count_parameters(replace(model, layers=(layer,))).matrices for layer in model.layers
        ]
        head_size = model.vocab * model.hidden
        by_time = [len(stage) for stage in split_stages(layer_times, head_time, 2)]
        by_size = [len(stage) for stage in split_stages(layer_sizes, head_size, 2)]
        print(
            f"{weights}: a layer {layer_times[0] / 1e6:.2f} ms, the head {head_time / 1e6:.2f} ms; "
            f"layers of each stage: {by_time} by time, {by_size} by bytes read"
        )
        return range(1)

    load_model(
        locate_model(str(folder), weights=False),
        "dummy",
        torch.float32,
        torch.device("cpu"),
        quantize=create_config(folder, weights).quantization,
        keep_gguf_blocks=True,
        select_layers=print_split,
        pool=ThreadPool(1),
    )


def compare_layouts(folder: Path, weights: str, args: argparse.Namespace) -> None:
    engines = {
        name: load_engine(create_config(folder, weights, args.streams, tp, pp))
        for name, (tp, pp) in LAYOUTS.items()
    }
    samples: dict[tuple[str, int], list[TokenTime]] = {}
    for _ in range(args.rounds):
        for num_streams in (1, args.streams):
            for name, engine in engines.items():
                token_time = measure_token_time(engine, num_streams, args.tokens)
                samples.setdefault((name, num_streams), []).append(token_time)
                print(
                    f"{name}, {num_streams} streams: {1e3 * token_time.wall:.1f} ms, "
                    f"CPU {1e3 * token_time.busiest_rank_cpu:.1f} ms per token",
                    flush=True,
                )
    for engine in engines.values():
        engine.executor.close()
    wall = {}
    cpu = {}
    for key, token_times in samples.items():
        wall[key] = median(token_time.wall for token_time in token_times)
        cpu[key] = median(token_time.busiest_rank_cpu for token_time in token_times)
    print_table(f"{weights}, by the clock", wall, args.streams)
    print_table(f"{weights}, CPU time of the busiest rank", cpu, args.streams)


def print_table(title: str, seconds: dict[tuple[str, int], float], num_streams: int) -> None:
    """Print a table; `seconds` per token is by layout and number of streams."""
    print(
        f"\n| {title} | 1 stream, ms per token | speedup "
        f"| {num_streams} streams, tokens/s | speedup |\n|---|---|---|---|---|"
    )

    def format_speedup(name: str, kind: str, count: int) -> str:
        speedup = seconds["one rank", count] / seconds[name, count]
        target = TARGET_SPEEDUPS.get((name, kind))
        if target is None:
            return f"{speedup:.2f}"
        return f"{speedup:.2f} (target {target})"

    for name in LAYOUTS:
        milliseconds = 1000 * seconds[name, 1]
        tokens_per_second = 1 / seconds[name, num_streams]
        latency = format_speedup(name, "latency", 1)
        throughput = format_speedup(name, "throughput", num_streams)
        print(
            f"| {name} | {milliseconds:.0f} | {latency} | {tokens_per_second:.1f} | {throughput} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", nargs="+", default=["float32", "int8"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--messages", action="store_true")
    parser.add_argument("--stages", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        model_config = SHAPE | {"num_hidden_layers": args.layers}
        (folder / "config.json").write_text(json.dumps(model_config))
        if args.messages:
            measure_messages(folder)
            return
        for weights in args.weights:
            if args.stages:
                show_stages(folder, weights)
            else:
                compare_layouts(folder, weights, args)


if __name__ == "__main__":
    main()
