"""The founding talk's table on two cores: one rank, tensor parallel and pipeline parallel, one thread each.

    python benchmarks/parallel.py [--weights float32 int8] [--rounds 3] [--tokens 12] [--streams 16] [--layers 16]
    python benchmarks/parallel.py --messages | --stages

A random model of Llama-3.2-1B's shape (fewer words), its products in each of the named precisions, the same for all
ways. Latency is the time of a token of a single stream, throughput that of 16 streams together, both after the prompts
are read. All ways are loaded at once and take turns, so that a noisy machine is noisy for each; the table has medians,
and beside each gain what it should be. Below the clock's figures stand those of the busiest rank's own CPU time: what
the clock would show if no other program took the cores and no rank ever waited for another.

`--messages` shows what the messages alone cost, through torch and through shared memory; `--stages` where a pipeline is
cut by measured cost, and where it would be by what layers and head read.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from bloomery.artifacts.locate import locate
from bloomery.config import Config
from bloomery.describe import plan_for
from bloomery.engine.blocks import Blocks
from bloomery.engine.executor import Executor
from bloomery.engine.loop import Loop
from bloomery.engine.scheduler import Scheduler
from bloomery.executors.chosen import chosen
from bloomery.messages import EngineRequest, ResolvedSampling

WAYS = {"one rank": (1, 1), "tp 2": (2, 1), "pp 2": (1, 2)}
GOALS = {("tp 2", "latency"): 1.4, ("pp 2", "throughput"): 1.5}
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


def config(folder: Path, weights: str, streams: int = 16, tp: int = 1, pp: int = 1) -> Config:
    return Config(
        str(folder),
        load_format="dummy",
        device="cpu",
        threads=1,
        tp=tp,
        pp=pp,
        max_model_len=256,
        kv_cache_gib=0.5,
        max_num_seqs=streams,
        prefix_cache=False,
        quantize="auto" if weights == "float32" else weights,
    )


def build(folder: Path, weights: str, streams: int, tp: int, pp: int) -> tuple[Loop, Executor]:
    plan, _ = plan_for(config(folder, weights, streams, tp, pp))
    executor = chosen(plan)
    capacity = executor.start(plan)
    blocks = Blocks(capacity.blocks, capacity.block_size, plan.prefix_cache)
    scheduler = Scheduler(
        blocks, capacity.max_num_batched_tokens, capacity.max_num_seqs, stages=capacity.stages
    )
    return Loop(scheduler, executor, plan.depth), executor


def busy(executor: Executor) -> list[float]:
    """CPU seconds every rank has used, by the process's own clock, whose number Linux makes of the process's."""
    members = getattr(executor, "members", ())
    processes = [member.process.pid for member in members] or [os.getpid()]
    return [time.clock_gettime((~process << 3) | 2) for process in processes]


def seconds_a_token(
    loop: Loop, executor: Executor, streams: int, tokens: int
) -> tuple[float, float]:
    """Between the moment all streams have their second token and the last token, over all tokens in between: by the
    clock, and of the busiest rank's CPU time."""
    for number in range(streams):
        prompt = tuple((7 * i + number) % 30000 + 3 for i in range(16))
        loop.add(EngineRequest(str(number), prompt, ResolvedSampling(temperature=0.0), tokens + 2))
    counts = [0] * streams
    begun = 0.0
    counted = 0
    before = [0.0]
    while loop.busy:
        for news in loop.step():
            counts[int(news.request)] += len(news.ids)
            if begun:
                counted += len(news.ids)
        if not begun and min(counts) >= 2:
            begun = time.perf_counter()
            before = busy(executor)
    taken = time.perf_counter() - begun
    used = max(after - former for former, after in zip(before, busy(executor), strict=True))
    return taken / counted, used / counted


