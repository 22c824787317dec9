"""What running steps notice when another thread pins host memory.

    PYTHONPATH=src:. python3 benchmarks/pinned_memory.py [--mib 84] [--count 12]

Replays a CUDA graph of a few milliseconds again and again, with two replays in flight, as the
engine does with decode steps. Meanwhile a thread makes buffers of the size of a LoRA adapter, in
one of these ways, and the longest time between two replays is printed:

  nothing        no thread
  pageable       ordinary memory, written once
  pinned         torch's pinned memory, which is one allocation of the driver
  registered N   ordinary memory, registered with the driver in parts of N MiB

Then buffers are copied to the device, each in one copy and in one copy per part: how long the call
takes, which shows whether it is asynchronous, and the rate.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable

import torch

MIB = 1 << 20
WARMUP_REPLAYS = 50
REPLAYS_WITHOUT_THREAD = 300


def capture_graph(milliseconds: float = 4.0) -> torch.cuda.CUDAGraph:
    """Capture matrix products that take about this long."""
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    b = torch.empty_like(a)

    def multiply(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a, out=b)

    multiply(10)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    multiply(50)
    torch.cuda.synchronize()
    count = max(int(milliseconds / 1e3 / ((time.perf_counter() - begin) / 50)), 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply(count)
    return graph


def register(buffer: torch.Tensor, part_bytes: int) -> None:
    """Pin the memory of a buffer, part by part."""
    cudart = torch.cuda.cudart()
    for first in range(0, buffer.nbytes, part_bytes):
        size = min(part_bytes, buffer.nbytes - first)
        status = cudart.cudaHostRegister(buffer.data_ptr() + first, size, 0)
        assert int(status) == 0, status


def make_buffers(make: Callable[[], torch.Tensor], count: int, kept: list[torch.Tensor]) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        kept.append(make())
        time.sleep(0.01)
    return time.perf_counter() - begin


def measure_gaps(graph: torch.cuda.CUDAGraph, thread: threading.Thread | None) -> list[float]:
    """Replay while the thread runs; returns the seconds between the ends of replays, sorted."""
    events = [torch.cuda.Event() for _ in range(2)]
    gaps = []
    for event in events:
        graph.replay()
        event.record()
    if thread is not None:
        thread.start()
    last = time.perf_counter()
    number = 0
    while thread.is_alive() if thread is not None else number < REPLAYS_WITHOUT_THREAD:
        event = events[number % 2]
        event.synchronize()
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
        graph.replay()
        event.record()
        number += 1
    torch.cuda.synchronize()
    return sorted(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=84)
    parser.add_argument("--count", type=int, default=12)
    args = parser.parse_args()
    num_bytes = args.mib * MIB
    graph = capture_graph()
    for _ in range(WARMUP_REPLAYS):
        graph.replay()
    torch.cuda.synchronize()

    def make_pageable() -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def make_pinned() -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def make_registered(part_mib: int) -> torch.Tensor:
        buffer = make_pageable()
        register(buffer, part_mib * MIB)
        return buffer

    ways: dict[str, Callable[[], torch.Tensor] | None] = {
        "nothing": None,
        "pageable": make_pageable,
        "pinned": make_pinned,
        "registered 1": lambda: make_registered(1),
        "registered 4": lambda: make_registered(4),
        "registered 16": lambda: make_registered(16),
        "registered 84": lambda: make_registered(args.mib),
    }
    buffers: dict[str, torch.Tensor] = {}
    for name, make in ways.items():
        kept: list[torch.Tensor] = []
        thread = None
        seconds = [0.0]
        if make is not None:

            def work(make: Callable[[], torch.Tensor] = make) -> None:
                seconds[0] = make_buffers(make, args.count, kept)

            thread = threading.Thread(target=work)
        gaps = measure_gaps(graph, thread)
        result = {
            "way": name,
            "median_ms": round(1e3 * gaps[len(gaps) // 2], 2),
            "p99_ms": round(1e3 * gaps[len(gaps) * 99 // 100], 2),
            "longest_ms": round(1e3 * gaps[-1], 2),
            "ms_per_buffer": round(1e3 * seconds[0] / args.count - 10, 1),
        }
        print(json.dumps(result), flush=True)
        if kept:
            buffers[name] = kept[0]
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    for name, buffer in buffers.items():
        part_mib = int(name.split()[1]) if name.startswith("registered") else args.mib
        for parts_mib in sorted({part_mib, args.mib}):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for first in range(0, num_bytes, parts_mib * MIB):
                end = first + parts_mib * MIB
                target[first:end].copy_(buffer[first:end], non_blocking=True)
            call_ms = 1e3 * (time.perf_counter() - begin)
            torch.cuda.synchronize()
            rate = num_bytes / (time.perf_counter() - begin) / 1e9
            is_equal = bool((target.cpu() == buffer).all())
            result = {
                "copy of": name,
                "parts_mib": parts_mib,
                "call_ms": round(call_ms, 3),
                "gb_s": round(rate, 1),
                "equal": is_equal,
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
