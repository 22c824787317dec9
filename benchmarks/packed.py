"""Checks, times and tunes the kernels for packed (quantized) weights on one GPU.

    PYTHONPATH=src python3 benchmarks/packed.py check   every kernel and format against float64
    PYTHONPATH=src python3 benchmarks/packed.py bench   linear layers by format and batch size
    PYTHONPATH=src python3 benchmarks/packed.py tune    the fastest tilings of GEMV and GEMM
    PYTHONPATH=src python3 benchmarks/packed.py tune "experts gpt-oss-20b 1 64"   those of MXFP4
                                                           experts, by model and tokens

A further argument selects the cases whose name contains it. Times are medians of replays of
one CUDA graph, over more weights than the L2 cache holds. The floor is the bytes of codes and
scales at HBM_BYTES_PER_SECOND, which was measured on an H200. Weights are random.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.kernels import (
    HBM_BYTES_PER_SECOND,
    NUM_PROCESSES,
    capture_graph,
    measure_microseconds,
    run_in_processes,
)
from benchmarks.products import Check, make_rope_transform, num_copies, run_checks
from bloomery.attention.triton_paged import TritonPagedAttention
from bloomery.fusion import (
    ActivationEpilogue,
    Epilogue,
    NormPrologue,
    QkTransform,
    QkvEpilogue,
    ResidualEpilogue,
)
from bloomery.kernels import (
    gemv,
    packed_gemm,
    packed_gemv,
    packed_linear,
    packed_wgmma,
    quantized_kv_cache,
    rope_cache,
)
from bloomery.kernels.moe import ExpertsFusion, route_topk
from bloomery.kernels.norm import layer_norm
from bloomery.kernels.packed import PackedWeight
from bloomery.kernels.packed_gemm import PackedGemmTiling
from bloomery.kernels.packed_gemv import PackedGemvTiling
from bloomery.kernels.packed_moe import packed_experts_gemv, packed_experts_grouped
from bloomery.kernels.packed_moe_gemv import (
    ExpertGemvTiling,
    packed_experts_gemv_summed,
    supports_expert_gemv,
)
from bloomery.spec import AttentionSpec, RouterSpec
from tests.kernels.linear_oracles import (
    LINEAR_ERROR_LIMITS,
    MODEL_SHAPES,
    LinearCase,
    ModelShape,
)
from tests.kernels.moe_oracles import EXPERT_KINDS, make_expert_options
from tests.kernels.oracles import check_attention, make_attention_case, relative_error
from tests.kernels.packed_oracles import (
    ALL_FORMATS,
    MAIN_FORMATS,
    MXFP4,
    check_packed_experts,
    check_packed_gemv,
    check_packed_linear,
    check_quantize_groups,
    check_quantize_rows,
    make_packed_weight,
)

BF16 = torch.bfloat16
FP16 = torch.float16
BF16_LIMIT = LINEAR_ERROR_LIMITS[BF16]
CODE_DTYPES = (torch.float8_e4m3fn, torch.int8)
# name -> experts, top-k, intermediate size, hidden size
EXPERT_SHAPES = {"gpt-oss-20b": (32, 4, 2880, 2880), "gpt-oss-120b": (128, 4, 2880, 2880)}
EXPERT_TOKENS = (1, 2, 4, 8, 16, 64, 256, 2048)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
MODELS = ("octocoder", "8b")
LAYERS = ("qkv", "o", "up", "down")
WGMMA_FORMATS = (
    "int8 row signed",
    "int4 128 zero",
    "int4 128",
    "int4 256 zero",
    "int4 row zero",
)

LinearJob = tuple[str, str, str, int, str]  # model, layer, format, tokens, kernel
GemvJob = tuple[str, str, str, PackedGemvTiling]  # model, layer, format, tiling
GemmJob = tuple[str, str, int, PackedGemmTiling]  # layer, format, tokens, tiling


def packed_nbytes(packed: PackedWeight) -> int:
    """Bytes of codes, scales and zero points. Tables are small and stay in the cache."""
    names = {"codes", "scale", "zero_point", "absmax", "nested_scale"}
    tensors = [getattr(packed, field.name) for field in fields(packed) if field.name in names]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def run_kernel(packed: PackedWeight, x: torch.Tensor, kernel: str) -> torch.Tensor:
    """Multiply x by a packed matrix with the kernel of this name."""
    kernels: dict[str, Callable[..., torch.Tensor]] = {
        "gemv": packed_gemv.packed_gemv_triton,
        "gemm": packed_gemm.packed_gemm_triton,
        "w8a8": packed_linear.w8a8_linear,
        "dequantize": packed_linear.dequantized_linear,
        "wgmma": packed_wgmma.packed_wgmma_gluon,
    }
    return kernels[kernel](x, packed, None)


# ---- check ---------------------------------------------------------------------------------------


EPILOGUE_CASES = (
    ("", ""),
    ("rms", "residual"),
    ("rms", "gate silu"),
    ("", "activate gelu"),
    ("rms", "qkv 6 2 64 64 tables scaled"),
)


def check_repeatable(
    kernel: str, packed_format: str, tokens: int, rows: int, columns: int, repeats: int, device: str
) -> float:
    """Relative error, infinite if a repeated or captured call yields other bits.

    A graph holds three calls in a row.
    """
    packed = make_packed_weight(packed_format, rows, columns, device)
    x = torch.randn(tokens, columns, device=device).bfloat16()
    first = run_kernel(packed, x, kernel)
    same = all(torch.equal(run_kernel(packed, x, kernel), first) for _ in range(repeats))
    graph, outputs = capture_graph(
        lambda: torch.stack([run_kernel(packed, x, kernel) for _ in range(3)])
    )
    for _ in range(repeats):
        outputs.fill_(torch.nan)
        graph.replay()
        same &= all(torch.equal(output, first) for output in outputs)
    if not same:
        return float("inf")
    return relative_error(first, F.linear(x.double(), packed.dequantize(torch.float64)))


def check_quantized_kv_cache(
    query_lens: list[int], seq_lens: list[int], heads: tuple[int, int, int], dtype: torch.dtype
) -> float:
    """Error of attention over an 8-bit KV cache, and of the stored keys and values.

    A kernel stores keys and values; the reference attends to the same stored values. The error of
    stored 8-bit floats counts a quarter.
    """
    case = make_attention_case(AttentionSpec(*heads), query_lens, seq_lens, 64, BF16, "cuda")
    shape = tuple(case.cache.shape)
    num_slots = shape[1]
    nbytes = quantized_kv_cache.kv_cache_nbytes(shape, dtype)
    memory = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    kv_cache = quantized_kv_cache.view_kv_cache(memory, shape, dtype)
    slots = torch.arange(num_slots, device="cuda")
    keys_values = case.cache.nan_to_num()
    num_heads, _, head_dim = heads
    q = torch.zeros(num_slots, num_heads * head_dim, device="cuda").bfloat16()
    qkv = torch.cat((q, keys_values.transpose(0, 1).flatten(1)), 1)
    rope_cache.apply_rope_and_cache_triton(qkv, kv_cache, slots.int(), QkTransform())
    stored = quantized_kv_cache.read_kv_cache(kv_cache, slots, torch.float32)
    storage_error = max(relative_error(stored[i], keys_values[i]) for i in range(2))
    if dtype == torch.float8_e4m3fn:
        storage_error /= 4
    backend = TritonPagedAttention(library_min_len=None)
    return max(check_attention(replace(case, cache=kv_cache), backend), storage_error)


def all_checks() -> Iterator[Check]:
    """Every check of this file."""
    yield from gemv_checks()
    yield from gemm_checks()
    yield from library_checks()
    yield from repeatability_checks()
    yield from other_checks()


def gemv_checks() -> Iterator[Check]:
    """GEMV with every format, prologue and epilogue, and with several tokens."""
    for packed_format, (prologue, epilogue), columns in product(
        ALL_FORMATS, EPILOGUE_CASES, (768, 4096)
    ):
        if "order" not in packed_format and (columns == 4096 or not epilogue):
            shape = (packed_format, 1, 640, columns, prologue, epilogue, BF16, "cuda")
            call = partial(check_packed_gemv, *shape)
            yield f"gemv {packed_format} {columns} {prologue} {epilogue}", call, BF16_LIMIT
    for packed_format, tokens, dtype in product(
        MAIN_FORMATS.values(), (2, 3, 4), (BF16, torch.float32)
    ):
        shape = (packed_format, tokens, 640, 1536, "", "residual", dtype, "cuda")
        call = partial(check_packed_gemv, *shape)
        yield f"gemv {packed_format} {tokens} tokens {dtype}", call, LINEAR_ERROR_LIMITS[dtype]


def gemm_checks() -> Iterator[Check]:
    """GEMM with every format, and wgmma with both tilings and several numbers of programs."""
    for packed_format, tokens, dtype in product(ALL_FORMATS, (5, 64, 200), (BF16, FP16)):
        if dtype == BF16 or tokens == 64:
            call = partial(
                check_packed_linear, "gemm", packed_format, tokens, 1000, 2048, dtype, "cuda"
            )
            yield f"gemm {packed_format} {tokens} {dtype}", call, LINEAR_ERROR_LIMITS[dtype]
    tilings = (packed_wgmma.LARGE_TILING, packed_wgmma.SMALL_TILING)
    # One program per multiprocessor has leftover tiles only; 8 and 5 programs have whole tiles too.
    variants = ((BF16, 0), (FP16, 0), (FP16, 8), (BF16, 5))
    for packed_format, tokens, tiling in product(WGMMA_FORMATS, (100, 200, 300), tilings):
        for dtype, programs in variants:
            call = partial(
                check_packed_linear,
                "wgmma",
                packed_format,
                tokens,
                1008,
                4096,
                dtype,
                "cuda",
                wgmma=(tiling, programs),
            )
            name = f"wgmma {packed_format} {tokens} {tiling.tokens} {programs}"
            yield name, call, LINEAR_ERROR_LIMITS[dtype]


def library_checks() -> Iterator[Check]:
    """The kernels that end in a library's GEMM."""
    for packed_format in ALL_FORMATS:
        call = partial(
            check_packed_linear, "dequantize", packed_format, 300, 1000, 2048, BF16, "cuda"
        )
        yield f"dequantize {packed_format} 300", call, BF16_LIMIT
    for packed_format, tokens in product(("fp8 row", "fp8 one", "int8 row signed w8a8"), (17, 300)):
        call = partial(check_packed_linear, "w8a8", packed_format, tokens, 1024, 2048, BF16, "cuda")
        yield f"w8a8 {packed_format} {tokens}", call, BF16_LIMIT


