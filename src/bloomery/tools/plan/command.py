"""The flags of `bloomery plan`. Imports little, so that `bloomery --help` is quick."""

from __future__ import annotations

import argparse
from pathlib import Path

from bloomery.config import at_least, output_file
from bloomery.hardware import HARDWARE_SPECS
from bloomery.roofline import PRECISIONS


def add_flags(parser: argparse.ArgumentParser) -> None:
    count = at_least(1)
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
        help=f"hardware to plan for; default: this machine; known: {', '.join(HARDWARE_SPECS)}",
    )
    parser.add_argument(
        "--precision",
        "--quantization",
        choices=PRECISIONS,
        help="precision of the weights; default: as stored",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("bf16", "fp8", "int8", "fp32"),
        help="precision of the KV cache; default: bf16, on a CPU fp32 unless weights have "
        "fewer than 16 bits",
    )
    parser.add_argument(
        "--context",
        type=count,
        default=1024,
        metavar="N",
        help="tokens of a sequence (default 1024)",
    )
    parser.add_argument("--goal", choices=("latency", "throughput"), default="latency")
    parser.add_argument(
        "--devices",
        type=count,
        metavar="N",
        help="number of devices; default: the fewest that hold the model",
    )
    parser.add_argument(
        "--tp",
        "--tensor-parallel-size",
        dest="tensor_parallel_size",
        type=count,
        metavar="N",
        help="tensor parallel ranks; default: what is best for the goal",
    )
    parser.add_argument(
        "--pp",
        "--pipeline-parallel-size",
        dest="pipeline_parallel_size",
        type=count,
        metavar="N",
        help="pipeline stages; default: what is best for the goal",
    )
    parser.add_argument("--replicas", type=count, metavar="N")
    parser.add_argument(
        "--enable-lora", action="store_true", help="count the memory and the reads of LoRA adapters"
    )
    for flag, meaning in (
        ("--max-loras", "adapters on each device (default 8)"),
        ("--max-lora-rank", "largest rank of an adapter (default 16)"),
        ("--max-cpu-loras", "adapters in host memory (default 64, at least max_loras)"),
    ):
        parser.add_argument(flag, type=count, metavar="N", help=f"with --enable-lora: {meaning}")
    parser.add_argument(
        "--price",
        type=at_least(0.0),
        metavar="X",
        help="price of one device for an hour, to compute the cost of a million tokens",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--plot",
        type=output_file,
        metavar="FILE",
        help="write a plot of latency over throughput, as .svg or .png",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="first measure this machine, which takes seconds, and save the rates",
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


def run_command(args: argparse.Namespace) -> int:
    from bloomery.tools.plan.planner import run_plan

    return run_plan(args)
