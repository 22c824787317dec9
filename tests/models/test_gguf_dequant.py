"""GGUF types are dequantized bit for bit as by the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import _type_traits, dequantize

from bloomery.artifacts.gguf import GGML_BLOCKS, read_gguf
from bloomery.artifacts.locate import locate_model
from bloomery.errors import CheckpointError
from bloomery.models.checkpoint import FileSource
from bloomery.models.gguf_dequant import find_dequantizer
from bloomery.quant.gguf_blocks import BLOCK_DECODERS
from tests.parity.gguf_writer import dequantize_blocks

CPU = torch.device("cpu")
PACKAGE_TYPES = sorted(kind.name for kind in _type_traits)
FLOAT_TYPES = ["F32", "F16", "BF16"]
COLUMNS = 512  # two blocks of the widest types


def random_blocks(kind: str, count: int, seed: int = 0) -> np.ndarray:
    """Random bytes, of which only blocks with finite values are used."""
    generator = np.random.default_rng(seed)
    size = GGML_BLOCKS[kind][1]
    for _ in range(200):
        blocks = generator.integers(0, 256, (count, size), dtype=np.uint8)
        with np.errstate(all="ignore"):
            values = dequantize_blocks(blocks, gguf.GGMLQuantizationType[kind])
            is_finite = np.isfinite(values).all(axis=1)
        if is_finite.any():
            return np.resize(blocks[is_finite], (count, size))
    raise AssertionError(kind)


def same_bits(actual: torch.Tensor, expected: np.ndarray) -> bool:
    return np.array_equal(
        actual.numpy().view(np.uint32), np.ascontiguousarray(expected).view(np.uint32)
    )


@pytest.fixture(scope="module")
def all_types(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[FileSource, dict[str, np.ndarray]]:
    """A file with a tensor [6, 512] of every type that the package can decode, and the values."""
    path = tmp_path_factory.mktemp("gguf") / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    expected = {}
    for kind in dict.fromkeys([*FLOAT_TYPES, *PACKAGE_TYPES]):
        number = gguf.GGMLQuantizationType[kind]
        if kind in ("F32", "F16"):
            stored = (
                np.random.default_rng(1)
                .normal(size=(6, COLUMNS))
                .astype(np.dtype(f"<f{GGML_BLOCKS[kind][1]}"))
            )
        else:
            stored = random_blocks(kind, 6 * COLUMNS // GGML_BLOCKS[kind][0]).reshape(6, -1)
        writer.add_tensor(kind, stored, raw_dtype=number)
        expected[kind] = dequantize(stored, number).reshape(6, COLUMNS)
    writer.add_tensor(
        "Q8_K", np.zeros((1, 292), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_K
    )
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return FileSource.gguf(read_gguf(path)), expected


@pytest.mark.parametrize("kind", sorted({*FLOAT_TYPES, *PACKAGE_TYPES}))
def test_every_type_equals_the_package(
    all_types: tuple[FileSource, dict[str, np.ndarray]], kind: str
) -> None:
    source, expected = all_types
    stored = source.tensor(kind, (6, COLUMNS))
    assert same_bits(stored.load(torch.float32, CPU), expected[kind])
    part = stored.rows([(4, 6), (1, 2)]).cols(37, 301)
    assert same_bits(
        part.load(torch.float32, CPU),
        np.concatenate([expected[kind][4:6], expected[kind][1:2]])[:, 37:301],
    )
    transposed = source.tensor(kind, (COLUMNS, 6), transposed=True).rows([(250, 260)]).cols(2, 5)
    assert same_bits(transposed.load(torch.float32, CPU), expected[kind][2:5, 250:260].T)
    piece = stored.pieces[0]
    assert same_bits(piece.read((2, 4), (5, 500)).float().contiguous(), expected[kind][2:4, 5:500])


def test_every_quantized_type_of_the_package_has_a_decoder() -> None:
    """The package itself decodes 50 million values a second: minutes for a large file."""
    assert BLOCK_DECODERS.keys() >= set(PACKAGE_TYPES) - set(FLOAT_TYPES)


@pytest.mark.parametrize("kind", sorted(BLOCK_DECODERS))
def test_many_blocks_equal_the_package(kind: str) -> None:
    blocks = random_blocks(kind, 3000, seed=7)
    actual = BLOCK_DECODERS[kind](torch.from_numpy(blocks)).dequantize()
    assert same_bits(actual, dequantize_blocks(blocks, gguf.GGMLQuantizationType[kind]))


def test_a_type_that_cannot_be_decoded_is_named_when_it_is_needed(
    all_types: tuple[FileSource, dict[str, np.ndarray]],
) -> None:
    assert find_dequantizer("Q8_K") is None
    with pytest.raises(CheckpointError, match=r"all\.gguf: tensor 'Q8_K' is of type Q8_K"):
        all_types[0].tensor("Q8_K", (1, 256))


def test_the_embedded_model_equals_the_package() -> None:
    file = read_gguf(locate_model(None).path)
    source = FileSource.gguf(file)
    for name in (
        "token_embd.weight",
        "blk.0.attn_q.weight",
        "blk.29.ffn_down.weight",
        "output_norm.weight",
    ):
        entry = file.tensors[name]
        rows = entry.shape[:-1] or (1,)
        raw = np.memmap(file.path, np.uint8, "r", entry.start, (*rows, entry.nbytes // rows[0]))
        stored = source.tensor(name, entry.shape)
        if len(rows) and len(entry.shape) > 1:
            count = min(1000, rows[0])
            stored = stored.rows([(rows[0] - count, rows[0])])
            raw = raw[rows[0] - count :]
        expected = dequantize(np.array(raw), gguf.GGMLQuantizationType[entry.type])
        assert same_bits(stored.load(torch.float32, CPU), expected.reshape(stored.shape))
