"""Matrices packed by the formats' own libraries (tests/quant/make_golden.py) read as those libraries read them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from bloomery.kernels.packed import Codebook
from bloomery.quant.awq import Awq
from bloomery.quant.base import Format
from bloomery.quant.bitsandbytes import BitsAndBytes
from bloomery.quant.choose import ON_LOAD
from bloomery.quant.compressed import Compressed
from bloomery.quant.gptq import Gptq
from bloomery.quant.int8 import int8
from bloomery.quant.write import int8_tensors, nf4_tensors
from tests.quant.make_golden import OUT
from tests.quant.test_law import CPU, stored

GOLDEN = load_file(OUT)
FORMATS: dict[str, Format] = {
    "bnb": BitsAndBytes(),
    "compressed": Compressed(),
    "awq": Awq(),
    "gptq": Gptq(first_zero=1),
}
NAMES = sorted({name.split("/")[0] for name in GOLDEN if "/" in name})


def parts(name: str) -> dict[str, torch.Tensor]:
    return {
        key.split("/", 1)[1]: value for key, value in GOLDEN.items() if key.startswith(f"{name}/")
    }


@pytest.mark.parametrize("name", NAMES)
def test_reads_what_the_library_wrote(name: str) -> None:
    found = parts(name)
    means = found.pop("means")
    form = FORMATS[name.split("-")[0]]
    got = stored(form, found, tuple(means.shape)).dense(torch.float32, CPU)
    half = means.dtype == torch.float16  # auto-gptq multiplies in half precision
    torch.testing.assert_close(
        got, means.float(), rtol=2e-3 if half else 1e-6, atol=2e-3 if half else 1e-7
    )


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_rounds_while_loading_as_bitsandbytes_does(kind: str) -> None:
    """A row by itself is what the library makes of a matrix of that one row."""
    want = parts(f"bnb-{kind}-nested")
    got = ON_LOAD[kind].inside(GOLDEN["weight"].reshape(1, -1))
    assert isinstance(got, Codebook) and got.outer is not None
    assert torch.equal((got.codes >> 4 | got.codes << 4).view(-1, 1), want["weight"])
    assert torch.equal(got.absmax.flatten(), want["weight.absmax"])
    assert torch.equal(got.outer[0, 1:], want["weight.nested_absmax"])
    assert torch.equal(got.dequantize().view_as(want["means"]), want["means"])


def test_writes_what_bitsandbytes_writes() -> None:
    want = parts("bnb-nf4-nested")
    got = nf4_tensors(GOLDEN["weight"], 0, "float32")
    for part in (
        "weight",
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
    ):
        assert torch.equal(got[part], want[part]), part
    theirs = parts("bnb-int8")
    ours = int8_tensors(GOLDEN["weight"].half().float(), 0)
    assert (ours["weight"].int() - theirs["weight"].int()).abs().max() <= 1  # ties
    assert (ours["weight"] != theirs["weight"]).float().mean() < 0.01
    torch.testing.assert_close(ours["SCB"], theirs["SCB"])
    assert int8(GOLDEN["weight"]).codes.abs().max() == 127
