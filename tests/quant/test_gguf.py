"""GGUF's blocks as the kernels of packed matrices read them: how far from the file's values, and the same tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers as tf
from gguf import GGMLQuantizationType as Kind

from bloomery.artifacts.gguf import read
from bloomery.artifacts.locate import locate
from bloomery.describe import describe_file
from bloomery.families import as_stored
from bloomery.models.checkpoint import FileSource
from bloomery.models.decoder import Decoder
from bloomery.models.load import load
from bloomery.models.stream import Stream
from bloomery.models.weights import Weights
from bloomery.quant.base import Format, Product, Stored, Tensors
from bloomery.quant.dense import Dense, DenseFormat, DenseReady
from bloomery.quant.gguf import Blocks, BlocksFormat
from bloomery.quant.gguf_blocks import STEPS
from bloomery.quant.onload import CACHED
from bloomery.quant.packed import PackedReady, SideBySide
from tests.parity import gguf_writer
from tests.parity.cases import SPECIAL, VOCAB, Case, make_checkpoint
from tests.parity.serve import decoder_logits, logits
from tests.quant.test_law import CPU, Kept, in_blocks, kept

# The largest deviation from what the gguf package says, in steps of a group's grid; of a table, in its units. Random
# bits make offsets of hundreds of steps where real ones have a dozen.
EXACT = ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL")
DEVIATION = {
    "Q4_1": 0.004,
    "Q5_1": 0.008,
    "Q2_K": 0.01,
    "Q3_K": 0.002,
    "Q4_K": 0.13,
    "Q5_K": 0.26,
    "Q6_K": 0.016,
    "IQ4_XS": 0.063,
}


@pytest.mark.parametrize("kind", STEPS)
def test_values_are_the_packages(kind: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(200, 1024)
    have = kept(kind)(weight).dense(torch.float32, CPU)
    want = in_blocks(kind, weight).load(torch.float32, CPU)
    if kind in EXACT:
        assert torch.equal(have, want)
        return
    number = Kind[kind]
    raw = torch.from_numpy(gguf_writer.blocks(weight.numpy(), number))
    steps = STEPS[kind](raw.view(-1, gguf.GGML_QUANT_SIZES[number][1]))
    scale = steps.scale.abs().repeat_interleave(steps.group, 1).view_as(want)
    moved = (have - want).abs()
    some = scale > 0
    assert 0 < float((moved[some] / scale[some]).max()) < DEVIATION[kind]
    assert bool((moved <= 2**-11 * (want.abs() + 64 * scale)).all())


@pytest.mark.parametrize(("step", "offset"), [(0.0, -0.3), (0.0, 0.0), (1e-7, 0.25), (6e-8, -60.0)])
def test_a_group_that_is_nothing_but_its_offset(step: float, offset: float) -> None:
    codes = np.arange(16, dtype=np.uint8)[None]
    block = np.concatenate([np.array([[step, offset]], np.float16).view(np.uint8), codes], 1)
    have = STEPS["Q4_1"](torch.from_numpy(block)).matrix(1).dequantize()
    want = torch.from_numpy(gguf.quants.dequantize(block, Kind.Q4_1))
    torch.testing.assert_close(have, want, rtol=2**-11, atol=0)


def test_scales_of_nothing_among_others() -> None:
    """Six-bit scales that are zero, with and without an offset."""
    block = gguf_writer.blocks(np.ones((1, 256), np.float32), Kind.Q4_K)
    block[0, 4:7] = block[0, 12:14] = (
        0  # scales 0, 1 and 2 (their low six bits); offsets of 4 and 5
    )
    steps = STEPS["Q4_K"](torch.from_numpy(block))
    assert (steps.scale == 0).sum() >= 3
    want = torch.from_numpy(gguf.quants.dequantize(block, Kind.Q4_K))
    torch.testing.assert_close(
        steps.matrix(1).dequantize(), want, rtol=2**-10, atol=2**-10 * float(want.abs().max())
    )


def test_only_what_kernels_cannot_say_is_expanded() -> None:
    matrix = Blocks(in_blocks("Q4_K", torch.randn(8, 512)))
    inside = matrix.cols(16, 304)
    through = matrix.cols(8, 264)
    assert isinstance(inside.prepare(torch.bfloat16, CPU), PackedReady)
    expanded = through.prepare(torch.bfloat16, CPU)
    assert isinstance(expanded, DenseReady) and torch.equal(
        expanded.weight, through.dense(torch.bfloat16, CPU)
    )
    assert isinstance(matrix.prepare(torch.float32, CPU), DenseReady), (
        "a CPU without native kernels"
    )


def test_products_of_several_types_stand_side_by_side() -> None:
    torch.manual_seed(1)
    parts = [
        kept(kind)(torch.randn(48, 256)) for kind in ("Q4_K", "Q4_K", "Q6_K", "Q8_0", "IQ4_XS")
    ]
    together = parts[0].cat(parts[1:])
    x = torch.randn(3, 256)
    ready = together.prepare(torch.float32, CPU)
    assert isinstance(ready, SideBySide) and len(ready.parts) == 4
    want = torch.cat([part.prepare(torch.float32, CPU).linear(x) for part in parts], -1)
    torch.testing.assert_close(ready.linear(x), want)


def test_loading_never_holds_an_expanded_matrix() -> None:
    seen: list[int] = []
    stored = in_blocks("Q6_K", torch.randn(3 * CACHED // 512, 512))
    (piece,) = stored.pieces
    assert piece.blocks is not None
    raw = piece.blocks.raw

    def fill(out: torch.Tensor, rows: tuple[int, int], cols: tuple[int, int] | None) -> None:
        seen.append(out.shape[0] * 512)
        out.copy_(raw.pieces[0].read(rows, cols))

    watched = replace(raw, pieces=(replace(raw.pieces[0], fill=fill),))
    changed = replace(stored, pieces=(replace(piece, blocks=piece.blocks._replace(raw=watched)),))
    ready = Blocks(changed).rows([(700, 3000), (0, 100)]).prepare(torch.bfloat16, CPU)
    assert len(seen) > 2 and max(seen) <= CACHED and sum(seen) == 2400 * 512
    some = stored.rows([(2999, 3000), (0, 1)]).load(torch.bfloat16, CPU)
    torch.testing.assert_close(ready.gather(torch.tensor([2299, 2300])), some, rtol=2**-7, atol=0)


# ---- whole models --------------------------------------------------------------------------------

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 32,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
TOKENS = [5, 17, 80, 41, 3, 99, 23, 8, 64, 12]


class KeptFormat:
    def matrix(self, tensors: Tensors, product: Product) -> Kept:
        return Kept(BlocksFormat().matrix(tensors, product).weight)


class Rounded:
    """Expanded to bfloat16."""

    def matrix(self, tensors: Tensors, product: Product) -> Dense:
        return Dense(Stored.of(DenseFormat().matrix(tensors, product).dense(torch.bfloat16, CPU)))


def decoder_of(path: Path, form: Format) -> Decoder:
    """Computing in float32, however the weights are kept."""
    file = read(path)
    found = describe_file(file)
    source = FileSource.gguf(file)
    return Decoder(
        found.model,
        Weights(source, as_stored(found.names, source.names()), torch.float32, CPU, form),
    )


def off(path: Path, form: Format, want: torch.Tensor) -> float:
    have = decoder_logits(decoder_of(path, form), TOKENS, 64)
    return float((have - want).norm() / want.norm())


LLAMA = Case("llama", lambda: tf.LlamaConfig(**SIZES, **HEADS, **SPECIAL))
EXPERTS = Case("qwen3_moe", lambda: tf.Qwen3MoeConfig(**SIZES | SPARSE, **HEADS, **SPECIAL))


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("case", [LLAMA, EXPERTS], ids=["llama", "experts"])
def test_nearer_to_the_file_than_expanded(case: Case, kind: str, tmp_path: Path) -> None:
    """Against its values in float32: the same tokens, and less than half of what bfloat16 is off."""
    path = tmp_path / "model.gguf"
    gguf_writer.write(make_checkpoint(case, tmp_path), path, Kind[kind])
    want = logits(path, TOKENS, 64)
    decoder = decoder_of(path, KeptFormat())
    assert isinstance(decoder.embed.matrix, PackedReady)
    assert torch.equal(decoder_logits(decoder, TOKENS, 64).argmax(-1), want.argmax(-1))
    have = off(path, KeptFormat(), want)
    assert have < 1e-5 if kind in EXACT else have < off(path, Rounded(), want) / 2


def test_sixteen_bits_on_a_cpu_are_kept_too(tmp_path: Path) -> None:
    gguf_writer.write(make_checkpoint(LLAMA, tmp_path), tmp_path / "model.gguf", Kind.Q4_1)
    artifact = locate(str(tmp_path / "model.gguf"))
    kept, expanded = (
        load(artifact, "auto", torch.bfloat16, CPU, native=native) for native in (True, False)
    )
    assert kept.bytes < 0.35 * expanded.bytes


def test_rounding_what_is_packed_or_to_two_bits_is_said(tmp_path: Path) -> None:
    """A packed file may be rounded again, and a model to two bits; not without a word."""
    for kind, said in ((Kind.Q4_1, ["ruin", "rounded once more"]), (Kind.F16, ["ruin"])):
        gguf_writer.write(make_checkpoint(LLAMA, tmp_path), tmp_path / "model.gguf", kind)
        artifact = locate(str(tmp_path / "model.gguf"))
        notes = load(artifact, "auto", torch.float32, CPU, quantize="int2").notes
        assert len(notes) == len(said) and all(
            word in note for word, note in zip(said, notes, strict=True)
        )


def test_streamed_as_to_a_gpu(tmp_path: Path) -> None:
    """Panels of whole rows, and columns cut from them, while later ones are on their way."""
    data = gguf_writer.blocks(torch.randn(1500, 1024).numpy(), Kind.Q5_K)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("m.weight", data, raw_dtype=Kind.Q5_K)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
    ):
        write()
    writer.close()
    source = FileSource.gguf(read(tmp_path / "model.gguf"))
    whole = BlocksFormat().matrix(source, Product("m", (1500, 1024)))
    some = torch.arange(1100)
    for matrix in (
        whole,
        whole.rows([(300, 1400), (0, 9)]),
        whole.rows([(100, 1300)]).cols(256, 768),
    ):
        mapped = matrix.prepare(torch.bfloat16, CPU).gather(some)
        with Stream(CPU, 2, 1 << 14) as source.stream:
            streamed = matrix.prepare(torch.bfloat16, CPU).gather(some)
        source.stream = None
        assert torch.equal(streamed, mapped)
