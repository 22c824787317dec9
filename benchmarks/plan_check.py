"""Compare what `bloomery plan` expects with measured step times.

    export PYTHONPATH=src:.
    python benchmarks/plan_check.py                   # every H200 row of LOG.md
    python benchmarks/plan_check.py rows.jsonl        # rows that benchmarks/offline.py printed
    python benchmarks/plan_check.py --fit             # fit the constants of StepCalibration: the
                                                      # general ones to bf16 rows, then those of
                                                      # packed weights to all other rows
    python benchmarks/plan_check.py --here [MODEL]    # measure this machine and a model on it
    python benchmarks/plan_check.py --bloom           # BLOOM-176B against the published 45 ms

A row's requests go through the simulator (with the real scheduler, prefill included), and its time
divided by the output length is compared. Expected times should be within 15 % on the H200 and
within 25 % on a CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import log
from pathlib import Path

from bloomery.hardware import (
    StepCalibration,
    detect_hardware,
    find_hardware,
    with_measured_rates,
)
from bloomery.roofline import PRECISIONS, StepWork
from bloomery.tools.plan.estimate import DeviceLayout, PlacedModel
from bloomery.tools.plan.model_source import read_model_source
from tests.tools.plan.measured_steps import (
    MeasuredRow,
    compare_row,
    place_shape,
    read_log_rows,
)

# Names that --quantization and the plan do not share.
PLAN_PRECISIONS = {"auto": "bf16", "w8a8": "int8"}
# A field of StepCalibration, or an entry of its packed_efficiency: format and index.
Constant = str | tuple[str, int]
GENERAL_CONSTANTS: tuple[Constant, ...] = (
    "memory_efficiency",
    "compute_efficiency",
    "kernel_gap_seconds",
    "step_overhead_seconds",
    "sequence_seconds_per_layer",
)
TRIALS_PER_CONSTANT = 40
PUBLISHED_BLOOM_MS = 45  # per token on eight A100 of 80 GB


def read_offline_rows(path: Path) -> Iterator[MeasuredRow]:
    """Read rows that benchmarks/offline.py printed. Prints those whose format is unknown."""
    for line in path.read_text().splitlines():
        row = json.loads(line) if line.startswith("{") else {}
        # One prompt is a fixed batch of one with one output token.
        workload = re.sub(r"^prefill:(\d+)$", r"fixed:1:\1:1", str(row.get("work", "")))
        if "ms_step" not in row or not workload.startswith("fixed"):
            continue
        quantization = str(row.get("quantization", "auto"))
        precision = PLAN_PRECISIONS.get(quantization, quantization)
        if precision in PRECISIONS:
            yield MeasuredRow(row["shape"], workload, row["ms_step"], precision)
        else:
            print(f"left out: {row['shape']} {workload} in {quantization}: no such precision")


def print_comparison(
    rows: Sequence[MeasuredRow], hardware_name: str, calibration: StepCalibration | None = None
) -> None:
    print(
        f"{'shape':12}{'work':18}{'in':6}{'measured':>10}{'expected':>10}{'off':>8}{'floor':>9}"
        f"{'share':>7}"
    )
    worst = 0.0
    for row in rows:
        comparison = compare_row(row, hardware_name, calibration)
        worst = max(worst, abs(comparison.relative_error))
        print(
            f"{row.shape:12}{row.workload:18}{row.precision:6}{row.ms_per_step:>10.3f}"
            f"{comparison.expected:>10.3f}{comparison.relative_error:>+8.1%}"
            f"{comparison.floor:>9.3f}{comparison.floor / row.ms_per_step:>7.0%}"
        )
    print(f"worst: {worst:.1%}")


# ---- fitting -------------------------------------------------------------------------------------


def fit_and_print(rows: Sequence[MeasuredRow], hardware_name: str) -> None:
    """Fit the general constants to bf16 rows, then those of packed weights to the others."""
    calibration = find_hardware(hardware_name).calibration
    bf16_rows = [row for row in rows if row.precision == "bf16"]
    quantized_rows = [row for row in rows if row.precision != "bf16"]
    if bf16_rows:
        calibration = fit_constants(bf16_rows, hardware_name, calibration, GENERAL_CONSTANTS)
    if quantized_rows:
        formats = sorted({PRECISIONS[row.precision].compute_format for row in quantized_rows})
        constants: list[Constant] = ["fused_unpack_efficiency"]
        constants += [(name, index) for name in formats for index in (0, 1)]
        calibration = fit_constants(quantized_rows, hardware_name, calibration, constants)
    print(calibration)
    print_comparison(rows, hardware_name, calibration)


def scale_constant(
    calibration: StepCalibration, constant: Constant, factor: float
) -> StepCalibration:
    """Multiply one constant, which stays at most 1."""
    if isinstance(constant, str):
        value = min(getattr(calibration, constant) * factor, 1.0)
        return replace(calibration, **{constant: value})
    name, index = constant
    pair = list(calibration.packed_efficiency[name])
    pair[index] = min(pair[index] * factor, 1.0)
    packed = {**calibration.packed_efficiency, name: (pair[0], pair[1])}
    return replace(calibration, packed_efficiency=packed)


def fit_constants(
    rows: Sequence[MeasuredRow],
    hardware_name: str,
    calibration: StepCalibration,
    constants: Sequence[Constant],
) -> StepCalibration:
    """A random walk over the constants that minimizes squared log errors."""

    def loss(candidate: StepCalibration) -> float:
        comparisons = [compare_row(row, hardware_name, candidate) for row in rows]
        return sum(log(1 + comparison.relative_error) ** 2 for comparison in comparisons)

    rng = random.Random(0)
    best = calibration
    best_loss = loss(best)
    for trial in range(TRIALS_PER_CONSTANT * len(constants)):
        spread = 0.15 * 0.985**trial
        candidate = best
        for constant in constants:
            candidate = scale_constant(candidate, constant, 1 + rng.gauss(0, spread))
        candidate_loss = loss(candidate)
        if candidate_loss < best_loss:
            best = candidate
            best_loss = candidate_loss
    return best


# ---- other checks --------------------------------------------------------------------------------


def print_bloom() -> None:
    print(
        "BLOOM-176B in bf16, batch 1, TP 8; published: "
        f"{PUBLISHED_BLOOM_MS} ms on eight A100 of 80 GB\n"
    )
    print(
        f"{'':14}{'floor ms':>10}{'messages':>10}{'their ms':>10}{'expected ms':>13}"
        f"{'of ' + str(PUBLISHED_BLOOM_MS) + ' ms':>10}"
    )
    model = place_shape("bloom-176b", "h200", "bf16").model
    for name in ("a100-80", "h200"):
        layout = DeviceLayout(tp=8)
        placed = PlacedModel(model, find_hardware(name), PRECISIONS["bf16"], 16, layout)
        floor = placed.roofline.step_floor(1, 1, 1)
        expected_ms = placed.decode_seconds(1, 1) * 1e3
        messages_ms = floor.communication * 1e3
        print(
            f"8 x {name:10}{floor.ms:>10.1f}{floor.messages:>10}{messages_ms:>10.2f}"
            f"{expected_ms:>13.1f}{expected_ms / PUBLISHED_BLOOM_MS:>10.0%}"
        )


def check_this_machine(
    model: str | None, threads: int, by_cpu_time: bool, rounds: int, batches: Sequence[int]
) -> None:
    """Measure this machine and a model on it in alternation, and compare with the plan.

    The plan uses only the measurement of the machine.
    """
    from bloomery import LLM
    from bloomery.runtime.device_measurement import PAUSE_SECONDS, ProbeRunner, build_probes
    from bloomery.tools.profile import measure_steps

    clock: Callable[[], float] = time.perf_counter
    if by_cpu_time:

        def clock() -> float:
            return time.process_time() / threads

    llm = LLM(
        model,
        threads=threads,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        max_model_len=1024,
    )
    step_seconds = defaultdict[StepWork, list[float]](list)
    probe_runner = ProbeRunner(build_probes("cpu", threads), threads, by_cpu_time)
    for _ in range(rounds):
        for step in measure_steps(llm.loop, llm.capacity, (16, 64, 256), batches, clock):
            work = StepWork(*(int(step[name]) for name in StepWork._fields))
            step_seconds[work].append(step["seconds"])
            probe_runner.run_round()
            time.sleep(PAUSE_SECONDS)  # until the threads are parked
    llm.close()
    measurement = probe_runner.summarize()
    source = read_model_source(model)
    hardware = detect_hardware("cpu")
    rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in measurement.rates.items())
    print(
        f"{source.name}, {hardware.title}, {threads} threads: "
        f"reads {measurement.bandwidth / 1e9:.1f} GB/s, GFLOP/s: {rates}"
    )
    if measurement.warning:
        print(f"warning: {measurement.warning}")
    hardware = with_measured_rates(
        hardware, {"bandwidth": measurement.bandwidth, "rates": measurement.rates}
    )
    precision = source.loaded_precision(cpu=True)
    placed = PlacedModel(source.model, hardware, precision, 16, DeviceLayout())
    print_steps(placed, step_seconds)


def print_steps(placed: PlacedModel, step_seconds: dict[StepWork, list[float]]) -> None:
    print(
        f"{'tokens':>8}{'attended':>10}{'measured':>10}{'expected':>10}{'off':>8}{'floor':>9}"
        f"{'share':>7}"
    )
    worst = 0.0
    for work, times in step_seconds.items():
        floor = placed.roofline.floor_seconds(*work) * 1e3
        expected = placed.roofline.expected_seconds(*work) * 1e3
        # The lower quartile, as the measurement of the machine uses it.
        seconds = min(times) if len(times) < 4 else statistics.quantiles(times, n=4)[0]
        ms = seconds * 1e3
        relative_error = expected / ms - 1
        worst = max(worst, abs(relative_error))
        print(
            f"{work.tokens:>8}{work.attended:>10}{ms:>10.2f}{expected:>10.2f}"
            f"{relative_error:>+8.1%}{floor:>9.2f}{floor / ms:>7.0%}"
        )
    print(f"worst: {worst:.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "rows",
        type=Path,
        nargs="?",
        help="output of benchmarks/offline.py; default: the tables of LOG.md",
    )
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--precision", choices=PRECISIONS, help="only rows in this precision")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--bloom", action="store_true")
    parser.add_argument(
        "--here", metavar="MODEL", nargs="*", help="models on this machine; none: the embedded one"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="+", default=(1, 2, 8, 64), help="batch sizes")
    parser.add_argument("--rounds", type=int, default=3, help="how often every step is measured")
    parser.add_argument(
        "--cpu-time", action="store_true", help="use CPU time, for machines that are never idle"
    )
    args = parser.parse_args()
    if args.bloom:
        print_bloom()
        return
    if args.here is not None:
        for model in args.here or (None,):
            check_this_machine(model, args.threads, args.cpu_time, args.rounds, args.batch)
        return
    rows = list(read_offline_rows(args.rows) if args.rows else read_log_rows())
    if args.precision:
        rows = [row for row in rows if row.precision == args.precision]
    if args.fit:
        fit_and_print(rows, args.gpu)
    else:
        print_comparison(rows, args.gpu)


if __name__ == "__main__":
    main()
