"""Weights from disk to the device: by the stream, by mapping, and how fast the disk alone would be.

    PYTHONPATH=src python3 benchmarks/streaming.py [--gib 4] [--device cuda]

Writes a checkpoint of matrices as a model of 8 billion has them and loads it by every way, with the file in the page
cache (warm, best of three, mapped once) and without (cold, once: the system is asked to forget it first). `read alone`:
as many threads and buffers as the stream, without a device. The stream's bytes are compared with the file's before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bloomery.models.checkpoint import FileSource
from bloomery.models.stream import CHUNK, READERS, Stream, flat
from bloomery.quant.base import Product
from bloomery.quant.choose import ON_LOAD
from bloomery.quant.dense import DenseFormat

SHAPES = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096))
RINGS = ((READERS, CHUNK), (4, 16 << 20), (16, 4 << 20), (2, 64 << 20), (1, CHUNK))


def write(folder: Path, size: int) -> FileSource:
    header = {}
    end = 0
    while end < size:
        for rows, cols in SHAPES:
            name = f"{len(header):04}.weight"
            header[name] = {
                "dtype": "BF16",
                "shape": [rows, cols],
                "data_offsets": [end, end + 2 * rows * cols],
            }
            end += 2 * rows * cols
    text = json.dumps(header).encode()
    block = os.urandom(1 << 26)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for at in range(0, end, len(block)):
            file.write(block[: end - at])
        file.flush()
        os.fsync(file.fileno())
    return FileSource.safetensors(folder)


def forget(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def matrices(source: FileSource):
    for name in sorted(source.entries):
        yield Product(name.removesuffix(".weight"), source.shape(name))


def mapped(source: FileSource, device: torch.device) -> int:
    source.stream = None
    for product in matrices(source):
        weight = DenseFormat().matrix(source, product).prepare(torch.bfloat16, device).weight
    return int(flat(weight)[-1])


def streamed(
    source: FileSource,
    device: torch.device,
    readers: int,
    chunk: int,
    half: str = "",
    form: str = "",
) -> int:
    """With `half` what one of two ranks takes of each matrix: some of its rows, or some columns."""
    with Stream(device, readers, chunk) as source.stream:
        for product in matrices(source):
            matrix = (ON_LOAD[form] if form else DenseFormat()).matrix(source, product)
            rows, cols = product.shape
            if half:
                matrix = (
                    matrix.rows([(0, rows // 2)])
                    if half == "rows"
                    else matrix.cols(cols // 2, cols)
                )
            ready = matrix.prepare(torch.bfloat16, device)
    source.stream = None
    return int(flat(ready.weight)[-1]) if not form else 0


def alone(file: Path, readers: int, chunk: int) -> int:
    handle = os.open(file, os.O_RDONLY)
    size = file.stat().st_size

    def some(first: int) -> None:
        buffer = bytearray(chunk)
        for at in range(first * chunk, size, readers * chunk):
            os.preadv(handle, [buffer], at)

    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(some, range(readers)))
    os.close(handle)
    return size


def timed(
    name: str, size: int, device: torch.device, work: Callable[[], object], cold: Path | None = None
) -> None:
    best = float("inf")
    for _ in range(1 if cold or name == "mapped" else 3):
        if cold:
            forget(cold)
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begun)
    print(
        f"{'cold' if cold else 'warm'} {name:34} {best:7.3f} s {size / best / 1e9:6.2f} GB/s",
        flush=True,
    )


def check(source: FileSource, device: torch.device) -> None:
    """The last matrix, whole and in part, by the stream and mapped."""
    product = list(matrices(source))[-1]
    whole = DenseFormat().matrix(source, product)
    for part in (whole, whole.rows([(3, 1000)]), whole.cols(1000, 2008)):
        want = part.dense(torch.bfloat16, torch.device("cpu"))
        with Stream(device) as source.stream:
            got = part.prepare(torch.bfloat16, device).weight
        source.stream = None
        assert torch.equal(flat(got.cpu()), flat(want)), "the stream's bytes are not the file's"


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
        begun = time.perf_counter()
        source = write(folder, int(args.gib * 2**30))
        file = folder / "model.safetensors"
        size = file.stat().st_size
        print(
            f"{size / 1e9:.2f} GB, {len(source.entries)} matrices, written in {time.perf_counter() - begun:.1f} s"
        )
        check(source, device)
        every = (
            ("read alone, one thread", lambda: alone(file, 1, CHUNK)),
            ("read alone", lambda: alone(file, READERS, CHUNK)),
            ("mapped", lambda: mapped(source, device)),
            ("stream", lambda: streamed(source, device, READERS, CHUNK)),
        )
        for name, work in every:
            timed(name, size, device, work, cold=file)
        for name, work in reversed(every):
            timed(name, size, device, work)
        for readers, chunk in RINGS:
            name = f"stream, {readers} readers x 2 x {chunk >> 20} MiB"
            timed(name, size, device, lambda r=readers, c=chunk: streamed(source, device, r, c))
        for half in ("rows", "columns"):
            name = f"stream, half of the {half}"
            timed(
                name,
                size // 2,
                device,
                lambda h=half: streamed(source, device, READERS, CHUNK, half=h),
            )
        for form in ("int8", "nf4"):
            timed(
                f"stream to {form}",
                size,
                device,
                lambda f=form: streamed(source, device, READERS, CHUNK, form=f),
            )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
