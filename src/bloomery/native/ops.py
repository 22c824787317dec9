"""Native CPU operations: each takes tensors and calls a C kernel.

They take and return the same shapes as the torch functions that they replace. A caller first checks
`pool.accepts` for its tensors. While a trace is recorded on the pool, an operation is
recorded and its result is not computed yet.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from bloomery.fusion import (
    ActivationEpilogue,
    Epilogue,
    NormPrologue,
    QkTransform,
    QkvEpilogue,
    ResidualEpilogue,
)
from bloomery.native.thread_pool import ThreadPool, data_pointer
from bloomery.spec import RouterSpec

NORMS = {None: 0, "rms": 1, "layer": 2}
# ActivationKind of vectors.h
ACTIVATIONS = {
    "silu": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "relu": 3,
    "relu2": 4,
    "xielu": 5,
    "clamped_swiglu": 6,
}
NO_ACTIVATION = ActivationEpilogue("silu", gated=False)  # an argument that is not used
# Epilogue of gemm.c
NO_EPILOGUE, RESIDUAL, ACTIVATE, GATED_ACTIVATE = range(4)
# ElementwiseOp of row_ops.c
ADD_SCALED, MULTIPLY, MULTIPLY_NUMBER, ADD_NUMBER, TANH, ACTIVATION, GATED_ACTIVATION = range(7)

# GGUF types that can be packed into panels: their number in gguf_blocks.h, their Kind in gemm.c.
# NF4 is no type of GGUF: a block is a float16 scale and 32 codes in the order of IQ4_NL.
PACKED_TYPES = {
    "Q4_0": (0, 0),
    "Q4_1": (1, 1),
    "Q4_K": (2, 2),
    "Q8_0": (3, 7),
    "Q5_0": (4, 7),
    "Q5_1": (5, 8),
    "Q5_K": (6, 9),
    "Q6_K": (7, 10),
    "Q2_K": (8, 7),
    "Q3_K": (9, 10),
    "IQ4_NL": (10, 5),
    "IQ4_XS": (11, 6),
    "IQ2_XXS": (12, 11),
    "IQ2_XS": (13, 11),
    "IQ2_S": (14, 11),
    "IQ3_XXS": (15, 11),
    "IQ3_S": (16, 10),
    "IQ1_S": (17, 11),
    "IQ1_M": (18, 11),
    "TQ1_0": (19, 7),
    "TQ2_0": (20, 7),
    "Q1_0": (21, 7),
    "MXFP4": (22, 3),
    "NVFP4": (23, 7),
    "NF4": (24, 4),
}
ROUNDED_TYPES = frozenset({"Q2_K", "NVFP4"})  # packing rounds their values to eight bits
FLOAT_KINDS = {torch.float32: 16, torch.bfloat16: 17, torch.float16: 18}  # Kind in gemm.c
SCORES = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}  # ScoreKind in experts.c
KV_CACHE_KINDS = {torch.float32: 0, torch.float16: 1, torch.int8: 2}  # CacheKind in kv_cache.h

MatrixSegment = tuple[torch.Tensor, int, int]  # packed bytes, rows, Kind in gemm.c


# ---- matrices ------------------------------------------------------------------------------------


class NativeMatrix:
    """[rows, columns] weights in the layout of gemm.c: segments of one kind each, top to bottom."""

    def __init__(self, pool: ThreadPool, columns: int, segments: Sequence[MatrixSegment]):
        self.rows = sum(rows for _, rows, _ in segments)
        self.columns = columns
        self.segments = tuple(segments)
        count = len(segments)
        pointers = (ctypes.c_void_p * count)(*(tensor.data_ptr() for tensor, _, _ in segments))
        heights = (ctypes.c_int64 * count)(*(rows for _, rows, _ in segments))
        kinds = (ctypes.c_int64 * count)(*(kind for _, _, kind in segments))
        library = pool.library
        self.panel_rows = pool.panel_rows
        self.free = library.matrix_free
        self.handle = library.matrix_create(self.rows, columns, count, pointers, heights, kinds)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self.free(self.handle)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor, _, _ in self.segments)

    @property
    def halves_align(self) -> bool:
        """Whether rows i and i + rows / 2 have the same place in their panels, as a gate needs."""
        half = self.rows // 2
        if self.rows % 2 or half % self.panel_rows:
            return False
        first = 0
        for _, rows, _ in self.segments:
            end = first + rows
            if rows % self.panel_rows and end != self.rows:
                return False
            if first < half < end and first != half:
                return False
            first = end
        return True

    def holds_experts(self, num_experts: int, gated: bool) -> bool:
        """Whether the part of each expert, and its gate, are whole panels."""
        unit = 2 * self.panel_rows if gated else self.panel_rows
        if self.rows % (num_experts * unit):
            return False
        return all(rows % self.panel_rows == 0 for _, rows, _ in self.segments)

    @classmethod
    def from_floats(cls, pool: ThreadPool, weight: torch.Tensor) -> NativeMatrix:
        """Pack a matrix of one of the FLOAT_KINDS, without rounding."""
        rows, columns = weight.shape
        weight = weight.contiguous()
        panels = -(-rows // pool.panel_rows)
        packed = pool.allocate_weights(panels * pool.panel_rows * columns * weight.itemsize)
        pool.library.native_pack_floats(
            pool.handle, weight.data_ptr(), weight.itemsize, rows, columns, packed.data_ptr()
        )
        return cls(pool, columns, [(packed, rows, FLOAT_KINDS[weight.dtype])])


def pack_blocks(
    pool: ThreadPool,
    kind: str,
    blocks: torch.Tensor,
    columns: int,
    grid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Repack rows of GGUF blocks, uint8 [rows, bytes], into panels.

    The values stay the same, except those of ROUNDED_TYPES. `grid`: the codebook of types that
    need one, int8 [entries, 8 or 4].
    """
    type_number, _ = PACKED_TYPES[kind]
    rows = len(blocks)
    library = pool.library
    out = pool.allocate_weights(library.native_packed_bytes(type_number, rows, columns))
    library.native_pack(
        pool.handle,
        type_number,
        blocks.data_ptr(),
        data_pointer(grid),
        rows,
        columns,
        blocks.stride(0),
        out.data_ptr(),
    )
    return out


