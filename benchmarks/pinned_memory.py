"""What running steps notice when another thread pins host memory.

    PYTHONPATH=src:. python3 benchmarks/pinned_memory.py [--mib 84] [--count 12]

Replays a CUDA graph of a few milliseconds again and again, with two replays in flight, as the
engine does with decode steps. Meanwhile a thread makes buffers of the size of a LoRA adapter, in
one of these ways, and the longest time between two replays is printed:

  nothing        no thread
  pageable       ordinary memory, written once
  pinned         torch's pinned memory, which is one allocation of the driver
  registered N   ordinary memory, registered with the driver in parts of N MiB

Then each buffer is copied to the device, part by part: how long the calls take, which shows whether
they are asynchronous, and the rate.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from functools import partial

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


def make_buffers(
    make: Callable[[], torch.Tensor], count: int, buffers: list[torch.Tensor], seconds: list[float]
) -> None:
    """Make buffers with pauses between them, and note how long each took."""
    for _ in range(count):
        begin = time.perf_counter()
        buffers.append(make())
        seconds.append(time.perf_counter() - begin)
        time.sleep(0.01)


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


def measure_way(
    name: str, make: Callable[[], torch.Tensor] | None, count: int, graph: torch.cuda.CUDAGraph
) -> torch.Tensor | None:
    """Print the gaps while a thread makes buffers; returns one of them."""
    buffers: list[torch.Tensor] = []
    seconds: list[float] = []
    thread = None
    if make is not None:
        work = partial(make_buffers, make, count, buffers, seconds)
        thread = threading.Thread(target=work)
    gaps = measure_gaps(graph, thread)
    result = {
        "way": name,
        "median_ms": round(1e3 * gaps[len(gaps) // 2], 2),
        "p99_ms": round(1e3 * gaps[len(gaps) * 99 // 100], 2),
        "longest_ms": round(1e3 * gaps[-1], 2),
    }
    if seconds:
        result["ms_per_buffer"] = round(1e3 * sum(seconds) / count, 1)
    print(json.dumps(result), flush=True)
    return buffers[0] if buffers else None


def measure_copy(name: str, buffer: torch.Tensor, part_bytes: int) -> None:
    """Print how long it takes to copy a buffer to the device part by part."""
    target = torch.empty_like(buffer, device="cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for first in range(0, buffer.nbytes, part_bytes):
        part = slice(first, first + part_bytes)
        target[part].copy_(buffer[part], non_blocking=True)
    call_seconds = time.perf_counter() - begin
    torch.cuda.synchronize()
    rate = buffer.nbytes / (time.perf_counter() - begin) / 1e9
    result = {
        "copy of": name,
        "parts_mib": part_bytes // MIB,
        "call_ms": round(1e3 * call_seconds, 3),
        "gb_s": round(rate, 1),
        "equal": bool((target.cpu() == buffer).all()),
    }
    print(json.dumps(result), flush=True)


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

    def make_buffer(part_mib: int = 0, is_pinned: bool = False) -> torch.Tensor:
        buffer = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        if part_mib:
            register(buffer, part_mib * MIB)
        return buffer

    part_sizes = (1, 4, 16, args.mib)
    measure_way("nothing", None, args.count, graph)
    measure_way("pageable", make_buffer, args.count, graph)
    pinned = measure_way("pinned", partial(make_buffer, is_pinned=True), args.count, graph)
    assert pinned is not None
    measure_copy("pinned", pinned, num_bytes)
    for size in part_sizes:
        buffer = measure_way(f"registered {size}", partial(make_buffer, size), args.count, graph)
        assert buffer is not None
        measure_copy(f"registered {size}", buffer, size * MIB)  # one copy cannot span two parts


if __name__ == "__main__":
    main()
