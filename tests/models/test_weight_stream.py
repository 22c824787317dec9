"""Streamed weights equal the mapped file, for all slices and buffer sizes."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bloomery.artifacts.locate import locate_model
from bloomery.errors import CheckpointError
from bloomery.models import checkpoint
from bloomery.models.checkpoint import FileSource, open_source
from bloomery.models.weight_stream import WeightStream, as_bytes
from bloomery.quant.base import LinearSpec
from bloomery.quant.lazy_tensor import LazyTensor, PendingLoad, prefetch
from bloomery.quant.select import ON_LOAD_FORMATS

CPU = torch.device("cpu")


def random_slice(stored: LazyTensor, rng: random.Random) -> LazyTensor:
    """Rows in any order, some of them twice, and sometimes only some columns."""
    height, *width = stored.shape
    ranges = []
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(height)
        ranges.append((start, rng.randint(start + 1, height)))
    picked = stored.rows(ranges)
    if width and rng.random() < 0.5:
        start = rng.randrange(width[0])
        picked = picked.cols(start, rng.randint(start + 1, width[0]))
    return picked.cat([picked]) if rng.random() < 0.2 else picked


def test_streamed_slices_equal_the_mapped_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "STREAMED_VALUES", 300)
    rng = random.Random(0)
    tensors = {
        "misaligned": torch.ones(3, dtype=torch.uint8),
        "wide": torch.randn(37, 90).bfloat16(),
        "tall": torch.randn(400, 7),
        "vector": torch.randn(1000).half(),
        "stack": torch.randn(5, 11, 13),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    mapped = FileSource.safetensors(tmp_path)
    streamed = FileSource.safetensors(tmp_path)
    requests = [
        ("wide", (37, 90), False, None),
        ("wide", (90, 37), True, None),
        ("tall", (400, 7), False, None),
        ("vector", (1000,), False, None),
        ("stack", (11, 13), False, 3),
        ("stack", (13, 11), True, 4),
    ]
    for num_readers, chunk_bytes in ((1, 64), (3, 1000), (2, 1 << 20)):
        with WeightStream(CPU, num_readers, chunk_bytes) as stream:
            streamed.stream = stream
            for _ in range(40):
                name, shape, transposed, expert = rng.choice(requests)
                state = rng.getstate()
                expected = random_slice(mapped.tensor(name, shape, transposed, expert), rng)
                rng.setstate(state)
                dtype = rng.choice([expected.dtype, torch.float32])
                rng.setstate(state)
                actual = random_slice(streamed.tensor(name, shape, transposed, expert), rng)
                assert torch.equal(actual.load(dtype, CPU), expected.load(dtype, CPU)), (
                    name,
                    transposed,
                    dtype,
                )
            assert stream.free_buffers.qsize() == 2 * num_readers


def test_streamed_blocks_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "STREAMED_VALUES", 1 << 14)
    mapped = open_source(locate_model(None))
    streamed = open_source(locate_model(None))
    assert isinstance(streamed, FileSource)
    with WeightStream(CPU, 2, 50_000) as stream:
        streamed.stream = stream
        for name in ("blk.0.attn_q.weight", "blk.3.ffn_down.weight", "blk.3.attn_norm.weight"):
            shape = streamed.shape(name)
            for pick in (lambda stored: stored, lambda stored: stored.rows([(100, 200), (3, 40)])):
                expected, actual = (
                    pick(source.tensor(name, shape)).load(torch.float32, CPU)
                    for source in (mapped, streamed)
                )
                assert torch.equal(expected, actual)
            if len(shape) == 2:
                expected, actual = (
                    s.tensor(name, shape).cols(32, 96).load(torch.bfloat16, CPU)
                    for s in (mapped, streamed)
                )
                assert torch.equal(expected, actual)


@pytest.mark.parametrize("form", ON_LOAD_FORMATS)
def test_streamed_weights_are_quantized_on_load(form: str, tmp_path: Path) -> None:
    save_file({"w.weight": torch.randn(2048, 512).bfloat16()}, tmp_path / "model.safetensors")
    mapped = FileSource.safetensors(tmp_path)
    streamed = FileSource.safetensors(tmp_path)
    with WeightStream(CPU, 2, 10_000) as stream:
        streamed.stream = stream
        expected, actual = (
            ON_LOAD_FORMATS[form]
            .open_matrix(source, LinearSpec("w", (2048, 512)))
            .rows([(5, 1999)])
            .load_dense(torch.float32, CPU)
            for source in (mapped, streamed)
        )
    assert torch.equal(expected, actual)


def test_all_reads_have_ended_when_the_stream_closes(tmp_path: Path) -> None:
    file = tmp_path / "data"
    content = os.urandom(300_000)
    file.write_bytes(content)
    parts = [torch.empty(size, dtype=torch.int16) for size in (1, 70_000, 0, 5, 79_994)]
    at = 0
    with WeightStream(CPU, 2, 1 << 12) as stream:
        for part in parts:
            stream.read(file, at, part)
            assert len(stream.pending) <= stream.max_pending
            at += part.nbytes
    assert b"".join(bytes(as_bytes(part).tolist()) for part in parts) == content


def test_a_file_that_shrinks_is_named_and_no_buffer_is_lost(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4096, 8)}, tmp_path / "model.safetensors")
    source = FileSource.safetensors(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 70_000)
    with WeightStream(CPU, 2, 1 << 14) as stream:
        source.stream = stream
        with pytest.raises(CheckpointError, match=r"model\.safetensors: became shorter"):
            source.tensor("w", (4096, 8)).load(torch.float32, CPU)
        stream.pending.clear()
    assert stream.free_buffers.qsize() == 4
    with (
        pytest.raises(CheckpointError, match="became shorter"),
        WeightStream(CPU, 1, 1 << 14) as stream,
    ):
        source.stream = stream
        source.tensor("w", (4096, 8)).start_load(torch.float32, CPU)  # only the end waits for it


def test_a_fixed_number_of_loads_is_pending() -> None:
    started: list[int] = []

    def begin(number: int) -> PendingLoad:
        started.append(number)
        return PendingLoad(torch.tensor(number))

    for number, tensor in enumerate(prefetch(map(begin, range(10)), 3)):
        assert tensor == number and len(started) == min(number + 3, 10)
