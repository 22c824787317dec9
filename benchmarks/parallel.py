"""The founding talk's table on two cores: one rank, tensor parallel and pipeline parallel, one thread each.

    python benchmarks/parallel.py [--rounds 3] [--tokens 12] [--layers 16] [--messages]

A random model of Llama-3.2-1B's shape (fewer words) in float32. Latency is the time of a token of a single stream,
throughput that of 16 streams together, both after the prompts are read. All ways are loaded at once and take turns, so
that a noisy machine is noisy for each; the table has medians. Beside the clock's figures stand those of the busiest
rank's own CPU time: what the clock would show if no other program took the cores and messages cost nothing.
`--messages` shows what the messages alone cost.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from bloomery.config import Config
from bloomery.describe import plan_for
from bloomery.engine.blocks import Blocks
from bloomery.engine.loop import Loop
from bloomery.engine.scheduler import Scheduler
from bloomery.executors.chosen import Chosen
from bloomery.messages import Request, Sampling

WAYS = {"one rank": (1, 1), "tp 2": (2, 1), "pp 2": (1, 2)}
STREAMS = 16
SHAPE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32768, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096, "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip


def build(folder: Path, tp: int, pp: int) -> tuple[Loop, Chosen]:
    config = Config(
        str(folder), load_format="dummy", device="cpu", threads=1, tp=tp, pp=pp, max_model_len=256, kv_cache_gib=0.5,
        max_sequences=STREAMS, prefix_cache=False,
    )  # fmt: skip
    plan, _ = plan_for(config)
    executor = Chosen()
    capacity = executor.start(plan)
    blocks = Blocks(capacity.blocks, capacity.block_size, plan.prefix_cache)
    scheduler = Scheduler(blocks, capacity.max_batch_tokens, capacity.max_sequences, stages=capacity.stages)
    return Loop(scheduler, executor, plan.depth), executor


def busy(executor: Chosen) -> list[float]:
    """CPU seconds every rank has used."""
    members = getattr(executor.executor, "members", ())
    found = []
    for pid in [member.process.pid for member in members] or [os.getpid()]:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        found.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return found


def seconds_a_token(loop: Loop, executor: Chosen, streams: int, tokens: int) -> tuple[float, float]:
    """Between the moment all streams have their second token and the last token, over all tokens in between: by the
    clock, and of the busiest rank's CPU time."""
    for number in range(streams):
        prompt = tuple((7 * i + number) % 30000 + 3 for i in range(16))
        loop.add(Request(str(number), prompt, Sampling(temperature=0.0), tokens + 2))
    counts, begun, counted, before = [0] * streams, 0.0, 0, [0.0]
    while loop.busy:
        for news in loop.step():
            counts[int(news.request)] += len(news.ids)
            if begun:
                counted += len(news.ids)
        if not begun and min(counts) >= 2:
            begun, before = time.perf_counter(), busy(executor)
    taken = time.perf_counter() - begun
    used = max(after - former for former, after in zip(before, busy(executor), strict=True))
    return taken / counted, used / counted


def messages(folder: Path) -> None:
    """Sums over two processes, of the sizes a step has."""
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as processes

    def rank(number: int, meeting: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(meeting, 2), rank=number, world_size=2)
        for lines in (1, 16, 512):
            x = torch.zeros(lines, 2048)
            taken = []
            for _ in range(200):
                begun = time.perf_counter()
                dist.all_reduce(x)
                taken.append(time.perf_counter() - begun)
            if number == 0:
                print(f"sum of {x.nbytes / 1024:.0f} KiB: {1e6 * median(taken):.0f} us")

    processes.start_processes(rank, (str(folder / "meeting"),), 2, start_method="fork")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--messages", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if args.messages:
            messages(folder)
            return
        (folder / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": args.layers}))
        ways = {name: build(folder, *sizes) for name, sizes in WAYS.items()}
        found: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for _ in range(args.rounds):
            for streams in (1, STREAMS):
                for name, (loop, executor) in ways.items():
                    clock, used = seconds_a_token(loop, executor, streams, args.tokens)
                    found.setdefault((name, streams), []).append((clock, used))
                    print(
                        f"{name}, {streams} streams: {1e3 * clock:.1f} ms, CPU {1e3 * used:.1f} ms a token", flush=True
                    )
        for _, executor in ways.values():
            executor.close()
    for which, title in enumerate(("by the clock", "the busiest rank's CPU time")):
        show(title, {key: median(each[which] for each in values) for key, values in found.items()})


def show(title: str, found: dict[tuple[str, int], float]) -> None:
    print(f"\n| {title} | 1 stream, ms a token | gain | {STREAMS} streams, tokens/s | gain |\n|---|---|---|---|---|")
    for name in WAYS:
        one, many = found[name, 1], found[name, STREAMS]
        gains = found["one rank", 1] / one, found["one rank", STREAMS] / many
        print(f"| {name} | {1000 * one:.0f} | {gains[0]:.2f} | {1 / many:.1f} | {gains[1]:.2f} |")


if __name__ == "__main__":
    main()