def repeatability_checks() -> Iterator[Check]:
    """Repeated and captured calls."""
    cases = [
        *product(("gemm",), MAIN_FORMATS.values(), (16, 64, 128, 256)),
        *product(("wgmma",), WGMMA_FORMATS[:2], (128, 256)),
    ]
    shapes = ((49152, 2048), (6144, 6144))
    for (kernel, packed_format, tokens), (rows, columns) in product(cases, shapes):
        if kernel == "wgmma" or rows > columns:
            call = partial(
                check_repeatable, kernel, packed_format, tokens, rows, columns, 20, "cuda"
            )
            yield f"repeat {kernel} {packed_format} {tokens} {rows}", call, BF16_LIMIT


def other_checks() -> Iterator[Check]:
    """Experts, quantization of weights and inputs, and the 8-bit KV cache."""
    formats = (*MAIN_FORMATS.values(), "fp8 block", "int4 64 zero", MXFP4)
    methods = (
        (2, packed_experts_gemv),
        (1, packed_experts_gemv_summed),
        (3, packed_experts_gemv_summed),
        (7, packed_experts_grouped),
        (300, packed_experts_grouped),
        (2000, packed_experts_grouped),
    )
    for packed_format, (tokens, run_experts), kind in product(formats, methods, EXPERT_KINDS):
        packed = make_packed_weight(packed_format, 128, 512, "cpu")
        if run_experts is packed_experts_gemv_summed and not supports_expert_gemv(packed, BF16):
            continue
        call = partial(check_packed_experts, packed_format, tokens, run_experts, "cuda", kind)
        yield f"experts {packed_format} {tokens} {kind}", call, 2 * BF16_LIMIT
    for tokens, run_experts in methods:
        options = ("clamped, biases", 2880, 2880)
        call = partial(check_packed_experts, MXFP4, tokens, run_experts, "cuda", *options)
        yield f"experts {MXFP4} {tokens} 2880", call, 2 * BF16_LIMIT
    for bits, group_size in ((4, 128), (4, 64), (3, 64), (2, 32)):
        call = partial(check_quantize_groups, bits, group_size, "cuda")
        yield f"quantize groups {bits} {group_size}", call, 0.002
    steps = (([1] * 5, [700, 3, 64, 65, 1]), ([1, 100, 300], [9, 100, 400]))
    head_shapes = ((32, 8, 128), (48, 1, 128), (6, 6, 80))
    for (query_lens, seq_lens), heads, dtype in product(steps, head_shapes, CODE_DTYPES):
        call = partial(check_quantized_kv_cache, query_lens, seq_lens, heads, dtype)
        yield f"cache {query_lens} {heads} {dtype}", call, BF16_LIMIT * 1.5
    for columns, dtype in product((576, 4096, 24576), CODE_DTYPES):
        call = partial(check_quantize_rows, 37, columns, BF16, dtype, "cuda")
        yield f"quantize rows {columns} {dtype}", call, 1e-3


