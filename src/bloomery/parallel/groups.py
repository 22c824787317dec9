"""What a rank knows about the other ranks: its tensor parallel group and its pipeline stage.

Every model runs in a group, so there is one code path; `SingleRank` is the group of a model on one
device. A layer gets its group as an argument and knows nothing else about other ranks. Ranks that
communicate through torch.distributed are in distributed.py, CPU ranks that communicate through
shared memory in shared_memory.py. This module knows no model and no layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist


class CommunicationGroup(Protocol):
    """The tensor parallel ranks that share every layer of one pipeline stage."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x [tokens, width] over the ranks; x itself may be overwritten."""
        ...

    def all_gather(self, x: torch.Tensor, total_width: int) -> torch.Tensor:
        """Concatenate x [tokens, width] of all ranks to [tokens, total_width].

        All ranks have the same width, except that the last ones may have less.
        """
        ...


class SingleRank:
    """A group of one rank: nothing is communicated."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, total_width: int) -> torch.Tensor:
        return x


SINGLE_RANK = SingleRank()


class PointToPointChannel(Protocol):
    """A connection to one rank of another pipeline stage."""

    def receive(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Wait for the next message and return it as [num_rows, width]."""
        ...

    def send(self, x: torch.Tensor) -> None:
        """Send x [num_rows, width]; the channel copies it or keeps it alive."""
        ...


@dataclass(frozen=True)
class StagePipe:
    """Passes hidden states from the previous pipeline stage to the next one."""

    previous_stage: PointToPointChannel | None
    next_stage: PointToPointChannel | None
    width: int
    dtype: torch.dtype

    def receive(self, num_rows: int) -> torch.Tensor | None:
        """Return [num_rows, width] from the previous stage; None in the first stage."""
        if self.previous_stage is None:
            return None
        return self.previous_stage.receive(num_rows, self.width, self.dtype)

    def send(self, x: torch.Tensor) -> None:
        if self.next_stage is not None:
            self.next_stage.send(x)


@dataclass(frozen=True)
class DeviceMesh:
    """The position of one rank among all ranks.

    Ranks are numbered stage by stage, so the ranks of one tensor parallel group are neighbours.
    """

    group: CommunicationGroup = SINGLE_RANK
    stage: int = 0
    num_stages: int = 1
    rank: int = 0
    world_size: int = 1
    shares_device: bool = False  # all ranks run on one device
    previous_stage: PointToPointChannel | None = None
    next_stage: PointToPointChannel | None = None

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def is_driver(self) -> bool:
        """Whether this rank reports the sampled tokens to the engine."""
        return self.is_last_stage and self.group.rank == 0

    def min_over_ranks(self, value: int) -> int:
        """Return the smallest value that any rank passes; all ranks must call this."""
        if self.world_size == 1:
            return value
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        smallest = torch.tensor(value, dtype=torch.int64, device=device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest)

    def create_stage_pipe(self, width: int, dtype: torch.dtype) -> StagePipe | None:
        """Return the pipe for hidden states of this width; None without pipeline parallelism."""
        if self.num_stages == 1:
            return None
        return StagePipe(self.previous_stage, self.next_stage, width, dtype)
