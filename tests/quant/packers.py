"""Quantized checkpoints packed by hand: one packer per format.

A packer turns a weight [out, in] into the tensors that a library would write, and the values that
these stand for. Packers are deliberately slow and simple and share no code with the code under
test. test_library_parity.py compares the code under test with the libraries themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

FP8_MAX = 448
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class PackedTensors(NamedTuple):
    tensors: dict[str, torch.Tensor]  # by suffix of the module's name
    values: torch.Tensor  # [out, in]


Packer = Callable[[torch.Tensor], PackedTensors]


@dataclass(frozen=True)
class PackedCase:
    config: dict[str, Any]  # quantization_config
    pack: Packer


# ---- integers ------------------------------------------------------------------------------------


def pack_bits(codes: list[int], bits: int) -> list[int]:
    """Pack codes one after another into 32-bit words, lowest bit first."""
    stream = sum(code << bits * i for i, code in enumerate(codes))
    num_words = -(-len(codes) * bits // 32)
    return [stream >> 32 * i & 0xFFFFFFFF for i in range(num_words)]


def to_int32(rows: list[list[int]]) -> torch.Tensor:
    """Unsigned 32-bit words as an int32 tensor."""
    signed = [[word - (1 << 32) if word >> 31 else word for word in row] for row in rows]
    return torch.tensor(signed, dtype=torch.int32)


class GroupedCodes(NamedTuple):
    codes: torch.Tensor  # [out, in]
    scales: torch.Tensor  # [out, groups]
    zero_points: torch.Tensor  # [out, groups]
    values: torch.Tensor  # [out, in]


def quantize_asymmetric(
    weight: torch.Tensor, bits: int, g_idx: torch.Tensor, lowest_zero_point: int = 0
) -> GroupedCodes:
    """Quantize with a scale and a zero point per group; g_idx [in] is the group of each column."""
    num_groups = int(g_idx.max()) + 1
    largest_code = 2**bits - 1
    scales = torch.empty(len(weight), num_groups)
    zero_points = torch.empty(len(weight), num_groups, dtype=torch.long)
    codes = torch.empty(weight.shape, dtype=torch.long)
    values = torch.empty_like(weight)
    for group in range(num_groups):
        columns = g_idx == group
        block = weight[:, columns]
        low = block.amin(1).clamp(max=0)
        high = block.amax(1).clamp(min=0)
        scale = ((high - low) / largest_code).half().float().clamp(min=1e-6)
        zero_point = (-low / scale).round().clamp(lowest_zero_point, largest_code)
        shifted = (block / scale[:, None] + zero_point[:, None]).round()
        codes[:, columns] = shifted.clamp(0, largest_code).long()
        values[:, columns] = (codes[:, columns] - zero_point[:, None]) * scale[:, None]
        scales[:, group] = scale
        zero_points[:, group] = zero_point
    return GroupedCodes(codes, scales, zero_points, values)


def quantize_symmetric(weight: torch.Tensor, bits: int, g_idx: torch.Tensor) -> GroupedCodes:
    """Quantize with a scale per group; the zero point is the middle of the range."""
    middle = 2 ** (bits - 1)
    num_groups = int(g_idx.max()) + 1
    absmax = [weight[:, g_idx == group].abs().amax(1) for group in range(num_groups)]
    scales = (torch.stack(absmax, 1) / (middle - 1)).half().float()
    steps = (weight / scales[:, g_idx]).round().clamp(-middle, middle - 1)
    codes = steps.long() + middle
    zero_points = torch.full_like(scales, middle).long()
    return GroupedCodes(codes, scales, zero_points, (codes - middle) * scales[:, g_idx])


def consecutive_groups(columns: int, group_size: int) -> torch.Tensor:
    return torch.arange(columns) // (columns if group_size == -1 else group_size)


def shuffle(g_idx: torch.Tensor, seed: int) -> torch.Tensor:
    return g_idx[torch.randperm(len(g_idx), generator=torch.Generator().manual_seed(seed))]


def gptq(bits: int, group_size: int, act_order: bool = False, version: int = 1) -> Packer:
    def pack(weight: torch.Tensor) -> PackedTensors:
        columns = weight.shape[1]
        g_idx = consecutive_groups(columns, group_size)
        if act_order:
            g_idx = shuffle(g_idx, seed=columns)
        # The first version stores zero points minus one, so it has no zero point 0.
        grouped = quantize_asymmetric(weight, bits, g_idx, lowest_zero_point=version % 2)
        stored_zero_points = grouped.zero_points
        if version == 1:
            stored_zero_points = stored_zero_points - 1
        code_words = [pack_bits(row, bits) for row in grouped.codes.tolist()]
        zero_point_words = [pack_bits(group, bits) for group in stored_zero_points.T.tolist()]
        tensors = {
            "qweight": to_int32(code_words).T.contiguous(),
            "qzeros": to_int32(zero_point_words),
            "scales": grouped.scales.T.contiguous().half(),
            "g_idx": g_idx.int(),
        }
        return PackedTensors(tensors, grouped.values)

    return pack


def awq(group_size: int) -> Packer:
    output_order = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs of a word, from its lowest bits up

    def pack_word(outputs: list[int]) -> int:
        return sum(outputs[output] << 4 * i for i, output in enumerate(output_order))

    def pack_rows(rows: list[list[int]]) -> torch.Tensor:
        return to_int32(
            [[pack_word(row[i : i + 8]) for i in range(0, len(row), 8)] for row in rows]
        )

    def pack(weight: torch.Tensor) -> PackedTensors:
        g_idx = consecutive_groups(weight.shape[1], group_size)
        grouped = quantize_asymmetric(weight, 4, g_idx)
        tensors = {
            "qweight": pack_rows(grouped.codes.T.tolist()),
            "qzeros": pack_rows(grouped.zero_points.T.tolist()),
            "scales": grouped.scales.T.contiguous().half(),
        }
        return PackedTensors(tensors, grouped.values)

    return pack


def pack_quantized(bits: int, group_size: int, symmetric: bool, act_order: bool = False) -> Packer:
    """compressed-tensors, format pack-quantized."""

    def pack(weight: torch.Tensor) -> PackedTensors:
        g_idx = consecutive_groups(weight.shape[1], group_size)
        if act_order:
            g_idx = shuffle(g_idx, seed=1)
        if symmetric:
            grouped = quantize_symmetric(weight, bits, g_idx)
        else:
            grouped = quantize_asymmetric(weight, bits, g_idx)
        tensors = {
            "weight_packed": to_int32([pack_bits(row, bits) for row in grouped.codes.tolist()]),
            "weight_scale": grouped.scales.half(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            zero_points = [pack_bits(group, bits) for group in grouped.zero_points.T.tolist()]
            tensors["weight_zero_point"] = to_int32(zero_points).T.contiguous()
        if act_order:
            tensors["weight_g_idx"] = g_idx.int()
        return PackedTensors(tensors, grouped.values)

    return pack


def int_quantized(strategy: str, asymmetric: bool = False) -> Packer:
    """compressed-tensors, formats int-quantized and naive-quantized."""

    def pack(weight: torch.Tensor) -> PackedTensors:
        is_per_tensor = strategy == "tensor"
        absmax = weight.abs().amax() if is_per_tensor else weight.abs().amax(1, keepdim=True)
        scale = absmax / 100
        zero_point = torch.full_like(scale, 5 if asymmetric else 0)
        codes = (weight / scale + zero_point).round().clamp(-128, 127)
        tensors = {
            "weight": codes.to(torch.int8),
            "weight_scale": scale.reshape(1) if is_per_tensor else scale,
        }
        if asymmetric:
            tensors["weight_zero_point"] = zero_point.to(torch.int8)
        return PackedTensors(tensors, (codes - zero_point) * scale)

    return pack


def bitsandbytes_int8(weight: torch.Tensor) -> PackedTensors:
    absmax = weight.abs().amax(1)
    codes = (weight * (127 / absmax[:, None])).round()
    tensors = {
        "weight": codes.to(torch.int8),
        "SCB": absmax,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return PackedTensors(tensors, codes * (absmax[:, None] / 127))


# ---- floats --------------------------------------------------------------------------------------


def fp8(strategy: str, scale_name: str = "weight_scale") -> Packer:
    """One scale per tensor, row or 128 x 128 block."""

    def pack(weight: torch.Tensor) -> PackedTensors:
        rows, columns = weight.shape
        if strategy == "tensor":
            scale = weight.abs().amax() / FP8_MAX
            full_scale = scale
        elif strategy == "row":
            scale = weight.abs().amax(1, keepdim=True) / FP8_MAX
            full_scale = scale
        else:
            scale = torch.tensor(
                [
                    [weight[i : i + 128, j : j + 128].abs().amax() for j in range(0, columns, 128)]
                    for i in range(0, rows, 128)
                ]
            )
            scale = scale / FP8_MAX
            full_scale = scale.repeat_interleave(128, 0)[:rows]
            full_scale = full_scale.repeat_interleave(128, 1)[:, :columns]
        codes = (weight / full_scale).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, scale_name: scale}
        if strategy == "tensor":
            tensors["input_scale"] = torch.tensor(0.5)
        return PackedTensors(tensors, codes.float() * full_scale)

    return pack


def mxfp4(codes_name: str, scales_name: str) -> Packer:
    table = torch.tensor(E2M1)

    def pack(weight: torch.Tensor) -> PackedTensors:
        blocks = weight.unflatten(1, (-1, 32))
        exponent = (blocks.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)
        scale = exponent.exp2()[..., None]
        codes = ((blocks / scale)[..., None] - table).abs().argmin(-1)
        values = (table[codes] * scale).flatten(1)
        flat = codes.flatten(1)
        tensors = {
            codes_name: (flat[:, ::2] | flat[:, 1::2] << 4).to(torch.uint8),
            scales_name: (exponent + 127).to(torch.uint8),
        }
        return PackedTensors(tensors, values)

    return pack


# ---- checkpoints ---------------------------------------------------------------------------------


def compressed_config(format: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def int_config(format: str, num_bits: int, **weights: Any) -> dict[str, Any]:
    return compressed_config(format, num_bits=num_bits, type="int", **weights)


def float_config(strategy: str) -> dict[str, Any]:
    return compressed_config("float-quantized", num_bits=8, type="float", strategy=strategy)


def gptq_config(bits: int, group_size: int = 32, **options: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": False,
        "sym": False,
        **options,
    }


V2 = {"checkpoint_format": "gptq_v2"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
PACKED = "pack-quantized"
PACKED_CASES: dict[str, PackedCase] = {
    "gptq-4": PackedCase(gptq_config(4), gptq(4, 32)),
    "gptq-4-row": PackedCase(gptq_config(4, -1), gptq(4, -1)),
    "gptq-4-act-order": PackedCase(gptq_config(4, desc_act=True), gptq(4, 32, act_order=True)),
    "gptq-4-v2": PackedCase(gptq_config(4) | V2, gptq(4, 32, version=2)),
    "gptq-2": PackedCase(gptq_config(2) | V2, gptq(2, 32, version=2)),
    "gptq-3": PackedCase(gptq_config(3) | V2, gptq(3, 32, version=2)),
    "gptq-3-act-order": PackedCase(gptq_config(3) | V2, gptq(3, 32, act_order=True, version=2)),
    "gptq-8": PackedCase(gptq_config(8), gptq(8, 32)),
    "awq": PackedCase(AWQ, awq(32)),
    "w4a16": PackedCase(int_config(PACKED, 4, strategy="group"), pack_quantized(4, 32, True)),
    "w4a16-zeros": PackedCase(int_config(PACKED, 4, symmetric=False), pack_quantized(4, 32, False)),
    "w4a16-act-order": PackedCase(
        int_config(PACKED, 4), pack_quantized(4, 32, True, act_order=True)
    ),
    "w8a16": PackedCase(int_config(PACKED, 8, strategy="channel"), pack_quantized(8, -1, True)),
    "w8a8": PackedCase(
        int_config("int-quantized", 8, strategy="channel"), int_quantized("channel")
    ),
    "w8a8-zeros": PackedCase(
        int_config("int-quantized", 8), int_quantized("channel", asymmetric=True)
    ),
    "naive": PackedCase(
        int_config("naive-quantized", 8, strategy="tensor"), int_quantized("tensor")
    ),
    "float8-row": PackedCase(float_config("channel"), fp8("row")),
    "float8-tensor": PackedCase(float_config("tensor"), fp8("tensor")),
    "fp8-tensor": PackedCase(FP8 | {"activation_scheme": "static"}, fp8("tensor")),
    "fp8-row": PackedCase({"quant_method": "fbgemm_fp8"}, fp8("row")),
    "fp8-blocks": PackedCase(
        FP8 | {"weight_block_size": [128, 128]}, fp8("block", "weight_scale_inv")
    ),
    "mxfp4": PackedCase({"quant_method": "mxfp4"}, mxfp4("weight_blocks", "weight_scales")),
    "mxfp4-packed": PackedCase(
        compressed_config("mxfp4-pack-quantized", num_bits=4),
        mxfp4("weight_packed", "weight_scale"),
    ),
    "bitsandbytes-8": PackedCase(
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes_int8
    ),
}


def repack_checkpoint(
    origin: Path,
    packed_folder: Path,
    dense_folder: Path,
    case: PackedCase,
    is_packed: Callable[[str], bool],
) -> None:
    """Write a checkpoint twice: with packed modules, and with their values in full precision.

    `is_packed(module)` chooses the modules.
    """
    dense: dict[str, torch.Tensor] = {}
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(origin / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if tensor.dim() == 2 and name.endswith(".weight") and is_packed(module):
            tensors, dense[name] = case.pack(tensor.float())
            packed |= {f"{module}.{suffix}": part for suffix, part in tensors.items()}
        else:
            packed[name] = tensor
            dense[name] = tensor
    config = json.loads((origin / "config.json").read_text())
    write_checkpoint(packed_folder, packed, config | {"quantization_config": case.config})
    write_checkpoint(dense_folder, dense, config)


def write_checkpoint(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    copies = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(copies, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def is_in_layer(module: str) -> bool:
    """For `is_packed`: all modules of decoder layers."""
    return ".layers." in module
