"""Where a rank stands: which group shares its layers, which stage of the pipeline they are, and who comes next.

Ranks are numbered stage by stage, so that those which share layers are neighbours on one machine.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from bloomery.native.team import team
from bloomery.parallel.groups import ALONE, Group, Hosted, OneShot, Ranks
from bloomery.parallel.shared import Near, Shared, region


class Line(Protocol):
    """To one rank of another stage."""

    def receive(self, count: int, width: int, dtype: torch.dtype) -> torch.Tensor: ...
    def send(self, x: torch.Tensor) -> None: ...


class Far:
    """Through torch.distributed."""

    def __init__(self, other: int, device: torch.device):
        self.other = other
        self.device = device
        self.place = torch.device("cpu") if dist.get_backend() == "gloo" else device
        self.sending: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

    def receive(self, count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        x = torch.empty(count, width, dtype=dtype, device=self.place)
        dist.recv(x, self.other)
        return x.to(self.device)

    def send(self, x: torch.Tensor) -> None:
        """Without waiting for the other side: this stage has the next step to do."""
        while self.sending and ((work := self.sending[0][0]) is None or work.is_completed()):
            self.sending.popleft()
        x = x.to(self.place).contiguous()
        self.sending.append((dist.isend(x, self.other), x))


@dataclass(frozen=True)
class Pipe:
    """Hidden states from the stage before to the stage behind."""

    before: Line | None
    behind: Line | None
    width: int
    dtype: torch.dtype

    def receive(self, count: int) -> torch.Tensor | None:
        """[count, width] as the stage before sent it; None where this is the first."""
        return None if self.before is None else self.before.receive(count, self.width, self.dtype)

    def send(self, x: torch.Tensor) -> None:
        if self.behind is not None:
            self.behind.send(x)


@dataclass(frozen=True)
class Mesh:
    group: Group = ALONE
    stage: int = 0
    stages: int = 1
    rank: int = 0
    size: int = 1
    shared: bool = False  # all ranks on one device
    before: Line | None = None
    behind: Line | None = None

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

    def pipe(self, width: int, dtype: torch.dtype) -> Pipe | None:
        return None if self.stages == 1 else Pipe(self.before, self.behind, width, dtype)

    @property
    def speaks(self) -> bool:
        """Whether this rank has the tokens and is the one that tells them."""
        return self.last and self.group.rank == 0


def meet(
    meeting: str,
    rank: int,
    tp: int,
    pp: int,
    dtype: torch.dtype,
    device: torch.device,
    shared: bool,
    native: bool,
) -> Mesh:
    """Join the others, in a file or at host:port. `shared`: all are on this very device. `native`: messages may be
    native operations."""
    size = tp * pp
    nccl = device.type == "cuda" and not shared
    if device.type == "cuda":
        torch.cuda.set_device(device)
    place = store(meeting, size)
    dist.init_process_group(
        "nccl" if nccl else "gloo",
        store=place,
        rank=rank,
        world_size=size,
        device_id=device if nccl else None,
    )
    groups = [
        dist.new_group(list(range(stage * tp, (stage + 1) * tp))) for stage in range(pp)
    ]  # each makes them all
    stage = rank // tp
    group = ALONE if tp == 1 else together(groups[stage], dtype, device, nccl)
    native = native and device.type == "cpu"
    if native and not team().active:
        team().start(1)
    if native and tp > 1 and (memory := region(place, f"stage {stage}", rank % tp, tp)) is not None:
        group = Shared(memory, group)

    def line(one: int, other: int) -> Line | None:
        """From rank to rank, of which this is one; both ask, in the order of stages."""
        if one < 0 or other >= size:
            return None
        if (
            native
            and (memory := region(place, f"{one} to {other}", int(rank == other), 2)) is not None
        ):
            return Near(memory)
        return Far(one + other - rank, device)

    return Mesh(group, stage, pp, rank, size, shared, line(rank - tp, rank), line(rank, rank + tp))


def part() -> None:
    dist.destroy_process_group()


def store(meeting: str, size: int) -> dist.Store:
    if meeting.startswith("/"):
        return dist.FileStore(meeting, size)
    host, _, port = meeting.rpartition(":")
    return dist.TCPStore(host, int(port), size, is_master=False)


def together(
    group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device, nccl: bool
) -> Group:
    if device.type != "cuda":
        return Ranks(group)
    if not nccl:
        return Hosted(group)
    if dtype not in OneShot.TYPES or group.size() not in OneShot.SIZES:
        return Ranks(group)
    # All ranks see the same cards and so choose alike; where each sees but its own, all are called the same.
    cards = [
        int(card)
        for card in Ranks(group).join(torch.tensor([[device.index]], device=device), group.size())[
            0
        ]
    ]
    near = len(set(cards)) == len(cards) and all(
        torch.cuda.can_device_access_peer(one, other)
        for one in cards
        for other in cards
        if one != other
    )
    return OneShot(group, dtype, device) if near else Ranks(group)
