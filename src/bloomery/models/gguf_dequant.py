"""Dequantizes GGUF blocks to float32, on the device where the blocks are.

Each function takes uint8 [blocks, bytes] and returns float32 [blocks, values], bit for bit what the
gguf package returns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bloomery.quant.gguf_blocks import BLOCK_DECODERS

Dequantize = Callable[[torch.Tensor], torch.Tensor]


def find_dequantizer(kind: str) -> Dequantize | None:
    """Return the function that dequantizes a type; None if the type cannot be read."""
    decode = BLOCK_DECODERS.get(kind)
    if decode is None:
        return None
    return lambda blocks: decode(blocks).dequantize()
