"""Products of one token, sampling and experts on one card: are they right, how fast, and cut how?

    PYTHONPATH=src python3 benchmarks/products.py check   each kernel against its reference in float64
    PYTHONPATH=src python3 benchmarks/products.py bench   time, next to the libraries, and share of what the card allows
    PYTHONPATH=src python3 benchmarks/products.py tune    how to cut a model's products, measured in their chain

A word after the verb keeps the cases that have it in their name. Times are medians of replays of one CUDA graph, over
enough weights to defeat the second-level cache. A chain is every product of a model's decode step, one behind the
other, attention left out: its floor is the bytes of the weights at BANDWIDTH, measured on an H200.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.kernels import (
    BANDWIDTH,
    DTYPES,
    PEAK,
    PROCESSES,
    capture,
    error,
    microseconds,
    poisoned,
    side_by_side,
)
from bloomery.kernels import experts, gemv, pick
from bloomery.kernels.gemv import Activation, After, Heads, Norm, Residual, Tiling
from bloomery.kernels.noise import words
from bloomery.kernels.store import Turn

LIMITS = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Shape:
    """What the products of a model look like."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    size: int
    vocab: int
    norm: str = "rms"
    activation: str = "silu"
    gated: bool = True
    turned: bool = True
    bias: bool = False

    def linears(self) -> dict[str, tuple[int, int, str, str]]:
        """Rows, columns, what comes before, what comes after."""
        qkv = (self.heads + 2 * self.kv_heads) * self.dim
        up = self.size * (2 if self.gated else 1)
        turn = f"heads {self.heads} {self.kv_heads} {self.dim} {self.dim if self.turned else 0}"
        return {
            "qkv": (qkv, self.hidden, self.norm, turn),
            "o": (self.hidden, self.heads * self.dim, "", "add"),
            "up": (
                up,
                self.hidden,
                self.norm,
                f"{'gate' if self.gated else 'activate'} {self.activation}",
            ),
            "down": (self.hidden, self.size, "", "add"),
            "head": (self.vocab, self.hidden, self.norm, ""),
        }


MODELS = {
    "8b": Shape(32, 4096, 32, 8, 128, 14336, 128256),
    "1b": Shape(16, 2048, 32, 8, 64, 8192, 128256),
    "octocoder": Shape(
        40, 6144, 48, 1, 128, 24576, 49152, "layer", "gelu_tanh", False, False, True
    ),
    "bloom-7b": Shape(
        30, 4096, 32, 32, 128, 16384, 250880, "layer", "gelu_tanh", False, False, True
    ),
}
SPARSE = {
    "mixtral": (8, 2, 14336, 4096),
    "qwen3-30b": (128, 8, 768, 2048),
}  # experts, choices, size, hidden


# ---- material ----------------------------------------------------------------------------------------------------


