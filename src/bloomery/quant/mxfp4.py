"""MXFP4 checkpoints: 4-bit floats (E2M1) with a power of two as the scale of 32 columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bloomery.kernels.packed import CodebookWeight
from bloomery.quant.base import CheckpointTensors, LinearSpec, get_tensor, load_rows
from bloomery.quant.lazy_tensor import Range
from bloomery.quant.packed_matrix import PackedMatrix, open_unquantized

BLOCK_SIZE = 32  # columns that share a scale
# Values of the codes 0 .. 7. Codes 8 .. 15 are their negatives.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_NEGATIVES = tuple(-value for value in E2M1_MAGNITUDES)
E2M1 = E2M1_MAGNITUDES + E2M1_NEGATIVES
# Names of codes and scales, which depend on the writer.
STACKED_NAMES = ("{}_blocks", "{}_scales")  # of stacked experts
TENSOR_NAMES = (
    ("{}.weight_blocks", "{}.weight_scales"),
    ("{}.weight_packed", "{}.weight_scale"),
)


class Mxfp4Format:
    """Layers with codes and scales by one of the names above; others are in full precision."""

    def open_matrix(self, tensors: CheckpointTensors, linear: LinearSpec) -> PackedMatrix:
        patterns = TENSOR_NAMES if linear.expert is None else (STACKED_NAMES, *TENSOR_NAMES)
        for codes_pattern, scales_pattern in patterns:
            codes_name = codes_pattern.format(linear.name)
            scales_name = scales_pattern.format(linear.name)
            if tensors.has(codes_name) and tensors.has(scales_name):
                return open_mxfp4(tensors, linear, codes_name, scales_name)
        return open_unquantized(tensors, linear)


def open_mxfp4(
    tensors: CheckpointTensors, linear: LinearSpec, codes_name: str, scales_name: str
) -> PackedMatrix:
    """Open codes, uint8 [out, in / 2], and the exponents of scales, bytes [out, in / 32]."""
    rows, columns = linear.shape
    codes_shape = (rows, columns // 2)
    scales_shape = (rows, columns // BLOCK_SIZE)
    scale_dtypes = (torch.uint8, torch.float8_e8m0fnu)
    expert = linear.expert
    codes = get_tensor(
        tensors,
        codes_name,
        codes_shape,
        (torch.uint8,),
        expert=expert,
    )
    exponents = get_tensor(
        tensors,
        scales_name,
        scales_shape,
        scale_dtypes,
        expert=expert,
    )

    def load(ranges: Sequence[Range], dtype: torch.dtype, device: torch.device) -> CodebookWeight:
        return CodebookWeight(
            load_rows(codes, ranges, device),
            torch.tensor(E2M1, device=device),
            load_rows(exponents, ranges, device).view(torch.uint8),
        )

    return PackedMatrix.from_loader(linear, load)
