"""Measures this device with the engine's own kernels: bytes per second, and operations per second.

Short runs of every kind of work take turns over a few seconds. Another program that takes the cores
for a moment then disturbs one run of each kind instead of all runs of one kind. The fastest quarter
of the runs counts, because a disturbance only makes a run slower. If most runs are much slower than
the fastest quarter, the measurement carries a warning.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

import torch
import torch.nn.functional as F

from bloomery.hardware import FEW_ROWS, SINGLE_ROW
from bloomery.native import ops
from bloomery.native.build import NativeBuildError
from bloomery.native.thread_pool import ThreadPool

NUM_ROUNDS = 16  # timed runs of each kind of work
PAUSE_SECONDS = 0.005  # before each run; idle threads of the last run go to sleep meanwhile
MIN_RUN_SECONDS = 0.005  # shorter work is repeated within a run
MAX_SPREAD = 0.25  # fraction by which the median run may be slower than the fastest quarter
FILL_BYTE = 60  # fills quantized blocks; a float16 scale of two such bytes is near 1
READ_VALUES = 1 << 26  # values of the matrix that measures bandwidth: no CPU cache holds them
MATRIX_COLUMNS = 2048
GPU_MATRIX_SIZE = 8192  # rows and columns
SEQUENCE_LEN = 512  # positions of each sequence in the measured decode attention
# (block type, bytes of 256 values) of each quantized number format
PACKED_FORMATS = {
    "int4": ("Q4_1", 160),
    "Q4_K": ("Q4_K", 144),
    "int8": ("Q8_0", 272),
    "Q6_K": ("Q6_K", 210),
}


@dataclass(frozen=True)
class DeviceMeasurement:
    """Measured rates by kind of work."""

    bandwidth: float  # bytes per second
    rates: dict[str, float]  # operations per second
    warning: str | None = None  # why the rates may be too low


@dataclass
class WorkProbe:
    """One kind of work to measure."""

    amount: float  # bytes or operations of one run of the work
    work: Callable[[], object]
    repeats: int = 1  # executions of the work in one timed run
    seconds: list[float] = field(default_factory=list)  # of one execution, by timed run


def build_probes(device_name: str, cores: int, values: int = READ_VALUES) -> dict[str, WorkProbe]:
    """Return all kinds of work that are measured on this device, including `bandwidth`."""
    device = torch.device(device_name)
    if device.type == "cuda":
        return build_gpu_probes(device)
    return build_cpu_probes(cores, values)


class ProbeRunner:
    """Runs all kinds of work in turns.

    cores: threads of the CPU's work, 0 on a GPU.
    by_cpu_time: count the threads' CPU time instead of the clock's, for machines that are never
        quiet. The effect of other programs on caches and memory is still included.
    """

    def __init__(self, probes: dict[str, WorkProbe], cores: int, by_cpu_time: bool = False):
        self.probes = probes
        self.cores = cores
        self.by_cpu_time = by_cpu_time
        for probe in self.probes.values():
            probe.work()
            start = time.perf_counter()
            probe.work()
            seconds = max(time.perf_counter() - start, 1e-6)
            probe.repeats = ceil(MIN_RUN_SECONDS / seconds)

    def run_round(self) -> None:
        """Time each kind of work once."""
        clock = time.process_time if self.by_cpu_time else time.perf_counter
        num_clocks = self.cores if self.by_cpu_time else 1
        for probe in self.probes.values():
            time.sleep(PAUSE_SECONDS)
            probe.work()
            start = clock()
            for _ in range(probe.repeats):
                probe.work()
            probe.seconds.append((clock() - start) / probe.repeats / num_clocks)

    def summarize(self) -> DeviceMeasurement:
        """Return the rates of the fastest quarter of all runs."""
        rates = {}
        spreads = []
        for name, probe in self.probes.items():
            fast, median, _ = statistics.quantiles(probe.seconds, n=4)
            rates[name] = probe.amount / fast
            if median > (1 + MAX_SPREAD) * fast:
                spreads.append(f"{name} by {median / fast - 1:.0%}")
        bandwidth = rates.pop("bandwidth")
        if self.cores:
            # A weight of 4 or 2 bytes takes part in two operations.
            rates["fp32" + SINGLE_ROW] = bandwidth / 2
            rates["bf16" + SINGLE_ROW] = bandwidth
        warning = None
        if spreads:
            slower = ", ".join(spreads)
            warning = f"the median run is slower than the fastest quarter: {slower}"
        return DeviceMeasurement(bandwidth, rates, warning)


def measure_device(device_name: str, cores: int) -> DeviceMeasurement:
    """Measure the device in a few seconds."""
    num_threads = cores if device_name == "cpu" else 0
    runner = ProbeRunner(build_probes(device_name, cores), num_threads)
    for _ in range(NUM_ROUNDS):
        runner.run_round()
    return runner.summarize()


def build_gpu_probes(device: torch.device) -> dict[str, WorkProbe]:
    """Build probes that copy large tensors and multiply square matrices."""
    source = torch.randn(1 << 29, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)

    def synchronized(work: Callable[[], object]) -> Callable[[], object]:
        def run_and_wait() -> None:
            work()
            torch.cuda.synchronize(device)

        return run_and_wait

    copy = synchronized(lambda: target.copy_(source))
    probes = {"bandwidth": WorkProbe(2.0 * source.nbytes, copy)}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        x = torch.randn(GPU_MATRIX_SIZE, GPU_MATRIX_SIZE, device=device, dtype=dtype)
        product = synchronized(lambda x=x: x @ x)  # type: ignore[misc]
        probes[name] = WorkProbe(2.0 * GPU_MATRIX_SIZE**3, product)
    return probes


@torch.inference_mode()
def build_cpu_probes(cores: int, values: int) -> dict[str, WorkProbe]:
    """Build probes of matrix products and attention, by the CPU kernels where they can be built.

    Bandwidth is measured by multiplying one row with a matrix that no cache holds. The other
    products have enough rows to be bound by arithmetic.
    """
    torch.set_num_threads(cores)
    try:
        pool = ThreadPool(cores)
    except NativeBuildError:
        pool = None
    large = torch.ones(values // MATRIX_COLUMNS, MATRIX_COLUMNS)
    square = torch.ones(MATRIX_COLUMNS, MATRIX_COLUMNS)
    many_rows = torch.ones(96, MATRIX_COLUMNS)
    few_rows = torch.ones(24, MATRIX_COLUMNS)
    single_row = torch.ones(1, MATRIX_COLUMNS)
    num_operations = 2.0 * many_rows.numel() * MATRIX_COLUMNS
    if pool is None:
        return {
            "fp32": WorkProbe(num_operations, lambda: F.linear(many_rows, square)),
            "bandwidth": WorkProbe(large.nbytes, lambda: F.linear(single_row, large)),
        }

    def product(matrix: ops.NativeMatrix, x: torch.Tensor) -> WorkProbe:
        num_operations = 2.0 * len(x) * matrix.rows * MATRIX_COLUMNS
        return WorkProbe(num_operations, lambda: ops.linear(pool, matrix, x))

    large_floats = ops.NativeMatrix.from_floats(pool, large)
    square_floats = ops.NativeMatrix.from_floats(pool, square)
    probes = {
        "bandwidth": WorkProbe(large.nbytes, lambda: ops.linear(pool, large_floats, single_row)),
        "fp32": product(square_floats, many_rows),
        "fp32" + FEW_ROWS: product(square_floats, few_rows),
    }
    for name, (kind, bytes_per_block) in PACKED_FORMATS.items():
        row_bytes = MATRIX_COLUMNS // 256 * bytes_per_block
        blocks = torch.full((len(large), row_bytes), FILL_BYTE, dtype=torch.uint8)
        segment = ops.pack_segment(pool, kind, blocks, MATRIX_COLUMNS)
        packed, num_rows, code = segment
        small_segment = (packed, min(MATRIX_COLUMNS, num_rows), code)
        large_matrix = ops.NativeMatrix(pool, MATRIX_COLUMNS, [segment])
        small_matrix = ops.NativeMatrix(pool, MATRIX_COLUMNS, [small_segment])
        probes[name + SINGLE_ROW] = product(large_matrix, single_row)
        probes[name] = product(small_matrix, many_rows)
    return probes | build_attention_probes(pool)


def build_attention_probes(pool: ThreadPool) -> dict[str, WorkProbe]:
    """Build probes of decode and prefill attention: 8 heads of 64 over 2 KV heads in float16."""
    num_heads = 8
    head_dim = 64
    num_decodes = 8
    prompt_len = 256
    query_tile = 32
    block_size = 16
    num_slots = num_decodes * SEQUENCE_LEN
    cache = torch.ones(2, num_slots, 2, head_dim, dtype=torch.float16)
    block_tables = torch.arange(num_slots // block_size).view(num_decodes, -1)
    # sequence, first token, first position, number of queries
    decode_tiles = torch.tensor([(i, i, SEQUENCE_LEN - 1, 1) for i in range(num_decodes)])
    prefill_tiles = torch.tensor([(0, i, i, query_tile) for i in range(0, prompt_len, query_tile)])

    def attention(
        num_tokens: int, tiles: torch.Tensor, num_decodes: int, max_queries: int
    ) -> Callable[[], object]:
        q = torch.ones(num_tokens, num_heads, head_dim)
        return lambda: ops.paged_attention(
            pool,
            q,
            cache,
            tiles,
            num_decodes,
            max_queries,
            block_tables,
            block_size,
            None,
            1.0,
            None,
            None,
            None,
        )

    operations_per_pair = 4.0 * num_heads * head_dim
    decode_pairs = num_decodes * SEQUENCE_LEN
    prefill_pairs = prompt_len * (prompt_len + 1) / 2
    return {
        "decode attention": WorkProbe(
            operations_per_pair * decode_pairs,
            attention(num_decodes, decode_tiles, num_decodes, 1),
        ),
        "prefill attention": WorkProbe(
            operations_per_pair * prefill_pairs,
            attention(prompt_len, prefill_tiles, 0, query_tile),
        ),
    }
