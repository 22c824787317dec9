"""Quantized weights for native CPU kernels: the same values in other blocks."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from bloomery.native.build import NativeBuildError
from bloomery.native.thread_pool import ThreadPool
from bloomery.quant.base import CheckpointTensors, LinearSpec
from bloomery.quant.dense import DenseWeight
from bloomery.quant.lazy_tensor import LazyTensor
from bloomery.quant.native import NativeWeight
from bloomery.quant.packed_matrix import open_unquantized
from bloomery.quant.quantized_weight import QuantizedWeight
from tests.quant.formats import CPU, FORMATS

# Formats whose codes and scales Q4_1 or Q8_0 blocks express exactly, but for float16 offsets.
EXACT_FORMATS = [
    "int8",
    "w8a8",
    "int4",
    "int4-64",
    "int3",
    "int2",
    "gptq-4",
    "gptq-3",
    "gptq-4-row",
    "awq",
    "w4a16",
]
ROUNDED_FORMATS = sorted(FORMATS.keys() - {*EXACT_FORMATS, "dense"})


@pytest.fixture(scope="module")
def pool() -> ThreadPool:
    try:
        return ThreadPool(1)
    except NativeBuildError as reason:
        pytest.skip(str(reason))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", EXACT_FORMATS)
def test_integer_formats_keep_their_values(pool: ThreadPool, name: str) -> None:
    torch.manual_seed(0)
    matrix = FORMATS[name](torch.randn(96, 256))
    x = torch.randn(5, 256)
    values = matrix.load_dense(torch.float32, CPU)
    weight = matrix.prepare(torch.float32, CPU, pool)
    assert isinstance(weight, NativeWeight)
    assert relative_error(weight.gather(torch.arange(96)), values) < 1e-3
    assert relative_error(weight.linear(x), x @ values.T) < 1e-2
    assert weight.nbytes < 0.3 * values.nbytes


@pytest.mark.parametrize("name", ROUNDED_FORMATS)
def test_other_formats_are_rounded_to_eight_bits(pool: ThreadPool, name: str) -> None:
    """This costs a tenth of the format's own error, or less than rounding the activations."""
    torch.manual_seed(0)
    weight = torch.randn(96, 256)
    x = torch.randn(5, 256)
    matrix = FORMATS[name](weight)
    values = matrix.load_dense(torch.float32, CPU)
    native = matrix.prepare(torch.float32, CPU, pool)
    assert isinstance(native, NativeWeight)
    assert relative_error(native.gather(torch.arange(96)), values) < 6e-3
    assert relative_error(native.linear(x), x @ values.T) < 1.2e-2
    assert native.nbytes < 0.3 * values.nbytes


@pytest.mark.parametrize("name", ["nf4", "mxfp4", "mxfp4-packed"])
def test_codes_that_select_levels_take_four_bits(pool: ThreadPool, name: str) -> None:
    matrix = FORMATS[name](torch.randn(96, 256))
    native = matrix.prepare(torch.float32, CPU, pool)
    assert native.nbytes * 8 == 96 * 256 * 4.5  # with a scale of 16 bits for 32 codes


def test_mxfp4_keeps_its_values(pool: ThreadPool) -> None:
    torch.manual_seed(0)
    matrix = FORMATS["mxfp4"](torch.randn(96, 256))
    native = matrix.prepare(torch.float32, CPU, pool)
    assert isinstance(native, NativeWeight)
    values = matrix.load_dense(torch.float32, CPU)
    assert torch.equal(native.gather(torch.arange(96)), values)


class SingleTensor:
    """A checkpoint with one tensor."""

    def __init__(self, tensor: torch.Tensor):
        self.stored = LazyTensor.from_tensor(tensor)

    def has(self, name: str) -> bool:
        return name == "head.weight"

    def tensor(self, *_: object, **__: object) -> LazyTensor:
        return self.stored


def test_what_a_format_leaves_in_16_bits_keeps_them(pool: ThreadPool) -> None:
    values = torch.randn(96, 256).bfloat16()
    source = cast(CheckpointTensors, SingleTensor(values))
    matrix = open_unquantized(source, LinearSpec("head", (96, 256)))
    assert torch.equal(matrix.load_dense(torch.float32, CPU), values.float())
    native = matrix.prepare(torch.float32, CPU, pool)
    assert isinstance(native, NativeWeight) and native.nbytes == values.nbytes
    assert torch.equal(native.gather(torch.arange(96)), values.float())
    alone = matrix.prepare(torch.float32, CPU)
    assert isinstance(alone, DenseWeight) and torch.equal(alone.weight, values.float())


def test_rows_that_are_not_whole_blocks_are_not_converted(pool: ThreadPool) -> None:
    matrix = FORMATS["nf4"](torch.randn(96, 264))
    assert isinstance(matrix.prepare(torch.float32, CPU, pool), QuantizedWeight)
