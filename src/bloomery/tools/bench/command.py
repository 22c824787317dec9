"""`bloomery bench URL`: flags, a run, its JSON, and the report."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from bloomery.config import at_least, destination
from bloomery.errors import ConfigError


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url", nargs="?", metavar="URL", help="an OpenAI- or TGI-speaking server: http://host:port"
    )
    parser.add_argument("--api", choices=("auto", "chat", "completions", "tgi"), default="auto")
    parser.add_argument("--model", metavar="NAME", help="default: the first the server lists")
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument(
        "--pattern",
        default="closed:8",
        help="closed:CLIENTS, poisson:RATE, burst:SIZE:SECONDS, chat:RATE:TURNS or a trace file (default closed:8)",
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
        help="how many in all (default 64)",
    )
    parser.add_argument(
        "--warmup",
        type=at_least(0),
        default=8,
        metavar="N",
        help="requests before the clock runs (default 8)",
    )
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="answers of full length",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    ms = at_least(0.0)
    parser.add_argument(
        "--first-token-ms", type=ms, default=1000.0, metavar="X", help="goodput: the target (1000)"
    )
    parser.add_argument(
        "--per-token-ms", type=ms, default=100.0, metavar="X", help="goodput: the target (100)"
    )
    parser.add_argument("--label", default="", help="what the run is called in the report")
    parser.add_argument("--json", type=destination, metavar="FILE", help="write the figures here")
    parser.add_argument(
        "--report", type=Path, nargs="+", metavar="JSON", help="no load: earlier runs on one page"
    )
    parser.add_argument(
        "-o", "--out", type=destination, metavar="HTML", help="write the one-page report here"
    )


def run(args: argparse.Namespace) -> int:
    from bloomery.tools.bench.report import page
    from bloomery.tools.bench.summary import table

    if args.report:
        runs = [read(path) for path in args.report]
        if not args.out:
            raise ConfigError("--report needs -o FILE.html")
    elif args.url:
        runs = [measured(args)]
        if args.json:
            args.json.write_text(json.dumps(runs[0], indent=1))
    else:
        raise ConfigError("give the URL of a server, or --report with the JSON of earlier runs")
    if args.out:
        args.out.write_text(page(runs))
    named: dict[str, dict[str, Any]] = {}
    for i, found in enumerate(runs, 1):
        name = str(found["label"] or f"run {i}")
        named[f"{name} ({i})" if name in named else name] = found
    print(table(named))
    for name, found in named.items():
        for why, count in found["errors"].items():
            print(f"{name}: {count} x {why}", file=sys.stderr)
    return 0 if all(found["answered"] == found["requests"] for found in runs) else 1


def read(path: Path) -> dict[str, Any]:
    from bloomery.tools.bench.summary import Targets, summarise

    try:
        found = json.loads(path.read_text())
        wanted = {"curves", *summarise([], Targets())}
        if not isinstance(found, dict) or not wanted <= found.keys():
            raise ValueError("not written by `bloomery bench --json`")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return {**found, "label": found.get("label") or path.stem}


def measured(args: argparse.Namespace) -> dict[str, Any]:
    import uvloop

    from bloomery.tools.bench import load
    from bloomery.tools.bench.drive import drive, target_of
    from bloomery.tools.bench.summary import Targets

    trace = Path(args.pattern)
    known = load.read(trace) if trace.suffix == ".jsonl" or trace.is_file() else None
    arrivals = known or load.pattern(
        args.pattern, args.requests, load.lengths(args.lengths), args.seed
    )
    targets = Targets(args.first_token_ms / 1e3, args.per_token_ms / 1e3)

    async def all_of_it() -> dict[str, Any]:
        url = args.url.rstrip("/").removesuffix("/v1")  # which clients of OpenAI's are used to
        target = await target_of(
            url, args.api, args.model, args.api_key, ignore_eos=args.ignore_eos
        )
        found = await drive(target, arrivals, targets, args.warmup, args.seed)
        return {
            "label": args.label,
            "url": target.url,
            "api": target.api,
            "model": target.model,
            **found,
        }

    about = {
        "pattern": args.pattern,
        "lengths": "of the trace" if known else args.lengths,
        "seed": args.seed,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    return uvloop.run(all_of_it()) | about
