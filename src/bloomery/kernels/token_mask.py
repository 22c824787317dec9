"""Forbids the tokens that a grammar does not allow, in place, before sampling.

A mask has one bit for each token: bit i of its word w is token 32 w + i. The logits of tokens whose
bit is 0 become -inf. The samplers then need to know nothing about grammars.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    pdl_options,
    tl,
    use_triton,
    wait_for_previous,
)
from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool

TOKENS_PER_PROGRAM = 4096


class TokenMasks(NamedTuple):
    """Masks on the device, and the row of logits that each of them belongs to."""

    words: torch.Tensor  # [masks, words] int32
    slots: torch.Tensor  # [masks] int64, rows of the logits


def mask_logits(logits: torch.Tensor, masks: TokenMasks, pool: ThreadPool | None = None) -> None:
    """Change logits [n, vocab] in place: -inf where the mask of a row forbids the token."""
    if pool is not None and pool.accepts(logits):
        ops.mask_logits(pool, logits, masks.words, masks.slots)
    elif use_triton(logits):
        mask_logits_triton(logits, masks)
    else:
        mask_logits_reference(logits, masks)


def mask_logits_reference(logits: torch.Tensor, masks: TokenMasks) -> None:
    """The same as `mask_logits`, in torch."""
    vocab_size = logits.shape[1]
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (masks.words.unsqueeze(-1) >> bits) & 1
    allowed = allowed.flatten(1)[:, :vocab_size].bool()
    logits[masks.slots] = logits[masks.slots].masked_fill(~allowed, -torch.inf)


def mask_logits_triton(logits: torch.Tensor, masks: TokenMasks) -> None:
    """Run the kernel."""
    vocab_size = logits.shape[1]
    num_programs = -(-vocab_size // TOKENS_PER_PROGRAM)
    mask_kernel[(len(masks.slots), num_programs)](
        logits,
        masks.words,
        masks.slots,
        logits.stride(0),
        masks.words.stride(0),
        vocab_size,
        WIDTH=TOKENS_PER_PROGRAM,
        num_warps=4,
        **pdl_options(logits.device),
    )


@jit
def mask_kernel(
    logits,  # [n, vocab]
    words,  # [masks, words]
    slots,  # [masks]
    logits_stride,
    words_stride,
    vocab_size,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program masks WIDTH tokens of one row of logits."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    mask = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + mask).to(tl.int64)
    tokens = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = tokens < vocab_size
    word = tl.load(words + mask * words_stride + (tokens >> 5), mask=inside, other=0)
    forbidden = inside & (((word >> (tokens & 31)) & 1) == 0)
    no_chance = tl.full([WIDTH], -float("inf"), logits.dtype.element_ty)
    tl.store(logits + slot * logits_stride + tokens, no_chance, mask=forbidden)
