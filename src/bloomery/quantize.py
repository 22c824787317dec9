"""`bloomery quantize`: a checkpoint in, one of fewer bits out. Torch is imported once there is work to do."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from bloomery.artifacts.locate import Artifact, locate
from bloomery.config import device
from bloomery.describe import description, native_dtype
from bloomery.errors import ConfigError
from bloomery.text.load import load_tokenizer

FORMATS = ("gptq", "int4", "int8", "fp8", "nf4")


def flags(to: argparse.ArgumentParser) -> None:
    to.add_argument("model", metavar="MODEL", help="folder or Hub id of a checkpoint in full precision")
    to.add_argument("out", metavar="OUT", help="folder to write; one left unfinished is gone on with")
    to.add_argument("--format", required=True, choices=FORMATS)
    to.add_argument("--calibration", metavar="FILE", help="gptq: text like that the model will see")
    to.add_argument("--bits", type=int, default=4, choices=(2, 3, 4, 8), help="gptq; default 4")
    to.add_argument("--group", type=int, default=128, metavar="N", help="gptq, int4: columns a scale; default 128")
    to.add_argument("--act-order", action="store_true", help="gptq: columns with the largest inputs first")
    to.add_argument("--damping", type=float, default=0.01, metavar="X", help="gptq; default 0.01")
    to.add_argument("--samples", type=int, default=128, metavar="N", help="gptq: pieces of the text; default 128")
    to.add_argument("--length", type=int, default=1024, metavar="N", help="gptq: tokens of a piece; default 1024")
    to.add_argument("--device", default="auto", help="cpu, cuda, cuda:1; auto: a GPU if there is one")
    to.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of a Hub model")


def run(args: argparse.Namespace) -> int:
    artifact = locate(args.model, args.revision)
    if artifact.kind != "folder":
        raise ConfigError(f"{args.model}: is packed already; quantize takes a folder of safetensors in full precision")
    found = description(artifact)
    if found.quantization is not None:
        raise ConfigError(f"{args.model}: is packed by {found.quantization.method} already; take it in full precision")
    samples: list[list[int]] = []
    if args.format == "gptq":
        if args.calibration is None:
            raise ConfigError("gptq needs --calibration: a file with text like that the model will see")
        ids = load_tokenizer(artifact).encode(Path(args.calibration).read_text())
        length = min(args.length, found.model.context)
        samples = [list(ids[at : at + length]) for at in range(0, len(ids), length)][: args.samples]
        if len(ids) < length:
            logging.warning(
                "%s: %d tokens are little to calibrate with; some 100,000 are better", args.calibration, len(ids)
            )
    return _run(args, artifact, samples)


def _run(args: argparse.Namespace, artifact: Artifact, samples: list[list[int]]) -> int:
    from bloomery.models.convert import Wish, convert
    from bloomery.runtime.progress import bar

    where = device(args.device)
    dtype = "float32" if where == "cpu" else native_dtype(artifact)
    wish = Wish(args.format, args.bits, args.group, args.act_order, args.damping)
    with bar("layers", len(description(artifact).model.layers) + 1, True) as advance:
        convert(artifact, Path(args.out), wish, samples, dtype, where, advance)
    logging.info("%s: written; run it with: bloomery serve %s", args.out, args.out)
    return 0
