"""Ranks that share every layer, and what they do together. A layer gets its group as an argument and asks no more.

`Alone` is a group of one: every model runs in a group, so there is one path. On GPUs messages go by NCCL, short ones
by symmetric memory where the cards can reach each other's; between CPUs by gloo, or through memory (shared.py). Ranks
that share one card, which only a test does, talk by gloo through the host.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F


class Group(Protocol):
    rank: int
    size: int

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, width] added up over the ranks; x itself may be overwritten."""
        ...

    def join(self, x: torch.Tensor, total: int) -> torch.Tensor:
        """x [tokens, width] of all ranks side by side: [tokens, total]. All are equally wide, but the last ones may
        have less."""
        ...


class Alone:
    rank = 0
    size = 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def join(self, x: torch.Tensor, total: int) -> torch.Tensor:
        return x


ALONE = Alone()


class Ranks:
    """A group of torch.distributed; its messages can be part of a captured graph."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x

    def join(self, x: torch.Tensor, total: int) -> torch.Tensor:
        missing = -(-total // self.size) - x.shape[1]
        x = F.pad(x, (0, missing)) if missing else x.contiguous()
        every = x.new_empty(self.size * len(x), x.shape[1])
        dist.all_gather_into_tensor(every, x, group=self.group)
        return every.unflatten(0, (self.size, len(x))).transpose(0, 1).flatten(1)[:, :total]


class Hosted(Ranks):
    """The same for GPU tensors whose messages go through the host: slow, and never part of a graph."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return super().sum(x.cpu()).to(x.device)

    def join(self, x: torch.Tensor, total: int) -> torch.Tensor:
        return super().join(x.cpu(), total).to(x.device)


class OneShot(Ranks):
    """Short sums in one go: every rank reads what all others have laid in memory that each can reach."""

    MOST = 256 << 10  # bytes; beyond it reading everything everywhere costs more than NCCL's ring
    TYPES = (torch.float32, torch.bfloat16)  # what torch can add up so
    SIZES = (
        2,
        4,
        8,
    )  # of groups in which it adds in the order of ranks, so that all have the same bits

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device):
        import torch.distributed._symmetric_memory as symmetric

        super().__init__(group)
        self.name = group.group_name
        self.shared = symmetric.empty(self.MOST // dtype.itemsize, dtype=dtype, device=device)
        symmetric.rendezvous(self.shared, self.name)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() > self.shared.numel() or x.dtype != self.shared.dtype:
            return super().sum(x)
        mine = self.shared[: x.numel()].view(x.shape)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(mine, x.contiguous(), "sum", self.name)
