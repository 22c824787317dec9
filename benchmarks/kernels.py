"""The kernels on one card: are they right, how fast are they, which launch parameters are best?

    PYTHONPATH=src python3 benchmarks/kernels.py check   each against its reference, over random shapes
    PYTHONPATH=src python3 benchmarks/kernels.py bench   time, and share of what the card allows
    PYTHONPATH=src python3 benchmarks/kernels.py tune    launch parameters of attention

A word after the verb keeps the cases that have it in their name. Right means: relative error in norm under a limit by
type, outputs full of NaN before, and NaN in the cache wherever no sequence has a position. Times are medians of replays
of one CUDA graph of many calls, over copies of the cache too large for the second-level cache; the floor is bytes at
BANDWIDTH or operations at PEAK, both measured on an H200.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, product

import torch

from bloomery.attention.base import AttentionMetadata
from bloomery.attention.triton_paged import TritonPaged
from bloomery.kernels import activation, launch, norm, paged_decode, paged_prefill, store
from bloomery.kernels.paged_decode import attention_reference
from bloomery.kernels.store import Turn
from bloomery.spec import Alibi, Attention

BANDWIDTH = 4.25e12
PEAK = 781e12
PROCESSES = 12  # compile side by side
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHAPES = {
    "gqa 32/8 d128": Attention(32, 8, 128),
    "gqa 32/8 d64": Attention(32, 8, 64),
    "mqa 48/1 d128": Attention(48, 1, 128),
    "alibi 32/32 d128": Attention(32, 32, 128, Alibi()),
}


# ---- material ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A step over a cache with NaN wherever no sequence has a position."""

    q: torch.Tensor
    cache: torch.Tensor
    ragged: AttentionMetadata
    spec: Attention

    def wanted(self) -> torch.Tensor:
        ragged = self.ragged
        scoring = TritonPaged().scoring(self.spec, self.q.device)
        starts = ragged.starts.tolist()
        ends = ragged.ends.tolist()
        return attention_reference(
            self.q, self.cache, starts, ends, ragged.tables, ragged.block_size, scoring
        ).flatten(1)

    def captured(self) -> Case:
        return replace(self, ragged=replace(self.ragged, counts=(), lengths=()))


