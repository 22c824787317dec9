"""GGUF blocks converted for packed kernels: their error, and models that compute with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType

from bloomery.artifacts.gguf import read_gguf
from bloomery.artifacts.locate import locate_model
from bloomery.describe import describe_gguf_file
from bloomery.families import resolve_tensor_names
from bloomery.models.checkpoint import FileSource
from bloomery.models.decoder import Decoder
from bloomery.models.load import load_model
from bloomery.models.weight_stream import WeightStream
from bloomery.models.weights import ModelWeights
from bloomery.quant.base import CheckpointTensors, LinearSpec, WeightFormat
from bloomery.quant.dense import DenseFormat, DenseMatrix, DenseWeight
from bloomery.quant.gguf import GgufFormat, GgufMatrix
from bloomery.quant.gguf_blocks import BLOCK_DECODERS
from bloomery.quant.lazy_tensor import LazyTensor
from bloomery.quant.quantize_on_load import CPU_PANEL_SIZE
from bloomery.quant.quantized_weight import ConcatenatedWeight, QuantizedWeight
from tests.parity import gguf_writer
from tests.parity.cases import SPECIAL, VOCAB, ParityCase, make_checkpoint
from tests.parity.serve import decoder_logits, prompt_logits
from tests.quant.formats import CPU, PackedGgufMatrix, packed_gguf, store_gguf_blocks

EXACT_TYPES = (
    "Q4_0",
    "Q5_0",
    "Q8_0",
    "IQ4_NL",
    "TQ1_0",
    "TQ2_0",
    "Q1_0",
    "MXFP4",
    "NVFP4",
)
# The largest allowed error, in quantization steps of the group (in units of the codebook for
# IQ4_XS). Random weights have offsets of hundreds of steps, real ones of a dozen.
MAX_ERROR_STEPS = {
    "Q4_1": 0.004,
    "Q5_1": 0.008,
    "Q2_K": 0.01,
    "Q3_K": 0.002,
    "Q4_K": 0.13,
    "Q5_K": 0.26,
    "Q6_K": 0.016,
    "IQ4_XS": 0.063,
    "IQ2_XXS": 0.022,
    "IQ2_XS": 0.022,
    "IQ2_S": 0.022,
    "IQ3_XXS": 0.032,
    "IQ3_S": 0.008,
    "IQ1_S": 0.005,
    "IQ1_M": 0.005,
}


@pytest.mark.parametrize("kind", BLOCK_DECODERS)
def test_packed_values_are_close_to_those_of_the_gguf_package(kind: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(200, 1024)
    actual = packed_gguf(kind)(weight).load_dense(torch.float32, CPU)
    expected = store_gguf_blocks(kind, weight).load(torch.float32, CPU)
    if kind in EXACT_TYPES:
        assert torch.equal(actual, expected)
        return
    number = GGMLQuantizationType[kind]
    raw = torch.from_numpy(gguf_writer.quantize_blocks(weight.numpy(), number))
    decoded = BLOCK_DECODERS[kind](raw.view(-1, gguf.GGML_QUANT_SIZES[number][1]))
    scale = decoded.scale.abs().repeat_interleave(decoded.group_size, 1).view_as(expected)
    error = (actual - expected).abs()
    has_scale = scale > 0
    largest_error = float((error[has_scale] / scale[has_scale]).max())
    assert 0 < largest_error < MAX_ERROR_STEPS[kind]
    assert bool((error <= 2**-11 * (expected.abs() + 64 * scale)).all())


@pytest.mark.parametrize(
    ("scale", "offset"), [(0.0, -0.3), (0.0, 0.0), (1e-7, 0.25), (6e-8, -60.0)]
)
def test_a_group_with_a_tiny_scale_has_the_value_of_its_offset(scale: float, offset: float) -> None:
    codes = np.arange(16, dtype=np.uint8)[None]
    header = np.array([[scale, offset]], np.float16).view(np.uint8)
    block = np.concatenate([header, codes], 1)
    actual = BLOCK_DECODERS["Q4_1"](torch.from_numpy(block)).to_packed(1).dequantize()
    expected = torch.from_numpy(gguf.quants.dequantize(block, GGMLQuantizationType.Q4_1))
    torch.testing.assert_close(actual, expected, rtol=2**-11, atol=0)


def test_groups_with_a_zero_scale_are_decoded() -> None:
    """Six-bit scales may be zero, with and without an offset."""
    block = gguf_writer.quantize_blocks(np.ones((1, 256), np.float32), GGMLQuantizationType.Q4_K)
    block[0, 4:7] = 0  # scales 0, 1 and 2 (their low six bits)
    block[0, 12:14] = 0  # offsets 4 and 5
    decoded = BLOCK_DECODERS["Q4_K"](torch.from_numpy(block))
    assert (decoded.scale == 0).sum() >= 3
    actual = decoded.to_packed(1).dequantize()
    expected = torch.from_numpy(gguf.quants.dequantize(block, GGMLQuantizationType.Q4_K))
    atol = 2**-10 * float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=2**-10, atol=atol)


def test_only_weights_that_kernels_cannot_read_are_dequantized() -> None:
    matrix = GgufMatrix(store_gguf_blocks("Q4_K", torch.randn(8, 512)))
    aligned = matrix.cols(16, 304)
    unaligned = matrix.cols(8, 264)
    assert isinstance(aligned.prepare(torch.bfloat16, CPU), QuantizedWeight)
    dense = unaligned.prepare(torch.bfloat16, CPU)
    assert isinstance(dense, DenseWeight)
    assert torch.equal(dense.weight, unaligned.load_dense(torch.bfloat16, CPU))
    without_native_kernels = matrix.prepare(torch.float32, CPU)
    assert isinstance(without_native_kernels, DenseWeight)


def test_matrices_of_several_types_are_concatenated() -> None:
    torch.manual_seed(1)
    kinds = ("Q4_K", "Q4_K", "Q6_K", "Q8_0", "IQ4_XS")
    matrices = [packed_gguf(kind)(torch.randn(48, 256)) for kind in kinds]
    x = torch.randn(3, 256)
    weight = matrices[0].cat(matrices[1:]).prepare(torch.float32, CPU)
    assert isinstance(weight, ConcatenatedWeight) and len(weight.parts) == 4
    outputs = [matrix.prepare(torch.float32, CPU).linear(x) for matrix in matrices]
    torch.testing.assert_close(weight.linear(x), torch.cat(outputs, -1))


def test_loading_never_holds_a_dequantized_matrix() -> None:
    panel_sizes: list[int] = []
    stored = store_gguf_blocks("Q6_K", torch.randn(3 * CPU_PANEL_SIZE // 512, 512))
    (piece,) = stored.pieces
    assert piece.blocks is not None
    raw = piece.blocks.raw
    (raw_piece,) = raw.pieces

    def fill(out: torch.Tensor, rows: tuple[int, int], cols: tuple[int, int] | None) -> None:
        panel_sizes.append(out.shape[0] * 512)
        out.copy_(raw_piece.read(rows, cols))

    observed_raw = replace(raw, pieces=(replace(raw_piece, fill=fill),))
    observed_piece = replace(piece, blocks=piece.blocks._replace(raw=observed_raw))
    matrix = GgufMatrix(replace(stored, pieces=(observed_piece,)))
    weight = matrix.rows([(700, 3000), (0, 100)]).prepare(torch.bfloat16, CPU)
    assert len(panel_sizes) > 2 and max(panel_sizes) <= CPU_PANEL_SIZE
    assert sum(panel_sizes) == 2400 * 512
    expected = stored.rows([(2999, 3000), (0, 1)]).load(torch.bfloat16, CPU)
    actual = weight.gather(torch.tensor([2299, 2300]))
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=0)


# ---- models --------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MOE_SIZES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
LLAMA = ParityCase("llama", lambda: transformers.LlamaConfig(**SIZES, **SPECIAL))
QWEN_MOE = ParityCase(
    "qwen3_moe", lambda: transformers.Qwen3MoeConfig(**SIZES, **MOE_SIZES, **SPECIAL)
)
GPT_OSS_EXPERTS = ParityCase(
    "gpt_oss",
    lambda: transformers.GptOssConfig(
        **SIZES | {"hidden_size": 64, "intermediate_size": 64},
        **SPECIAL,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
)
PROMPT = [5, 17, 80, 41, 3, 99, 23, 8, 64, 12]


class PackedGgufFormat:
    """GGUF blocks for packed kernels, even in float32 on a CPU."""

    def open_matrix(self, tensors: CheckpointTensors, linear: LinearSpec) -> PackedGgufMatrix:
        return PackedGgufMatrix(GgufFormat().open_matrix(tensors, linear).weight)


class Bfloat16Format:
    """The values of the file, rounded to bfloat16."""

    def open_matrix(self, tensors: CheckpointTensors, linear: LinearSpec) -> DenseMatrix:
        matrix = DenseFormat().open_matrix(tensors, linear)
        return DenseMatrix(LazyTensor.from_tensor(matrix.load_dense(torch.bfloat16, CPU)))


def load_decoder(path: Path, weight_format: WeightFormat) -> Decoder:
    """A decoder with float32 activations."""
    file = read_gguf(path)
    model_info = describe_gguf_file(file)
    source = FileSource.gguf(file)
    names = resolve_tensor_names(model_info, source)
    weights = ModelWeights(source, names, torch.float32, CPU, weight_format)
    return Decoder(model_info.model, weights)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", BLOCK_DECODERS)
@pytest.mark.parametrize("case", [LLAMA, QWEN_MOE], ids=["llama", "experts"])
def test_packed_blocks_have_less_than_half_the_error_of_bfloat16(
    case: ParityCase, kind: str, tmp_path: Path
) -> None:
    """Compared with the values of the file in float32. The predicted tokens are the same."""
    path = tmp_path / "model.gguf"
    gguf_writer.write_gguf(make_checkpoint(case, tmp_path), path, GGMLQuantizationType[kind])
    expected = prompt_logits(path, PROMPT, 64)
    decoder = load_decoder(path, PackedGgufFormat())
    assert isinstance(decoder.embed.matrix, QuantizedWeight)
    actual = decoder_logits(decoder, PROMPT, 64)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))
    error = relative_error(actual, expected)
    if kind in EXACT_TYPES:
        assert error < 1e-5
    else:
        rounded = decoder_logits(load_decoder(path, Bfloat16Format()), PROMPT, 64)
        assert error < relative_error(rounded, expected) / 2


@pytest.mark.parametrize("kind", ["MXFP4", "Q8_0"])
def test_experts_with_biases_stay_packed(kind: str, tmp_path: Path) -> None:
    """As gpt-oss is published: blocks of MXFP4, biases, and a clamped SwiGLU."""
    path = tmp_path / "model.gguf"
    model = make_checkpoint(GPT_OSS_EXPERTS, tmp_path)
    gguf_writer.write_gguf(model, path, GGMLQuantizationType[kind])
    expected = prompt_logits(path, PROMPT, 64)
    actual = decoder_logits(load_decoder(path, PackedGgufFormat()), PROMPT, 64)
    assert relative_error(actual, expected) < 1e-5


def test_blocks_are_kept_with_bfloat16_activations_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_writer.write_gguf(make_checkpoint(LLAMA, tmp_path), path, GGMLQuantizationType.Q4_1)
    artifact = locate_model(str(path))
    quantized, dense = (
        load_model(artifact, "auto", torch.bfloat16, CPU, keep_gguf_blocks=keep)
        for keep in (True, False)
    )
    assert quantized.weight_bytes < 0.35 * dense.weight_bytes


@pytest.mark.parametrize(
    ("kind", "expected_notes"),
    [("Q4_1", ["ruin", "dequantized and quantized again"]), ("F16", ["ruin"])],
)
def test_lossy_quantization_on_load_is_noted(
    kind: str, expected_notes: list[str], tmp_path: Path
) -> None:
    """Quantizing a quantized file again, and two bits, are allowed but reported."""
    path = tmp_path / "model.gguf"
    gguf_writer.write_gguf(make_checkpoint(LLAMA, tmp_path), path, GGMLQuantizationType[kind])
    artifact = locate_model(str(path))
    notes = load_model(artifact, "auto", torch.float32, CPU, quantize="int2").notes
    assert len(notes) == len(expected_notes)
    for text, note in zip(expected_notes, notes, strict=True):
        assert text in note


def test_streamed_panels_equal_mapped_ones(tmp_path: Path) -> None:
    """As on a GPU: panels of rows, and columns cut from them, are read ahead."""
    data = gguf_writer.quantize_blocks(torch.randn(1500, 1024).numpy(), GGMLQuantizationType.Q5_K)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("m.weight", data, raw_dtype=GGMLQuantizationType.Q5_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = FileSource.gguf(read_gguf(tmp_path / "model.gguf"))
    matrix = GgufFormat().open_matrix(source, LinearSpec("m", (1500, 1024)))
    rows = torch.arange(1100)
    for part in (
        matrix,
        matrix.rows([(300, 1400), (0, 9)]),
        matrix.rows([(100, 1300)]).cols(256, 768),
    ):
        mapped = part.prepare(torch.bfloat16, CPU).gather(rows)
        with WeightStream(CPU, 2, 1 << 14) as source.stream:
            streamed = part.prepare(torch.bfloat16, CPU).gather(rows)
        source.stream = None
        assert torch.equal(streamed, mapped)
