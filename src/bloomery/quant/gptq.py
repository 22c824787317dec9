"""GPTQ checkpoints: codes of 2, 3, 4 or 8 bits with a scale and a zero point per group of columns.

With act-order the tensor `g_idx` holds the group of each column. The shapes of the tensors give
the numbers of bits and groups, so checkpoints that use more bits for some modules need no special
rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bloomery.errors import CheckpointError
from bloomery.kernels.packed import GroupedScales, pack_codes
from bloomery.quant.base import (
    CheckpointTensors,
    LinearSpec,
    get_shape,
    get_tensor,
    load_rows,
    select_rows,
)
from bloomery.quant.lazy_tensor import Range
from bloomery.quant.loaded_weight import ActOrderWeight, LoadedWeight
from bloomery.quant.packed_matrix import PackedMatrix, open_unquantized

HOST = torch.device("cpu")
SUPPORTED_BITS = (2, 3, 4, 8)
WORD_DTYPES = (torch.int32,)  # codes are packed into 32-bit words
WORD_BITS = 32


@dataclass(frozen=True)
class GptqFormat:
    """`qweight`, `qzeros`, `scales` and perhaps `g_idx`; other layers are in full precision."""

    # Added to stored zero points: 1 in the first version of the format, else 0.
    zero_point_offset: int
    required_tensors: tuple[str, ...] = ()  # suffixes of tensors that must not be missing

    def open_matrix(self, tensors: CheckpointTensors, linear: LinearSpec) -> PackedMatrix:
        name = linear.name
        rows, columns = linear.shape
        if not tensors.has(f"{name}.qweight"):
            return open_unquantized(tensors, linear)
        for suffix in self.required_tensors:
            tensors.shape(f"{name}.{suffix}")  # raises if it is missing
        bits = infer_bits(tensors, linear)
        groups = get_shape(tensors, f"{name}.scales")[0]
        # Stored as [words, out] and [groups, out]; transposed, a row is one stream of bits.
        code_shape = (rows, columns * bits // WORD_BITS)
        codes = get_tensor(tensors, f"{name}.qweight", code_shape, WORD_DTYPES, transposed=True)
        scales = get_tensor(tensors, f"{name}.scales", (rows, groups), transposed=True)
        zero_point_shape = (groups, rows * bits // WORD_BITS)
        zero_points = get_tensor(tensors, f"{name}.qzeros", zero_point_shape, WORD_DTYPES)
        g_idx = load_g_idx(tensors, f"{name}.g_idx", columns, groups)

        def load(ranges: Sequence[Range], dtype: torch.dtype, device: torch.device) -> LoadedWeight:
            scale = load_rows(scales, ranges, device)
            packed_zero_points = zero_points.load(zero_points.dtype, device)
            stored = unpack_words(packed_zero_points, bits).T.to(scale.dtype)
            zero_point = select_rows(stored, ranges) + self.zero_point_offset
            packed = load_rows(codes, ranges, device)
            return build_weight(packed, bits, scale, zero_point, g_idx)

        return PackedMatrix.from_loader(linear, load)


def infer_bits(tensors: CheckpointTensors, linear: LinearSpec) -> int:
    """Infer the bits of a code from the number of words that `qweight` has per output."""
    rows, columns = linear.shape
    shape = get_shape(tensors, f"{linear.name}.qweight")
    bits_per_output = shape[0] * WORD_BITS
    bits = bits_per_output // columns
    fills_code_words = bits_per_output == columns * bits
    fills_zero_point_words = rows * bits % WORD_BITS == 0
    if bits not in SUPPORTED_BITS or not fills_code_words or not fills_zero_point_words:
        raise CheckpointError(
            f"{linear.name}.qweight: {list(shape)} words do not hold {rows} x {columns} codes of "
            "2, 3, 4 or 8 bits"
        )
    return bits


def load_g_idx(
    tensors: CheckpointTensors, name: str, columns: int, groups: int
) -> torch.Tensor | None:
    """Load the group of each column, int64 [columns]; None if groups are consecutive columns.

    The tensor may be missing, and some writers fill it with -1 when they do not use act-order.
    """
    group_size = -(-columns // groups)
    consecutive = torch.arange(columns) // group_size
    g_idx = consecutive
    if tensors.has(name):
        lazy = get_tensor(tensors, name, (columns,), (torch.int32, torch.int64))
        stored = lazy.load(torch.int64, HOST)
        if not (stored == -1).all():
            g_idx = stored
        if g_idx.min() < 0 or g_idx.max() >= groups:
            raise CheckpointError(
                f"{name}: names groups beyond the {groups} there are; the checkpoint is damaged"
            )
    if columns % groups == 0 and torch.equal(g_idx, consecutive):
        return None
    return g_idx


def unpack_words(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack streams of bits, lowest first: int32 [n, words] -> uint8 [n, codes]."""
    mask = (1 << bits) - 1
    if bits in (2, 4, 8):
        # Flat, because the stride of a dimension of size 1 is anything.
        packed_bytes = packed.flatten().view(torch.uint8).view(len(packed), 4 * packed.shape[1])
        parts = [packed_bytes >> shift & mask for shift in range(0, 8, bits)]
        return torch.stack(parts, -1).flatten(1)
    # 32 codes of `bits` bits fill `bits` words. A code may continue in the next word.
    runs = packed.unflatten(1, (-1, bits))
    unsigned = runs.long() & 0xFFFFFFFF
    first_bit = torch.arange(WORD_BITS, device=packed.device) * bits
    word = first_bit // WORD_BITS
    next_word = (word + 1).clamp(max=bits - 1)
    double_words = unsigned[..., word] | unsigned[..., next_word] << WORD_BITS
    codes = double_words >> first_bit % WORD_BITS & mask
    return codes.to(torch.uint8).flatten(1)


def build_weight(
    packed: torch.Tensor,
    bits: int,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    g_idx: torch.Tensor | None,
) -> LoadedWeight:
    """Build the weight of some rows in the layout that kernels read, if there is one.

    packed: int32 [rows, words], a stream of codes per row. scale and zero_point: [rows, groups].
    g_idx: the group of each column, or None for groups of consecutive columns. Kernels read no
    codes of 2 or 3 bits from checkpoints: these are stored with 4 bits.
    """
    kernel_bits = max(4, bits)
    # Without stored zero points, kernels use the middle of the range.
    middle = 1 << kernel_bits - 1
    is_symmetric = bool((zero_point == middle).all())
    kernel_zero_point = None if is_symmetric else zero_point
    if g_idx is None:
        if kernel_bits == bits:
            codes = packed.contiguous().view(torch.uint8)
        else:
            codes = pack_codes(unpack_words(packed, bits), kernel_bits)
        return GroupedScales(codes, scale, kernel_zero_point, kernel_bits)
    g_idx = g_idx.to(packed.device)
    codes = unpack_words(packed, bits)
    columns = len(g_idx)
    groups = scale.shape[1]
    # If all groups have the same size, columns sorted by group have a layout that kernels read.
    order = g_idx.argsort(stable=True)
    group_size = -(-columns // groups)
    consecutive = torch.arange(columns, device=g_idx.device) // group_size
    if columns % groups == 0 and torch.equal(g_idx[order], consecutive):
        sorted_codes = pack_codes(codes[:, order], kernel_bits)
        return GroupedScales(sorted_codes, scale, kernel_zero_point, kernel_bits, order.int())
    return ActOrderWeight(codes, scale, zero_point, g_idx)
