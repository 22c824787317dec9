"""Checks the device that a worker runs on, and measures its free memory."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import torch

from bloomery.errors import ConfigError


def check_device(name: str) -> torch.device:
    """Return the device of that name; the error says which devices exist."""
    if name != "cpu" and not re.fullmatch(r"cuda(:\d+)?", name):
        raise ConfigError(f"device {name!r} is not known: use cpu, cuda or cuda:N")
    if name != "cpu":
        num_gpus = torch.cuda.device_count()
        if int(name.partition(":")[2] or 0) >= num_gpus:
            raise ConfigError(f"device {name!r} does not exist: torch sees {num_gpus} GPU(s)")
    return torch.device(name)


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        available = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
        if available:
            return int(available[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def create_cuda_context() -> None:
    """Create the CUDA context of the first GPU ahead of time; it takes about half a second."""
    with suppress(RuntimeError):  # the worker reports what is wrong with the device
        torch.empty(1, device="cuda")
