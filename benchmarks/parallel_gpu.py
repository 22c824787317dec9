"""Two ranks on one GPU give the tokens of one: tensor and pipeline parallel, family by family, in float32.

    PYTHONPATH=src:. python3 benchmarks/parallel_gpu.py [WORD ...] [--device cuda:0] [--messages]

NCCL refuses two ranks on one card, so messages go through the host and nothing is captured: slow, but the same split of
the model, the same kernels on its parts. A word keeps the cases that have it in their name. `--messages` tries the
messages between cards as far as one card can: NCCL's and symmetric memory's sums, in a group of one, inside a captured
graph.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bloomery.config import Config
from bloomery.describe import plan_for
from bloomery.engine.blocks import Blocks
from bloomery.engine.executor import Executor
from bloomery.engine.loop import Loop
from bloomery.engine.scheduler import Scheduler
from bloomery.executors.local import Local
from bloomery.executors.processes import Processes
from bloomery.messages import EngineRequest, ResolvedSampling
from bloomery.parallel.groups import Group, OneShot, Ranks
from bloomery.runtime.replay import Pool

NAMES = (
    "llama",
    "bloom",
    "falcon-7b",
    "falcon-40b",
    "mixtral",
    "gemma2",
    "olmo2",
    "gpt_neox",
    "gpt_bigcode-mqa",
    "opt-350m",
)
TOKENS = 16


def tokens(
    executor: Executor, folder: str, prompts: list[list[int]], length: int, **wishes: Any
) -> list[list[int]]:
    config = Config(
        folder,
        dtype="float32",
        max_model_len=length,
        kv_cache_gib=0.05,
        max_num_seqs=4,
        cuda_graphs=False,
        **wishes,
    )
    plan, _ = plan_for(config)
    capacity = executor.start(plan)
    blocks = Blocks(capacity.blocks, capacity.block_size)
    scheduler = Scheduler(
        blocks, capacity.max_num_batched_tokens, capacity.max_num_seqs, stages=capacity.stages
    )
    loop = Loop(scheduler, executor, plan.depth)
    for number, prompt in enumerate(prompts):
        loop.add(
            EngineRequest(str(number), tuple(prompt), ResolvedSampling(temperature=0.0), TOKENS)
        )
    found: list[list[int]] = [[] for _ in prompts]
    while loop.busy:
        for news in loop.step():
            found[int(news.request)] += news.ids
    return found


def families(words: list[str], device: str) -> int:
    from tests.parity.cases import CASES, VOCAB, make_checkpoint

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    cases = [
        case
        for case in CASES
        if any(word in case.name for word in words) or (not words and case.name in NAMES)
    ]
    ranks = Processes()
    wrong = 0
    for case in cases:
        begun = time.monotonic()
        generator = torch.Generator().manual_seed(7)
        prompts = [
            torch.randint(3, VOCAB, (case.prompt,), generator=generator).tolist() for _ in range(3)
        ]
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(case, Path(folder))
            want = tokens(Local(), folder, prompts, case.length, device=device)
            got = {
                f"tp {tp} pp {pp}": tokens(
                    ranks, folder, prompts, case.length, device=device, tp=tp, pp=pp
                )
                for tp, pp in ((2, 1), (1, 2))
            }
        told = ", ".join(
            f"{name}: {'equal' if found == want else 'DIFFERS'}" for name, found in got.items()
        )
        wrong += sum(found != want for found in got.values())
        print(f"{case.name:20}{told}  ({time.monotonic() - begun:.1f} s)", flush=True)
    ranks.close()
    return wrong


def replayed(ranks: Group, device: torch.device) -> bool:
    """Whether what a worker captures is right when it is replayed with other numbers."""
    x = torch.randn(8, 4096, dtype=torch.bfloat16, device=device)
    summed = torch.zeros_like(x)
    joined = torch.zeros_like(x)

    def work() -> None:
        summed.copy_(ranks.sum(x * 2))
        joined.copy_(ranks.join(x, x.shape[1]))

    work()
    graph = Pool().capture(work)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    return torch.equal(summed, x * 2) and torch.equal(joined, x)


def messages() -> int:
    """Sums inside a captured graph, by NCCL and by symmetric memory, in a group of one."""
    device = torch.device("cuda:0")
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/meeting", 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
        group = dist.new_group([0])
        made: dict[str, Group] = {
            "NCCL": Ranks(group),
            "one shot": OneShot(group, torch.bfloat16, device),
        }
        for name, ranks in made.items():
            right = replayed(ranks, device)
            wrong += not right
            print(f"{name}: {'right' if right else 'WRONG'} in a captured graph")
        dist.destroy_process_group()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*")
    parser.add_argument(
        "--device", default="cuda:0", help="the one that all ranks share; cpu: to try the command"
    )
    parser.add_argument("--messages", action="store_true")
    args = parser.parse_args()
    return 1 if (messages() if args.messages else families(args.words, args.device)) else 0


if __name__ == "__main__":
    sys.exit(main())
