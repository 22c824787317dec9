"""GPTQ: codes of 2, 3, 4 or 8 bits along the input, a scale and a zero for groups of it, perhaps in another order.

Bits and groups are what the tensors' shapes say, so checkpoints that give some modules more bits need no rules here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bloomery.errors import CheckpointError
from bloomery.kernels.packed import Grid, pack
from bloomery.quant.base import Product, Range, Tensors, part, sizes
from bloomery.quant.packed import Held, PackedMatrix, Scattered, kept, rows_of

HOST = torch.device("cpu")
BITS = (2, 3, 4, 8)
WORDS = (torch.int32,)


@dataclass(frozen=True)
class Gptq:
    first_zero: int  # what is added to stored zeros: 1 in the first version of the format
    needed: tuple[str, ...] = ()  # parts that must not be missing

    def matrix(self, tensors: Tensors, product: Product) -> PackedMatrix:
        (rows, width) = product.shape
        name = product.name
        if not tensors.has(f"{name}.qweight"):
            return kept(tensors, product)
        for suffix in self.needed:
            tensors.shape(f"{name}.{suffix}")
        found = sizes(tensors, f"{name}.qweight")
        bits = found[0] * 32 // width
        groups = sizes(tensors, f"{name}.scales")[0]
        if bits not in BITS or found[0] * 32 != width * bits or rows * bits % 32:
            raise CheckpointError(
                f"{name}.qweight: {list(found)} words do not hold {rows} x {width} codes of 2, 3, 4 or 8 bits"
            )
        # Rows first; a row's words follow one another as a stream of bits.
        codes = part(tensors, f"{name}.qweight", (rows, width * bits // 32), WORDS, transposed=True)
        scales = part(tensors, f"{name}.scales", (rows, groups), transposed=True)
        zeros = part(tensors, f"{name}.qzeros", (groups, rows * bits // 32), WORDS)
        index = groups_of(tensors, f"{name}.g_idx", width, groups)

        def read(ranges: Sequence[Range], dtype: torch.dtype, device: torch.device) -> Held:
            scale = rows_of(scales, ranges, device)
            zero = (
                streamed(rows_of(zeros, [(0, groups)], device), bits).T.to(scale.dtype)
                + self.first_zero
            )
            zero = torch.cat([zero[start:end] for start, end in ranges])
            return grid(
                rows_of(codes, ranges, device),
                bits,
                scale,
                zero,
                None if index is None else index.to(device),
            )

        return PackedMatrix.whole(product, read)


def groups_of(tensors: Tensors, name: str, width: int, groups: int) -> torch.Tensor | None:
    """The group of each column, by a tensor that need not be there; None where they follow one another."""
    plain = torch.arange(width) // -(-width // groups)
    index = plain
    if tensors.has(name):
        stated = part(tensors, name, (width,), (torch.int32, torch.int64)).load(torch.int64, HOST)
        if not (stated == -1).all():  # which is how a library leaves it that had no use for it
            index = stated
        if not ((index >= 0) & (index < groups)).all():
            raise CheckpointError(
                f"{name}: names groups beyond the {groups} there are; the checkpoint is damaged"
            )
    return None if width % groups == 0 and torch.equal(index, plain) else index


def streamed(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[lines, words] int32 as a stream of bits, lowest first -> [lines, numbers] uint8."""
    if bits in (4, 8, 2):
        octets = words.contiguous().view(torch.uint8)
        return torch.stack(
            [octets >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -1
        ).flatten(1)
    wide = (
        words.unflatten(1, (-1, bits)).long() & 0xFFFFFFFF
    )  # 32 numbers in as many words as they have bits
    starts = torch.arange(32, device=words.device) * bits
    word = starts // 32
    offset = starts % 32
    pairs = wide[..., word] | wide[..., (word + 1).clamp(max=bits - 1)] << 32
    return (pairs >> offset & (1 << bits) - 1).to(torch.uint8).flatten(1)


def grid(
    words: torch.Tensor,
    bits: int,
    scale: torch.Tensor,
    zero: torch.Tensor,
    index: torch.Tensor | None,
) -> Held:
    """Streams of codes [rows, words] as kernels read them: 2 and 3 bits lie in 4. `index`: the group of each column, if
    they are not in turn."""
    held = max(4, bits)
    centred = None if bool((zero == 1 << held - 1).all()) else zero
    if index is None:
        codes = (
            words.contiguous().view(torch.uint8)
            if held == bits
            else pack(streamed(words, bits), held)
        )
        return Grid(codes, scale, centred, held)
    codes = streamed(words, bits)
    order = index.argsort(stable=True)
    in_turn = torch.arange(len(index), device=index.device) // -(-len(index) // scale.shape[1])
    if len(index) % scale.shape[1] == 0 and torch.equal(index[order], in_turn):
        return Grid(pack(codes[:, order], held), scale, centred, held, order.int())
    return Scattered(codes, scale, zero, index)
