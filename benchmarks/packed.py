"""Products with matrices of fewer bits on one card: are they right, how fast, and cut how?

    PYTHONPATH=src python3 benchmarks/packed.py check   each way of each format against its reference in float64
    PYTHONPATH=src python3 benchmarks/packed.py bench   a model's products by format and batch, next to bfloat16
    PYTHONPATH=src python3 benchmarks/packed.py tune    how to cut the products of one token, each alone

A word after the verb keeps the cases that have it in their name. Times are medians of replays of one CUDA graph over
enough weights to defeat the second-level cache; the floor is the bytes of codes and scales at BANDWIDTH, measured on an
H200. Weights are random.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.kernels import (
    BANDWIDTH,
    PROCESSES,
    capture,
    case,
    check_attention,
    error,
    microseconds,
    poisoned,
    side_by_side,
)
from benchmarks.products import LIMITS, MODELS, Line, Shape, copies, wide
from bloomery.attention.triton_paged import TritonPaged
from bloomery.kernels import (
    gemv,
    packed_gemm,
    packed_gemv,
    packed_linear,
    packed_woven,
    quantize_groups,
    quantize_rows,
    rounded_cache,
    store,
)
from bloomery.kernels.experts import route
from bloomery.kernels.gemv import Activation, After, Heads, Residual
from bloomery.kernels.norm import layer_norm
from bloomery.kernels.packed import BLOCK, Codebook, Fp8, Grid, Packed, unpack
from bloomery.kernels.packed_experts import grouped, mix_packed_reference, singly
from bloomery.kernels.store import Turn
from bloomery.quant.nf4 import nested
from bloomery.spec import Attention

EIGHT = (torch.float8_e4m3fn, torch.int8)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)


# ---- material ----------------------------------------------------------------------------------------------------


def made(kind: str, rows: int, columns: int, device: str) -> Packed:
    """Random, of about the size of real weights: "int4 128 zero", "int8 row signed", "nf4 64 nested", "fp8 row"."""
    name, group, *more = kind.split()
    bits = 8 if name in ("int8", "fp8") else 4
    size = columns**-0.5
    if name == "fp8":
        whole = torch.rand(1, device=device)
        blocks = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK), device=device)
        scale = {"one": whole, "row": torch.rand(rows, 1, device=device), "block": blocks}[
            group
        ] * size
        return Fp8(
            torch.empty(rows, columns, device=device).normal_().to(torch.float8_e4m3fn), scale
        )
    codes = torch.randint(256, (rows, columns * bits // 8), dtype=torch.uint8, device=device)
    each = columns if group == "row" else int(group)
    scale = (
        (torch.rand(rows, columns // each, device=device) + 0.5)
        * (size if name == "nf4" else size / 2**bits)
    ).half()
    if name == "nf4":
        table = torch.randn(16, device=device).sort().values
        return (
            nested(codes, table, scale.float())
            if "nested" in more
            else Codebook(codes, table, scale)
        )
    zero = (
        (torch.rand(scale.shape, device=device) * ((1 << bits) - 1)).half()
        if "zero" in more
        else None
    )
    order = torch.randperm(columns, device=device).int() if "order" in more else None
    codes = codes.view(torch.int8) if "signed" in more else codes
    return Grid(
        codes, scale if bits == 4 else scale.float(), zero, bits, order, both="both" in more
    )


def size(packed: Packed) -> int:
    parts = (getattr(packed, name, None) for name in ("codes", "scale", "zero", "absmax", "outer"))
    return sum(part.nbytes for part in parts if part is not None)


KINDS = {
    "int4": "int4 128 zero",
    "nf4": "nf4 64 nested",
    "int8": "int8 row signed",
    "fp8": "fp8 row",
}
WOVEN = ("int8 row signed", "int4 128 zero", "int4 128", "int4 256 zero", "int4 row zero")
MORE = (
    "int4 128",
    "int4 64 zero",
    "int4 32 zero",
    "int4 row",
    "int4 row zero",
    "int4 128 zero order",
    "int8 128 zero",
    "int8 row",
    "int8 row zero",
    "fp8 one",
    "fp8 block",
    "nf4 64",
    "nf4 32",
    "int8 16 signed",
    "int8 16 zero",
)


# ---- check -------------------------------------------------------------------------------------------------------


def check_rows(
    kind: str,
    tokens: int,
    rows: int,
    columns: int,
    before: str,
    after: str,
    dtype: torch.dtype,
    device: str,
    cut: packed_gemv.Tiling | None = None,
) -> float:
    """The product of few tokens and what surrounds it."""
    line = Line.of(rows, columns, before, after, True, dtype, device)
    packed = made(kind, rows, columns, device)
    x = (torch.randn(tokens, columns, device=device) + 0.3).to(dtype)
    then = line.after(tokens, dtype)
    got = poisoned(lambda: packed_gemv.packed_rows(x, packed, line.bias, line.before, then, cut))
    then64 = wide(then)
    if isinstance(then64, Heads):
        then64.cache.zero_()
    weight = packed.dequantize(torch.float64)
    wanted = gemv.product_reference(x.double(), weight, wide(line.bias), line.before, then64)
    worst = error(got, wanted)
    if isinstance(then64, Heads):
        worst = max(
            worst, error(then.cache[0], then64.cache[0]), error(then.cache[1], then64.cache[1])
        )
    return worst


def check_way(
    way: str,
    kind: str,
    tokens: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: str,
    cut: packed_gemm.Tiling | tuple[packed_woven.Cut, int] | None = None,
) -> float:
    packed = made(kind, rows, columns, device)
    bias = torch.randn(rows, device=device).to(dtype)
    x = torch.randn(tokens, columns, device=device).to(dtype)
    calls = {
        "product": lambda: packed_gemm.packed_product(x, packed, bias, cut),
        "woven": lambda: packed_woven.woven_product(x, packed, bias, *(cut or ())),
        "rounded": lambda: packed_linear.rounded(x, packed, bias),
        "scratch": lambda: packed_linear.by_scratch(x, packed, bias),
    }
    got = poisoned(calls[way])
    given = x.double()
    if way == "rounded":  # the reference rounds alike: what is compared is the product
        codes, scale = quantize_rows.quantize_rows_reference(x, packed.codes.dtype)
        given = codes.double() * scale.double()
    return error(got, F.linear(given, packed.dequantize(torch.float64), bias.double()))


def check_again(
    way: str, kind: str, tokens: int, rows: int, columns: int, times: int, device: str
) -> float:
    """Over and over, as it is and captured, three in a row: other bits than the first time are infinitely wrong."""
    packed = made(kind, rows, columns, device)
    x = torch.randn(tokens, columns, device=device).bfloat16()
    first = linear_call(packed, x, way)
    same = all(torch.equal(linear_call(packed, x, way), first) for _ in range(times))
    graph, again = capture(lambda: torch.stack([linear_call(packed, x, way) for _ in range(3)]))
    for _ in range(times):
        again.fill_(torch.nan)
        graph.replay()
        same &= all(torch.equal(one, first) for one in again)
    return (
        error(first, F.linear(x.double(), packed.dequantize(torch.float64)))
        if same
        else float("inf")
    )


def check_experts(kind: str, tokens: int, way: Callable[..., torch.Tensor], device: str) -> float:
    """Eight experts, of which a token visits two; the fresh tensors between the products are full of NaN."""
    up = made(kind, 8 * 2 * 384, 512, device)
    down = made(kind, 8 * 512, 384, device)
    x = torch.randn(tokens, 512, device=device).bfloat16()
    chosen, weights = route(torch.randn(tokens, 8, device=device), 2, True)
    got = poisoned(lambda: way(x, chosen, weights, up, down, 8))
    return error(got, mix_packed_reference(x.double(), chosen, weights, up, down, 8))


def check_quantize(
    tokens: int, columns: int, dtype: torch.dtype, to: torch.dtype, device: str
) -> float:
    """The share of codes off by more than a rounding the other way, and of scales that differ."""
    x = (torch.randn(tokens, columns, device=device) * torch.rand(tokens, 1, device=device)).to(
        dtype
    )
    x[0] = 0
    codes, scale = quantize_rows.quantize_kernel_rows(x, to)
    wanted, its_scale = quantize_rows.quantize_rows_reference(x, to)
    step = 1.01 if to == torch.int8 else wanted.float().abs().clamp(min=2**-6) / 7.9
    off = ((codes.float() - wanted.float()).abs() > step).double().mean().item()
    return max(
        off, (codes.float() != wanted.float()).double().mean().item() / 50, error(scale, its_scale)
    )


def check_groups(bits: int, group: int, device: str) -> float:
    """The share of codes that differ, and how much more is lost by rounding than the reference loses."""
    weight = torch.randn(70, 512, device=device) * torch.rand(70, 1, device=device) + 0.1
    weight[0], weight[1] = 0, 3.0
    codes, scale, zero = quantize_groups.quantize_kernel_groups(weight, bits, group)
    wanted = quantize_groups.quantize_groups_reference(weight, bits, group)
    each = 8 if bits == 3 else bits
    got, best = (Grid(*part, each).dequantize() for part in ((codes, scale, zero), wanted))
    more = (got - weight).square().mean() / (best - weight).square().mean() - 1
    differ = unpack(codes, each) != unpack(wanted[0], each)
    return max(differ.double().mean().item() / 10, more.item())


def check_cache(
    counts: list[int], lengths: list[int], heads: tuple[int, int, int], dtype: torch.dtype
) -> float:
    """Attention over keys and values in 8 bits, stored by the kernel; the reference reads the same numbers."""
    material = case(Attention(*heads), counts, lengths, 64, torch.bfloat16, "cuda")
    shape = tuple(material.cache.shape)
    memory = torch.zeros(rounded_cache.cache_bytes(shape, dtype), dtype=torch.uint8, device="cuda")
    cache = rounded_cache.of_memory(memory, shape, dtype)
    every = torch.arange(shape[1], device="cuda")
    lines = material.cache.nan_to_num().transpose(0, 1).flatten(1)  # k | v of every slot
    qkv = torch.cat(
        (torch.zeros(shape[1], heads[0] * heads[2], device="cuda").bfloat16(), lines), 1
    )
    store.turn_rows(qkv, cache, every.int(), Turn())
    kept = rounded_cache.read(cache, every, torch.float32)
    lost = max(error(kept[half], material.cache[half].nan_to_num()) for half in range(2))
    wrong = check_attention(replace(material, cache=cache), TritonPaged(library=None))
    return max(wrong, lost / 4 if dtype == torch.float8_e4m3fn else lost)


PHRASES = (
    ("", ""),
    ("rms", "add"),
    ("rms", "gate silu"),
    ("", "activate gelu"),
    ("rms", "heads 6 2 64 64 tables"),
)


def checks() -> Iterator[tuple[str, Callable[[], float], float]]:
    """Name, call, limit."""
    every = (*KINDS.values(), *MORE)
    half = torch.bfloat16
    for kind, (before, after), columns in product(every, PHRASES, (768, 4096)):
        if "order" not in kind and (columns == 4096 or not after):
            call = lambda a=(kind, 1, 640, columns, before, after, half, "cuda"): check_rows(*a)
            yield f"rows {kind} {columns} {before} {after}", call, LIMITS[half]
    for kind, tokens, dtype in product(KINDS.values(), (2, 3, 4), (half, torch.float32)):
        call = lambda a=(kind, tokens, 640, 1536, "", "add", dtype, "cuda"): check_rows(*a)
        yield f"rows {kind} {tokens} tokens {dtype}", call, LIMITS[dtype]
    for kind, tokens, dtype in product(every, (5, 64, 200), (half, torch.float16)):
        if dtype == half or tokens == 64:
            call = lambda a=("product", kind, tokens, 1000, 2048, dtype, "cuda"): check_way(*a)
            yield f"product {kind} {tokens} {dtype}", call, LIMITS[dtype]
    for kind, tokens, cut in product(
        WOVEN, (100, 200, 300), (packed_woven.TALL, packed_woven.HALF)
    ):
        for dtype, programs in (
            (half, 0),
            (torch.float16, 0),
            (torch.float16, 8),
            (half, 5),
        ):  # stretches, tiles, both
            call = lambda a=("woven", kind, tokens, 1008, 4096, dtype, "cuda", (cut, programs)): (
                check_way(*a)
            )
            yield f"woven {kind} {tokens} {cut.tokens} {programs}", call, LIMITS[dtype]
    for kind, tokens in product(every, (300,)):
        call = lambda a=("scratch", kind, tokens, 1000, 2048, half, "cuda"): check_way(*a)
        yield f"scratch {kind} {tokens}", call, LIMITS[half]
    for kind, tokens in product(("fp8 row", "fp8 one", "int8 row signed both"), (17, 300)):
        call = lambda a=("rounded", kind, tokens, 1024, 2048, half, "cuda"): check_way(*a)
        yield f"rounded {kind} {tokens}", call, LIMITS[half]
    ways = [
        *product(("product",), KINDS.values(), (16, 64, 128, 256)),
        *product(("woven",), WOVEN[:2], (128, 256)),
    ]
    for (way, kind, tokens), (rows, columns) in product(ways, ((49152, 2048), (6144, 6144))):
        if way == "woven" or rows > columns:
            call = lambda a=(way, kind, tokens, rows, columns, 20, "cuda"): check_again(*a)
            yield f"again {way} {kind} {tokens} {rows}", call, LIMITS[half]
    for kind, (tokens, way) in product(
        (*KINDS.values(), "fp8 block", "int4 64 zero"),
        ((2, singly), (7, grouped), (300, grouped), (2000, grouped)),
    ):
        call = lambda a=(kind, tokens, way, "cuda"): check_experts(*a)
        yield f"experts {kind} {tokens}", call, 2 * LIMITS[half]
    for bits, group in ((4, 128), (4, 64), (3, 64), (2, 32)):
        yield f"groups {bits} {group}", lambda a=(bits, group, "cuda"): check_groups(*a), 0.002
    for (counts, lengths), heads, to in product(
        (([1] * 5, [700, 3, 64, 65, 1]), ([1, 100, 300], [9, 100, 400])),
        ((32, 8, 128), (48, 1, 128), (6, 6, 80)),
        EIGHT,
    ):
        yield (
            f"cache {counts} {heads} {to}",
            lambda a=(counts, lengths, heads, to): check_cache(*a),
            LIMITS[half] * 1.5,
        )
    for columns, to in product((576, 4096, 24576), (torch.float8_e4m3fn, torch.int8)):
        yield (
            f"quantize {columns} {to}",
            lambda a=(37, columns, half, to, "cuda"): check_quantize(*a),
            1e-3,
        )


def check_part(part: int, wish: str) -> list[tuple[str, float, float, str]]:
    found = []
    for i, (name, call, limit) in enumerate(checks()):
        if i % PROCESSES == part and wish in name:
            torch.manual_seed(i)
            try:
                found.append((name, call(), limit, ""))
            except Exception as problem:
                found.append((name, float("inf"), limit, repr(problem)[:300]))
    return found


def check(wish: str) -> int:
    found = [result for part in side_by_side(check_part, wish) for result in part]
    failed = [result for result in found if not result[1] < result[2]]
    for name, wrong, limit, problem in failed:
        print(f"FAIL {name}: {wrong:.1e}, not under {limit:.0e} {problem}")
    print(f"{len(found)} checks, {len(failed)} failed", flush=True)
    return len(failed)


# ---- bench -------------------------------------------------------------------------------------------------------


class Chain:
    """Every product of a decode step of one token, attention left out."""

    def __init__(self, shape: Shape, kind: str):
        self.shape = shape
        self.linears = shape.linears()
        self.layers = [
            {
                name: made(kind, *self.linears[name][:2], "cuda")
                for name in self.linears
                if name != "head"
            }
            for _ in range(shape.layers)
        ]
        self.lines = {name: self.line(name) for name in self.linears}
        self.head = self.lines["head"].weight = torch.randn(
            shape.vocab, shape.hidden, device="cuda"
        ).bfloat16()
        self.x = torch.randn(1, shape.hidden, device="cuda").bfloat16()
        turn = Turn((torch.ones(1, shape.dim // 2, device="cuda"),) * 2) if shape.turned else Turn()
        self.turns = torch.zeros(1, dtype=torch.int32, device="cuda"), turn
        self.bytes = (
            sum(size(part) for layer in self.layers for part in layer.values()) + self.head.nbytes
        )

    def line(self, name: str) -> Line:
        rows, columns, before, after = self.linears[name]
        bias = self.shape.bias and name != "head"
        small = Line.of(8, columns, before, after, False, torch.bfloat16, "cuda")
        return replace(small, bias=torch.randn(rows, device="cuda").bfloat16() if bias else None)

    def step(self) -> torch.Tensor:
        x = self.x
        lines = self.lines

        def go(name: str, packed: Packed, x: torch.Tensor, after: After) -> torch.Tensor:
            return packed_linear.packed_phrase(
                x, packed, lines[name].bias, lines[name].before, after
            )

        for layer in self.layers:
            q = go("qkv", layer["qkv"], x, Heads(lines["qkv"].cache, *self.turns))
            x = go("o", layer["o"], q.view(1, -1), Residual(x))
            h = go("up", layer["up"], x, Activation(self.shape.activation, self.shape.gated))
            x = go("down", layer["down"], h, Residual(x))
        before = lines["head"].before
        if before.kind == "layer":
            x = layer_norm(x, before.weight, before.bias, before.eps)
            before = None
        return gemv.product_rows(x, self.head, None, before, None)


def bench_chains(wish: str) -> None:
    for model in ("8b", "octocoder"):
        if not any(wish in f"chain {model} {name}" for name in KINDS):
            continue
        for name, kind in KINDS.items():
            torch.cuda.empty_cache()
            if wish in f"chain {model} {name}":
                chain = Chain(MODELS[model], kind)
                ms = microseconds(chain.step, 1) / 1e3
                floor = chain.bytes / BANDWIDTH * 1e3
                print(
                    f"chain {model} {name:5s} {ms:.3f} ms, {floor / ms:.1%} of the floor ({floor:.3f})",
                    flush=True,
                )
                del chain


def linear_jobs(
    wish: str, batches: tuple[int, ...] = BATCHES
) -> list[tuple[str, str, str, int, str]]:
    """Model, product, format, tokens, way."""
    jobs = []
    for model, name, kind, tokens in product(
        ("octocoder", "8b"), ("qkv", "o", "up", "down"), KINDS, batches
    ):
        if wish in f"linear {model} {name} {kind} {tokens}":
            ways = (
                ["rows"] * (tokens <= 4)
                + ["product"] * (tokens >= 2)
                + ["scratch"] * (tokens >= 256)
            )
            ways += ["woven"] * (kind in ("int4", "int8") and tokens > 64)
            ways += ["rounded"] * (kind == "fp8" and tokens >= 4)
            jobs += [(model, name, kind, tokens, way) for way in ways]
    return jobs


def linear_call(packed: Packed, x: torch.Tensor, way: str) -> torch.Tensor:
    calls = {
        "rows": packed_gemv.packed_rows,
        "product": packed_gemm.packed_product,
        "rounded": packed_linear.rounded,
        "scratch": packed_linear.by_scratch,
        "woven": packed_woven.woven_product,
    }
    return calls[way](x, packed, None)


def compile_linears(part: int, jobs: list[tuple[str, str, str, int, str]]) -> None:
    for model, name, kind, tokens, way in jobs[part::PROCESSES]:
        rows, columns, *_ = MODELS[model].linears()[name]
        try:
            linear_call(
                made(KINDS[kind], rows, columns, "cuda"),
                torch.randn(tokens, columns, device="cuda").bfloat16(),
                way,
            )
            torch.cuda.synchronize()
        except Exception as problem:
            print(f"{model} {name} {kind} {tokens} {way}: {problem!r}"[:300], flush=True)


def bench_linears(wish: str, batches: tuple[int, ...] = BATCHES) -> None:
    jobs = linear_jobs(wish, batches)
    side_by_side(compile_linears, jobs)
    totals: dict[tuple[str, str, int, str], float] = {}
    plain: dict[tuple[str, int], float] = {}
    for model, name in product(("octocoder", "8b"), ("qkv", "o", "up", "down")):
        rows, columns, *_ = MODELS[model].linears()[name]
        mine = [job for job in jobs if job[:2] == (model, name)]
        if not mine:
            continue
        weights = [
            torch.randn(rows, columns, device="cuda").bfloat16()
            for _ in range(copies(rows * columns * 2) // 4 + 1)
        ]
        for tokens in sorted({job[3] for job in mine}):
            x = torch.randn(tokens, columns, device="cuda").bfloat16()
            us = microseconds(
                lambda x=x, ws=weights: [F.linear(x, w) for w in ws][-1], len(weights)
            )
            plain[model, tokens] = plain.get((model, tokens), 0.0) + us
        del weights
        for kind in KINDS:
            many = [
                made(KINDS[kind], rows, columns, "cuda")
                for _ in range(copies(rows * columns) // 4 + 1)
            ]
            for *_, tokens, way in (job for job in mine if job[2] == kind):
                x = torch.randn(tokens, columns, device="cuda").bfloat16()
                try:
                    us = microseconds(
                        lambda x=x, ms=many, w=way: [linear_call(m, x, w) for m in ms][-1],
                        len(many),
                    )
                except Exception as problem:
                    print(f"{model} {name} {kind} {tokens} {way}: {problem!r}"[:200], flush=True)
                    us = float("inf")
                totals[model, kind, tokens, way] = totals.get((model, kind, tokens, way), 0.0) + us
            del many
        torch.cuda.empty_cache()
    for (model, kind, tokens, way), us in sorted(totals.items()):
        print(
            f"linear {model:9s} {kind:5s} {tokens:5d} {way:8s} {us:8.1f} us a layer; bf16 {plain[model, tokens]:8.1f}, "
            f"{plain[model, tokens] / us:.2f} x",
            flush=True,
        )


def bench(wish: str) -> None:
    jobs = [
        (model, name, kind, 1, "rows")
        for model in ("8b", "octocoder")
        for name in ("qkv", "o", "up", "down")
        for kind in KINDS
    ]
    side_by_side(
        compile_chain, [job for job in jobs if any(wish in f"chain {job[0]} {job[2]}" for _ in "x")]
    )
    bench_chains(wish)
    bench_linears(wish)


def compile_chain(part: int, jobs: list[tuple[str, str, str, int, str]]) -> None:
    for model, name, kind, *_ in jobs[part::PROCESSES]:
        phrase(model, name, KINDS[kind], None)()
        torch.cuda.synchronize()


# ---- tune --------------------------------------------------------------------------------------------------------


CUTS = [
    (outputs, chunks, chunks // 32, ahead)
    for outputs, chunks, ahead in product((4, 8, 16), (64, 128, 256), (False, True))
]


def phrase(
    model: str, name: str, kind: str, cut: packed_gemv.Tiling | None, count: int = 1
) -> Callable[[], torch.Tensor]:
    """One product with what surrounds it, over `count` matrices."""
    shape = MODELS[model]
    rows, columns, before, after = shape.linears()[name]
    line = Line.of(8, columns, before, after, False, torch.bfloat16, "cuda")
    line.weight = torch.empty(rows, 1, device="cuda")
    then = line.after(1, torch.bfloat16)
    norm = line.before if before == "rms" else None
    many = [made(kind, rows, columns, "cuda") for _ in range(count)]
    x = torch.randn(1, columns, device="cuda").bfloat16()
    return lambda: [packed_gemv.packed_rows(x, one, None, norm, then, cut) for one in many][-1]


def fitting(model: str, name: str, kind: str) -> list[packed_gemv.Tiling]:
    _, columns, _, after = MODELS[model].linears()[name]
    bits = 8 if kind in ("int8", "fp8") else 4
    chunks = columns * bits // 128
    paired = after.startswith(("heads", "gate"))
    every = [packed_gemv.Tiling(a // 2 if paired else a, *more) for a, *more in CUTS]
    fine = [cut for cut in every if -(-chunks // cut.chunks) * cut.chunks <= 1.4 * chunks]
    return [cut for cut in fine if not cut.ahead or cut.chunks < chunks]  # one turn has none ahead


def tune_jobs(wish: str) -> list[tuple[str, str, str, packed_gemv.Tiling]]:
    names = [
        (m, n, k)
        for m, n, k in product(("octocoder", "8b"), ("qkv", "o", "up", "down"), KINDS)
        if wish in f"{m} {n} {k}"
    ]
    return [(*job, cut) for job in names for cut in fitting(*job)]


def compile_cuts(part: int, jobs: list[tuple[str, str, str, packed_gemv.Tiling]]) -> None:
    for model, name, kind, cut in jobs[part::PROCESSES]:
        try:
            phrase(model, name, KINDS[kind], cut)()
            torch.cuda.synchronize()
        except Exception as problem:
            print(f"{model} {name} {kind} {cut}: {problem!r}"[:300], flush=True)


def tune(wish: str) -> None:
    """Products of one token, and the chain with the best cuts; then those of dozens."""
    jobs = tune_jobs(wish)
    best = {}
    side_by_side(compile_cuts, jobs)
    side_by_side(
        compile_products, product_jobs(wish)
    )  # before this process has a device of its own
    for model, name, kind in dict.fromkeys(job[:3] for job in jobs):
        rows, columns, *_ = MODELS[model].linears()[name]
        packed = made(KINDS[kind], rows, columns, "cuda")
        one = size(packed)
        times = []
        for cut in fitting(model, name, kind):
            try:
                count = max(2, (1 << 28) // one)
                times.append(
                    (microseconds(phrase(model, name, KINDS[kind], cut, count), count), cut)
                )
            except Exception as problem:
                print(f"{model} {name} {kind} {cut}: {problem!r}"[:200], flush=True)
        times.sort()
        floor = one / BANDWIDTH * 1e6
        shown = ", ".join(f"{tuple(cut)} {us:.1f}" for us, cut in times[:5])
        width = packed.codes.shape[1]
        print(
            f"{model} {name} {kind} {(rows, width)}: floor {floor:.1f} us, {floor / times[0][0]:.0%}: {shown}",
            flush=True,
        )
        best.setdefault({"fp8": "FLOATS", "nf4": "TILINGS"}.get(kind, "DOTS"), {})[rows, width] = (
            times[0][1]
        )
        torch.cuda.empty_cache()
    for table, cuts in best.items():
        setattr(packed_gemv, table, {**getattr(packed_gemv, table), **cuts})
    tune_products(wish)
    bench_chains(wish)


# Tokens -> (outputs, warps) and stages to try; then how often a short matrix may be cut along its columns.
BLOCKS = {
    16: (((64, 4), (128, 4)), (4, 6)),
    64: (((64, 4), (128, 4), (256, 8)), (3, 4)),
    256: (((128, 4), (256, 8)), (3, 4)),
}
SPLITS = {"o": (1, 2, 4, 8), "up": (1, 2), "down": (1, 2, 4, 8)}


def product_jobs(wish: str) -> list[tuple[str, str, int, packed_gemm.Tiling]]:
    return [
        (name, kind, tokens, packed_gemm.Tiling(min(tokens, 128), outputs, warps, stages, splits))
        for name, kind, tokens in product(SPLITS, ("int4", "int8", "nf4"), BLOCKS)
        for (outputs, warps), stages, splits in product(*BLOCKS[tokens], SPLITS[name])
        if wish in f"product {name} {kind} {tokens}"
    ]


def compile_products(part: int, jobs: list[tuple[str, str, int, packed_gemm.Tiling]]) -> None:
    for name, kind, tokens, cut in jobs[part::PROCESSES]:
        rows, columns, *_ = MODELS["octocoder"].linears()[name]
        try:
            x = torch.randn(tokens, columns, device="cuda").bfloat16()
            packed_gemm.packed_product(x, made(KINDS[kind], rows, columns, "cuda"), None, cut)
            torch.cuda.synchronize()
        except Exception as problem:
            print(f"{name} {kind} {tokens} {cut}: {problem!r}"[:200], flush=True)


def tune_products(wish: str) -> None:
    jobs = product_jobs(wish)
    for name, kind, tokens in dict.fromkeys(job[:3] for job in jobs):
        rows, columns, *_ = MODELS["octocoder"].linears()[name]
        many = [
            made(KINDS[kind], rows, columns, "cuda")
            for _ in range(1 + (1 << 28) // (rows * columns // 2))
        ]
        x = torch.randn(tokens, columns, device="cuda").bfloat16()
        times = []
        for *_, cut in (job for job in jobs if job[:3] == (name, kind, tokens)):
            try:
                step = lambda x=x, ms=many, c=cut: [
                    packed_gemm.packed_product(x, m, None, c) for m in ms
                ][-1]
                times.append((microseconds(step, len(many)), tuple(cut)))
            except Exception as problem:
                print(f"{name} {kind} {tokens} {cut}: {problem!r}"[:200], flush=True)
        shown = ", ".join(f"{cut} {us:.1f}" for us, cut in sorted(times)[:6])
        print(
            f"product octocoder {name} {kind} {tokens}: floor {size(many[0]) / BANDWIDTH * 1e6:.1f} us: {shown}",
            flush=True,
        )
        del many


if __name__ == "__main__":
    verb, wish = (*sys.argv[1:], "", "")[:2]
    if verb not in ("check", "bench", "tune"):
        raise SystemExit(__doc__)
    raise SystemExit({"check": check, "bench": bench, "tune": tune}[verb](wish))
