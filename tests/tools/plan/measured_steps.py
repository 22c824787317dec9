"""An oracle for `bloomery plan`: measured step times of benchmarks/LOG.md against expected ones.

Each measured row's requests go through the simulator (with the real scheduler, prefill included),
and its time divided by the output length is compared. benchmarks/plan_check.py prints the same
comparison for other sources of rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bloomery.config import EngineConfig
from bloomery.hardware import StepCalibration, find_hardware
from bloomery.roofline import PRECISIONS, Roofline
from bloomery.tools.bench.workload import RequestArrival
from bloomery.tools.plan.estimate import DeviceLayout, PlacedModel
from bloomery.tools.plan.model_source import read_model_source
from bloomery.tools.simulate import SimulatedFleet

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SHAPES = BENCHMARKS / "shapes"
LOG = BENCHMARKS / "LOG.md"

# Models as the log calls them, and their files.
MODEL_SHAPES = {
    "Llama-8B": "llama-8b",
    "Llama-1B": "llama-1b",
    "OctoCoder": "octocoder",
    "BLOOM-7B1": "bloom-7b",
}
# Titles of table columns that hold our own times, and the precision of each.
COLUMN_PRECISIONS = {"ours": "bf16", "now": "bf16", **{name: name for name in PRECISIONS}}
WORKLOAD = r"(\d+) : (\d+) : (\d+)"  # batch, prompt tokens, output tokens
SENTENCE = re.compile(
    rf"({'|'.join(MODEL_SHAPES)}), ({'|'.join(PRECISIONS)}), {WORKLOAD}: (\d+\.\d+) ms"
)


class MeasuredRow(NamedTuple):
    """One measured run."""

    shape: str
    workload: str  # fixed:BATCH:PROMPT:OUTPUT
    ms_per_step: float
    precision: str


class RowComparison(NamedTuple):
    """Milliseconds per step of one run."""

    row: MeasuredRow
    expected: float
    floor: float

    @property
    def relative_error(self) -> float:
        return self.expected / self.row.ms_per_step - 1


def shape_path(name: str) -> str:
    return str(SHAPES / f"{name}.json")


# ---- rows of the log -----------------------------------------------------------------------------


def read_log_rows(path: Path = LOG) -> Iterator[MeasuredRow]:
    """Yield the newest row of each workload under headings that name the H200.

    A row is `| SHAPE, BATCH : IN : OUT | ms |` or `| prefill A / B | ms / ms |`, in columns called
    "ours", "now" or by a precision, or a sentence. A row without a shape has the one above it.
    """
    shape = ""
    is_h200 = False
    yielded = set()
    columns = list[str | None]()
    previous_line = ""
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            shape = ""
            if line.startswith("## "):
                is_h200 = "H200" in line
        rows = []
        if line.startswith("|--"):
            titles = previous_line.strip("|").split("|")[1:]
            columns = [COLUMN_PRECISIONS.get(title.strip()) for title in titles]
        elif line.startswith("|"):
            shape = _shape_of_line(line) or shape
            rows += list(_read_table_line(line, shape, columns))
        for name, precision, batch, prompt, output, ms in SENTENCE.findall(line):
            workload = f"fixed:{batch}:{prompt}:{output}"
            rows.append(MeasuredRow(MODEL_SHAPES[name], workload, float(ms), precision))
        for row in rows if is_h200 else ():
            without_output = row.workload.rpartition(":")[0]
            key = (row.shape, without_output, row.precision)
            if row.shape and key not in yielded:
                yielded.add(key)
                yield row
        previous_line = line


def _shape_of_line(line: str) -> str | None:
    first_cell = line.split("|")[1]
    for name, shape in MODEL_SHAPES.items():
        if f"{name}," in first_cell:
            return shape
    return None


def _read_table_line(line: str, shape: str, columns: Sequence[str | None]) -> Iterator[MeasuredRow]:
    first_cell, *cells = [cell.strip() for cell in line.strip("|").split("|")]
    if match := re.search(rf"{WORKLOAD}$", first_cell):
        workloads = ["fixed:" + ":".join(match.groups())]
    elif "prefill" in first_cell:
        lengths = re.findall(r"[\d,]*\d{3}", first_cell)
        workloads = [f"fixed:1:{length.replace(',', '')}:1" for length in lengths]
    else:
        return
    for cell, precision in zip(cells, columns, strict=False):
        without_parentheses = re.sub(r"\(.*?\)", "", cell)
        times = re.findall(r"\d+\.\d+", without_parentheses)
        for workload, ms in zip(workloads, times, strict=False):
            if precision:
                yield MeasuredRow(shape, workload, float(ms), precision)


# ---- expected times ------------------------------------------------------------------------------


class RecordingRoofline:
    """A roofline that records the steps it is asked about."""

    def __init__(self, roofline: Roofline):
        self.roofline = roofline
        self.pp = roofline.pp
        self.steps = list[tuple[int, ...]]()

    def expected_seconds(self, *work: int) -> float:
        self.steps.append(work)
        return self.roofline.expected_seconds(*work)

    def reference_steps(self) -> tuple[()]:
        """None: the order of first come, first served does not depend on step times."""
        return ()


def place_shape(shape: str, hardware_name: str, precision: str) -> PlacedModel:
    model = read_model_source(shape_path(shape)).model
    hardware = find_hardware(hardware_name)
    return PlacedModel(model, hardware, PRECISIONS[precision], 16, DeviceLayout())


@cache
def simulate_steps(shape: str, workload: str) -> Sequence[tuple[int, ...]]:
    """All steps of a run, by the real scheduler. With fcfs they do not depend on their times."""
    batch, prompt, output = map(int, workload.split(":")[1:])
    placed = place_shape(shape, "h200", "bf16")
    recorder = RecordingRoofline(placed.roofline)
    placed.roofline = recorder  # type: ignore[assignment]
    fleet = SimulatedFleet(placed, EngineConfig(policy="fcfs", prefix_cache=False))
    fleet.run([RequestArrival(0.0, prompt, output)] * batch)
    return recorder.steps


def compare_row(
    row: MeasuredRow, hardware_name: str, calibration: StepCalibration | None = None
) -> RowComparison:
    """Expected and floor milliseconds per step over the whole run of a measured row."""
    roofline = place_shape(row.shape, hardware_name, row.precision).roofline
    roofline.calibration = calibration or roofline.calibration
    output = int(row.workload.split(":")[-1])
    steps = simulate_steps(row.shape, row.workload)
    expected = sum(roofline.expected_seconds(*step) for step in steps)
    floor = sum(roofline.floor_seconds(*step) for step in steps)
    return RowComparison(row, expected / output * 1e3, floor / output * 1e3)