def check(selected: str) -> int:
    """Compare every kernel with its reference."""
    return run_checks(all_checks, selected)


# ---- bench ---------------------------------------------------------------------------------------


class PackedDecodeStepLinears:
    """All linear layers of a decode step for one token. q stands in for the attention output.

    The head is a dense bfloat16 matrix.
    """

    def __init__(self, shape: ModelShape, packed_format: str):
        self.shape = shape
        self.linear_shapes = shape.linear_shapes()
        self.layers = [
            {
                name: make_packed_weight(packed_format, *self.linear_shapes[name][:2], "cuda")
                for name in LAYERS
            }
            for _ in range(shape.num_layers)
        ]
        self.cases = {name: self._make_case(name) for name in self.linear_shapes}
        self.head = torch.randn(shape.vocab_size, shape.hidden_size, device="cuda").bfloat16()
        self.x = torch.randn(1, shape.hidden_size, device="cuda").bfloat16()
        self.slot_mapping = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.transform = make_rope_transform(shape)
        layer_bytes = sum(packed_nbytes(packed) for packed in self.layers[0].values())
        self.weight_bytes = layer_bytes * len(self.layers) + self.head.nbytes

    def _make_case(self, name: str) -> LinearCase:
        """Prologue, epilogue and bias of a layer. The dense weight is small and not used."""
        rows, columns, prologue, epilogue = self.linear_shapes[name]
        case = LinearCase.make(8, columns, prologue, epilogue, False, BF16, "cuda")
        if self.shape.bias and name != "head":
            case.bias = torch.randn(rows, device="cuda").bfloat16()
        return case

    def run(self) -> torch.Tensor:
        """Run the step."""

        def run_linear(
            name: str, packed: PackedWeight, x: torch.Tensor, epilogue: Epilogue
        ) -> torch.Tensor:
            case = self.cases[name]
            y = packed_linear.packed_fused_linear(x, packed, case.bias, case.prologue, epilogue)
            assert y is not None
            return y

        x = self.x
        activation = ActivationEpilogue(self.shape.activation, self.shape.gated)
        kv_cache = self.cases["qkv"].kv_cache
        qkv = QkvEpilogue(kv_cache, self.slot_mapping, self.transform)
        for layer in self.layers:
            q = run_linear("qkv", layer["qkv"], x, qkv)
            x = run_linear("o", layer["o"], q.view(1, -1), ResidualEpilogue(x))
            h = run_linear("up", layer["up"], x, activation)
            x = run_linear("down", layer["down"], h, ResidualEpilogue(x))
        norm = self.cases["head"].prologue
        if norm.kind == "layer":
            x = layer_norm(x, norm.weight, norm.bias, norm.eps)
            norm = None
        return gemv.gemv_triton(x, self.head, None, norm, None)


