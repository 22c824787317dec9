"""The packed weight classes: what codes, scales and zero points mean."""

from __future__ import annotations

import torch

from bloomery.kernels.packed import (
    CodebookWeight,
    Fp8Weight,
    GroupedScales,
    pack_codes,
    unpack_codes,
)


def test_4bit_codes_round_trip_with_the_even_column_in_the_low_half() -> None:
    codes = torch.randint(16, (3, 64))
    assert torch.equal(unpack_codes(pack_codes(codes, 4), 4), codes.byte())
    assert pack_codes(torch.tensor([[1, 2]]), 4).item() == 0x21


def test_grouped_scales_dequantize() -> None:
    codes = torch.randint(16, (3, 64))
    packed = GroupedScales(pack_codes(codes, 4), torch.full((3, 2), 0.5), torch.full((3, 2), 3.0))
    assert packed.shape == (3, 64)
    assert packed.group_size == 32
    assert torch.equal(packed.dequantize(), (codes - 3) * 0.5)
    without_zero_point = GroupedScales(pack_codes(codes, 4), torch.ones(3, 1))
    assert torch.equal(without_zero_point.dequantize(), codes - 8.0), "the middle of the range"


def test_act_order_permutes_the_input_columns() -> None:
    codes = torch.randint(16, (3, 64))
    packed = GroupedScales(pack_codes(codes, 4), torch.full((3, 2), 0.5), torch.full((3, 2), 3.0))
    act_order = torch.randperm(64).int()
    permuted = GroupedScales(packed.codes, packed.scale, packed.zero_point, 4, act_order)
    x = torch.randn(2, 64)
    torch.testing.assert_close(
        x @ permuted.dequantize().t(), x[:, act_order.long()] @ packed.dequantize().t()
    )


def test_codebook_dequantizes() -> None:
    codes = torch.randint(16, (3, 64))
    packed = CodebookWeight(pack_codes(codes, 4), torch.arange(16) / 4, torch.full((3, 1), 2.0))
    assert torch.equal(packed.dequantize(), codes / 2)


def test_blockwise_fp8_dequantizes() -> None:
    ones = torch.ones(130, 256).to(torch.float8_e4m3fn)
    packed = Fp8Weight(ones, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert packed.is_blockwise
    assert packed.dequantize()[129, 255] == 4
    assert packed.dequantize()[0, 128] == 2
