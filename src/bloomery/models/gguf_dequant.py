"""Dequantizes GGUF blocks to float32, on the device where the blocks are.

Each function takes uint8 [blocks, bytes] and returns float32 [blocks, values], bit for bit what the
gguf package returns. Types that quant/gguf_blocks does not support go through that package.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bloomery.artifacts.gguf import GGML_BLOCKS
from bloomery.quant.gguf_blocks import BLOCK_DECODERS

Dequantize = Callable[[torch.Tensor], torch.Tensor]


def find_dequantizer(kind: str) -> Dequantize | None:
    """Return the function that dequantizes a type; None if the type cannot be read."""
    if kind in BLOCK_DECODERS:
        return lambda blocks: BLOCK_DECODERS[kind](blocks).dequantize()
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    num_values, num_bytes = GGML_BLOCKS[kind]
    type_number = GGMLQuantizationType.__members__.get(kind)
    if type_number is None:
        return None

    def dequantize_blocks(blocks: torch.Tensor) -> torch.Tensor:
        # The package loops over groups of rows: one long row is one group.
        one_row = blocks.cpu().numpy().reshape(1, -1)
        values = dequantize(one_row, type_number)
        return torch.from_numpy(values).view(-1, num_values).to(blocks.device)

    try:
        dequantize_blocks(torch.zeros(1, num_bytes, dtype=torch.uint8))
    except NotImplementedError:
        return None
    return dequantize_blocks
