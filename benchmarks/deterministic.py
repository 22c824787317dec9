"""Deterministic mode: that it keeps its word, and what it costs. On a GPU with random weights, on a CPU with any model.

    PYTHONPATH=src python3 benchmarks/deterministic.py check --shape llama-1b [--prompts 48] [--dtype bfloat16]
    PYTHONPATH=src python3 benchmarks/deterministic.py cost fixed:1:128:64 fixed:64:128:64 prefill:4096 --shape llama-8b
    PYTHONPATH=src python3 benchmarks/deterministic.py check --model PATH --device cpu      (or: --model embedded)

check: every prompt alone is the reference; then in batches of 7, all at once, in chunks, behind a warm prefix cache and
in a cache so small that sequences are preempted: tokens and the log-probabilities of the best five must be equal to the
last bit. cost: the same work with and without, seconds and the ratio, best of two.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.offline import SHAPES, workload

Answer = list[tuple[list[int], list[Any]]]


def llm(args: argparse.Namespace, **options: Any) -> Any:
    from bloomery import LLM

    gc.collect()
    common = {
        "skip_tokenizer_init": True,
        "device": args.device,
        "max_model_len": 8192,
        "max_num_seqs": args.sequences,
    }
    options = {**common, **options}
    if args.dtype:
        options["dtype"] = args.dtype
    if args.model:
        return LLM(
            None if args.model == "embedded" else args.model,
            **{**options, "max_model_len": min(options["max_model_len"], 2048)},
        )
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(SHAPES[args.shape]))
    return LLM(str(folder), load_format="dummy", **options)


def worker_of(model: Any) -> Any:
    executor = model.front.stack.executor
    return getattr(executor, "executor", executor).worker


def answers(model: Any, prompts: list[list[int]], params: list[Any]) -> Answer:
    found = model.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    return [
        (
            list(out.outputs[0].token_ids),
            [
                sorted((id, entry.logprob) for id, entry in step.requests())
                for step in out.outputs[0].logprobs or ()
            ],
        )
        for out in found
    ]


def check(args: argparse.Namespace) -> int:
    from bloomery import SamplingParams

    chance = random.Random(1)
    model = llm(args, deterministic=True, enable_prefix_caching=False)
    vocab = model.front.stack.capacity.vocab
    stem = [chance.randrange(10, vocab - 10) for _ in range(200)]
    prompts = [
        stem[: chance.choice([0, 200])]
        + [chance.randrange(10, vocab - 10) for _ in range(chance.randrange(1, 300))]
        for _ in range(args.prompts)
    ]
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
    grain = worker_of(model).model.grain
    want = [answers(model, [prompt], [params[i]])[0] for i, prompt in enumerate(prompts)]
    bad = 0

    def compare(name: str, got: Answer) -> None:
        nonlocal bad
        wrong = sum(one != other for one, other in zip(got, want, strict=True))
        tokens = sum(one[0] != other[0] for one, other in zip(got, want, strict=True))
        bad += wrong
        print(
            json.dumps(
                {"way": name, "requests": len(got), "differ": wrong, "tokens_differ": tokens}
            ),
            flush=True,
        )

    print(json.dumps({"tile": grain, "prompts": len(prompts), "tokens": args.tokens}), flush=True)
    compare(
        "alone again",
        [answers(model, [prompt], [params[i]])[0] for i, prompt in enumerate(prompts)],
    )
    sevens = range(0, len(prompts), 7)
    compare(
        "batches of 7",
        [one for i in sevens for one in answers(model, prompts[i : i + 7], params[i : i + 7])],
    )
    compare("all at once", answers(model, prompts, params))
    del model
    warm = llm(args, deterministic=True, enable_prefix_caching=True, max_num_batched_tokens=61)
    compare("chunks of 61", answers(warm, prompts, params))
    compare("warm prefixes", answers(warm, prompts, params))
    worker = worker_of(warm)
    bytes_a_block = worker.capacity.kv_bytes / worker.capacity.blocks
    size = worker.capacity.block_size
    del warm, worker
    room = 3 * (500 + args.tokens) // size * bytes_a_block / 2**30
    tight = llm(
        args,
        deterministic=True,
        enable_prefix_caching=True,
        kv_cache_gib=room,
        max_model_len=500 + args.tokens,
    )
    compare("preempted", answers(tight, prompts, params))
    print(json.dumps({"preemptions": tight.front.stack.loop.scheduler.preemptions}))
    del tight
    kept = not bad
    plain = llm(args, enable_prefix_caching=False)
    compare("without the mode, all at once", answers(plain, prompts, params))
    print("the last line is for comparison; all others must have 0 that differ")
    return 0 if kept else 1


def cost(args: argparse.Namespace) -> int:
    from bloomery import SamplingParams

    spent: dict[bool, list[float]] = {}
    for mode in (False, True):
        model = llm(args, deterministic=mode, enable_prefix_caching=False)
        vocab = model.front.stack.capacity.vocab
        spent[mode] = []
        for name in args.work:
            prompts, outs = workload(name, vocab)
            params = [
                SamplingParams(temperature=0.0, max_tokens=o, ignore_eos=True, detokenize=False)
                for o in outs
            ]
            best = float("inf")
            for _ in range(3):  # the first warms up
                begun = time.perf_counter()
                model.generate(
                    [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
                )
                best = min(best, time.perf_counter() - begun)
            spent[mode].append(best)
            print(
                json.dumps({"work": name, "deterministic": mode, "s": round(best, 4)}), flush=True
            )
        del model
    for name, without, with_it in zip(args.work, spent[False], spent[True], strict=True):
        print(
            json.dumps(
                {
                    "work": name,
                    "s": round(without, 4),
                    "deterministic_s": round(with_it, 4),
                    "times": round(with_it / without, 2),
                }
            )
        )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("check", "cost"))
    parser.add_argument("work", nargs="*")
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_intermixed_args()
    return check(args) if args.what == "check" else cost(args)


if __name__ == "__main__":
    sys.exit(main())
