"""What the plan expects beside what was measured: is `bloomery plan` to be believed?

    python benchmarks/plan_check.py                         # every row of LOG.md, on the H200
    python benchmarks/plan_check.py rows.jsonl --fit        # lines that benchmarks/offline.py printed, any precision
    python benchmarks/plan_check.py --here --threads 2      # this machine, now: the embedded model against its plan
    python benchmarks/plan_check.py --fit                   # constants of roofline.Calibration that suit the rows best:
                                                            # of bf16 rows the general ones, then of others `packed`
    python benchmarks/plan_check.py --bloom                 # BLOOM-176B: floor, expectation and the 45 ms of the talk

A row's work goes through the simulator (the real scheduler, prompts included) and its time over the output length is
compared. Within 15 % is the promise on the H200, within 25 % on a CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from math import log
from pathlib import Path

from bloomery.bench.load import Arrival
from bloomery.config import Config
from bloomery.plan.forecast import Layout, Placed
from bloomery.plan.subject import subject
from bloomery.roofline import PRECISIONS, Calibration, machine
from bloomery.simulate import Fleet

HERE = Path(__file__).parent
SHAPES = {"Llama-8B": "llama-8b", "Llama-1B": "llama-1b", "OctoCoder": "octocoder", "BLOOM-7B1": "bloom-7b"}
Row = tuple[str, str, float, str]  # shape, work, ms a step, precision
QUANTIZED = {"auto": "bf16", "w8a8": "int8"}  # what --quantize calls otherwise than the plan does


def of_log(path: Path) -> Iterator[Row]:
    """`| SHAPE, BATCH : IN : OUT | ms |` and `| prefill A / B | ms / ms |`; a row without a shape has the one above."""
    shape, ours, seen = "", False, set()
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            shape, ours = "", "H200" in line
        if not ours:
            continue
        cells = [cell.strip() for cell in line.split("|")[1:3]]
        if len(cells) < 2:
            continue
        if found := next((name for name in SHAPES if cells[0].startswith(name)), None):
            shape = SHAPES[found]
        times = [float(number) for number in re.findall(r"\d+\.\d+", cells[1])]
        if match := re.search(r"(\d+) : (\d+) : (\d+)$", cells[0]):
            works = ["fixed:" + ":".join(match.groups())]
        elif "prefill" in cells[0]:
            works = [f"fixed:1:{number.replace(',', '')}:1" for number in re.findall(r"[\d,]*\d{3}", cells[0])]
        else:
            continue
        for work, ms in zip(works, times, strict=False):
            if shape and (shape, work) not in seen:
                seen.add((shape, work))
                yield shape, work, ms, "bf16"


def of_lines(path: Path) -> Iterator[Row]:
    """One prompt is a fixed batch of one; rows of formats that the plan has no row for are left out, and named."""
    for line in path.read_text().splitlines():
        row = json.loads(line) if line.startswith("{") else {}
        work = re.sub(r"^prefill:(\d+)$", r"fixed:1:\1:1", str(row.get("work", "")))
        if "ms_step" not in row or not work.startswith("fixed"):
            continue
        asked = str(row.get("quantize", "auto"))
        precision = QUANTIZED.get(asked, asked)
        if precision in PRECISIONS:
            yield row["shape"], work, row["ms_step"], precision
        else:
            print(f"left out: {row['shape']} {work} in {asked}, of which the plan knows nothing")


def predicted(placed: Placed, work: str) -> tuple[float, float]:
    """Milliseconds a step over the whole run: expected, and the floor."""
    batch, prompt, output = map(int, work.split(":")[1:])
    fleet = Fleet(placed, Config(policy="first-come", prefix_cache=False))
    records = fleet.run([Arrival(0.0, prompt, output)] * batch)
    floor = sum(placed.roofline.step(batch, batch * (prompt + i), batch) for i in range(1, output))
    floor += placed.roofline.step(batch * prompt, batch * prompt, batch, batch * prompt * (prompt + 1) // 2)
    return max(record.done for record in records) / output * 1e3, floor / output * 1e3


def placed(shape: str, gpu: str, precision: str) -> Placed:
    model = subject(str(HERE / "shapes" / f"{shape}.json")).model
    return Placed(model, machine(gpu), PRECISIONS[precision], 16, Layout())


def table(rows: list[Row], gpu: str, calibrations: dict[bool, Calibration] | None = None) -> None:
    print(f"{'shape':12}{'work':18}{'in':6}{'measured':>10}{'expected':>10}{'off':>8}{'floor':>9}{'share':>7}")
    worst = 0.0
    for shape, work, ms, precision in rows:
        home = placed(shape, gpu, precision)
        if calibrations:
            home.roofline.calibration = calibrations[precision != "bf16"]
        expected, floor = predicted(home, work)
        off, worst = expected / ms - 1, max(worst, abs(expected / ms - 1))
        print(
            f"{shape:12}{work:18}{precision:6}{ms:>10.3f}{expected:>10.3f}{off:>+8.1%}{floor:>9.3f}{floor / ms:>7.0%}"
        )
    print(f"worst: {worst:.1%}")


def fit(rows: list[Row], gpu: str) -> None:
    """First the general constants to rows of 16 bits, then the share of packed weights to all others."""
    best, plain = machine(gpu).calibration, [row for row in rows if row[3] == "bf16"]
    if plain:
        best = walk(plain, gpu, best, ("memory", "compute", "launch", "step", "sequence"))
    calibrations = {False: best, True: best}
    if packed := [row for row in rows if row[3] != "bf16"]:
        calibrations[True] = walk(packed, gpu, best, ("packed",))
    print(calibrations[True])
    table(rows, gpu, calibrations)


def walk(rows: list[Row], gpu: str, best: Calibration, names: tuple[str, ...]) -> Calibration:
    """A random walk over the constants, judged by the squares of the logarithms of expected over measured."""
    homes, chance = [placed(shape, gpu, precision) for shape, _, _, precision in rows], random.Random(0)

    def loss(calibration: Calibration) -> float:
        for home in homes:
            home.roofline.calibration = calibration
        return sum(log(predicted(home, work)[0] / ms) ** 2 for home, (_, work, ms, _) in zip(homes, rows, strict=True))

    least = loss(best)
    for turn in range(120):
        change = {name: getattr(best, name) * (1 + chance.gauss(0, 0.2 * 0.98**turn)) for name in names}
        tried = replace(best, **{name: min(value, 1.0) for name, value in change.items()})
        if (found := loss(tried)) < least:
            best, least = tried, found
    return best


def bloom() -> None:
    model = subject(str(HERE / "shapes" / "bloom-176b.json")).model
    print("BLOOM-176B in bf16, one token at a time, TP 8; the talk reached 45 ms on eight A100 of 80 GB\n")
    print(f"{'':14}{'floor ms':>10}{'messages':>10}{'their ms':>10}{'expected ms':>13}{'of 45 ms':>10}")
    for gpu in ("a100-80", "h200"):
        eight = Placed(model, machine(gpu), PRECISIONS["bf16"], 16, Layout(8))
        floor, expected = eight.roofline.floor(1, 1, 1), eight.expected(1, 1) * 1e3
        spent = floor.communication * 1e3
        print(f"8 x {gpu:10}{floor.ms:>10.1f}{floor.messages:>10}{spent:>10.2f}{expected:>13.1f}{expected / 45:>10.0%}")


def here(threads: int) -> None:
    """Measured and expected on this machine in one run; other work on it makes the figures worthless."""
    from bloomery import LLM
    from bloomery.machines import here as this_machine
    from bloomery.machines import overridden
    from bloomery.profile import recorded
    from bloomery.runtime.measure import rates

    llm = LLM(None, threads=threads, enable_prefix_caching=False, skip_tokenizer_init=True)
    stack = llm.front.stack
    rows = list(recorded(stack.loop, stack.capacity))
    llm.close()
    bandwidth, found = rates("cpu")
    machine_here = overridden(this_machine("cpu"), {"bandwidth": bandwidth, "rates": found})
    about = subject(None)
    placed_here = Placed(about.model, machine_here, about.stored, 16, Layout())  # keys and values in half floats
    print(f"{machine_here.title}: reads {bandwidth / 1e9:.1f} GB/s, multiplies at {found['fp32'] / 1e9:.0f} GFLOP/s")
    print(f"{'tokens':>8}{'attended':>10}{'measured':>10}{'expected':>10}{'off':>8}{'floor':>9}{'share':>7}")
    for row in rows:
        counts = [int(row[name]) for name in ("tokens", "attended", "sampled", "pairs")]
        floor, expected = placed_here.roofline.step(*counts) * 1e3, placed_here.roofline.expected(*counts) * 1e3
        ms = row["seconds"] * 1e3
        line = f"{counts[0]:>8}{counts[1]:>10}{ms:>10.2f}{expected:>10.2f}{expected / ms - 1:>+8.1%}"
        print(f"{line}{floor:>9.2f}{floor / ms:>7.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "rows", type=Path, nargs="?", help="lines of benchmarks/offline.py; default: the table of LOG.md"
    )
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--precision", choices=PRECISIONS, help="only rows in this one")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--bloom", action="store_true")
    parser.add_argument("--here", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.bloom:
        return bloom()
    if args.here:
        return here(args.threads)
    rows = list(of_lines(args.rows) if args.rows else of_log(HERE / "LOG.md"))
    return (fit if args.fit else table)([row for row in rows if args.precision in (None, row[3])], args.gpu)


if __name__ == "__main__":
    main()
