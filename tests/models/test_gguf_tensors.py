"""GGUF's types decoded bit for bit as the gguf package decodes them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import _type_traits, dequantize

from bloomery.artifacts.gguf import BLOCKS, read
from bloomery.artifacts.locate import locate
from bloomery.errors import CheckpointError
from bloomery.models.checkpoint import FileSource
from bloomery.models.gguf import decoder
from bloomery.quant.gguf_blocks import STEPS

CPU = torch.device("cpu")
PACKAGE = sorted(kind.name for kind in _type_traits)
PLAIN = ["F32", "F16", "BF16"]
COLUMNS = 512  # two blocks of the widest types


def some_blocks(kind: str, count: int, seed: int = 0) -> np.ndarray:
    """Random blocks whose scales are sound: bytes at random, then no half float that is NaN or infinite."""
    generator = np.random.default_rng(seed)
    size = BLOCKS[kind][1]
    for _ in range(200):
        blocks = generator.integers(0, 256, (count, size), dtype=np.uint8)
        with np.errstate(all="ignore"):
            good = np.isfinite(dequantize(blocks, gguf.GGMLQuantizationType[kind])).all(axis=1)
        if good.any():
            return np.resize(blocks[good], (count, size))
    raise AssertionError(kind)


def same_bits(have: torch.Tensor, want: np.ndarray) -> bool:
    return np.array_equal(have.numpy().view(np.uint32), np.ascontiguousarray(want).view(np.uint32))


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """One file with a tensor [6, 512] of every type the package can decode, and what they decode to."""
    path = tmp_path_factory.mktemp("gguf") / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    wanted = {}
    for kind in dict.fromkeys([*PLAIN, *PACKAGE]):
        number = gguf.GGMLQuantizationType[kind]
        if kind in ("F32", "F16"):
            data = (
                np.random.default_rng(1)
                .normal(size=(6, COLUMNS))
                .astype(np.dtype(f"<f{BLOCKS[kind][1]}"))
            )
        else:
            data = some_blocks(kind, 6 * COLUMNS // BLOCKS[kind][0]).reshape(6, -1)
        writer.add_tensor(kind, data, raw_dtype=number)
        wanted[kind] = dequantize(data, number).reshape(6, COLUMNS)
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
    return FileSource.gguf(read(path)), wanted


@pytest.mark.parametrize("kind", sorted({*PLAIN, *PACKAGE}))
def test_whole_rows_and_columns_equal_the_package(everything, kind):
    source, wanted = everything
    stored = source.tensor(kind, (6, COLUMNS))
    assert same_bits(stored.load(torch.float32, CPU), wanted[kind])
    part = stored.rows([(4, 6), (1, 2)]).cols(37, 301)
    assert same_bits(
        part.load(torch.float32, CPU),
        np.concatenate([wanted[kind][4:6], wanted[kind][1:2]])[:, 37:301],
    )
    turned = source.tensor(kind, (COLUMNS, 6), transposed=True).rows([(250, 260)]).cols(2, 5)
    assert same_bits(turned.load(torch.float32, CPU), wanted[kind][2:5, 250:260].T)
    piece = stored.pieces[0]
    assert same_bits(piece.read((2, 4), (5, 500)).float().contiguous(), wanted[kind][2:4, 5:500])


def test_everyday_types_have_decoders_of_their_own():
    assert STEPS.keys() >= {
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
    }


@pytest.mark.parametrize("kind", sorted(STEPS))
def test_decoders_on_many_blocks(kind):
    blocks = some_blocks(kind, 3000, seed=7)
    have = STEPS[kind](torch.from_numpy(blocks)).values()
    assert same_bits(have, dequantize(blocks, gguf.GGMLQuantizationType[kind]))


def test_type_nobody_decodes_is_named_when_it_is_pulled(everything):
    assert decoder("Q8_K") is None
    with pytest.raises(CheckpointError, match=r"all\.gguf: tensor 'Q8_K' is of type Q8_K"):
        everything[0].tensor("Q8_K", (1, 256))


def test_embedded_model_equals_the_package():
    file = read(locate(None).path)
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
            top = min(1000, rows[0])
            stored = stored.rows([(rows[0] - top, rows[0])])
            raw = raw[rows[0] - top :]
        want = dequantize(np.array(raw), gguf.GGMLQuantizationType[entry.type])
        assert same_bits(stored.load(torch.float32, CPU), want.reshape(stored.shape))
