"""Dense GEMV: a fused linear layer for one token, or a few.

    y [tokens, out] = epilogue(prologue(x) @ weight.T + bias)     x [tokens, in], weight [out, in]

The prologue is a norm of x. The epilogue adds a residual, applies an activation (gated or not), or
treats y as q | k | v: it applies rope to q and k, writes k and v to the KV cache and returns q.

Decoding one token is bound by reading the weights, so all other work must overlap with reading
them. Every program recomputes the norm, because x is small. The epilogue works on the sums while
they are in registers. Weights go from memory to registers in 16-byte loads, one tile ahead, and the
first tile is requested before the previous kernel has ended (programmatic dependent launch).

How the work is divided: program (i, j) computes GemvTiling.outputs columns of y for all tokens and
loops over `in`. With experts (MoE), j is the token-expert pair; otherwise j is 0.

    weight  [out, in]         program i reads BLOCK_OUT rows, BLOCK_K columns per iteration
            +--------------+
            | row i block  |  -> BLOCK_K -> BLOCK_K -> ...
            +--------------+

Paired rows: one output may need two weight rows (gate and up, or the two dimensions of a head that
rope rotates together). A program then reads both rows and the second sum is called y_pair.

Sums are float32. Beyond a few tokens the arithmetic costs more than reading the weights:
`gemv_is_faster` decides when this kernel runs. quant/dense.py and kernels/moe.py select it. This
file must not know layers, checkpoint formats or models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F

from bloomery.fusion import (
    ActivationEpilogue,
    Epilogue,
    NormPrologue,
    QkvEpilogue,
    ResidualEpilogue,
)
from bloomery.kernels.activation import activate_tile, activation_reference
from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    next_power_of_2,
    pdl_options,
    tl,
    use_triton,
    wait_for_previous,
)
from bloomery.kernels.lora import (
    FusedLora,
    expand_fused,
    load_expand,
    load_shrunk,
    load_slot_bias,
    locate_shrunk,
    store_shrunk,
)
from bloomery.kernels.norm import layer_norm_reference, rms_norm_reference
from bloomery.kernels.rope_cache import apply_rope_and_cache_reference

MAX_TOKENS = 4  # with more tokens a GEMM is faster
MAX_ROUTER_ROWS = 320  # one for each expert, and one for the gate of a shared expert
MAX_COLUMNS = 65536  # the loop over the columns is unrolled


class ExpertRouting(NamedTuple):
    """Which expert's weights each row of the result needs (MoE)."""

    expert_ids: torch.Tensor  # [tokens, top_k]; ids outside of the range multiply by expert 0
    num_experts: int
    # [tokens, top_k]: factors of x. The product is linear, so the kernels multiply its result.
    input_weights: torch.Tensor | None = None


class GemvTiling(NamedTuple):
    """How the work is divided among programs.

    A program computes `outputs` results and reads `block_k` columns of their weight rows per
    iteration. Paired rows double the rows that are read.
    """

    outputs: int
    block_k: int
    warps: int


# (rows, columns) of the weights -> fastest tiling, measured inside whole decode steps on an H200
# with `benchmarks/products.py tune`.
MEASURED_TILINGS: Mapping[tuple[int, int], GemvTiling] = {
    (6144, 4096): GemvTiling(2, 1024, 2),
    (4096, 4096): GemvTiling(8, 2048, 4),
    (28672, 4096): GemvTiling(2, 4096, 8),
    (4096, 14336): GemvTiling(4, 1024, 4),
    (128256, 4096): GemvTiling(4, 4096, 8),
    (3072, 2048): GemvTiling(4, 2048, 4),
    (2048, 2048): GemvTiling(4, 1024, 2),
    (16384, 2048): GemvTiling(2, 1024, 2),
    (2048, 8192): GemvTiling(4, 4096, 4),
    (128256, 2048): GemvTiling(8, 2048, 4),
    (6400, 6144): GemvTiling(4, 2048, 4),
    (6144, 6144): GemvTiling(4, 2048, 4),
    (24576, 6144): GemvTiling(8, 2048, 4),
    (6144, 24576): GemvTiling(2, 4096, 4),
    (49152, 6144): GemvTiling(8, 2048, 4),
    (12288, 4096): GemvTiling(8, 1024, 4),
    (16384, 4096): GemvTiling(8, 2048, 4),
    (4096, 16384): GemvTiling(4, 8192, 8),
    (250880, 4096): GemvTiling(8, 2048, 4),
}

