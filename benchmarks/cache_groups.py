"""How many users with a long context fit, before and after cache groups, and the random engines.

    PYTHONPATH=src python3 benchmarks/cache_groups.py              # users at 32,000 tokens
    PYTHONPATH=src python3 benchmarks/cache_groups.py --simulate   # the same in a simulated server
    PYTHONPATH=src:. python3 benchmarks/cache_groups.py --engines 10000   # random engines
    PYTHONPATH=src:. python3 benchmarks/cache_groups.py --chats   # reuse with recurrent states
    PYTHONPATH=src:. python3 benchmarks/cache_groups.py --chats --http   # the same in a real server

"before" keeps every position of every layer, as an engine without cache groups does. "after" gives
back the blocks that have left a sliding window. The figures are those of `bloomery plan`. With
--simulate the real scheduler serves more such users than fit on a simulated device, and the table
shows how many ran at once and how many preemptions there were. Targets: 3x for Gemma-3-27B and
1.8x for gpt-oss-120b.

With --chats a simulated Qwen3.6-35B-A3B serves 200 chats (benchmarks/chat_trace.py). Targets: it
reuses 95 % of the tokens that an unlimited cache would with 8 GB, 86 % with 4 and 70 % with 2.
With --chats-per-prompt 3 every three chats have a system prompt of their own. With --http a real
server with a tiny model of random weights gets the chats (benchmarks/chat_server.py). It should
reuse as much.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bloomery.config import EngineConfig
from bloomery.hardware import find_hardware
from bloomery.roofline import PRECISIONS
from bloomery.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec, RopeSpec
from bloomery.tools.bench.workload import RequestArrival
from bloomery.tools.plan.estimate import DeviceLayout, PlacedModel
from bloomery.tools.plan.model_source import read_model_source
from bloomery.tools.simulate import SimulatedFleet

SHAPES = Path(__file__).parent / "shapes"
OUTPUT_TOKENS = 256  # of a simulated user


def read_gemma_3_27b() -> ModelSpec:
    return read_model_source(str(SHAPES / "gemma-3-27b.json")).model


def build_gpt_oss_120b() -> ModelSpec:
    """36 layers, a window of 128 in every other one, 128 experts of which a token uses 4."""
    layers = []
    for index in range(36):
        window = 128 if index % 2 == 0 else None
        attention = AttentionSpec(64, 8, 64, RopeSpec(64, 150000.0), bias=True, window=window)
        experts = MoeSpec(128, 4, MlpSpec(2880, bias=True))
        layers.append(LayerSpec(attention, experts, NormSpec(), mlp_norm=NormSpec()))
    return ModelSpec(201088, 2880, tuple(layers), NormSpec(), context=131072)


# Name -> how to build the model, and the precision of its weights.
MODELS: dict[str, tuple[Callable[[], ModelSpec], str]] = {
    "gemma-3-27b": (read_gemma_3_27b, "bf16"),
    "gpt-oss-120b": (build_gpt_oss_120b, "int4"),
}


def without_windows(model: ModelSpec) -> ModelSpec:
    """The model as an engine sees it that never gives a block back before the end."""
    layers = [
        replace(layer, attention=replace(layer.attention, window=None)) for layer in model.layers
    ]
    return replace(model, layers=tuple(layers))


def place(model: ModelSpec, precision: str, gpu: str) -> PlacedModel:
    return PlacedModel(model, find_hardware(gpu), PRECISIONS[precision], 16, DeviceLayout())


def simulate_users(placed: PlacedModel, context: int, num_users: int) -> tuple[int, int]:
    """Serve `num_users` at once; returns the most that ran together, and the preemptions."""
    config = EngineConfig(max_num_seqs=num_users, prefix_cache=False, policy="fcfs")
    fleet = SimulatedFleet(placed, config)
    prompt = context - OUTPUT_TOKENS
    arrivals = [RequestArrival(0.0, prompt, OUTPUT_TOKENS) for _ in range(num_users)]
    (replica,) = fleet.replicas
    scheduler = replica.scheduler
    most_running = 0
    schedule = scheduler.schedule

    def observe(now: float = 0.0) -> object:
        nonlocal most_running
        step = schedule(now)
        decoding = [s for s in scheduler.running.values() if s.num_computed >= prompt]
        most_running = max(most_running, len(decoding))
        return step

    scheduler.schedule = observe  # type: ignore[method-assign, assignment]
    fleet.run(arrivals)
    return most_running, scheduler.num_preemptions


def report_users(args: argparse.Namespace) -> None:
    context = args.context
    print(f"Users at {context:,} tokens on one {args.gpu}, KV cache in 16 bits\n")
    header = "| model | weights | layers: window | KV cache | before | after | gain |"
    print(header)
    print("|---" * (header.count("|") - 1) + "|")
    placed_models = {}
    for name, (build, precision) in MODELS.items():
        model = build()
        after = place(model, precision, args.gpu)
        before = place(without_windows(model), precision, args.gpu)
        placed_models[name] = before, after
        kinds = ", ".join(
            f"{group.num_layers}: {group.window or 'none'} ({group.num_tables} tables)"
            for group in after.cache_layout.groups
        )
        num_before = before.max_batch_size(context)
        num_after = after.max_batch_size(context)
        print(
            f"| {name} | {precision} | {kinds} | {after.free_kv_bytes / 1e9:.1f} GB "
            f"| {num_before} | {num_after} | {num_after / num_before:.2f}x |"
        )
    if not args.simulate:
        return
    print("\nIn a simulated server: users that decode at once (preemptions)\n")
    print("| model | before | after | gain |\n|---|---|---|---|")
    for name, pair in placed_models.items():
        results = [
            simulate_users(placed, context, int(1.2 * placed.max_batch_size(context)) + 2)
            for placed in pair
        ]
        (before_users, before_losses), (after_users, after_losses) = results
        print(
            f"| {name} | {before_users} ({before_losses}) | {after_users} ({after_losses}) "
            f"| {after_users / before_users:.2f}x |"
        )


def run_engines(first_seed: int, num_engines: int) -> None:
    """Try random engines with a fake model; raises where one answers wrongly or leaks a block."""
    from tests.engine.random_engine import RandomEngine

    events: Counter[str] = Counter()
    start = time.perf_counter()
    for seed in range(first_seed, first_seed + num_engines):
        try:
            events += RandomEngine(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    seconds = time.perf_counter() - start
    print(f"{num_engines:,} engines in {seconds:.0f} s: every token right, no block lost")
    for event, count in sorted(events.items()):
        print(f"  {event:30} {count:>10,}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, default=32_000)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--engines", type=int, default=0)
    parser.add_argument("--first-engine", type=int, default=0, help="seed of the first engine")
    parser.add_argument("--chats", action="store_true")
    parser.add_argument("--http", action="store_true", help="with --chats: a real server")
    parser.add_argument("--num-chats", type=int, default=200)
    parser.add_argument("--chats-per-prompt", type=int, default=0, help="0: all share one")
    parser.add_argument("--seeds", type=int, default=3, help="traces of chats")
    parser.add_argument("--pools", type=float, nargs="+", default=[8.0, 4.0, 2.0], help="GB")
    args = parser.parse_args()
    if args.engines:
        run_engines(args.first_engine, args.engines)
    elif args.chats:
        from benchmarks.chat_server import report_http_reuse
        from benchmarks.chat_trace import report_reuse

        pools = [1e9 * pool for pool in args.pools]
        report = report_http_reuse if args.http else report_reuse
        report(args.seeds, pools, args.num_chats, args.chats_per_prompt)
    else:
        report_users(args)


if __name__ == "__main__":
    main()
