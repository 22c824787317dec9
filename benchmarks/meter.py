"""What the live meter costs: the same decode steps with and without it, in turn.

    PYTHONPATH=src python3 benchmarks/meter.py llama-1b         # a GPU, random weights
    PYTHONPATH=src python3 benchmarks/meter.py embedded         # the embedded model on the CPU

Prints for each batch the medians with and without, by the clock and by this process's own CPU time (which a busy
machine spoils less), their difference, the meter's own words on its steps, and what its calls take by themselves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from offline import SHAPES, number


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=[*SHAPES, "embedded"])
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE for LLM(...)")
    args = parser.parse_args()
    from bloomery import LLM, SamplingParams
    from bloomery.engine.gauge import words
    from bloomery.messages import ScheduledStep, StepTiming

    options = {name: number(value) for name, value in (pair.split("=", 1) for pair in args.option)}
    model = None
    if args.shape != "embedded":
        folder = Path(tempfile.mkdtemp()) / args.shape
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        model = str(folder)
        options = {"load_format": "dummy", "max_model_len": 4096, **options}
    llm = LLM(model, skip_tokenizer_init=True, enable_prefix_caching=False, **options)
    worker = llm.front.stack.executor.worker
    loop = llm.front.stack.loop
    meter = worker.meter
    params = SamplingParams(
        temperature=0.0, max_tokens=args.tokens, ignore_eos=True, detokenize=False
    )

    def run(batch: int, metered: bool) -> tuple[float, float]:
        """Milliseconds a step, by the clock and of CPU time."""
        worker.meter = meter if metered else None
        begun = time.perf_counter()
        spent = time.process_time()
        llm.generate(
            [{"prompt_token_ids": [11 + i] * 16} for i in range(batch)], params, use_tqdm=False
        )
        both = time.perf_counter() - begun, time.process_time() - spent
        return both[0] * 1e3 / args.tokens, both[1] * 1e3 / args.tokens

    def alone(batch: int, turns: int = 2000) -> float:
        """Microseconds of the meter's calls around a step in which nothing happens."""
        step = ScheduledStep((), (), tuple(range(batch)), (100,) * batch)
        spent = time.process_time()
        for _ in range(turns):
            meter.begin(step)
            meter.choosing()
            meter.collect(meter.end())
        return (time.process_time() - spent) / turns * 1e6

    for batch in args.batch or (1, 64):
        run(batch, True)
        loop.timing = StepTiming()
        taken = {True: [], False: []}
        for turn in range(2 * args.rounds):
            metered = turn % 2 == 0
            taken[metered].append(run(batch, metered))
        for i, clock in enumerate(("by the clock", "CPU time")):
            on, off = (
                statistics.median(both[i] for both in taken[metered]) for metered in (True, False)
            )
            print(
                f"{args.shape}, batch {batch}, {clock}: {on:.3f} ms with, {off:.3f} without: {on / off - 1:+.2%}"
            )
        print(f"  {words(loop.timing)}")
        own = alone(batch)
        print(f"  its own work: {own:.1f} us, {own / 1e3 / off:.2%} of a step", flush=True)


if __name__ == "__main__":
    main()
