"""Two ranks on one GPU give the tokens of one rank: tp 2 and pp 2, family by family, in float32.

    PYTHONPATH=src:. python3 benchmarks/parallel_gpu.py [NAME ...] [--device cuda:0] [--messages]

NCCL refuses two ranks on one card, so messages go through the host and there are no CUDA graphs.
That is slow, but the model is split the same way and the same kernels run on the parts. NAME
selects the cases that contain it in their name. --messages checks messages between cards as far as
one card can: all-reduces by NCCL and by symmetric memory, in a group of one, inside a CUDA graph.
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

from bloomery.config import EngineConfig
from bloomery.describe import build_engine_plan
from bloomery.engine.build import build_engine
from bloomery.engine.executor import Executor
from bloomery.executors.local import LocalExecutor
from bloomery.executors.multiprocess import MultiprocessExecutor
from bloomery.messages import EngineRequest, ResolvedSampling
from bloomery.parallel.distributed import DistributedGroup, SymmetricMemoryGroup
from bloomery.parallel.groups import CommunicationGroup
from bloomery.runtime.runner import GraphPool

DEFAULT_CASES = (
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
    "zamba2-adapted",
)
NUM_TOKENS = 16


def generate(
    executor: Executor, folder: str, prompts: list[list[int]], max_len: int, **options: Any
) -> list[list[int]]:
    """Return the tokens of every prompt."""
    config = EngineConfig(
        folder,
        dtype="float32",
        max_model_len=max_len,
        kv_cache_gib=0.05,
        max_num_seqs=4,
        cuda_graphs=False,
        policy="fcfs",
        **options,
    )
    plan, _ = build_engine_plan(config)
    loop = build_engine(plan, executor, executor.start(plan))
    sampling = ResolvedSampling(temperature=0.0)
    for number, prompt in enumerate(prompts):
        loop.add(EngineRequest(str(number), tuple(prompt), sampling, NUM_TOKENS))
    tokens: list[list[int]] = [[] for _ in prompts]
    while loop.busy:
        for output in loop.step():
            tokens[int(output.request)] += output.ids
    return tokens


def check_families(names: list[str], device: str) -> int:
    """Compare the layouts for every selected case; return how many results differ."""
    from tests.parity.cases import CASES, VOCAB, make_checkpoint

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    cases = [case for case in CASES if any(name in case.name for name in names)]
    if not names:
        cases = [case for case in CASES if case.name in DEFAULT_CASES]
    ranks = MultiprocessExecutor()
    num_wrong = 0
    for case in cases:
        begin = time.monotonic()
        generator = torch.Generator().manual_seed(7)
        prompts = [
            torch.randint(3, VOCAB, (case.prompt,), generator=generator).tolist() for _ in range(3)
        ]
        results = []
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(case, Path(folder))
            expected = generate(LocalExecutor(), folder, prompts, case.length, device=device)
            for tp, pp in ((2, 1), (1, 2)):
                layout = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
                tokens = generate(ranks, folder, prompts, case.length, device=device, **layout)
                num_wrong += tokens != expected
                verdict = "equal" if tokens == expected else "DIFFERS"
                results.append(f"tp {tp} pp {pp}: {verdict}")
        seconds = time.monotonic() - begin
        print(f"{case.name:20}{', '.join(results)}  ({seconds:.1f} s)", flush=True)
    ranks.close()
    return num_wrong


def check_captured_messages(group: CommunicationGroup, device: torch.device) -> bool:
    """Whether messages in a CUDA graph are right when it is replayed with other values."""
    x = torch.randn(8, 4096, dtype=torch.bfloat16, device=device)
    reduced = torch.zeros_like(x)
    gathered = torch.zeros_like(x)

    def send_messages() -> None:
        reduced.copy_(group.all_reduce(x * 2))
        gathered.copy_(group.all_gather(x, x.shape[1]))

    send_messages()
    graph = GraphPool().capture(send_messages)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    return torch.equal(reduced, x * 2) and torch.equal(gathered, x)


def check_messages() -> int:
    """Check messages by NCCL and by symmetric memory in a group of one; return how many fail."""
    device = torch.device("cuda:0")
    num_wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/rendezvous", 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
        process_group = dist.new_group([0])
        groups: dict[str, CommunicationGroup] = {
            "NCCL": DistributedGroup(process_group),
            "symmetric memory": SymmetricMemoryGroup(process_group, torch.bfloat16, device),
        }
        for name, group in groups.items():
            is_right = check_captured_messages(group, device)
            num_wrong += not is_right
            print(f"{name}: {'right' if is_right else 'WRONG'} in a CUDA graph")
        dist.destroy_process_group()
    return num_wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument(
        "--device",
        default="cuda:0",
        help="the device that all ranks share; cpu: only to try the command",
    )
    parser.add_argument("--messages", action="store_true")
    args = parser.parse_args()
    if args.messages:
        num_wrong = check_messages()
    else:
        num_wrong = check_families(args.names, args.device)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
