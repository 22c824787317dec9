"""What the plan expects beside what was measured: is `bloomery plan` to be believed?

    python benchmarks/plan_check.py                         # every row of LOG.md, on the H200
    python benchmarks/plan_check.py rows.jsonl --fit        # lines that benchmarks/offline.py printed, any precision
    python benchmarks/plan_check.py --here                  # this machine, now: the embedded model, or others by name,
                                                            # against what the machine is measured to do in the same run
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
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import log
from pathlib import Path

from bloomery.tools.bench.load import Arrival
from bloomery.config import Config
from bloomery.tools.plan.forecast import Layout, Placed
from bloomery.tools.plan.subject import subject
from bloomery.roofline import PRECISIONS, Calibration, Roofline, Work, machine
from bloomery.tools.simulate import Fleet

HERE = Path(__file__).parent
SHAPES = {
    "Llama-8B": "llama-8b",
    "Llama-1B": "llama-1b",
    "OctoCoder": "octocoder",
    "BLOOM-7B1": "bloom-7b",
}
Row = tuple[str, str, float, str]  # shape, work, ms a step, precision
QUANTIZED = {"auto": "bf16", "w8a8": "int8"}  # what --quantize calls otherwise than the plan does


WORK = r"(\d+) : (\d+) : (\d+)"
OURS = {"ours": "bf16", "now": "bf16", **{name: name for name in PRECISIONS}}
SENTENCE = re.compile(rf"({'|'.join(SHAPES)}), ({'|'.join(PRECISIONS)}), {WORK}: (\d+\.\d+) ms")


def of_log(path: Path) -> Iterator[Row]:
    """Under headings that name the H200 the newest of `| SHAPE, BATCH : IN : OUT | ms |` and `| prefill A / B | ms / ms
    |`, in columns called ours, now or by a precision; a row without a shape has the one above. Of sentences too."""
    shape = ""
    ours = False
    seen = set()
    columns = list[str | None]()
    before = ""
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            shape = ""
            ours = "H200" in line if line.startswith("## ") else ours
        rows = []
        if line.startswith("|--"):
            columns = [OURS.get(cell.strip()) for cell in before.strip("|").split("|")[1:]]
        elif line.startswith("|"):
            shape = next(
                (SHAPES[name] for name in SHAPES if f"{name}," in line.split("|")[1]), shape
            )
            rows += [(shape, *row) for row in _of_table(line, columns)]
        for name, precision, batch, prompt, output, ms in SENTENCE.findall(line):
            rows.append((SHAPES[name], f"fixed:{batch}:{prompt}:{output}", float(ms), precision))
        for row in rows if ours else ():
            key = row[0], row[1].rpartition(":")[0], row[3]  # however long the answers were
            if row[0] and key not in seen:
                seen.add(key)
                yield row
        before = line


def _of_table(line: str, columns: list[str | None]) -> Iterator[tuple[str, float, str]]:
    """Work, milliseconds and precision of a row."""
    first, *cells = [cell.strip() for cell in line.strip("|").split("|")]
    if match := re.search(rf"{WORK}$", first):
        works = ["fixed:" + ":".join(match.groups())]
    elif "prefill" in first:
        works = [
            f"fixed:1:{length.replace(',', '')}:1" for length in re.findall(r"[\d,]*\d{3}", first)
        ]
    else:
        return
    for cell, precision in zip(cells, columns, strict=False):
        times = re.findall(r"\d+\.\d+", re.sub(r"\(.*?\)", "", cell))
        for work, ms in zip(works, times, strict=False):
            if precision:
                yield work, float(ms), precision


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


class Noted:
    """A roofline that keeps what it was asked."""

    def __init__(self, roofline: Roofline):
        self.roofline = roofline
        self.pp = roofline.pp
        self.asked = list[tuple[int, ...]]()

    def expected(self, *work: int) -> float:
        self.asked.append(work)
        return self.roofline.expected(*work)

    def usual(self) -> tuple[()]:
        """Nothing to begin with: who is served first does not depend on it."""
        return ()


@cache
def steps(shape: str, work: str) -> Sequence[tuple[int, ...]]:
    """All steps of a run, by the real scheduler: who comes first is served first, so their times change nothing."""
    batch, prompt, output = map(int, work.split(":")[1:])
    home = placed(shape, "h200", "bf16")
    home.roofline = noted = Noted(home.roofline)
    Fleet(home, Config(policy="fcfs", prefix_cache=False)).run(
        [Arrival(0.0, prompt, output)] * batch
    )
    return noted.asked


def predicted(home: Placed, shape: str, work: str) -> tuple[float, float]:
    """Milliseconds a step over the whole run: expected, and the floor."""
    output = int(work.split(":")[-1])
    all_steps = steps(shape, work)
    return tuple(
        sum(count(*step) for step in all_steps) / output * 1e3
        for count in (home.roofline.expected, home.roofline.step)
    )


def placed(shape: str, gpu: str, precision: str) -> Placed:
    model = subject(str(HERE / "shapes" / f"{shape}.json")).model
    return Placed(model, machine(gpu), PRECISIONS[precision], 16, Layout())


def table(rows: list[Row], gpu: str, calibration: Calibration | None = None) -> None:
    print(
        f"{'shape':12}{'work':18}{'in':6}{'measured':>10}{'expected':>10}{'off':>8}{'floor':>9}{'share':>7}"
    )
    worst = 0.0
    for shape, work, ms, precision in rows:
        home = placed(shape, gpu, precision)
        home.roofline.calibration = calibration or home.roofline.calibration
        expected, floor = predicted(home, shape, work)
        off = expected / ms - 1
        worst = max(worst, abs(expected / ms - 1))
        print(
            f"{shape:12}{work:18}{precision:6}{ms:>10.3f}{expected:>10.3f}{off:>+8.1%}{floor:>9.3f}{floor / ms:>7.0%}"
        )
    print(f"worst: {worst:.1%}")


def fit(rows: list[Row], gpu: str) -> None:
    """First the general constants to rows of 16 bits, then those of packed weights to all others."""
    best, plain, packed = (
        machine(gpu).calibration,
        *([r for r in rows if (r[3] == "bf16") is is_it] for is_it in (True, False)),
    )
    if plain:
        best = walk(plain, gpu, best, ("memory", "compute", "launch", "step", "sequence"))
    if packed:
        kinds = sorted({PRECISIONS[row[3]].compute for row in packed})
        best = walk(packed, gpu, best, ("tile", *((kind, i) for kind in kinds for i in (0, 1))))
    print(best)
    table(rows, gpu, best)


Constant = str | tuple[str, int]  # a field, or one of the two shares of a kind of packed weights


def changed(calibration: Calibration, name: Constant, factor: float) -> Calibration:
    if isinstance(name, str):
        return replace(calibration, **{name: min(getattr(calibration, name) * factor, 1.0)})
    shares = list(calibration.packed[name[0]])
    shares[name[1]] = min(shares[name[1]] * factor, 1.0)
    return replace(calibration, packed={**calibration.packed, name[0]: tuple(shares)})


def walk(rows: list[Row], gpu: str, best: Calibration, names: tuple[Constant, ...]) -> Calibration:
    """A random walk over the constants, judged by the squares of the logarithms of expected over measured."""
    homes = [placed(shape, gpu, precision) for shape, _, _, precision in rows]
    chance = random.Random(0)

    def loss(calibration: Calibration) -> float:
        for home in homes:
            home.roofline.calibration = calibration
        return sum(
            log(predicted(home, shape, work)[0] / ms) ** 2
            for home, (shape, work, ms, _) in zip(homes, rows, strict=True)
        )

    least = loss(best)
    for turn in range(40 * len(names)):
        tried = best
        for name in names:
            tried = changed(tried, name, 1 + chance.gauss(0, 0.15 * 0.985**turn))
        if (found := loss(tried)) < least:
            best = tried
            least = found
    return best


def bloom() -> None:
    model = subject(str(HERE / "shapes" / "bloom-176b.json")).model
    print(
        "BLOOM-176B in bf16, one token at a time, TP 8; the talk reached 45 ms on eight A100 of 80 GB\n"
    )
    print(
        f"{'':14}{'floor ms':>10}{'messages':>10}{'their ms':>10}{'expected ms':>13}{'of 45 ms':>10}"
    )
    for gpu in ("a100-80", "h200"):
        eight = Placed(model, machine(gpu), PRECISIONS["bf16"], 16, Layout(8))
        floor = eight.roofline.floor(1, 1, 1)
        expected = eight.expected(1, 1) * 1e3
        spent = floor.communication * 1e3
        print(
            f"8 x {gpu:10}{floor.ms:>10.1f}{floor.messages:>10}{spent:>10.2f}{expected:>13.1f}{expected / 45:>10.0%}"
        )


def here(
    model: str | None, threads: int, by_cpu: bool, rounds: int, batches: Sequence[int]
) -> None:
    """This machine and a model on it, measured in turns in one run, against the plan made of the former alone."""
    from bloomery import LLM
    from bloomery.machines import here as this_machine
    from bloomery.machines import overridden
    from bloomery.tools.profile import recorded
    from bloomery.runtime.measure import PAUSE, Turns, probes

    llm = LLM(
        model,
        threads=threads,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        max_model_len=1024,
    )
    stack = llm.front.stack
    taken = defaultdict[tuple[int, ...], list[float]](list)
    turns = Turns(probes("cpu", threads), threads, by_cpu)
    clock = (lambda: time.process_time() / threads) if by_cpu else time.perf_counter
    for _ in range(rounds):
        for row in recorded(stack.loop, stack.capacity, (16, 64, 256), batches, clock):
            taken[tuple(int(row[name]) for name in Work._fields)].append(row["seconds"])
            turns.round()
            time.sleep(PAUSE)  # threads park
    llm.close()
    seen = turns.seen()
    about = subject(model)
    title = this_machine("cpu").title
    machine_here = overridden(
        this_machine("cpu"), {"bandwidth": seen.bandwidth, "rates": seen.rates}
    )
    limit = Placed(
        about.model, machine_here, about.kept(cpu=True), 16, Layout()
    ).roofline  # the cache in half floats
    rates = ", ".join(f"{kind} {rate / 1e9:.0f}" for kind, rate in seen.rates.items())
    print(
        f"{about.name}, {title}, {threads} threads: reads {seen.bandwidth / 1e9:.1f} GB/s, GFLOP/s: {rates}"
    )
    if seen.doubt:
        print(f"not to be believed: {seen.doubt}")
    print(
        f"{'tokens':>8}{'attended':>10}{'measured':>10}{'expected':>10}{'off':>8}{'floor':>9}{'share':>7}"
    )
    worst = 0.0
    for step, times in taken.items():
        floor = limit.step(*step) * 1e3
        expected = limit.expected(*step) * 1e3
        ms = (
            min(times) * 1e3 if len(times) < 4 else statistics.quantiles(times, n=4)[0] * 1e3
        )  # as of the machine
        worst = max(worst, abs(expected / ms - 1))
        line = f"{step[0]:>8}{step[1]:>10}{ms:>10.2f}{expected:>10.2f}{expected / ms - 1:>+8.1%}"
        print(f"{line}{floor:>9.2f}{floor / ms:>7.0%}")
    print(f"worst: {worst:.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "rows",
        type=Path,
        nargs="?",
        help="lines of benchmarks/offline.py; default: the table of LOG.md",
    )
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--precision", choices=PRECISIONS, help="only rows in this one")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--bloom", action="store_true")
    parser.add_argument(
        "--here", metavar="MODEL", nargs="*", help="models on this machine; none: the embedded one"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--batch", type=int, nargs="+", default=(1, 2, 8, 64), help="sizes of the steps"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of all steps of a model")
    parser.add_argument(
        "--cpu-time", action="store_true", help="by the threads' own time: for machines never quiet"
    )
    args = parser.parse_args()
    if args.bloom:
        return bloom()
    if args.here is not None:
        for model in args.here or (None,):
            here(model, args.threads, args.cpu_time, args.rounds, args.batch)
        return None
    rows = list(of_lines(args.rows) if args.rows else of_log(HERE / "LOG.md"))
    return (fit if args.fit else table)(
        [row for row in rows if args.precision in (None, row[3])], args.gpu
    )


if __name__ == "__main__":
    main()
