"""A quantization_config that is corrupt or unknown is refused by name, before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bloomery.artifacts.locate import locate
from bloomery.config import Config
from bloomery.describe import description, native_dtype, plan_for
from bloomery.errors import CheckpointError, ConfigError, UnsupportedModel
from bloomery.models.load import load
from tests.quant.packers import CASES, gptq_config, repack, scheme
from tests.quant.test_checkpoints import llama  # noqa: F401  # a fixture

WRONG: list[tuple[Any, str]] = [
    ("int4", r"quantization_config must be an object, not 'int4'"),
    ({}, r"quantization_config\.quant_method is missing"),
    ({"quant_method": 4}, r"quantization_config\.quant_method must be a string"),
    (
        {"quant_method": "aqlm"},
        r"quant_method 'aqlm' is not known\. Known: bitsandbytes, .*--quantize",
    ),
    (gptq_config(5), r"quantization_config\.bits 5 is not supported\. Supported: 2, 3, 4, 8"),
    ({"quant_method": "gptq"}, r"quantization_config\.bits None is not supported"),
    (
        gptq_config(4, group="64"),
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
    (scheme("marlin-24", num_bits=4), r"quantization_config\.format 'marlin-24' is not supported"),
    (
        scheme("pack-quantized", num_bits=6),
        r"config_groups\.group_0\.weights\.num_bits 6 is not supported",
    ),
    (
        scheme("pack-quantized", num_bits=4) | {"transform_config": {"R1": {}}},
        r"transform_config asks for rotations",
    ),
    (
        scheme("pack-quantized", num_bits=4) | {"sparsity_config": {"format": "24"}},
        r"sparsity_config\.format",
    ),
]


@pytest.mark.parametrize(("config", "said"), WRONG)
def test_refused_by_name(config: Any, said: str, llama: Path, tmp_path: Path) -> None:  # noqa: F811
    whole = json.loads((llama / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    save_file(load_file(llama / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=said):
        description(locate(str(tmp_path)))


def test_damaged_tensors_are_named(llama: Path, tmp_path: Path) -> None:  # noqa: F811
    packed = tmp_path / "packed"
    meant = tmp_path / "meant"
    repack(llama, packed, meant, CASES["gptq-4"], lambda module: ".layers." in module)
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"

    def damaged(**parts: torch.Tensor) -> None:
        save_file(
            tensors | {f"{name}.{part}": value for part, value in parts.items()},
            packed / "model.safetensors",
        )
        load(locate(str(packed)), "auto", torch.float32, torch.device("cpu"))

    with pytest.raises(
        CheckpointError, match=r"down_proj\.qweight: .* do not hold 128 x 160 codes"
    ):
        damaged(qweight=tensors[f"{name}.qweight"][:11].clone())
    with pytest.raises(
        CheckpointError, match=r"down_proj\.g_idx: names groups beyond the 5 there are"
    ):
        damaged(g_idx=tensors[f"{name}.g_idx"] + 3)
    with pytest.raises(CheckpointError, match=r"down_proj\.qzeros' has shape"):
        damaged(qzeros=tensors[f"{name}.qzeros"][:2].clone())


DAMAGED: list[tuple[str, str, str]] = [  # a case, and what is done to which part
    ("gptq-4", "qweight", "wide"),
    ("gptq-4", "qzeros", "wide"),
    ("gptq-4", "scales", "whole"),
    ("gptq-4", "scales", "gone"),
    ("gptq-4", "scales", "empty"),
    ("gptq-4-act-order", "g_idx", "gone"),
    ("gptq-4-act-order", "g_idx", "flags"),
    ("awq", "qweight", "wide"),
    ("awq", "scales", "empty"),
    ("w4a16-zeros", "weight_packed", "flat"),
    ("w4a16-zeros", "weight_zero_point", "wide"),
    ("w4a16-zeros", "weight_zero_point", "gone"),
    ("w4a16-zeros", "weight_scale", "empty"),
    ("w4a16-act-order", "weight_scale", "fewer"),
    ("w8a8", "weight_scale", "gone"),
    ("w8a8", "weight", "wide"),
    ("naive", "weight_scale", "whole"),
    ("float8-row", "weight_scale", "gone"),
    ("mxfp4", "weight_scales", "wide"),
    ("fp8-squares", "weight_scale_inv", "gone"),
    ("mxfp4", "weight_blocks", "gone"),
    ("bitsandbytes-8", "SCB", "gone"),
    ("bitsandbytes-8", "weight", "wide"),
]
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "wide": lambda tensor: tensor.to(torch.int64),
    "whole": lambda tensor: tensor.to(torch.int32),
    "flags": lambda tensor: tensor.bool(),
    "empty": lambda tensor: tensor[:, :0].clone(),
    "fewer": lambda tensor: tensor[:, :-1].clone(),
    "flat": lambda tensor: tensor.flatten(),
}


@pytest.mark.parametrize(("case", "part", "change"), DAMAGED)
def test_no_part_is_taken_for_another(
    case: str, part: str, change: str, llama: Path, tmp_path: Path
) -> None:  # noqa: F811
    """A part that is missing, or of another type or shape, is named: read all the same it would be numbers too."""
    packed = tmp_path / "packed"
    repack(llama, packed, tmp_path / "meant", CASES[case], lambda module: ".layers." in module)
    tensors = load_file(packed / "model.safetensors")
    damaged = tensors.pop(name := f"model.layers.1.mlp.down_proj.{part}")
    if change != "gone":
        tensors[name] = CHANGES[change](damaged)
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj"):
        load(locate(str(packed)), "auto", torch.float32, torch.device("cpu"))


def test_packed_weights_without_a_word_of_it_in_the_configuration(
    llama: Path, tmp_path: Path
) -> None:  # noqa: F811
    repack(
        llama,
        tmp_path,
        tmp_path / "meant",
        CASES["bitsandbytes-8"],
        lambda module: ".layers." in module,
    )
    whole = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**whole, "quantization_config": None}))
    with pytest.raises(
        CheckpointError, match=r"weight: is torch\.int8, where torch\.float32 .* belongs"
    ):
        load(locate(str(tmp_path)), "auto", torch.float32, torch.device("cpu"))


def test_what_is_packed_is_not_rounded_again(llama: Path, tmp_path: Path) -> None:  # noqa: F811
    packed = tmp_path / "packed"
    meant = tmp_path / "meant"
    repack(llama, packed, meant, CASES["awq"], lambda module: ".layers." in module)
    with pytest.raises(ConfigError, match="is packed by awq already; leave quantize out"):
        plan_for(Config(str(packed), quantize="int8"))
    with pytest.raises(ConfigError, match="quantize 'int5' is not one of auto, int8"):
        Config(str(packed), quantize="int5")


def test_precision_of_a_checkpoint_that_states_only_its_arithmetic(
    llama: Path, tmp_path: Path
) -> None:  # noqa: F811
    whole = json.loads((llama / "config.json").read_text())
    whole = {key: value for key, value in whole.items() if key not in ("dtype", "torch_dtype")}
    bnb = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_compute_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(whole | {"quantization_config": bnb}))
    save_file(load_file(llama / "model.safetensors"), tmp_path / "model.safetensors")
    assert native_dtype(locate(str(tmp_path))) == "bfloat16"
