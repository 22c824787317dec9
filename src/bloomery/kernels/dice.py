"""Made-up weights: near enough to a normal distribution, each value a hash of where it stands.

Four dice of 256 sides a value, thrown by a 32-bit hash of its tensor's seed, its row and its column, and integers until
the end: slices agree with the whole and devices with each other, bit for bit.
"""

from __future__ import annotations

import torch

from bloomery.kernels.launch import begin, fused, jit, overlap, tl, wait

# values at a time without the kernel, on a CPU and elsewhere
CACHED = 1 << 18
STREAMED = 1 << 22
DEVIATION = (4 * (256**2 - 1) / 12) ** 0.5  # of four dice


def throw(out: torch.Tensor, seed: int, first: tuple[int, int], std: float) -> None:
    """Fill out [rows, columns], whose first value stands at that row and column of its tensor."""
    (throw_kernel_rows if fused(out) and out.is_contiguous() else throw_reference)(
        out, seed, first, std
    )


def throw_reference(out: torch.Tensor, seed: int, first: tuple[int, int], std: float) -> None:
    (rows, columns) = out.shape
    (row0, column0) = first
    device = out.device
    down = mixed(torch.arange(row0, row0 + rows, device=device, dtype=torch.int32)[:, None] ^ seed)
    across = mixed(torch.arange(column0, column0 + columns, device=device, dtype=torch.int32))
    step = max(1, (CACHED if device.type == "cpu" else STREAMED) // columns)
    for row in range(0, rows, step):
        hashed = mixed(down[row : row + step] ^ across)
        pairs = (hashed & 0x00FF00FF).add_(hashed.bitwise_right_shift_(8).bitwise_and_(0x00FF00FF))
        dice = (pairs & 0xFFFF).add_(pairs.bitwise_right_shift_(16)).sub_(510)
        out[row : row + step].copy_(dice.float().mul_(std / DEVIATION))


def mixed(x: torch.Tensor) -> torch.Tensor:
    """int32 -> int32, one to one, each bit of the input felt in all of the output. Products wrap around."""
    for factor in (0x7FEB352D, 0x68E31DA5):
        x = ((x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)).mul_(factor)
    return (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)


def throw_kernel_rows(out: torch.Tensor, seed: int, first: tuple[int, int], std: float) -> None:
    """The kernel."""
    rows, columns = out.shape
    throw_kernel[(rows, -(-columns // 2048))](
        out, seed, *first, columns, std / DEVIATION, WIDTH=2048, num_warps=4, **overlap(out.device)
    )


@jit(do_not_specialize=["seed", "row0", "column0"])
def throw_kernel(out, seed, row0, column0, columns, scale, WIDTH: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    wait(PDL)
    row = tl.program_id(0)
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    hashed = mixed_up(mixed_up((row0 + row) ^ seed) ^ mixed_up(column0 + k))
    pairs = (hashed & 0x00FF00FF) + ((hashed >> 8) & 0x00FF00FF)
    dice = (pairs & 0xFFFF) + (pairs >> 16) - 510
    at = row.to(tl.int64) * columns + k
    tl.store(out + at, (dice.to(tl.float32) * scale).to(out.dtype.element_ty), mask=k < columns)


@jit
def mixed_up(x):
    x = (((x >> 16) & 0xFFFF) ^ x) * 0x7FEB352D
    x = (((x >> 16) & 0xFFFF) ^ x) * 0x68E31DA5
    return ((x >> 16) & 0xFFFF) ^ x
