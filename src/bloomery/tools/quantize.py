"""`bloomery quantize`: a checkpoint in, one of fewer bits out. Torch is imported once there is work to do."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from bloomery.artifacts.locate import Artifact, locate
from bloomery.config import device
from bloomery.describe import description, native_dtype
from bloomery.errors import ConfigError
from bloomery.text.load import load_tokenizer

FORMATS = ("gptq", "int4", "int8", "fp8", "nf4")
# What only some formats have a use for, and what it is unless told.
GPTQ = {
    "calibration": None,
    "bits": 4,
    "act_order": False,
    "damping": 0.01,
    "samples": 128,
    "length": 1024,
}
GROUPED = {"group": 128}
FINEST = 16  # columns of the smallest group that kernels read
LITTLE = 16_384  # tokens of calibration below which a word is said


def flags(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "model", metavar="MODEL", help="folder or Hub id of a checkpoint in full precision"
    )
    to.add_argument(
        "out", metavar="OUT", help="folder to write; one left unfinished is gone on with"
    )
    to.add_argument("--format", required=True, choices=FORMATS)
    to.add_argument("--calibration", metavar="FILE", help="gptq: text like that the model will see")
    to.add_argument("--bits", type=int, choices=(2, 3, 4, 8), help="gptq; default 4")
    to.add_argument(
        "--group", type=int, metavar="N", help="gptq, int4: columns a scale, -1 a row; default 128"
    )
    to.add_argument(
        "--act-order", action="store_true", help="gptq: columns with the largest inputs first"
    )
    to.add_argument("--damping", type=float, metavar="X", help="gptq; default 0.01")
    to.add_argument(
        "--samples", type=int, metavar="N", help="gptq: pieces of the text; default 128"
    )
    to.add_argument("--length", type=int, metavar="N", help="gptq: tokens of a piece; default 1024")
    to.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1; auto: a GPU if there is one"
    )
    to.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of a Hub model")
    to.set_defaults(**GPTQ, **GROUPED)


def run(args: argparse.Namespace) -> int:
    check(args)
    artifact = locate(args.model, args.revision)
    if artifact.kind != "folder":
        raise ConfigError(
            f"{args.model}: is packed already; quantize takes a folder of safetensors in full precision"
        )
    found = description(artifact)
    if found.quantization is not None:
        raise ConfigError(
            f"{args.model}: is packed by {found.quantization.method} already; take it in full precision"
        )
    return _run(args, artifact, calibration(args, artifact) if args.format == "gptq" else [])


def check(args: argparse.Namespace) -> None:
    for formats, options in ((("gptq",), GPTQ), (("gptq", "int4"), GROUPED)):
        unused = [
            f"--{name.replace('_', '-')}"
            for name, usual in options.items()
            if getattr(args, name) != usual
        ]
        if unused and args.format not in formats:
            raise ConfigError(
                f"{', '.join(unused)}: for {' and '.join(formats)}; {args.format} has no such choice"
            )
    if args.format == "gptq" and args.calibration is None:
        raise ConfigError("gptq needs --calibration: a file with text like that the model will see")
    if args.group != -1 and args.group < FINEST:
        raise ConfigError(
            f"--group must be -1, which is a whole row, or at least {FINEST}, not {args.group}"
        )
    for name in ("samples", "length"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, not {getattr(args, name)}")
    if not 0 < args.damping <= 1:
        raise ConfigError(f"--damping must be above 0 and at most 1, not {args.damping}")


def calibration(args: argparse.Namespace, artifact: Artifact) -> list[list[int]]:
    """Pieces of the text, as token ids."""
    try:
        text = Path(args.calibration).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--calibration {args.calibration}: is not a file of text in UTF-8: {error}"
        ) from None
    if not text.strip():
        raise ConfigError(
            f"--calibration {args.calibration}: is empty; give text like that the model will see"
        )
    ids = load_tokenizer(artifact).encode(text)
    length = min(args.length, description(artifact).model.context)
    samples = [list(ids[at : at + length]) for at in range(0, len(ids), length)][: args.samples]
    if (count := sum(map(len, samples))) < LITTLE:
        logging.warning(
            "%s: %d tokens are little to calibrate with; some 100,000 are better",
            args.calibration,
            count,
        )
    return samples


def _run(args: argparse.Namespace, artifact: Artifact, samples: list[list[int]]) -> int:
    from safetensors import SafetensorError

    from bloomery.tools.quantize_checkpoint import Wish, convert
    from bloomery.runtime.device import check as exists
    from bloomery.runtime.progress import bar

    where = str(exists(device(args.device)))
    dtype = "float32" if where == "cpu" else native_dtype(artifact)
    wish = Wish(args.format, args.bits, args.group, args.act_order, args.damping)
    done = 0
    count = len(description(artifact).model.layers) + 1

    with bar("layers", count, True) as draw:

        def advance() -> None:
            nonlocal done
            done += 1
            draw()
            if not sys.stderr.isatty():
                logging.info("%d of %d shards are written", done, count)

        try:
            convert(artifact, Path(args.out), wish, samples, dtype, where, advance)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{args.out}: cannot be written: {error}; with that mended, the same command goes on where it stopped"
            ) from None
    logging.info("%s: written; run it with: bloomery serve %s", args.out, args.out)
    return 0
