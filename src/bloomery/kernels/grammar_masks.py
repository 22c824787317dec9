"""Puts the masks of grammars into the rows of the requests they are for.

The host sends masks while the device computes the forward pass, into one buffer. A CUDA graph can
then take them from there: the buffer says for each mask which row it is for. This file must not
know grammars.
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
from bloomery.kernels.sampling_rows import (
    FLAGS,
    NUM_BIT_SETS,
    NUM_INTS,
    PERMITTED,
    PERMITTED_FLAG,
    SamplingRows,
)

UNUSED = -1  # the row of a place without a mask


class SentMasks(NamedTuple):
    """The masks of one step, and the row of each; both lie in one buffer, the rows first."""

    buffer: torch.Tensor  # int32
    rows: torch.Tensor  # [masks]
    masks: torch.Tensor  # [masks, words]; bit i of word w permits token 32 w + i

    @classmethod
    def allocate(
        cls, max_masks: int, num_words: int, device: torch.device, pin_memory: bool = False
    ) -> SentMasks:
        """Allocate a buffer in which no place has a mask."""
        buffer = torch.full(
            (max_masks * (1 + num_words),),
            UNUSED,
            dtype=torch.int32,
            device=device,
            pin_memory=pin_memory,
        )
        return cls(buffer, buffer[:max_masks], buffer[max_masks:].view(max_masks, num_words))

    def copy_from(self, source: SentMasks, num_masks: int) -> None:
        """Queue a copy of the first masks and of all rows."""
        length = len(self.rows) + num_masks * self.masks.shape[1]
        self.buffer[:length].copy_(source.buffer[:length], non_blocking=True)


def apply_masks(sent: SentMasks, state: SamplingRows, max_used: int) -> None:
    """Permit only the tokens of each mask in its row; places from `max_used` on are not used.

    The masks are taken out of the buffer: the next call finds none unless others were sent.
    """
    if not use_triton(sent.buffer):
        apply_masks_reference(sent, state, max_used)
        return
    launch_apply_masks(sent, state, max_used)


def launch_apply_masks(sent: SentMasks, state: SamplingRows, max_used: int) -> None:
    """Launch the kernel of `apply_masks`."""
    num_words = sent.masks.shape[1]
    apply_masks_kernel[(max_used,)](
        sent.rows,
        sent.masks,
        state.ints,
        state.bits,
        num_words,
        TILE=1024,
        num_warps=4,
        **pdl_options(sent.buffer.device),
    )


def apply_masks_reference(sent: SentMasks, state: SamplingRows, max_used: int) -> None:
    """The same as `apply_masks`, in torch."""
    used = sent.rows[:max_used] != UNUSED
    rows = sent.rows[:max_used][used].long()
    state.bits[rows, PERMITTED] = sent.masks[:max_used][used]
    state.ints[rows, FLAGS] |= PERMITTED_FLAG
    sent.rows[:max_used] = UNUSED


@jit
def apply_masks_kernel(
    sent_rows,  # [masks]
    masks,  # [masks, num_words]
    ints,  # of SamplingRows
    bits,  # of SamplingRows
    num_words,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
    FLAGS: tl.constexpr = FLAGS,
    NUM_BIT_SETS: tl.constexpr = NUM_BIT_SETS,
    NUM_INTS: tl.constexpr = NUM_INTS,
    PERMITTED: tl.constexpr = PERMITTED,
    PERMITTED_FLAG: tl.constexpr = PERMITTED_FLAG,
    UNUSED: tl.constexpr = UNUSED,
):
    """One program takes one mask."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(sent_rows + place).to(tl.int64)
    if row != UNUSED:
        tl.store(sent_rows + place, UNUSED)
        flags = ints + row * NUM_INTS + FLAGS
        tl.store(flags, tl.load(flags) | PERMITTED_FLAG)
        masks += place * num_words
        permitted = bits + (row * NUM_BIT_SETS + PERMITTED) * num_words
        for start in range(0, num_words, TILE):
            i = start + tl.arange(0, TILE)
            mask = tl.load(masks + i, mask=i < num_words, other=0)
            tl.store(permitted + i, mask, mask=i < num_words)
