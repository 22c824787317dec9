"""Apply rope to queries and keys, and write keys and values into the paged KV cache.

On a GPU this is one pass over a packed QKV projection: all of it is clipped, the heads of queries
and keys are normed and get rope, keys and values go to the KV cache, and queries are returned.
fusion.QkTransform describes these steps.
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
) -> torch.Tensor:
    """Return q [tokens, heads, dim] of qkv [tokens, (heads + 2 kv heads) * dim].

    Keys and values go to `cache` at the slots of `slot_mapping` [tokens].
    """
    if use_triton(qkv):
        return apply_rope_and_cache_triton(qkv, cache, slot_mapping, transform)
    return apply_rope_and_cache_reference(qkv, cache, slot_mapping, transform)


def apply_rope_and_cache_reference(
    qkv: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, transform: QkTransform
) -> torch.Tensor:
    """The torch reference of `apply_rope_and_cache`."""
    kv_heads, dim = cache.shape[2:]
    if transform.clip is not None:
        qkv = qkv.clamp(-transform.clip, transform.clip)
    x = qkv.unflatten(-1, (-1, dim))  # [tokens, heads + 2 kv heads, dim]
    num_q = x.shape[1] - 2 * kv_heads
    q, k, v = x.split((num_q, kv_heads, kv_heads), 1)
    if transform.norm is None:
        # Queries and keys have the same transform: apply it to both together.
        qk = transform_heads(x[:, : num_q + kv_heads], None, transform)
        q, k = qk.split((num_q, kv_heads), 1)
    else:
        q_weight, k_weight = transform.weights or (None, None)
        q = transform_heads(q, q_weight, transform)
        k = transform_heads(k, k_weight, transform)
    write_kv_cache(k, v, cache, slot_mapping)
    return q


def transform_heads(
    x: torch.Tensor, weight: torch.Tensor | None, transform: QkTransform
) -> torch.Tensor:
    """Norm x [tokens, heads, dim] and apply rope, as `transform` describes."""
    if transform.norm == "layer":
        x = layer_norm_reference(x, weight, None, transform.eps)
    elif transform.norm == "rms":
        x = rms_norm_reference(x, weight, transform.eps)
    if transform.angles is None:
        return x
    cos, sin = transform.angles
    if transform.positions is not None:
        cos = cos[transform.positions]
        sin = sin[transform.positions]
    return rotate_pairs(x, cos, sin, transform.interleaved)


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
    qkv: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, transform: QkTransform
) -> torch.Tensor:
    """Run the kernel."""
    kv_heads, dim = cache.shape[2:]
    tokens = qkv.shape[0]
    all_heads = qkv.shape[1] // dim
    heads = all_heads - 2 * kv_heads
    q = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    cos, sin = transform.angles or (q, q)
    q_weight, k_weight = transform.weights or (q, q)
    cache_scales = kv_cache_scales(cache)
    apply_rope_and_cache_kernel[(tokens, -(-all_heads // HEADS_PER_PROGRAM))](
        qkv,
        q,
        as_kernel_input(cache),
        q if cache_scales is None else cache_scales,
        slot_mapping,
        slot_mapping if transform.positions is None else transform.positions,
        cos,
        sin,
        q_weight,
        k_weight,
        qkv.stride(0),
        cache.stride(0),
        cache.shape[1],
        transform.eps,
        transform.clip or 0.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_POW2=next_power_of_2(dim),
        ROPE_DIM=2 * cos.shape[-1] if transform.angles else 0,
        INTERLEAVED=transform.interleaved,
        BY_POSITION=transform.positions is not None,
        NORM=transform.norm,
        HAS_WEIGHT=transform.weights is not None,
        PER_HEAD_WEIGHT=transform.weights is not None and q_weight.dim() > 1,
        HAS_CLIP=transform.clip is not None,
        QUANTIZED=cache_scales is not None,
        HEADS_PER_PROGRAM=HEADS_PER_PROGRAM,
        num_warps=2,
        **pdl_options(qkv.device),
    )
    return q


@jit(do_not_specialize=["slot_mapping", "positions"])
def apply_rope_and_cache_kernel(
    qkv,  # [tokens, (HEADS + 2 * KV_HEADS) * DIM], rows `qkv_stride` apart
    q,  # [tokens, HEADS, DIM]
    cache,  # [2, num_slots, KV_HEADS, DIM]
    cache_scales,  # [2, num_slots, KV_HEADS] if QUANTIZED
    slot_mapping,  # [tokens]
    positions,  # [tokens] if BY_POSITION
    cos,  # [tokens, ROPE_DIM / 2], or [positions, ROPE_DIM / 2] if BY_POSITION
    sin,  # like cos
    q_weight,  # [DIM], or [HEADS, DIM] if PER_HEAD_WEIGHT
    k_weight,  # [DIM], or [KV_HEADS, DIM] if PER_HEAD_WEIGHT
    qkv_stride,
    value_offset,  # elements from a key to its value in the cache
    num_slots,
    eps,
    clip,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BY_POSITION: tl.constexpr,
    NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    PER_HEAD_WEIGHT: tl.constexpr,
    HAS_CLIP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program handles HEADS_PER_PROGRAM heads of one token: of queries, keys or values.

    Dimension d of the result is x[d] cos + x[partner of d] sin, where the sign of sin depends on
    the half. Past ROPE_DIM it is x[d].
    """
    launch_dependents(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
    d = tl.arange(0, DIM_POW2)
    valid = (head < HEADS + 2 * KV_HEADS)[:, None] & (d < DIM)[None, :]
    is_q_or_k = (head < HEADS + KV_HEADS)[:, None]
    source = qkv + token * qkv_stride + head[:, None] * DIM
    x = tl.load(source + d[None, :], mask=valid, other=0.0)
    if HAS_CLIP:
        x = clip_tile(x, clip)
    y = x.to(tl.float32)
    if NORM is not None:
        mean = tl.sum(y, 1)[:, None] / DIM if NORM == "layer" else 0.0
        centered = tl.where(valid, y - mean, 0.0)
        inverse_std = tl.rsqrt(tl.sum(centered * centered, 1)[:, None] / DIM + eps)
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
    if ROPE_DIM > 0:
        is_first = d % 2 == 0 if INTERLEAVED else d < ROPE_DIM // 2
        distance = 1 if INTERLEAVED else ROPE_DIM // 2
        partner = tl.where(d < ROPE_DIM, tl.where(is_first, d + distance, d - distance), d)
        angle = d // 2 if INTERLEAVED else tl.where(is_first, d, d - distance)
        angle_row = tl.load(positions + token).to(tl.int64) if BY_POSITION else token
        cos_row = cos + angle_row * (ROPE_DIM // 2)
        sin_row = sin + angle_row * (ROPE_DIM // 2)
        c = tl.load(cos_row + angle, mask=d < ROPE_DIM, other=1.0)[None, :]
        s = tl.load(sin_row + angle, mask=d < ROPE_DIM, other=0.0)[None, :]
        z = tl.load(source + partner[None, :], mask=valid, other=0.0)
        if HAS_CLIP:
            z = clip_tile(z, clip)
        z = z.to(tl.float32)
        if NORM is not None:
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
    y = y.to(x.dtype)
    q_heads = q + (token * HEADS + head)[:, None] * DIM
    tl.store(q_heads + d[None, :], y, mask=valid & (head < HEADS)[:, None])
    slot = tl.load(slot_mapping + token).to(tl.int64)
    k_head = head - HEADS
    v_head = head - HEADS - KV_HEADS
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
def clip_tile(x, clip):
    return tl.minimum(tl.maximum(x.to(tl.float32), -clip), clip).to(x.dtype)


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
