"""Checks deterministic mode, and measures its cost in time.

    PYTHONPATH=src python3 benchmarks/deterministic.py check --shape llama-1b [--prompts 48]
    PYTHONPATH=src python3 benchmarks/deterministic.py check --model PATH --device cpu
    PYTHONPATH=src python3 benchmarks/deterministic.py cost fixed:1:128:64 prefill:4096 \
        --shape llama-8b

Models have random weights of a shape, or come from --model (a path, or "embedded").

check: the reference is every prompt alone. Then the prompts run in batches of 7, all together, with
chunked prefill, with prefix hits, and with a KV cache so small that requests are preempted. Tokens
and the best five log-probabilities must be equal to the last bit.
cost: the same work with and without deterministic mode, in seconds, and the ratio; best of two.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.offline import SHAPES, build_workload

# token ids, and at each position the sorted (id, logprob) pairs
GeneratedTokens = tuple[list[int], list[Any]]
MAX_PROMPT_LEN = 500  # tokens, rounded up


def make_llm(args: argparse.Namespace, **options: Any) -> Any:
    from bloomery import LLM

    gc.collect()
    defaults = {
        "skip_tokenizer_init": True,
        "device": args.device,
        "max_model_len": 2048 if args.model else 8192,
        "max_num_seqs": args.sequences,
    }
    options = defaults | options
    if args.dtype:
        options["dtype"] = args.dtype
    if args.model:
        return LLM(None if args.model == "embedded" else args.model, **options)
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(SHAPES[args.shape]))
    return LLM(str(folder), load_format="dummy", **options)


def worker_of(llm: Any) -> Any:
    executor = llm.executor
    return getattr(executor, "executor", executor).worker


def generate(
    llm: Any, prompts: Sequence[list[int]], params: Sequence[Any]
) -> list[GeneratedTokens]:
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    results = []
    for output in llm.generate(inputs, params, use_tqdm=False):
        completion = output.outputs[0]
        logprobs = [
            sorted((token, entry.logprob) for token, entry in position.items())
            for position in completion.logprobs or ()
        ]
        results.append((list(completion.token_ids), logprobs))
    return results


def make_prompts(num_prompts: int, vocab_size: int) -> list[list[int]]:
    """Random prompts, half of them with a common prefix of 200 tokens."""
    rng = random.Random(1)

    def random_tokens(count: int) -> list[int]:
        return [rng.randrange(10, vocab_size - 10) for _ in range(count)]

    prefix = random_tokens(200)
    prompts = []
    for _ in range(num_prompts):
        shared = prefix[: rng.choice([0, 200])]
        prompts.append(shared + random_tokens(rng.randrange(1, 300)))
    return prompts


def check(args: argparse.Namespace) -> int:
    from bloomery import SamplingParams

    llm = make_llm(args, deterministic=True, enable_prefix_caching=False)
    prompts = make_prompts(args.prompts, llm.capacity.vocab)
    params = [
        SamplingParams(
            temperature=i % 2,
            seed=i,
            max_tokens=args.tokens,
            logprobs=5 if i % 3 else None,
            ignore_eos=True,
            detokenize=False,
        )
        for i in range(len(prompts))
    ]
    num_wrong = 0

    def generate_batches(llm: Any, size: int) -> list[GeneratedTokens]:
        results = []
        for first in range(0, len(prompts), size):
            part = slice(first, first + size)
            results += generate(llm, prompts[part], params[part])
        return results

    def compare(name: str, results: list[GeneratedTokens]) -> None:
        nonlocal num_wrong
        pairs = list(zip(results, expected, strict=True))
        differ = sum(result != reference for result, reference in pairs)
        tokens_differ = sum(result[0] != reference[0] for result, reference in pairs)
        num_wrong += differ
        row = {
            "case": name,
            "requests": len(results),
            "differ": differ,
            "tokens_differ": tokens_differ,
        }
        print(json.dumps(row), flush=True)

    expected = generate_batches(llm, 1)
    setup = {
        "tile": worker_of(llm).model.tile_size,
        "prompts": len(prompts),
        "tokens": args.tokens,
    }
    print(json.dumps(setup), flush=True)
    compare("alone again", generate_batches(llm, 1))
    compare("batches of 7", generate_batches(llm, 7))
    compare("all together", generate(llm, prompts, params))
    del llm
    warm = make_llm(args, deterministic=True, enable_prefix_caching=True, max_num_batched_tokens=61)
    compare("chunks of 61", generate(warm, prompts, params))
    compare("prefix hits", generate(warm, prompts, params))
    capacity = worker_of(warm).capacity
    bytes_per_block = capacity.kv_bytes / capacity.blocks
    del warm
    max_len = MAX_PROMPT_LEN + args.tokens
    num_blocks = 3 * max_len // capacity.block_size
    small = make_llm(
        args,
        deterministic=True,
        enable_prefix_caching=True,
        kv_cache_gib=num_blocks * bytes_per_block / 2**30,
        max_model_len=max_len,
    )
    compare("preempted", generate(small, prompts, params))
    num_preemptions = small.loop.scheduler.num_preemptions
    print(json.dumps({"preemptions": num_preemptions}))
    del small
    passed = num_wrong == 0
    plain = make_llm(args, enable_prefix_caching=False)
    compare("not deterministic, all together", generate(plain, prompts, params))
    print("the last line is for comparison; in all others 'differ' must be 0")
    return 0 if passed else 1


def measure_cost(args: argparse.Namespace) -> int:
    from bloomery import SamplingParams

    seconds: dict[bool, list[float]] = {}
    for deterministic in (False, True):
        llm = make_llm(args, deterministic=deterministic, enable_prefix_caching=False)
        vocab_size = llm.capacity.vocab
        seconds[deterministic] = []
        for name in args.work:
            prompts, output_lens = build_workload(name, vocab_size)
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
            params = [
                SamplingParams(
                    temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False
                )
                for length in output_lens
            ]
            best = float("inf")
            for _ in range(3):  # the first run warms up
                start = time.perf_counter()
                llm.generate(inputs, params, use_tqdm=False)
                best = min(best, time.perf_counter() - start)
            seconds[deterministic].append(best)
            row = {"work": name, "deterministic": deterministic, "s": round(best, 4)}
            print(json.dumps(row), flush=True)
        del llm
    for name, without, with_mode in zip(args.work, seconds[False], seconds[True], strict=True):
        row = {
            "work": name,
            "s": round(without, 4),
            "deterministic_s": round(with_mode, 4),
            "times": round(with_mode / without, 2),
        }
        print(json.dumps(row))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("check", "cost"))
    parser.add_argument("work", nargs="*", help="workloads of `cost`")
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_intermixed_args()
    return check(args) if args.what == "check" else measure_cost(args)


if __name__ == "__main__":
    sys.exit(main())
