"""The `bloomery bench` command: its flags, a run, its JSON, and the report."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from bloomery.config import at_least, output_file
from bloomery.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    milliseconds = at_least(0.0)
    parser.add_argument(
        "url",
        nargs="?",
        metavar="URL",
        help="an OpenAI- or TGI-compatible server: http://host:port",
    )
    parser.add_argument("--api", choices=("auto", "chat", "completions", "tgi"), default="auto")
    parser.add_argument("--model", metavar="NAME", help="default: the first the server lists")
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument(
        "--pattern",
        default="closed:8",
        help="closed:CLIENTS, poisson:RATE, burst:SIZE:SECONDS, chat:RATE:TURNS or a trace file "
        "(default closed:8)",
    )
    parser.add_argument(
        "--lengths",
        default="128:64",
        help="IN:OUT in tokens, ranges as 100-1024:64, or sharegpt (default 128:64)",
    )
    parser.add_argument(
        "-n",
        "--requests",
        type=at_least(1),
        default=64,
        metavar="N",
        help="number of requests (default 64)",
    )
    parser.add_argument(
        "--warmup",
        type=at_least(0),
        default=8,
        metavar="N",
        help="requests before the measurement (default 8)",
    )
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="generate outputs of full length",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--ttft-ms",
        type=milliseconds,
        default=1000.0,
        metavar="X",
        help="goodput: target for the time to first token (1000)",
    )
    parser.add_argument(
        "--tpot-ms",
        type=milliseconds,
        default=100.0,
        metavar="X",
        help="goodput: target for the time per output token (100)",
    )
    parser.add_argument("--label", default="", help="name of the run in the report")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures here")
    parser.add_argument(
        "--report",
        type=Path,
        nargs="+",
        metavar="JSON",
        help="send no load, but put earlier runs on one page",
    )
    parser.add_argument(
        "-o", "--out", type=output_file, metavar="HTML", help="write the one-page report here"
    )


def run_command(args: argparse.Namespace) -> int:
    from bloomery.tools.bench.report import render_page
    from bloomery.tools.bench.summary import format_table

    if args.report:
        runs = [read_run(path) for path in args.report]
        if not args.out:
            raise ConfigError("--report needs -o FILE.html")
    elif args.url:
        runs = [measure_run(args)]
        if args.json:
            args.json.write_text(json.dumps(runs[0], indent=1))
    else:
        raise ConfigError("give the URL of a server, or --report with the JSON of earlier runs")
    if args.out:
        args.out.write_text(render_page(runs))
    runs_by_name = name_runs(runs)
    print(format_table(runs_by_name))
    for name, run in runs_by_name.items():
        for reason, count in run["errors"].items():
            print(f"{name}: {count} x {reason}", file=sys.stderr)
    all_answered = all(run["answered"] == run["requests"] for run in runs)
    return 0 if all_answered else 1


def name_runs(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Runs by label; a label that occurs twice gets a number."""
    runs_by_name: dict[str, dict[str, Any]] = {}
    for i, run in enumerate(runs, 1):
        name = str(run["label"] or f"run {i}")
        if name in runs_by_name:
            name = f"{name} ({i})"
        runs_by_name[name] = run
    return runs_by_name


def read_run(path: Path) -> dict[str, Any]:
    """Read what an earlier `bloomery bench --json` wrote."""
    from bloomery.tools.bench.summary import GoodputTargets, summarize_records

    needed_keys = {"curves", *summarize_records([], GoodputTargets())}
    try:
        run = json.loads(path.read_text())
        if not isinstance(run, dict) or not needed_keys <= run.keys():
            raise ValueError("not written by `bloomery bench --json`")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return {**run, "label": run.get("label") or path.stem}


def measure_run(args: argparse.Namespace) -> dict[str, Any]:
    """Put load on the server and return all figures and conditions of the run."""
    import uvloop

    from bloomery.tools.bench import workload
    from bloomery.tools.bench.load_generator import detect_target, run_load
    from bloomery.tools.bench.summary import GoodputTargets

    trace = Path(args.pattern)
    if trace.suffix == ".jsonl" or trace.is_file():
        arrivals = workload.read_trace(trace)
        lengths = "of the trace"
    else:
        sample_lengths = workload.parse_lengths(args.lengths)
        arrivals = workload.generate_arrivals(
            args.pattern, args.requests, sample_lengths, args.seed
        )
        lengths = args.lengths
    targets = GoodputTargets(args.ttft_ms / 1e3, args.tpot_ms / 1e3)
    url = args.url.rstrip("/").removesuffix("/v1")  # OpenAI clients are given URLs with /v1

    async def detect_and_run() -> dict[str, Any]:
        target = await detect_target(
            url, args.api, args.model, args.api_key, ignore_eos=args.ignore_eos
        )
        summary = await run_load(target, arrivals, targets, args.warmup, args.seed)
        return {
            "label": args.label,
            "url": target.url,
            "api": target.api,
            "model": target.model,
            **summary,
        }

    conditions = {
        "pattern": args.pattern,
        "lengths": lengths,
        "seed": args.seed,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    return uvloop.run(detect_and_run()) | conditions
