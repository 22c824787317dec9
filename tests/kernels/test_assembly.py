"""The inline PTX of the packed GEMM kernels, executed by a small PTX interpreter over all codes.

Triton's interpreter does not run inline assembly, so these tests do it line by line.
"""

from __future__ import annotations

import re

import pytest
import torch

from bloomery.kernels import packed_gemm, packed_gemv, packed_wgmma
from bloomery.quant.mxfp4 import E2M1

WORD_MASK = 0xFFFFFFFF

ARITHMETIC = {
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "fma": lambda x, y, z: x * y + z,
}


def words_to_floats(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View words [n] as pairs of 16-bit floats [n, 2]."""
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return signed.view(torch.int16).view(dtype).view(-1, 2)


def floats_to_words(pairs: torch.Tensor) -> torch.Tensor:
    """View pairs of 16-bit floats [n, 2] as words [n]."""
    return pairs.contiguous().view(torch.int32).view(-1).long() & WORD_MASK


def duplicate(value: float, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Words [count] with the value in both halves."""
    return floats_to_words(torch.full((count, 2), value, dtype=dtype))


def permute_bytes(
    first: torch.Tensor, second: torch.Tensor, selector: torch.Tensor
) -> torch.Tensor:
    """prmt: byte i of the result is byte (selector >> 4 * i) & 7 of the two words.

    Bit 3 of a selector replaces the byte by eight copies of its highest bit.
    """
    source = [first >> 8 * i & 255 for i in range(4)] + [second >> 8 * i & 255 for i in range(4)]
    stacked = torch.stack(source)
    result = torch.zeros_like(first)
    for i in range(4):
        index = selector >> 4 * i & 15
        selected = stacked.gather(0, index[None] & 7)[0]
        selected = torch.where(index < 8, selected, (selected >> 7) * 255)
        result |= selected << 8 * i
    return result


def run_ptx(
    text: str, inputs: dict[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Run the lines and return all registers. Each register is a tensor of many words."""
    registers = dict(inputs)
    size = len(next(iter(inputs.values())))

    def read(name: str) -> torch.Tensor:
        return registers[name] if name in registers else torch.full((size,), int(name, 0))

    for line in text.strip("{}\n").split("\n"):
        if line.startswith(".reg"):
            continue
        if line.startswith("wgmma.wait_group"):
            assert registers.keys() == inputs.keys(), "written before the tensor cores have read"
            continue
        operation, target, *names = re.findall(r"[\w.$]+", line)
        a, *more = map(read, names)
        match operation.split("."):
            case ["mov", _]:
                registers[target] = a
            case ["mad", "lo", _]:
                registers[target] = a * more[0] + more[1] & WORD_MASK
            case ["shr", _]:
                registers[target] = a >> more[0]
            case ["shl", _]:
                registers[target] = a << more[0] & WORD_MASK
            case ["and", _]:
                registers[target] = a & more[0]
            case ["or", _]:
                registers[target] = a | more[0]
            case ["xor", _]:
                registers[target] = a ^ more[0]
            case ["lop3", _]:
                assert names[3] == "0xEA", "a & b | c"
                registers[target] = a & more[0] | more[1]
            case ["prmt", _]:
                registers[target] = permute_bytes(a, more[0], more[1])
            case [name, "rn", _]:
                operands = (words_to_floats(word, dtype).double() for word in (a, *more))
                registers[target] = floats_to_words(ARITHMETIC[name](*operands).to(dtype))
            case _:
                raise AssertionError(f"unknown instruction: {line}")
    return registers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["int", "codebook", "mxfp4"])
def test_gemm_dequantizes_4bit_codes(kind: str, dtype: torch.dtype) -> None:
    words = torch.randint(0, 1 << 32, (5000,))
    codes = torch.stack([words >> 4 * j & 15 for j in range(8)])
    scale_factor = 1.0
    sum_factor = 1.0
    if kind == "mxfp4" and dtype == torch.bfloat16:
        scale_factor = packed_gemm.FP4_SCALE_FACTOR.value
        sum_factor = packed_gemm.FP4_SUM_FACTOR.value
    inputs = {"$4": words, "$5": duplicate(0.25 * scale_factor, dtype, len(words))}
    if kind == "int":
        exponent = 128 if dtype == torch.bfloat16 else 1024
        inputs["$6"] = duplicate(0.125, dtype, len(words))
        inputs["$7"] = duplicate(exponent + 5, dtype, len(words))
        expected = (codes - 5) * 0.25 + 0.125
    elif kind == "mxfp4":
        expected = torch.tensor(E2M1)[codes] * 0.25
    else:
        table = torch.randn(16).to(dtype)
        table_bytes = table.view(torch.uint8).view(16, 2).long()
        for i in range(8):
            four_bytes = table_bytes[4 * (i % 4) : 4 * (i % 4) + 4, i // 4]
            table_word = sum(int(four_bytes[j]) << 8 * j for j in range(4))
            inputs[f"${6 + 2 * i}"] = torch.full((len(words),), table_word)
        expected = (table[codes].double() * 0.25).to(dtype)
    asm = packed_gemm.build_dequantize_asm(kind, 4, False, dtype, False, True)
    registers = run_ptx(asm, inputs, dtype)
    for i in range(4):
        pair = torch.stack([expected[i], expected[i + 4]], -1)
        actual = words_to_floats(registers[f"${i}"], dtype).double() * sum_factor
        assert torch.equal(actual, pair.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale_sums", [True, False])
@pytest.mark.parametrize(("kind", "signed"), [("int", False), ("int", True), ("fp8", False)])
def test_gemm_dequantizes_8bit_codes(
    kind: str, signed: bool, scale_sums: bool, dtype: torch.dtype
) -> None:
    codes = torch.arange(256)[torch.randperm(1024) % 256].view(-1, 4)
    if kind == "fp8":
        codes = torch.where(codes & 127 == 127, 0, codes)  # NaN
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    elif signed:
        values = codes.to(torch.uint8).view(torch.int8).double()
    else:
        values = codes.double() - 128
    words = (codes << torch.arange(0, 32, 8)).sum(1)
    inputs = {
        "$2": words,
        "$3": duplicate(0.5, dtype, len(words)),
        "$4": duplicate(8.0, dtype, len(words)),
    }
    if not scale_sums:
        values = values * 0.5 + (8.0 if kind == "int" else 0.0)
    asm = packed_gemm.build_dequantize_asm(kind, 8, signed, dtype, scale_sums, True)
    registers = run_ptx(asm, inputs, dtype)
    for i in range(2):
        expected = values[:, [i, i + 2]].to(dtype)
        assert torch.equal(words_to_floats(registers[f"${i}"], dtype).double(), expected.double())


@pytest.mark.parametrize(("kind", "bits"), [("int", 4), ("int", 8), ("mxfp4", 4), ("fp8", 8)])
def test_gemm_waits_for_asynchronous_tensor_cores_only(kind: str, bits: int) -> None:
    """wgmma reads registers while the program goes on. Other tensor cores need no wait."""
    waiting = packed_gemm.build_dequantize_asm(kind, bits, False, torch.bfloat16, False, True)
    assert waiting.count("wgmma.wait_group.sync.aligned 0;") == 1
    assert "wgmma" not in packed_gemm.build_dequantize_asm(
        kind, bits, False, torch.bfloat16, False, False
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
def test_wgmma_dequantizes_every_pair_of_codes(bits: int, dtype: torch.dtype) -> None:
    words = torch.arange(1 << 2 * bits)
    codes = torch.stack((words & ((1 << bits) - 1), words >> bits), -1)
    asm = packed_wgmma.build_dequantize_asm(bits, dtype)["DEQUANTIZE_ASM"]
    inputs = {"$1": words}
    if bits == 4:
        exponent = 128 if dtype == torch.bfloat16 else 1024
        inputs["$2"] = duplicate(0.25, dtype, len(words))
        inputs["$3"] = duplicate(0.125, dtype, len(words))
        inputs["$4"] = duplicate(exponent + 5, dtype, len(words))
        expected = (codes - 5) * 0.25 + 0.125
    else:
        expected = codes - 256 * (codes > 127)
    result = run_ptx(asm, inputs, dtype)["$0"]
    assert torch.equal(words_to_floats(result, dtype).double(), expected.double())


def test_4_bit_floats_become_bytes() -> None:
    codes = torch.arange(16).repeat(8, 1)
    for place in range(8):
        codes[place] = codes[place].roll(place)  # [place in the word, word]
    shifts = 4 * torch.arange(8)[:, None]
    words = (codes << shifts).sum(0)
    text = packed_gemv.FP4_TO_BYTES_ASM.value
    registers = run_ptx(text, {"$2": words}, torch.float16)
    for half in range(2):
        actual = [registers[f"${half}"] >> 8 * i & 255 for i in range(4)]
        values = torch.tensor(E2M1)[codes[4 * half : 4 * half + 4]]
        assert torch.equal(torch.stack(actual), (12 + 2 * values).long())
