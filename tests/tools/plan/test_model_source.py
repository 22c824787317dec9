"""The stored precision of checkpoints: GGUF types and quantized formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bloomery.artifacts.gguf import read_gguf
from bloomery.artifacts.locate import locate_model
from bloomery.cli import main
from bloomery.quant.gguf_blocks import BLOCK_DECODERS
from bloomery.roofline import weights_bytes
from bloomery.tools.plan.model_source import GPU_GGUF_FORMATS, read_model_source
from tests.quant.formats import CPU, packed_gguf
from tests.tools.plan.conftest import PlanRunner
from tests.tools.plan.measured_steps import shape_path


def test_the_weights_of_a_gguf_are_the_bytes_of_its_tensors(plan_json: PlanRunner) -> None:
    on_cpu = plan_json("--gpu", "zen3-2")
    on_gpu = plan_json("--gpu", "l4")
    stored = sum(tensor.nbytes for tensor in read_gguf(locate_model(None).path).tensors.values())
    assert on_cpu["weights_bytes"] == pytest.approx(stored, rel=0.01)
    assert on_gpu["weights_bytes"] == pytest.approx(stored, rel=0.01)
    assert on_gpu["precision"] == on_cpu["precision"]


def test_gguf_types_take_the_bits_that_the_engine_needs() -> None:
    assert GPU_GGUF_FORMATS.keys() == BLOCK_DECODERS.keys()
    for kind, (bits, _) in GPU_GGUF_FORMATS.items():
        matrix = packed_gguf(kind)(torch.randn(64, 1024))
        loaded_bits = matrix.prepare(torch.bfloat16, CPU).nbytes * 8 / (64 * 1024)
        assert loaded_bits == pytest.approx(bits, rel=0.005), kind


COMPRESSED_TENSORS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "a": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32, "type": "int"}}
    },
}


@pytest.mark.parametrize(
    "quantization, bits",
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 3, "group_size": -1}, 4),  # as kernels read them
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "mxfp4"}, 4.25),
        (COMPRESSED_TENSORS, 4.625),
        (None, 16),
    ],
)
def test_quantized_checkpoints_are_recognized(
    quantization: dict[str, Any] | None, bits: float, tmp_path: Path
) -> None:
    config = json.loads(Path(shape_path("llama-8b")).read_text())
    if quantization:
        config["quantization_config"] = quantization
    path = tmp_path / "packed.json"
    path.write_text(json.dumps(config))
    assert read_model_source(str(path)).stored.bits == bits
    assert main(["plan", str(path), "--gpu", "zen3-2"]) == 0


def test_mxfp4_experts_beside_unquantized_layers() -> None:
    source = read_model_source(shape_path("gpt-oss-20b"))
    assert source.stored.bits == 16
    assert source.stored.expert_bits == 4.25
    assert 13.7e9 < weights_bytes(source.model, source.stored) < 13.8e9
