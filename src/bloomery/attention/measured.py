"""From how many new positions on a prompt is better off with the library: measured on this device, and remembered.

Steps of prompts of one length go through our kernel and through the library, the longest first, until the library wins
no more; shorter prompts stay with our kernel, and so do all where the library is absent, refuses or never wins. What is
timed is the whole of it, with the gathering that the library needs, as a graph: the host's share is no part of it.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path

import torch

from bloomery.attention.base import AttentionMetadata, cache_shape
from bloomery.attention.triton_paged import TritonPaged, known
from bloomery.kernels import launch, paged_decode, paged_prefill
from bloomery.kernels.rounded_cache import cache_bytes, of_memory, write
from bloomery.remembered import FOLDER, recall, remember
from bloomery.spec import Attention

log = logging.getLogger("bloomery.attention")

REMEMBERED = FOLDER / "attention.json"
LENGTHS = (512, 1024, 2048, 4096, 8192)  # new positions of a prompt
# positions of a step, if one prompt has no more; and of a block, as is usual on a GPU
STEP = 4096
BLOCK = 64
MARGIN = 0.03  # by which the library must win
TRIES = 7

Seconds = Callable[
    [int], tuple[float, ...]
]  # a prompt's length -> a step by our kernel, and by the library


def library_from(
    specs: Iterable[Attention],
    dtype: torch.dtype,
    kv: torch.dtype,
    device: torch.device,
    path: Path = REMEMBERED,
) -> int | None:
    """For the first of these layers that the library can do, over a cache of `kv`; None is never."""
    spec = next((spec for spec in specs if known(spec, dtype)), None)
    if spec is None:
        return None
    shape = Attention(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    with torch.cuda.device(device):
        return settled(
            title(shape, dtype, kv, device), Bench(shape, dtype, kv, device).seconds, path
        )


def title(shape: Attention, dtype: torch.dtype, kv: torch.dtype, device: torch.device) -> str:
    """All that the answer depends on."""
    source = "".join(inspect.getsource(module) for module in (paged_decode, paged_prefill))
    return (
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, triton {launch.triton.__version__}, "
        f"cuDNN {torch.backends.cudnn.version()}, kernel {hashlib.sha256(source.encode()).hexdigest()[:12]}, "
        f"{shape.num_heads} heads on {shape.num_kv_heads} of {shape.head_dim}, {dtype} over {kv}"
    )


def settled(name: str, seconds: Seconds, path: Path) -> int | None:
    """As remembered, or else measured and remembered; and said."""
    seen = recall(path).get(name, {})
    before = (
        isinstance(seen, dict) and "told" in seen and isinstance(seen.get("from", ""), int | None)
    )
    least, told = (seen["from"], seen["told"]) if before else measured(name, seconds, path)
    log.info(
        "prompts go to the attention library %s; ms by our kernel and by it%s: %s",
        "never" if least is None else f"from {least} new positions on",
        ", as measured before" if before else "",
        told,
    )
    return least


def measured(name: str, seconds: Seconds, path: Path) -> tuple[int | None, str]:
    """What is remembered, unless the library refused: memory may have been short."""
    least, times = compared(seconds)
    told = ", ".join(
        f"{length}: {1e3 * ours:.3f} {1e3 * theirs:.3f}" for length, (ours, theirs) in times.items()
    )
    if all(theirs < inf for _, theirs in times.values()):
        try:
            remember(path, name, {"from": least, "told": told})
        except OSError as error:
            log.warning("attention will be measured again at the next start: %s", error)
    return least, told


def compared(seconds: Seconds) -> tuple[int | None, dict[int, tuple[float, ...]]]:
    """The smallest length from which on the library wins clearly, and what it was told by."""
    least = None
    times = dict[int, tuple[float, ...]]()
    for length in reversed(LENGTHS):
        ours, theirs = times[length] = seconds(length)
        if theirs * (1 + MARGIN) > ours:
            break
        least = length
    return least, times


class Bench:
    """Prompts without meaning, on the device."""

    def __init__(self, shape: Attention, dtype: torch.dtype, kv: torch.dtype, device: torch.device):
        self.shape = shape
        self.dtype = dtype
        self.kv = kv
        self.device = device

    @torch.inference_mode()
    def seconds(self, length: int) -> tuple[float, ...]:
        ours = TritonPaged(library=None)
        theirs = TritonPaged(library=1)
        try:
            material = self.material(length, max(STEP // length, 1))
            return timed(self.attending(ours, *material), self.attending(theirs, *material))
        except (
            RuntimeError,
            AttributeError,
        ) as error:  # it is not there, not for this device, or memory is short
            log.info("the attention library is not used: %s", error)
            return 0.0, inf

    def material(
        self, length: int, count: int
    ) -> tuple[AttentionMetadata, torch.Tensor, torch.Tensor]:
        """So many prompts of so many positions, stored one behind the other: their layout, queries and cache."""
        total = length * count
        spec = self.shape
        kind = torch.int64 if self.device.type == "cpu" else torch.int32
        every = torch.arange(total, dtype=kind, device=self.device)
        counts = (length,) * count
        starts = torch.arange(0, total + 1, length, dtype=kind, device=self.device)
        ragged = AttentionMetadata(
            counts,
            counts,
            0,
            starts,
            torch.full_like(starts[1:], length),
            every % length,
            every,
            every[: total // BLOCK].view(count, -1),
            BLOCK,
        )
        form = cache_shape(spec, total // BLOCK, BLOCK)
        memory = torch.zeros(cache_bytes(form, self.kv), dtype=torch.uint8, device=self.device)
        cache = of_memory(memory, form, self.kv)
        for half in range(2):
            write(torch.randn(form[1:], dtype=self.dtype, device=self.device), half, cache, every)
        return (
            ragged,
            torch.randn(total, spec.num_heads, spec.head_dim, dtype=self.dtype, device=self.device),
            cache,
        )

    def attending(
        self, backend: TritonPaged, ragged: AttentionMetadata, q: torch.Tensor, cache: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        plan = backend.plan(ragged)
        return lambda: backend.attend(q, cache, self.shape, plan)


def timed(*all_work: Callable[[], object]) -> tuple[float, ...]:
    """Seconds on the device of each: the quickest of some replays in turns, after a run that compiles what it needs."""
    for work in all_work:
        work()
    here = torch.cuda.current_stream()
    quickest = [inf] * len(all_work)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(here)
        graphs = [captured(work) for work in all_work]
        for _ in range(TRIES):
            for i, graph in enumerate(graphs):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                quickest[i] = min(quickest[i], start.elapsed_time(end) / 1000)
    return tuple(quickest)


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        work()
    finally:
        graph.capture_end()
    return graph
