"""Matrices packed by the formats' own libraries are read as those libraries read them.

make_library_golden.py writes the golden file.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from bloomery.kernels.packed import CodebookWeight
from bloomery.quant.awq import AwqFormat
from bloomery.quant.base import WeightFormat
from bloomery.quant.bitsandbytes import BitsAndBytesFormat
from bloomery.quant.compressed_tensors import CompressedTensorsFormat
from bloomery.quant.gptq import GptqFormat
from bloomery.quant.select import ON_LOAD_FORMATS
from tests.quant.formats import CPU, open_matrix
from tests.quant.make_library_golden import GOLDEN_FILE

GOLDEN = load_file(GOLDEN_FILE)
LIBRARY_FORMATS: dict[str, WeightFormat] = {
    "bnb": BitsAndBytesFormat(),
    "compressed": CompressedTensorsFormat(),
    "awq": AwqFormat(),
    "gptq": GptqFormat(zero_point_offset=1),
}
NAMES = sorted({name.split("/")[0] for name in GOLDEN if "/" in name})


def golden_tensors(name: str) -> dict[str, torch.Tensor]:
    prefix = f"{name}/"
    return {
        key.removeprefix(prefix): tensor for key, tensor in GOLDEN.items() if key.startswith(prefix)
    }


@pytest.mark.parametrize("name", NAMES)
def test_values_equal_those_of_the_library(name: str) -> None:
    tensors = golden_tensors(name)
    values = tensors.pop("means")
    matrix = open_matrix(LIBRARY_FORMATS[name.split("-")[0]], tensors, values.shape)
    actual = matrix.load_dense(torch.float32, CPU)
    is_half = values.dtype == torch.float16  # auto-gptq multiplies in half precision
    rtol = 2e-3 if is_half else 1e-6
    atol = 2e-3 if is_half else 1e-7
    torch.testing.assert_close(actual, values.float(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_quantizing_on_load_equals_bitsandbytes(kind: str) -> None:
    """A row is quantized like a matrix of that one row by the library."""
    expected = golden_tensors(f"bnb-{kind}-nested")
    actual = ON_LOAD_FORMATS[kind].quantize_layer(GOLDEN["weight"].reshape(1, -1))
    assert isinstance(actual, CodebookWeight) and actual.nested_scale is not None
    swapped = actual.codes >> 4 | actual.codes << 4
    assert torch.equal(swapped.view(-1, 1), expected["weight"])
    assert torch.equal(actual.absmax.flatten(), expected["weight.absmax"])
    assert torch.equal(actual.nested_scale[0, 1:], expected["weight.nested_absmax"])
    assert torch.equal(actual.dequantize().view_as(expected["means"]), expected["means"])