def messages(folder: Path) -> None:
    """Sums over two processes, of the sizes a step has."""
    import torch
    import torch.multiprocessing as processes

    from bloomery.config import use_interface
    from bloomery.executors.processes import LOOPBACK
    from bloomery.parallel.mesh import meet
    from bloomery.parallel.shared import Shared

    def rank(number: int, meeting: str) -> None:
        torch.set_num_threads(1)
        use_interface(LOOPBACK)
        group = meet(meeting, number, 2, 1, torch.float32, torch.device("cpu"), False, True).group
        ways = (
            {"memory": group, "torch": group.other}
            if isinstance(group, Shared)
            else {"torch": group}
        )
        for lines in (1, 16, 512):
            x = torch.zeros(lines, 2048)
            for name, way in ways.items():
                taken = []
                for _ in range(200):
                    begun = time.perf_counter()
                    way.sum(x)
                    taken.append(time.perf_counter() - begun)
                if number == 0:
                    print(
                        f"sum of {x.nbytes / 1024:.0f} KiB through {name}: {1e6 * median(taken):.0f} us"
                    )

    processes.start_processes(rank, (str(folder / "meeting"),), 2, start_method="fork")


def stages(folder: Path, weights: str) -> None:
    """Where two stages part, by the clock and by what is read."""
    import torch

    from bloomery.layout import cut
    from bloomery.models.load import load
    from bloomery.native.team import team
    from bloomery.parallel.mesh import Mesh
    from bloomery.roofline import parameters
    from bloomery.runtime.stages import costs

    torch.set_num_threads(1)
    native = team().start(1) is None
    artifact = locate(str(folder), weights=False)
    quantize = config(folder, weights).quantize

    def measure(model, part):  # type: ignore[no-untyped-def]
        layers, head = costs(model, part, Mesh(), native)
        found = [len(each) for each in cut(layers, head, 2)]
        each = [parameters(replace(model, layers=(layer,))).matrices for layer in model.layers]
        read = [len(part) for part in cut(each, model.vocab * model.hidden, 2)]
        print(
            f"{weights}: a layer {layers[0] / 1e6:.2f} ms, the head {head / 1e6:.2f} ms", end="; "
        )
        print(f"layers of each stage: {found} by the clock, {read} by what is read")
        return range(1)

    load(
        artifact,
        "dummy",
        torch.float32,
        torch.device("cpu"),
        quantize=quantize,
        native=native,
        cut=measure,
    )


def table(folder: Path, weights: str, args: argparse.Namespace) -> None:
    ways = {name: build(folder, weights, args.streams, *sizes) for name, sizes in WAYS.items()}
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(args.rounds):
        for streams in (1, args.streams):
            for name, (loop, executor) in ways.items():
                clock, used = seconds_a_token(loop, executor, streams, args.tokens)
                found.setdefault((name, streams), []).append((clock, used))
                print(
                    f"{name}, {streams} streams: {1e3 * clock:.1f} ms, CPU {1e3 * used:.1f} ms a token",
                    flush=True,
                )
    for _, executor in ways.values():
        executor.close()
    for which, title in enumerate(("by the clock", "the busiest rank's CPU time")):
        medians = {key: median(each[which] for each in values) for key, values in found.items()}
        show(f"{weights}, {title}", medians, args.streams)


def show(title: str, found: dict[tuple[str, int], float], streams: int) -> None:
    print(
        f"\n| {title} | 1 stream, ms a token | gain | {streams} streams, tokens/s | gain |\n|---|---|---|---|---|"
    )
    for name in WAYS:
        one = found[name, 1]
        many = found[name, streams]
        gains = []
        for kind, count, value in (("latency", 1, one), ("throughput", streams, many)):
            goal = GOALS.get((name, kind))
            gains.append(
                f"{found['one rank', count] / value:.2f}" + (f" (goal {goal})" if goal else "")
            )
        print(f"| {name} | {1000 * one:.0f} | {gains[0]} | {1 / many:.1f} | {gains[1]} |")


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
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": args.layers}))
        if args.messages:
            messages(folder)
            return
        for weights in args.weights:
            if args.stages:
                stages(folder, weights)
            else:
                table(folder, weights, args)


if __name__ == "__main__":
    main()
