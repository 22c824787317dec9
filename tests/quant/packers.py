"""Checkpoints packed by hand, one function a format, each beside the numbers it stands for.

Deliberately slow and plain, and apart from the code under test: `pack(weight)` gives the tensors a library would write
and the matrix that they mean. tests/quant/golden.py says how these were compared with the libraries.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Packed = tuple[
    dict[str, torch.Tensor], torch.Tensor
]  # by suffix of the module's name; what they mean


@dataclass(frozen=True)
class Case:
    config: dict[str, Any]  # quantization_config
    pack: Callable[[torch.Tensor], Packed]


def stream(numbers: list[int], bits: int) -> list[int]:
    """Numbers one after another in 32-bit words, lowest bit first."""
    whole = sum(number << bits * i for i, number in enumerate(numbers))
    return [whole >> 32 * i & 0xFFFFFFFF for i in range(-(-len(numbers) * bits // 32))]


def signed(words: list[list[int]]) -> torch.Tensor:
    return torch.tensor(
        [[word - (1 << 32) if word >> 31 else word for word in line] for line in words],
        dtype=torch.int32,
    )


def grid(
    weight: torch.Tensor, bits: int, index: torch.Tensor, lowest: int = 0
) -> tuple[torch.Tensor, ...]:
    """Codes [out, in], scales and zeros [out, groups], and the values; the group of a column is index[column]."""
    groups = int(index.max()) + 1
    top = 2**bits - 1
    scales = torch.empty(len(weight), groups)
    zeros = torch.empty(len(weight), groups, dtype=torch.long)
    codes = torch.empty(weight.shape, dtype=torch.long)
    values = torch.empty_like(weight)
    for g in range(groups):
        mine = index == g
        block = weight[:, mine]
        low = block.amin(1).clamp(max=0)
        high = block.amax(1).clamp(min=0)
        scales[:, g] = ((high - low) / top).half().float().clamp(min=1e-6)
        zeros[:, g] = (-low / scales[:, g]).round().clamp(lowest, top)
        codes[:, mine] = (
            (block / scales[:, g, None] + zeros[:, g, None]).round().clamp(0, top).long()
        )
        values[:, mine] = (codes[:, mine] - zeros[:, g, None]) * scales[:, g, None]
    return codes, scales, zeros, values


def gptq(
    bits: int, group: int, act_order: bool = False, version: int = 1
) -> Callable[[torch.Tensor], Packed]:
    def pack(weight: torch.Tensor) -> Packed:
        width = weight.shape[1]
        index = torch.arange(width) // (width if group == -1 else group)
        if act_order:
            index = index[torch.randperm(width, generator=torch.Generator().manual_seed(width))]
        # The first version cannot say zero: it stores one less.
        codes, scales, zeros, values = grid(weight, bits, index, lowest=version % 2)
        stored = zeros - 1 if version == 1 else zeros
        return {
            "qweight": signed([stream(row, bits) for row in codes.tolist()]).T.contiguous(),
            "qzeros": signed([stream(line, bits) for line in stored.T.tolist()]),
            "scales": scales.T.contiguous().half(),
            "g_idx": index.int(),
        }, values

    return pack


def awq(group: int) -> Callable[[torch.Tensor], Packed]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs of a word, from its lowest bits up

    def woven(lines: list[list[int]]) -> torch.Tensor:
        return signed(
            [
                [
                    sum(line[at + order[i]] << 4 * i for i in range(8))
                    for at in range(0, len(line), 8)
                ]
                for line in lines
            ]
        )

    def pack(weight: torch.Tensor) -> Packed:
        codes, scales, zeros, values = grid(weight, 4, torch.arange(weight.shape[1]) // group)
        tensors = {"qweight": woven(codes.T.tolist()), "qzeros": woven(zeros.T.tolist())}
        return {**tensors, "scales": scales.T.contiguous().half()}, values

    return pack


def words(
    bits: int, group: int, symmetric: bool, act_order: bool = False
) -> Callable[[torch.Tensor], Packed]:
    """compressed-tensors, pack-quantized."""

    def pack(weight: torch.Tensor) -> Packed:
        (rows, width) = weight.shape
        middle = 2 ** (bits - 1)
        index = torch.arange(width) // (width if group == -1 else group)
        if act_order:
            index = index[torch.randperm(width, generator=torch.Generator().manual_seed(1))]
        if symmetric:
            groups = int(index.max()) + 1
            scales = (
                torch.stack(
                    [weight[:, index == g].abs().amax(1) / (middle - 1) for g in range(groups)], 1
                )
                .half()
                .float()
            )
            codes = (weight / scales[:, index]).round().clamp(-middle, middle - 1).long() + middle
            zeros = torch.full_like(scales, middle).long()
            values = (codes - middle) * scales[:, index]
        else:
            codes, scales, zeros, values = grid(weight, bits, index)
        tensors = {
            "weight_packed": signed([stream(row, bits) for row in codes.tolist()]),
            "weight_scale": scales.half(),
            "weight_shape": torch.tensor([rows, width]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = signed(
                [stream(column, bits) for column in zeros.T.tolist()]
            ).T.contiguous()
        if act_order:
            tensors["weight_g_idx"] = index.int()
        return tensors, values

    return pack


def bytes_of(strategy: str, asymmetric: bool = False) -> Callable[[torch.Tensor], Packed]:
    """compressed-tensors, int-quantized."""

    def pack(weight: torch.Tensor) -> Packed:
        whole = strategy == "tensor"
        largest = weight.abs().amax() if whole else weight.abs().amax(1, keepdim=True)
        scale = largest / 100
        zero = torch.full_like(scale, 5 if asymmetric else 0).round()
        codes = (weight / scale + zero).round().clamp(-128, 127)
        tensors = {
            "weight": codes.to(torch.int8),
            "weight_scale": scale.reshape(1) if whole else scale,
        }
        if asymmetric:
            tensors["weight_zero_point"] = zero.to(torch.int8)
        return tensors, (codes - zero) * scale

    return pack


def float8(strategy: str, name: str = "weight_scale") -> Callable[[torch.Tensor], Packed]:
    def pack(weight: torch.Tensor) -> Packed:
        rows, width = weight.shape
        if strategy == "tensor":
            scale = weight.abs().amax() / 448
            spread = scale
        elif strategy == "row":
            scale = spread = weight.abs().amax(1, keepdim=True) / 448
        else:
            squares = [
                [weight[a : a + 128, b : b + 128].abs().amax() / 448 for b in range(0, width, 128)]
                for a in range(0, rows, 128)
            ]
            scale = torch.tensor(squares)
            spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :width]
        codes = (weight / spread).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, name: scale}
        if strategy == "tensor":
            tensors["input_scale"] = torch.tensor(0.5)
        return tensors, codes.float() * spread

    return pack


def mxfp4(codes_name: str, scales_name: str) -> Callable[[torch.Tensor], Packed]:
    table = torch.tensor(
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    )

    def pack(weight: torch.Tensor) -> Packed:
        blocks = weight.unflatten(1, (-1, 32))
        exponent = (blocks.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)
        scaled = blocks / exponent.exp2()[..., None]
        codes = (scaled[..., None] - table).abs().argmin(-1)
        values = (table[codes] * exponent.exp2()[..., None]).flatten(1)
        flat = codes.flatten(1)
        packed = (flat[:, ::2] | flat[:, 1::2] << 4).to(torch.uint8)
        return {codes_name: packed, scales_name: (exponent + 127).to(torch.uint8)}, values

    return pack


def bnb8(weight: torch.Tensor) -> Packed:
    largest = weight.abs().amax(1)
    codes = (weight * (127 / largest[:, None])).round()
    tensors = {
        "weight": codes.to(torch.int8),
        "SCB": largest,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, codes * (largest[:, None] / 127)


def scheme(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def gptq_config(bits: int, group: int = 32, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": False,
        "sym": False,
        **more,
    }


V2 = {"checkpoint_format": "gptq_v2"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
CASES: dict[str, Case] = {
    "gptq-4": Case(gptq_config(4), gptq(4, 32)),
    "gptq-4-row": Case(gptq_config(4, -1), gptq(4, -1)),
    "gptq-4-act-order": Case(gptq_config(4, desc_act=True), gptq(4, 32, act_order=True)),
    "gptq-4-v2": Case(gptq_config(4) | V2, gptq(4, 32, version=2)),
    "gptq-2": Case(gptq_config(2) | V2, gptq(2, 32, version=2)),
    "gptq-3": Case(gptq_config(3) | V2, gptq(3, 32, version=2)),
    "gptq-3-act-order": Case(gptq_config(3) | V2, gptq(3, 32, act_order=True, version=2)),
    "gptq-8": Case(gptq_config(8), gptq(8, 32)),
    "awq": Case(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        awq(32),
    ),
    "w4a16": Case(
        scheme("pack-quantized", num_bits=4, type="int", strategy="group"), words(4, 32, True)
    ),
    "w4a16-zeros": Case(
        scheme("pack-quantized", num_bits=4, type="int", symmetric=False), words(4, 32, False)
    ),
    "w4a16-act-order": Case(
        scheme("pack-quantized", num_bits=4, type="int"), words(4, 32, True, act_order=True)
    ),
    "w8a16": Case(
        scheme("pack-quantized", num_bits=8, type="int", strategy="channel"), words(8, -1, True)
    ),
    "w8a8": Case(
        scheme("int-quantized", num_bits=8, type="int", strategy="channel"), bytes_of("channel")
    ),
    "w8a8-zeros": Case(
        scheme("int-quantized", num_bits=8, type="int"), bytes_of("channel", asymmetric=True)
    ),
    "naive": Case(
        scheme("naive-quantized", num_bits=8, type="int", strategy="tensor"), bytes_of("tensor")
    ),
    "float8-row": Case(
        scheme("float-quantized", num_bits=8, type="float", strategy="channel"), float8("row")
    ),
    "float8-tensor": Case(
        scheme("float-quantized", num_bits=8, type="float", strategy="tensor"), float8("tensor")
    ),
    "fp8-tensor": Case(FP8 | {"activation_scheme": "static"}, float8("tensor")),
    "fp8-row": Case({"quant_method": "fbgemm_fp8"}, float8("row")),
    "fp8-squares": Case(
        FP8 | {"weight_block_size": [128, 128]}, float8("square", "weight_scale_inv")
    ),
    "mxfp4": Case({"quant_method": "mxfp4"}, mxfp4("weight_blocks", "weight_scales")),
    "mxfp4-packed": Case(
        scheme("mxfp4-pack-quantized", num_bits=4), mxfp4("weight_packed", "weight_scale")
    ),
    "bitsandbytes-8": Case({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb8),
}


def repack(origin: Path, out: Path, meant: Path, case: Case, chosen: Callable[[str], bool]) -> None:
    """`out`: the checkpoint with its chosen modules packed. `meant`: the same numbers in full precision."""
    tensors = load_file(origin / "model.safetensors")
    values = {}
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if tensor.dim() == 2 and name.endswith(".weight") and chosen(module):
            parts, values[name] = case.pack(tensor.float())
            packed |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
        else:
            packed[name] = values[name] = tensor
    config = json.loads((origin / "config.json").read_text())
    for folder, content, more in (
        (out, packed, {"quantization_config": case.config}),
        (meant, values, {}),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {key: value.contiguous().clone() for key, value in content.items()},
            folder / "model.safetensors",
        )
        (folder / "config.json").write_text(json.dumps(config | more))
