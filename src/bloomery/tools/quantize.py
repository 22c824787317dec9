"""The command `bloomery quantize`: its flags, and the calibration text for GPTQ.

This file imports torch only after the flags have been checked, so that errors appear at once.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping
from pathlib import Path

from bloomery.artifacts.locate import ModelArtifact, locate_model
from bloomery.config import resolve_device
from bloomery.describe import checkpoint_dtype, describe_model
from bloomery.errors import ConfigError
from bloomery.text.load import load_tokenizer

FORMATS = ("gptq", "int4", "int8", "fp8", "nf4")
# Flags that only some formats use, and their defaults.
GPTQ_DEFAULTS = {
    "calibration": None,
    "bits": 4,
    "act_order": False,
    "damping": 0.01,
    "samples": 128,
    "length": 1024,
}
GROUP_DEFAULTS = {"group": 128}
MIN_GROUP_SIZE = 16  # columns; kernels read no smaller groups
FEW_CALIBRATION_TOKENS = 16_384  # a shorter calibration text causes a warning


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command to its parser."""
    parser.add_argument(
        "model", metavar="MODEL", help="folder or Hub id of a checkpoint in full precision"
    )
    parser.add_argument(
        "out", metavar="OUT", help="folder to write; an unfinished one is continued"
    )
    parser.add_argument("--format", required=True, choices=FORMATS)
    parser.add_argument(
        "--calibration", metavar="FILE", help="gptq: text similar to the model's future prompts"
    )
    parser.add_argument("--bits", type=int, choices=(2, 3, 4, 8), help="gptq; default 4")
    parser.add_argument(
        "--group",
        type=int,
        metavar="N",
        help="gptq, int4: columns that share a scale, -1 for a whole row; default 128",
    )
    parser.add_argument(
        "--act-order",
        action="store_true",
        help="gptq: quantize columns with the largest inputs first",
    )
    parser.add_argument(
        "--damping",
        type=float,
        metavar="X",
        help="gptq: added to the Hessian's diagonal, relative to its mean; default 0.01",
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", help="gptq: calibration samples; default 128"
    )
    parser.add_argument(
        "--length", type=int, metavar="N", help="gptq: tokens of a sample; default 1024"
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1; auto: a GPU if there is one"
    )
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of a Hub model")
    parser.set_defaults(**GPTQ_DEFAULTS, **GROUP_DEFAULTS)


def run_command(args: argparse.Namespace) -> int:
    """Check the flags and the model, then quantize; returns the exit status."""
    check_flags(args)
    artifact = locate_model(args.model, args.revision)
    if artifact.kind != "folder":
        raise ConfigError(
            f"{args.model}: is quantized already; give a folder of safetensors in full precision"
        )
    quantization = describe_model(artifact).quantization
    if quantization is not None:
        raise ConfigError(
            f"{args.model}: is packed by {quantization.method} already; "
            "give a checkpoint in full precision"
        )
    samples = read_samples(args, artifact) if args.format == "gptq" else []
    return write_quantized(args, artifact, samples)


def check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that the format does not use, and for values out of range."""
    if args.format != "gptq":
        check_defaults(args, GPTQ_DEFAULTS, "gptq")
    if args.format not in ("gptq", "int4"):
        check_defaults(args, GROUP_DEFAULTS, "gptq and int4")
    if args.format == "gptq" and args.calibration is None:
        raise ConfigError(
            "gptq needs --calibration: a file with text similar to the model's future prompts"
        )
    if args.group != -1 and args.group < MIN_GROUP_SIZE:
        raise ConfigError(
            f"--group must be -1, which is a whole row, or at least {MIN_GROUP_SIZE}, "
            f"not {args.group}"
        )
    for name in ("samples", "length"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, not {getattr(args, name)}")
    if not 0 < args.damping <= 1:
        raise ConfigError(f"--damping must be above 0 and at most 1, not {args.damping}")


def check_defaults(args: argparse.Namespace, defaults: Mapping[str, object], users: str) -> None:
    """Raise ConfigError if a flag that only `users` use does not have its default value."""
    unused = [
        f"--{name.replace('_', '-')}"
        for name, default in defaults.items()
        if getattr(args, name) != default
    ]
    if unused:
        raise ConfigError(f"{', '.join(unused)}: only for {users}, not for {args.format}")


def read_samples(args: argparse.Namespace, artifact: ModelArtifact) -> list[list[int]]:
    """Read the calibration text and cut it into samples of token ids."""
    try:
        text = Path(args.calibration).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--calibration {args.calibration}: is not a UTF-8 text file: {error}"
        ) from None
    if not text.strip():
        raise ConfigError(
            f"--calibration {args.calibration}: is empty; "
            "give text similar to the model's future prompts"
        )
    token_ids = load_tokenizer(artifact).encode(text)
    length = min(args.length, describe_model(artifact).model.context)
    starts = range(0, len(token_ids), length)
    samples = [list(token_ids[start : start + length]) for start in starts][: args.samples]
    num_tokens = sum(map(len, samples))
    if num_tokens < FEW_CALIBRATION_TOKENS:
        logging.warning(
            "%s: %d tokens are few for calibration; about 100,000 are better",
            args.calibration,
            num_tokens,
        )
    return samples


def write_quantized(
    args: argparse.Namespace, artifact: ModelArtifact, samples: list[list[int]]
) -> int:
    """Quantize the checkpoint with a progress bar."""
    from safetensors import SafetensorError

    from bloomery.runtime.device import check_device
    from bloomery.runtime.progress import progress_bar
    from bloomery.tools.quantize_checkpoint import QuantizeOptions, quantize_checkpoint

    device = str(check_device(resolve_device(args.device)))
    dtype = "float32" if device == "cpu" else checkpoint_dtype(artifact)
    options = QuantizeOptions(args.format, args.bits, args.group, args.act_order, args.damping)
    num_shards = len(describe_model(artifact).model.layers) + 1
    num_written = 0
    with progress_bar("layers", num_shards, True) as advance_bar:

        def advance() -> None:
            nonlocal num_written
            num_written += 1
            advance_bar()
            if not sys.stderr.isatty():
                logging.info("%d of %d shards are written", num_written, num_shards)

        try:
            quantize_checkpoint(artifact, Path(args.out), options, samples, dtype, device, advance)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{args.out}: cannot be written: {error}; when that is fixed, the same command "
                "continues where it stopped"
            ) from None
    logging.info("%s: written; run it with: bloomery serve %s", args.out, args.out)
    return 0
