"""Quantizing while loading: in panels, and for families that store their weights differently."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bloomery.artifacts.locate import locate_model
from bloomery.describe import describe_model
from bloomery.families import resolve_tensor_names
from bloomery.kernels.packed import PackedWeight
from bloomery.models.checkpoint import open_source
from bloomery.models.decoder import Decoder
from bloomery.models.load import load_model
from bloomery.models.weights import ModelWeights
from bloomery.quant.base import CheckpointTensors, LinearSpec
from bloomery.quant.dense import DenseMatrix
from bloomery.quant.int4 import quantize_int4
from bloomery.quant.int8 import quantize_int8
from bloomery.quant.lazy_tensor import LazyTensor
from bloomery.quant.quantize_on_load import CPU_PANEL_SIZE, OnLoadFormat
from bloomery.quant.select import ON_LOAD_FORMATS
from tests.parity.cases import CASES, make_checkpoint
from tests.parity.serve import decoder_logits
from tests.quant.formats import CPU, open_matrix

# Fused and grouped QKV, transposed weights, a gated MLP, experts, experts with a shared one, delta
# nets.
FAMILIES = (
    "bloom",
    "gpt2",
    "falcon-40b",
    "llama",
    "mixtral",
    "qwen2_moe",
    "gpt_bigcode-mqa",
    "phi3",
    "zamba2-biased",
    "gemma2",
    "qwen3_next",
)
PROMPT = [5, 17, 80, 41, 3, 99, 23, 8, 64, 12]


def test_loading_never_holds_a_dense_matrix() -> None:
    """The result for a row does not depend on the panel in which it was quantized."""
    panel_sizes: list[int] = []

    def quantize(weight: torch.Tensor) -> PackedWeight:
        panel_sizes.append(weight.numel())
        return quantize_int4(weight)

    weight = torch.randn(3 * CPU_PANEL_SIZE // 512, 512)
    weight_format = OnLoadFormat(quantize, quantize_int8)
    matrix = open_matrix(weight_format, {"weight": weight}, weight.shape)
    prepared = matrix.rows([(700, 3000), (0, 100)]).prepare(torch.float32, CPU)
    assert len(panel_sizes) > 2 and max(panel_sizes) <= CPU_PANEL_SIZE
    assert sum(panel_sizes) == 2400 * 512
    expected = quantize_int4(weight[[2999, 0]]).dequantize()
    assert torch.equal(prepared.gather(torch.tensor([2299, 2300])), expected)


class DequantizedFormat:
    """The values of another format as dense weights."""

    def __init__(self, weight_format: OnLoadFormat):
        self.weight_format = weight_format

    def open_matrix(self, tensors: CheckpointTensors, linear: LinearSpec) -> DenseMatrix:
        matrix = self.weight_format.open_matrix(tensors, linear)
        return DenseMatrix(LazyTensor.from_tensor(matrix.load_dense(torch.float32, CPU)))


@pytest.mark.parametrize("family", [case.name for case in CASES if case.name in FAMILIES])
def test_quantized_models_compute_with_the_dequantized_values(family: str, tmp_path: Path) -> None:
    make_checkpoint(next(case for case in CASES if case.name == family), tmp_path)
    artifact = locate_model(str(tmp_path))
    model_info = describe_model(artifact)
    source = open_source(artifact)
    names = resolve_tensor_names(model_info, source)
    unquantized = load_model(artifact, "auto", torch.float32, CPU)
    for name, weight_format in ON_LOAD_FORMATS.items():
        quantized = load_model(artifact, "auto", torch.float32, CPU, quantize=name)
        dequantized = DequantizedFormat(weight_format)
        weights = ModelWeights(source, names, torch.float32, CPU, dequantized)
        expected = decoder_logits(Decoder(model_info.model, weights), PROMPT, 16)
        actual = decoder_logits(quantized.decoder, PROMPT, 16)
        assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max(), name
        assert quantized.weight_bytes < 0.6 * unquantized.weight_bytes, name
