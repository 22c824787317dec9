"""Converts weights to the tensors of a quantized checkpoint, and builds its quantization_config.

gptq        GPTQ's first format version, with symmetric codes
int4, fp8   compressed-tensors: 4-bit groups with zero points; FP8 with a scale per row
int8, nf4   bitsandbytes
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bloomery.kernels.packed import (
    NESTED_BLOCK_SIZE,
    CodebookWeight,
    GroupedScales,
    pack_codes,
    unpack_codes,
)
from bloomery.kernels.quantize_groups import MIN_SCALE, round_to_codes
from bloomery.quant.fp8 import quantize_fp8
from bloomery.quant.int8 import quantize_int8
from bloomery.quant.nf4 import BLOCK_SIZE, NF4, quantize_codebook
from bloomery.tools.gptq_solver import GptqResult

WORD_BITS = 32
RANGE_CANDIDATES = (1.0, 0.92, 0.84)  # relative to the range of a group
StoredTensors = dict[str, torch.Tensor]  # by suffix of the linear layer's name


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes [n, codes] into int32 [n, words]: a stream of bits, lowest first, zero-padded."""
    device = codes.device
    code_shifts = torch.arange(bits, device=device, dtype=torch.uint8)
    code_bits = codes.to(torch.uint8)[..., None] >> code_shifts & 1
    stream = code_bits.flatten(1)
    padding = -stream.shape[1] % WORD_BITS
    padded = torch.nn.functional.pad(stream, (0, padding))
    byte_bits = padded.unflatten(1, (-1, 8))
    byte_shifts = torch.arange(8, device=device, dtype=torch.uint8)
    packed_bytes = (byte_bits << byte_shifts).sum(-1, dtype=torch.uint8)
    return packed_bytes.contiguous().view(torch.int32)


# ---- tensors -------------------------------------------------------------------------------------


def gptq_tensors(result: GptqResult, bits: int) -> StoredTensors:
    """Pack the codes of GPTQ; its zero points are all in the middle of the range."""
    rows, groups = result.scale.shape
    # The first version of the format stores zero points minus one.
    stored_zero_point = (1 << bits - 1) - 1
    zero_points = torch.full((groups, rows), stored_zero_point, device=result.codes.device)
    return {
        "qweight": pack_words(result.codes, bits).T.contiguous(),
        "qzeros": pack_words(zero_points, bits),
        "scales": result.scale.T.contiguous().half(),
        "g_idx": result.g_idx,
    }


def int4_tensors(weight: torch.Tensor, group_size: int) -> StoredTensors:
    """compressed-tensors' pack-quantized format with 4-bit zero points."""
    packed = quantize_integer_zero_points(weight, 4, group_size)
    assert packed.zero_point is not None
    return {
        "weight_packed": packed.codes.view(torch.int32),
        "weight_scale": packed.scale.contiguous(),
        "weight_zero_point": pack_words(packed.zero_point.T, 4).T.contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }


def fp8_tensors(weight: torch.Tensor, group_size: int) -> StoredTensors:
    """compressed-tensors' float-quantized format with one scale per row."""
    packed = quantize_fp8(weight)
    return {"weight": packed.codes, "weight_scale": packed.scale}


def int8_tensors(weight: torch.Tensor, group_size: int) -> StoredTensors:
    """bitsandbytes' int8 format with one scale per row."""
    packed = quantize_int8(weight)
    return {
        "weight": packed.codes,
        "SCB": (packed.scale * 127).flatten(),  # the largest magnitude of each row
        "weight_format": torch.zeros((), dtype=torch.uint8),
    }


def nf4_tensors(weight: torch.Tensor, group_size: int, dtype: str = "bfloat16") -> StoredTensors:
    """bitsandbytes' NF4 with double quantization. `dtype` is recorded as the original type."""
    # bitsandbytes quantizes the matrix as one long row.
    packed = quantize_codebook(weight.reshape(1, -1), NF4)
    assert isinstance(packed, CodebookWeight) and packed.nested_scale is not None
    codes = unpack_codes(packed.codes, 4)
    state = {
        "quant_type": "nf4",
        "blocksize": BLOCK_SIZE,
        "dtype": dtype,
        "shape": list(weight.shape),
        "nested_blocksize": NESTED_BLOCK_SIZE,
        "nested_dtype": "float32",
        "nested_offset": packed.nested_scale[0, 0].item(),
    }
    state_bytes = list(json.dumps(state).encode())
    return {
        "weight": (codes[:, ::2] << 4 | codes[:, 1::2]).reshape(-1, 1),
        "weight.absmax": packed.absmax.flatten(),
        "weight.quant_map": packed.table[:16].clone(),
        "weight.nested_absmax": packed.nested_scale[0, 1:].clone(),
        "weight.nested_quant_map": packed.table[16:].clone(),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(state_bytes, dtype=torch.uint8),
    }