def case(
    spec: Attention,
    counts: list[int],
    lengths: list[int],
    size: int,
    dtype: torch.dtype,
    device: str,
    spare: int = 0,
) -> Case:
    """Sequences of `lengths` positions of which the last `counts` are new; tables have `spare` blocks more."""
    kind = torch.int64 if device == "cpu" else torch.int32
    widest = max(-(-length // size) for length in lengths) + spare
    blocks = len(lengths) * widest + 3
    tables = torch.randperm(blocks)[: len(lengths) * widest].view(len(lengths), widest)
    cache = torch.full(
        (2, blocks * size, spec.num_kv_heads, spec.head_dim), torch.nan, dtype=dtype, device=device
    )
    positions = []
    slots = []
    for table, count, length in zip(tables, counts, lengths):
        place = torch.arange(length)
        where = table[place // size] * size + place % size
        cache[:, where.to(device)] = torch.randn(2, length, *cache.shape[2:], device=device).to(
            dtype
        )
        positions.append(place[length - count :])
        slots.append(where[length - count :])

    def whole(values: torch.Tensor) -> torch.Tensor:
        return values.to(device, kind)

    ragged = AttentionMetadata(
        tuple(counts),
        tuple(lengths),
        counts.count(1),
        whole(torch.tensor([0, *accumulate(counts)])),
        whole(torch.tensor(lengths)),
        whole(torch.cat(positions)),
        whole(torch.cat(slots)),
        whole(tables),
        size,
    )
    q = torch.randn(sum(counts), spec.num_heads, spec.head_dim, device=device).to(dtype)
    return Case(q, cache, ragged, spec)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, in norm; anything not finite is infinitely wrong."""
    got = got.double()
    wanted = wanted.double()
    return (
        ((got - wanted).norm() / wanted.norm()).item()
        if bool(got.isfinite().all())
        else float("inf")
    )


def poisoned(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of a call whose fresh tensors are full of NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(False)


# ---- check -------------------------------------------------------------------------------------------------------


def check_norm(width: int, kind: str, dtype: torch.dtype, device: str) -> float:
    x = torch.randn(5, width + 64, device=device).to(dtype)[:, :width]
    x = x if "strided" in kind else x.contiguous()
    weight = None if "bare" in kind else torch.randn(width, device=device)
    bias = torch.randn(width, device=device) if "bias" in kind else None
    if kind.startswith("rms"):
        got = poisoned(lambda: norm.norm_rows(x, weight, None, 1e-5, centered=False)[1])
        return error(got, norm.rms_norm_reference(x, weight, 1e-5))
    got = poisoned(lambda: norm.norm_rows(x, weight, bias, 1e-5, centered=True)[1])
    return error(got, norm.layer_norm_reference(x, weight, bias, 1e-5))


def check_activation(width: int, kind: str, gated: bool, dtype: torch.dtype, device: str) -> float:
    x = torch.randn(5, 2 * width if gated else width, device=device).to(dtype)
    got = poisoned(lambda: activation.activate_rows(x, kind, gated))
    return error(
        got, activation.gate_reference(x, kind) if gated else activation.ACTIVATIONS[kind](x)
    )


def check_turn(
    heads: int, kv_heads: int, dim: int, turned: int, kind: str, dtype: torch.dtype, device: str
) -> float:
    """kind: any of interleaved, tables, rms, layer, each, bare, clip."""
    tokens = 6
    length = 40 if "tables" in kind else 6
    angles = torch.rand(length, turned // 2, device=device) * 6
    lines = (heads, dim), (kv_heads, dim)
    q_weight, k_weight = (
        torch.rand(shape if "each" in kind else shape[1:], device=device) + 0.5 for shape in lines
    )
    normed = "rms" in kind or "layer" in kind
    turn = Turn(
        (angles.cos(), angles.sin()) if turned else None,
        torch.randint(length, (tokens,), device=device) if "tables" in kind else None,
        "interleaved" in kind,
        "rms" if "rms" in kind else "layer" if "layer" in kind else None,
        (q_weight, k_weight) if normed and "bare" not in kind else None,
        1e-5,
        0.7 if "clip" in kind else None,
    )
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=device).to(dtype)
    slots = torch.randperm(50, device=device)[:tokens]
    caches = [torch.zeros(2, 50, kv_heads, dim, dtype=dtype, device=device) for _ in range(2)]
    got = poisoned(lambda: store.turn_rows(qkv, caches[0], slots, turn))
    wanted = store.turn_and_store_reference(qkv, caches[1], slots, turn)
    return max(
        error(got, wanted), error(caches[0][0], caches[1][0]), error(caches[0][1], caches[1][1])
    )


def check_attention(material: Case, backend: TritonPaged) -> float:
    """Twice, for what a launch leaves behind must not disturb the next."""
    plan = backend.plan(material.ragged)
    wanted = material.wanted()
    return max(
        error(
            poisoned(lambda: backend.attend(material.q, material.cache, material.spec, plan)),
            wanted,
        )
        for _ in range(2)
    )


def check_graph(spec: Attention, dtype: torch.dtype, early: bool) -> float:
    """A captured chain of storing, attending and norming, replayed while lengths, tables and queries change."""
    batch = 5
    size = 64
    material = case(spec, [1] * batch, [900] * batch, size, dtype, "cuda").captured()
    ragged = material.ragged
    cache = material.cache
    backend = TritonPaged(early=early)
    qkv = torch.randn(
        batch, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, device="cuda"
    ).to(dtype)
    weight = torch.ones(spec.num_heads * spec.head_dim, device="cuda")

    def step() -> torch.Tensor:
        q = store.turn_and_store(qkv, cache, ragged.slots, Turn())
        return norm.rms_norm(backend.attend(q, cache, spec, backend.plan(ragged)), weight, 1e-5)

    graph, out = capture(step)
    worst = 0.0
    for _ in range(8):
        blocks = torch.randperm(cache.shape[1] // size, device="cuda")[: ragged.tables.numel()]
        ragged.tables.copy_(blocks.view_as(ragged.tables))
        ragged.ends.random_(1, 900)
        last = ragged.ends.long()[:, None] - 1
        ragged.slots.copy_((ragged.tables.gather(1, last // size) * size + last % size)[:, 0])
        cache.normal_()
        qkv.normal_()
        out.fill_(torch.nan)
        graph.replay()
        wanted = replace(
            material, q=qkv.view(batch, -1, spec.head_dim)[:, : spec.num_heads]
        ).wanted()
        worst = max(worst, error(out, norm.rms_norm_reference(wanted, weight, 1e-5)))
    return worst


def checks() -> Iterator[tuple[str, Callable[[], float], torch.dtype]]:
    """Name, call, type."""
    for (name, dtype), width in product(DTYPES.items(), (64, 100, 576, 4096, 6144, 14336)):
        for kind in ("rms", "rms bare", "rms strided", "layer", "layer bias", "layer bare"):
            yield (
                f"norm {kind} {width} {name}",
                lambda a=(width, kind, dtype): check_norm(*a, "cuda"),
                dtype,
            )
        for kind, gated in product(activation.ACTIVATIONS, (True, False)):
            call = lambda a=(width, kind, gated, dtype): check_activation(*a, "cuda")
            yield f"{'gate' if gated else 'activation'} {kind} {width} {name}", call, dtype
    turns = (
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
    )
    for (name, dtype), turn in product(DTYPES.items(), turns):
        yield f"turn {turn} {name}", lambda a=(*turn, dtype): check_turn(*a, "cuda"), dtype
    yield from attention_checks()


def attention_checks() -> Iterator[tuple[str, Callable[[], float], torch.dtype]]:
    specs = dict(SHAPES)
    for dim in (64, 80, 96, 112, 128, 256):
        specs |= {f"mha d{dim}": Attention(4, 4, dim), f"gqa d{dim}": Attention(14, 2, dim)}
    for dim, window in product((64, 128, 256), (1, 40, 200)):
        specs[f"window {window} d{dim}"] = Attention(8, 4, dim, window=window)
    specs |= {
        "softcap": Attention(8, 4, 256, softcap=5.0),
        "cap window": Attention(8, 4, 128, softcap=5.0, window=130),
    }
    specs |= {
        "alibi gqa": Attention(12, 4, 80, Alibi(scale=0.5)),
        "mqa 71/1 d64": Attention(71, 1, 64),
    }
    steps = {
        "few": ([1, 1, 1], [1, 130, 1500]),
        "many": ([1] * 150, [random.randint(1, 400) for _ in range(150)]),
        "prompts": ([300, 2, 129, 17], [300, 200, 400, 1100]),
        "mixed": ([1, 1, 5, 200], [64, 700, 5, 333]),
    }
    for (name, dtype), (label, spec), (step, (counts, lengths)) in product(
        DTYPES.items(), specs.items(), steps.items()
    ):
        if (name == "fp16" and label not in SHAPES) or (name == "fp32" and "window" in label):
            continue  # the same code as for bf16, and compiling takes time
        sizes = (16, 32, 64, 128) if label == "gqa 32/8 d128" and step == "mixed" else (64,)
        for size in sizes:
            material = lambda a=(spec, counts, lengths, size, dtype): case(*a, "cuda")
            call = lambda m=material: check_attention(m(), TritonPaged(library=None))
            yield f"attention {label} {step} block {size} {name}", call, dtype
    for (label, spec), early in product(
        (SHAPES | {"window": Attention(8, 4, 64, window=100)}).items(), (False, True)
    ):
        for name in ("fp16", "bf16"):
            call = lambda a=(spec, DTYPES[name], early): check_graph(*a)
            yield f"graph {label} {'early' if early else ''} {name}", call, DTYPES[name]
    for spec, counts in product(
        (Attention(8, 2, 128), Attention(8, 2, 64)), ([700], [1, 300, 700, 500])
    ):
        material = lambda a=(spec, counts, counts): case(*a, 64, torch.bfloat16, "cuda")
        call = lambda m=material: check_attention(m(), TritonPaged(library=400))
        yield f"library d{spec.head_dim} {counts}", call, torch.bfloat16


def check_part(part: int, wish: str) -> list[tuple[str, float, float, str]]:
    """Every PROCESSES-th check: its name, error, limit, and what broke."""
    found = []
    for i, (name, call, dtype) in enumerate(checks()):
        if i % PROCESSES == part and wish in name:
            torch.manual_seed(i)
            try:
                found.append((name, call(), LIMITS[dtype], ""))
            except Exception as problem:
                found.append((name, float("inf"), LIMITS[dtype], repr(problem)[:300]))
    return found


def check(wish: str) -> int:
    found = [result for part in side_by_side(check_part, wish) for result in part]
    kinds: dict[str, list[float]] = {}
    for name, wrong, _, _ in found:
        kinds.setdefault(f"{name.split()[0]} {name.split()[-1]}", []).append(wrong)
    for kind, errors in sorted(kinds.items()):
        print(f"{kind:30s} {len(errors):4d} checks, worst {max(errors):.1e}")
    failed = [result for result in found if not result[1] < result[2]]
    for name, wrong, limit, problem in failed:
        print(f"FAIL {name}: {wrong:.1e}, not under {limit:.0e} {problem}")
    print(f"{len(found)} checks, {len(failed)} failed")
    return len(failed)


def side_by_side(call: Callable, *arguments: object) -> list:
    """call(part, ...) for every part, each in its own process, for compiling takes longer than running."""
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("fork")) as pool:
        return [
            job.result()
            for job in [pool.submit(call, part, *arguments) for part in range(PROCESSES)]
        ]


# ---- bench -------------------------------------------------------------------------------------------------------


def capture(step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of one call, after a call that compiles what it needs."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


def microseconds(step: Callable[[], object], calls: int) -> float:
    """Of one of the `calls` that a step makes: the median of replays of its graph."""
    graph, _ = capture(step)
    graph.replay()
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[4] * 1e3 / calls


@dataclass(frozen=True)
class Bed:
    """Something to time: a step of several calls, and what one call moves and computes at least."""

    step: Callable[[], object]
    calls: int
    bytes: float = 0
    flops: float = 0


def decode_step(spec: Attention, batch: int, length: int) -> Case:
    return case(spec, [1] * batch, [length] * batch, 64, torch.bfloat16, "cuda").captured()


def decode_bed(material: Case, backend: TritonPaged) -> Bed:
    """Over copies of the cache, as many as layers."""
    spec = material.spec
    ragged = material.ragged
    size = 4 * int(ragged.ends.sum()) * spec.num_kv_heads * spec.head_dim
    caches = [material.cache, *(material.cache.clone() for _ in range(min(31, (1 << 29) // size)))]
    plan = backend.plan(ragged)
    return Bed(
        lambda: [backend.attend(material.q, cache, spec, plan) for cache in caches][-1],
        len(caches),
        size,
    )


def prefill_step(spec: Attention, count: int, length: int) -> Case:
    return case(spec, [count], [length], 64, torch.bfloat16, "cuda")


def prefill_bed(material: Case, backend: TritonPaged) -> Bed:
    spec = material.spec
    plan = backend.plan(material.ragged)
    (count,) = material.ragged.counts
    (length,) = material.ragged.lengths
    flops = 4 * spec.num_heads * spec.head_dim * count * (length - count / 2)
    return Bed(lambda: backend.attend(material.q, material.cache, spec, plan), 1, 0, flops)


def rows_bed(
    tokens: int, width: int, moved: float, call: Callable[[torch.Tensor], torch.Tensor]
) -> Bed:
    """Over copies too large for the second-level cache; `moved` is what a call moves, in inputs."""
    copies = max(4, min(64, (1 << 28) // (tokens * width * 2)))
    inputs = torch.randn(copies, tokens, width, device="cuda").bfloat16()
    return Bed(lambda: [call(x) for x in inputs][-1], copies, tokens * width * 2 * moved)


def turn_bed(tokens: int, spec: Attention, kind: str | None) -> Bed:
    cache = torch.zeros(2, 2 * tokens, spec.num_kv_heads, spec.head_dim, device="cuda").bfloat16()
    slots = torch.randperm(2 * tokens, device="cuda")[:tokens].int()
    angles = torch.rand(tokens, spec.head_dim // 2, device="cuda")
    weight = torch.ones(spec.head_dim, device="cuda")
    turn = Turn(
        (angles.cos(), angles.sin()),
        norm=kind,
        weights=(weight, weight) if kind else None,
        eps=1e-5,
    )
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return rows_bed(tokens, width, 2, lambda x: store.turn_and_store(x, cache, slots, turn))


DECODES = ((1, 64), (1, 256), (1, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 16384), (64, 4096))


def beds() -> Iterator[tuple[str, Callable[[], Bed]]]:
    for (name, spec), (batch, length) in product(SHAPES.items(), DECODES):
        for early in (False, True) if batch == 1 and length < 2048 else (False,):
            made = lambda a=(spec, batch, length), e=early: decode_bed(
                decode_step(*a), TritonPaged(e)
            )
            yield f"decode {name} {batch} x {length}{' early' if early else ''}", made
    for (name, spec), length in product(SHAPES.items(), (2048, 8192, 16384)):
        for library in (None, 1) if spec.position is None else (None,):
            backend = TritonPaged(library=library)
            made = lambda a=(spec, length, length), b=backend: prefill_bed(prefill_step(*a), b)
            yield f"prefill {name} {length}{' library' if library else ''}", made
    part = (SHAPES["gqa 32/8 d128"], 2048, 8192)
    yield (
        "prefill gqa 32/8 d128 2048 of 8192",
        lambda: prefill_bed(prefill_step(*part), TritonPaged()),
    )
    for tokens in (1, 64, 256, 8192):
        yield (
            f"rms_norm {tokens} x 4096",
            lambda n=tokens: rows_bed(n, 4096, 2, rms(torch.ones(4096, device="cuda"))),
        )
        yield (
            f"layer_norm {tokens} x 4096",
            lambda n=tokens: rows_bed(n, 4096, 2, layer(torch.ones(4096, device="cuda"))),
        )
        yield (
            f"gate silu {tokens} x 14336",
            lambda n=tokens: rows_bed(n, 28672, 1.5, lambda x: activation.gate(x, "silu")),
        )
        gelu = lambda x: activation.activate(x, "gelu_tanh")
        yield f"gelu_tanh {tokens} x 24576", lambda n=tokens, f=gelu: rows_bed(n, 24576, 2, f)
        for kind in (None, "rms"):
            yield (
                f"turn and store 32/8 d128 {kind} {tokens}",
                lambda a=(tokens, SHAPES["gqa 32/8 d128"], kind): turn_bed(*a),
            )


def rms(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: norm.rms_norm(x, weight, 1e-5)


def layer(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: norm.layer_norm(x, weight, weight, 1e-5)


def compile_part(
    part: int, wish: str, these: Callable[[], Iterator[tuple[str, Callable[[], Bed]]]]
) -> None:
    for i, (name, made) in enumerate(these()):
        if i % PROCESSES == part and wish in name:
            try:
                made().step()
                torch.cuda.synchronize()
            except Exception as problem:
                print(f"{name}: {problem!r}"[:300], flush=True)
            torch.cuda.empty_cache()


def bench(wish: str) -> None:
    side_by_side(compile_part, wish, beds)
    for name, make in beds():
        if wish in name:
            bed = make()
            us = microseconds(bed.step, bed.calls)
            rate = (
                f"{bed.flops / us / 1e6:6.0f} TFLOP/s"
                if bed.flops
                else f"{bed.bytes / us / 1e6:6.2f} TB/s   "
            )
            share = max(bed.flops / PEAK, bed.bytes / BANDWIDTH) * 1e6 / us
            print(
                f"{name:48s} {us:9.2f} us {rate} {share:6.1%} of the floor; {host(bed):5.0f} us of host a call",
                flush=True,
            )
            del bed
            torch.cuda.empty_cache()
    if wish in "library":
        first_calls()


def host(bed: Bed) -> float:
    """Microseconds of Python to launch a call, when the device is not waited for."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    bed.step()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return taken * 1e6 / bed.calls


def first_calls() -> None:
    """What the library costs the first time it meets a length."""
    spec = Attention(32, 8, 128)
    backend = TritonPaged()
    for length in (8192, 8192, 8448, 8300, 12032, 12032, 16000):
        material = case(spec, [length], [length], 64, torch.bfloat16, "cuda")
        plan = backend.plan(material.ragged)
        torch.cuda.synchronize()
        start = time.perf_counter()
        backend.attend(material.q, material.cache, spec, plan)
        torch.cuda.synchronize()
        print(
            f"library, {length} positions, whole call: {(time.perf_counter() - start) * 1e3:.2f} ms"
        )


# ---- tune --------------------------------------------------------------------------------------------------------


def decode_tilings(spec: Attention, batch: int, length: int) -> list[paged_decode.Tiling]:
    """The usual one first."""
    heads = spec.num_heads
    kv_heads = spec.num_kv_heads
    usual = paged_decode.tiling(batch, heads, kv_heads, spec.head_dim, 2, length, 132)
    shapes = [
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
    parts = {usual.parts, 1, -(-heads // kv_heads // 16)}
    directs = (1, 2, 4) if batch == 1 and length <= 256 else (2,)
    cuts = [
        paged_decode.Tiling(*shape, *cut) for shape, *cut in product(shapes, splits, parts, directs)
    ]
    return [usual, *(cut for cut in cuts if cut != usual)]


def prefill_tilings(spec: Attention) -> list[paged_prefill.Tiling]:
    every = 8192 * spec.num_heads // spec.num_kv_heads
    processors = launch.processors(torch.device("cuda"))
    usual = paged_prefill.tiling(every, every, spec.head_dim, 2, spec.num_kv_heads, processors)
    cuts = [paged_prefill.Tiling(*cut) for cut in product((64, 128), (32, 64), (4, 8), (2, 3, 5))]
    return [usual, *(cut for cut in cuts if cut != usual)]


def tunings() -> Iterator[
    tuple[str, Callable[[], Case], Callable[[Case, TritonPaged], Bed], list[TritonPaged]]
]:
    """A case, its material, what to time, and the backends to compare, the usual one first."""
    for (name, spec), (batch, length) in product(SHAPES.items(), DECODES):
        backends = [TritonPaged(decode=cut) for cut in decode_tilings(spec, batch, length)]
        made = lambda a=(spec, batch, length): decode_step(*a)
        yield f"decode {name} {batch} x {length}", made, decode_bed, backends
    for name, spec in SHAPES.items():
        backends = [TritonPaged(library=None, prefill=cut) for cut in prefill_tilings(spec)]
        yield (
            f"prefill {name} 8192",
            lambda a=(spec, 8192, 8192): prefill_step(*a),
            prefill_bed,
            backends,
        )


def small_tunings() -> Iterator[tuple[str, Callable[[], Bed]]]:
    """Every kernel of `tunings` once, over little: to compile them."""
    seen = set()
    for name, _, bed, backends in tunings():
        kind = name.split()[0]
        spec = SHAPES[" ".join(name.split()[1:4])]
        material = (
            (lambda s=spec: decode_step(s, 2, 70))
            if kind == "decode"
            else (lambda s=spec: prefill_step(s, 70, 70))
        )
        for backend in backends:
            cut = backend.decode and replace(backend.decode, splits=min(2, backend.decode.splits))
            key = (spec, cut, backend.prefill)
            if key not in seen:
                seen.add(key)
                yield name, lambda m=material, b=bed, t=backend: b(m(), t)


def tune(wish: str) -> None:
    side_by_side(compile_part, wish, small_tunings)
    for name, made, bed, backends in tunings():
        if wish not in name:
            continue
        material = made()
        times = []
        for i, backend in enumerate(backends):
            try:
                work = bed(material, backend)
                times.append(
                    (microseconds(work.step, work.calls), "usual" if i == 0 else "", backend)
                )
            except Exception as problem:
                print(f"{name} {backend.decode or backend.prefill}: {problem!r}"[:200], flush=True)
        times.sort(key=lambda result: result[0])
        print(name)
        for us, note, backend in times[:4] + [result for result in times[4:] if result[1]]:
            print(f"    {us:9.2f} us {backend.decode or backend.prefill} {note}", flush=True)


if __name__ == "__main__":
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    wish = sys.argv[2] if len(sys.argv) > 2 else ""
    if verb not in ("check", "bench", "tune"):
        sys.exit(__doc__)
    sys.exit({"check": check, "bench": bench, "tune": tune}[verb](wish))
