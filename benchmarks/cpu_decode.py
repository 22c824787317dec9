"""Decode of one stream on this CPU beside its bandwidth floor, with random weights.

    PYTHONPATH=src:. python3 benchmarks/cpu_decode.py lfm2-350m [--quantization int8]

The time of a token is the difference between a long and a short answer to the same prompt. The
floor is the bytes of the weights over the rate at which torch sums a large tensor on all threads,
measured before and after each answer. On shared machines this rate can change within seconds, so a
round counts only if it stayed the same. The medians of the rounds are printed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.offline import SHAPES
from bloomery import LLM, SamplingParams

PROMPT = list(range(5, 37))  # token ids
NUM_TOKENS = 128
READ_BYTES = 1 << 30  # several times the caches
MAX_RATE_CHANGE = 1.08  # between the read rates of a round that counts
MAX_ATTEMPTS = 20  # for each round that counts


def measure_read_rate(data: torch.Tensor) -> float:
    """Bytes per second."""
    start = time.perf_counter()
    data.sum()
    return data.nbytes / (time.perf_counter() - start)


def time_answer(llm: LLM, num_tokens: int) -> float:
    """Seconds of an answer of so many tokens."""
    params = SamplingParams(
        max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False
    )
    start = time.perf_counter()
    llm.generate([PROMPT], params, use_tqdm=False)
    return time.perf_counter() - start


def measure_round(llm: LLM, data: torch.Tensor) -> tuple[float, float]:
    """The seconds of a token, and the read rate meanwhile; nan if that did not stay the same."""
    rates = [measure_read_rate(data)]
    short = time_answer(llm, 1)
    long = time_answer(llm, NUM_TOKENS + 1)
    rates.append(measure_read_rate(data))
    if max(rates) > MAX_RATE_CHANGE * min(rates):
        return math.nan, math.nan
    return (long - short) / NUM_TOKENS, statistics.mean(rates)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[args.shape]))
        llm = LLM(
            folder,
            load_format="dummy",
            quantization=args.quantization,
            skip_tokenizer_init=True,
            max_model_len=1024,
            kv_cache_gib=0.5,
            device="cpu",
        )
        time_answer(llm, NUM_TOKENS)  # traces the steps
        data = torch.randint(1 << 40, (READ_BYTES // 8,))
        rounds: list[tuple[float, float]] = []
        attempts = 0
        while len(rounds) < args.rounds and attempts < args.rounds * MAX_ATTEMPTS:
            seconds, rate = measure_round(llm, data)
            attempts += 1
            if not math.isnan(seconds):
                rounds.append((seconds, rate))
    if not rounds:
        raise SystemExit("the memory of this machine was never steady for a round: try again")
    weights_bytes = llm.capacity.weights_bytes
    ratios = [seconds * rate / weights_bytes for seconds, rate in rounds]
    token_seconds = statistics.median(seconds for seconds, _ in rounds)
    rate = statistics.median(rate for _, rate in rounds)
    result = {
        "shape": args.shape,
        "quantization": args.quantization,
        "threads": torch.get_num_threads(),
        "ms_token": round(token_seconds * 1e3, 2),
        "floor_ms": round(weights_bytes / rate * 1e3, 2),
        "times_the_floor": round(statistics.median(ratios), 2),
        "each_round": [
            f"{ratio:.2f} at {rate / 1e9:.0f} GB/s" for ratio, (_, rate) in zip(ratios, rounds)
        ],
        "rounds_not_counted": attempts - len(rounds),
        "weights_mb": round(weights_bytes / 1e6),
        "read_gb_s": round(rate / 1e9, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
