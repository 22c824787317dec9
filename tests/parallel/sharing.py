"""A rank that compares messages through shared memory with those through torch: `python -m tests.parallel.sharing RANK
SIZE FOLDER`. First all are a group, then each is a stage of a pipeline, then the last one is killed; any difference is
an error, and so is a wait for the dead."""

from __future__ import annotations

import os
import random
import signal
import sys

import torch

from bloomery.config import use_interface
from bloomery.native.arena import Arena
from bloomery.native.record import record
from bloomery.native.team import team
from bloomery.parallel.groups import Ranks
from bloomery.parallel.mesh import Far, Mesh, meet, part
from bloomery.parallel.shared import SLOT, Near, Shared

CPU = torch.device("cpu")


def compare_sums(mesh: Mesh) -> None:
    shared = mesh.group
    assert isinstance(shared, Shared) and isinstance(shared.other, Ranks)
    choose = random.Random(7)
    make = torch.Generator().manual_seed(7)
    for turn in range(30):
        tokens = choose.choice([1, 2, 3, 16, 100])
        width = choose.choice(
            [1, 7, 64, 2048, SLOT // 4 // tokens + 13]
        )  # the last: in more than one part
        dtype = choose.choice(
            [torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.int64]
        )
        parts = [
            (100 * torch.randn(tokens, width, generator=make)).to(dtype) for _ in range(mesh.size)
        ]
        mine = parts[mesh.rank]
        got = shared.sum(mine.clone())
        other = shared.other.sum(mine.clone())
        near = (
            2000 * torch.finfo(dtype).eps if dtype.is_floating_point else 0
        )  # torch adds in an order of its own
        assert (got.double() - other.double()).abs().max() <= near, (
            f"turn {turn}: {tokens} x {width} {dtype}"
        )
        if dtype == torch.float32:  # in the order of ranks, and thus the same bits everywhere
            want = parts[0]
            for part in parts[1:]:
                want = want + part
            assert torch.equal(got, want)
        last = choose.randint(1, width)
        total = (mesh.size - 1) * width + last
        if -(-total // mesh.size) == width:
            short = mine[:, :last] if mesh.rank == mesh.size - 1 else mine
            joined = shared.join(short, total)
            assert torch.equal(joined, shared.other.join(short, total))
            assert torch.equal(joined, torch.cat(parts, -1)[:, :total])


def replay_sums(shared: Shared) -> None:
    """A message that is written down is sent at every replay, and not before."""
    x = torch.zeros(4, 32)
    out = torch.zeros(4, 32)
    program = record(lambda: out.copy_(shared.sum(x + x)), Arena(1 << 20))
    assert len(program) == 3
    for turn in range(1, 4):
        x.fill_(turn * (shared.rank + 1))
        program.replay()
        assert torch.equal(out, torch.full((4, 32), float(turn * shared.size * (shared.size + 1))))


def compare_lines(mesh: Mesh) -> None:
    """More messages than there are slots, short ones and such as take several slots; by both ways."""
    make = torch.Generator().manual_seed(3)
    choose = random.Random(3)
    assert all(line is None or isinstance(line, Near) for line in (mesh.before, mesh.behind))
    before = [] if mesh.before is None else [mesh.before, Far(mesh.rank - 1, CPU)]
    behind = [] if mesh.behind is None else [mesh.behind, Far(mesh.rank + 1, CPU)]
    for _ in range(30):
        count = choose.choice([1, 5, 16, 2 * SLOT // 4 // 64 + 3])
        sent = torch.randn(count, 64, generator=make)
        for line in before:
            assert torch.equal(line.receive(count, 64, torch.float32), sent)
        for line in behind:
            line.send(sent.clone())
    mesh.least(0)  # nobody leaves before all have heard everything


def lose_one(mesh: Mesh) -> None:
    mesh.group.sum(torch.ones(2, 8))
    if mesh.rank == mesh.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for again in (
        lambda: mesh.group.sum(torch.ones(2, 8)),
        record(lambda: None, Arena(1 << 12)).replay,
    ):
        try:
            again()
        except ConnectionError as error:
            assert f"rank {mesh.size - 1} of those" in str(error)
        else:
            raise AssertionError("the dead have answered")


def main(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    use_interface("lo")
    team().start(1 + rank % 2)  # one thread carries a message, however many there are
    mesh = meet(f"{folder}/one", rank, size, 1, torch.float32, CPU, False, True)
    compare_sums(mesh)
    replay_sums(mesh.group)
    part()
    mesh = meet(f"{folder}/two", rank, 1, size, torch.float32, CPU, False, True)
    compare_lines(mesh)
    part()
    lose_one(meet(f"{folder}/three", rank, size, 1, torch.float32, CPU, False, True))
    os._exit(0)  # without a farewell to those who are gone


if __name__ == "__main__":
    with torch.inference_mode():
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
