"""How long fewer bits take to load: each format against the plain load, both in processes of their own, in turn.

    PYTHONPATH=src:. python3 benchmarks/packed_load.py [SHAPE] [--formats int8 int4 fp8 nf4] [--turns 2] [--file FOLDER]

Weights are made up on the device, so that rounding shows and no disk hides it; with --file a checkpoint of random
weights in bfloat16 is written there once and read each time, as a user's would be. Seconds are of loading alone,
kernels compiled beforehand by a first matrix; the best of the turns counts. Memory is the most that was allocated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.offline import SHAPES

SMALL = {
    "llama-small": SHAPES["llama-1b"]
    | {"num_hidden_layers": 2, "vocab_size": 4096, "hidden_size": 1024}
}
REACH = 1.5  # times the plain load


def one(folder: str, form: str, load_format: str, device: str) -> None:
    """In a process of its own: seconds, GiB of weights, GiB at most."""
    import torch

    from bloomery.artifacts.locate import locate
    from bloomery.models.checkpoint import DummySource
    from bloomery.models.load import load
    from bloomery.quant.base import Product
    from bloomery.quant.choose import choose

    where = torch.device(device)
    artifact = locate(folder, weights=load_format == "auto")
    for inside in (True, False):
        choose(None, form).matrix(
            DummySource(), Product("warm", (256, 4096), inside=inside)
        ).prepare(torch.bfloat16, where)

    def settled() -> float:
        if where.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    began = settled()
    loaded = load(artifact, load_format, torch.bfloat16, where, quantize=form)
    seconds = settled() - began
    most = torch.cuda.max_memory_allocated() if where.type == "cuda" else 0
    print(json.dumps([seconds, loaded.bytes / 2**30, most / 2**30]))


def timed(folder: Path, form: str, load_format: str, device: str) -> tuple[float, float, float]:
    command = [sys.executable, __file__, "--one", str(folder), form, load_format, device]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{form}: {done.stderr.strip().splitlines()[-1]}")
    seconds, weights, most = json.loads(done.stdout.strip().splitlines()[-1])
    return seconds, weights, most


def written(folder: Path, device: str) -> None:
    """Random weights beside the description that is there: a file for each tensor the model asks for."""
    import torch
    from safetensors.torch import save_file

    from bloomery.artifacts.locate import locate
    from bloomery.describe import description
    from bloomery.models.checkpoint import DummySource
    from bloomery.models.decoder import Decoder
    from bloomery.models.weights import Weights

    class Recorded(DummySource):
        """What the model asks for, by name and shape."""

        def __init__(self) -> None:
            super().__init__(dtype=torch.bfloat16)
            self.asked: dict[str, tuple[int, ...]] = {}

        def tensor(self, name, shape, transposed=False, expert=None):
            self.asked[name] = tuple(reversed(shape)) if transposed else tuple(shape)
            return super().tensor(name, shape, transposed, expert)

    source = Recorded()
    artifact = locate(str(folder), weights=False)
    found = description(artifact)
    Decoder(found.model, Weights(source, found.names, torch.bfloat16, torch.device("meta")))
    index: dict[str, str] = {}
    for number, (name, shape) in enumerate(source.asked.items()):
        shard = f"model-{number:05d}.safetensors"
        made = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
        save_file({name: made.cpu()}, folder / shard)
        index[name] = shard
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", nargs="?", default="llama-8b", choices=[*SHAPES, *SMALL])
    parser.add_argument("--formats", nargs="+", default=["int8", "int4", "fp8", "nf4"])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(*args.one)
        return 0
    late = 0
    with tempfile.TemporaryDirectory(dir=args.file) as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps((SHAPES | SMALL)[args.shape]))
        load_format = "dummy"
        if args.file:
            written(folder, args.device)
            load_format = "auto"
        best: dict[str, tuple[float, float, float]] = {}
        for _ in range(args.turns):
            for form in ("auto", *args.formats):
                best[form] = min(
                    best.get(form, (float("inf"), 0.0, 0.0)),
                    timed(folder, form, load_format, args.device),
                )
        plain = best["auto"][0]
        print(f"{args.shape}, {'a checkpoint' if args.file else 'made up'}, best of {args.turns}")
        for form, (seconds, weights, most) in best.items():
            label = "plain" if form == "auto" else form
            print(
                f"{label:8}{seconds:8.2f} s{seconds / plain:8.2f} x{weights:9.2f} GiB of weights{most:9.2f} at most"
            )
            late += seconds > REACH * plain
    return late


if __name__ == "__main__":
    raise SystemExit(main())
