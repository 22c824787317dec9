"""The embedded model on this machine, next to transformers running the same file, in one run.

    python benchmarks/laptop.py            # decode and prefill, ours and transformers', medians over rounds
    python benchmarks/laptop.py --start    # from process start to the first token of `bloomery generate`

Floor: the bytes of the weights a step must read, over the bandwidth this machine reaches in a copy, measured here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

PROMPT = list(range(1000, 1032))


def bandwidth(threads: int) -> float:
    """Bytes a second of reading, by summing a buffer far larger than the caches."""
    torch.set_num_threads(threads)
    data = torch.ones(1 << 27, dtype=torch.float32)
    best = min(timed(lambda: data.sum()) for _ in range(5))
    return data.nbytes / best


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


class Ours:
    name = "bloomery"

    def __init__(self, threads: int):
        from bloomery import LLM

        self.llm = LLM(None, threads=threads, enable_prefix_caching=False, skip_tokenizer_init=True)
        self.weights = self.llm.front.stack.capacity.weights_bytes

    def run(self, prompts: list[list[int]], count: int) -> float:
        from bloomery import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        return timed(lambda: self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False))


class Theirs:
    name = "transformers"

    def __init__(self, threads: int):
        import transformers

        from bloomery.artifacts.locate import locate

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        path = locate(None).path
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
        torch.set_num_threads(threads)

    def run(self, prompts: list[list[int]], count: int) -> float:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            return timed(
                lambda: self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
                    do_sample=False, pad_token_id=0,
                )
            )  # fmt: skip


def median(run: Callable[[], float], rounds: int) -> float:
    return statistics.median(run() for _ in range(rounds))


def measure(engine: Ours | Theirs, rounds: int) -> dict[str, float]:
    """Tokens a second. Decode is a long answer less a short one: the prompt's cost drops out."""
    engine.run([PROMPT], 4)

    def decode(batch: int) -> float:
        prompts = [PROMPT] * batch
        spent = median(lambda: engine.run(prompts, 68), rounds) - median(lambda: engine.run(prompts, 4), rounds)
        return 64 * batch / spent

    def prefill(length: int) -> float:
        prompt = [[1000 + i % 20000 for i in range(length)]]
        return length / median(lambda: engine.run(prompt, 1), rounds)

    return {
        "decode, 1 stream": decode(1),
        "decode, 16 streams": decode(16),
        "prefill 512": prefill(512),
        "prefill 2048": prefill(2048),
    }


def first_token(rounds: int) -> float:
    """Seconds from starting `bloomery generate` to its first byte of output."""

    def once() -> float:
        begun = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-m", "bloomery", "generate", "-p", "The capital of France is", "-t", "0", "-n", "4"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            return time.perf_counter() - begun

    return statistics.median(once() for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--start", action="store_true", help="time from process start to first token only")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    if args.start:
        print(f"process start to first token: {first_token(args.rounds):.2f} s (median of {args.rounds})")
        return
    speed = bandwidth(args.threads)
    ours, theirs = Ours(args.threads), Theirs(args.threads)
    floor = speed / ours.weights
    table = {engine.name: measure(engine, args.rounds) for engine in (ours, theirs)}
    print(f"\nSmolLM2-135M-Instruct, float32, {args.threads} threads, tokens/s; reads at {speed / 1e9:.1f} GB/s,")
    print(f"weights {ours.weights / 1e6:.0f} MB: the floor of a step is {1000 / floor:.1f} ms, {floor:.0f} a second\n")
    print(f"{'':20}{'bloomery':>12}{'transformers':>14}{'ratio':>8}{'of floor':>10}")
    for row, value in table[ours.name].items():
        other = table[theirs.name][row]
        share = f"{value / floor:9.0%}" if row == "decode, 1 stream" else ""
        print(f"{row:20}{value:12.1f}{other:14.1f}{value / other:8.2f}{share:>10}")
    if args.json:
        args.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
