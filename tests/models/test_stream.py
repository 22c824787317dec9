"""Bytes by a stream equal those of the mapped file, whatever is asked for and however small the ring."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bloomery.artifacts.locate import locate
from bloomery.errors import CheckpointError
from bloomery.models import checkpoint
from bloomery.models.checkpoint import FileSource, open_source
from bloomery.models.stream import Stream, flat
from bloomery.quant.base import Arriving, Product, Stored, ahead
from bloomery.quant.choose import ON_LOAD

CPU = torch.device("cpu")


def some_of(stored: Stored, chance: random.Random) -> Stored:
    """Rows in any order, some of them twice; perhaps only some columns of them."""
    height, *width = stored.shape
    ranges = []
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(height)
        ranges.append((start, chance.randint(start + 1, height)))
    picked = stored.rows(ranges)
    if width and chance.random() < 0.5:
        start = chance.randrange(width[0])
        picked = picked.cols(start, chance.randint(start + 1, width[0]))
    return picked.cat([picked]) if chance.random() < 0.2 else picked


def test_slices_equal_the_mapped_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "STREAMED_VALUES", 300)
    chance = random.Random(0)
    tensors = {
        "odd": torch.ones(3, dtype=torch.uint8),
        "wide": torch.randn(37, 90).bfloat16(),
        "tall": torch.randn(400, 7),
        "vector": torch.randn(1000).half(),
        "stack": torch.randn(5, 11, 13),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    mapped = FileSource.safetensors(tmp_path)
    streamed = FileSource.safetensors(tmp_path)
    asked = [
        ("wide", (37, 90), False, None),
        ("wide", (90, 37), True, None),
        ("tall", (400, 7), False, None),
    ]
    asked += [
        ("vector", (1000,), False, None),
        ("stack", (11, 13), False, 3),
        ("stack", (13, 11), True, 4),
    ]
    for readers, chunk in ((1, 64), (3, 1000), (2, 1 << 20)):
        with Stream(CPU, readers, chunk) as stream:
            streamed.stream = stream
            for _ in range(40):
                name, shape, turned, expert = chance.choice(asked)
                state = chance.getstate()
                want = some_of(mapped.tensor(name, shape, turned, expert), chance)
                chance.setstate(state)
                dtype = chance.choice([want.dtype, torch.float32])
                chance.setstate(state)
                got = some_of(streamed.tensor(name, shape, turned, expert), chance)
                assert torch.equal(got.load(dtype, CPU), want.load(dtype, CPU)), (
                    name,
                    turned,
                    dtype,
                )
            assert stream.free.qsize() == 2 * readers


def test_blocks_are_decoded_where_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "STREAMED_VALUES", 1 << 14)
    mapped = open_source(locate(None))
    streamed = open_source(locate(None))
    assert isinstance(streamed, FileSource)
    with Stream(CPU, 2, 50_000) as stream:
        streamed.stream = stream
        for name in ("blk.0.attn_q.weight", "blk.3.ffn_down.weight", "blk.3.attn_norm.weight"):
            shape = streamed.shape(name)
            for pick in (lambda whole: whole, lambda whole: whole.rows([(100, 200), (3, 40)])):
                want, got = (
                    pick(source.tensor(name, shape)).load(torch.float32, CPU)
                    for source in (mapped, streamed)
                )
                assert torch.equal(want, got)
            if len(shape) == 2:
                want, got = (
                    s.tensor(name, shape).cols(32, 96).load(torch.bfloat16, CPU)
                    for s in (mapped, streamed)
                )
                assert torch.equal(want, got)


@pytest.mark.parametrize("form", ON_LOAD)
def test_rounding_what_is_still_arriving(form: str, tmp_path: Path) -> None:
    save_file({"w.weight": torch.randn(2048, 512).bfloat16()}, tmp_path / "model.safetensors")
    mapped = FileSource.safetensors(tmp_path)
    streamed = FileSource.safetensors(tmp_path)
    with Stream(CPU, 2, 10_000) as stream:
        streamed.stream = stream
        want, got = (
            ON_LOAD[form]
            .matrix(source, Product("w", (2048, 512)))
            .rows([(5, 1999)])
            .dense(torch.float32, CPU)
            for source in (mapped, streamed)
        )
    assert torch.equal(want, got)


def test_all_that_was_begun_is_there_in_the_end(tmp_path: Path) -> None:
    file = tmp_path / "data"
    data = os.urandom(300_000)
    file.write_bytes(data)
    parts = [torch.empty(size, dtype=torch.int16) for size in (1, 70_000, 0, 5, 79_994)]
    at = 0
    with Stream(CPU, 2, 1 << 12) as stream:
        for part in parts:
            stream.read(file, at, part)
            assert len(stream.begun) <= stream.most
            at += part.nbytes
    assert b"".join(bytes(flat(part).tolist()) for part in parts) == data


def test_a_file_that_shrinks_is_named_and_the_ring_stays_whole(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4096, 8)}, tmp_path / "model.safetensors")
    source = FileSource.safetensors(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 70_000)
    with Stream(CPU, 2, 1 << 14) as stream:
        source.stream = stream
        with pytest.raises(CheckpointError, match=r"model\.safetensors: became shorter"):
            source.tensor("w", (4096, 8)).load(torch.float32, CPU)
        stream.begun.clear()
    assert stream.free.qsize() == 4
    with pytest.raises(CheckpointError, match="became shorter"), Stream(CPU, 1, 1 << 14) as stream:
        source.stream = stream
        source.tensor("w", (4096, 8)).begin(torch.float32, CPU)  # nobody waits but the end


def test_so_many_are_under_way_and_no_more() -> None:
    begun: list[int] = []

    def begin(number: int) -> Arriving:
        begun.append(number)
        return Arriving(torch.tensor(number))

    for number, tensor in enumerate(ahead(map(begin, range(10)), 3)):
        assert tensor == number and len(begun) == min(number + 3, 10)
