"""Random weights for models without a checkpoint: each value is a hash of where it stands.

Every value is the sum of four uniform bytes, which is close to a normal distribution. The bytes
come from a 32-bit hash of the tensor's seed, the row and the column. All arithmetic is on integers
until the final scaling, so a slice agrees with the whole tensor and devices agree bit for bit.
"""

from __future__ import annotations

import torch

from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    pdl_options,
    tl,
    use_triton,
    wait_for_previous,
)

# Values that the torch reference computes at a time: what a CPU cache holds, and more elsewhere.
CPU_CHUNK = 1 << 18
DEVICE_CHUNK = 1 << 22
BYTE_SUM_STD = (4 * (256**2 - 1) / 12) ** 0.5  # standard deviation of the sum of four bytes


def fill_random(out: torch.Tensor, seed: int, first: tuple[int, int], std: float) -> None:
    """Fill out [rows, columns]; `first` is the row and column of out[0, 0] in its whole tensor."""
    if use_triton(out) and out.is_contiguous():
        fill_random_triton(out, seed, first, std)
    else:
        fill_random_reference(out, seed, first, std)


def fill_random_reference(out: torch.Tensor, seed: int, first: tuple[int, int], std: float) -> None:
    """The torch reference of `fill_random`."""
    rows, columns = out.shape
    first_row, first_column = first
    device = out.device
    row_ids = torch.arange(first_row, first_row + rows, device=device, dtype=torch.int32)
    column_ids = torch.arange(
        first_column, first_column + columns, device=device, dtype=torch.int32
    )
    row_hashes = hash_int32(row_ids[:, None] ^ seed)
    column_hashes = hash_int32(column_ids)
    chunk = CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK
    rows_per_chunk = max(1, chunk // columns)
    for row in range(0, rows, rows_per_chunk):
        hashes = hash_int32(row_hashes[row : row + rows_per_chunk] ^ column_hashes)
        even_bytes = hashes & 0x00FF00FF
        odd_bytes = hashes.bitwise_right_shift_(8).bitwise_and_(0x00FF00FF)
        pair_sums = even_bytes.add_(odd_bytes)
        low_sums = pair_sums & 0xFFFF
        byte_sums = low_sums.add_(pair_sums.bitwise_right_shift_(16)).sub_(510)
        values = byte_sums.float().mul_(std / BYTE_SUM_STD)
        out[row : row + rows_per_chunk].copy_(values)


def fill_random_bytes(out: torch.Tensor, seed: int, first: tuple[int, int]) -> None:
    """Fill out [rows, columns], uint8, as `fill_random` does, with all bytes about as often."""
    sums = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    fill_random(sums, seed, first, BYTE_SUM_STD)
    out.copy_((sums.int() * 0x9E3779 >> 12) & 255)


def hash_int32(x: torch.Tensor) -> torch.Tensor:
    """Hash int32 to int32, one to one. Every input bit affects every output bit; products wrap."""
    for factor in (0x7FEB352D, 0x68E31DA5):
        x = ((x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)).mul_(factor)
    return (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)


def fill_random_triton(out: torch.Tensor, seed: int, first: tuple[int, int], std: float) -> None:
    """Run the kernel."""
    rows, columns = out.shape
    block = 2048
    fill_random_kernel[(rows, -(-columns // block))](
        out,
        seed,
        *first,
        columns,
        std / BYTE_SUM_STD,
        BLOCK=block,
        num_warps=4,
        **pdl_options(out.device),
    )


@jit(do_not_specialize=["seed", "first_row", "first_column"])
def fill_random_kernel(
    out,  # [rows, columns]
    seed,
    first_row,
    first_column,
    columns,
    scale,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program fills BLOCK columns of one row."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row_hash = hash_int32_triton((first_row + row) ^ seed)
    hashes = hash_int32_triton(row_hash ^ hash_int32_triton(first_column + column))
    pair_sums = (hashes & 0x00FF00FF) + ((hashes >> 8) & 0x00FF00FF)
    byte_sums = (pair_sums & 0xFFFF) + (pair_sums >> 16) - 510
    values = (byte_sums.to(tl.float32) * scale).to(out.dtype.element_ty)
    offset = row.to(tl.int64) * columns + column
    tl.store(out + offset, values, mask=column < columns)


@jit
def hash_int32_triton(x):
    """`hash_int32` inside a kernel."""
    x = (((x >> 16) & 0xFFFF) ^ x) * 0x7FEB352D
    x = (((x >> 16) & 0xFFFF) ^ x) * 0x68E31DA5
    return ((x >> 16) & 0xFFFF) ^ x
