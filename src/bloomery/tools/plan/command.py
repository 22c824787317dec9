"""The flags of `bloomery plan`; light, so that `bloomery --help` is quick."""

from __future__ import annotations

import argparse
from pathlib import Path

from bloomery.config import at_least, destination
from bloomery.roofline import MACHINES, PRECISIONS


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="folder, .gguf, Hub id or config.json; default: the embedded model",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a Hub model")
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"a machine of the table instead of this one: {', '.join(MACHINES)}",
    )
    parser.add_argument(
        "--precision", "--quantize", choices=PRECISIONS, help="of the weights; default: as stored"
    )
    parser.add_argument(
        "--kv",
        "--kv-dtype",
        choices=("bf16", "fp8", "int8", "fp32"),
        help="precision of keys and values; default: bf16, on a CPU fp32 unless weights have fewer bits than 16",
    )
    parser.add_argument(
        "--context",
        type=at_least(1),
        default=1024,
        metavar="N",
        help="tokens of a sequence (default 1024)",
    )
    parser.add_argument("--goal", choices=("latency", "throughput"), default="latency")
    count = at_least(1)
    parser.add_argument(
        "--devices",
        type=count,
        metavar="N",
        help="how many there are; default: the fewest that hold it",
    )
    parser.add_argument(
        "--tp", type=count, metavar="N", help="tensor parallel; default: as the goal advises"
    )
    parser.add_argument("--pp", type=count, metavar="N", help="pipeline parallel")
    parser.add_argument("--replicas", type=count, metavar="N")
    parser.add_argument(
        "--price",
        type=at_least(0.0),
        metavar="X",
        help="of one device for an hour, for the cost of a million tokens",
    )
    parser.add_argument("--json", action="store_true", help="everything, for a program")
    parser.add_argument(
        "--plot",
        type=destination,
        metavar="FILE",
        help="latency against throughput, as .svg or .png",
    )
    parser.add_argument(
        "--measure", action="store_true", help="measure this machine in seconds, and remember it"
    )
    parser.add_argument(
        "--simulate",
        type=Path,
        metavar="TRACE",
        help="run a trace of arrivals (JSONL) in virtual time",
    )
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="measured steps (JSONL) for --simulate"
    )


def run(args: argparse.Namespace) -> int:
    from bloomery.tools.plan.answer import answer

    return answer(args)
