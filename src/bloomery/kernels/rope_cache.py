"""Apply rope to queries and keys, and write keys and values into the paged KV cache.

On a GPU this is one pass over a packed QKV projection: all of it is clipped, heads are normed,
those of queries and keys get rope, keys and values go to the KV cache, and queries are returned. A
gate that follows the values is copied to memory of its own. fusion.QkTransform describes these
steps.
"""

from __future__ import annotations

import torch

from bloomery.fusion import QkTransform
from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    next_power_of_2,
    pdl_options,
    tl,
    use_triton,
    wait_for_previous,
)
from bloomery.kernels.norm import layer_norm_reference, rms_norm_reference
from bloomery.kernels.quantized_kv_cache import (
    as_kernel_input,
    kv_cache_scales,
    quantize_tile,
    write_key_or_value,
)

HEADS_PER_PROGRAM = 8
PROGRAM_SIZE = 2048  # elements of a program's heads, at most: as many as its registers hold
GATE_BLOCK = 1024  # elements of a gate that a program copies


def write_kv_cache(
    k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write k, v [tokens, kv heads, dim] to cache [2, slots, kv heads, dim] at slots [tokens]."""
    write_key_or_value(k, 0, cache, slot_mapping)
    write_key_or_value(v, 1, cache, slot_mapping)


def apply_rope_and_cache(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    transform: QkTransform,
    gate: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return q [tokens, heads, dim] of qkv [tokens, (heads + 2 kv heads) * dim].

    Keys and values go to `cache` at the slots of `slot_mapping` [tokens]. If qkv has more columns,
    they are copied to `gate` [tokens, columns]. `added` is a second part of qkv.
    """
    if use_triton(qkv):
        return apply_rope_and_cache_triton(qkv, cache, slot_mapping, transform, gate, added)
    if added is not None:
        qkv = qkv + added
    return apply_rope_and_cache_reference(qkv, cache, slot_mapping, transform, gate)


def apply_rope_and_cache_reference(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    transform: QkTransform,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """The torch reference of `apply_rope_and_cache`."""
    kv_heads, dim = cache.shape[2:]
    if gate is not None:
        gate_width = gate.shape[1]
        gate.copy_(qkv[:, -gate_width:])
        qkv = qkv[:, :-gate_width]
    if transform.clip is not None:
        qkv = qkv.clamp(-transform.clip, transform.clip)
    x = qkv.unflatten(-1, (-1, dim))  # [tokens, heads + 2 kv heads, dim]
    num_q = count_query_heads(x.shape[1], kv_heads, transform)
    q = x[:, :num_q]
    k = x[:, num_q : num_q + kv_heads]
    v = k if transform.keys_as_values else x[:, num_q + kv_heads :]
    if transform.v_norm is not None:
        v = norm_heads(v, transform.v_norm.kind, transform.v_norm.weight, transform.v_norm.eps)
    if transform.norm is None:
        # Queries and keys have the same transform: apply it to both together.
        qk = transform_heads(x[:, : num_q + kv_heads], None, transform)
        q, k = qk.split((num_q, kv_heads), 1)
    else:
        q_weight, k_weight = transform.weights or (None, None)
        q = transform_heads(q, q_weight, transform)
        k = transform_heads(k, k_weight, transform)
    write_kv_cache(k, v, cache, slot_mapping)
    if transform.query_scales is None:
        return q
    scales = transform.query_scales
    if transform.positions is not None:
        scales = scales[transform.positions]
    return (q.float() * scales[:, None, None]).to(q.dtype)


def count_query_heads(all_heads: int, kv_heads: int, transform: QkTransform) -> int:
    """Return the query heads of a projection that has `all_heads` heads of q | k | v."""
    return all_heads - (kv_heads if transform.keys_as_values else 2 * kv_heads)


def transform_heads(
    x: torch.Tensor, weight: torch.Tensor | None, transform: QkTransform
) -> torch.Tensor:
    """Norm x [tokens, heads, dim] and apply rope, as `transform` describes."""
    if not transform.norm_after_rope:
        x = norm_heads(x, transform.norm, weight, transform.eps)
    if transform.angles is not None:
        cos, sin = transform.angles
        if transform.positions is not None:
            cos = cos[transform.positions]
            sin = sin[transform.positions]
        x = rotate_pairs(x, cos, sin, transform.interleaved)
    if transform.norm_after_rope:
        x = norm_heads(x, transform.norm, weight, transform.eps)
    return x


def norm_heads(
    x: torch.Tensor, kind: str | None, weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Norm each head of x [tokens, heads, dim]; without a kind, return x itself."""
    if kind == "layer":
        return layer_norm_reference(x, weight, None, eps)
    return rms_norm_reference(x, weight, eps) if kind == "rms" else x


def rotate_pairs(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Apply rope to x [tokens, heads, dim]: rotate pairs of dimensions by their angles.

    cos and sin are [tokens, rope dim / 2] in float32. Dimensions past the rope dim stay.
    """
    rope_dim = 2 * cos.shape[-1]
    rope_part = x[..., :rope_dim].float()
    cos = cos[:, None]
    sin = sin[:, None]
    if interleaved:  # a pair is a complex number; multiplying rotates it
        pairs = torch.view_as_complex(rope_part.contiguous().unflatten(-1, (-1, 2)))
        out = torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
    else:
        a, b = rope_part.chunk(2, -1)
        out = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    out = out.to(x.dtype)
    if rope_dim == x.shape[-1]:
        return out
    return torch.cat((out, x[..., rope_dim:]), -1)


def apply_rope_and_cache_triton(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    transform: QkTransform,
    gate: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the kernel."""
    kv_heads, dim = cache.shape[2:]
    tokens = qkv.shape[0]
    gate_width = 0 if gate is None else gate.shape[1]
    heads = count_query_heads((qkv.shape[1] - gate_width) // dim, kv_heads, transform)
    q = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    cos, sin = transform.angles or (q, q)
    q_weight, k_weight = transform.weights or (q, q)
    v_norm = transform.v_norm
    v_weight = None if v_norm is None else v_norm.weight
    cache_scales = kv_cache_scales(cache)
    dim_pow2 = next_power_of_2(dim)
    heads_per_program = min(HEADS_PER_PROGRAM, max(PROGRAM_SIZE // dim_pow2, 1))
    head_programs = -(-(heads + 2 * kv_heads) // heads_per_program)
    gate_programs = -(-gate_width // GATE_BLOCK)
    apply_rope_and_cache_kernel[(tokens, head_programs + gate_programs)](
        qkv,
        qkv if added is None else added,
        q,
        as_kernel_input(cache),
        q if cache_scales is None else cache_scales,
        q if gate is None else gate,
        slot_mapping,
        slot_mapping if transform.positions is None else transform.positions,
        cos,
        sin,
        q_weight,
        k_weight,
        q if v_weight is None else v_weight,
        q if transform.query_scales is None else transform.query_scales,
        qkv.stride(0),
        cache.stride(0),
        cache.shape[1],
        transform.eps,
        0.0 if v_norm is None else v_norm.eps,
        transform.clip or 0.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_POW2=dim_pow2,
        ROPE_DIM=2 * cos.shape[-1] if transform.angles else 0,
        INTERLEAVED=transform.interleaved,
        BY_POSITION=transform.positions is not None,
        NORM=transform.norm,
        NORM_AFTER_ROPE=transform.norm_after_rope,
        HAS_WEIGHT=transform.weights is not None,
        PER_HEAD_WEIGHT=transform.weights is not None and q_weight.dim() > 1,
        V_NORM=None if v_norm is None else v_norm.kind,
        HAS_V_WEIGHT=v_weight is not None,
        HAS_CLIP=transform.clip is not None,
        KEYS_AS_VALUES=transform.keys_as_values,
        SCALE_QUERIES=transform.query_scales is not None,
        QUANTIZED=cache_scales is not None,
        HEADS_PER_PROGRAM=heads_per_program,
        HEAD_PROGRAMS=head_programs,
        GATE_WIDTH=gate_width,
        GATE_BLOCK=GATE_BLOCK,
        HAS_ADDED=added is not None,
        num_warps=2,
        **pdl_options(qkv.device, joins=added is not None),
    )
    return q


@jit(do_not_specialize=["slot_mapping", "positions"])
def apply_rope_and_cache_kernel(
    qkv,  # [tokens, (HEADS + 2 * KV_HEADS) * DIM + GATE_WIDTH], rows `qkv_stride` apart
    added,  # like qkv, if HAS_ADDED: a second part of it
    q,  # [tokens, HEADS, DIM]
    cache,  # [2, num_slots, KV_HEADS, DIM]
    cache_scales,  # [2, num_slots, KV_HEADS] if QUANTIZED
    gate,  # [tokens, GATE_WIDTH]
    slot_mapping,  # [tokens]
    positions,  # [tokens] if BY_POSITION
    cos,  # [tokens, ROPE_DIM / 2], or [positions, ROPE_DIM / 2] if BY_POSITION
    sin,  # like cos
    q_weight,  # [DIM], or [HEADS, DIM] if PER_HEAD_WEIGHT
    k_weight,  # [DIM], or [KV_HEADS, DIM] if PER_HEAD_WEIGHT
    v_weight,  # [DIM] if HAS_V_WEIGHT
    query_scales,  # [tokens], or [positions] if BY_POSITION; if SCALE_QUERIES
    qkv_stride,
    value_offset,  # elements from a key to its value in the cache
    num_slots,
    eps,
    v_eps,
    clip,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BY_POSITION: tl.constexpr,
    NORM: tl.constexpr,
    NORM_AFTER_ROPE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    PER_HEAD_WEIGHT: tl.constexpr,
    V_NORM: tl.constexpr,
    HAS_V_WEIGHT: tl.constexpr,
    HAS_CLIP: tl.constexpr,
    KEYS_AS_VALUES: tl.constexpr,
    SCALE_QUERIES: tl.constexpr,
    QUANTIZED: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    HEAD_PROGRAMS: tl.constexpr,
    GATE_WIDTH: tl.constexpr,
    GATE_BLOCK: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program handles HEADS_PER_PROGRAM heads of one token: of queries, keys or values.

    Dimension d of the result is x[d] cos + x[partner of d] sin, where the sign of sin depends on
    the half. Past ROPE_DIM it is x[d]. The last programs of a token copy its gate.
    """
    launch_dependents(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    V_START: tl.constexpr = HEADS + KV_HEADS
    if GATE_WIDTH > 0:
        gate_program = tl.program_id(1) - HEAD_PROGRAMS
        if gate_program >= 0:
            GATE_START: tl.constexpr = (V_START if KEYS_AS_VALUES else V_START + KV_HEADS) * DIM
            column = gate_program * GATE_BLOCK + tl.arange(0, GATE_BLOCK)
            in_gate = column < GATE_WIDTH
            gate_row = token * qkv_stride + GATE_START
            gate_values = load_sum(qkv, added, gate_row + column, in_gate, HAS_ADDED)
            tl.store(gate + token * GATE_WIDTH + column, gate_values, mask=in_gate)
            return
    head = tl.program_id(1) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
    d = tl.arange(0, DIM_POW2)
    valid = (head < V_START + KV_HEADS)[:, None] & (d < DIM)[None, :]
    is_q_or_k = (head < V_START)[:, None]
    source_head = head
    if KEYS_AS_VALUES:
        source_head = tl.where(head < V_START, head, head - KV_HEADS)
    source = token * qkv_stride + source_head[:, None] * DIM
    x = load_sum(qkv, added, source + d[None, :], valid, HAS_ADDED)
    if HAS_CLIP:
        x = clip_tile(x, clip)
    y = x.to(tl.float32)
    if V_NORM is not None:
        v_mean, v_inverse_std = norm_statistics(y, valid, v_eps, V_NORM, DIM)
        normed_value = (y - v_mean) * v_inverse_std
        if HAS_V_WEIGHT:
            normed_value *= tl.load(v_weight + d, mask=d < DIM, other=0.0)[None, :]
    if NORM is not None and not NORM_AFTER_ROPE:
        mean, inverse_std = norm_statistics(y, valid, eps, NORM, DIM)
        normed = norm_tile(
            y,
            mean,
            inverse_std,
            head,
            d,
            q_weight,
            k_weight,
            HEADS,
            KV_HEADS,
            DIM,
            HAS_WEIGHT,
            PER_HEAD_WEIGHT,
        )
        y = tl.where(is_q_or_k, normed, y)
        y = y.to(x.dtype).to(tl.float32)
    table_row = tl.load(positions + token).to(tl.int64) if BY_POSITION else token
    if ROPE_DIM > 0:
        is_first = d % 2 == 0 if INTERLEAVED else d < ROPE_DIM // 2
        distance = 1 if INTERLEAVED else ROPE_DIM // 2
        partner = tl.where(d < ROPE_DIM, tl.where(is_first, d + distance, d - distance), d)
        angle = d // 2 if INTERLEAVED else tl.where(is_first, d, d - distance)
        cos_row = cos + table_row * (ROPE_DIM // 2)
        sin_row = sin + table_row * (ROPE_DIM // 2)
        c = tl.load(cos_row + angle, mask=d < ROPE_DIM, other=1.0)[None, :]
        s = tl.load(sin_row + angle, mask=d < ROPE_DIM, other=0.0)[None, :]
        z = load_sum(qkv, added, source + partner[None, :], valid, HAS_ADDED)
        if HAS_CLIP:
            z = clip_tile(z, clip)
        z = z.to(tl.float32)
        if NORM is not None and not NORM_AFTER_ROPE:
            z = norm_tile(
                z,
                mean,
                inverse_std,
                head,
                partner,
                q_weight,
                k_weight,
                HEADS,
                KV_HEADS,
                DIM,
                HAS_WEIGHT,
                PER_HEAD_WEIGHT,
            )
            z = z.to(x.dtype).to(tl.float32)
        y = tl.where(is_q_or_k, y * c + z * tl.where(is_first[None, :], -s, s), y)
    if NORM is not None and NORM_AFTER_ROPE:
        y = y.to(x.dtype).to(tl.float32)
        mean, inverse_std = norm_statistics(y, valid, eps, NORM, DIM)
        normed = norm_tile(
            y,
            mean,
            inverse_std,
            head,
            d,
            q_weight,
            k_weight,
            HEADS,
            KV_HEADS,
            DIM,
            HAS_WEIGHT,
            PER_HEAD_WEIGHT,
        )
        y = tl.where(is_q_or_k, normed, y)
    if V_NORM is not None:
        y = tl.where(is_q_or_k, y, normed_value)
    if SCALE_QUERIES:
        factor = tl.load(query_scales + table_row)
        y = tl.where((head < HEADS)[:, None], y.to(x.dtype).to(tl.float32) * factor, y)
    y = y.to(x.dtype)
    q_heads = q + (token * HEADS + head)[:, None] * DIM
    tl.store(q_heads + d[None, :], y, mask=valid & (head < HEADS)[:, None])
    slot = tl.load(slot_mapping + token).to(tl.int64)
    k_head = head - HEADS
    v_head = head - V_START
    destination = cache + slot * (KV_HEADS * DIM) + d[None, :]
    if QUANTIZED:
        y_float = y.to(tl.float32)
        max_abs = tl.max(tl.where(valid, tl.abs(y_float), 0.0), 1)
        y, scale = quantize_tile(y_float, max_abs, cache.dtype.element_ty)
        is_key = (k_head >= 0) & (k_head < KV_HEADS)
        is_value = (v_head >= 0) & (v_head < KV_HEADS)
        slot_scales = cache_scales + slot * KV_HEADS
        tl.store(slot_scales + k_head, scale, mask=is_key)
        tl.store(slot_scales + num_slots * KV_HEADS + v_head, scale, mask=is_value)
    else:
        y = y.to(cache.dtype.element_ty)
    key_mask = valid & is_q_or_k & (k_head >= 0)[:, None]
    value_mask = valid & (v_head >= 0)[:, None]
    tl.store(destination + k_head[:, None] * DIM, y, mask=key_mask)
    tl.store(destination + value_offset + v_head[:, None] * DIM, y, mask=value_mask)


@jit
def load_sum(x, added, offset, mask, HAS_ADDED: tl.constexpr):
    """Load values of x, or of x + added, in the type of x."""
    values = tl.load(x + offset, mask=mask, other=0.0)
    if HAS_ADDED:
        other = tl.load(added + offset, mask=mask, other=0.0)
        values = (values.to(tl.float32) + other.to(tl.float32)).to(values.dtype)
    return values


@jit
def clip_tile(x, clip):
    return tl.minimum(tl.maximum(x.to(tl.float32), -clip), clip).to(x.dtype)


@jit
def norm_statistics(x, valid, eps, NORM: tl.constexpr, DIM: tl.constexpr):
    """Return the mean and the inverse standard deviation [heads, 1] of each head of x."""
    mean = tl.zeros([x.shape[0], 1], tl.float32)
    if NORM == "layer":
        mean = tl.sum(x, 1)[:, None] / DIM
    centered = tl.where(valid, x - mean, 0.0)
    inverse_std = tl.rsqrt(tl.sum(centered * centered, 1)[:, None] / DIM + eps)
    return mean, inverse_std


@jit
def norm_tile(
    x,
    mean,
    inverse_std,
    head,
    d,
    q_weight,
    k_weight,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    PER_HEAD_WEIGHT: tl.constexpr,
):
    """Norm x [heads, dimensions d] by the statistics of its heads."""
    x = (x - mean) * inverse_std
    if HAS_WEIGHT:
        weight_stride: tl.constexpr = DIM if PER_HEAD_WEIGHT else 0
        k_head = head - HEADS
        in_head = (d < DIM)[None, :]
        is_query = (head < HEADS)[:, None]
        is_key = ((k_head >= 0) & (k_head < KV_HEADS))[:, None]
        q_weights = q_weight + head[:, None] * weight_stride
        k_weights = k_weight + k_head[:, None] * weight_stride
        w = tl.load(q_weights + d[None, :], mask=in_head & is_query, other=0.0)
        w += tl.load(k_weights + d[None, :], mask=in_head & is_key, other=0.0)
        x = x * w
    return x
