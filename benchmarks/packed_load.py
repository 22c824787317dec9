"""Measures the load time of each quantization format, relative to loading without quantization.

    PYTHONPATH=src:. python3 benchmarks/packed_load.py [SHAPE] [--formats int8 int4 fp8 nf4]
        [--rounds 2] [--checkpoint-dir FOLDER]

Every load runs in its own process, and the formats alternate. Weights are random and made on the
device, so that the disk does not hide the time of quantization. With --checkpoint-dir a bfloat16
checkpoint of random weights is written there once and read each time, as a user's would be. Seconds
are those of loading only: a first matrix compiles the kernels beforehand. The fastest round counts.
The exit code is the number of formats that take more than MAX_SLOWDOWN times as long.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.offline import SHAPES

SMALL_SHAPES = {
    "llama-small": SHAPES["llama-1b"]
    | {"num_hidden_layers": 2, "vocab_size": 4096, "hidden_size": 1024}
}
ALL_SHAPES = SHAPES | SMALL_SHAPES
MAX_SLOWDOWN = 1.5


class LoadResult(NamedTuple):
    """Time and memory of one load."""

    seconds: float
    weights_gib: float
    peak_gib: float  # the most GPU memory that was allocated


def load_once(folder: str, quantization: str, load_format: str, device_name: str) -> None:
    """Load a model in this process and print a LoadResult as JSON."""
    import torch

    from bloomery.artifacts.locate import locate_model
    from bloomery.models.checkpoint import DummySource
    from bloomery.models.load import load_model
    from bloomery.quant.base import LinearSpec
    from bloomery.quant.select import select_format

    device = torch.device(device_name)
    artifact = locate_model(folder, weights=load_format == "auto")
    for inside in (True, False):
        spec = LinearSpec("warmup", (256, 4096), in_decoder_layer=inside)
        select_format(None, quantization).open_matrix(DummySource(), spec).prepare(
            torch.bfloat16, device
        )

    def synchronized_time() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    start = synchronized_time()
    loaded = load_model(artifact, load_format, torch.bfloat16, device, quantize=quantization)
    seconds = synchronized_time() - start
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    print(json.dumps([seconds, loaded.weight_bytes / 2**30, peak / 2**30]))


def time_load(folder: Path, quantization: str, load_format: str, device: str) -> LoadResult:
    """Run `load_once` in a process of its own."""
    command = [sys.executable, __file__, "--load-once"]
    command += [str(folder), quantization, load_format, device]
    completed = subprocess.run(command, capture_output=True, text=True)
    if completed.returncode:
        raise SystemExit(f"{quantization}: {completed.stderr.strip().splitlines()[-1]}")
    return LoadResult(*json.loads(completed.stdout.strip().splitlines()[-1]))


def write_random_checkpoint(folder: Path, device: str) -> None:
    """Write random weights for the config in `folder`, one file per tensor the model reads."""
    import torch
    from safetensors.torch import save_file

    from bloomery.artifacts.locate import locate_model
    from bloomery.describe import describe_model
    from bloomery.models.checkpoint import DummySource
    from bloomery.models.decoder import Decoder
    from bloomery.models.weights import ModelWeights

    class RecordingSource(DummySource):
        """Records the name and shape of every tensor that the model reads."""

        def __init__(self) -> None:
            super().__init__(dtype=torch.bfloat16)
            self.shapes: dict[str, tuple[int, ...]] = {}

        def tensor(self, name, shape, transposed=False, expert=None):
            self.shapes[name] = tuple(reversed(shape)) if transposed else tuple(shape)
            return super().tensor(name, shape, transposed, expert)

    source = RecordingSource()
    described = describe_model(locate_model(str(folder), weights=False))
    meta = torch.device("meta")
    Decoder(described.model, ModelWeights(source, described.names, torch.bfloat16, meta))
    weight_map: dict[str, str] = {}
    for number, (name, shape) in enumerate(source.shapes.items()):
        shard = f"model-{number:05d}.safetensors"
        weight = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
        save_file({name: weight.cpu()}, folder / shard)
        weight_map[name] = shard
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def compare_formats(args: argparse.Namespace) -> int:
    """Time all formats, print a table, and return how many are too slow."""
    best: dict[str, LoadResult] = {}
    with tempfile.TemporaryDirectory(dir=args.checkpoint_dir) as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(ALL_SHAPES[args.shape]))
        load_format = "dummy"
        if args.checkpoint_dir:
            write_random_checkpoint(folder, args.device)
            load_format = "auto"
        for _ in range(args.rounds):
            for quantization in ("auto", *args.formats):
                result = time_load(folder, quantization, load_format, args.device)
                best[quantization] = min(best.get(quantization, result), result)
    source = "checkpoint" if args.checkpoint_dir else "random weights"
    print(f"{args.shape}, {source}, fastest of {args.rounds}")
    baseline = best["auto"].seconds
    num_slow = 0
    for quantization, result in best.items():
        label = "none" if quantization == "auto" else quantization
        print(
            f"{label:8}{result.seconds:8.2f} s{result.seconds / baseline:8.2f} x"
            f"{result.weights_gib:9.2f} GiB of weights{result.peak_gib:9.2f} GiB peak"
        )
        num_slow += result.seconds > MAX_SLOWDOWN * baseline
    return num_slow


def main() -> int:
    """Parse the command line and compare the formats."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", nargs="?", default="llama-8b", choices=list(ALL_SHAPES))
    parser.add_argument("--formats", nargs="+", default=["int8", "int4", "fp8", "nf4"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--checkpoint-dir", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--load-once", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load_once:
        load_once(*args.load_once)
        return 0
    return compare_formats(args)


if __name__ == "__main__":
    raise SystemExit(main())