# The same with an adapter, where another one is faster.
MEASURED_LORA_TILINGS: Mapping[tuple[int, int], GemvTiling] = {
    (4096, 4096): GemvTiling(4, 1024, 4),
}


def select_gemv_tiling(
    rows: int, columns: int, paired: bool, itemsize: int, tokens: int = 1, has_lora: bool = False
) -> GemvTiling:
    """Choose the tiling for a weight [rows, columns]: the measured one, or one by rule.

    By rule a program reads four weight rows at a time, 128 bytes per thread, in tiles that end
    where the row ends. Several tokens need registers for their sums, so they get half the bytes.
    """
    if has_lora and itemsize == 2 and (rows, columns) in MEASURED_LORA_TILINGS:
        return MEASURED_LORA_TILINGS[rows, columns]
    if tokens == 1 and itemsize == 2 and (rows, columns) in MEASURED_TILINGS:
        return MEASURED_TILINGS[rows, columns]
    block_k = 8192 // itemsize if tokens == 1 else 2048 // itemsize
    while block_k > 1024 // itemsize and columns % block_k:
        block_k //= 2
    if columns % block_k:  # no large power of two divides the row: the last tile is masked
        block_k = min(next_power_of_2(columns), 4096 // itemsize)
        halves = (block_k, max(block_k // 2, 1024))
        # With halves of the tile, fewer threads may have nothing to read in the last one.
        block_k = min(halves, key=lambda size: -(-columns // size) * size)
    outputs = 2 if paired else 4
    if rows <= MAX_ROUTER_ROWS and tokens == 1:
        outputs = 1  # few rows: more programs start earlier than wider ones end
    bytes_per_warp = 1024 if tokens == 1 else 512
    warps = max(1, block_k * itemsize // bytes_per_warp)
    return GemvTiling(outputs, block_k, warps)


def gemv_is_faster(
    tokens: int,
    weight: torch.Tensor,
    prologue: NormPrologue | None = None,
    epilogue: Epilogue = None,
) -> bool:
    """Whether this kernel beats the library's GEMM plus separate kernels.

    From two tokens on it does so only without a norm and an activation.
    """
    if not use_triton(weight) or not supports_gemv(weight, epilogue) or tokens > MAX_TOKENS:
        return False
    if tokens == 1:
        return True
    if prologue is None and isinstance(epilogue, ResidualEpilogue):
        return True
    return tokens == 2 and epilogue is None


def supports_gemv(weight: torch.Tensor, epilogue: Epilogue = None) -> bool:
    """Whether the kernel can read this weight and run this epilogue."""
    columns = weight.shape[-1]
    if columns % 8 or columns > MAX_COLUMNS or not weight.is_contiguous():
        return False
    return supports_epilogue(epilogue)


def supports_epilogue(epilogue: Epilogue) -> bool:
    """Whether a GEMV kernel can run this epilogue: a program sees one pair of a head at a time.

    A norm of q and k needs the whole head, and so does an 8-bit KV cache, whose scale is the
    head's largest magnitude.
    """
    if not isinstance(epilogue, QkvEpilogue):
        return True
    transform = epilogue.transform
    kv_cache = epilogue.kv_cache
    rope_only = (
        transform.norm is None
        and transform.clip is None
        and transform.v_norm is None
        and not transform.keys_as_values
        and epilogue.gate is None
    )
    writable = kv_cache[0].is_contiguous() and kv_cache.element_size() > 1
    return rope_only and kv_cache.shape[-1] % 2 == 0 and writable


def needs_paired_rows(epilogue: Epilogue) -> bool:
    """Whether one output needs two weight rows: rope pairs of q | k | v, or gate and up."""
    if isinstance(epilogue, ActivationEpilogue):
        return epilogue.gated
    return isinstance(epilogue, QkvEpilogue)


def fused_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    prologue: NormPrologue | None = None,
    epilogue: Epilogue = None,
) -> torch.Tensor:
    """The torch reference of the fused linear: x [tokens, in], weight [out, in] -> [tokens, out].

    With a QkvEpilogue the result is q [tokens, heads, head dim].
    """
    if prologue is not None and prologue.kind == "rms":
        x = rms_norm_reference(x, prologue.weight, prologue.eps)
    elif prologue is not None:
        x = layer_norm_reference(x, prologue.weight, prologue.bias, prologue.eps)
    y = F.linear(x, weight, bias)
    match epilogue:
        case ResidualEpilogue(tensor, scale):
            return torch.add(tensor, y, alpha=scale)
        case ActivationEpilogue():
            return activation_reference(y, epilogue)
        case QkvEpilogue(kv_cache, slot_mapping, transform, gate):
            return apply_rope_and_cache_reference(y, kv_cache, slot_mapping, transform, gate)
    return y


def gemv_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    prologue: NormPrologue | None = None,
    epilogue: Epilogue = None,
    tiling: GemvTiling | None = None,
    routing: ExpertRouting | None = None,
    norm_shift: torch.Tensor | None = None,
    lora: FusedLora | None = None,
) -> torch.Tensor:
    """Run the kernel. `norm_shift` is the result of `precompute_norm_shift`, if the caller has it.

    With `routing`, weight is [experts, out, in] and bias is [experts, out]. Row i of the result
    multiplies the weights of the i-th expert of `routing` by row i of x, or by the row of its token
    where x has one row per token. The epilogue must then be an activation or None.

    `lora` is the adapter of the only token. The norm must then be an RMS norm.
    """
    x = x.contiguous()
    num_tokens, columns = x.shape
    rows = weight.shape[-2]
    num_experts = 0
    top_k = 1
    num_results = num_tokens
    expert_ids = None
    input_weights = None
    if routing is not None:
        expert_ids, num_experts, input_weights = routing
        num_results = expert_ids.numel()
        top_k = num_results // num_tokens
        num_tokens = 1  # per program
    paired = needs_paired_rows(epilogue)
    num_outputs = rows // 2 if paired else rows
    if tiling is None:
        tiling = select_gemv_tiling(
            rows, columns, paired, weight.element_size(), num_tokens, lora is not None
        )
    norm = prologue or NormPrologue("rms", None, None, 0.0)
    if norm.kind == "layer" and norm_shift is None:
        norm_shift = precompute_norm_shift(weight, norm)
    optional = (expert_ids, input_weights, bias, norm.weight, norm_shift)
    args = build_epilogue_args(x, epilogue, rows, (num_results, num_outputs))
    rows_per_program = 2 * tiling.outputs if paired else tiling.outputs
    lora_sizes = lora_constants(lora, rows_per_program)
    num_programs = lora_sizes["SHRINKS"] + -(-num_outputs // tiling.outputs)
    grid = (num_programs, num_results if num_experts else 1)
    gemv_kernel[grid](
        x,
        weight,
        *(x if tensor is None else tensor for tensor in optional),
        *lora_arguments(lora, x),
        *args.tensors,
        norm.eps,
        *args.numbers,
        NUM_OUTPUTS=num_outputs,
        COLUMNS=columns,
        NUM_TOKENS=num_tokens,
        TOKENS_POW2=next_power_of_2(num_tokens),
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        WEIGHTS_INPUT=input_weights is not None,
        HAS_BIAS=bias is not None,
        NORM=None if prologue is None else norm.kind,
        HAS_NORM_WEIGHT=norm.weight is not None,
        PAIRED=paired,
        ROWS=rows,
        **args.constants,
        VECTOR=16 // weight.element_size(),
        BLOCK_OUT=tiling.outputs,
        BLOCK_K=tiling.block_k,
        **lora_sizes,
        num_warps=tiling.warps,
        IS_INTERPRETED=not x.is_cuda,
        **limit_registers(lora, tiling, rows_per_program),
        **pdl_options(x.device),
    )
    return args.out


def lora_arguments(lora: FusedLora | None, x: torch.Tensor) -> tuple[torch.Tensor | int, ...]:
    """Return A, B, parts, bias, slots, shrunk, and strides between slots."""
    if lora is None:
        return (x, x, x, x, x, x, 0, 0, 0)
    a, b, parts, bias = lora.matrices
    assert bias is not None
    return (
        a,
        b,
        parts,
        bias,
        lora.slots,
        lora.shrunk,
        a.stride(0),
        b.stride(0),
        bias.stride(0),
    )


def lora_constants(lora: FusedLora | None, rows_per_program: int) -> dict[str, int]:
    """Return the sizes of an adapter that is fused, and how many programs shrink: 0 without one."""
    if lora is None:
        return {"SHRINKS": 0, "LORA_WIDTH": 1, "RANK": 1, "RANK_POW2": 1}
    width = lora.matrices.a.shape[2]
    rank = lora.matrices.b.shape[3]
    return {
        "SHRINKS": -(-width // rows_per_program),
        "LORA_WIDTH": width,
        "RANK": rank,
        "RANK_POW2": next_power_of_2(rank),
    }


def limit_registers(
    lora: FusedLora | None, tiling: GemvTiling, rows_per_program: int
) -> dict[str, int]:
    """Return the option with which as many programs fit with an adapter as without one.

    Without one, the compiler finds at most 64 registers for these tilings by itself. With one it
    needs a few more, unless it is told.
    """
    values_per_thread = rows_per_program * tiling.block_k // (32 * tiling.warps)
    fits = values_per_thread <= (64 if tiling.warps == 8 else 32)
    return {"maxnreg": 64} if lora is not None and lora.slots.is_cuda and fits else {}


def precompute_norm_shift(weight: torch.Tensor, norm: NormPrologue) -> torch.Tensor:
    """Return the part of a layer norm's product that is independent of x: [2, rows].

    The rows are W @ w and W @ b for the norm's weight w and bias b.
    """
    columns = weight.shape[-1]
    if norm.weight is None:
        norm_weight = torch.ones(columns, device=weight.device)
    else:
        norm_weight = norm.weight.float()
    norm_bias = torch.zeros_like(norm_weight) if norm.bias is None else norm.bias.float()
    vectors = torch.stack((norm_weight, norm_bias), 1)
    shifts = [panel.float() @ vectors for panel in weight.split(256)]
    return torch.cat(shifts).t().contiguous()


class EpilogueArgs(NamedTuple):
    """The kernel arguments that describe an epilogue. Unused tensors are placeholders."""

    # residual or KV cache, slot mapping, positions, cos, sin, query scales, out
    tensors: tuple[torch.Tensor, ...]
    # scale of y before the residual, stride between keys and values, parameters of the activation
    numbers: tuple[float, ...]
    constants: dict[str, str | int | bool | None]

    @property
    def out(self) -> torch.Tensor:
        return self.tensors[-1]


def build_epilogue_args(
    x: torch.Tensor, epilogue: Epilogue, rows: int, out_shape: tuple[int, ...]
) -> EpilogueArgs:
    """Translate an epilogue into kernel arguments and allocate the result.

    The result has `out_shape`, or [tokens, heads, head dim] with a QkvEpilogue.
    """
    kind = ""
    activation = ""
    tensors = (x, x, x, x, x, x)
    numbers: tuple[float, ...] = (1.0, 0)
    params = (0.0, 0.0, 0.0)
    num_heads = 0
    num_kv_heads = 0
    head_dim = 2
    rope_dim = 0
    interleaved = False
    rope_tables = False
    scale_queries = False
    match epilogue:
        case ResidualEpilogue(residual, scale):
            kind = "residual"
            tensors = (residual.contiguous(), x, x, x, x, x)
            numbers = (scale, 0)
        case ActivationEpilogue(activation, _, params):
            kind = "activation"
        case QkvEpilogue(kv_cache, slot_mapping, transform):
            kind = "qkv"
            rope_tables = transform.positions is not None
            interleaved = transform.interleaved
            num_kv_heads, head_dim = kv_cache.shape[2:]
            num_heads = rows // head_dim - 2 * num_kv_heads
            cos, sin = transform.angles or (x, x)
            rope_dim = 2 * cos.shape[-1] if transform.angles else 0
            positions = slot_mapping if transform.positions is None else transform.positions
            scale_queries = transform.query_scales is not None
            query_scales = x if transform.query_scales is None else transform.query_scales
            tensors = (kv_cache, slot_mapping, positions, cos, sin, query_scales)
            numbers = (1.0, kv_cache.stride(0))
            out_shape = (len(x), num_heads, head_dim)
    constants: dict[str, str | int | bool | None] = {
        "EPILOGUE": kind,
        "ACTIVATION": activation,
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "ROPE_DIM": rope_dim,
        "INTERLEAVED": interleaved,
        "ROPE_TABLES": rope_tables,
        "SCALE_QUERIES": scale_queries,
    }
    out = torch.empty(out_shape, dtype=x.dtype, device=x.device)
    return EpilogueArgs((*tensors, out), (*numbers, *params), constants)


@jit
def gemv_kernel(
    x,  # [tokens, COLUMNS]
    weight,  # [ROWS, COLUMNS], or [experts, ROWS, COLUMNS]
    expert_ids,  # [results]
    input_weights,  # [results]
    bias,  # [ROWS], or [experts, ROWS]
    norm_weight,  # [COLUMNS]
    norm_shift,  # [2, ROWS]
    lora_a,  # [slots, LORA_WIDTH, COLUMNS]
    lora_b,  # [slots, ROWS, RANK]
    lora_parts,  # [ROWS]
    lora_bias,  # [slots, ROWS]
    lora_slots,  # [1]
    lora_shrunk,  # [SHRUNK_COPIES, LORA_WIDTH]
    lora_a_stride,
    lora_b_stride,
    lora_bias_stride,
    residual_or_cache,
    slot_mapping,
    positions,
    cos,
    sin,
    query_scales,
    out,
    eps,
    residual_scale,
    kv_stride,
    param0,
    param1,
    param2,
    NUM_OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    TOKENS_POW2: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    WEIGHTS_INPUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr,
    PAIRED: tl.constexpr,
    ROWS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROPE_TABLES: tl.constexpr,
    SCALE_QUERIES: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHRINKS: tl.constexpr,
    LORA_WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    RANK_POW2: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_OUT outputs of all tokens.

    Tiles are [tokens, outputs, columns], or [1, 1, columns] for values that all rows share. All
    have the layout of the weight tile.

    The norm costs almost nothing: its statistics are summed along with the product and applied to
    the sums. With mean m and deviation d of x, W @ ((x - m) / d * w + b) equals
    (W @ (x * w) - m * (W @ w)) / d + W @ b, and norm_shift holds W @ w and W @ b. Float32 has
    enough digits for the difference unless the mean is hundreds of deviations.

    With an adapter the first SHRINKS programs compute its shrunk row instead: they multiply rows of
    A as the others multiply rows of the weight, so all of them end at about the same time. They
    store no outputs.
    """
    if NUM_EXPERTS > 0:
        wait_for_previous(PDL)  # the router of this step writes expert_ids
    launch_dependents(PDL)  # with experts after the wait: the next kernel may read the ids early
    if NUM_EXPERTS > 0:
        result = tl.program_id(1).to(tl.int64)
        expert = tl.load(expert_ids + result).to(tl.int64)
        expert = tl.where((expert >= 0) & (expert < NUM_EXPERTS), expert, 0)
        weight += expert * (ROWS * COLUMNS)
        bias += expert * ROWS
        x += result // TOP_K * COLUMNS
        out += result * NUM_OUTPUTS
    output = (tl.program_id(0) - SHRINKS) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    if SHRINKS > 0:
        # A branch around the outputs would double the registers of all programs. So the programs
        # that shrink compute outputs beyond the last one, and nothing stores these.
        shrinks = tl.program_id(0) < SHRINKS
        output = tl.where(shrinks, NUM_OUTPUTS, output)
    first_row, second_row = weight_rows(
        tl.minimum(output, NUM_OUTPUTS - 1), NUM_OUTPUTS, HEAD_DIM, ROPE_DIM, INTERLEAVED, EPILOGUE
    )
    first_read, second_read = first_row, second_row
    if SHRINKS > 0:
        lora_row = tl.program_id(0) * (2 * BLOCK_OUT if PAIRED else BLOCK_OUT)
        lora_row += tl.arange(0, BLOCK_OUT)
        lora_slot = tl.load(lora_slots).to(tl.int64)
        first_part = tl.load(lora_parts + first_row)
        second_part = tl.load(lora_parts + second_row)
        if shrinks:
            # `volatile` keeps the compiler from loading the slot in all programs: their requests
            # for weights would wait for it.
            own_slot = tl.load(lora_slots, volatile=True).to(tl.int64)
            weight = lora_a + tl.maximum(own_slot, 0) * lora_a_stride
            first_read = tl.minimum(lora_row, LORA_WIDTH - 1)
            second_read = tl.minimum(lora_row + BLOCK_OUT, LORA_WIDTH - 1)
    token = tl.arange(0, TOKENS_POW2)
    k = tl.arange(0, BLOCK_K)[None, None, :]
    first_ptr = weight + first_read.to(tl.int64)[None, :, None] * COLUMNS + k
    second_ptr = weight + second_read.to(tl.int64)[None, :, None] * COLUMNS + k
    x_ptr = x + tl.minimum(token, NUM_TOKENS - 1)[:, None, None] * COLUMNS + k
    next_first = load_tile(first_ptr, 0, k, COLUMNS, BLOCK_K, "evict_first")
    next_second = next_first
    if PAIRED:
        next_second = load_tile(second_ptr, 0, k, COLUMNS, BLOCK_K, "evict_first")
    if NUM_EXPERTS == 0:
        wait_for_previous(PDL)
    y = tl.zeros([TOKENS_POW2, BLOCK_OUT, BLOCK_K // VECTOR], tl.float32)
    y_pair = y
    square_sum = tl.zeros([TOKENS_POW2, 1, BLOCK_K // VECTOR], tl.float32)
    x_sum = square_sum
    for k0 in tl.static_range(0, COLUMNS, BLOCK_K):
        first = next_first.to(tl.float32)
        second = next_second.to(tl.float32)
        if k0 + BLOCK_K < COLUMNS:
            next_first = load_tile(first_ptr, k0 + BLOCK_K, k, COLUMNS, BLOCK_K, "evict_first")
            if PAIRED:
                next_second = load_tile(
                    second_ptr, k0 + BLOCK_K, k, COLUMNS, BLOCK_K, "evict_first"
                )
        v = load_tile(x_ptr, k0, k, COLUMNS, BLOCK_K, "").to(tl.float32)
        if SHRINKS > 0 and k0 == 0:
            # Requested here, these arrive while the weights do. Before x, they would delay it.
            first_at = locate_shrunk(first_part, lora_shrunk, LORA_WIDTH, RANK, RANK_POW2)
            first_low = load_shrunk(first_at, RANK, RANK_POW2)
            first_b = load_expand(first_row, lora_slot, lora_b, lora_b_stride, RANK, RANK_POW2)
            first_bias = load_slot_bias(lora_bias, lora_slot, lora_bias_stride, first_row)
            if PAIRED:
                second_at = locate_shrunk(second_part, lora_shrunk, LORA_WIDTH, RANK, RANK_POW2)
                second_low = load_shrunk(second_at, RANK, RANK_POW2)
                second_b = load_expand(
                    second_row, lora_slot, lora_b, lora_b_stride, RANK, RANK_POW2
                )
                second_bias = load_slot_bias(lora_bias, lora_slot, lora_bias_stride, second_row)
        if NORM is not None:
            square_sum += sum_within_thread(v * v, TOKENS_POW2, 1, BLOCK_K, VECTOR)
        if NORM == "layer":
            x_sum += sum_within_thread(v, TOKENS_POW2, 1, BLOCK_K, VECTOR)
        if HAS_NORM_WEIGHT:
            v *= load_tile(norm_weight + k, k0, k, COLUMNS, BLOCK_K, "")
        y += sum_within_thread(first * v, TOKENS_POW2, BLOCK_OUT, BLOCK_K, VECTOR)
        if PAIRED:
            y_pair += sum_within_thread(second * v, TOKENS_POW2, BLOCK_OUT, BLOCK_K, VECTOR)
    y = tl.sum(y, 2)
    y_pair = tl.sum(y_pair, 2)
    if SHRINKS > 0:
        store_shrunk(y, tl.where(shrinks, lora_row, LORA_WIDTH), lora_shrunk, LORA_WIDTH)
        uses_shrunk = (lora_slot >= 0) & (shrinks == 0)
        y += expand_fused(
            first_b, first_low, first_at, uses_shrunk, RANK, RANK_POW2, IS_INTERPRETED
        )[None, :]
        if PAIRED:
            second_lora_row = tl.where(shrinks, lora_row + BLOCK_OUT, LORA_WIDTH)
            store_shrunk(y_pair, second_lora_row, lora_shrunk, LORA_WIDTH)
            y_pair += expand_fused(
                second_b, second_low, second_at, uses_shrunk, RANK, RANK_POW2, IS_INTERPRETED
            )[None, :]
    if NORM == "rms":
        inverse_rms = tl.rsqrt(tl.sum(square_sum, 2) / COLUMNS + eps)
        y = y * inverse_rms
        y_pair = y_pair * inverse_rms
    if NORM == "layer":
        mean = tl.sum(x_sum, 2) / COLUMNS
        variance = tl.maximum(tl.sum(square_sum, 2) / COLUMNS - mean * mean, 0.0)
        inverse_std = tl.rsqrt(variance + eps)
        y = apply_norm_shift(y, first_row, mean, inverse_std, norm_shift, ROWS)
        if PAIRED:
            y_pair = apply_norm_shift(y_pair, second_row, mean, inverse_std, norm_shift, ROWS)
    if WEIGHTS_INPUT:
        input_weight = tl.load(input_weights + tl.program_id(1)).to(tl.float32)
        y = y * input_weight
        y_pair = y_pair * input_weight
    if SHRINKS > 0:
        y += first_bias[None, :]
        if PAIRED:
            y_pair += second_bias[None, :]
    if HAS_BIAS:
        y += tl.load(bias + first_row)[None, :].to(tl.float32)
        if PAIRED:
            y_pair += tl.load(bias + second_row)[None, :].to(tl.float32)
    store_with_epilogue(
        y,
        y_pair,
        output,
        token,
        residual_or_cache,
        slot_mapping,
        positions,
        cos,
        sin,
        query_scales,
        out,
        residual_scale,
        kv_stride,
        param0,
        param1,
        param2,
        NUM_OUTPUTS,
        NUM_TOKENS,
        PAIRED,
        EPILOGUE,
        ACTIVATION,
        NUM_HEADS,
        NUM_KV_HEADS,
        HEAD_DIM,
        ROPE_DIM,
        INTERLEAVED,
        ROPE_TABLES,
        SCALE_QUERIES,
    )


@jit
def load_tile(
    ptr, k0: tl.constexpr, k, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, EVICT: tl.constexpr
):
    """Load the tile that starts at column k0, with zeros past the end of the row."""
    if k0 + BLOCK_K <= COLUMNS:
        return tl.load(ptr + k0, eviction_policy=EVICT)
    else:
        return tl.load(ptr + k0, mask=k0 + k < COLUMNS, other=0.0, eviction_policy=EVICT)


@jit
def sum_within_thread(
    tile, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr
):
    """Sum the VECTOR neighbours that one thread holds: [TOKENS, OUTPUTS, COLUMNS / VECTOR].

    Threads exchange no values.
    """
    return tl.sum(tl.reshape(tile, (TOKENS, OUTPUTS, COLUMNS // VECTOR, VECTOR)), 3)


@jit
def apply_norm_shift(y, row, mean, inverse_std, norm_shift, ROWS: tl.constexpr):
    """Turn W @ (x * w) into W @ layer_norm(x), see gemv_kernel."""
    weight_shift = tl.load(norm_shift + row)[None, :]
    return (y - mean * weight_shift) * inverse_std + tl.load(norm_shift + ROWS + row)[None, :]


@jit
def weight_rows(
    output,
    NUM_OUTPUTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """Return the two weight rows of an output: gate and up, or the two dimensions of a rope pair.

    Dimensions of a head beyond ROPE_DIM are paired as well, although rope does not change them.
    """
    if EPILOGUE == "qkv":
        head_start = output // (HEAD_DIM // 2) * HEAD_DIM
        pair = output % (HEAD_DIM // 2)
        if INTERLEAVED:
            return head_start + 2 * pair, head_start + 2 * pair + 1
        else:
            has_rope = pair < ROPE_DIM // 2
            low = head_start + tl.where(has_rope, pair, pair + ROPE_DIM // 2)
            return low, low + tl.where(has_rope, ROPE_DIM // 2, (HEAD_DIM - ROPE_DIM) // 2)
    else:
        return output, output + NUM_OUTPUTS


@jit
def store_with_epilogue(
    y,  # [tokens, outputs]
    y_pair,  # [tokens, outputs], the sums of the second row where rows are paired
    output,
    token,
    residual_or_cache,
    slot_mapping,
    positions,
    cos,
    sin,
    query_scales,
    out,
    residual_scale,
    kv_stride,
    param0,
    param1,
    param2,
    NUM_OUTPUTS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    PAIRED: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROPE_TABLES: tl.constexpr,
    SCALE_QUERIES: tl.constexpr,
):
    """Apply the epilogue to the sums and store the result."""
    mask = (token < NUM_TOKENS)[:, None] & (output < NUM_OUTPUTS)[None, :]
    if EPILOGUE == "qkv":
        store_qkv(
            y,
            y_pair,
            output,
            token,
            mask,
            residual_or_cache,
            slot_mapping,
            positions,
            cos,
            sin,
            query_scales,
            out,
            kv_stride,
            NUM_TOKENS,
            NUM_HEADS,
            NUM_KV_HEADS,
            HEAD_DIM,
            ROPE_DIM,
            INTERLEAVED,
            ROPE_TABLES,
            SCALE_QUERIES,
        )
    else:
        offset = token[:, None] * NUM_OUTPUTS + output[None, :]
        if EPILOGUE == "activation":
            y = activate_tile(y, y_pair, ACTIVATION, PAIRED, param0, param1, param2)
        elif EPILOGUE == "residual":
            residual = tl.load(residual_or_cache + offset, mask=mask, other=0.0)
            y = residual.to(tl.float32) + residual_scale * y
        tl.store(out + offset, y.to(out.dtype.element_ty), mask=mask)


@jit
def store_qkv(
    y,
    y_pair,
    output,
    token,
    mask,
    kv_cache,  # [2, slots, kv heads, head dim]
    slot_mapping,
    positions,
    cos,
    sin,
    query_scales,
    out,  # q: [tokens, heads, head dim]
    kv_stride,
    NUM_TOKENS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROPE_TABLES: tl.constexpr,
    SCALE_QUERIES: tl.constexpr,
):
    """Apply rope to q and k, store q in `out` and k and v in the KV cache.

    y and y_pair [tokens, pairs] hold the two dimensions of each pair of the heads q | k | v.
    """
    low, high = weight_rows(output, 0, HEAD_DIM, ROPE_DIM, INTERLEAVED, "qkv")
    head = output // (HEAD_DIM // 2)
    pair = output % (HEAD_DIM // 2)
    row = token
    if ROPE_TABLES:
        row = tl.load(positions + token, mask=token < NUM_TOKENS, other=0)
    if ROPE_DIM > 0:
        has_rope = (pair < ROPE_DIM // 2) & (head < NUM_HEADS + NUM_KV_HEADS)
        rope_mask = mask & has_rope[None, :]
        angle = row[:, None] * (ROPE_DIM // 2) + pair[None, :]
        c = tl.load(cos + angle, mask=rope_mask, other=1.0)
        s = tl.load(sin + angle, mask=rope_mask, other=0.0)
        y, y_pair = y * c - y_pair * s, y * s + y_pair * c
    if SCALE_QUERIES:
        query_scale = tl.load(query_scales + row, mask=token < NUM_TOKENS, other=1.0)[:, None]
        factor = tl.where((head < NUM_HEADS)[None, :], query_scale, 1.0)
        y = y * factor
        y_pair = y_pair * factor
    q_mask = mask & (head < NUM_HEADS)[None, :]
    q_offset = token[:, None] * (NUM_HEADS * HEAD_DIM) + low[None, :]
    tl.store(out + q_offset, y.to(out.dtype.element_ty), mask=q_mask)
    tl.store(out + q_offset + (high - low)[None, :], y_pair.to(out.dtype.element_ty), mask=q_mask)
    is_key = head < NUM_HEADS + NUM_KV_HEADS
    column = low - tl.where(is_key, NUM_HEADS, NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM
    slot = tl.load(slot_mapping + token, mask=token < NUM_TOKENS, other=0).to(tl.int64)
    value_offset = tl.where(is_key, 0, 1).to(tl.int64) * kv_stride
    kv_offset = slot[:, None] * (NUM_KV_HEADS * HEAD_DIM) + (column + value_offset)[None, :]
    kv_mask = mask & (head >= NUM_HEADS)[None, :]
    tl.store(kv_cache + kv_offset, y.to(kv_cache.dtype.element_ty), mask=kv_mask)
    tl.store(
        kv_cache + kv_offset + (high - low)[None, :],
        y_pair.to(kv_cache.dtype.element_ty),
        mask=kv_mask,
    )
