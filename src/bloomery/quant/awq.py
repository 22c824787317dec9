"""AWQ checkpoints in the "gemm" layout: 4-bit codes and zero points, groups along the input.

A 32-bit word holds the codes of eight outputs, in the order of NIBBLE_OF_OUTPUT. Zero points are
packed the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bloomery.errors import CheckpointError
from bloomery.kernels.packed import GroupedScales, pack_codes
from bloomery.quant.base import CheckpointTensors, LinearSpec, get_shape, get_tensor, load_rows
from bloomery.quant.gptq import WORD_DTYPES
from bloomery.quant.lazy_tensor import LazyTensor, Range
from bloomery.quant.packed_matrix import PackedMatrix, open_unquantized

OUTPUTS_PER_WORD = 8
NIBBLE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)  # output i of a word is in its nibble [i]


class AwqFormat:
    """`qweight`, `qzeros` and `scales`; layers without `qweight` are in full precision."""

    def open_matrix(self, tensors: CheckpointTensors, linear: LinearSpec) -> PackedMatrix:
        name = linear.name
        rows, columns = linear.shape
        if not tensors.has(f"{name}.qweight"):
            return open_unquantized(tensors, linear)
        groups = get_shape(tensors, f"{name}.scales")[0]
        if columns % groups or rows % OUTPUTS_PER_WORD:
            raise CheckpointError(
                f"{name}: {groups} groups must divide {columns} columns, and "
                f"{OUTPUTS_PER_WORD} must divide {rows} rows"
            )
        # Stored as [in, out / 8] and [groups, out / 8]; transposed, a row holds eight outputs.
        word_rows = rows // OUTPUTS_PER_WORD
        codes = get_tensor(
            tensors, f"{name}.qweight", (word_rows, columns), WORD_DTYPES, transposed=True
        )
        zero_points = get_tensor(
            tensors, f"{name}.qzeros", (word_rows, groups), WORD_DTYPES, transposed=True
        )
        scales = get_tensor(tensors, f"{name}.scales", (rows, groups), transposed=True)

        def load(
            ranges: Sequence[Range], dtype: torch.dtype, device: torch.device
        ) -> GroupedScales:
            scale = load_rows(scales, ranges, device)
            zero_point = unpack_rows(zero_points, ranges, device).to(scale.dtype)
            unpacked = unpack_rows(codes, ranges, device)
            return GroupedScales(
                pack_codes(unpacked, 4),
                scale,
                zero_point,
                bits=4,
            )

        return PackedMatrix.from_loader(linear, load)


def unpack_rows(packed: LazyTensor, ranges: Sequence[Range], device: torch.device) -> torch.Tensor:
    """Load rows of 4-bit codes, uint8 [rows, n], from words [out / 8, n]."""
    selected = []
    for start, end in ranges:
        first_word = start // OUTPUTS_PER_WORD
        end_word = -(-end // OUTPUTS_PER_WORD)
        first_row = first_word * OUTPUTS_PER_WORD
        packed_rows = load_rows(packed, [(first_word, end_word)], device)
        nibbles = [packed_rows >> 4 * nibble & 15 for nibble in NIBBLE_OF_OUTPUT]
        codes = torch.stack(nibbles, 1).to(torch.uint8)
        codes = codes.flatten(0, 1)
        selected.append(codes[start - first_row : end - first_row])
    return torch.cat(selected)