# Formats that need no calibration: weight [out, in] and group size -> tensors.
TENSOR_WRITERS: Mapping[str, Callable[[torch.Tensor, int], StoredTensors]] = {
    "int4": int4_tensors,
    "int8": int8_tensors,
    "fp8": fp8_tensors,
    "nf4": nf4_tensors,
}


def quantize_integer_zero_points(weight: torch.Tensor, bits: int, group_size: int) -> GroupedScales:
    """Quantize weights [out, in] with zero points that are codes, as checkpoints store them.

    Each group takes the candidate range with the least squared error.
    """
    groups = weight.unflatten(1, (-1, group_size))
    low = groups.amin(-1, keepdim=True).clamp_(max=0)
    high = groups.amax(-1, keepdim=True).clamp_(min=0)
    fits = [fit_range(groups, low * ratio, high * ratio, bits) for ratio in RANGE_CANDIDATES]
    errors, scales, zero_points = map(torch.stack, zip(*fits, strict=True))
    best = errors.argmin(0, keepdim=True)
    scale = scales.gather(0, best)[0]
    zero_point = zero_points.gather(0, best)[0]
    codes = round_to_codes(groups, scale, zero_point, bits).flatten(1)
    return GroupedScales(
        pack_codes(codes, bits),
        scale.flatten(1).half(),
        zero_point.flatten(1).half(),
        bits,
    )


def fit_range(
    groups: torch.Tensor, low: torch.Tensor, high: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize groups [out, groups, columns] to the range low:high.

    Returns the squared error, the scale and the zero point. These, `low` and `high` have the shape
    [out, groups, 1].
    """
    largest_code = 2**bits - 1
    scale = ((high - low) / largest_code).half().float().clamp_(min=MIN_SCALE)
    zero_point = (-low / scale).round_().clamp_(0, largest_code)
    codes = round_to_codes(groups, scale, zero_point, bits)
    values = codes.sub_(zero_point).mul_(scale)
    error = (values - groups).square().sum(-1, keepdim=True)
    return error, scale, zero_point


# ---- configuration -------------------------------------------------------------------------------


def find_misfit(format: str, shape: tuple[int, int], group_size: int, bits: int) -> str | None:
    """Explain why a format cannot hold a matrix of this shape; None if it can.

    A group size of -1 means one group per row.
    """
    rows, columns = shape
    if format == "nf4":
        num_values = rows * columns
        # quantize_codebook does not nest the absmax of a single block, but nf4_tensors needs it.
        if columns % 2 or num_values % BLOCK_SIZE or num_values == BLOCK_SIZE:
            return f"{rows} x {columns} weights are not several blocks of {BLOCK_SIZE}"
    if format in ("gptq", "int4") and group_size != -1 and columns % group_size:
        return f"{columns} columns are not groups of {group_size}"
    if format == "int4" and columns % 8:
        return f"{columns} columns of four bits are not whole words"
    if format == "gptq" and (columns * bits % WORD_BITS or rows * bits % WORD_BITS):
        return f"{rows} x {columns} codes of {bits} bits are not whole words"
    return None


def build_quantization_config(
    format: str, group_size: int, bits: int, act_order: bool, unquantized: Sequence[str]
) -> Mapping[str, Any]:
    """Build the quantization_config of config.json. `unquantized`: modules in full precision."""
    if format == "gptq":
        return {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group_size,
            "desc_act": act_order,
            "sym": True,
            "lm_head": False,
            "checkpoint_format": "gptq",
        }
    if format in ("int8", "nf4"):
        return bitsandbytes_config(format == "nf4", unquantized)
    return compressed_tensors_config(format, group_size, unquantized)


def bitsandbytes_config(is_4bit: bool, unquantized: Sequence[str]) -> Mapping[str, Any]:
    config = {
        "quant_method": "bitsandbytes",
        "load_in_8bit": not is_4bit,
        "load_in_4bit": is_4bit,
        "llm_int8_skip_modules": list(unquantized),
        "llm_int8_threshold": 6.0,
    }
    if is_4bit:
        config["bnb_4bit_quant_type"] = "nf4"
        config["bnb_4bit_use_double_quant"] = True
        config["bnb_4bit_quant_storage"] = "uint8"
    return config


def compressed_tensors_config(
    format: str, group_size: int, unquantized: Sequence[str]
) -> Mapping[str, Any]:
    inputs: Mapping[str, Any] | None = None
    if format == "fp8":
        weights: dict[str, Any] = {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "channel",
        }
        inputs = {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
    else:
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": False,
            "strategy": "channel" if group_size == -1 else "group",
            "group_size": None if group_size == -1 else group_size,
        }
    scheme = {
        "targets": ["Linear"],
        "weights": {**weights, "dynamic": False},
        "input_activations": inputs,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if format == "int4" else "float-quantized",
        "quantization_status": "compressed",
        "ignore": list(unquantized),
        "config_groups": {"group_0": scheme},
    }
