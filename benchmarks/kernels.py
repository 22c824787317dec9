"""Checks, times and tunes the small kernels and the attention kernels on one GPU.

    PYTHONPATH=src python3 benchmarks/kernels.py check   compare each kernel with its reference
    PYTHONPATH=src python3 benchmarks/kernels.py bench   times, and the share of the roofline floor
    PYTHONPATH=src python3 benchmarks/kernels.py tune    launch parameters of attention

A further argument selects the cases whose name contains it. A check passes if the relative error is
below the limit of its type (tests/kernels/oracles.py). Outputs are filled with NaN beforehand, and
the KV cache holds NaN wherever no sequence has a position. Times are medians of replays of one CUDA
graph of many calls, over copies of the KV cache that do not fit into the L2 cache. The floor is
bytes at HBM_BYTES_PER_SECOND or operations at PEAK_FLOPS, both measured on an H200.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from bloomery.attention.triton_paged import (
    TritonPagedAttention,
    library_supports,
    visible_positions,
)
from bloomery.fusion import ActivationEpilogue, QkTransform
from bloomery.kernels.activation import apply_activation
from bloomery.kernels.launch import num_multiprocessors
from bloomery.kernels.norm import layer_norm, rms_norm, rms_norm_reference
from bloomery.kernels.paged_decode import PagedDecodeTiling, select_decode_tiling
from bloomery.kernels.paged_prefill import PagedPrefillTiling, select_prefill_tiling
from bloomery.kernels.rope_cache import apply_rope_and_cache
from bloomery.spec import AlibiSpec, AttentionGateSpec, AttentionSpec
from tests.kernels.oracles import (
    ALL_ACTIVATIONS,
    ERROR_LIMITS,
    AttentionCase,
    check_activation,
    check_attention,
    check_norm,
    check_output_gate,
    check_rope_and_cache,
    make_attention_case,
    relative_error,
)

HBM_BYTES_PER_SECOND = 4.25e12
PEAK_FLOPS = 781e12  # bf16 operations per second
NUM_PROCESSES = 12  # that compile kernels in parallel
BLOCK_SIZE = 64
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ATTENTION_SPECS = {
    "gqa 32/8 d128": AttentionSpec(32, 8, 128),
    "gqa 32/8 d64": AttentionSpec(32, 8, 64),
    "mqa 48/1 d128": AttentionSpec(48, 1, 128),
    "alibi 32/32 d128": AttentionSpec(32, 32, 128, AlibiSpec()),
}
SOFTPLUS_GATE = AttentionGateSpec(per_head=True, activation="softplus")
FEATURE_SPECS = {
    "sinks 64/8 d64": AttentionSpec(64, 8, 64, sinks=True),
    "sinks window 64/8 d64": AttentionSpec(64, 8, 64, sinks=True, window=128),
    "chunk 40/8 d128": AttentionSpec(40, 8, 128, chunk=100),
    "gate 16/2 d256": AttentionSpec(16, 2, 256, gate=AttentionGateSpec()),
    "gate of heads 64/8 d128": AttentionSpec(64, 8, 128, window=130, gate=SOFTPLUS_GATE),
    "all d512": AttentionSpec(8, 1, 512, sinks=True, chunk=90, gate=AttentionGateSpec()),
}


# Pairs with and without a feature, whose times should be the same.
TIMED_FEATURE_SPECS = {
    "plain 64/8 d64": AttentionSpec(64, 8, 64),
    "sinks 64/8 d64": AttentionSpec(64, 8, 64, sinks=True),
    "window 64/8 d64": AttentionSpec(64, 8, 64, window=128),
    "sinks window 64/8 d64": AttentionSpec(64, 8, 64, sinks=True, window=128),
    "plain 16/2 d256": AttentionSpec(16, 2, 256),
    "gate 16/2 d256": AttentionSpec(16, 2, 256, gate=AttentionGateSpec()),
    "plain 16/4 d512": AttentionSpec(16, 4, 512),
}


# ---- check ----


class KernelCheck(NamedTuple):
    """A comparison to run: it returns a relative error, whose limit depends on the type."""

    name: str
    run: Callable[[], float]
    dtype: torch.dtype


class CheckResult(NamedTuple):
    """The outcome of a KernelCheck."""

    name: str
    error: float
    limit: float
    exception: str  # empty if the check ran


def check_captured_decode(spec: AttentionSpec, dtype: torch.dtype, early: bool) -> float:
    """Replay a CUDA graph of cache write, decode attention and norm while its inputs change.

    Sequence lengths, block tables, the KV cache and queries are new in every replay.
    """
    batch_size = 5
    max_len = 900
    case = make_attention_case(
        spec, [1] * batch_size, [max_len] * batch_size, BLOCK_SIZE, dtype, "cuda"
    ).without_host_lengths()
    metadata = case.metadata
    block_tables = metadata.block_tables
    cache = case.cache
    backend = TritonPagedAttention(early_decode=early)
    qkv_width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    qkv = torch.randn(batch_size, qkv_width, device="cuda").to(dtype)
    weight = torch.ones(spec.num_heads * spec.head_dim, device="cuda")

    def step() -> torch.Tensor:
        q = apply_rope_and_cache(qkv, cache, metadata.slot_mapping, QkTransform())
        plan = backend.prepare(metadata)
        attended = backend.attend(q, cache, spec, plan, case.sinks, case.gate)
        return rms_norm(attended, weight, 1e-5)

    graph, out = capture_graph(step)
    worst = 0.0
    for _ in range(8):
        num_blocks = cache.shape[1] // BLOCK_SIZE
        blocks = torch.randperm(num_blocks, device="cuda")[: block_tables.numel()]
        block_tables.copy_(blocks.view_as(block_tables))
        metadata.seq_lens.random_(1, max_len)
        last = metadata.seq_lens.long()[:, None] - 1
        last_block = block_tables.gather(1, last // BLOCK_SIZE)
        slots = last_block * BLOCK_SIZE + last % BLOCK_SIZE
        metadata.slot_mapping.copy_(slots[:, 0])
        cache.normal_()
        qkv.normal_()
        out.fill_(torch.nan)
        graph.replay()
        q = qkv.view(batch_size, -1, spec.head_dim)[:, : spec.num_heads]
        attended = replace(case, q=q).expected()
        expected = rms_norm_reference(attended, weight, 1e-5)
        worst = max(worst, relative_error(out, expected))
    return worst


def all_checks() -> Iterator[KernelCheck]:
    for (dtype_name, dtype), width in product(DTYPES.items(), (64, 100, 576, 4096, 6144, 14336)):
        for options in ("rms", "rms bare", "rms strided", "layer", "layer bias", "layer bare"):
            run = partial(check_norm, width, options, dtype, "cuda")
            yield KernelCheck(f"norm {options} {width} {dtype_name}", run, dtype)
        for activation in ALL_ACTIVATIONS:
            kind = "gate" if activation.gated else "activation"
            run = partial(check_activation, width, activation, dtype, "cuda")
            yield KernelCheck(f"{kind} {activation.name} {width} {dtype_name}", run, dtype)
    rope_cases = (
        (32, 8, 128, 128, ""),
        (32, 8, 128, 128, "tables"),
        (32, 8, 128, 128, "rms tables"),
        (48, 1, 128, 0, ""),
        (16, 16, 256, 64, "interleaved"),
        (32, 32, 80, 32, ""),
        (32, 32, 96, 96, ""),
        (7, 7, 112, 112, "clip"),
        (12, 4, 64, 64, "layer each clip interleaved"),
        (8, 2, 64, 16, "rms bare"),
        (71, 1, 64, 64, "rms each"),
        (32, 8, 128, 128, "rms after tables"),
        (40, 8, 128, 128, "rms bare after interleaved"),
        (32, 8, 128, 128, "scaled tables"),
        (64, 8, 128, 64, "rms tables narrow-gate"),
        (16, 2, 256, 64, "rms tables gate"),
        (8, 2, 320, 320, "rms value"),
        (32, 4, 512, 512, "rms bare value shared tables"),
        (8, 1, 512, 128, "rms after value shared scaled tables gate"),
    )
    for (dtype_name, dtype), rope_case in product(DTYPES.items(), rope_cases):
        run = partial(check_rope_and_cache, *rope_case, dtype, "cuda")
        yield KernelCheck(f"rope {rope_case} {dtype_name}", run, dtype)
    for (dtype_name, dtype), kind, per_head in product(
        DTYPES.items(), ("sigmoid", "softplus"), (False, True)
    ):
        run = partial(check_output_gate, 12, 80, per_head, kind, dtype, "cuda")
        yield KernelCheck(f"output-gate {kind} {per_head} {dtype_name}", run, dtype)
    yield from attention_checks()
    yield from captured_decode_checks()
    yield from library_checks()


def attention_checks() -> Iterator[KernelCheck]:
    """Attention over many head shapes, windows and batches."""
    specs = dict(ATTENTION_SPECS)
    for head_dim in (64, 80, 96, 112, 128, 256):
        specs[f"mha d{head_dim}"] = AttentionSpec(4, 4, head_dim)
        specs[f"gqa d{head_dim}"] = AttentionSpec(14, 2, head_dim)
    for head_dim, window in product((64, 128, 256), (1, 40, 200)):
        specs[f"window {window} d{head_dim}"] = AttentionSpec(8, 4, head_dim, window=window)
    specs["softcap"] = AttentionSpec(8, 4, 256, softcap=5.0)
    specs["cap window"] = AttentionSpec(8, 4, 128, softcap=5.0, window=130)
    specs["alibi gqa"] = AttentionSpec(12, 4, 80, AlibiSpec(scale=0.5))
    specs["mqa 71/1 d64"] = AttentionSpec(71, 1, 64)
    specs |= FEATURE_SPECS
    for head_dim in (320, 384, 512):
        specs[f"wide d{head_dim}"] = AttentionSpec(8, 2, head_dim)
        specs[f"wide mqa d{head_dim}"] = AttentionSpec(16, 1, head_dim, window=130)
    # By name: new positions of each sequence, and its length.
    batches = {
        "few": ([1, 1, 1], [1, 130, 1500]),
        "many": ([1] * 150, [random.randint(1, 400) for _ in range(150)]),
        "prompts": ([300, 2, 129, 17], [300, 200, 400, 1100]),
        "mixed": ([1, 1, 5, 200], [64, 700, 5, 333]),
    }
    for (dtype_name, dtype), (spec_name, spec), (batch_name, (query_lens, seq_lens)) in product(
        DTYPES.items(), specs.items(), batches.items()
    ):
        # These run the same code as bf16, and compiling takes time.
        if dtype_name == "fp16" and spec_name not in ATTENTION_SPECS:
            continue
        if dtype_name == "fp32" and "window" in spec_name:
            continue
        block_sizes: tuple[int, ...] = (64,)
        if spec_name == "gqa 32/8 d128" and batch_name == "mixed":
            block_sizes = (16, 32, 64, 128)
        for block_size in block_sizes:
            run = partial(check_new_case, None, spec, query_lens, seq_lens, block_size, dtype)
            name = f"attention {spec_name} {batch_name} block {block_size} {dtype_name}"
            yield KernelCheck(name, run, dtype)


def captured_decode_checks() -> Iterator[KernelCheck]:
    specs = ATTENTION_SPECS | FEATURE_SPECS | {"window": AttentionSpec(8, 4, 64, window=100)}
    for (spec_name, spec), early in product(specs.items(), (False, True)):
        for dtype_name in ("fp16", "bf16"):
            dtype = DTYPES[dtype_name]
            run = partial(check_captured_decode, spec, dtype, early)
            name = f"graph {spec_name} {'early' if early else ''} {dtype_name}"
            yield KernelCheck(name, run, dtype)


def library_checks() -> Iterator[KernelCheck]:
    """Long prefills that go to the attention library."""
    specs = (
        AttentionSpec(8, 2, 128),
        AttentionSpec(8, 2, 64),
        AttentionSpec(8, 2, 128, chunk=600, gate=AttentionGateSpec()),
    )
    for spec, lengths in product(specs, ([700], [1, 300, 700, 500])):
        run = partial(check_new_case, 400, spec, lengths, lengths, BLOCK_SIZE, torch.bfloat16)
        gate = " gate" if spec.gate else ""
        yield KernelCheck(f"library d{spec.head_dim}{gate} {lengths}", run, torch.bfloat16)


def check_new_case(
    library_min_len: int | None,
    spec: AttentionSpec,
    query_lens: list[int],
    seq_lens: list[int],
    block_size: int,
    dtype: torch.dtype,
) -> float:
    case = make_attention_case(spec, query_lens, seq_lens, block_size, dtype, "cuda")
    return check_attention(case, TritonPagedAttention(library_min_len=library_min_len))


def run_some_checks(process: int, name_filter: str) -> list[CheckResult]:
    """Run every NUM_PROCESSES-th check."""
    results = []
    for i, check in enumerate(all_checks()):
        if i % NUM_PROCESSES != process or name_filter not in check.name:
            continue
        torch.manual_seed(i)
        limit = ERROR_LIMITS[check.dtype]
        try:
            results.append(CheckResult(check.name, check.run(), limit, ""))
        except Exception as problem:
            exception = repr(problem)[:300]
            results.append(CheckResult(check.name, float("inf"), limit, exception))
    return results


def run_checks(name_filter: str) -> int:
    """Run all checks, print a summary, and return the number of failures."""
    results = []
    for part in run_in_processes(run_some_checks, name_filter):
        results += part
    errors_by_kind: dict[str, list[float]] = {}
    for result in results:
        name_parts = result.name.split()
        errors_by_kind.setdefault(f"{name_parts[0]} {name_parts[-1]}", []).append(result.error)
    for kind, errors in sorted(errors_by_kind.items()):
        print(f"{kind:30s} {len(errors):4d} checks, worst {max(errors):.1e}")
    failed = [result for result in results if not result.error < result.limit]
    for result in failed:
        print(
            f"FAIL {result.name}: {result.error:.1e}, not under {result.limit:.0e} "
            f"{result.exception}"
        )
    print(f"{len(results)} checks, {len(failed)} failed")
    return len(failed)


def run_in_processes(call: Callable, *arguments: object) -> list:
    """Run call(process, ...) in NUM_PROCESSES processes, because compiling takes longest."""
    with ProcessPoolExecutor(NUM_PROCESSES, multiprocessing.get_context("fork")) as pool:
        jobs = [pool.submit(call, process, *arguments) for process in range(NUM_PROCESSES)]
        return [job.result() for job in jobs]


# ---- bench ----


def capture_graph(step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Capture one call, after another call that compiles its kernels."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


def measure_microseconds(step: Callable[[], object], calls: int) -> float:
    """Return the time of one of the `calls` of a step: the median of 9 graph replays."""
    graph, _ = capture_graph(step)
    graph.replay()
    times = []
    for _ in range(9):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[4] * 1e3 / calls


@dataclass(frozen=True)
class TimedStep:
    """A step of several calls to time, and the bytes and operations that one call needs."""

    step: Callable[[], object]
    calls: int
    bytes: float = 0
    flops: float = 0

    def floor_microseconds(self) -> float:
        return max(self.flops / PEAK_FLOPS, self.bytes / HBM_BYTES_PER_SECOND) * 1e6


def decode_case(spec: AttentionSpec, batch_size: int, seq_len: int) -> AttentionCase:
    case = make_attention_case(
        spec, [1] * batch_size, [seq_len] * batch_size, BLOCK_SIZE, torch.bfloat16, "cuda"
    )
    return case.without_host_lengths()


def time_decode(case: AttentionCase, backend: TritonPagedAttention) -> TimedStep:
    """Attend over several copies of the KV cache, as the layers of a model do."""
    spec = case.spec
    max_visible = min(visible_positions(spec), 2**31 - 1)
    positions = int(case.metadata.seq_lens.clamp(max=max_visible).sum())
    cache_bytes = 4 * positions * spec.num_kv_heads * spec.head_dim
    copies = min(31, (1 << 29) // cache_bytes)
    caches = [case.cache, *(case.cache.clone() for _ in range(copies))]
    plan = backend.prepare(case.metadata)

    def step() -> torch.Tensor:
        results = [
            backend.attend(case.q, cache, spec, plan, case.sinks, case.gate) for cache in caches
        ]
        return results[-1]

    return TimedStep(step, len(caches), cache_bytes)


def prefill_case(spec: AttentionSpec, query_len: int, seq_len: int) -> AttentionCase:
    return make_attention_case(spec, [query_len], [seq_len], BLOCK_SIZE, torch.bfloat16, "cuda")


def time_prefill(case: AttentionCase, backend: TritonPagedAttention) -> TimedStep:
    spec = case.spec
    plan = backend.prepare(case.metadata)
    (query_len,) = case.metadata.host_query_lens
    (seq_len,) = case.metadata.host_seq_lens
    mean_keys = min(seq_len - query_len / 2, visible_positions(spec))
    flops = 4 * spec.num_heads * spec.head_dim * query_len * mean_keys
    return TimedStep(lambda: case.attend(backend, plan), 1, 0, flops)


def time_rows(
    tokens: int,
    width: int,
    moved_inputs: float,
    call: Callable[[torch.Tensor], torch.Tensor],
) -> TimedStep:
    """Run a call over inputs that do not fit into the L2 cache together.

    moved_inputs: the bytes that a call moves over the bytes of its input.
    """
    input_bytes = tokens * width * 2
    copies = max(4, min(64, (1 << 28) // input_bytes))
    inputs = torch.randn(copies, tokens, width, device="cuda").bfloat16()
    return TimedStep(lambda: [call(x) for x in inputs][-1], copies, input_bytes * moved_inputs)


def time_rope_and_cache(tokens: int, spec: AttentionSpec, norm_kind: str | None) -> TimedStep:
    slots = 2 * tokens
    cache = torch.zeros(2, slots, spec.num_kv_heads, spec.head_dim, device="cuda").bfloat16()
    slot_mapping = torch.randperm(slots, device="cuda")[:tokens].int()
    angles = torch.rand(tokens, spec.head_dim // 2, device="cuda")
    weight = torch.ones(spec.head_dim, device="cuda")
    weights = None
    if norm_kind:
        weights = (weight, weight)
    transform = QkTransform(
        (angles.cos(), angles.sin()),
        norm=norm_kind,
        weights=weights,
        eps=1e-5,
    )
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return time_rows(
        tokens, width, 2, lambda x: apply_rope_and_cache(x, cache, slot_mapping, transform)
    )


def time_rms_norm(tokens: int) -> TimedStep:
    weight = torch.ones(4096, device="cuda")
    return time_rows(tokens, 4096, 2, lambda x: rms_norm(x, weight, 1e-5))


def time_layer_norm(tokens: int) -> TimedStep:
    weight = torch.ones(4096, device="cuda")
    return time_rows(tokens, 4096, 2, lambda x: layer_norm(x, weight, weight, 1e-5))


# Batch size and sequence length.
DECODE_SHAPES = (
    (1, 64),
    (1, 256),
    (1, 1024),
    (8, 1024),
    (64, 1024),
    (256, 1024),
    (1, 16384),
    (64, 4096),
    (16, 1024),
    (16, 32000),
)

NamedSteps = Iterator[tuple[str, Callable[[], TimedStep]]]


def all_timed_steps() -> NamedSteps:
    """Yield a name and a function that builds the step to time."""
    yield from attention_steps()
    gqa = ATTENTION_SPECS["gqa 32/8 d128"]
    for tokens in (1, 64, 256, 8192):
        yield f"rms_norm {tokens} x 4096", partial(time_rms_norm, tokens)
        yield f"layer_norm {tokens} x 4096", partial(time_layer_norm, tokens)
        gate = partial(apply_activation, activation=ActivationEpilogue("silu", gated=True))
        yield f"gate silu {tokens} x 14336", partial(time_rows, tokens, 28672, 1.5, gate)
        tanh = ActivationEpilogue("gelu_tanh", gated=False)
        gelu = partial(apply_activation, activation=tanh)
        yield f"gelu_tanh {tokens} x 24576", partial(time_rows, tokens, 24576, 2, gelu)
        for norm_kind in (None, "rms"):
            yield (
                f"rope and cache 32/8 d128 {norm_kind} {tokens}",
                partial(time_rope_and_cache, tokens, gqa, norm_kind),
            )


def attention_steps() -> NamedSteps:
    specs = ATTENTION_SPECS | TIMED_FEATURE_SPECS
    for (name, spec), (batch_size, seq_len) in product(specs.items(), DECODE_SHAPES):
        early_options = [False]
        if batch_size == 1 and seq_len < 2048:
            early_options.append(True)
        for early in early_options:
            backend = TritonPagedAttention(early_decode=early)
            make_case = partial(decode_case, spec, batch_size, seq_len)
            yield (
                f"decode {name} {batch_size} x {seq_len}{' early' if early else ''}",
                partial(build_step, time_decode, make_case, backend),
            )
    for (name, spec), seq_len in product(specs.items(), (2048, 8192, 16384)):
        min_lens: list[int | None] = [None]
        if library_supports(spec, torch.bfloat16) and seq_len <= visible_positions(spec):
            min_lens.append(1)  # every prefill goes to the library
        for library_min_len in min_lens:
            backend = TritonPagedAttention(library_min_len=library_min_len)
            make_case = partial(prefill_case, spec, seq_len, seq_len)
            yield (
                f"prefill {name} {seq_len}{' library' if library_min_len else ''}",
                partial(build_step, time_prefill, make_case, backend),
            )
    make_case = partial(prefill_case, ATTENTION_SPECS["gqa 32/8 d128"], 2048, 8192)
    yield (
        "prefill gqa 32/8 d128 2048 of 8192",
        partial(build_step, time_prefill, make_case, TritonPagedAttention()),
    )


def build_step(
    time_step: Callable[[AttentionCase, TritonPagedAttention], TimedStep],
    make_case: Callable[[], AttentionCase],
    backend: TritonPagedAttention,
) -> TimedStep:
    return time_step(make_case(), backend)


def compile_some_steps(
    process: int, name_filter: str, named_steps: Callable[[], NamedSteps]
) -> None:
    """Run every NUM_PROCESSES-th step once."""
    for i, (name, build) in enumerate(named_steps()):
        if i % NUM_PROCESSES != process or name_filter not in name:
            continue
        try:
            build().step()
            torch.cuda.synchronize()
        except Exception as problem:
            print(f"{name}: {problem!r}"[:300], flush=True)
        torch.cuda.empty_cache()


def run_benchmarks(name_filter: str) -> None:
    run_in_processes(compile_some_steps, name_filter, all_timed_steps)
    for name, build in all_timed_steps():
        if name_filter not in name:
            continue
        timed = build()
        time_us = measure_microseconds(timed.step, timed.calls)
        rate = f"{timed.bytes / time_us / 1e6:6.2f} TB/s   "
        if timed.flops:
            rate = f"{timed.flops / time_us / 1e6:6.0f} TFLOP/s"
        share = timed.floor_microseconds() / time_us
        host_time = measure_host_microseconds(timed)
        print(
            f"{name:48s} {time_us:9.2f} us {rate} {share:6.1%} of the floor; "
            f"{host_time:5.0f} us of host time per call",
            flush=True,
        )
        del timed
        torch.cuda.empty_cache()
    if name_filter in "library":
        print_first_library_calls()


def measure_host_microseconds(timed: TimedStep) -> float:
    """Return the host time to launch one call, without waiting for the device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    timed.step()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds * 1e6 / timed.calls


