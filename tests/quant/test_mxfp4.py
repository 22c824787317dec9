"""gpt-oss checkpoints with MXFP4 experts: the same model as their dequantized twins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from bloomery.artifacts.locate import locate_model
from bloomery.describe import describe_model
from bloomery.errors import UnsupportedModel
from bloomery.kernels.packed import CodebookWeight
from bloomery.layout import TensorParallelLayout
from bloomery.models.checkpoint import FileSource
from bloomery.models.decoder import load_experts
from bloomery.models.weights import DeinterleavedTensors, ModelWeights
from bloomery.quant.mxfp4 import Mxfp4Format
from bloomery.quant.quantized_weight import QuantizedWeight
from bloomery.spec import MoeSpec
from tests.parity.cases import CASES, make_checkpoint
from tests.parity.serve import prompt_logits
from tests.quant.packers import mxfp4

TOKENS = [5, 17, 40, 2, 81, 33, 9]
EXPERT_TENSORS = ("gate_up_proj", "down_proj")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with MXFP4 experts, and one with their values in full precision."""
    packed_folder = tmp_path_factory.mktemp("mxfp4")
    dense_folder = tmp_path_factory.mktemp("dense")
    case = next(case for case in CASES if case.name == "gpt_oss")
    model = make_checkpoint(case, dense_folder, times=4)
    config = json.loads((dense_folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (packed_folder / "config.json").write_text(json.dumps(config))
    pack = mxfp4("blocks", "scales")
    dense_tensors = load_file(dense_folder / "model.safetensors")
    packed_tensors: dict[str, torch.Tensor] = {}
    for name, tensor in list(dense_tensors.items()):
        if not name.endswith(EXPERT_TENSORS):
            packed_tensors[name] = tensor
            continue
        experts = [pack(expert) for expert in tensor.transpose(1, 2)]
        blocks = torch.stack([expert.tensors["blocks"] for expert in experts])
        scales = torch.stack([expert.tensors["scales"] for expert in experts])
        packed_tensors[f"{name}_blocks"] = blocks.unflatten(-1, (-1, 16)).contiguous()
        packed_tensors[f"{name}_scales"] = scales
        values = torch.stack([expert.values for expert in experts])
        dense_tensors[name] = values.transpose(1, 2).contiguous()
    save_file(dense_tensors, dense_folder / "model.safetensors", {"format": "pt"})
    save_file(packed_tensors, packed_folder / "model.safetensors", {"format": "pt"})
    del model
    return packed_folder, dense_folder


def reference_logits(folder: Path) -> torch.Tensor:
    model: Any = tf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]


def test_packed_experts_equal_their_twin_and_transformers(twins: tuple[Path, Path]) -> None:
    packed_folder, dense_folder = twins
    packed = prompt_logits(packed_folder, TOKENS, 64)
    dense = prompt_logits(dense_folder, TOKENS, 64)
    torch.testing.assert_close(packed, dense, rtol=1e-5, atol=1e-5)
    expected = reference_logits(dense_folder)
    torch.testing.assert_close(packed, expected, rtol=1e-5, atol=1e-5)


def load_experts_of(folder: Path, rank: int, size: int) -> Any:
    """The experts of the first layer, as one of `size` tensor parallel ranks holds them."""
    description = describe_model(locate_model(str(folder)))
    spec = description.model.layers[0].mlp
    assert isinstance(spec, MoeSpec)
    layout = TensorParallelLayout(rank, size)
    weights = ModelWeights(
        FileSource.safetensors(folder),
        description.names,
        torch.float32,
        CPU,
        Mxfp4Format(),
        layout,
    )
    return load_experts(spec, description.model.hidden, weights, "model.layers.0.")


def test_every_rank_holds_its_rows_of_gate_and_up(twins: tuple[Path, Path]) -> None:
    packed_folder, dense_folder = twins
    tensors = load_file(dense_folder / "model.safetensors")
    prefix = "model.layers.0.mlp.experts."
    stored = tensors[f"{prefix}gate_up_proj"].transpose(1, 2)  # [experts, gate and up, hidden]
    num_experts, rows, _ = stored.shape
    for rank in range(2):
        experts = load_experts_of(packed_folder, rank, 2)
        assert isinstance(experts.up, QuantizedWeight)
        assert isinstance(experts.up.packed, CodebookWeight)
        own = slice(rank * rows // 4, (rank + 1) * rows // 4)
        expected = torch.cat((stored[:, ::2][:, own], stored[:, 1::2][:, own]), 1)
        up = experts.up.packed.dequantize().unflatten(0, (num_experts, -1))
        torch.testing.assert_close(up, expected, rtol=0, atol=0)
        bias = tensors[f"{prefix}gate_up_proj_bias"]
        expected_bias = torch.cat((bias[:, ::2][:, own], bias[:, 1::2][:, own]), 1)
        torch.testing.assert_close(experts.options.up_bias, expected_bias, rtol=0, atol=0)
        assert (experts.options.down_bias is None) == (rank == 1)


def test_formats_that_cannot_separate_gate_and_up_are_refused(tmp_path: Path) -> None:
    save_file({"x.scale": torch.ones(1, 2)}, tmp_path / "model.safetensors")
    tensors = DeinterleavedTensors(FileSource.safetensors(tmp_path), rows=8)
    assert tensors.has("x.scale") and tensors.shape("x.scale") == (1, 2)
    with pytest.raises(UnsupportedModel, match="gate and up rows by turns"):
        tensors.tensor("x.scale", (1, 2))
