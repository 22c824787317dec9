"""Start-up and the promise of --memory: ready before graphs are captured, and no batch takes more than its share.

    PYTHONPATH=src python3 benchmarks/memory.py llama-1b [--memory 0.9] [--option kv_cache_dtype=fp8] [--wide 256]

Random weights; the cache takes all the memory there may be. First what a server does: the engine answers at once, and
captures in between; told are the seconds until it is ready, until a first token, and how long a capture keeps others
waiting; tokens before and after must agree. Then the largest batches there can be: every sequence at once asking for
all that sampling knows, prompts scored, embeddings, the longest prompt beside many streams. Peak is the card's, all
in all; it fails if that is more than the share, or if anything runs out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from offline import SHAPES, number

SMALL = {
    "bloom-small": SHAPES["bloom-7b"] | {"hidden_size": 2048, "n_layer": 4, "n_head": 32},
    "mixtral-small": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 2048,
        "head_dim": 64,
        "intermediate_size": 4096,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
    "llama-small": SHAPES["llama-1b"] | {"num_hidden_layers": 4},
}


class Trial:
    def __init__(self, shape: dict, options: dict, memory: float):
        import torch

        from bloomery.config import Config
        from bloomery.describe import plan_for
        from bloomery.engine.blocks import Blocks
        from bloomery.engine.loop import Loop
        from bloomery.engine.scheduler import Scheduler
        from bloomery.executors.local import Local

        folder = Path(tempfile.mkdtemp()) / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(shape))
        self.torch = torch
        self.executor = Local()
        self.worst = 0
        self.count = 0
        config = Config(
            str(folder), load_format="dummy", prefix_cache=False, memory=memory, **options
        )
        begun = time.perf_counter()
        self.plan, _ = plan_for(config)
        self.capacity = capacity = self.executor.start(self.plan)
        self.ready = time.perf_counter() - begun
        blocks = Blocks(capacity.blocks, capacity.block_size, False)
        scheduler = Scheduler(blocks, capacity.max_num_batched_tokens, capacity.max_num_seqs)
        self.loop = Loop(scheduler, self.executor, self.plan.depth)

    def used(self) -> int:
        """The card's, at its peak: the allocator's own peak and what others have taken beside it."""
        free, self.total = self.torch.cuda.mem_get_info()
        beside = self.total - free - self.torch.cuda.memory_reserved()
        return self.torch.cuda.max_memory_reserved() + beside

    def run(
        self, asked: list[tuple[int, int, dict]], spare: bool = False
    ) -> tuple[list[list[int]], float]:
        """(prompt's length, tokens, wishes) each; what came, and the longest silence between two steps."""
        from bloomery.messages import EngineRequest, ResolvedSampling

        found = {}
        vocab = self.capacity.vocab
        for length, tokens, wishes in asked:
            self.count += 1
            pooling = wishes.get("pooling")
            sampling = ResolvedSampling(
                **{name: value for name, value in wishes.items() if name != "pooling"}
            )
            prompt = tuple((i * 7919 + length) % vocab for i in range(length))
            self.loop.add(EngineRequest(str(self.count), prompt, sampling, tokens, pooling=pooling))
            found[str(self.count)] = []
        last = time.perf_counter()
        silence = 0.0
        while self.loop.busy:
            if spare:
                self.loop.spare()
            for news in self.loop.step():
                found[news.request] += news.ids
                if news.error:
                    raise SystemExit(f"failed: {news.error}")
            now = time.perf_counter()
            last, silence = now, max(silence, now - last)
        return list(found.values()), silence


def prepared(trial: Trial) -> None:
    few = [(32, 24, {"temperature": 0.0})] * 4
    begun = time.perf_counter()
    trial.run([(32, 1, {"temperature": 0.0})])
    first = time.perf_counter() - begun
    plain, calm = trial.run(few)
    plain, calm = trial.run(few)
    free = trial.torch.cuda.mem_get_info()[0]
    between, stalled = trial.run(few, spare=True)
    begun = time.perf_counter()
    count = 0
    while trial.loop.left:
        trial.loop.spare()
        count += 1
    trial.torch.cuda.synchronize()
    rest = time.perf_counter() - begun
    taken = free - trial.torch.cuda.mem_get_info()[0]
    after, _ = trial.run(few)
    same = plain == between == after
    print(
        f"ready {trial.ready:.1f} s, first token {first:.2f} s after; longest silence {1e3 * calm:.0f} ms, "
        f"among captures {1e3 * stalled:.0f} ms; {count} captures more in {rest:.1f} s; "
        f"all take {taken / 2**30:.2f} GiB; tokens {'the same' if same else 'DIFFER'}",
        flush=True,
    )


def batches(trial: Trial, wide: int) -> list[tuple[str, list[tuple[int, int, dict]]]]:
    capacity = trial.capacity
    many = capacity.max_num_seqs
    step = capacity.max_num_batched_tokens
    longest = capacity.max_length
    all_of_it = {
        "temperature": 0.9,
        "top_p": 0.95,
        "min_p": 0.01,
        "typical_p": 0.95,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "logprobs": 20,
    }
    scored = {"temperature": 0.0, "prompt_logprobs": 20}
    prompt = min(step, longest - 8)
    return [
        ("every wish at once", [(max(step // many, 1), 6, all_of_it)] * many),
        (
            "wishes and scored prompts",
            [(64, 6, all_of_it)] * (many - 1) + [(min(prompt, 1024), 2, scored)],
        ),
        ("embeddings", [(min(longest - 1, step // 2), 1, {"pooling": "mean"})] * 4),
        (
            "the longest prompt",
            [(64, 6, all_of_it)] * min(many - 1, wide) + [(min(longest, 65536) - 4, 4, all_of_it)],
        ),
        ("full steps", [(prompt, 2, {})] * min(many, 4 * -(-step // prompt))),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=[*SHAPES, *SMALL])
    parser.add_argument("--memory", type=float, default=0.9)
    parser.add_argument("--wide", type=int, default=64, help="streams beside the longest prompt")
    parser.add_argument(
        "--option", action="append", default=[], help="NAME=VALUE of the configuration"
    )
    args = parser.parse_args()
    options = {name: number(value) for name, value in (pair.split("=", 1) for pair in args.option)}
    trial = Trial((SHAPES | SMALL)[args.shape], options, args.memory)
    capacity = trial.capacity
    print(
        f"{args.shape}: cache {capacity.kv_bytes / 2**30:.1f} GiB, sequences of at most {capacity.max_length}"
    )
    prepared(trial)
    good = True
    for name, asked in batches(trial, args.wide):
        trial.torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        trial.run(asked)
        share = trial.used() / trial.total
        good = good and share <= args.memory
        print(
            f"{name:28} {time.perf_counter() - begun:6.2f} s, peak {share:.4f} of the card",
            flush=True,
        )
    print("holds" if good else f"DOES NOT HOLD: more than {args.memory}")
    sys.exit(not good)


if __name__ == "__main__":
    main()
