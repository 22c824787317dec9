"""How fast GGUF files of each type load on a CPU: `python benchmarks/gguf_load.py [TYPES]`.

A file with matrices of a 1B model is written for each type, with random blocks. Its matrices are
then prepared for the native kernels, as a server does at its start. The package column is the time
of the gguf package's own decoder for the same bytes, which is what a type without a decoder of ours
would need.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import torch

from bloomery.artifacts.gguf import GGML_BLOCKS, read_gguf
from bloomery.models.checkpoint import FileSource
from bloomery.native.ops import PACKED_TYPES
from bloomery.native.thread_pool import ThreadPool
from bloomery.quant.base import LinearSpec
from bloomery.quant.gguf import GgufFormat
from tests.parity.gguf_writer import quantize_blocks

CPU = torch.device("cpu")
SHAPE = (8192, 2048)  # an MLP matrix of a 1B model
COPIES = 8
ROUNDS = 3
PACKAGE_ROWS = 256  # decoded by the package, which is slow


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", default=list(PACKED_TYPES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    pool = ThreadPool(options.threads)
    print(f"{pool.num_threads} threads; best of {ROUNDS}; a file in the page cache")
    print(
        f"{'type':8} {'file':>9} {'load':>8} {'GB/s of file':>13} {'weights/s':>11} {'package':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.types:
            print(measure_type(kind, Path(folder) / "model.gguf", pool), flush=True)


def measure_type(kind: str, path: Path, pool: ThreadPool) -> str:
    """One row of the table."""
    blocks = random_matrix(kind)
    write_file(path, kind, blocks)
    source = FileSource.gguf(read_gguf(path))
    names = [f"m{i}" for i in range(COPIES)]
    matrices = [GgufFormat().open_matrix(source, LinearSpec(name, SHAPE)) for name in names]
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        weights = [matrix.prepare(torch.float32, CPU, pool) for matrix in matrices]
        seconds.append(time.perf_counter() - started)
        del weights
    best = min(seconds)
    file_bytes = source.nbytes
    num_weights = COPIES * SHAPE[0] * SHAPE[1]
    package = package_seconds(kind, blocks) * COPIES
    relative = "" if package == 0 else f"{package / best:.0f} x"
    return (
        f"{kind:8} {file_bytes / 1e6:6.0f} MB {best:6.3f} s {file_bytes / best / 1e9:13.2f} "
        f"{num_weights / best / 1e9:9.2f} G {relative:>8}"
    )


def random_matrix(kind: str) -> np.ndarray:
    """Blocks of one matrix: uint8 [rows, bytes]."""
    few_rows = np.random.default_rng(0).normal(size=(64, SHAPE[1])).astype(np.float32)
    few_blocks = quantize_blocks(few_rows, gguf.GGMLQuantizationType[kind])
    return np.resize(
        few_blocks, (SHAPE[0], SHAPE[1] // GGML_BLOCKS[kind][0] * GGML_BLOCKS[kind][1])
    )


def write_file(path: Path, kind: str, blocks: np.ndarray) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for i in range(COPIES):
        writer.add_tensor(f"m{i}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def package_seconds(kind: str, blocks: np.ndarray) -> float:
    """What the gguf package needs to decode one matrix; 0 if it cannot."""
    started = time.perf_counter()
    try:
        gguf.quants.dequantize(blocks[:PACKAGE_ROWS], gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        return 0.0
    return (time.perf_counter() - started) * len(blocks) / PACKAGE_ROWS


if __name__ == "__main__":
    main()
