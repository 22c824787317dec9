"""Checks, times and tunes GEMV, sampling and mixture-of-experts kernels on one GPU.

    PYTHONPATH=src python3 benchmarks/products.py check   every kernel against its reference
    PYTHONPATH=src python3 benchmarks/products.py bench   times next to the libraries' and the floor
    PYTHONPATH=src python3 benchmarks/products.py tune    the fastest GEMV tilings in a decode step

A further argument selects the cases whose name contains it. Times are medians of replays of
one CUDA graph, over more weights than the L2 cache holds. A decode step here is all linear layers
of a model for one token, without attention. Its floor is the bytes of the weights at
HBM_BYTES_PER_SECOND, which was measured on an H200.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.kernels import (
    DTYPES,
    HBM_BYTES_PER_SECOND,
    NUM_PROCESSES,
    PEAK_FLOPS,
    capture_graph,
    measure_microseconds,
    run_in_processes,
)
from bloomery.fusion import (
    ActivationEpilogue,
    Epilogue,
    QkTransform,
    QkvEpilogue,
    ResidualEpilogue,
)
from bloomery.kernels import gemv, moe
from bloomery.kernels.gemv import GemvTiling
from bloomery.messages import NewRequestData, ResolvedSampling
from bloomery.runtime.sampler import Sampler
from bloomery.spec import RouterSpec
from tests.kernels.linear_oracles import (
    LINEAR_ERROR_LIMITS,
    MODEL_SHAPES,
    LinearCase,
    ModelShape,
    check_gemv,
    without_pdl,
)
from tests.kernels.moe_oracles import EXPERT_KINDS, ROUTERS, check_experts, check_router
from tests.kernels.oracles import relative_error
from tests.kernels.sampling_oracles import (
    SAMPLING_KINDS,
    check_distribution,
    check_sampling,
)

BF16 = torch.bfloat16
# name -> experts, top-k, intermediate size, hidden size
MOE_SHAPES = {
    "mixtral": (8, 2, 14336, 4096),
    "qwen3-30b": (128, 8, 768, 2048),
    "gpt-oss-20b": (32, 4, 2880, 2880),
}

Check = tuple[str, Callable[[], float], float]  # name, call that returns the error, limit
CheckResult = tuple[str, float, float, str]  # name, error, limit, exception


# ---- check ---------------------------------------------------------------------------------------


EPILOGUE_CASES = (
    ("", ""),
    ("rms", ""),
    ("layer", ""),
    ("layer bare", ""),
    ("", "residual"),
    ("rms", "residual"),
    ("rms", "gate silu"),
    ("layer", "gate gelu"),
    ("layer", "activate gelu_tanh"),
    ("", "activate relu"),
    ("rms", "qkv 6 2 64 64 tables"),
    ("rms", "qkv 6 2 64 64 tables scaled"),
    ("", "qkv 6 2 64 0"),
    ("layer", "qkv 6 2 64 32"),
    ("rms", "qkv 6 2 64 32 interleaved tables"),
    ("layer", "qkv 6 2 64 64 interleaved"),
)


def all_checks() -> Iterator[Check]:
    """Every check of this file."""
    yield from gemv_checks()
    yield from sampling_checks()
    yield from experts_checks()


def gemv_checks() -> Iterator[Check]:
    """GEMV with every prologue and epilogue, with several tokens, and with the models' shapes."""
    for (name, dtype), (prologue, epilogue), columns in product(
        DTYPES.items(), EPILOGUE_CASES, (576, 896, 1536, 4096)
    ):
        if name == "fp16" and columns != 1536:
            continue  # the same code as for bf16, and compiling takes time
        disable_pdl = columns == 896
        bias = columns in (576, 4096)
        shape = (1, 640, columns, prologue, epilogue, bias, dtype, "cuda", None, disable_pdl)
        call = partial(check_gemv, *shape)
        yield f"gemv {columns} {prologue} {epilogue} {name}", call, LINEAR_ERROR_LIMITS[dtype]
    for (name, dtype), tokens, epilogue in product(DTYPES.items(), (2, 3, 4), ("", "residual")):
        shape = (tokens, 4096, 6144, "", epilogue, True, dtype, "cuda")
        call = partial(check_gemv, *shape)
        yield f"gemv {tokens} tokens {epilogue} {name}", call, LINEAR_ERROR_LIMITS[dtype]
    for model, model_shape in MODEL_SHAPES.items():
        for linear, linear_shape in model_shape.linear_shapes().items():
            shape = (1, *linear_shape, model_shape.bias, BF16, "cuda")
            call = partial(check_gemv, *shape)
            yield f"gemv {model} {linear} bf16", call, LINEAR_ERROR_LIMITS[BF16]
        yield f"step {model}", partial(check_decode_step, model), 1e-9


