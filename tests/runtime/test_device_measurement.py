"""Device measurement: a busy machine is reported, and every rate that a plan needs is measured."""

from __future__ import annotations

import time

from bloomery.hardware import FEW_ROWS, SINGLE_ROW, WIDER_FORMATS, find_hardware
from bloomery.native.build import NativeBuildError
from bloomery.native.thread_pool import ThreadPool
from bloomery.runtime.device_measurement import (
    MATRIX_COLUMNS,
    MIN_RUN_SECONDS,
    ProbeRunner,
    WorkProbe,
    build_probes,
)


def short_work() -> int:
    return sum(range(20_000))


def runner_with_times(seconds: list[float]) -> ProbeRunner:
    """Return a runner with these measured times of one kind of work."""
    runner = ProbeRunner({"bandwidth": WorkProbe(100.0, short_work)}, 1)
    runner.probes["bandwidth"].seconds = seconds
    return runner


def test_the_fastest_quarter_of_the_runs_counts() -> None:
    seconds = [1.0, 1.02, 1.0, 1.01, 1.0, 1.0, 9.0, 9.0]
    measurement = runner_with_times(seconds).summarize()
    assert measurement.warning is None
    assert measurement.bandwidth == 100
    assert measurement.rates["fp32" + SINGLE_ROW] == 50


def test_slow_median_runs_cause_a_warning() -> None:
    measurement = runner_with_times([1.0, 1.0, 2.0, 2.2, 2.1, 3.0, 2.0]).summarize()
    assert measurement.bandwidth == 100
    assert "bandwidth by 100%" in (measurement.warning or "")


def test_short_work_is_repeated_until_it_can_be_timed() -> None:
    runs = []
    probe = WorkProbe(1.0, lambda: runs.append(short_work()))
    runner = ProbeRunner({"bandwidth": probe}, 1, by_cpu_time=True)
    num_before = len(runs)
    runner.run_round()
    assert len(runs) - num_before == probe.repeats + 1
    assert len(probe.seconds) == 1
    long_probe = WorkProbe(1.0, lambda: time.sleep(2 * MIN_RUN_SECONDS))
    ProbeRunner({"bandwidth": long_probe}, 0)
    assert long_probe.repeats == 1


def test_every_rate_of_a_cpu_is_measured() -> None:
    """The rates in the table of CPUs, and of each wider format that a plan may fall back to."""
    probes = build_probes("cpu", 1, values=64 * MATRIX_COLUMNS)
    runner = ProbeRunner(probes, 1, by_cpu_time=True)
    for _ in range(3):
        runner.run_round()
    measurement = runner.summarize()
    assert measurement.bandwidth > 0
    assert all(rate > 0 for rate in measurement.rates.values())
    if cpu_kernels_can_be_built():
        cpu = find_hardware("zen3-2")
        assert measurement.rates.keys() == cpu.rates.keys()
        kernels = ("", SINGLE_ROW)
        assert all(cpu.rate(name, kernel) for name in WIDER_FORMATS for kernel in kernels)
        assert "fp32" + FEW_ROWS in measurement.rates


def cpu_kernels_can_be_built() -> bool:
    try:
        ThreadPool(1).close()
    except NativeBuildError:
        return False
    return True