def bench_decode_steps(selected: str) -> None:
    """Time the linear layers of whole decode steps by format."""
    for model, (name, packed_format) in product(("8b", "octocoder"), MAIN_FORMATS.items()):
        if selected not in f"step {model} {name}":
            continue
        torch.cuda.empty_cache()
        step = PackedDecodeStepLinears(MODEL_SHAPES[model], packed_format)
        time_ms = measure_microseconds(step.run, 1) / 1e3
        floor_ms = step.weight_bytes / HBM_BYTES_PER_SECOND * 1e3
        print(
            f"step {model} {name:5s} {time_ms:.3f} ms,"
            f" {floor_ms / time_ms:.1%} of the floor ({floor_ms:.3f})",
            flush=True,
        )
        del step


def kernels_to_time(format_name: str, tokens: int) -> list[str]:
    """Return the kernels that might be fastest for this format and number of tokens."""
    kernels = []
    if tokens <= 4:
        kernels.append("gemv")
    if tokens >= 2:
        kernels.append("gemm")
    if tokens >= 256:
        kernels.append("dequantize")
    if format_name in ("int4", "int8") and tokens > 64:
        kernels.append("wgmma")
    if format_name == "fp8" and tokens >= 4:
        kernels.append("w8a8")
    return kernels


def linear_jobs(selected: str) -> list[LinearJob]:
    """All linear layers to time."""
    return [
        (model, layer, format_name, tokens, kernel)
        for model, layer, format_name, tokens in product(MODELS, LAYERS, MAIN_FORMATS, BATCH_SIZES)
        if selected in f"linear {model} {layer} {format_name} {tokens}"
        for kernel in kernels_to_time(format_name, tokens)
    ]


def compile_linear_part(part: int, jobs: list[LinearJob]) -> None:
    """Run every NUM_PROCESSES-th job once, which puts its kernel into Triton's cache on disk."""
    for model, layer, format_name, tokens, kernel in jobs[part::NUM_PROCESSES]:
        rows, columns, *_ = MODEL_SHAPES[model].linear_shapes()[layer]
        try:
            packed = make_packed_weight(MAIN_FORMATS[format_name], rows, columns, "cuda")
            x = torch.randn(tokens, columns, device="cuda").bfloat16()
            run_kernel(packed, x, kernel)
            torch.cuda.synchronize()
        except Exception as exception:
            job = f"{model} {layer} {format_name} {tokens} {kernel}"
            print(f"{job}: {exception!r}"[:300], flush=True)


