"""Merge two attention results of the same queries over disjoint sets of keys into one.

Each result comes with the log-sum-exp of its scores; the merged result is the average of both,
weighted by exp(log-sum-exp).
"""

from __future__ import annotations

import torch

from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    next_power_of_2,
    pdl_options,
    tl,
    use_triton,
    wait_for_previous,
)


def merge_attention_states(
    a: torch.Tensor, b: torch.Tensor, lse_a: torch.Tensor, lse_b: torch.Tensor
) -> torch.Tensor:
    """Merge a, b [tokens, heads, dim] by their log-sum-exps [heads, tokens] in float32."""
    if use_triton(a):
        return merge_attention_states_triton(a, b, lse_a, lse_b)
    return merge_attention_states_reference(a, b, lse_a, lse_b)


def merge_attention_states_reference(
    a: torch.Tensor, b: torch.Tensor, lse_a: torch.Tensor, lse_b: torch.Tensor
) -> torch.Tensor:
    """The torch reference of `merge_attention_states`."""
    weight_a = torch.sigmoid(lse_a - lse_b).t()[..., None]
    return torch.lerp(b.float(), a.float(), weight_a).to(a.dtype)


def merge_attention_states_triton(
    a: torch.Tensor, b: torch.Tensor, lse_a: torch.Tensor, lse_b: torch.Tensor
) -> torch.Tensor:
    """Run the kernel."""
    a = a.contiguous()
    tokens, heads, dim = a.shape
    out = torch.empty_like(a)
    merge_attention_states_kernel[(tokens,)](
        a,
        b.contiguous(),
        lse_a.contiguous(),
        lse_b.contiguous(),
        out,
        tokens,
        HEADS=heads,
        HEADS_POW2=next_power_of_2(heads),
        DIM=dim,
        DIM_POW2=next_power_of_2(dim),
        num_warps=4,
        **pdl_options(a.device),
    )
    return out


@jit(do_not_specialize=["tokens"])
def merge_attention_states_kernel(
    a,  # [tokens, HEADS, DIM]
    b,  # [tokens, HEADS, DIM]
    lse_a,  # [HEADS, tokens]
    lse_b,  # [HEADS, tokens]
    out,  # [tokens, HEADS, DIM]
    tokens,
    HEADS: tl.constexpr,
    HEADS_POW2: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program merges all heads of one token."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_POW2)
    d = tl.arange(0, DIM_POW2)
    valid = (head < HEADS)[:, None] & (d < DIM)[None, :]
    offset = token * (HEADS * DIM) + head[:, None] * DIM + d[None, :]
    sum_a = tl.load(lse_a + head * tokens + token, mask=head < HEADS, other=0.0)
    sum_b = tl.load(lse_b + head * tokens + token, mask=head < HEADS, other=0.0)
    weight_a = (1.0 / (1.0 + tl.exp(sum_b - sum_a)))[:, None]
    x = tl.load(a + offset, mask=valid, other=0.0).to(tl.float32)
    y = tl.load(b + offset, mask=valid, other=0.0).to(tl.float32)
    merged = y + weight_a * (x - y)
    tl.store(out + offset, merged.to(out.dtype.element_ty), mask=valid)
