"""compressed-tensors checkpoints: packed int4 or int8, plain int8, FP8 and MXFP4.

The tensors of a linear layer tell which of these it uses and in which groups. The configuration
was checked when it was read (families/quantization.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bloomery.errors import CheckpointError
from bloomery.kernels.packed import GroupedScales
from bloomery.kernels.quantize_rows import FP8
from bloomery.quant.base import (
    CheckpointTensors,
    LinearSpec,
    get_shape,
    get_tensor,
    load_rows,
    mark_as_used,
    select_rows,
)
from bloomery.quant.fp8 import open_fp8
from bloomery.quant.gptq import WORD_BITS, WORD_DTYPES, build_weight, load_g_idx, unpack_words
from bloomery.quant.lazy_tensor import LazyTensor, Range
from bloomery.quant.loaded_weight import LoadedWeight
from bloomery.quant.mxfp4 import open_mxfp4
from bloomery.quant.packed_matrix import PackedMatrix, open_unquantized


@dataclass(frozen=True)
class CompressedTensorsFormat:
    """Layers with `weight_scale` are quantized; others are in full precision."""

    required_tensors: tuple[str, ...] = ()  # suffixes of tensors that must not be missing

    def open_matrix(self, tensors: CheckpointTensors, linear: LinearSpec) -> PackedMatrix:
        name = linear.name
        scale_name = f"{name}.weight_scale"
        if not tensors.has(scale_name):
            return open_unquantized(tensors, linear)
        for suffix in self.required_tensors:
            tensors.shape(f"{name}.{suffix}")  # raises if it is missing
        mark_as_used(tensors, name, "weight_shape", "input_scale", "input_zero_point")
        packed_name = f"{name}.weight_packed"
        if tensors.has(packed_name):
            shape = get_shape(tensors, packed_name)
            packed = get_tensor(tensors, packed_name, shape, (*WORD_DTYPES, torch.uint8))
            if packed.dtype == torch.uint8:
                return open_mxfp4(tensors, linear, packed_name, scale_name)
            return open_packed_integers(tensors, linear, packed)
        if tensors.tensor(f"{name}.weight", linear.shape).dtype == FP8:
            return open_fp8(tensors, linear, scale_name)
        return open_int8(tensors, linear)


def open_packed_integers(
    tensors: CheckpointTensors, linear: LinearSpec, packed: LazyTensor
) -> PackedMatrix:
    """pack-quantized: words [out, in * bits / 32] with codes of 4 or 8 bits, grouped scales."""
    name = linear.name
    rows, columns = linear.shape
    bits = packed.shape[1] * WORD_BITS // columns
    groups = get_shape(tensors, f"{name}.weight_scale")[1]
    expected_shape = (rows, columns * bits // WORD_BITS)
    if bits not in (4, 8) or packed.shape != expected_shape or columns % groups:
        raise CheckpointError(
            f"{name}.weight_packed: {list(packed.shape)} words do not hold {rows} x {columns} "
            "codes of 4 or 8 bits"
        )
    scales = get_tensor(tensors, f"{name}.weight_scale", (rows, groups))
    zero_points = None
    if tensors.has(f"{name}.weight_zero_point"):
        num_words = -(-rows * bits // WORD_BITS)
        shape = (num_words, groups)  # packed along the outputs
        zero_points = get_tensor(tensors, f"{name}.weight_zero_point", shape, WORD_DTYPES)
    g_idx = load_g_idx(tensors, f"{name}.weight_g_idx", columns, groups)

    def load(ranges: Sequence[Range], dtype: torch.dtype, device: torch.device) -> LoadedWeight:
        scale = load_rows(scales, ranges, device)
        middle = 1 << bits - 1
        zero_point = torch.full_like(scale, middle)
        if zero_points is not None:
            packed_zero_points = zero_points.load(zero_points.dtype, device)
            unpacked = unpack_words(packed_zero_points.T, bits).T
            zero_point = select_rows(unpacked[:rows], ranges).to(scale.dtype)
        codes = load_rows(packed, ranges, device)
        return build_weight(codes, bits, scale, zero_point, g_idx)

    return PackedMatrix.from_loader(linear, load)


def open_int8(tensors: CheckpointTensors, linear: LinearSpec) -> PackedMatrix:
    """int-quantized: int8 [out, in]; one scale for the matrix, per row or per group of columns."""
    name = linear.name
    rows = linear.shape[0]
    weight = get_tensor(tensors, f"{name}.weight", linear.shape, (torch.int8, FP8))
    scale_name = f"{name}.weight_scale"
    shape = tensors.shape(scale_name)
    groups = 1
    if len(shape) != 1:
        groups = get_shape(tensors, scale_name)[1]
    is_per_matrix = shape[0] == 1 and rows != 1
    expected_shape = (1,) if is_per_matrix else (rows, groups)
    scales = get_tensor(tensors, scale_name, expected_shape)
    zero_points = None
    zero_point_name = f"{name}.weight_zero_point"
    if tensors.has(zero_point_name):
        zero_points = get_tensor(tensors, zero_point_name, expected_shape, (torch.int8,))

    def load_per_row(
        stored: LazyTensor, ranges: Sequence[Range], device: torch.device
    ) -> torch.Tensor:
        """Load scales or zero points as float32 [rows, groups]."""
        if not is_per_matrix:
            return load_rows(stored, ranges, device).float()
        num_rows = sum(end - start for start, end in ranges)
        single = load_rows(stored, [(0, 1)], device)
        return single.expand(num_rows, 1).contiguous().float()

    def load(ranges: Sequence[Range], dtype: torch.dtype, device: torch.device) -> GroupedScales:
        zero_point = None
        if zero_points is not None:
            zero_point = load_per_row(zero_points, ranges, device)
            if not zero_point.any():
                zero_point = None
        return GroupedScales(
            load_rows(weight, ranges, device),
            load_per_row(scales, ranges, device),
            zero_point,
            bits=8,
            quantize_input=zero_point is None and groups == 1,
        )

    return PackedMatrix.from_loader(linear, load)
