"""Which machine this is, and what was measured on it before: the table of roofline.py, found by name and overridden.

Knows the driver's name of a GPU and the kernel's name of a CPU; never imports torch. `bloomery plan --measure` writes
what it saw to the user's cache folder, and everybody who asks for this machine afterwards gets it.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bloomery import remembered
from bloomery.config import cores
from bloomery.roofline import CPU, MACHINES, Machine, machine

REMEMBERED = remembered.FOLDER / "machines.json"


def here(device: str, path: Path = REMEMBERED) -> Machine:
    """The machine behind `cpu` or `cuda`, with remembered rates where there are any."""
    found = _processor() if device == "cpu" else named(_driver_name() or "a100-80")
    return overridden(found, recall(path).get(found.title))


def named(title: str) -> Machine:
    """The row of the table a device's own name means: "NVIDIA H100 80GB HBM3" is h100."""
    words = re.sub(r"[^a-z0-9]", "", title.lower())
    if "a100" in words:
        return machine("a100-40" if "40gb" in words else "a100-80")
    for known in sorted(MACHINES.values(), key=lambda m: -len(m.name)):
        if re.sub(r"[^a-z0-9]", "", known.name) in words:
            return known
    return replace(machine("a100-80"), name="unknown", title=title)


def overridden(found: Machine, seen: Mapping[str, Any] | None) -> Machine:
    if not seen:
        return found
    return replace(
        found, bandwidth=seen["bandwidth"], rates={**found.rates, **seen["rates"]}, measured=True
    )


def recall(path: Path = REMEMBERED) -> dict[str, Any]:
    """Title -> {bandwidth, rates} as remembered."""
    return remembered.recall(path)


def remember(
    title: str, bandwidth: float, rates: Mapping[str, float], path: Path = REMEMBERED
) -> Path:
    return remembered.remember(path, title, {"bandwidth": bandwidth, "rates": dict(rates)})


def _processor() -> Machine:
    count = cores()
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return machine("apple-m2")
    known = machine("zen3-2")
    return Machine(
        name="cpu",
        title=f"{found[1].strip() if found else 'this CPU'}, {count} cores",
        memory=memory,
        bandwidth=known.bandwidth,
        rates={kind: rate / 2 * count for kind, rate in known.rates.items()},
        link=known.link,
        link_latency=known.link_latency,
        calibration=CPU,
    )


def _driver_name() -> str | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        text = ctypes.create_string_buffer(256)
        device = ctypes.c_int(0)
        if (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(device), 0)
            or driver.cuDeviceGetName(text, 256, device)
        ):
            return None
    except (OSError, AttributeError):
        return None
    return text.value.decode(errors="replace")
