"""Two attentions of the same queries over different keys made into one: each weighs by the sum behind its softmax."""

from __future__ import annotations

import torch

from bloomery.kernels.launch import begin, fused, jit, overlap, power_of_two, tl, wait


def merge(
    a: torch.Tensor, b: torch.Tensor, log_a: torch.Tensor, log_b: torch.Tensor
) -> torch.Tensor:
    """a, b [tokens, heads, dim] and the logarithms of their sums [heads, tokens], float32 -> [tokens, heads, dim]."""
    return (merge_rows if fused(a) else merge_reference)(a, b, log_a, log_b)


def merge_reference(
    a: torch.Tensor, b: torch.Tensor, log_a: torch.Tensor, log_b: torch.Tensor
) -> torch.Tensor:
    share = torch.sigmoid(log_a - log_b).t()[..., None]
    return torch.lerp(b.float(), a.float(), share).to(a.dtype)


def merge_rows(
    a: torch.Tensor, b: torch.Tensor, log_a: torch.Tensor, log_b: torch.Tensor
) -> torch.Tensor:
    """The kernel."""
    a, b, log_a, log_b = (part.contiguous() for part in (a, b, log_a, log_b))
    tokens, heads, dim = a.shape
    out = torch.empty_like(a)
    merge_kernel[(tokens,)](
        a,
        b,
        log_a,
        log_b,
        out,
        tokens,
        HEADS=heads,
        HEADS_UP=power_of_two(heads),
        DIM=dim,
        DIM_UP=power_of_two(dim),
        num_warps=4,
        **overlap(a.device),
    )
    return out


@jit(do_not_specialize=["tokens"])
def merge_kernel(
    a,
    b,
    log_a,
    log_b,
    out,
    tokens,
    HEADS: tl.constexpr,
    HEADS_UP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_UP: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_UP)
    d = tl.arange(0, DIM_UP)
    here = (head < HEADS)[:, None] & (d < DIM)[None, :]
    at = token * (HEADS * DIM) + head[:, None] * DIM + d[None, :]
    p = tl.load(log_a + head * tokens + token, mask=head < HEADS, other=0.0)
    q = tl.load(log_b + head * tokens + token, mask=head < HEADS, other=0.0)
    share = (1.0 / (1.0 + tl.exp(q - p)))[:, None]
    x = tl.load(a + at, mask=here, other=0.0).to(tl.float32)
    y = tl.load(b + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + at, (y + share * (x - y)).to(out.dtype.element_ty), mask=here)