def pack_segment(
    pool: ThreadPool,
    kind: str,
    blocks: torch.Tensor,
    columns: int,
    grid: torch.Tensor | None = None,
) -> MatrixSegment:
    """Pack rows of GGUF blocks into a segment of a NativeMatrix."""
    packed = pack_blocks(pool, kind, blocks, columns, grid)
    return packed, len(blocks), PACKED_TYPES[kind][1]


# ---- linear layers -------------------------------------------------------------------------------


def fused_linear(
    pool: ThreadPool,
    matrix: NativeMatrix,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    prologue: NormPrologue | None,
    epilogue: Epilogue,
) -> torch.Tensor | None:
    """Run norm, product, and residual or activation as one operation; None if not supported."""
    if isinstance(epilogue, QkvEpilogue):
        return None
    if isinstance(epilogue, ActivationEpilogue) and epilogue.gated and not matrix.halves_align:
        return None
    residual = epilogue.tensor if isinstance(epilogue, ResidualEpilogue) else None
    if not pool.accepts(x, bias, residual):
        return None
    if prologue is not None:
        weight = prologue.weight
        if not pool.accepts(weight, prologue.bias) or (weight is not None and weight.dim() != 1):
            return None
    return linear(pool, matrix, x, bias, prologue, epilogue)


def linear(
    pool: ThreadPool,
    matrix: NativeMatrix,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    prologue: NormPrologue | None = None,
    epilogue: ResidualEpilogue | ActivationEpilogue | None = None,
) -> torch.Tensor:
    """x [tokens, columns] -> [tokens, rows], or [tokens, rows / 2] with a gated activation."""
    norm_kind = None
    norm_weight = None
    norm_bias = None
    eps = 0.0
    if prologue is not None:
        norm_kind, norm_weight, norm_bias, eps = prologue
    residual: torch.Tensor | None = None
    scale = 1.0
    activation = NO_ACTIVATION
    kind = NO_EPILOGUE
    if isinstance(epilogue, ResidualEpilogue):
        kind = RESIDUAL
        residual, scale = epilogue
    elif isinstance(epilogue, ActivationEpilogue):
        kind = GATED_ACTIVATE if epilogue.gated else ACTIVATE
        activation = epilogue
    width = matrix.rows // 2 if kind == GATED_ACTIVATE else matrix.rows
    out = pool.empty((len(x), width))
    pool.library.native_linear(
        pool.handle,
        matrix.handle,
        data_pointer(x),
        len(x),
        data_pointer(bias),
        NORMS[norm_kind],
        eps,
        data_pointer(norm_weight),
        data_pointer(norm_bias),
        kind,
        ACTIVATIONS[activation.name],
        *activation.params,
        data_pointer(residual),
        scale,
        data_pointer(out),
    )
    return out


