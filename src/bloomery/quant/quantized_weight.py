"""Prepared weights of quantized formats: one matrix, or several concatenated ones.

    prepare_weight       loaded weights, from top to bottom -> one PreparedWeight
    QuantizedWeight      codes and scales on the device; GPU kernels multiply them as they are
    ConcatenatedWeight   matrices of different layouts whose outputs are concatenated

Where no kernel reads the codes, a product dequantizes a panel of rows at a time, so that no dense
copy of the matrix is ever kept. Native CPU kernels read another layout (quant/native.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeGuard

import torch
import torch.nn.functional as F

from bloomery.fusion import Epilogue, NormPrologue
from bloomery.kernels.packed import FP8_BLOCK_SIZE, Fp8Weight, GroupedScales, PackedWeight
from bloomery.kernels.packed_linear import dequantize_rows, packed_fused_linear, packed_linear
from bloomery.native.thread_pool import ThreadPool
from bloomery.quant.base import PreparedWeight
from bloomery.quant.dense import DenseWeight, prepare_dense
from bloomery.quant.lazy_tensor import find_overlaps
from bloomery.quant.loaded_weight import (
    ActOrderWeight,
    LoadedWeight,
    QuantizedCodes,
    concatenate_neighbors,
    slice_rows,
)
from bloomery.quant.native import NativeWeight, pack_native

CPU_PANEL_VALUES = 1 << 18  # values dequantized at once on a CPU: as many as its caches hold
GPU_PANEL_VALUES = 1 << 24  # the same on a GPU, for codes that no kernel reads


def prepare_weight(
    weights: Iterable[LoadedWeight], dtype: torch.dtype, pool: ThreadPool | None = None
) -> PreparedWeight:
    """Prepare the matrix that consists of `weights`, stacked along the rows.

    Neighbors of the same layout become one matrix. `dtype` is the type of activations.
    """
    merged = concatenate_neighbors(weights)
    prepared = [prepare_single(weight, dtype, pool) for weight in merged]
    if len(prepared) == 1:
        return prepared[0]
    return ConcatenatedWeight(tuple(prepared))


def prepare_single(
    weight: LoadedWeight, dtype: torch.dtype, pool: ThreadPool | None
) -> PreparedWeight:
    """Prepare one loaded weight, for native CPU kernels if they can read it."""
    if isinstance(weight, torch.Tensor):
        return prepare_dense(weight, dtype, pool)
    panels = (panel for _, panel in dequantize_panels(weight, torch.float32))
    native = pack_native(weight, dtype, panels, pool)
    if native is not None:
        return native
    return QuantizedWeight(weight, dtype)


@dataclass(frozen=True)
class QuantizedWeight:
    """Quantized weights [out, in] on the device."""

    packed: QuantizedCodes
    dtype: torch.dtype  # of outputs and gathered rows

    @property
    def nbytes(self) -> int:
        fields = vars(self.packed).values()
        return sum(field.nbytes for field in fields if isinstance(field, torch.Tensor))

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        packed = self.packed
        if rows.is_cuda and can_dequantize_rows(packed):
            return dequantize_rows(packed, rows, self.dtype)
        if isinstance(packed, Fp8Weight) and packed.is_blockwise:
            columns = packed.shape[1]
            block_scale = packed.scale.float()[rows // FP8_BLOCK_SIZE]
            scale = block_scale.repeat_interleave(FP8_BLOCK_SIZE, 1)[:, :columns]
            # torch cannot index 8-bit floats: select them as bytes.
            code_bytes = packed.codes.view(torch.uint8)[rows]
            codes = code_bytes.view(packed.codes.dtype)
            return (codes.float() * scale).to(self.dtype)
        return slice_rows(packed, rows).dequantize(self.dtype)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.is_cuda and has_kernels(self.packed):
            return packed_linear(x, self.packed, bias)
        return linear_in_panels(x, self.packed, bias)

    def fused_linear(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        prologue: NormPrologue | None,
        epilogue: Epilogue,
    ) -> torch.Tensor | None:
        if not x.is_cuda or not has_kernels(self.packed):
            return None
        return packed_fused_linear(x, self.packed, bias, prologue, epilogue)


@dataclass(frozen=True)
class ConcatenatedWeight:
    """Matrices [out, in] of different layouts, stacked along the rows."""

    parts: tuple[PreparedWeight, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return dequantize_range(self, 0, count_rows(self))[rows]

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        outputs = [part.linear(x) for part in self.parts]
        y = torch.cat(outputs, -1)
        return y if bias is None else y + bias

    def fused_linear(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        prologue: NormPrologue | None,
        epilogue: Epilogue,
    ) -> torch.Tensor | None:
        return None


# ---- layouts that kernels support ----------------------------------------------------------------


def has_kernels(packed: QuantizedCodes) -> TypeGuard[PackedWeight]:
    """Whether GPU kernels multiply these codes as they are."""
    if isinstance(packed, ActOrderWeight):
        return False
    return not isinstance(packed, GroupedScales) or packed.bits in (4, 8)


def can_dequantize_rows(packed: QuantizedCodes) -> TypeGuard[PackedWeight]:
    """Whether a GPU kernel dequantizes single rows: it needs columns in the order of the input."""
    is_reordered = isinstance(packed, GroupedScales) and packed.act_order is not None
    return has_kernels(packed) and not is_reordered


def has_row_scales(packed: QuantizedCodes) -> TypeGuard[GroupedScales]:
    """Whether the weight is int8 codes times one scale per row, without zero points."""
    return (
        isinstance(packed, GroupedScales)
        and packed.zero_point is None
        and packed.scale.shape[1] == 1
        and packed.codes.dtype == torch.int8
    )


# ---- products and rows without kernels -----------------------------------------------------------


def linear_in_panels(
    x: torch.Tensor, packed: QuantizedCodes, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [tokens, in] -> [tokens, out], dequantizing a panel of rows at a time.

    Works on any device and is the reference for the kernels.
    """
    num_outputs = packed.shape[0]
    y = torch.empty(len(x), num_outputs, dtype=x.dtype, device=x.device)
    # A scale per row can be applied to the sum. In float16 the unscaled sum would overflow.
    if has_row_scales(packed) and x.dtype != torch.float16:
        for rows in split_into_panels(packed):
            panel = packed.codes[rows].to(x.dtype)
            torch.mm(x, panel.T, out=y[:, rows])
        y *= packed.scale.T
        return y if bias is None else y.add_(bias)
    for rows, panel in dequantize_panels(packed, x.dtype):
        panel_bias = None if bias is None else bias[rows]
        y[:, rows] = F.linear(x, panel, panel_bias)
    return y


