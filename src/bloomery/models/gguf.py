"""Blocks of GGUF's quantised types to float32 values, on whatever device the blocks lie.

Each decoder takes uint8 [blocks, bytes] and gives float32 [blocks, values], bit for bit what the gguf package gives.
Types that quant/gguf_blocks does not know go through that package.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bloomery.artifacts.gguf import BLOCKS
from bloomery.quant.gguf_blocks import STEPS

Decoder = Callable[[torch.Tensor], torch.Tensor]


def decoder(kind: str) -> Decoder | None:
    """How to read a quantised type, or None for one that nobody here can read."""
    if kind in STEPS:
        return lambda blocks: STEPS[kind](blocks).values()
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    values, size = BLOCKS[kind]
    number = GGMLQuantizationType.__members__.get(kind)
    if number is None:
        return None

    def decode(blocks: torch.Tensor) -> torch.Tensor:
        # The package loops over groups of rows: one long row is one group.
        row = dequantize(blocks.cpu().numpy().reshape(1, -1), number)
        return torch.from_numpy(row).view(-1, values).to(blocks.device)

    try:
        decode(torch.zeros(1, size, dtype=torch.uint8))
    except NotImplementedError:
        return None
    return decode