def print_first_library_calls() -> None:
    """Print the time of the attention library's first and later calls of a length."""
    spec = AttentionSpec(32, 8, 128)
    backend = TritonPagedAttention()
    for seq_len in (8192, 8192, 8448, 8300, 12032, 12032, 16000):
        case = prefill_case(spec, seq_len, seq_len)
        plan = backend.prepare(case.metadata)
        torch.cuda.synchronize()
        start = time.perf_counter()
        case.attend(backend, plan)
        torch.cuda.synchronize()
        milliseconds = (time.perf_counter() - start) * 1e3
        print(f"library, {seq_len} positions, whole call: {milliseconds:.2f} ms")


# ---- tune ----


@dataclass(frozen=True)
class TuningCase:
    """Backends to compare on one case; the first has the usual tiling."""

    name: str
    spec: AttentionSpec
    make_case: Callable[[], AttentionCase]
    make_small_case: Callable[[], AttentionCase]  # enough to compile the kernels
    time_step: Callable[[AttentionCase, TritonPagedAttention], TimedStep]
    backends: Sequence[TritonPagedAttention]


def decode_tilings(spec: AttentionSpec, batch_size: int, seq_len: int) -> list[PagedDecodeTiling]:
    """Return tilings to compare, the usual one first."""
    heads = spec.num_heads
    kv_heads = spec.num_kv_heads
    usual = select_decode_tiling(
        batch_size, heads, kv_heads, spec.head_dim, 2, seq_len, num_multiprocessors=132
    )
    tiles_warps_stages = [
        (64, 4, 2),
        (64, 2, 3),
        (64, 1, 3),
        (32, 2, 3),
        (32, 1, 3),
        (64, 4, 5),
        (64, 2, 5),
        (32, 4, 5),
    ]
    splits = {max(1, usual.splits // 2), usual.splits, min(64, usual.splits * 2)}
    head_groups = {usual.head_groups, 1, -(-heads // kv_heads // 16)}
    max_unsplit_tiles = [2]
    if batch_size == 1 and seq_len <= 256:
        max_unsplit_tiles = [1, 2, 4]
    tilings = [
        PagedDecodeTiling(*shape, *division)
        for shape, *division in product(tiles_warps_stages, splits, head_groups, max_unsplit_tiles)
    ]
    return [usual, *(tiling for tiling in tilings if tiling != usual)]


def prefill_tilings(spec: AttentionSpec) -> list[PagedPrefillTiling]:
    """Return tilings to compare, the usual one first."""
    rows = 8192 * spec.num_heads // spec.num_kv_heads
    multiprocessors = num_multiprocessors(torch.device("cuda"))
    usual = select_prefill_tiling(rows, rows, spec.head_dim, 2, spec.num_kv_heads, multiprocessors)
    shapes = product((64, 128), (32, 64), (4, 8), (2, 3, 5))
    tilings = [PagedPrefillTiling(*shape) for shape in shapes]
    return [usual, *(tiling for tiling in tilings if tiling != usual)]


def all_tuning_cases() -> Iterator[TuningCase]:
    for (name, spec), (batch_size, seq_len) in product(ATTENTION_SPECS.items(), DECODE_SHAPES):
        tilings = decode_tilings(spec, batch_size, seq_len)
        yield TuningCase(
            f"decode {name} {batch_size} x {seq_len}",
            spec,
            partial(decode_case, spec, batch_size, seq_len),
            partial(decode_case, spec, 2, 70),
            time_decode,
            [TritonPagedAttention(decode_tiling=tiling) for tiling in tilings],
        )
    for name, spec in ATTENTION_SPECS.items():
        yield TuningCase(
            f"prefill {name} 8192",
            spec,
            partial(prefill_case, spec, 8192, 8192),
            partial(prefill_case, spec, 70, 70),
            time_prefill,
            [
                TritonPagedAttention(library_min_len=None, prefill_tiling=tiling)
                for tiling in prefill_tilings(spec)
            ],
        )


def small_tuning_steps() -> NamedSteps:
    """Yield every kernel of the tuning cases once, with little work: to compile them."""
    already_yielded = set()
    for tuning in all_tuning_cases():
        for backend in tuning.backends:
            decode_tiling = backend.decode_tiling
            if decode_tiling is not None:
                # Kernels differ only by whether there are splits.
                decode_tiling = replace(decode_tiling, splits=min(2, decode_tiling.splits))
            key = (tuning.spec, decode_tiling, backend.prefill_tiling)
            if key not in already_yielded:
                already_yielded.add(key)
                yield (
                    tuning.name,
                    partial(build_step, tuning.time_step, tuning.make_small_case, backend),
                )


def run_tuning(name_filter: str) -> None:
    """Print the fastest tilings of every case, and the usual one."""
    run_in_processes(compile_some_steps, name_filter, small_tuning_steps)
    for tuning in all_tuning_cases():
        if name_filter not in tuning.name:
            continue
        case = tuning.make_case()
        timings = []
        for i, backend in enumerate(tuning.backends):
            tiling = backend.decode_tiling or backend.prefill_tiling
            note = "usual" if i == 0 else ""
            try:
                timed = tuning.time_step(case, backend)
                time_us = measure_microseconds(timed.step, timed.calls)
                timings.append((time_us, note, tiling))
            except Exception as problem:
                print(f"{tuning.name} {tiling}: {problem!r}"[:200], flush=True)
        timings.sort(key=lambda timing: timing[0])
        usual = [timing for timing in timings[4:] if timing[1]]
        print(tuning.name)
        for time_us, note, tiling in timings[:4] + usual:
            print(f"    {time_us:9.2f} us {tiling} {note}", flush=True)


if __name__ == "__main__":
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    name_filter = sys.argv[2] if len(sys.argv) > 2 else ""
    commands = {"check": run_checks, "bench": run_benchmarks, "tune": run_tuning}
    if command not in commands:
        sys.exit(__doc__)
    sys.exit(commands[command](name_filter))