# ---- experts -------------------------------------------------------------------------------------


def route_topk(
    pool: ThreadPool,
    logits: torch.Tensor,
    top_k: int,
    router: RouterSpec,
    correction_bias: torch.Tensor | None,
    expert_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [tokens, experts] -> expert ids (int32) and weights, [tokens, top_k] each."""
    tokens, num_experts = logits.shape
    expert_ids = pool.empty((tokens, top_k), torch.int32)
    weights = pool.empty((tokens, top_k))
    pool.library.native_route(
        pool.handle,
        data_pointer(logits),
        tokens,
        num_experts,
        top_k,
        SCORES[router.score],
        router.score_chosen_only,
        data_pointer(correction_bias),
        router.logit_scale,
        router.softcap or 0.0,
        router.num_groups,
        router.top_groups,
        1 if router.group_score == "max" else 2,
        router.normalize,
        router.min_normalizer,
        router.scale,
        data_pointer(expert_scale),
        router.threshold,
        data_pointer(expert_ids),
        data_pointer(weights),
    )
    return expert_ids, weights


def sort_pairs(
    pool: ThreadPool, expert_ids: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the pairs of expert_ids [tokens, top_k] by expert.

    Returns the pairs, those without an expert missing at the end, and where each expert's begin:
    [pairs] and [experts + 1].
    """
    order = pool.empty((expert_ids.numel(),), torch.int32)
    starts = pool.empty((num_experts + 1,), torch.int32)
    pool.library.native_sort_pairs(
        pool.handle,
        data_pointer(expert_ids),
        expert_ids.numel(),
        num_experts,
        data_pointer(order),
        data_pointer(starts),
    )
    return order, starts


def expert_linear(
    pool: ThreadPool,
    matrix: NativeMatrix,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    order: torch.Tensor,
    starts: torch.Tensor,
    top_k: int,
    activation: ActivationEpilogue | None,
    input_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply every pair by the part of its expert in `matrix` [experts * rows, columns].

    With an activation x has tokens and the result has sorted pairs; without one x has sorted pairs
    and the result has pairs.
    """
    num_experts = len(starts) - 1
    num_pairs = len(order)
    rows = matrix.rows // num_experts
    kind = NO_EPILOGUE
    if activation is not None:
        kind = GATED_ACTIVATE if activation.gated else ACTIVATE
    name, _, params = activation or NO_ACTIVATION
    out = pool.empty((num_pairs, rows // 2 if kind == GATED_ACTIVATE else rows))
    pool.library.native_expert_linear(
        pool.handle,
        matrix.handle,
        data_pointer(x),
        data_pointer(bias),
        data_pointer(input_weights),
        data_pointer(order),
        data_pointer(starts),
        num_pairs,
        num_experts,
        top_k,
        kind,
        ACTIVATIONS[name],
        *params,
        data_pointer(out),
    )
    return out


def sum_experts(
    pool: ThreadPool,
    y: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor | None,
    num_experts: int,
    shared: torch.Tensor | None,
    gate_logits: torch.Tensor | None,
) -> torch.Tensor:
    """Weighted sum over each token's experts: y [pairs, width] -> [tokens, width].

    With `shared` [tokens, width], this is added, times sigmoid(gate_logits) [tokens, 1] if given.
    """
    tokens, top_k = expert_ids.shape
    width = y.shape[1]
    out = pool.empty((tokens, width))
    pool.library.native_sum_experts(
        pool.handle,
        data_pointer(y),
        data_pointer(expert_ids),
        data_pointer(weights),
        tokens,
        num_experts,
        top_k,
        width,
        data_pointer(shared),
        data_pointer(gate_logits),
        data_pointer(out),
    )
    return out


def gather_rows(pool: ThreadPool, matrix: NativeMatrix, ids: torch.Tensor) -> torch.Tensor:
    """ids [n] -> rows [n, columns] in float32."""
    out = pool.empty((len(ids), matrix.columns))
    scale = 1.0
    pool.library.native_gather(
        pool.handle, matrix.handle, data_pointer(ids), len(ids), scale, data_pointer(out)
    )
    return out


def select_rows(pool: ThreadPool, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
    """x [n, width], rows int64 [m] -> x[rows]; None if the arguments are not supported."""
    if x.dim() != 2 or rows.dim() != 1 or rows.dtype != torch.int64 or not rows.is_contiguous():
        return None
    if not pool.accepts(x):
        return None
    out = pool.empty((len(rows), x.shape[1]))
    pool.library.native_select_rows(
        pool.handle,
        data_pointer(x),
        *x.shape,
        data_pointer(rows),
        len(rows),
        data_pointer(out),
    )
    return out


# ---- adapters ------------------------------------------------------------------------------------


def lora_shrink(
    pool: ThreadPool,
    x: torch.Tensor,
    a: torch.Tensor,
    slots: torch.Tensor,
    experts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [rows, in] times the A of each row's slot: [rows, width], 0 in rows without an adapter.

    a [slots, experts, width, in]. `slots` [tokens] and `experts` [rows] say which matrix a row
    uses; a token has one row, or one for each of its experts. With `active` [slots], only rows of
    active slots are written to `out`.
    """
    _, num_experts, width, inputs = a.shape
    if out is None:
        out = pool.empty((len(x), width))
    pool.library.native_lora_shrink(
        pool.handle,
        data_pointer(x),
        len(x),
        inputs,
        data_pointer(a),
        a.stride(0),
        a.stride(1),
        data_pointer(slots),
        data_pointer(experts),
        num_experts,
        len(x) // len(slots),
        width,
        data_pointer(active),
        data_pointer(out),
    )
    return out


def lora_expand(
    pool: ThreadPool,
    shrunk: torch.Tensor,
    b: torch.Tensor,
    parts: torch.Tensor,
    slots: torch.Tensor,
    y: torch.Tensor,
    experts: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """Add B times a part of each shrunk row to y [rows, out], in place.

    b [slots, experts, out, rank], bias [slots, out]. `parts` [out] says which `rank` columns of
    `shrunk` [rows, parts * rank] an output reads.
    """
    _, num_experts, outputs, rank = b.shape
    pool.library.native_lora_expand(
        pool.handle,
        data_pointer(shrunk),
        len(shrunk),
        shrunk.shape[1],
        data_pointer(b),
        b.stride(0),
        b.stride(1),
        data_pointer(slots),
        data_pointer(experts),
        num_experts,
        len(shrunk) // len(slots),
        rank,
        outputs,
        data_pointer(parts),
        data_pointer(bias),
        0 if bias is None else bias.stride(0),
        data_pointer(y),
    )


def lora_lookup(
    pool: ThreadPool,
    ids: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    first_id: int,
    out: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
) -> torch.Tensor:
    """Look up token ids [rows] in the table of each row's slot: [rows, width].

    tables [slots, ids, width] hold the ids from `first_id` on; other ids and rows without an
    adapter give 0. With `active` [slots], only rows of active slots are written to `out`.
    """
    _, num_ids, width = tables.shape
    if out is None:
        out = pool.empty((len(ids), width))
    pool.library.native_lora_lookup(
        pool.handle,
        data_pointer(ids),
        len(ids),
        data_pointer(tables),
        tables.stride(0),
        data_pointer(slots),
        data_pointer(active),
        first_id,
        first_id + num_ids,
        width,
        data_pointer(out),
    )
    return out


def pair_inputs(
    pool: ThreadPool,
    x: torch.Tensor,
    num_pairs: int,
    order: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the row of x [rows, width] of each (token, choice) pair: [pairs, width].

    The results are in the order of the pairs, or in `order`, as sort_pairs returns it. `weights`
    [pairs] multiply them.
    """
    rows, width = x.shape
    out = pool.empty((num_pairs, width))
    pool.library.native_pair_inputs(
        pool.handle,
        data_pointer(x),
        data_pointer(order),
        num_pairs,
        num_pairs // rows,
        width,
        data_pointer(weights),
        data_pointer(out),
    )
    return out


# ---- rows of activations -------------------------------------------------------------------------


def normalize(
    pool: ThreadPool,
    x: torch.Tensor,
    kind: str,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Norm over the last axis; weights [columns], or [groups, columns] that rows use in turn."""
    out = pool.empty(tuple(x.shape))
    columns = x.shape[-1]
    affine = weight if weight is not None else bias
    groups = 1 if affine is None else affine.numel() // columns
    pool.library.native_norm(
        pool.handle,
        data_pointer(x),
        x.numel() // columns,
        columns,
        NORMS[kind],
        eps,
        data_pointer(weight),
        data_pointer(bias),
        groups,
        data_pointer(out),
    )
    return out


class NormedColumns(NamedTuple):
    """Neighbouring columns of rows: `heads` parts, each normed on its own, or copied."""

    first: int
    heads: int
    columns: int  # of a part
    norm: NormPrologue | None
    own: slice  # the columns of every part that are kept


def norm_columns(pool: ThreadPool, x: torch.Tensor, parts: Sequence[NormedColumns]) -> torch.Tensor:
    """Norm columns of x [rows, width] and return what is kept of the parts, side by side."""
    rows, width = x.shape
    spans = [part.own.indices(part.columns)[:2] for part in parts]
    widths = [part.heads * (end - start) for part, (start, end) in zip(parts, spans, strict=True)]
    out = pool.empty((rows, sum(widths)))
    place = 0
    for part, (start, end), columns in zip(parts, spans, widths, strict=True):
        kind, weight, bias, eps = part.norm or (None, None, None, 0.0)
        affine = weight if weight is not None else bias
        pool.library.native_norm_columns(
            pool.handle,
            x.data_ptr() + part.first * x.element_size(),
            rows,
            width,
            part.heads,
            part.columns,
            NORMS[kind],
            eps,
            data_pointer(weight),
            data_pointer(bias),
            1 if affine is None else affine.numel() // part.columns,
            start,
            end,
            out.data_ptr() + place * out.element_size(),
            sum(widths),
        )
        place += columns
    return out


def concatenate(pool: ThreadPool, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the columns of all tensors [rows, width], side by side."""
    rows = len(tensors[0])
    total = sum(x.shape[1] for x in tensors)
    out = pool.empty((rows, total))
    place = 0
    for x in tensors:
        width = x.shape[1]
        pool.library.native_norm_columns(
            pool.handle,
            data_pointer(x),
            rows,
            width,
            1,
            width,
            NORMS[None],
            0.0,
            None,
            None,
            1,
            0,
            width,
            out.data_ptr() + place * out.element_size(),
            total,
        )
        place += width
    return out


def elementwise(
    pool: ThreadPool,
    operation: int,
    x: torch.Tensor,
    y: torch.Tensor | None = None,
    number: float = 0.0,
    activation: ActivationEpilogue = NO_ACTIVATION,
) -> torch.Tensor:
    """Apply an ElementwiseOp (the constants above) to x, and to y or `number` if it takes one."""
    shape = tuple(x.shape)
    if operation == GATED_ACTIVATION:
        shape = (*x.shape[:-1], x.shape[-1] // 2)
    out = pool.empty(shape)
    pool.library.native_elementwise(
        pool.handle,
        operation,
        data_pointer(x),
        data_pointer(y),
        out.numel(),
        shape[-1],
        number,
        ACTIVATIONS[activation.name],
        *activation.params,
        data_pointer(out),
    )
    return out


def activate(pool: ThreadPool, x: torch.Tensor, activation: ActivationEpilogue) -> torch.Tensor:
    """Return activation(x), or activation(gate) * up for x [tokens, gate | up]."""
    operation = GATED_ACTIVATION if activation.gated else ACTIVATION
    return elementwise(pool, operation, x, activation=activation)


def copy_tensor(pool: ThreadPool, target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the bytes of `source` to `target`, a contiguous tensor of the same size."""
    pool.library.native_copy(pool.handle, data_pointer(target), data_pointer(source), target.nbytes)


def add_integer(pool: ThreadPool, x: torch.Tensor, number: int) -> torch.Tensor:
    """Return x + number, in int64."""
    out = pool.empty(tuple(x.shape), torch.int64)
    pool.library.native_add_integer(
        pool.handle, data_pointer(x), x.numel(), number, data_pointer(out)
    )
    return out


# ---- attention -----------------------------------------------------------------------------------


def supports_kv_cache(kv_cache: torch.Tensor) -> bool:
    """Whether the kernels can read and write such a KV cache."""
    if kv_cache.dtype not in KV_CACHE_KINDS or not kv_cache.is_contiguous():
        return False
    # Types narrower than float32 are read in vectors of eight.
    return kv_cache.dtype == torch.float32 or kv_cache.shape[-1] % 8 == 0


def apply_rope_and_cache(
    pool: ThreadPool,
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    transform: QkTransform,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """qkv [tokens, (heads + 2 kv heads) * head dim] -> q [tokens, heads, head dim].

    k and v go to `kv_cache` [2, slots, kv heads, head dim] at `slot_mapping` [tokens]. If qkv has
    more columns, they are copied to `gate` [tokens, columns].
    """
    kv_heads, head_dim = kv_cache.shape[2:]
    num_tokens, width = qkv.shape
    gate_width = 0 if gate is None else gate.shape[1]
    stored_kv_heads = kv_heads if transform.keys_as_values else 2 * kv_heads
    heads = (width - gate_width) // head_dim - stored_kv_heads
    cos, sin = transform.angles or (None, None)
    q_weight, k_weight = transform.weights or (None, None)
    rope_dim = 0 if cos is None else 2 * cos.shape[-1]
    weight_per_head = q_weight is not None and q_weight.dim() > 1
    v_norm_kind = None
    v_weight = None
    v_eps = 0.0
    if transform.v_norm is not None:
        v_norm_kind, v_weight, _, v_eps = transform.v_norm
    q = pool.empty((num_tokens, heads, head_dim))
    pool.library.native_rope_cache(
        pool.handle,
        data_pointer(qkv),
        num_tokens,
        width,
        heads,
        kv_heads,
        head_dim,
        data_pointer(cos),
        data_pointer(sin),
        rope_dim,
        data_pointer(transform.positions),
        transform.interleaved,
        NORMS[transform.norm],
        data_pointer(q_weight),
        data_pointer(k_weight),
        weight_per_head,
        transform.eps,
        transform.norm_after_rope,
        NORMS[v_norm_kind],
        data_pointer(v_weight),
        v_eps,
        transform.keys_as_values,
        data_pointer(transform.query_scales),
        transform.clip or 0.0,
        data_pointer(slot_mapping),
        data_pointer(q),
        data_pointer(gate),
        gate_width,
        data_pointer(kv_cache),
        kv_cache.stride(0),
        KV_CACHE_KINDS[kv_cache.dtype],
    )
    return q


def paged_attention(
    pool: ThreadPool,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    query_spans: torch.Tensor,
    num_decodes: int,
    max_span: int,
    block_tables: torch.Tensor,
    block_size: int,
    seq_lens: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    slopes: torch.Tensor | None,
    window: int | None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    gate_activation: str = "sigmoid",
) -> torch.Tensor:
    """q [tokens, heads, head dim] -> [tokens, heads * head dim].

    `sinks` [heads] join each softmax. `gate` [tokens, heads * head dim], or [tokens, heads],
    multiplies the result after its activation, sigmoid or softplus.

    `query_spans` [n, 4] lists sequence, first token, first position and number of tokens. The first
    `num_decodes` spans have one token each; no span has more than `max_span`. With `seq_lens`
    [sequences] the position of a decode is the last of its sequence, whatever its span says.
    """
    _, heads, head_dim = q.shape
    out = pool.empty((len(q), heads * head_dim))
    work_nanoseconds = 1e3 * len(q) * heads  # a rough estimate
    pool.library.native_attention(
        pool.handle,
        data_pointer(q),
        data_pointer(kv_cache),
        kv_cache.stride(0),
        KV_CACHE_KINDS[kv_cache.dtype],
        heads,
        kv_cache.shape[2],
        head_dim,
        data_pointer(query_spans),
        num_decodes,
        len(query_spans) - num_decodes,
        max_span,
        data_pointer(block_tables),
        block_tables.shape[1],
        block_size,
        data_pointer(seq_lens),
        scale,
        softcap or 0.0,
        data_pointer(slopes),
        window or 0,
        chunk or 0,
        data_pointer(sinks),
        data_pointer(gate),
        1 if gate is None else gate.shape[1] // heads,
        gate_activation == "softplus",
        work_nanoseconds,
        data_pointer(out),
    )
    return out


# ---- decode steps --------------------------------------------------------------------------------


def gather_decode_inputs(
    pool: ThreadPool,
    rows: torch.Tensor,
    last_tokens: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, ...]:
    """Gather the inputs of a decode step of these rows [n].

    block_tables [tables, all rows, width]. Returns token ids, positions and seq lens, each [n],
    slot mappings [tables, n] and block tables [tables, n, width].
    """
    count = len(rows)
    num_tables, num_rows, width = block_tables.shape
    vectors = [pool.empty((count,), torch.int64) for _ in range(3)]
    slot_mapping = pool.empty((num_tables, count), torch.int64)
    blocks = pool.empty((num_tables, count, width), torch.int64)
    pool.library.native_decode_inputs(
        pool.handle,
        data_pointer(rows),
        count,
        data_pointer(last_tokens),
        data_pointer(positions),
        data_pointer(block_tables),
        num_tables,
        num_rows,
        width,
        block_size,
        *map(data_pointer, vectors),
        data_pointer(slot_mapping),
        data_pointer(blocks),
    )
    return *vectors, slot_mapping, blocks


def advance_rows(
    pool: ThreadPool,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    last_tokens: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Store the sampled tokens as the rows' last tokens and advance their positions, in place.

    The last row of the state is the padding row, which never advances.
    """
    pool.library.native_advance(
        pool.handle,
        data_pointer(rows),
        len(rows),
        data_pointer(tokens),
        data_pointer(last_tokens),
        data_pointer(positions),
        len(last_tokens) - 1,
    )


def sample_tokens(
    pool: ThreadPool,
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    state: Sequence[torch.Tensor],
    tokens: torch.Tensor,
    reports: torch.Tensor,
) -> None:
    """Sample tokens [n] from logits [n, vocab]; `state` has the tables of SamplingRows.

    reports [n, ...] are written for rows that ask for log-probabilities.
    """
    pool.library.native_sample(
        pool.handle,
        data_pointer(logits),
        len(logits),
        logits.shape[1],
        data_pointer(rows),
        data_pointer(positions),
        *map(data_pointer, state),
        data_pointer(tokens),
        data_pointer(reports),
    )


def score_tokens(
    pool: ThreadPool,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    num_top: int,
    reports: torch.Tensor,
) -> None:
    """Report the log-probabilities of tokens [n] under logits [n, vocab]."""
    pool.library.native_score(
        pool.handle,
        data_pointer(logits),
        len(logits),
        logits.shape[1],
        data_pointer(tokens),
        num_top,
        data_pointer(reports),
    )


# ---- vocabulary shards ---------------------------------------------------------------------------


def local_vocab_rows(
    pool: ThreadPool, token_ids: torch.Tensor, first: int, end: int
) -> torch.Tensor:
    """Map token ids [n] to rows of the shard [first, end); ids outside of it map to row 0."""
    rows = pool.empty((len(token_ids),), torch.int64)
    pool.library.native_local_vocab_rows(
        pool.handle, data_pointer(token_ids), len(token_ids), first, end, data_pointer(rows)
    )
    return rows


def zero_foreign_rows(
    pool: ThreadPool, x: torch.Tensor, token_ids: torch.Tensor, first: int, end: int
) -> None:
    """Zero the rows of x [n, width] whose token is not in the shard [first, end), in place."""
    pool.library.native_zero_foreign_rows(
        pool.handle,
        data_pointer(token_ids),
        len(token_ids),
        x.shape[1],
        first,
        end,
        data_pointer(x),
    )