def sampling_checks() -> Iterator[Check]:
    """Sampling with every kind of parameters, and with overflowing lists."""
    for kind, logit_scale in product((*SAMPLING_KINDS, "mixed"), (0.5, 4.0)):
        for vocab_size, dtype in ((128256, torch.float32), (49152, BF16)):
            shape = (64, vocab_size, logit_scale, kind, dtype, "cuda")
            call = partial(check_sampling, *shape)
            yield f"sampling {kind} {vocab_size} scale {logit_scale}", call, 0.02
    yield (
        "sampling overflowing lists",
        lambda: check_sampling(64, 20000, 0.5, "mixed", torch.float32, "cuda", max_listed=64),
        0.02,
    )
    yield "sampling distribution", lambda: check_distribution(8192, "cuda"), 0.06


def experts_checks() -> Iterator[Check]:
    """Both methods of the experts, by model, number of tokens and type."""
    shapes = MOE_SHAPES | {"odd": (12, 3, 200, 328)}
    for (name, dtype), tokens in product(DTYPES.items(), (1, 3, 17, 200, 3000)):
        for model, (num_experts, top_k, intermediate_size, hidden_size) in shapes.items():
            sizes = (num_experts, top_k, min(intermediate_size, 1536), min(hidden_size, 2048))
            methods = ["grouped"]
            if tokens <= 17:
                methods.append("gemv")
            for method, kind in product(methods, EXPERT_KINDS):
                shape = (tokens, *sizes, method, dtype, "cuda", None, kind)
                call = partial(check_experts, *shape)
                limit = LINEAR_ERROR_LIMITS[dtype]
                yield f"experts {model} {method} {tokens} {name} {kind}", call, limit
    for router, tokens in product(ROUTERS, (1, 300)):
        yield f"router {router} {tokens}", partial(check_router, router, tokens, "cuda"), 1e-5


def check_decode_step(model: str) -> float:
    """Two layers, captured and replayed: the same bits as without PDL and without a graph."""
    step = DecodeStepLinears(MODEL_SHAPES[model], num_layers=2)
    with without_pdl(True):
        expected = step.run().clone()
    graph, out = capture_graph(step.run)
    error = 0.0
    for _ in range(5):
        out.fill_(torch.nan)
        graph.replay()
        error = max(error, relative_error(out, expected))
    return error


def run_check_part(
    part: int, make_checks: Callable[[], Iterator[Check]], selected: str
) -> list[CheckResult]:
    """Run every NUM_PROCESSES-th check whose name contains `selected`."""
    results: list[CheckResult] = []
    for i, (name, call, limit) in enumerate(make_checks()):
        if i % NUM_PROCESSES == part and selected in name:
            torch.manual_seed(i)
            try:
                results.append((name, call(), limit, ""))
            except Exception as exception:
                results.append((name, float("inf"), limit, repr(exception)[:300]))
    return results


def run_checks(make_checks: Callable[[], Iterator[Check]], selected: str) -> int:
    """Run the selected checks in NUM_PROCESSES processes, print a table, return the failures."""
    parts = run_in_processes(run_check_part, make_checks, selected)
    results = [result for part in parts for result in part]
    errors_by_kind: dict[str, list[float]] = {}
    for name, error, _, _ in results:
        name_parts = name.split()
        errors_by_kind.setdefault(f"{name_parts[0]} {name_parts[-1]}", []).append(error)
    for kind, errors in sorted(errors_by_kind.items()):
        print(f"{kind:30s} {len(errors):4d} checks, largest error {max(errors):.1e}")
    failures = [result for result in results if not result[1] < result[2]]
    for name, error, limit, exception in failures:
        print(f"FAIL {name}: {error:.1e}, not below {limit:.0e} {exception}")
    print(f"{len(results)} checks, {len(failures)} failed", flush=True)
    return len(failures)