def split_into_panels(packed: QuantizedCodes) -> Iterator[slice]:
    """Split the rows into panels that are dequantized at once: a multiple of FP8_BLOCK_SIZE."""
    num_rows, columns = packed.shape
    on_cpu = packed.codes.device.type == "cpu"
    max_values = CPU_PANEL_VALUES if on_cpu else GPU_PANEL_VALUES
    num_blocks = max(1, max_values // columns // FP8_BLOCK_SIZE)
    step = num_blocks * FP8_BLOCK_SIZE
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def dequantize_panels(
    packed: QuantizedCodes, dtype: torch.dtype
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the rows of each panel and their values [rows, in]."""
    for rows in split_into_panels(packed):
        yield rows, slice_rows(packed, rows).dequantize(dtype)


def count_rows(weight: PreparedWeight) -> int:
    """Return the number of outputs of a prepared weight."""
    match weight:
        case ConcatenatedWeight(parts):
            return sum(map(count_rows, parts))
        case QuantizedWeight(packed):
            return packed.shape[0]
        case DenseWeight(tensor):
            return len(tensor)
        case NativeWeight(matrix):
            return matrix.rows
    raise TypeError(f"{type(weight).__name__} has no known number of rows")


def dequantize_range(weight: PreparedWeight, start: int, end: int) -> torch.Tensor:
    """Return rows start:end dequantized: [end - start, in]."""
    match weight:
        case DenseWeight(tensor):
            return tensor[start:end]
        case ConcatenatedWeight(parts):
            heights = map(count_rows, parts)
            ranges = []
            for index, first, last in find_overlaps(heights, start, end):
                ranges.append(dequantize_range(parts[index], first, last))
            return torch.cat(ranges)
        case QuantizedWeight(packed, dtype):
            if packed.codes.is_cuda and can_dequantize_rows(packed):
                return dequantize_rows(packed, range(start, end), dtype)
            is_blockwise = isinstance(packed, Fp8Weight) and packed.is_blockwise
            if not is_blockwise or start % FP8_BLOCK_SIZE == 0:
                return slice_rows(packed, slice(start, end)).dequantize(dtype)
            rows = torch.arange(start, end, device=packed.codes.device)
            return weight.gather(rows)
    return weight.gather(torch.arange(start, end))
