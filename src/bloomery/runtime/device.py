"""What this machine has: which device to run on, how much memory is free, and how numbers get there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from bloomery.errors import ConfigError


def check(name: str) -> torch.device:
    """The device of that name, or an error that says what there is."""
    if name != "cpu" and not re.fullmatch(r"cuda(:\d+)?", name):
        raise ConfigError(f"device {name!r} is not known: say cpu, cuda or cuda:N")
    if name != "cpu":
        found = torch.cuda.device_count()
        if int(name.partition(":")[2] or 0) >= found:
            raise ConfigError(f"device {name!r} is not there: torch sees {found} GPU(s)")
    return torch.device(name)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
        if found:
            return int(found[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def upload(
    values: Sequence[object] | torch.Tensor, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Host numbers to the device without waiting for it: from ordinary memory a copy waits for all queued work."""
    found = (
        values.to(dtype) if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
    )
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


def download(values: torch.Tensor) -> torch.Tensor:
    """A copy on its way to the host, there once what is queued by now is done: steps queued later do not delay it, and
    may overwrite the values."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return host.copy_(values, non_blocking=True)


@contextmanager
def one_thread(wanted: bool) -> Iterator[None]:
    """Torch's threads spin for milliseconds after their work, on cores that native kernels want next, and wait for each
    other where somebody else has one: what is small is better done by one of them."""
    before = torch.get_num_threads()
    if not wanted or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