def check(selected: str) -> int:
    """Compare every kernel with its reference."""
    return run_checks(all_checks, selected)


# ---- bench ---------------------------------------------------------------------------------------


class DecodeStepLinears:
    """All linear layers of a decode step for one token. q stands in for the attention output."""

    def __init__(self, shape: ModelShape, num_layers: int | None = None):
        shapes = shape.linear_shapes()

        def make_case(name: str) -> LinearCase:
            bias = shape.bias and name != "head"
            return LinearCase.make(*shapes[name], bias, BF16, "cuda")

        self.shape = shape
        self.layers = [
            {name: make_case(name) for name in shapes if name != "head"}
            for _ in range(num_layers or shape.num_layers)
        ]
        self.head = make_case("head")
        self.x = torch.randn(1, shape.hidden_size, device="cuda").bfloat16()
        self.slot_mapping = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.transform = make_rope_transform(shape)
        cases = [case for layer in self.layers for case in layer.values()] + [self.head]
        self.weight_bytes = sum(case.weight.nbytes for case in cases)

    def run(self, tilings: Mapping[str, GemvTiling] | None = None) -> torch.Tensor:
        """Run the step. `tilings` replaces the usual tilings by the name of the layer."""
        tilings = tilings or {}

        def run_linear(
            name: str, case: LinearCase, x: torch.Tensor, epilogue: Epilogue
        ) -> torch.Tensor:
            return gemv.gemv_triton(
                x,
                case.weight,
                case.bias,
                case.prologue,
                epilogue,
                tiling=tilings.get(name),
                norm_shift=case.norm_shift,
            )

        x = self.x
        activation = ActivationEpilogue(self.shape.activation, self.shape.gated)
        for layer in self.layers:
            kv_cache = layer["qkv"].kv_cache
            qkv = QkvEpilogue(kv_cache, self.slot_mapping, self.transform)
            q = run_linear("qkv", layer["qkv"], x, qkv)
            x = run_linear("o", layer["o"], q.view(1, -1), ResidualEpilogue(x))
            h = run_linear("up", layer["up"], x, activation)
            x = run_linear("down", layer["down"], h, ResidualEpilogue(x))
        return run_linear("head", self.head, x, None)


