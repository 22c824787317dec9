"""What this machine does in a few seconds: bytes a second of reading, operations a second of a large product."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from bloomery.config import cores


def rates(where: str) -> tuple[float, dict[str, float]]:
    """Bandwidth, and operations a second by type of number; the best of several tries, so that a neighbour's work
    does not count as the machine's."""
    device = torch.device(where)
    cuda = device.type == "cuda"

    def seconds(work: Callable[[], object], tries: int) -> float:
        found = []
        for _ in range(tries):
            begun = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize(device)
            found.append(time.perf_counter() - begun)
        return min(found)

    if cuda:
        source = torch.randn(1 << 29, device=device, dtype=torch.bfloat16)
        target = torch.empty_like(source)
        bandwidth = 2 * source.nbytes / seconds(lambda: target.copy_(source), 10)
        del source, target
    else:
        torch.set_num_threads(cores())
        numbers = torch.ones(1 << 26)  # 256 MiB: beyond every cache
        bandwidth = numbers.nbytes / seconds(numbers.sum, 8)
    found = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)) if cuda else (("fp32", torch.float32),):
        size = 8192 if cuda else 1024
        x = torch.randn(size, size, device=device, dtype=dtype)
        found[name] = 2 * size**3 / seconds(lambda x=x: x @ x, 10)  # type: ignore[misc]
    if not cuda:
        found["int8"] = 2 * found["fp32"]  # twice the values in a register, and no library to ask
    return bandwidth, found
