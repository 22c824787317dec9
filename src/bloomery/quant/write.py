"""Packed products as the tensors of a checkpoint, and the quantization_config that goes with them.

gptq          GPTQ, first version: symmetric, so its zeros are the same in all versions
int4, fp8     compressed-tensors: groups of four bits with zeros; 8-bit floats with a scale a row
int8, nf4     bitsandbytes
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bloomery.kernels.packed import NESTED, Codebook, unpack
from bloomery.quant.fp8 import fp8
from bloomery.quant.int4 import whole_zeros
from bloomery.quant.int8 import int8
from bloomery.quant.nf4 import BLOCK, NF4, codebook
from bloomery.quant.solve import Solved

Written = dict[str, torch.Tensor]


def words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """[lines, numbers] -> [lines, words] int32: a stream of bits, lowest first, in whole words."""
    each = torch.arange(bits, device=numbers.device, dtype=torch.uint8)
    stream = (numbers.to(torch.uint8)[..., None] >> each & 1).flatten(1)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 32)).unflatten(1, (-1, 8))
    places = torch.arange(8, device=numbers.device, dtype=torch.uint8)
    return (stream << places).sum(-1, dtype=torch.uint8).contiguous().view(torch.int32)


def gptq_tensors(solved: Solved, bits: int) -> Written:
    groups = solved.scale.shape[1]
    rows = len(solved.scale)
    zeros = torch.full((groups, rows), (1 << bits - 1) - 1, device=solved.codes.device)
    return {
        "qweight": words(solved.codes, bits).T.contiguous(),
        "qzeros": words(zeros, bits),
        "scales": solved.scale.T.contiguous().half(),
        "g_idx": solved.groups,
    }


def int4_tensors(weight: torch.Tensor, group: int) -> Written:
    packed = whole_zeros(weight, 4, group)
    assert packed.zero is not None
    return {
        "weight_packed": packed.codes.view(torch.int32),
        "weight_scale": packed.scale.contiguous(),
        "weight_zero_point": words(packed.zero.T, 4).T.contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }


def fp8_tensors(weight: torch.Tensor, group: int) -> Written:
    packed = fp8(weight)
    return {"weight": packed.codes, "weight_scale": packed.scale}


def int8_tensors(weight: torch.Tensor, group: int) -> Written:
    packed = int8(weight)
    largest = (packed.scale * 127).flatten()
    return {
        "weight": packed.codes,
        "SCB": largest,
        "weight_format": torch.zeros((), dtype=torch.uint8),
    }


def nf4_tensors(weight: torch.Tensor, group: int, dtype: str = "bfloat16") -> Written:
    """Largest magnitudes are codes themselves, of a table that is fine near zero, less their mean."""
    packed = codebook(weight.reshape(1, -1), NF4)  # blocks do not mind where a row ends
    assert isinstance(packed, Codebook) and packed.outer is not None
    numbers = unpack(packed.codes, 4)
    (mean, *_) = packed.outer[0].tolist()
    state = {
        "quant_type": "nf4",
        "blocksize": BLOCK,
        "dtype": dtype,
        "shape": list(weight.shape),
        "nested_blocksize": NESTED,
        "nested_dtype": "float32",
        "nested_offset": mean,
    }
    return {
        "weight": (numbers[:, ::2] << 4 | numbers[:, 1::2]).reshape(-1, 1),
        "weight.absmax": packed.absmax.flatten(),
        "weight.quant_map": packed.table[:16].clone(),
        "weight.nested_absmax": packed.outer[0, 1:].clone(),
        "weight.nested_quant_map": packed.table[16:].clone(),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }


WRITERS = {"int4": int4_tensors, "int8": int8_tensors, "fp8": fp8_tensors, "nf4": nf4_tensors}


def misfit(form: str, shape: tuple[int, int], group: int, bits: int) -> str | None:
    """Why a format cannot say a product of these sizes. `group` -1: a whole row."""
    rows, width = shape
    if form == "nf4" and (width % 2 or rows * width % BLOCK or rows * width == BLOCK):
        return f"{rows} x {width} weights are not several blocks of {BLOCK}"
    if form in ("gptq", "int4") and group != -1 and width % group:
        return f"{width} columns are not groups of {group}"
    if form == "int4" and width % 8:
        return f"{width} columns of four bits are not whole words"
    if form == "gptq" and (width * bits % 32 or rows * bits % 32):
        return f"{rows} x {width} codes of {bits} bits are not whole words"
    return None


def configuration(
    form: str, group: int, bits: int, act_order: bool, kept: Sequence[str]
) -> Mapping[str, Any]:
    """`kept`: products in full precision."""
    if form == "gptq":
        return {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "desc_act": act_order,
            "sym": True,
            "lm_head": False,
            "checkpoint_format": "gptq",
        }
    if form in ("int8", "nf4"):
        four = form == "nf4"
        wide = {
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_quant_storage": "uint8",
        }
        return {
            "quant_method": "bitsandbytes",
            "load_in_8bit": not four,
            "load_in_4bit": four,
            "llm_int8_skip_modules": list(kept),
            "llm_int8_threshold": 6.0,
        } | (wide if four else {})
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": group,
    }
    if group == -1:
        weights |= {"strategy": "channel", "group_size": None}
    inputs = None
    if form == "fp8":
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
        inputs = {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
    scheme = {
        "targets": ["Linear"],
        "weights": {**weights, "dynamic": False},
        "input_activations": inputs,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if form == "int4" else "float-quantized",
        "quantization_status": "compressed",
        "ignore": list(kept),
        "config_groups": {"group_0": scheme},
    }
