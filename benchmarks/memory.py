"""Start-up time, and whether the engine keeps to --gpu-memory-utilization.

    PYTHONPATH=src python3 benchmarks/memory.py llama-1b [--gpu-memory-utilization 0.9]
        [--option kv_cache_dtype=fp8] [--num-streams 256]

Weights are random, and the KV cache takes all the memory it may have. First the benchmark prints
the seconds until the engine is ready, which is when all CUDA graphs are captured, and whether its
first request is as fast as the second one; tokens with and without graphs must agree. Then it runs
the largest batches there can be: all sequences with all sampling options, prompt logprobs,
embeddings, and the longest prompt beside many streams. It fails if the peak memory of the device is
above the share, or if anything runs out of memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from offline import SHAPES, parse_value

SMALL_SHAPES = {
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


# (prompt length, max_tokens, sampling options)
RequestSpec = tuple[int, int, dict[str, Any]]


class MemoryBenchmark:
    """An engine with random weights, whose KV cache takes all the memory it may have."""

    def __init__(
        self, shape: dict[str, Any], options: dict[str, Any], gpu_memory_utilization: float
    ):
        import torch

        from bloomery.config import EngineConfig
        from bloomery.describe import build_engine_plan
        from bloomery.engine.block_pool import BlockPool
        from bloomery.engine.loop import EngineLoop
        from bloomery.engine.scheduler import Scheduler
        from bloomery.executors.local import LocalExecutor

        folder = Path(tempfile.mkdtemp()) / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(shape))
        self.torch = torch
        self.executor = LocalExecutor()
        self.num_requests = 0
        config = EngineConfig(
            str(folder),
            load_format="dummy",
            prefix_cache=False,
            gpu_memory_utilization=gpu_memory_utilization,
            **options,
        )
        start = time.perf_counter()
        self.plan, _ = build_engine_plan(config)
        capacity = self.executor.start(self.plan)
        self.capacity = capacity
        self.ready_seconds = time.perf_counter() - start
        block_pool = BlockPool(capacity.blocks, capacity.block_size, False, capacity.cache_groups)
        scheduler = Scheduler(block_pool, capacity.max_num_batched_tokens, capacity.max_num_seqs)
        self.loop = EngineLoop(scheduler, self.executor, self.plan.steps_in_flight)

    def peak_share(self) -> float:
        """Peak share of the device's memory in use.

        It is the allocator's peak, plus the memory that CUDA and other processes hold.
        """
        cuda = self.torch.cuda
        free, total = cuda.mem_get_info()
        outside_allocator = total - free - cuda.memory_reserved()
        return float((cuda.max_memory_reserved() + outside_allocator) / total)

    def run(self, specs: list[RequestSpec]) -> list[list[int]]:
        """Run requests to their end and return their tokens."""
        from bloomery.messages import EngineRequest, ResolvedSampling

        tokens: dict[str, list[int]] = {}
        for prompt_len, max_tokens, options in specs:
            self.num_requests += 1
            request_id = str(self.num_requests)
            pooling = options.get("pooling")
            sampling_options = {name: options[name] for name in options if name != "pooling"}
            prompt = tuple((i * 7919 + prompt_len) % self.capacity.vocab for i in range(prompt_len))
            sampling = ResolvedSampling(**sampling_options)
            self.loop.add(EngineRequest(request_id, prompt, sampling, max_tokens, pooling=pooling))
            tokens[request_id] = []
        while self.loop.busy:
            for output in self.loop.step():
                tokens[output.request] += output.ids
                if output.error:
                    raise SystemExit(f"failed: {output.error}")
        return list(tokens.values())


def measure_startup(benchmark: MemoryBenchmark) -> None:
    """Print the times of a start, and whether CUDA graphs change any token."""
    from bloomery.runtime.runner import EagerRunner

    specs: list[RequestSpec] = [(32, 24, {"temperature": 0.0})] * 4
    start = time.perf_counter()
    benchmark.run(specs[:1])
    first_seconds = time.perf_counter() - start
    start = time.perf_counter()
    benchmark.run(specs[:1])
    second_seconds = time.perf_counter() - start
    graph_tokens = benchmark.run(specs)
    runner = benchmark.executor.worker.runner
    work_runner = runner.work_runner
    runner.work_runner = EagerRunner()
    same = benchmark.run(specs) == graph_tokens
    runner.work_runner = work_runner
    print(
        f"ready in {benchmark.ready_seconds:.1f} s; the first request takes "
        f"{1e3 * first_seconds:.0f} ms, the second one {1e3 * second_seconds:.0f} ms; "
        f"without graphs, tokens {'are the same' if same else 'DIFFER'}",
        flush=True,
    )


def largest_batches(
    benchmark: MemoryBenchmark, num_streams: int
) -> list[tuple[str, list[RequestSpec]]]:
    """(name, requests) of the batches that need the most memory."""
    max_num_seqs = benchmark.capacity.max_num_seqs
    max_step_tokens = benchmark.capacity.max_num_batched_tokens
    max_model_len = benchmark.capacity.max_model_len
    all_options = {
        "temperature": 0.9,
        "top_p": 0.95,
        "min_p": 0.01,
        "typical_p": 0.95,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "logprobs": 20,
    }
    prompt_logprobs = {"temperature": 0.0, "prompt_logprobs": 20}
    prompt_len = min(max_step_tokens, max_model_len - 8)
    stream: RequestSpec = (64, 6, all_options)
    every_sequence: RequestSpec = (max(max_step_tokens // max_num_seqs, 1), 6, all_options)
    scored_prompt: RequestSpec = (min(prompt_len, 1024), 2, prompt_logprobs)
    embedding: RequestSpec = (
        min(max_model_len - 1, max_step_tokens // 2),
        1,
        {"pooling": "mean"},
    )
    longest_prompt: RequestSpec = (min(max_model_len, 65536) - 4, 4, all_options)
    full_step: RequestSpec = (prompt_len, 2, {})
    num_full_steps = min(max_num_seqs, 4 * -(-max_step_tokens // prompt_len))
    return [
        ("all sampling options", [every_sequence] * max_num_seqs),
        ("options and prompt logprobs", [stream] * (max_num_seqs - 1) + [scored_prompt]),
        ("embeddings", [embedding] * 4),
        ("the longest prompt", [stream] * min(max_num_seqs - 1, num_streams) + [longest_prompt]),
        ("full steps", [full_step] * num_full_steps),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=[*SHAPES, *SMALL_SHAPES])
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument(
        "--num-streams", type=int, default=64, help="streams beside the longest prompt"
    )
    parser.add_argument(
        "--option", action="append", default=[], help="NAME=VALUE of the configuration"
    )
    args = parser.parse_args()
    pairs = (option.split("=", 1) for option in args.option)
    options = {name: parse_value(value) for name, value in pairs}
    max_share = args.gpu_memory_utilization
    benchmark = MemoryBenchmark((SHAPES | SMALL_SHAPES)[args.shape], options, max_share)
    capacity = benchmark.capacity
    kv_cache_gib = capacity.kv_bytes / 2**30
    print(f"{args.shape}: KV cache {kv_cache_gib:.1f} GiB, at most {capacity.max_model_len} tokens")
    measure_startup(benchmark)
    is_within_share = True
    for name, specs in largest_batches(benchmark, args.num_streams):
        benchmark.torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        benchmark.run(specs)
        seconds = time.perf_counter() - start
        share = benchmark.peak_share()
        is_within_share = is_within_share and share <= max_share
        print(f"{name:28} {seconds:6.2f} s, peak {share:.4f} of the device", flush=True)
    print("within the share" if is_within_share else f"ABOVE THE SHARE of {max_share}")
    sys.exit(not is_within_share)


if __name__ == "__main__":
    main()
