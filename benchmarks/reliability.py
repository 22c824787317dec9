"""Promises about faults, overload and hostile input, each as a command.

    PYTHONPATH=src:. python benchmarks/reliability.py ROW                  at its full length
    PYTHONPATH=src:. python benchmarks/reliability.py kills --times 10     or a shorter one
    PYTHONPATH=src:. python benchmarks/reliability.py all [--rows a,b,c]   one after another

Each row prints what was tried and what came out. The exit status is 1 if a promise of
docs/reliability.md is broken. The server is the real one with two processes. Its model is a fake,
except in rows that compare text. The client runs on the same cores.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.reliability_rows.crashes import (
    check_faults,
    check_kills,
    check_poison,
    check_seeds,
    check_storm,
    check_text,
)
from benchmarks.reliability_rows.exposure import check_exposure, check_secrecy
from benchmarks.reliability_rows.hostile_input import check_bad, check_files, check_invalid
from benchmarks.reliability_rows.overload import (
    check_descriptors,
    check_fairness,
    check_idlers,
    check_isolation,
    check_memory,
    check_overload,
    check_streams,
)
from benchmarks.reliability_rows.simulations import (
    check_deterministic,
    check_engines,
    check_points,
    check_simulation,
)

MAX_ROW_SECONDS = 7200

# The function of each row, and the arguments of its full length.
ROWS: dict[str, tuple[Callable[[argparse.Namespace], bool], dict[str, Any]]] = {
    "kills": (check_kills, {"times": 100, "streams": 32}),
    "text": (check_text, {"times": 20, "streams": 32, "tokens": 40}),
    "faults": (check_faults, {"times": 20}),
    "poison": (check_poison, {}),
    "streams": (check_streams, {"streams": 1000, "seconds": 300.0}),
    "overload": (check_overload, {"streams": 5000, "admitted": 1000, "seconds": 30.0}),
    "fairness": (check_fairness, {"seconds": 60.0}),
    "secrecy": (check_secrecy, {"times": 50}),
    "idlers": (check_idlers, {"seconds": 60.0}),
    "isolation": (check_isolation, {"seconds": 60.0}),
    "descriptors": (check_descriptors, {}),
    "bad": (check_bad, {}),
    "invalid": (check_invalid, {"times": 100_000}),
    "memory": (check_memory, {"times": 10_000}),
    "storm": (check_storm, {"times": 20}),
    "seeds": (check_seeds, {"times": 20}),
    "exposure": (check_exposure, {}),
    "files": (check_files, {"times": 10_000}),
    "points": (check_points, {}),
    "simulation": (check_simulation, {"steps": 1_000_000}),
    "engines": (check_engines, {"times": 12_000}),
    "deterministic": (check_deterministic, {"times": 500, "tokens": 16}),
}


def run_rows(names: list[str]) -> bool:
    """Run rows one after another, each in its own process, and print one line for each."""
    num_failed = 0
    for name in names:
        begin = time.monotonic()
        passed, output = run_row_process(name)
        num_failed += not passed
        verdict = describe_result(passed)
        seconds = time.monotonic() - begin
        print(f"{name:14}{verdict:8}{seconds:6.0f} s  {' '.join(output)}", flush=True)
    print(f"{len(names) - num_failed} of {len(names)} rows kept", flush=True)
    return num_failed == 0


def run_row_process(name: str) -> tuple[bool, list[str]]:
    """Run one row in its own process; return whether it passed, and the lines of its figures."""
    command = [sys.executable, __file__, name]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=MAX_ROW_SECONDS)
    except subprocess.TimeoutExpired:
        return False, [f"did not end within {MAX_ROW_SECONDS} s"]
    figures = result.stdout.splitlines()[:-1]
    last_error = result.stderr.splitlines()[-1:]
    return result.returncode == 0, figures or last_error


def describe_result(passed: bool) -> str:
    return "kept" if passed else "broken"


def parse_arguments() -> argparse.Namespace:
    """Parse the command line; lengths that are not given are those of the full row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("row", choices=[*ROWS, "all"])
    parser.add_argument("--rows", default=",".join(ROWS), help="the rows of `all`, in this order")
    parser.add_argument("--times", type=int, help="repetitions")
    parser.add_argument("--streams", type=int, help="streams at once; requests offered (overload)")
    parser.add_argument("--admitted", type=int, help="requests that the server admits (overload)")
    parser.add_argument("--seconds", type=float, help="seconds of load")
    parser.add_argument("--tokens", type=int, help="tokens per answer")
    parser.add_argument("--steps", type=int, help="steps of simulated engines")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    unknown = set(args.rows.split(",")) - set(ROWS)
    if unknown:
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}; known: {', '.join(ROWS)}")
    if args.row != "all":
        _, full_length = ROWS[args.row]
        for name, value in full_length.items():
            if getattr(args, name) is None:
                setattr(args, name, value)
    return args


def main() -> int:
    args = parse_arguments()
    if args.row == "all":
        passed = run_rows(args.rows.split(","))
    else:
        check_row, _ = ROWS[args.row]
        random.seed(args.seed)
        passed = check_row(args)
        print(describe_result(passed), flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