def make_rope_transform(shape: ModelShape) -> QkTransform:
    """Return the rope of one token; an empty transform if the model has no rope."""
    if not shape.rope:
        return QkTransform()
    angles = torch.ones(1, shape.head_dim // 2, device="cuda")
    return QkTransform((angles, angles))


def num_copies(nbytes: int) -> int:
    """Return how many matrices of this size to cycle through so that the L2 cache does not help."""
    return max(2, min(64, (3 << 29) // nbytes))


def bench_gemv(selected: str) -> None:
    """Time each linear layer alone, at one token and a few, next to the library's bare GEMM."""
    for model, shape in MODEL_SHAPES.items():
        for name, linear_shape in shape.linear_shapes().items():
            label = f"gemv {model} {name}"
            if selected in label:
                bias = shape.bias and name != "head"
                token_counts = [1]
                if name in ("o", "down", "head"):
                    token_counts += [2, 4]
                bench_linear(label, linear_shape, bias, token_counts)
                torch.cuda.empty_cache()


def bench_linear(
    label: str, shape: tuple[int, int, str, str], bias: bool, token_counts: list[int]
) -> None:
    """Time one linear layer over copies of its weights."""
    rows, columns, *_ = shape
    nbytes = rows * columns * 2
    cases = [LinearCase.make(*shape, bias, BF16, "cuda") for _ in range(num_copies(nbytes))]
    for tokens in token_counts:
        x = torch.randn(tokens, columns, device="cuda").bfloat16()
        epilogues = [case.make_epilogue(tokens, BF16) for case in cases]

        def run_ours(x: torch.Tensor = x, epilogues: list[Epilogue] = epilogues) -> torch.Tensor:
            for case, epilogue in zip(cases, epilogues, strict=True):
                y = gemv.gemv_triton(
                    x,
                    case.weight,
                    case.bias,
                    case.prologue,
                    epilogue,
                    norm_shift=case.norm_shift,
                )
            return y

        def run_library(x: torch.Tensor = x) -> torch.Tensor:
            for case in cases:
                y = F.linear(x, case.weight)
            return y

        ours = measure_microseconds(run_ours, len(cases))
        library = measure_microseconds(run_library, len(cases))
        rate = nbytes / ours / 1e6
        library_rate = nbytes / library / 1e6
        floor_share = nbytes / HBM_BYTES_PER_SECOND * 1e6 / ours
        print(
            f"{label:24s} {tokens} {rows:6d} x {columns:5d}"
            f"  ours {ours:7.2f} us {rate:5.2f} TB/s {floor_share:6.1%}"
            f"   bare library {library:7.2f} us {library_rate:5.2f} TB/s",
            flush=True,
        )


def bench_decode_steps(selected: str) -> None:
    """Time the linear layers of whole decode steps, with and without PDL."""
    for model, shape in MODEL_SHAPES.items():
        if selected not in f"step {model}":
            continue
        step = DecodeStepLinears(shape)
        time_us = measure_microseconds(step.run, 1)
        floor_us = step.weight_bytes / HBM_BYTES_PER_SECOND * 1e6
        with without_pdl(True):
            without_us = measure_microseconds(step.run, 1)
        print(
            f"step {model:10s} {time_us / 1e3:7.3f} ms, {floor_us / time_us:6.1%} of the floor"
            f" ({floor_us / 1e3:.3f}); without PDL {without_us / 1e3:.3f}",
            flush=True,
        )
        del step
        torch.cuda.empty_cache()


TIMED_SAMPLINGS = {
    "greedy": ResolvedSampling(temperature=0.0),
    "free": ResolvedSampling(temperature=0.7),
    "top_p": ResolvedSampling(temperature=0.7, top_p=0.95),
    "top_k": ResolvedSampling(temperature=0.7, top_k=50),
    "top_k and top_p": ResolvedSampling(temperature=0.7, top_k=50, top_p=0.95),
    "typical_p": ResolvedSampling(temperature=0.7, typical_p=0.9),
    "min_p": ResolvedSampling(temperature=0.7, min_p=0.05),
    "penalties": ResolvedSampling(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.2),
    "greedy logprobs": ResolvedSampling(temperature=0.0, logprobs=1),
    "logprobs": ResolvedSampling(temperature=0.7, logprobs=5),
}


def bench_sampling(selected: str) -> None:
    """Time sampling by batch size, kind of params, spread of the logits and type."""
    sizes = product((1, 64, 256), (4.0, 0.5), (torch.float32, BF16))
    for (samples, logit_scale, dtype), kind in product(sizes, TIMED_SAMPLINGS):
        label = f"sampling {samples} {kind} scale {logit_scale} {str(dtype)[6:]}"
        if selected in label and (logit_scale == 4.0 or "_p" in kind):
            bench_one_sampling(label, samples, logit_scale, dtype, kind)


def bench_one_sampling(
    label: str,
    samples: int,
    logit_scale: float,
    dtype: torch.dtype,
    kind: str,
    vocab_size: int = 128256,
) -> None:
    """Time one kind of sampling, next to one pass over the logits at HBM_BYTES_PER_SECOND."""
    batches = [
        (torch.randn(samples, vocab_size, device="cuda") * logit_scale).to(dtype)
        for _ in range(2 if samples > 64 else 8)
    ]
    indices = torch.arange(samples + len(batches), dtype=torch.int32, device="cuda")
    sampler = Sampler(samples, vocab_size, "cuda")
    for row in range(samples):
        prompt = tuple(range(row, row + 128))
        sampling_params = replace(TIMED_SAMPLINGS[kind], seed=row)
        sampler.admit(row, NewRequestData(prompt, len(prompt), sampling_params, ()))
    sampler.upload_new_requests()

    def run() -> torch.Tensor:
        for i, logits in enumerate(batches):
            sampled = sampler(logits, indices[:samples], indices[i : i + samples])
        return sampled.tokens

    time_us = measure_microseconds(run, len(batches))
    floor_us = batches[0].nbytes / HBM_BYTES_PER_SECOND * 1e6
    print(
        f"{label:40s} {time_us:8.2f} us; one pass over the logits takes {floor_us:.2f}",
        flush=True,
    )


def experts_by_loop(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> None:
    """Run the experts one after another, as a plain torch model does."""
    y = torch.zeros_like(x)
    for expert in topk_ids.unique().tolist():
        token, place = (topk_ids == expert).nonzero(as_tuple=True)
        gate, right = F.linear(x[token], up[expert]).chunk(2, -1)
        outputs = F.linear(F.silu(gate) * right, down[expert])
        y.index_add_(0, token, outputs * topk_weights[token, place, None].to(x.dtype))


def experts_by_library(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Run the experts with torch's grouped GEMM between torch's sort and sums."""
    sorted_ids, order = topk_ids.flatten().sort()
    experts = torch.arange(1, len(up) + 1, device=x.device, dtype=sorted_ids.dtype)
    ends = torch.searchsorted(sorted_ids, experts).int()
    x_sorted = x[order // topk_ids.shape[1]]
    gate, right = torch._grouped_mm(x_sorted, up.transpose(1, 2), offs=ends).chunk(2, -1)
    y = torch._grouped_mm(F.silu(gate) * right, down.transpose(1, 2), offs=ends)
    y = torch.empty_like(y).index_copy_(0, order, y).view(*topk_ids.shape, -1)
    return (y * topk_weights[..., None].to(x.dtype)).sum(1)


def bench_experts(selected: str) -> None:
    """Time the experts of two models by number of tokens."""
    token_counts = (1, 4, 16, 64, 256, 2048, 8192)
    for (model, shape), tokens in product(MOE_SHAPES.items(), token_counts):
        label = f"experts {model} {tokens}"
        if selected not in label:
            continue
        num_experts, top_k, intermediate_size, hidden_size = shape
        up = torch.empty(
            num_experts, 2 * intermediate_size, hidden_size, device="cuda", dtype=BF16
        ).normal_(0, hidden_size**-0.5)
        down = torch.empty(
            num_experts, hidden_size, intermediate_size, device="cuda", dtype=BF16
        ).normal_(0, intermediate_size**-0.5)
        x = torch.randn(tokens, hidden_size, device="cuda").bfloat16()
        bench_experts_methods(label, x, up, down, top_k)
        del up, down
        torch.cuda.empty_cache()


def bench_experts_methods(
    label: str, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, top_k: int
) -> None:
    """Time every method on eight random routings."""
    routings = [
        moe.route_topk(torch.randn(len(x), len(up), device="cuda"), top_k, RouterSpec())
        for _ in range(8)
    ]
    methods: dict[str, Callable[..., torch.Tensor]] = {
        "grouped": moe.fused_experts_grouped,
        "library": experts_by_library,
    }
    if len(x) <= 16:
        methods = {"gemv": moe.fused_experts_gemv} | methods
    times = {}
    for method, run_experts in methods.items():

        def run(run_experts: Callable[..., torch.Tensor] = run_experts) -> torch.Tensor:
            return [run_experts(x, *routing, up, down) for routing in routings][-1]

        try:
            times[method] = measure_microseconds(run, len(routings))
        except Exception as exception:
            print(f"{label} {method}: {exception!r}"[:200])
    experts_by_loop(x, *routings[0], up, down)
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    experts_by_loop(x, *routings[1], up, down)
    end.record()
    end.synchronize()
    used_experts = sum(len(topk_ids.unique()) for topk_ids, _ in routings) / len(routings)
    nbytes = used_experts / len(up) * (up.nbytes + down.nbytes)
    flops = 2 * len(x) * top_k * (up[0].numel() + down[0].numel())
    floor_us = max(nbytes / HBM_BYTES_PER_SECOND, flops / PEAK_FLOPS) * 1e6
    shown = ", ".join(f"{method} {us:.1f} us ({floor_us / us:.0%})" for method, us in times.items())
    loop_us = start.elapsed_time(end) * 1e3
    print(f"{label:24s} floor {floor_us:8.1f}: {shown}, loop {loop_us:.0f}", flush=True)


def bench(selected: str) -> None:
    """Time everything, after compiling the GEMV kernels in parallel."""
    jobs = [
        (model, name, None)
        for model, shape in MODEL_SHAPES.items()
        for name in shape.linear_shapes()
        if selected in f"step {model} gemv {model} {name}"
    ]
    run_in_processes(compile_gemv_part, jobs)
    bench_decode_steps(selected)
    bench_gemv(selected)
    bench_sampling(selected)
    bench_experts(selected)


# ---- tune ----------------------------------------------------------------------------------------


# outputs, block_k, warps
CANDIDATE_TILINGS = [
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


def candidate_tilings(rows: int, columns: int, epilogue: str) -> list[GemvTiling]:
    """Return the tilings to try, the one in use first."""
    paired = epilogue.startswith(("qkv", "gate"))
    current = gemv.select_gemv_tiling(rows, columns, paired, 2)
    candidates = [
        GemvTiling(max(1, outputs // 2) if paired else outputs, block_k, warps)
        for outputs, block_k, warps in CANDIDATE_TILINGS
    ]
    alternatives = [
        tiling for tiling in candidates if tiling != current and columns % tiling.block_k == 0
    ]
    return [current, *alternatives]


def compile_gemv_part(part: int, jobs: list[tuple[str, str, GemvTiling | None]]) -> None:
    """Run every NUM_PROCESSES-th kernel once, which puts it into Triton's cache on disk."""
    for model, name, tiling in jobs[part::NUM_PROCESSES]:
        shape = MODEL_SHAPES[model]
        linear_shape = shape.linear_shapes()[name]
        token_counts = [1]
        if tiling is None and name in ("o", "down", "head"):
            token_counts += [2, 4]
        for tokens in token_counts:
            bias = shape.bias and name != "head"
            case = LinearCase.make(*linear_shape, bias, BF16, "cuda")
            x = torch.randn(tokens, linear_shape[1], device="cuda").bfloat16()
            epilogue = case.make_epilogue(tokens, BF16)
            try:
                gemv.gemv_triton(
                    x,
                    case.weight,
                    case.bias,
                    case.prologue,
                    epilogue,
                    tiling=tiling,
                    norm_shift=case.norm_shift,
                )
                torch.cuda.synchronize()
            except Exception as exception:
                print(f"{model} {name} {tiling}: {exception!r}"[:300], flush=True)


def tune(selected: str) -> None:
    """Try the tilings of one layer after another inside a decode step of eight layers.

    With PDL the neighbouring kernels matter.
    """
    candidates = {
        model: {
            name: candidate_tilings(rows, columns, epilogue)
            for name, (rows, columns, _, epilogue) in shape.linear_shapes().items()
        }
        for model, shape in MODEL_SHAPES.items()
        if selected in model
    }
    jobs = [
        (model, name, tiling)
        for model, layers in candidates.items()
        for name, tilings in layers.items()
        for tiling in tilings
    ]
    run_in_processes(compile_gemv_part, jobs)
    for model, layers in candidates.items():
        tune_model(model, layers)
        torch.cuda.empty_cache()


def tune_model(model: str, layers: dict[str, list[GemvTiling]]) -> None:
    """Print the fastest tilings of a model's layers."""
    step = DecodeStepLinears(MODEL_SHAPES[model], num_layers=8)
    best = {name: tilings[0] for name, tilings in layers.items()}
    step_us = measure_microseconds(lambda: step.run(best), 1)
    floor_us = step.weight_bytes / HBM_BYTES_PER_SECOND * 1e6
    print(f"{model}: {step_us:.1f} us, floor {floor_us:.1f}", flush=True)
    for name, tilings in layers.items():
        times = []
        for tiling in tilings:
            trial = best | {name: tiling}
            try:
                time_us = measure_microseconds(lambda trial=trial: step.run(trial), 1)
                times.append((time_us, tiling))
            except Exception as exception:
                print(f"{model} {name} {tiling}: {exception!r}"[:200], flush=True)
        times.sort()
        best[name] = times[0][1]
        rows, columns, *_ = MODEL_SHAPES[model].linear_shapes()[name]
        shown = ", ".join(f"{tuple(tiling)} {us:.1f}" for us, tiling in times[:4])
        current_us = next(us for us, tiling in times if tiling == tilings[0])
        print(
            f"    {name:5s} {(rows, columns)}: {shown};"
            f" current {tuple(tilings[0])} {current_us:.1f}",
            flush=True,
        )


def main() -> int:
    """Run the command of the command line."""
    command, selected = (*sys.argv[1:], "", "")[:2]
    match command:
        case "check":
            return check(selected)
        case "bench":
            bench(selected)
        case "tune":
            tune(selected)
        case _:
            raise SystemExit(__doc__)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
