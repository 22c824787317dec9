"""Keys and values in 8 bits: what is stored, what kernels read of it, and a model that runs on it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.kernels import case, check_attention, error
from bloomery.attention.triton_paged import TritonPaged
from bloomery.kernels.launch import interpreted
from bloomery.kernels.rounded_cache import cache_bytes, of_memory, read, scales, write
from bloomery.kernels.store import Turn, turn_and_store_reference, turn_rows
from bloomery.spec import Attention

KINDS = (torch.float8_e4m3fn, torch.int8)
STEP = {
    torch.float8_e4m3fn: 1 / 16,
    torch.int8: 1 / 254,
}  # of a number, or of the largest of its head
needs_interpreter = pytest.mark.skipif(
    not interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return of_memory(torch.zeros(cache_bytes(shape, dtype), dtype=torch.uint8), shape, dtype)


@pytest.mark.parametrize("dtype", KINDS)
def test_what_is_written_is_read_within_a_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cache = empty((2, 9, 2, 16), dtype)
    slots = torch.tensor([7, 0, 3])
    k, v = torch.randn(2, 3, 2, 16) * torch.tensor([1e-3, 1.0, 50.0])[None, :, None, None]
    k[0, 0] = 0
    write(k, 0, cache, slots)
    write(v, 1, cache, slots)
    for got, wanted in zip(read(cache, slots, torch.float32), (k, v), strict=True):
        assert bool(
            ((got - wanted).abs() <= wanted.abs().amax(-1, keepdim=True) * STEP[dtype] * 1.01).all()
        )
    by = scales(cache)
    assert by is not None and by.shape == (2, 9, 2) and by.count_nonzero() == 12, (
        "no other place is touched"
    )
    assert scales(torch.zeros(2, 9, 2, 16)) is None
    assert cache_bytes((2, 9, 2, 16), dtype) == 2 * 9 * 2 * (16 + 4)


@needs_interpreter
@pytest.mark.parametrize("dtype", KINDS)
def test_the_kernel_stores_what_the_reference_does(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    angles = torch.rand(5, 16) * 6
    qkv = torch.randn(5, 8 * 32)
    slots = torch.randperm(9)[:5]
    turn = Turn((angles.cos(), angles.sin()))
    ours = empty((2, 9, 2, 32), dtype)
    wanted = empty((2, 9, 2, 32), dtype)
    q = turn_rows(qkv, ours, slots, turn)
    torch.testing.assert_close(q, turn_and_store_reference(qkv, wanted, slots, turn))
    torch.testing.assert_close(scales(ours), scales(wanted))
    for got, right in zip(
        read(ours, slots, torch.float32), read(wanted, slots, torch.float32), strict=True
    ):
        assert error(got, right) < (0.1 if dtype == torch.float8_e4m3fn else 0.004), (
            "the interpreter rounds down"
        )


@needs_interpreter
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("counts", "lengths"), [([1, 1], [40, 3]), ([1, 7, 20], [5, 7, 33])])
def test_attention_reads_it(dtype: torch.dtype, counts: list[int], lengths: list[int]) -> None:
    torch.manual_seed(2)
    material = case(Attention(4, 2, 32), counts, lengths, 16, torch.float16, "cpu")
    cache = empty(tuple(material.cache.shape), dtype)
    every = torch.arange(cache.shape[1])
    for half in range(2):
        write(material.cache[half].nan_to_num(), half, cache, every)
    assert check_attention(replace(material, cache=cache), TritonPaged()) < 2e-3
