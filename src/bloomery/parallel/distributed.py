"""Ranks that communicate through torch.distributed, and how all ranks find each other.

GPUs use NCCL, and symmetric memory for short messages if the cards can access each other's memory.
CPUs use gloo, or shared memory where they can (shared_memory.py). Ranks that share one card, which
only tests do, use gloo through the host.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from bloomery.native.thread_pool import ThreadPool
from bloomery.parallel.groups import (
    SINGLE_RANK,
    CommunicationGroup,
    DeviceMesh,
    PointToPointChannel,
)
from bloomery.parallel.shared_memory import (
    SharedMemoryChannel,
    SharedMemoryGroup,
    open_shared_segment,
)

# ---- groups --------------------------------------------------------------------------------------


class DistributedGroup:
    """A process group of torch.distributed; its messages can be part of a CUDA graph."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor, total_width: int) -> torch.Tensor:
        num_rows = len(x)
        full_width = -(-total_width // self.size)
        padding = full_width - x.shape[1]
        x = F.pad(x, (0, padding)) if padding else x.contiguous()
        gathered = x.new_empty(self.size * num_rows, full_width)
        dist.all_gather_into_tensor(gathered, x, group=self.group)
        by_rank = gathered.unflatten(0, (self.size, num_rows))
        return by_rank.transpose(0, 1).flatten(1)[:, :total_width]


class HostStagedGroup(DistributedGroup):
    """GPU tensors whose messages go through the host: slow, and never part of a CUDA graph."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(x.cpu()).to(x.device)

    def all_gather(self, x: torch.Tensor, total_width: int) -> torch.Tensor:
        return super().all_gather(x.cpu(), total_width).to(x.device)


class SymmetricMemoryGroup(DistributedGroup):
    """Reduces short messages in one shot: every rank reads the inputs of all others directly."""

    # For longer messages, reading all inputs on every rank costs more than NCCL's ring.
    MAX_BYTES = 256 << 10
    DTYPES = (torch.float32, torch.bfloat16)  # dtypes that torch's one-shot kernel can add
    # Group sizes at which the kernel adds in the order of ranks, so all get the same bits.
    SIZES = (2, 4, 8)

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device):
        import torch.distributed._symmetric_memory as symmetric_memory

        super().__init__(group)
        self.name = group.group_name
        num_elements = self.MAX_BYTES // dtype.itemsize
        self.buffer = symmetric_memory.empty(num_elements, dtype=dtype, device=device)
        symmetric_memory.rendezvous(self.buffer, self.name)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() > self.buffer.numel() or x.dtype != self.buffer.dtype:
            return super().all_reduce(x)
        own_part = self.buffer[: x.numel()].view(x.shape)
        one_shot = torch.ops.symm_mem.one_shot_all_reduce_copy
        return one_shot(own_part, x.contiguous(), "sum", self.name)


def create_group(
    group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device, uses_nccl: bool
) -> CommunicationGroup:
    """Choose how the ranks of a tensor parallel group communicate."""
    if device.type != "cuda":
        return DistributedGroup(group)
    if not uses_nccl:
        return HostStagedGroup(group)
    if dtype not in SymmetricMemoryGroup.DTYPES or group.size() not in SymmetricMemoryGroup.SIZES:
        return DistributedGroup(group)
    if not can_access_peers(group, device):
        return DistributedGroup(group)
    return SymmetricMemoryGroup(group, dtype, device)


def can_access_peers(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all GPUs of the group can read each other's memory.

    All ranks see the same cards, so all get the same answer. Where each rank sees only its own
    card, all indices are equal and the answer is no.
    """
    own_index = torch.tensor([[device.index]], device=device)
    gathered = DistributedGroup(group).all_gather(own_index, group.size())
    indices = [int(index) for index in gathered[0]]
    if len(set(indices)) < len(indices):
        return False
    return all(
        torch.cuda.can_device_access_peer(index, peer)
        for index in indices
        for peer in indices
        if index != peer
    )


# ---- channels between pipeline stages ------------------------------------------------------------


class PendingSend(NamedTuple):
    """A message on its way, with the tensor that must stay alive until it has been sent."""

    work: dist.Work | None
    tensor: torch.Tensor

    @property
    def is_complete(self) -> bool:
        return self.work is None or self.work.is_completed()


class DistributedChannel:
    """Messages to one rank of another stage through torch.distributed."""

    def __init__(self, peer: int, device: torch.device):
        self.peer = peer
        self.device = device
        self.message_device = torch.device("cpu") if dist.get_backend() == "gloo" else device
        self.pending_sends: deque[PendingSend] = deque()

    def receive(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        x = torch.empty(num_rows, width, dtype=dtype, device=self.message_device)
        dist.recv(x, self.peer)
        return x.to(self.device)

    def send(self, x: torch.Tensor) -> None:
        """Send without waiting for the receiver: this stage continues with its next step."""
        while self.pending_sends and self.pending_sends[0].is_complete:
            self.pending_sends.popleft()
        x = x.to(self.message_device).contiguous()
        self.pending_sends.append(PendingSend(dist.isend(x, self.peer), x))


# ---- rendezvous ----------------------------------------------------------------------------------


def rendezvous(
    address: str,
    rank: int,
    tp: int,
    pp: int,
    dtype: torch.dtype,
    device: torch.device,
    shares_device: bool,
    pool: ThreadPool | None,
) -> DeviceMesh:
    """Join all other ranks and return the mesh that this rank sees.

    `address` is a file or host:port. With `shares_device` all ranks run on this device. With a
    `pool`, CPU ranks of one machine communicate through shared memory.
    """
    world_size = tp * pp
    uses_nccl = device.type == "cuda" and not shares_device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = open_store(address, world_size)
    dist.init_process_group(
        "nccl" if uses_nccl else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=device if uses_nccl else None,
    )
    # torch.distributed requires that every rank creates all groups.
    stage_ranks = [list(range(stage * tp, (stage + 1) * tp)) for stage in range(pp)]
    process_groups = [dist.new_group(ranks) for ranks in stage_ranks]
    stage = rank // tp
    group: CommunicationGroup = SINGLE_RANK
    if tp > 1:
        group = create_group(process_groups[stage], dtype, device, uses_nccl)
    if device.type != "cpu":
        pool = None
    if pool is not None and tp > 1:
        segment = open_shared_segment(pool, store, f"stage {stage}", rank % tp, tp)
        if segment is not None:
            group = SharedMemoryGroup(segment, group)

    def open_channel(sender: int, receiver: int) -> PointToPointChannel | None:
        """Connect two ranks, one of which is this rank. Both call this, in the order of stages."""
        if sender < 0 or receiver >= world_size:
            return None
        if pool is not None:
            name = f"{sender} to {receiver}"
            segment = open_shared_segment(pool, store, name, int(rank == receiver), 2)
            if segment is not None:
                return SharedMemoryChannel(segment)
        peer = sender if rank == receiver else receiver
        return DistributedChannel(peer, device)

    previous_stage = open_channel(rank - tp, rank)
    next_stage = open_channel(rank, rank + tp)
    return DeviceMesh(group, stage, pp, rank, world_size, shares_device, previous_stage, next_stage)


def leave_process_group() -> None:
    """Undo `rendezvous`; the process may join other ranks afterwards."""
    dist.destroy_process_group()


def open_store(address: str, world_size: int) -> dist.Store:
    """Open the key-value store of the rendezvous: a file, or a server at host:port."""
    if address.startswith("/"):
        return dist.FileStore(address, world_size)
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), world_size, is_master=False)
