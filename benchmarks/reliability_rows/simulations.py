"""Rows without a server: points, simulation, engines, deterministic.

The engine runs in virtual time or beside a reference, so every fault and every batch can be tried.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import subprocess
import sys
import time
from collections import Counter

from benchmarks.reliability_rows.report import print_row, show_progress
from benchmarks.reliability_rows.servers import ROOT
from tests.simulation.fault_moments import REQUEST_STATES, fault_moments, run_scenario
from tests.simulation.simulated_engine import SimulationReport, run_simulation
from tests.simulation.test_simulation import ALL_FAULTS

NUM_PROCESSES = 2
SEEDS_PER_ROUND = 50
MAX_OUTPUT_LINES = 9


def check_points(args: argparse.Namespace) -> bool:
    """Run one scenario with every fault at every moment; see tests/simulation/fault_moments.py."""
    logging.disable(logging.CRITICAL)
    begin = time.monotonic()
    observed_states = Counter[str]()
    failures = list[str]()
    moments = list(fault_moments())
    for event, seconds in moments:
        try:
            run_scenario(event, seconds, observed_states)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
        show_progress("points", len(moments))
    print_row(
        row="points",
        scenarios=len(moments),
        failures=failures[:3],
        observed_states=dict(observed_states),
        seconds=round(time.monotonic() - begin),
    )
    return not failures and set(observed_states) == REQUEST_STATES


def check_simulation(args: argparse.Namespace) -> bool:
    """Run simulations of consecutive seeds on two cores, until they have run enough steps."""
    begin = time.monotonic()
    num_steps = 0
    first_seed = args.seed
    totals = Counter[str]()
    with multiprocessing.get_context("spawn").Pool(NUM_PROCESSES) as pool:
        while num_steps < args.steps:
            seeds = range(first_seed, first_seed + SEEDS_PER_ROUND)
            for seed, report in pool.imap(simulate_seed, seeds):
                if isinstance(report, str):
                    print_row(row="simulation", failing_seed=seed, error=report)
                    return False
                num_steps += report.steps
                totals.update(
                    engines=report.engines,
                    finished=report.finished,
                    given_up=report.given_up,
                    left=report.left,
                    late=report.late,
                    preemptions=report.preemptions,
                )
                show_progress("simulation", args.steps, report.steps)
            first_seed += SEEDS_PER_ROUND
    print_row(
        row="simulation",
        steps=num_steps,
        simulations=first_seed - args.seed,
        first_seed=args.seed,
        violations=0,
        **totals,
        seconds=round(time.monotonic() - begin),
    )
    return True


def simulate_seed(seed: int) -> tuple[int, SimulationReport | str]:
    """Run one simulation with all faults; return its seed with its report or its error."""
    logging.disable(logging.CRITICAL)
    try:
        return seed, run_simulation(seed, ALL_FAULTS)
    except Exception as error:
        return seed, f"{type(error).__name__}: {error}"


def check_engines(args: argparse.Namespace) -> bool:
    """Compare random engines with the reference.

    They use speculative decoding, chunked prefill, preemption, prefix hits and aborts.
    """
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    return run_python(*pytest, "tests/engine/test_random_engines.py", "--engines", str(args.times))


def check_deterministic(args: argparse.Namespace) -> bool:
    """Every prompt alone, batched, chunked, with prefix hits and preempted gives the same bits."""
    model = ("--model", "embedded", "--device", "cpu")
    size = ("--prompts", str(args.times), "--tokens", str(args.tokens))
    return run_python("benchmarks/deterministic.py", "check", *model, *size)


def run_python(*arguments: str) -> bool:
    """Run a Python command and print its last lines; return whether it succeeds."""
    command = [sys.executable, *arguments]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in result.stdout.strip().splitlines()[-MAX_OUTPUT_LINES:]:
        print(line, flush=True)
    return result.returncode == 0
