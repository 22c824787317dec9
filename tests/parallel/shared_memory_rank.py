"""A rank that compares messages through shared memory with messages through torch.

    python -m tests.parallel.shared_memory_rank RANK SIZE FOLDER

First all ranks form a tensor parallel group. Then each one is a pipeline stage. Then the last one
is killed. Any difference is an error, and so is a rank that waits for the dead one.
"""

from __future__ import annotations

import os
import random
import signal
import sys

import torch

from bloomery.config import bind_network_interface
from bloomery.native.thread_pool import ThreadPool, TraceArena
from bloomery.native.trace import record_trace
from bloomery.parallel.distributed import (
    DistributedChannel,
    DistributedGroup,
    leave_process_group,
    rendezvous,
)
from bloomery.parallel.groups import DeviceMesh
from bloomery.parallel.shared_memory import SLOT_BYTES, SharedMemoryChannel, SharedMemoryGroup

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.int64]


def compare_collectives(mesh: DeviceMesh) -> None:
    """all_reduce and all_gather of random shapes and dtypes, through both ways."""
    shared = mesh.group
    assert isinstance(shared, SharedMemoryGroup)
    assert isinstance(shared.fallback, DistributedGroup)
    rng = random.Random(7)
    generator = torch.Generator().manual_seed(7)
    for attempt in range(30):
        num_tokens = rng.choice([1, 2, 3, 16, 100])
        more_than_a_slot = SLOT_BYTES // 4 // num_tokens + 13
        width = rng.choice([1, 7, 64, 2048, more_than_a_slot])
        dtype = rng.choice(DTYPES)
        inputs = [
            (100 * torch.randn(num_tokens, width, generator=generator)).to(dtype)
            for _ in range(mesh.world_size)
        ]
        own_input = inputs[mesh.rank]
        reduced = shared.all_reduce(own_input.clone())
        by_torch = shared.fallback.all_reduce(own_input.clone())
        # torch adds in another order.
        tolerance = 2000 * torch.finfo(dtype).eps if dtype.is_floating_point else 0
        difference = (reduced.double() - by_torch.double()).abs().max()
        assert difference <= tolerance, f"attempt {attempt}: {num_tokens} x {width} {dtype}"
        if dtype == torch.float32:  # added in the order of ranks: the same bits on every rank
            expected = inputs[0]
            for other_input in inputs[1:]:
                expected = expected + other_input
            assert torch.equal(reduced, expected)
        last_width = rng.randint(1, width)
        total_width = (mesh.world_size - 1) * width + last_width
        if -(-total_width // mesh.world_size) == width:
            is_last = mesh.rank == mesh.world_size - 1
            part = own_input[:, :last_width] if is_last else own_input
            gathered = shared.all_gather(part, total_width)
            assert torch.equal(gathered, shared.fallback.all_gather(part, total_width))
            assert torch.equal(gathered, torch.cat(inputs, -1)[:, :total_width])


def check_replayed_all_reduce(shared: SharedMemoryGroup) -> None:
    """A traced message is sent at every replay, and not while it is recorded."""
    x = torch.zeros(4, 32)
    out = torch.zeros(4, 32)
    trace = record_trace(
        shared.segment.pool, lambda: out.copy_(shared.all_reduce(x + x)), TraceArena(1 << 20)
    )
    assert len(trace) == 3
    for factor in range(1, 4):
        x.fill_(factor * (shared.rank + 1))
        trace.replay()
        expected = float(factor * shared.size * (shared.size + 1))
        assert torch.equal(out, torch.full((4, 32), expected))


def compare_channels(mesh: DeviceMesh) -> None:
    """Send more messages than there are slots, some longer than a slot, through both ways."""
    generator = torch.Generator().manual_seed(3)
    rng = random.Random(3)
    for channel in (mesh.previous_stage, mesh.next_stage):
        assert channel is None or isinstance(channel, SharedMemoryChannel)
    sources = []
    if mesh.previous_stage is not None:
        sources = [mesh.previous_stage, DistributedChannel(mesh.rank - 1, CPU)]
    targets = []
    if mesh.next_stage is not None:
        targets = [mesh.next_stage, DistributedChannel(mesh.rank + 1, CPU)]
    for _ in range(30):
        num_rows = rng.choice([1, 5, 16, 2 * SLOT_BYTES // 4 // 64 + 3])
        message = torch.randn(num_rows, 64, generator=generator)
        for source in sources:
            assert torch.equal(source.receive(num_rows, 64, torch.float32), message)
        for target in targets:
            target.send(message.clone())
    mesh.min_over_ranks(0)  # a barrier: no rank leaves before all have received everything


def check_lost_rank(mesh: DeviceMesh) -> None:
    """After the last rank has been killed, messages of the others fail instead of waiting."""
    group = mesh.group
    assert isinstance(group, SharedMemoryGroup)
    last_rank = mesh.world_size - 1
    group.all_reduce(torch.ones(2, 8))
    if mesh.rank == last_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    empty_trace = record_trace(group.segment.pool, lambda: None, TraceArena(1 << 12))
    for send_message in (lambda: group.all_reduce(torch.ones(2, 8)), empty_trace.replay):
        try:
            send_message()
        except ConnectionError as error:
            assert f"rank {last_rank}, which shares memory" in str(error)
        else:
            raise AssertionError("a dead rank has answered")


def main(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    bind_network_interface("lo")
    pool = ThreadPool(1 + rank % 2)  # the number of threads does not matter: one sends a message

    def join(name: str, tp: int, pp: int) -> DeviceMesh:
        return rendezvous(f"{folder}/{name}", rank, tp, pp, torch.float32, CPU, False, pool)

    mesh = join("one", size, 1)
    compare_collectives(mesh)
    assert isinstance(mesh.group, SharedMemoryGroup)
    check_replayed_all_reduce(mesh.group)
    leave_process_group()
    compare_channels(join("two", 1, size))
    leave_process_group()
    check_lost_rank(join("three", size, 1))
    os._exit(0)  # to leave the ranks would wait for the dead one


if __name__ == "__main__":
    with torch.inference_mode():
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
