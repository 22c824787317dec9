"""What this machine does, as the engine's own kernels see it: bytes a second of reading, operations a second by kind.

Short tries of every kind take turns, spread over a few seconds, so that a moment in which another program has the cores
spoils one try of each and not the whole of one. The quickest quarter of them counts, for much makes a machine slower
than it is and nothing faster. Where most tries are far behind those, that is said.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

import torch
import torch.nn.functional as F

from bloomery.native import ops
from bloomery.native.team import team
from bloomery.roofline import FEW, ROW

# how often each kind has its turn; seconds before it in which threads of the last one park
ROUNDS = 16
PAUSE = 0.005
LEAST = 0.005  # seconds that a try takes
AGREE = 0.25  # by how much the middle of the tries may be slower than the quick ones
BYTE = 60  # fills blocks: as half floats, scales near 1
# values beyond every cache; columns of a matrix; positions of a sequence
READ = 1 << 26
WIDTH = 2048
LONG = 512
KINDS = {
    "int4": ("Q4_1", 160),
    "Q4_K": ("Q4_K", 144),
    "int8": ("Q8_0", 272),
    "Q6_K": ("Q6_K", 210),
}  # bytes of 256 values


@dataclass(frozen=True)
class Seen:
    """Rates by kind, `bandwidth` among them, and what speaks against them."""

    bandwidth: float
    rates: dict[str, float]
    doubt: str | None = None


@dataclass
class Probe:
    """One kind of work, of so many bytes or operations."""

    amount: float
    work: Callable[[], object]
    times: int = 1  # that it is done in a try
    seconds: list[float] = field(default_factory=list)


def probes(where: str, cores: int, values: int = READ) -> dict[str, Probe]:
    device = torch.device(where)
    return on_gpu(device) if device.type == "cuda" else on_cpu(cores, values)


class Turns:
    """All kinds of work in turns. `cores` is how many threads a CPU's have, 0 on a GPU; `by_cpu` counts their own time
    instead of the clock's, for machines that are never quiet: what others do to caches and memory is in it all the
    same."""

    def __init__(self, all_kinds: dict[str, Probe], cores: int, by_cpu: bool = False):
        self.all = all_kinds
        self.cores = cores
        self.by_cpu = by_cpu
        for probe in self.all.values():
            probe.work()
            begun = time.perf_counter()
            probe.work()
            probe.times = ceil(LEAST / max(time.perf_counter() - begun, 1e-6))

    def round(self) -> None:
        clock = time.process_time if self.by_cpu else time.perf_counter
        for probe in self.all.values():
            time.sleep(PAUSE)
            probe.work()
            begun = clock()
            for _ in range(probe.times):
                probe.work()
            probe.seconds.append(
                (clock() - begun) / probe.times / (self.cores if self.by_cpu else 1)
            )

    def seen(self) -> Seen:
        rates = {}
        doubts = []
        for name, probe in self.all.items():
            quick, middle, _ = statistics.quantiles(probe.seconds, n=4)
            rates[name] = probe.amount / quick
            if middle > (1 + AGREE) * quick:
                doubts.append(f"{name} by {middle / quick - 1:.0%}")
        bandwidth = rates.pop("bandwidth")
        if self.cores:
            rates["fp32" + ROW] = bandwidth / 2  # 4 bytes are two operations
        doubt = (
            f"the middle of the tries is slower than the quick ones: {', '.join(doubts)}"
            if doubts
            else None
        )
        return Seen(bandwidth, rates, doubt)


def measured(where: str, cores: int) -> Seen:
    turns = Turns(probes(where, cores), cores if where == "cpu" else 0)
    for _ in range(ROUNDS):
        turns.round()
    return turns.seen()


def on_gpu(device: torch.device) -> dict[str, Probe]:
    source = torch.randn(1 << 29, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)

    def done(work: Callable[[], object]) -> Callable[[], object]:
        def whole() -> None:
            work()
            torch.cuda.synchronize(device)

        return whole

    found = {"bandwidth": Probe(2.0 * source.nbytes, done(lambda: target.copy_(source)))}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        x = torch.randn(8192, 8192, device=device, dtype=dtype)
        found[name] = Probe(2.0 * 8192**3, done(lambda x=x: x @ x))  # type: ignore[misc]
    return found


@torch.inference_mode()
def on_cpu(cores: int, values: int) -> dict[str, Probe]:
    """Reading is a product with one row of a matrix larger than caches; the others have enough rows to compute."""
    torch.set_num_threads(cores)
    native = team().active or team().start(cores) is None
    large = torch.ones(values // WIDTH, WIDTH)
    wide = torch.ones(WIDTH, WIDTH)
    rows = torch.ones(96, WIDTH)
    few = torch.ones(24, WIDTH)
    one = torch.ones(1, WIDTH)

    def product(matrix: ops.Matrix, x: torch.Tensor) -> Probe:
        return Probe(2.0 * len(x) * matrix.rows * WIDTH, lambda: ops.linear(matrix, x))

    found = {"fp32": Probe(2.0 * rows.numel() * WIDTH, lambda: F.linear(rows, wide))}
    if not native:
        return found | {"bandwidth": Probe(large.nbytes, lambda: F.linear(one, large))}
    dense = ops.Matrix.dense(large)
    found["bandwidth"] = Probe(large.nbytes, lambda: ops.linear(dense, one))
    found["fp32" + FEW] = product(ops.Matrix.dense(wide), few)
    for name, (kind, size) in KINDS.items():
        blocks = torch.full((values // WIDTH, WIDTH // 256 * size), BYTE, dtype=torch.uint8)
        segment = (ops.pack(kind, blocks, WIDTH), len(blocks), ops.PACKED[kind][1])
        found[name + ROW] = product(ops.Matrix(WIDTH, [segment]), one)
        found[name] = product(
            ops.Matrix(WIDTH, [(segment[0], min(WIDTH, len(blocks)), segment[2])]), rows
        )
    return found | _attention()


def _attention() -> dict[str, Probe]:
    """Eight heads of 64 over two of keys in half floats: single queries over long sequences, and prompts."""
    heads = 8
    dim = 64
    lines = 8
    prompt = 256
    size = 16
    cache = torch.ones(2, lines * LONG, 2, dim, dtype=torch.float16)
    tables = torch.arange(lines * LONG // size).view(lines, -1)
    single = torch.tensor([(i, i, LONG - 1, 1) for i in range(lines)])
    tiles = torch.tensor([(0, i, i, 32) for i in range(0, prompt, 32)])

    def attend(q: torch.Tensor, items: torch.Tensor, singles: int) -> Callable[[], object]:
        largest = int(items[:, 3].max())
        return lambda: ops.attend(
            q, cache, items, singles, largest, tables, size, None, 1.0, None, None, None
        )

    pair = 4.0 * heads * dim
    return {
        "attend": Probe(pair * lines * LONG, attend(torch.ones(lines, heads, dim), single, lines)),
        "prompt": Probe(
            pair * prompt * (prompt + 1) / 2, attend(torch.ones(prompt, heads, dim), tiles, 0)
        ),
    }
