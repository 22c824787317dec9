"""Damaged, unknown or contradictory quantized checkpoints are refused with a clear message.

An invalid quantization_config is refused before any weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bloomery.artifacts.locate import locate_model
from bloomery.config import EngineConfig
from bloomery.describe import build_engine_plan, checkpoint_dtype, describe_model
from bloomery.errors import CheckpointError, ConfigError, UnsupportedModel
from bloomery.models.load import load_model
from tests.quant.packers import (
    PACKED_CASES,
    compressed_config,
    gptq_config,
    is_in_layer,
    repack_checkpoint,
)

DAMAGED_MODULE = "model.layers.1.mlp.down_proj"
INVALID_CONFIGS: list[tuple[Any, str]] = [  # quantization_config, expected message
    ("int4", r"quantization_config must be an object, not 'int4'"),
    ({}, r"quantization_config\.quant_method is missing"),
    ({"quant_method": 4}, r"quantization_config\.quant_method must be a string"),
    (
        {"quant_method": "aqlm"},
        r"quant_method 'aqlm' is not known\. Known: bitsandbytes, .*--quantization",
    ),
    (gptq_config(5), r"quantization_config\.bits 5 is not supported\. Supported: 2, 3, 4, 8"),
    ({"quant_method": "gptq"}, r"quantization_config\.bits None is not supported"),
    (
        gptq_config(4, group_size="64"),  # type: ignore[arg-type]
        r"quantization_config\.group_size must be -1 or a positive whole number, not '64'",
    ),
    (
        gptq_config(4) | {"checkpoint_format": "marlin"},
        r"checkpoint_format 'marlin' is not supported",
    ),
    (
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        r"quantization_config\.version 'gemv' is not supported",
    ),
    (
        {"quant_method": "bitsandbytes"},
        r"load_in_8bit and load_in_4bit are False and False; exactly one",
    ),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf3"},
        r"quant_type 'nf3'",
    ),
    (
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        r"weight_block_size \[64, 64\] is not supported",
    ),
    ({"quant_method": "fp8", "fmt": "e5m2"}, r"quantization_config\.fmt 'e5m2' is not supported"),
    (
        compressed_config("marlin-24", num_bits=4),
        r"quantization_config\.format 'marlin-24' is not supported",
    ),
    (
        compressed_config("pack-quantized", num_bits=6),
        r"config_groups\.group_0\.weights\.num_bits 6 is not supported",
    ),
    (
        compressed_config("pack-quantized", num_bits=4) | {"transform_config": {"R1": {}}},
        r"transform_config asks for rotations",
    ),
    (
        compressed_config("pack-quantized", num_bits=4) | {"sparsity_config": {"format": "24"}},
        r"sparsity_config\.format",
    ),
]


def copy_with_config(origin: Path, folder: Path, changes: dict[str, Any]) -> None:
    """Copy a checkpoint with changes of its config.json. None removes a key."""
    config = json.loads((origin / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(load_file(origin / "model.safetensors"), folder / "model.safetensors")


def load_on_cpu(folder: Path) -> None:
    load_model(locate_model(str(folder)), "auto", torch.float32, torch.device("cpu"))


def pack_layers(origin: Path, folder: Path, case: str) -> Path:
    """Pack all modules of decoder layers; returns the folder of the packed checkpoint."""
    packed = folder / "packed"
    repack_checkpoint(origin, packed, folder / "dense", PACKED_CASES[case], is_in_layer)
    return packed


@pytest.mark.parametrize(("config", "message"), INVALID_CONFIGS)
def test_an_invalid_quantization_config_is_refused(
    config: Any, message: str, llama: Path, tmp_path: Path
) -> None:
    copy_with_config(llama, tmp_path, {"quantization_config": config})
    with pytest.raises(UnsupportedModel, match=message):
        describe_model(locate_model(str(tmp_path)))


def test_damaged_tensors_are_named(llama: Path, tmp_path: Path) -> None:
    packed = pack_layers(llama, tmp_path, "gptq-4")
    tensors = load_file(packed / "model.safetensors")

    def load_with(suffix: str, tensor: torch.Tensor) -> None:
        changed = tensors | {f"{DAMAGED_MODULE}.{suffix}": tensor}
        save_file(changed, packed / "model.safetensors")
        load_on_cpu(packed)

    codes = tensors[f"{DAMAGED_MODULE}.qweight"]
    with pytest.raises(
        CheckpointError, match=r"down_proj\.qweight: .* do not hold 128 x 160 codes"
    ):
        load_with("qweight", codes[:11].clone())
    g_idx = tensors[f"{DAMAGED_MODULE}.g_idx"]
    with pytest.raises(
        CheckpointError, match=r"down_proj\.g_idx: names groups beyond the 5 there are"
    ):
        load_with("g_idx", g_idx + 3)
    zero_points = tensors[f"{DAMAGED_MODULE}.qzeros"]
    with pytest.raises(CheckpointError, match=r"down_proj\.qzeros' has shape"):
        load_with("qzeros", zero_points[:2].clone())


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int64": lambda tensor: tensor.to(torch.int64),
    "int32": lambda tensor: tensor.to(torch.int32),
    "bool": lambda tensor: tensor.bool(),
    "empty": lambda tensor: tensor[:, :0].clone(),
    "fewer columns": lambda tensor: tensor[:, :-1].clone(),
    "flat": lambda tensor: tensor.flatten(),
}
DAMAGES: list[tuple[str, str, str]] = [  # packed case, suffix of a tensor, change
    ("gptq-4", "qweight", "int64"),
    ("gptq-4", "qzeros", "int64"),
    ("gptq-4", "scales", "int32"),
    ("gptq-4", "scales", "missing"),
    ("gptq-4", "scales", "empty"),
    ("gptq-4-act-order", "g_idx", "missing"),
    ("gptq-4-act-order", "g_idx", "bool"),
    ("awq", "qweight", "int64"),
    ("awq", "scales", "empty"),
    ("w4a16-zeros", "weight_packed", "flat"),
    ("w4a16-zeros", "weight_zero_point", "int64"),
    ("w4a16-zeros", "weight_zero_point", "missing"),
    ("w4a16-zeros", "weight_scale", "empty"),
    ("w4a16-act-order", "weight_scale", "fewer columns"),
    ("w8a8", "weight_scale", "missing"),
    ("w8a8", "weight", "int64"),
    ("naive", "weight_scale", "int32"),
    ("float8-row", "weight_scale", "missing"),
    ("mxfp4", "weight_scales", "int64"),
    ("fp8-blocks", "weight_scale_inv", "missing"),
    ("mxfp4", "weight_blocks", "missing"),
    ("bitsandbytes-8", "SCB", "missing"),
    ("bitsandbytes-8", "weight", "int64"),
]


@pytest.mark.parametrize(("case", "suffix", "change"), DAMAGES)
def test_a_missing_or_changed_tensor_is_named(
    case: str, suffix: str, change: str, llama: Path, tmp_path: Path
) -> None:
    """Read as something else, its bits would be plausible but wrong numbers."""
    packed = pack_layers(llama, tmp_path, case)
    tensors = load_file(packed / "model.safetensors")
    name = f"{DAMAGED_MODULE}.{suffix}"
    tensor = tensors.pop(name)
    if change != "missing":
        tensors[name] = CHANGES[change](tensor)
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj"):
        load_on_cpu(packed)


def test_packed_weights_need_a_quantization_config(llama: Path, tmp_path: Path) -> None:
    packed = pack_layers(llama, tmp_path, "bitsandbytes-8")
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    with pytest.raises(
        CheckpointError, match=r"weight: has dtype torch\.int8, expected torch\.float32"
    ):
        load_on_cpu(packed)


def test_a_quantized_checkpoint_is_not_quantized_again(llama: Path, tmp_path: Path) -> None:
    packed = pack_layers(llama, tmp_path, "awq")
    with pytest.raises(ConfigError, match="is packed by awq already; leave quantization out"):
        build_engine_plan(EngineConfig(str(packed), quantization="int8"))
    with pytest.raises(ConfigError, match="quantization 'int5' is not one of auto, int8"):
        EngineConfig(str(packed), quantization="int5")


def test_the_compute_dtype_of_bitsandbytes_is_used_if_no_other_is_given(
    llama: Path, tmp_path: Path
) -> None:
    quantization_config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_compute_dtype": "bfloat16",
    }
    changes = {"quantization_config": quantization_config, "dtype": None, "torch_dtype": None}
    copy_with_config(llama, tmp_path, changes)
    assert checkpoint_dtype(locate_model(str(tmp_path))) == "bfloat16"
