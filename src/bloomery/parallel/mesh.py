"""Where a rank stands: which group shares its layers, which stage of the pipeline they are, and who comes next.

Ranks are numbered stage by stage, so that those which share layers are neighbours on one machine.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bloomery.parallel.groups import ALONE, Group, Hosted, OneShot, Ranks


class Pipe:
    """Hidden states from the stage before to the stage behind."""

    def __init__(self, before: int | None, behind: int | None, width: int, dtype: torch.dtype, device: torch.device):
        self.before, self.behind = before, behind
        self.width, self.dtype, self.device = width, dtype, device
        self.hosted = device.type == "cuda" and dist.get_backend() == "gloo"
        self.sending: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

    def receive(self, count: int) -> torch.Tensor:
        """[count, width] as the stage before sent it."""
        place = torch.device("cpu") if self.hosted else self.device
        x = torch.empty(count, self.width, dtype=self.dtype, device=place)
        dist.recv(x, self.before)
        return x.to(self.device)

    def send(self, x: torch.Tensor) -> None:
        """Without waiting for the other side: this stage has the next step to do."""
        while self.sending and ((work := self.sending[0][0]) is None or work.is_completed()):
            self.sending.popleft()
        x = (x.cpu() if self.hosted else x).contiguous()
        self.sending.append((dist.isend(x, self.behind), x))


@dataclass(frozen=True)
class Mesh:
    group: Group = ALONE
    stage: int = 0
    stages: int = 1
    rank: int = 0
    size: int = 1
    shared: bool = False  # all ranks on one device

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    def least(self, number: int) -> int:
        """The smallest that any rank names."""
        if self.size == 1:
            return number
        kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
        found = torch.tensor(number, dtype=torch.int64, device=kind)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def pipe(self, width: int, dtype: torch.dtype, device: torch.device) -> Pipe | None:
        if self.stages == 1:
            return None
        step = self.size // self.stages
        before, behind = self.rank - step, self.rank + step
        return Pipe(None if self.first else before, None if self.last else behind, width, dtype, device)

    @property
    def speaks(self) -> bool:
        """Whether this rank has the tokens and is the one that tells them."""
        return self.last and self.group.rank == 0


def meet(meeting: str, rank: int, tp: int, pp: int, dtype: torch.dtype, device: torch.device, shared: bool) -> Mesh:
    """Join the others, in a file or at host:port. `shared`: all are on this very device."""
    size, nccl = tp * pp, device.type == "cuda" and not shared
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if nccl else "gloo", store=store(meeting, size), rank=rank, world_size=size,
        device_id=device if nccl else None,
    )  # fmt: skip
    groups = [dist.new_group(list(range(stage * tp, (stage + 1) * tp))) for stage in range(pp)]  # each makes them all
    stage = rank // tp
    group = ALONE if tp == 1 else together(groups[stage], dtype, device, nccl)
    return Mesh(group, stage, pp, rank, size, shared)


def part() -> None:
    dist.destroy_process_group()


def store(meeting: str, size: int) -> dist.Store:
    if meeting.startswith("/"):
        return dist.FileStore(meeting, size)
    host, _, port = meeting.rpartition(":")
    return dist.TCPStore(host, int(port), size, is_master=False)


def together(group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device, nccl: bool) -> Group:
    if device.type != "cuda":
        return Ranks(group)
    if not nccl:
        return Hosted(group)
    # All ranks see the same cards and so choose alike; where each sees but its own, all are called the same.
    cards = [int(card) for card in Ranks(group).join(torch.tensor([[device.index]], device=device))[0]]
    near = len(set(cards)) == len(cards) and all(
        torch.cuda.can_device_access_peer(one, other) for one in cards for other in cards if one != other
    )
    return OneShot(group, dtype, device) if near else Ranks(group)
