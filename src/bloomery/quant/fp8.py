"""FP8 (E4M3): quantization with a scale per row, and checkpoints with coarser or finer scales.

Kernels may quantize the input to FP8 as well. The format intends this, and it makes large batches
faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bloomery.kernels.packed import FP8_BLOCK_SIZE, Fp8Weight
from bloomery.kernels.quantize_rows import FP8, quantize_rows
from bloomery.quant.base import (
    FLOAT_DTYPES,
    CheckpointTensors,
    LinearSpec,
    get_tensor,
    load_rows,
    mark_as_used,
)
from bloomery.quant.lazy_tensor import Range
from bloomery.quant.loaded_weight import expand_single_block_column
from bloomery.quant.packed_matrix import PackedMatrix, open_unquantized


def quantize_fp8(weight: torch.Tensor) -> Fp8Weight:
    """Quantize weights [out, in] with one scale per row."""
    codes, scale = quantize_rows(weight)
    return Fp8Weight(codes, scale)


class Fp8Format:
    """`weight` in FP8 with a scale tensor, whose name depends on the writer.

    `weight_scale_inv` has one scale per 128 x 128 block (DeepSeek, Qwen). `weight_scale` has one
    per row, or one for the matrix.
    """

    def open_matrix(self, tensors: CheckpointTensors, linear: LinearSpec) -> PackedMatrix:
        for suffix in ("weight_scale_inv", "weight_scale"):
            scale_name = f"{linear.name}.{suffix}"
            if tensors.has(scale_name):
                return open_fp8(tensors, linear, scale_name)
        return open_unquantized(tensors, linear)


def open_fp8(tensors: CheckpointTensors, linear: LinearSpec, scale_name: str) -> PackedMatrix:
    """Codes are FP8 [out, in]. The scale is [1], [out, 1] or one per 128 x 128 block."""
    rows, columns = linear.shape
    weight_name = f"{linear.name}.weight"
    weight = get_tensor(
        tensors,
        weight_name,
        linear.shape,
        (FP8,),
        expert=linear.expert,
    )
    mark_as_used(tensors, linear.name, "input_scale", "input_scale_ub", "weight_zero_point")
    row_blocks = -(-rows // FP8_BLOCK_SIZE)
    column_blocks = -(-columns // FP8_BLOCK_SIZE)
    block_shape = (row_blocks, column_blocks)
    shape: tuple[int, ...] = tensors.shape(scale_name)
    per_row_shapes = ((rows, 1), (rows,))
    per_matrix_shapes = ((1,), (1, 1))
    if shape not in (*per_row_shapes, *per_matrix_shapes):
        shape = block_shape
    is_blockwise = shape == block_shape and shape != (rows, 1)
    scale_dtypes = (*FLOAT_DTYPES, torch.float8_e8m0fnu)
    stored_scale = get_tensor(tensors, scale_name, shape, scale_dtypes)

    def load_scale(ranges: Sequence[Range], num_rows: int, device: torch.device) -> torch.Tensor:
        """Load scales [rows, 1], or [row blocks, column blocks] if they are blockwise."""
        if is_blockwise:
            block_ranges = []
            for start, end in ranges:
                first_block = start // FP8_BLOCK_SIZE
                end_block = -(-end // FP8_BLOCK_SIZE)
                block_ranges.append((first_block, end_block))
            scale = stored_scale.rows(block_ranges).load(torch.float32, device)
            return scale.view(-1, column_blocks)
        if shape[0] == 1:
            single = stored_scale.load(torch.float32, device)
            return single.expand(num_rows, 1).contiguous()
        scale = stored_scale.rows(ranges).load(torch.float32, device)
        return scale.view(-1, 1)

    def load(ranges: Sequence[Range], dtype: torch.dtype, device: torch.device) -> Fp8Weight:
        codes = load_rows(weight, ranges, device)
        scale = load_scale(ranges, len(codes), device)
        return expand_single_block_column(Fp8Weight(codes, scale))

    return PackedMatrix.from_loader(linear, load, has_row_blocks=is_blockwise)