def bench_linears(selected: str) -> None:
    """Time the kernels by format and batch size: microseconds per layer, next to bfloat16."""
    jobs = linear_jobs(selected)
    run_in_processes(compile_linear_part, jobs)
    packed_us: dict[tuple[str, str, int, str], float] = {}
    dense_us: dict[tuple[str, int], float] = {}
    for model, layer in product(MODELS, LAYERS):
        layer_jobs = [job for job in jobs if job[:2] == (model, layer)]
        if not layer_jobs:
            continue
        rows, columns, *_ = MODEL_SHAPES[model].linear_shapes()[layer]
        token_counts = sorted({tokens for _, _, _, tokens, _ in layer_jobs})
        for tokens, time_us in time_dense_linear(rows, columns, token_counts).items():
            dense_us[model, tokens] = dense_us.get((model, tokens), 0.0) + time_us
        for format_name in MAIN_FORMATS:
            runs = [(job[3], job[4]) for job in layer_jobs if job[2] == format_name]
            for run, time_us in time_packed_linear(format_name, rows, columns, runs).items():
                key = (model, format_name, *run)
                packed_us[key] = packed_us.get(key, 0.0) + time_us
        torch.cuda.empty_cache()
    for (model, format_name, tokens, kernel), time_us in sorted(packed_us.items()):
        dense = dense_us[model, tokens]
        print(
            f"linear {model:9s} {format_name:5s} {tokens:5d} {kernel:10s}"
            f" {time_us:8.1f} us per layer; bf16 {dense:8.1f}, {dense / time_us:.2f} x",
            flush=True,
        )


