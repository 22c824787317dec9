"""Measures loading of weights from disk: by the weight stream, by mapping, and reading alone.

    PYTHONPATH=src python3 benchmarks/weight_streaming.py [--gib 4] [--device cuda]

Writes a checkpoint with the matrices of an 8B model, checks that the stream delivers the bytes of
the file, and loads it by each method: with the file in the page cache (warm, best of three, mapped
once) and without (cold, once, after the system was told to drop it). `read alone` uses as many
threads and buffers as the stream, but no device.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from bloomery.models.checkpoint import FileSource
from bloomery.models.weight_stream import CHUNK_BYTES, NUM_READERS, WeightStream, as_bytes
from bloomery.quant.base import LinearSpec
from bloomery.quant.dense import DenseFormat
from bloomery.quant.select import ON_LOAD_FORMATS

SHAPES = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096))  # [rows, cols]
# (readers, bytes of a chunk) to compare
READER_SETTINGS = (
    (NUM_READERS, CHUNK_BYTES),
    (4, 16 << 20),
    (16, 4 << 20),
    (2, 64 << 20),
    (1, CHUNK_BYTES),
)


def write_checkpoint(folder: Path, size: int) -> FileSource:
    """A safetensors file of at least `size` random bytes."""
    header = {}
    end = 0
    while end < size:
        for rows, cols in SHAPES:
            start = end
            end += 2 * rows * cols
            header[f"{len(header):04}.weight"] = {
                "dtype": "BF16",
                "shape": [rows, cols],
                "data_offsets": [start, end],
            }
    text = json.dumps(header).encode()
    block = os.urandom(1 << 26)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for offset in range(0, end, len(block)):
            file.write(block[: end - offset])
        file.flush()
        os.fsync(file.fileno())
    return FileSource.safetensors(folder)


def drop_from_page_cache(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def linear_specs(source: FileSource) -> Iterator[LinearSpec]:
    for name in sorted(source.entries):
        yield LinearSpec(name.removesuffix(".weight"), source.shape(name))


def load_mapped(source: FileSource, device: torch.device) -> int:
    source.stream = None
    for spec in linear_specs(source):
        weight = DenseFormat().open_matrix(source, spec).prepare(torch.bfloat16, device).weight
    return int(as_bytes(weight)[-1])


def load_streamed(
    source: FileSource,
    device: torch.device,
    num_readers: int = NUM_READERS,
    chunk_bytes: int = CHUNK_BYTES,
    half: str = "",
    quantization: str = "",
) -> int:
    """Load every matrix, or with `half` the half that one of two tensor parallel ranks holds.

    `half` is "rows" or "columns".
    """
    weight_format = ON_LOAD_FORMATS[quantization] if quantization else DenseFormat()
    with WeightStream(device, num_readers, chunk_bytes) as source.stream:
        for spec in linear_specs(source):
            matrix = weight_format.open_matrix(source, spec)
            rows, cols = spec.shape
            if half == "rows":
                matrix = matrix.rows([(0, rows // 2)])
            elif half == "columns":
                matrix = matrix.cols(cols // 2, cols)
            prepared = matrix.prepare(torch.bfloat16, device)
    source.stream = None
    return 0 if quantization else int(as_bytes(prepared.weight)[-1])


def read_alone(file: Path, num_readers: int, chunk_bytes: int) -> int:
    """Read the file with several threads and discard it."""
    handle = os.open(file, os.O_RDONLY)
    size = file.stat().st_size

    def read_chunks(reader: int) -> None:
        buffer = bytearray(chunk_bytes)
        for offset in range(reader * chunk_bytes, size, num_readers * chunk_bytes):
            os.preadv(handle, [buffer], offset)

    with ThreadPoolExecutor(num_readers) as pool:
        list(pool.map(read_chunks, range(num_readers)))
    os.close(handle)
    return size


def print_rate(
    name: str,
    size: int,
    device: torch.device,
    load: Callable[[], object],
    cold_file: Path | None = None,
) -> None:
    """Time `load` and print its rate; `cold_file` is dropped from the page cache before."""
    num_runs = 1 if cold_file or name == "mapped" else 3
    best = float("inf")
    for _ in range(num_runs):
        if cold_file:
            drop_from_page_cache(cold_file)
        start = time.perf_counter()
        load()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    state = "cold" if cold_file else "warm"
    print(f"{state} {name:34} {best:7.3f} s {size / best / 1e9:6.2f} GB/s", flush=True)


def check_bytes(source: FileSource, device: torch.device) -> None:
    """Compare the last matrix and parts of it, by the stream and mapped."""
    spec = list(linear_specs(source))[-1]
    matrix = DenseFormat().open_matrix(source, spec)
    for part in (matrix, matrix.rows([(3, 1000)]), matrix.cols(1000, 2008)):
        expected = part.load_dense(torch.bfloat16, torch.device("cpu"))
        with WeightStream(device) as source.stream:
            streamed = part.prepare(torch.bfloat16, device).weight
        source.stream = None
        same = torch.equal(as_bytes(streamed.cpu()), as_bytes(expected))
        assert same, "the stream's bytes differ from the file's"


def measure(source: FileSource, file: Path, device: torch.device) -> None:
    size = file.stat().st_size
    loaders: tuple[tuple[str, Callable[[], object]], ...] = (
        ("read alone, one thread", partial(read_alone, file, 1, CHUNK_BYTES)),
        ("read alone", partial(read_alone, file, NUM_READERS, CHUNK_BYTES)),
        ("mapped", partial(load_mapped, source, device)),
        ("stream", partial(load_streamed, source, device)),
    )
    for name, load in loaders:
        print_rate(name, size, device, load, cold_file=file)
    for name, load in reversed(loaders):
        print_rate(name, size, device, load)
    for num_readers, chunk_bytes in READER_SETTINGS:
        name = f"stream, {num_readers} readers x 2 x {chunk_bytes >> 20} MiB"
        load = partial(load_streamed, source, device, num_readers, chunk_bytes)
        print_rate(name, size, device, load)
    for half in ("rows", "columns"):
        load = partial(load_streamed, source, device, half=half)
        print_rate(f"stream, half of the {half}", size // 2, device, load)
    for quantization in ("int8", "nf4"):
        load = partial(load_streamed, source, device, quantization=quantization)
        print_rate(f"stream to {quantization}", size, device, load)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    device = torch.device(args.device)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        start = time.perf_counter()
        source = write_checkpoint(folder, int(args.gib * 2**30))
        seconds = time.perf_counter() - start
        file = folder / "model.safetensors"
        gigabytes = file.stat().st_size / 1e9
        print(f"{gigabytes:.2f} GB, {len(source.entries)} matrices, written in {seconds:.1f} s")
        check_bytes(source, device)
        measure(source, file, device)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
