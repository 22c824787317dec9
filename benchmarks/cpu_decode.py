"""Decode of one stream on this CPU beside its bandwidth floor, with random weights.

    PYTHONPATH=src:. python3 benchmarks/cpu_decode.py lfm2-350m [--quantization int8]

The time of a token is the difference between a long and a short answer to the same prompt, the
median of several rounds. The floor is the bytes of the weights over the rate at which torch sums a
large tensor on all threads, measured before each round; the median rate counts.
"""

from __future__ import annotations

import argparse
import json
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
        seconds = []
        rates = []
        for _ in range(args.rounds):
            rates.append(measure_read_rate(data))
            seconds.append((time_answer(llm, NUM_TOKENS + 1) - time_answer(llm, 1)) / NUM_TOKENS)
    rate = statistics.median(rates)
    token_seconds = statistics.median(seconds)
    floor = llm.capacity.weights_bytes / rate
    result = {
        "shape": args.shape,
        "quantization": args.quantization,
        "threads": torch.get_num_threads(),
        "ms_token": round(token_seconds * 1e3, 2),
        "floor_ms": round(floor * 1e3, 2),
        "times_the_floor": round(token_seconds / floor, 2),
        "weights_mb": round(llm.capacity.weights_bytes / 1e6),
        "read_gb_s": round(rate / 1e9, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