def time_dense_linear(rows: int, columns: int, token_counts: list[int]) -> dict[int, float]:
    """Microseconds of the library's bfloat16 GEMM by number of tokens."""
    weights = [
        torch.randn(rows, columns, device="cuda").bfloat16()
        for _ in range(num_copies(rows * columns * 2) // 4 + 1)
    ]
    times = {}
    for tokens in token_counts:
        x = torch.randn(tokens, columns, device="cuda").bfloat16()

        def run(x: torch.Tensor = x) -> torch.Tensor:
            return [F.linear(x, weight) for weight in weights][-1]

        times[tokens] = measure_microseconds(run, len(weights))
    return times


def time_packed_linear(
    format_name: str, rows: int, columns: int, runs: list[tuple[int, str]]
) -> dict[tuple[int, str], float]:
    """Microseconds of packed kernels by (tokens, kernel). Infinite where one fails."""
    weights = [
        make_packed_weight(MAIN_FORMATS[format_name], rows, columns, "cuda")
        for _ in range(num_copies(rows * columns) // 4 + 1)
    ]
    times = {}
    for tokens, kernel in runs:
        x = torch.randn(tokens, columns, device="cuda").bfloat16()

        def run(x: torch.Tensor = x, kernel: str = kernel) -> torch.Tensor:
            return [run_kernel(packed, x, kernel) for packed in weights][-1]

        try:
            times[tokens, kernel] = measure_microseconds(run, len(weights))
        except Exception as exception:
            job = f"{rows} x {columns} {format_name} {tokens} {kernel}"
            print(f"{job}: {exception!r}"[:200], flush=True)
            times[tokens, kernel] = float("inf")
    return times


def bench(selected: str) -> None:
    """Time decode steps and linear layers, after compiling the kernels in parallel."""
    jobs = [
        (model, layer, format_name)
        for model, layer, format_name in product(MODELS, LAYERS, MAIN_FORMATS)
        if selected in f"step {model} {format_name}"
    ]
    run_in_processes(compile_step_part, jobs)
    bench_decode_steps(selected)
    bench_linears(selected)
    bench_experts(selected)


class Mxfp4ExpertsBench:
    """Random MXFP4 experts of a model, and eight random routings of some tokens."""

    def __init__(self, model: str):
        self.num_experts, self.top_k, size, self.hidden = EXPERT_SHAPES[model]
        self.up = make_packed_weight(MXFP4, self.num_experts * 2 * size, self.hidden, "cuda")
        self.down = make_packed_weight(MXFP4, self.num_experts * self.hidden, size, "cuda")
        self.options = make_expert_options(
            "clamped, biases", self.num_experts, size, self.hidden, BF16, "cuda"
        )
        self.set_tokens(1)

    def set_tokens(self, tokens: int) -> None:
        self.x = torch.randn(tokens, self.hidden, device="cuda").bfloat16()
        # A step of one token fuses the norm before the experts and the addition after them.
        self.fusion = ExpertsFusion()
        if tokens == 1:
            norm = NormPrologue("rms", self.x[0], None, 1e-5)
            self.fusion = ExpertsFusion(norm, None, ResidualEpilogue(self.x))
        logits = torch.randn(8, tokens, self.num_experts, device="cuda")
        self.routings = [route_topk(part, self.top_k, RouterSpec()) for part in logits]

    def floor_microseconds(self) -> float:
        """The time to read the experts that are used."""
        used = sum(len(ids.unique()) for ids, _ in self.routings) / len(self.routings)
        nbytes = used / self.num_experts * (packed_nbytes(self.up) + packed_nbytes(self.down))
        return nbytes / HBM_BYTES_PER_SECOND * 1e6

    def measure(self, run_experts: Callable[..., torch.Tensor], **options: object) -> float:
        """Microseconds of one routing."""

        def run() -> torch.Tensor:
            for routing in self.routings:
                weights = (self.up, self.down, self.num_experts, self.options, self.fusion)
                y = run_experts(self.x, *routing, *weights, **options)
            return y

        return measure_microseconds(run, len(self.routings))


def bench_experts(selected: str) -> None:
    """Time the MXFP4 experts of gpt-oss by number of tokens."""
    for model in EXPERT_SHAPES:
        token_counts = [n for n in EXPERT_TOKENS if selected in f"experts {model} {n}"]
        if not token_counts:
            continue
        experts = Mxfp4ExpertsBench(model)
        for tokens in token_counts:
            experts.set_tokens(tokens)
            methods = {"grouped": packed_experts_grouped}
            if tokens <= 16:
                methods["gemv"] = packed_experts_gemv
                methods["summed"] = packed_experts_gemv_summed
            times = {method: experts.measure(run) for method, run in methods.items()}
            floor_us = experts.floor_microseconds()
            shown = ", ".join(
                f"{method} {us:.1f} us ({floor_us / us:.0%})" for method, us in times.items()
            )
            print(f"experts {model} {tokens:5d} floor {floor_us:8.1f}: {shown}", flush=True)


def compile_step_part(part: int, jobs: list[tuple[str, str, str]]) -> None:
    """Run every NUM_PROCESSES-th layer of the decode steps once."""
    for model, layer, format_name in jobs[part::NUM_PROCESSES]:
        make_gemv_run(model, layer, MAIN_FORMATS[format_name], None)()
        torch.cuda.synchronize()


# ---- tune: GEMV ----------------------------------------------------------------------------------


def make_gemv_run(
    model: str, layer: str, packed_format: str, tiling: PackedGemvTiling | None, count: int = 1
) -> Callable[[], torch.Tensor]:
    """Return a call that runs the fused GEMV of a layer over `count` matrices."""
    rows, columns, prologue, epilogue_text = MODEL_SHAPES[model].linear_shapes()[layer]
    case = LinearCase.make(8, columns, prologue, epilogue_text, False, BF16, "cuda")
    case.weight = torch.empty(rows, 1, device="cuda")  # make_epilogue needs the rows
    epilogue = case.make_epilogue(1, BF16)
    norm = case.prologue if prologue == "rms" else None
    weights = [make_packed_weight(packed_format, rows, columns, "cuda") for _ in range(count)]
    x = torch.randn(1, columns, device="cuda").bfloat16()

    def run() -> torch.Tensor:
        for packed in weights:
            y = packed_gemv.packed_gemv_triton(x, packed, None, norm, epilogue, tiling)
        return y

    return run


def candidate_gemv_tilings(model: str, layer: str, format_name: str) -> list[PackedGemvTiling]:
    """Return the tilings to try: few chunks past the end of a row, and no useless prefetch."""
    _, columns, _, epilogue = MODEL_SHAPES[model].linear_shapes()[layer]
    bits = 8 if format_name in ("int8", "fp8") else 4
    row_chunks = columns * bits // 128
    paired = epilogue.startswith(("qkv", "gate"))
    candidates = [
        PackedGemvTiling(outputs // 2 if paired else outputs, chunks, chunks // 32, prefetch_x)
        for outputs, chunks, prefetch_x in product((4, 8, 16), (64, 128, 256), (False, True))
    ]
    return [
        tiling
        for tiling in candidates
        if -(-row_chunks // tiling.chunks) * tiling.chunks <= 1.4 * row_chunks
        and (not tiling.prefetch_x or tiling.chunks < row_chunks)
    ]


def gemv_tuning_jobs(selected: str) -> list[GemvJob]:
    """All GEMV tilings to time."""
    return [
        (model, layer, format_name, tiling)
        for model, layer, format_name in product(MODELS, LAYERS, MAIN_FORMATS)
        if selected in f"{model} {layer} {format_name}"
        for tiling in candidate_gemv_tilings(model, layer, format_name)
    ]


def compile_gemv_part(part: int, jobs: list[GemvJob]) -> None:
    """Run every NUM_PROCESSES-th job once, which puts its kernel into Triton's cache on disk."""
    for model, layer, format_name, tiling in jobs[part::NUM_PROCESSES]:
        try:
            make_gemv_run(model, layer, MAIN_FORMATS[format_name], tiling)()
            torch.cuda.synchronize()
        except Exception as exception:
            print(f"{model} {layer} {format_name} {tiling}: {exception!r}"[:300], flush=True)


def tune(selected: str) -> None:
    """Tune GEMV and GEMM, then time decode steps with the fastest GEMV tilings."""
    if selected.startswith("experts"):
        tune_experts(selected)
        return
    gemv_jobs = gemv_tuning_jobs(selected)
    gemm_jobs = gemm_tuning_jobs(selected)
    # Compile in other processes before this one initializes CUDA: they are forked.
    run_in_processes(compile_gemv_part, gemv_jobs)
    run_in_processes(compile_gemm_part, gemm_jobs)
    tune_gemv(gemv_jobs)
    tune_gemm(gemm_jobs)
    bench_decode_steps(selected)


def tune_gemv(jobs: list[GemvJob]) -> None:
    """Print the fastest GEMV tilings and use them in this process."""
    tables = {"fp8": "FP8_TILINGS", "nf4": "MASK_TILINGS"}
    for model, layer, format_name in dict.fromkeys(job[:3] for job in jobs):
        rows, columns, *_ = MODEL_SHAPES[model].linear_shapes()[layer]
        packed_format = MAIN_FORMATS[format_name]
        packed = make_packed_weight(packed_format, rows, columns, "cuda")
        nbytes = packed_nbytes(packed)
        row_bytes = packed.codes.shape[1]
        count = max(2, (1 << 28) // nbytes)
        times = []
        for *_, tiling in (job for job in jobs if job[:3] == (model, layer, format_name)):
            try:
                run = make_gemv_run(model, layer, packed_format, tiling, count)
                times.append((measure_microseconds(run, count), tiling))
            except Exception as exception:
                print(f"{model} {layer} {format_name} {tiling}: {exception!r}"[:200], flush=True)
        times.sort()
        best_us, best = times[0]
        floor_us = nbytes / HBM_BYTES_PER_SECOND * 1e6
        shown = ", ".join(f"{tuple(tiling)} {us:.1f}" for us, tiling in times[:5])
        print(
            f"{model} {layer} {format_name} {(rows, row_bytes)}:"
            f" floor {floor_us:.1f} us, {floor_us / best_us:.0%}: {shown}",
            flush=True,
        )
        table = tables.get(format_name, "DP4A_TILINGS")
        tilings = {**getattr(packed_gemv, table), (rows, row_bytes): best}
        setattr(packed_gemv, table, tilings)
        torch.cuda.empty_cache()


# ---- tune: GEMM ----------------------------------------------------------------------------------


# Tokens -> ((outputs, warps), ...) and (pipeline stages, units per iteration) to try.
GEMM_TILES = {
    16: (((64, 4), (128, 4)), ((4, 1), (6, 1), (3, 2))),
    64: (((64, 4), (128, 4)), ((3, 1), (4, 1), (2, 2), (3, 2), (2, 4))),
    256: (((128, 4), (256, 8)), ((3, 1), (4, 1))),
}
# Layer -> split-K to try.
GEMM_SPLITS = {"o": (1, 2, 4, 8), "up": (1, 2), "down": (1, 2, 4, 8)}


def gemm_tuning_jobs(selected: str) -> list[GemmJob]:
    """All GEMM tilings to time, for the layers of OctoCoder."""
    return [
        (
            layer,
            name,
            tokens,
            PackedGemmTiling(min(tokens, 128), outputs, warps, stages, split_k, units_per_iter),
        )
        for layer, name, tokens in product(GEMM_SPLITS, ("int4", "int8", "nf4"), GEMM_TILES)
        if selected in f"gemm {layer} {name} {tokens}"
        for (outputs, warps), (stages, units_per_iter), split_k in product(
            *GEMM_TILES[tokens], GEMM_SPLITS[layer]
        )
    ]


def compile_gemm_part(part: int, jobs: list[GemmJob]) -> None:
    """Run every NUM_PROCESSES-th job once, which puts its kernel into Triton's cache on disk."""
    for layer, format_name, tokens, tiling in jobs[part::NUM_PROCESSES]:
        rows, columns, *_ = MODEL_SHAPES["octocoder"].linear_shapes()[layer]
        try:
            x = torch.randn(tokens, columns, device="cuda").bfloat16()
            packed = make_packed_weight(MAIN_FORMATS[format_name], rows, columns, "cuda")
            packed_gemm.packed_gemm_triton(x, packed, None, tiling)
            torch.cuda.synchronize()
        except Exception as exception:
            print(f"{layer} {format_name} {tokens} {tiling}: {exception!r}"[:200], flush=True)


def run_gemms(
    x: torch.Tensor, weights: list[PackedWeight], tiling: PackedGemmTiling
) -> torch.Tensor:
    """Multiply x by every matrix and return the last result."""
    return [packed_gemm.packed_gemm_triton(x, packed, None, tiling) for packed in weights][-1]


def tune_gemm(jobs: list[GemmJob]) -> None:
    """Print the fastest GEMM tilings."""
    for layer, format_name, tokens in dict.fromkeys(job[:3] for job in jobs):
        rows, columns, *_ = MODEL_SHAPES["octocoder"].linear_shapes()[layer]
        weights = [
            make_packed_weight(MAIN_FORMATS[format_name], rows, columns, "cuda")
            for _ in range(1 + (1 << 28) // (rows * columns // 2))
        ]
        x = torch.randn(tokens, columns, device="cuda").bfloat16()
        times = []
        for *_, tiling in (job for job in jobs if job[:3] == (layer, format_name, tokens)):
            try:
                run = partial(run_gemms, x, weights, tiling)
                times.append((measure_microseconds(run, len(weights)), tuple(tiling)))
            except Exception as exception:
                print(f"{layer} {format_name} {tokens} {tiling}: {exception!r}"[:200], flush=True)
        shown = ", ".join(f"{tiling} {us:.1f}" for us, tiling in sorted(times)[:6])
        floor_us = packed_nbytes(weights[0]) / HBM_BYTES_PER_SECOND * 1e6
        print(
            f"gemm octocoder {layer} {format_name} {tokens}: floor {floor_us:.1f} us: {shown}",
            flush=True,
        )


# ---- tune: experts -------------------------------------------------------------------------------


ExpertJob = tuple[str, int, str, ExpertGemvTiling | PackedGemmTiling]  # model, tokens, part, tiling

# Tokens -> tilings of the MXFP4 experts to time.
EXPERT_TILINGS: dict[int, list[ExpertGemvTiling] | list[PackedGemmTiling]] = {
    1: [
        ExpertGemvTiling(outputs, chunks, chunks // 32)
        for outputs, chunks in product((1, 2, 4, 8), (32, 64, 128))
    ],
    **{
        tokens: [
            PackedGemmTiling(tile_tokens, outputs, 4, stages, 1, units_per_iter)
            for tile_tokens, outputs, (units_per_iter, stages) in product(
                tiles, (64, 128), ((1, 3), (1, 4), (2, 2), (2, 3), (4, 2), (4, 3))
            )
        ]
        for tokens, tiles in ((64, (16,)), (256, (32, 64)), (2048, (64, 128)))
    },
}


def expert_tuning_jobs(selected: str) -> list[ExpertJob]:
    """All tilings of the experts that the words of `selected` name: models or numbers of tokens."""
    words = selected.split()[1:]
    models = [model for model in EXPERT_SHAPES if model in words] or list(EXPERT_SHAPES)
    token_counts = [n for n in EXPERT_TILINGS if str(n) in words] or list(EXPERT_TILINGS)
    return [
        (model, tokens, part, tiling)
        for model, tokens, part in product(models, token_counts, ("up", "down"))
        for tiling in EXPERT_TILINGS[tokens]
    ]


def measure_expert_tiling(
    experts: Mxfp4ExpertsBench, tokens: int, part: str, tiling: ExpertGemvTiling | PackedGemmTiling
) -> float:
    """Microseconds of the experts with this tiling of one part and the default for the other."""
    run_experts = packed_experts_gemv_summed if tokens == 1 else packed_experts_grouped
    tilings = (tiling, None) if part == "up" else (None, tiling)
    return experts.measure(run_experts, tilings=tilings)


def compile_expert_part(process: int, jobs: list[ExpertJob]) -> None:
    """Run every NUM_PROCESSES-th job once, which puts its kernels into Triton's cache on disk."""
    own_jobs = jobs[process::NUM_PROCESSES]
    for model in dict.fromkeys(job[0] for job in own_jobs):
        experts = Mxfp4ExpertsBench(model)
        for _, tokens, part, tiling in (job for job in own_jobs if job[0] == model):
            experts.set_tokens(tokens)
            try:
                measure_expert_tiling(experts, tokens, part, tiling)
            except Exception as exception:
                print(f"{model} {tokens} {part} {tiling}: {exception!r}"[:200], flush=True)


def tune_experts(selected: str) -> None:
    """Print the fastest tilings of up and of down, each with the default for the other one."""
    jobs = expert_tuning_jobs(selected)
    # Compile in other processes before this one initializes CUDA: they are forked.
    run_in_processes(compile_expert_part, jobs)
    for model in dict.fromkeys(job[0] for job in jobs):
        experts = Mxfp4ExpertsBench(model)
        for tokens, part in dict.fromkeys(job[1:3] for job in jobs if job[0] == model):
            experts.set_tokens(tokens)
            times = []
            for *_, tiling in (job for job in jobs if job[:3] == (model, tokens, part)):
                try:
                    us = measure_expert_tiling(experts, tokens, part, tiling)
                    times.append((us, tuple(tiling)))
                except Exception as exception:
                    print(f"{model} {tokens} {tiling}: {exception!r}"[:200], flush=True)
            shown = ", ".join(f"{tiling} {us:.1f}" for us, tiling in sorted(times)[:6])
            floor_us = experts.floor_microseconds()
            print(f"experts {model} {tokens} {part}, floor {floor_us:.1f}: {shown}", flush=True)


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