@dataclass
class Line:
    """One product with what surrounds it; several tokens may share it."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    before: Norm | None
    kind: str
    cache: torch.Tensor | None = None
    shift: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        rows: int,
        columns: int,
        before: str,
        after: str,
        bias: bool,
        dtype: torch.dtype,
        device: str,
    ) -> Line:
        weight = torch.empty(rows, columns, device=device).normal_(0, columns**-0.5).to(dtype)
        scales = torch.rand(2, columns, device=device) + 0.5
        norm = Norm(
            "rms" if before == "rms" else "layer",
            scales[0],
            None if before == "rms" else scales[1],
            1e-5,
        )
        norm = norm._replace(weight=None, bias=None) if before == "layer bare" else norm
        line = cls(
            weight,
            torch.randn(rows, device=device).to(dtype) if bias else None,
            norm if before else None,
            after,
        )
        if norm.kind == "layer" and before:
            line.shift = gemv.shifts(weight, norm)
        if after.startswith("heads"):
            _, kv_heads, dim, _ = map(int, after.split()[1:5])
            line.cache = torch.zeros(2, 40, kv_heads, dim, dtype=dtype, device=device)
        return line

    def after(self, tokens: int, dtype: torch.dtype, residual: torch.Tensor | None = None) -> After:
        """Anew for each call, for the cache must be the caller's."""
        device = self.weight.device
        (kind, *words) = self.kind.split() or [""]
        match kind:
            case "add":
                given = (
                    torch.randn(tokens, len(self.weight), device=device).to(dtype)
                    if residual is None
                    else residual
                )
                return Residual(given, 1.0 if residual is not None else 0.7)
            case "gate" | "activate":
                return Activation(words[0], kind == "gate")
            case "heads":
                turned = int(words[3])
                tables = "tables" in words
                angles = torch.rand(50 if tables else tokens, turned // 2, device=device) * 6
                places = (
                    torch.randint(50, (tokens,), device=device, dtype=torch.int32)
                    if tables
                    else None
                )
                turn = Turn(
                    (angles.cos(), angles.sin()) if turned else None, places, "interleaved" in words
                )
                return Heads(self.cache, torch.randperm(40, device=device)[:tokens].int(), turn)
        return None


def wide(value: object) -> object:
    """The same in float64; a cache becomes another. Norms stay, for they are float32 everywhere."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, tuple) and not isinstance(value, Norm) and hasattr(value, "_fields"):
        return type(value)(*map(wide, value))
    return value


@contextmanager
def apart(yes: bool) -> Iterator[None]:
    """Kernels that do not overlap one another, to see that overlapping changes nothing."""
    usual = gemv.overlap
    if yes:
        gemv.overlap = lambda device: {"PDL": False}
    try:
        yield
    finally:
        gemv.overlap = usual


# ---- check -------------------------------------------------------------------------------------------------------


def check_product(
    tokens: int,
    rows: int,
    columns: int,
    before: str,
    after: str,
    bias: bool,
    dtype: torch.dtype,
    device: str,
    cut: Tiling | None = None,
    plain: bool = False,
) -> float:
    line = Line.of(rows, columns, before, after, bias, dtype, device)
    x = (torch.randn(tokens, columns, device=device) + 0.3).to(dtype)
    then = line.after(tokens, dtype)
    with apart(plain):
        got = poisoned(
            lambda: gemv.product_rows(x, line.weight, line.bias, line.before, then, cut=cut)
        )
    then64 = wide(then)
    if isinstance(then64, Heads):
        then64.cache.zero_()
    wanted = gemv.product_reference(*map(wide, (x, line.weight, line.bias, line.before)), then64)
    worst = error(got, wanted)
    if isinstance(then64, Heads):
        worst = max(
            worst, error(then.cache[0], then64.cache[0]), error(then.cache[1], then64.cache[1])
        )
    return worst


def random_wishes(rows: int, kind: str, device: str) -> pick.Wishes:
    """kind: greedy, free, top_p, top_k, min_p, both or mixed, which is one of them a row."""
    kinds = ("greedy", "free", "top_p", "top_k", "min_p", "both")
    heat = torch.rand(rows) * 1.3 + 0.2
    top_p = torch.ones(rows)
    min_p = torch.zeros(rows)
    top_k = torch.zeros(rows, dtype=torch.int64)
    for row in range(rows):
        one = kinds[int(torch.randint(len(kinds), ()))] if kind == "mixed" else kind
        heat[row] = 0.0 if one == "greedy" else heat[row]
        top_p[row] = torch.rand(()) * 0.98 + 0.01 if one in ("top_p", "both") else 1.0
        min_p[row] = torch.rand(()) ** 2 if one == "min_p" or (one == "both" and row % 2) else 0.0
        top_k[row] = torch.randint(1, 200, ()) if one in ("top_k", "both") else 0
    seeds = torch.tensor([words(7919 * row + 3) for row in range(rows)], dtype=torch.int32)
    floats = torch.stack((heat, top_p, min_p), 1).double().to(device).unbind(1)
    return pick.Wishes(*floats, top_k.to(device), seeds.to(device))


def check_pick(
    lines: int, vocab: int, spread: float, kind: str, dtype: torch.dtype, device: str, **sizes: int
) -> float:
    """The share of lines whose token differs, or its rank or log-probability does; twice, for the scratch stays."""
    wishes = random_wishes(lines + 3, kind, device)
    scratch = pick.Scratch.of(lines, vocab, device, **sizes)
    wrong = 0.0
    for scored in (True, False):
        logits = (torch.randn(lines, vocab, device=device) * spread).to(dtype)
        rows = torch.randperm(lines + 3, device=device)[:lines].int()
        positions = torch.randint(1 << 17, (lines,), device=device, dtype=torch.int32)
        got = poisoned(
            lambda a=(logits, rows, positions, wishes, scratch), s=scored: pick.pick_lines(
                *a, scored=s
            )
        )
        wanted = pick.pick_reference(logits, rows, positions, wishes)
        same = got.tokens == wanted.tokens
        if scored:
            same &= (got.ranks == wanted.ranks) & ((got.logprobs - wanted.logprobs).abs() < 1e-4)
        wrong = max(wrong, 1 - same.double().mean().item())
    return wrong


def check_draws(draws: int, device: str) -> float:
    """Total variation between what is drawn and the softmax."""
    logits = torch.randn(1, 50, device=device).repeat(draws, 1)
    wishes = random_wishes(1, "free", device)
    rows = torch.zeros(draws, dtype=torch.int32, device=device)
    scratch = pick.Scratch.of(draws, 50, device, segment=64)
    tokens = pick.pick_lines(
        logits, rows, torch.arange(draws, device=device), wishes, scratch, False, False
    ).tokens
    share = torch.bincount(tokens.long(), minlength=50).double() / draws
    return (share - (logits[0].double() / wishes.temperature[0]).softmax(-1)).abs().sum().item() / 2


def check_penalties(lines: int, vocab: int, length: int, device: str) -> float:
    rows = torch.randperm(lines + 2, device=device)[:lines].int()
    numbers = torch.rand(3, lines + 2, device=device) + torch.tensor(
        [[0.5], [-0.5], [-0.5]], device=device
    )
    numbers[:, 0] = torch.tensor([1.0, 0.0, 0.0])
    history = torch.randint(vocab, (lines + 2, length), dtype=torch.int32, device=device)
    prompts = torch.randint(length // 2, (lines + 2,), device=device)
    positions = torch.randint(length // 2, length, (lines,), device=device)
    by = pick.Penalties(*numbers, history, prompts)
    both = torch.randn(1, lines, vocab, device=device).repeat(2, 1, 1)
    pick.penalise_lines(both[0], rows, positions, by)
    pick.penalise_reference(both[1], rows, positions, by)
    return error(both[0], both[1])


def check_experts(
    tokens: int,
    count: int,
    k: int,
    size: int,
    hidden: int,
    way: str,
    dtype: torch.dtype,
    device: str,
    cut: experts.Blocks | None = None,
) -> float:
    logits = torch.randn(tokens, count, device=device)
    chosen, weights = poisoned(lambda: experts.route_rows(logits, k, True))
    same, wanted = experts.route_reference(logits, k, True)
    if not torch.equal(chosen, same):
        return float("inf")
    up = (torch.randn(count, 2 * size, hidden, device=device) / hidden**0.5).to(dtype)
    down = (torch.randn(count, hidden, size, device=device) / size**0.5).to(dtype)
    x, residual = torch.randn(2, tokens, hidden, device=device).to(dtype)
    chosen[0, 0] = count  # nobody
    call = experts.mix_singly if way == "singly" else experts.mix_grouped
    given = (x, chosen, weights, up, down, "silu", residual, 0.5)
    more = () if way == "singly" or cut is None else ((cut, cut),)
    got = poisoned(lambda: call(*given, *more))
    again = call(*given, *more)
    right = experts.mix_reference(*map(wide, given))
    return (
        max(error(weights, wanted), error(got, right)) if torch.equal(got, again) else float("inf")
    )


def check_chain(name: str) -> float:
    """Two layers captured and replayed: the same bits as without overlap and without a graph."""
    stack = Stack(MODELS[name], layers=2)
    with apart(True):
        wanted = stack.step().clone()
    graph, out = capture(stack.step)
    worst = 0.0
    for _ in range(5):
        out.fill_(torch.nan)
        graph.replay()
        worst = max(worst, error(out, wanted))
    return worst


PHRASES = (
    ("", ""),
    ("rms", ""),
    ("layer", ""),
    ("layer bare", ""),
    ("", "add"),
    ("rms", "add"),
    ("rms", "gate silu"),
    ("layer", "gate gelu"),
    ("layer", "activate gelu_tanh"),
    ("", "activate relu"),
    ("rms", "heads 6 2 64 64 tables"),
    ("", "heads 6 2 64 0"),
    ("layer", "heads 6 2 64 32"),
    ("rms", "heads 6 2 64 32 interleaved tables"),
    ("layer", "heads 6 2 64 64 interleaved"),
)


def checks() -> Iterator[tuple[str, Callable[[], float], float]]:
    """Name, call, limit."""
    for (name, dtype), (before, after), columns in product(
        DTYPES.items(), PHRASES, (576, 896, 1536, 4096)
    ):
        if name == "fp16" and columns != 1536:
            continue  # the same code as for bf16, and compiling takes time
        plain = columns == 896
        bias = columns in (576, 4096)
        call = lambda a=(1, 640, columns, before, after, bias, dtype, "cuda", None, plain): (
            check_product(*a)
        )
        yield f"product {columns} {before} {after} {name}", call, LIMITS[dtype]
    for (name, dtype), tokens, after in product(DTYPES.items(), (2, 3, 4), ("", "add")):
        call = lambda a=(tokens, 4096, 6144, "", after, True, dtype, "cuda"): check_product(*a)
        yield f"product {tokens} tokens {after} {name}", call, LIMITS[dtype]
    for model, shape in MODELS.items():
        for linear, (rows, columns, before, after) in shape.linears().items():
            call = lambda a=(1, rows, columns, before, after, shape.bias, torch.bfloat16, "cuda"): (
                check_product(*a)
            )
            yield f"product {model} {linear} bf16", call, LIMITS[torch.bfloat16]
        yield f"chain {model}", lambda m=model: check_chain(m), 1e-9
    for kind, spread in product(
        ("greedy", "free", "top_p", "top_k", "min_p", "both", "mixed"), (0.5, 4.0)
    ):
        for vocab, dtype in ((128256, torch.float32), (49152, torch.bfloat16)):
            call = lambda a=(64, vocab, spread, kind, dtype, "cuda"): check_pick(*a)
            yield f"pick {kind} {vocab} spread {spread}", call, 0.02
    yield (
        "pick overflowing lists",
        lambda: check_pick(64, 20000, 0.5, "mixed", torch.float32, "cuda", listed=64),
        0.02,
    )
    yield "pick draws", lambda: check_draws(8192, "cuda"), 0.06
    yield "penalties", lambda: check_penalties(16, 1000, 3000, "cuda"), 1e-6
    for (name, dtype), tokens in product(DTYPES.items(), (1, 3, 17, 200, 3000)):
        for sparse, shape in (SPARSE | {"odd": (12, 3, 200, 328)}).items():
            for way in ("singly", "grouped") if tokens <= 17 else ("grouped",):
                few = (shape[0], shape[1], min(shape[2], 1536), min(shape[3], 2048))
                call = lambda a=(tokens, *few, way, dtype, "cuda"): check_experts(*a)
                yield f"experts {sparse} {way} {tokens} {name}", call, LIMITS[dtype]


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


# ---- bench -------------------------------------------------------------------------------------------------------


class Stack:
    """Every product of a decode step; q stands in for what attention would give."""

    def __init__(self, shape: Shape, layers: int | None = None, only: str | None = None):
        kinds = {name: kind for name, kind in shape.linears().items() if only in (None, name)}

        def made(name: str) -> Line:
            return Line.of(*kinds[name], shape.bias and name != "head", torch.bfloat16, "cuda")

        self.shape = shape
        self.layers = [
            {name: made(name) for name in kinds if name != "head"}
            for _ in range(layers or shape.layers)
        ]
        self.head = made("head") if "head" in kinds else None
        self.x = torch.randn(1, shape.hidden, device="cuda").bfloat16()
        turn = Turn((torch.ones(1, shape.dim // 2, device="cuda"),) * 2) if shape.turned else Turn()
        self.turns = torch.zeros(1, dtype=torch.int32, device="cuda"), turn
        lines = [line for layer in self.layers for line in layer.values()] + (
            [self.head] if self.head else []
        )
        self.bytes = sum(line.weight.nbytes for line in lines)

    def step(self, cuts: Mapping[str, Tiling] | None = None) -> torch.Tensor:
        cuts = cuts or {}
        x = self.x

        def go(name: str, line: Line, x: torch.Tensor, after: After) -> torch.Tensor:
            return gemv.product_rows(
                x, line.weight, line.bias, line.before, after, cut=cuts.get(name), shift=line.shift
            )

        for layer in self.layers:
            q = go("qkv", layer["qkv"], x, Heads(layer["qkv"].cache, *self.turns))
            x = go("o", layer["o"], q.view(1, -1), Residual(x))
            h = go("up", layer["up"], x, Activation(self.shape.activation, self.shape.gated))
            x = go("down", layer["down"], h, Residual(x))
        return go("head", self.head, x, None)


def copies(size: int) -> int:
    return max(2, min(64, (3 << 29) // size))


def bench_products(wish: str) -> None:
    """Each alone, at one token and at a few, next to the library's bare product."""
    for model, shape in MODELS.items():
        for name, (rows, columns, before, after) in shape.linears().items():
            label = f"product {model} {name}"
            if wish not in label:
                continue
            size = rows * columns * 2
            bias = shape.bias and name != "head"
            lines = [
                Line.of(rows, columns, before, after, bias, torch.bfloat16, "cuda")
                for _ in range(copies(size))
            ]
            for tokens in (1, 2, 4) if name in ("o", "down", "head") else (1,):
                x = torch.randn(tokens, columns, device="cuda").bfloat16()
                then = [line.after(tokens, torch.bfloat16) for line in lines]
                ours = microseconds(
                    lambda x=x, t=then, ls=lines: [
                        gemv.product_rows(x, a.weight, a.bias, a.before, b, shift=a.shift)
                        for a, b in zip(ls, t)
                    ][-1],
                    len(lines),
                )
                bare = microseconds(
                    lambda x=x, ls=lines: [F.linear(x, a.weight) for a in ls][-1], len(lines)
                )
                rate = size / ours / 1e6
                share = size / BANDWIDTH * 1e6 / ours
                print(
                    f"{label:24s} {tokens} {rows:6d} x {columns:5d}  ours {ours:7.2f} us {rate:5.2f} TB/s {share:6.1%}"
                    f"   bare library {bare:7.2f} us {size / bare / 1e6:5.2f} TB/s",
                    flush=True,
                )
            del lines, then
            torch.cuda.empty_cache()


def bench_chains(wish: str) -> None:
    for model, shape in MODELS.items():
        if wish in f"chain {model}":
            stack = Stack(shape)
            us = microseconds(stack.step, 1)
            floor = stack.bytes / BANDWIDTH * 1e6
            with apart(True):
                plain = microseconds(stack.step, 1)
            print(
                f"chain {model:10s} {us / 1e3:7.3f} ms, {floor / us:6.1%} of the floor ({floor / 1e3:.3f}); "
                f"without overlap {plain / 1e3:.3f}",
                flush=True,
            )
            del stack
            torch.cuda.empty_cache()


def bench_picks(wish: str) -> None:
    sizes = product((1, 64, 256), (4.0, 0.5), (torch.float32, torch.bfloat16))
    for (lines, spread, dtype), kind in product(
        sizes, ("greedy", "free", "top_p", "top_k", "both")
    ):
        label = f"pick {lines} {kind} spread {spread} {str(dtype)[6:]}"
        if wish in label and (spread == 4.0 or kind in ("top_p", "both")):
            bench_pick(label, lines, spread, dtype, kind)


def bench_pick(
    label: str, lines: int, spread: float, dtype: torch.dtype, kind: str, vocab: int = 128256
) -> None:
    many = [
        (torch.randn(lines, vocab, device="cuda") * spread).to(dtype)
        for _ in range(2 if lines > 64 else 8)
    ]
    places = torch.arange(lines + len(many), dtype=torch.int32, device="cuda")
    wishes = random_wishes(lines, kind, "cuda")
    scratch = pick.Scratch.of(lines, vocab, "cuda")
    wishes.top_p.copy_(torch.where(wishes.top_p < 1, 0.95, 1.0))
    wishes.top_k.copy_(torch.where(wishes.top_k > 0, 50, 0))
    restricted = kind not in ("greedy", "free")

    def step() -> torch.Tensor:
        for i, logits in enumerate(many):
            found = pick.pick_lines(
                logits, places[:lines], places[i : i + lines], wishes, scratch, restricted
            )
        return found.tokens

    us = microseconds(step, len(many))
    floor = many[0].nbytes / BANDWIDTH * 1e6
    print(f"{label:40s} {us:8.2f} us; one pass over the logits takes {floor:.2f}", flush=True)


def loop(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> None:
    y = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        token, place = (chosen == expert).nonzero(as_tuple=True)
        gate, right = F.linear(x[token], up[expert]).chunk(2, -1)
        y.index_add_(
            0,
            token,
            F.linear(F.silu(gate) * right, down[expert]) * weights[token, place, None].to(x.dtype),
        )


def library(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """torch's grouped product between torch's sort and sums."""
    flat, order = chosen.flatten().sort()
    ends = torch.searchsorted(
        flat, torch.arange(1, len(up) + 1, device=x.device, dtype=flat.dtype)
    ).int()
    gate, right = torch._grouped_mm(
        x[order // chosen.shape[1]], up.transpose(1, 2), offs=ends
    ).chunk(2, -1)
    y = torch._grouped_mm(F.silu(gate) * right, down.transpose(1, 2), offs=ends)
    y = torch.empty_like(y).index_copy_(0, order, y).view(*chosen.shape, -1)
    return (y * weights[..., None].to(x.dtype)).sum(1)


def bench_experts(wish: str) -> None:
    for (model, (count, k, size, hidden)), tokens in product(
        SPARSE.items(), (1, 4, 16, 64, 256, 2048, 8192)
    ):
        label = f"experts {model} {tokens}"
        if wish in label:
            up = torch.empty(count, 2 * size, hidden, device="cuda", dtype=torch.bfloat16).normal_(
                0, hidden**-0.5
            )
            down = torch.empty(count, hidden, size, device="cuda", dtype=torch.bfloat16).normal_(
                0, size**-0.5
            )
            bench_mixes(label, torch.randn(tokens, hidden, device="cuda").bfloat16(), up, down, k)
            del up, down
            torch.cuda.empty_cache()


def bench_mixes(label: str, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, k: int) -> None:
    routes = [experts.route(torch.randn(len(x), len(up), device="cuda"), k, True) for _ in range(8)]
    ways = {"singly": experts.mix_singly} if len(x) <= 16 else {}
    times = {}
    for way, call in (ways | {"grouped": experts.mix_grouped, "library": library}).items():
        try:
            times[way] = microseconds(
                lambda c=call: [c(x, *route, up, down) for route in routes][-1], len(routes)
            )
        except Exception as problem:
            print(f"{label} {way}: {problem!r}"[:200])
    loop(x, *routes[0], up, down)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    loop(x, *routes[1], up, down)
    end.record()
    end.synchronize()
    visited = sum(len(chosen.unique()) for chosen, _ in routes) / len(routes) / len(up)
    moved = visited * (up.nbytes + down.nbytes)
    flops = 2 * len(x) * k * (up[0].numel() + down[0].numel())
    floor = max(moved / BANDWIDTH, flops / PEAK) * 1e6
    shown = ", ".join(f"{way} {us:.1f} us ({floor / us:.0%})" for way, us in times.items())
    print(
        f"{label:24s} floor {floor:8.1f}: {shown}, loop {start.elapsed_time(end) * 1e3:.0f}",
        flush=True,
    )


def bench(wish: str) -> None:
    jobs = [(model, name, None) for model in MODELS for name in MODELS[model].linears()]
    side_by_side(
        compile_part, [job for job in jobs if wish in f"chain {job[0]} product {job[0]} {job[1]}"]
    )
    bench_chains(wish)
    bench_products(wish)
    bench_picks(wish)
    bench_experts(wish)


# ---- tune --------------------------------------------------------------------------------------------------------


CUTS = [
    (4, 2048, 4),
    (4, 1024, 4),
    (8, 1024, 4),
    (2, 2048, 4),
    (2, 4096, 4),
    (8, 2048, 8),
    (4, 4096, 8),
    (4, 4096, 4),
    (8, 2048, 4),
    (4, 1024, 2),
    (8, 512, 2),
    (16, 512, 4),
    (4, 8192, 8),
    (8, 1024, 2),
    (16, 1024, 4),
]


def cuts(rows: int, columns: int, after: str) -> list[Tiling]:
    """The usual one first."""
    paired = after.startswith(("heads", "gate"))
    usual = gemv.tiling(rows, columns, paired, 2)
    every = [
        Tiling(max(1, outputs // 2) if paired else outputs, inputs, warps)
        for outputs, inputs, warps in CUTS
    ]
    return [usual, *(cut for cut in every if cut != usual and columns % cut.inputs == 0)]


def compile_part(part: int, jobs: list[tuple[str, str, Tiling | None]]) -> None:
    """Every kernel once: in the cache on disk others find it."""
    for model, name, cut in jobs[part::PROCESSES]:
        shape = MODELS[model]
        rows, columns, before, after = shape.linears()[name]
        for tokens in (1, 2, 4) if cut is None and name in ("o", "down", "head") else (1,):
            line = Line.of(
                rows, columns, before, after, shape.bias and name != "head", torch.bfloat16, "cuda"
            )
            x = torch.randn(tokens, columns, device="cuda").bfloat16()
            then = line.after(tokens, torch.bfloat16)
            try:
                gemv.product_rows(
                    x, line.weight, line.bias, line.before, then, cut=cut, shift=line.shift
                )
                torch.cuda.synchronize()
            except Exception as problem:
                print(f"{model} {name} {cut}: {problem!r}"[:300], flush=True)


def tune(wish: str) -> None:
    """One product after another, in a chain of some layers: with overlap, neighbours matter."""
    names = [model for model in MODELS if wish in model]
    found = {m: {n: cuts(k[0], k[1], k[3]) for n, k in MODELS[m].linears().items()} for m in names}
    side_by_side(
        compile_part, [(m, n, cut) for m in names for n in found[m] for cut in found[m][n]]
    )
    for model in names:
        stack = Stack(MODELS[model], layers=8)
        best = {name: tries[0] for name, tries in found[model].items()}
        least = microseconds(lambda s=stack, b=best: s.step(b), 1)
        print(f"{model}: {least:.1f} us, floor {stack.bytes / BANDWIDTH * 1e6:.1f}", flush=True)
        for name, tries in found[model].items():
            times = []
            for cut in tries:
                try:
                    times.append(
                        (microseconds(lambda s=stack, b=best | {name: cut}: s.step(b), 1), cut)
                    )
                except Exception as problem:
                    print(f"{model} {name} {cut}: {problem!r}"[:200], flush=True)
            times.sort()
            best[name] = times[0][1]
            shape = MODELS[model].linears()[name][:2]
            shown = ", ".join(f"{tuple(cut)} {us:.1f}" for us, cut in times[:4])
            usual = next(us for us, cut in times if cut == tries[0])
            print(
                f"    {name:5s} {shape}: {shown}; usual {tuple(tries[0])} {usual:.1f}", flush=True
            )
        del stack
        torch.cuda.empty_cache()


if __name__ == "__main__":
    verb, wish = (*sys.argv[1:], "", "")[:2]
    if verb not in ("check", "bench", "tune"):
        raise SystemExit(__doc__)
    raise SystemExit({"check": check, "bench": bench, "tune": tune}[verb](wish))
