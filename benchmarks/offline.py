"""Offline throughput on one GPU: random weights of real shapes, token ids in and out.

    PYTHONPATH=src python3 benchmarks/offline.py llama-8b fixed:1:32:256 fixed:64:128:256 \
        mixed:256 prefill:8192 decode:16:32000:64

Workloads: fixed:BATCH:IN:OUT, mixed:N (lengths of prompt and output uniform in 100..1024),
mixedlong:N (prompts of 1,000 to 8,000 and outputs of 50 to 400 tokens), prefill:N (one prompt of N
tokens, one output token), decode:BATCH:IN:STEPS (like fixed, but only STEPS decode steps are timed,
after all prompts have their first token).

Prints one JSON line per workload. `ms_step` is the whole time over the output length, prefill
included. `idle` is the share of the time in which the GPU waited for the host, by the step meter.
`floor_ms_step` is bytes of weights and KV cache over the rate at which this GPU copies, or
operations over the rate of a large matrix product, both measured in the same run. --profile runs
every workload once more under torch's profiler and prints where the GPU's time went.

--quantization FORMAT quantizes the weights while loading. Use --option kv_cache_gib=0.5 for a
meaningful `peak_gib`: otherwise the KV cache takes all memory.

--engine vllm runs the same workloads in vLLM, where it is installed, for a comparison on the same
machine. Only the times are printed then.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "initial_context_length": 4096,
    "sliding_window": 128,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "swiglu_limit": 7.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}


def read_shape(name: str) -> dict[str, Any]:
    """The config.json of a shape that is also used by `bloomery plan`."""
    text = (Path(__file__).parent / "shapes" / f"{name}.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


SHAPES: dict[str, dict[str, Any]] = {
    "gemma-3-27b": read_shape("gemma-3-27b"),
    "qwen3-30b-a3b": read_shape("qwen3-30b-a3b"),
    "qwen3.6-35b-a3b": read_shape("qwen3.6-35b-a3b"),
    "nemotron-3-nano": read_shape("nemotron-3-nano"),
    "lfm2-350m": read_shape("lfm2-350m"),
    "gpt-oss-20b": {**GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "llama-8b": {
        **LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
    },
    "llama-1b": {
        **LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "octocoder": {
        "architectures": ["GPTBigCodeForCausalLM"],
        "model_type": "gpt_bigcode",
        "n_embd": 6144,
        "n_inner": 24576,
        "n_layer": 40,
        "n_head": 48,
        "n_positions": 8192,
        "vocab_size": 49152,
        "multi_query": True,
        "activation_function": "gelu_pytorch_tanh",
        "layer_norm_epsilon": 1e-5,
        "torch_dtype": "bfloat16",
    },
    "bloom-7b": {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "hidden_size": 4096,
        "n_layer": 30,
        "n_head": 32,
        "vocab_size": 250880,
        "layer_norm_epsilon": 1e-5,
        "torch_dtype": "bfloat16",
        "seq_length": 2048,
    },
    "bloom-176b": {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "hidden_size": 14336,
        "n_layer": 70,
        "n_head": 112,
        "vocab_size": 250880,
        "layer_norm_epsilon": 1e-5,
        "torch_dtype": "bfloat16",
        "seq_length": 2048,
    },
}


class OfflineWorkload(NamedTuple):
    """Token ids of the prompts, and the number of output tokens of each."""

    prompts: list[list[int]]
    output_lens: list[int]


class DeviceRates(NamedTuple):
    """Measured rates of this GPU: bytes per second of a copy, operations per second of a matmul."""

    copy: float
    matmul: float


class RunResult(NamedTuple):
    """One run of a workload."""

    seconds: float
    num_tokens: int
    idle_share: float  # of the time, in which the GPU waited for the host


def build_workload(name: str, vocab_size: int) -> OfflineWorkload:
    rng = random.Random(0)

    def random_ids(count: int) -> list[int]:
        return [rng.randrange(10, vocab_size - 10) for _ in range(count)]

    kind, *numbers = name.split(":")
    if kind == "fixed":
        batch, prompt_len, output_len = map(int, numbers)
        return OfflineWorkload([random_ids(prompt_len) for _ in range(batch)], [output_len] * batch)
    if kind == "mixed":
        count = int(numbers[0])
        prompts = [random_ids(rng.randint(100, 1024)) for _ in range(count)]
        return OfflineWorkload(prompts, [rng.randint(100, 1024) for _ in range(count)])
    if kind == "mixedlong":
        count = int(numbers[0])
        prompts = [random_ids(rng.randint(1000, 8000)) for _ in range(count)]
        return OfflineWorkload(prompts, [rng.randint(50, 400) for _ in range(count)])
    if kind == "prefill":
        return OfflineWorkload([random_ids(int(numbers[0]))], [1])
    raise SystemExit(
        f"unknown workload {name!r}: expected fixed:BATCH:IN:OUT, mixed:N, mixedlong:N, prefill:N "
        "or decode:BATCH:IN:STEPS"
    )


def time_on_gpu(work: Callable[[], object], repeat: int = 10) -> float:
    """Mean seconds of `work`, by CUDA events."""
    import torch

    for _ in range(3):
        work()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeat):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / repeat


def measure_rates() -> DeviceRates:
    import torch

    source = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / time_on_gpu(lambda: target.copy_(source))
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    matmul = 2 * 8192**3 / time_on_gpu(lambda: matrix @ matrix)
    return DeviceRates(copy, matmul)


class WorkFloor:
    """The least seconds that prefills and decode steps can take on this GPU.

    A prefill takes its operations. A decode step takes one pass over the weights and the KV cache
    of the running sequences. Of experts, a step reads those that its tokens are routed to, if every
    expert is equally likely.
    """

    def __init__(self, llm: Any, rates: DeviceRates):
        from bloomery.roofline import count_parameters, kv_bytes
        from bloomery.spec import state_parts

        decoder = llm.executor.worker.decoder
        spec = decoder.spec
        self.rates = rates
        self.weights_bytes = llm.capacity.weights_bytes
        if not spec.tied:
            self.weights_bytes -= decoder.embed.matrix.nbytes
        counts = count_parameters(spec)
        self.expert_bytes, self.used_share = measure_experts(decoder)
        self.layer_values = counts.matrices + counts.reread + counts.experts * self.used_share
        # A step reads a block again for every layer that shares it.
        self.weights_bytes += self.weights_bytes * counts.reread // counts.total
        self.head_values = spec.vocab * spec.hidden
        self.pair_operations = sum(
            4 * attention.num_heads * attention.head_dim for attention in spec.attentions
        )
        # A decode step reads and writes the states of recurrent layers, in float32.
        self.state_bytes = 8 * sum(
            part.rows * part.width
            for recurrent in spec.recurrents
            for part in state_parts(recurrent)
        )
        self.bytes_by_length = cache(partial(kv_bytes, spec))

    def prefill_seconds(self, prompt_len: int) -> float:
        num_pairs = prompt_len**2 / 2
        operations = 2 * self.layer_values * prompt_len + self.pair_operations * num_pairs
        return operations / self.rates.matmul

    def decode_seconds(self, seq_lens: list[int]) -> float:
        cache_bytes = sum(self.bytes_by_length(seq_len) for seq_len in seq_lens)
        cache_bytes += len(seq_lens) * self.state_bytes
        unread_bytes = self.expert_bytes * (1 - self.used_share) ** len(seq_lens)
        operations = 2 * (self.layer_values + self.head_values) * len(seq_lens)
        read_seconds = (self.weights_bytes - unread_bytes + cache_bytes) / self.rates.copy
        compute_seconds = operations / self.rates.matmul + cache_bytes / self.rates.copy
        return max(read_seconds, compute_seconds)

    def workload_seconds(self, workload: OfflineWorkload) -> float:
        total = sum(self.prefill_seconds(len(prompt)) for prompt in workload.prompts)
        for step in range(1, max(workload.output_lens)):
            seq_lens = [
                len(prompt) + step
                for prompt, output_len in zip(workload.prompts, workload.output_lens, strict=True)
                if output_len > step
            ]
            total += self.decode_seconds(seq_lens)
        return total


def measure_experts(decoder: Any) -> tuple[int, float]:
    """Bytes of all experts, and the share of them that one token uses."""
    moe_blocks = [layer.mlp for layer in decoder.layers if hasattr(layer.mlp, "experts")]
    num_bytes = sum(block.experts.up.nbytes + block.experts.down.nbytes for block in moe_blocks)
    if not moe_blocks:
        return 0, 0.0
    router = moe_blocks[0].router
    return num_bytes, router.top_k / moe_blocks[0].experts.num_experts


def parse_value(text: str) -> int | float | str:
    for number_type in (int, float):
        try:
            return number_type(text)
        except ValueError:
            continue
    return text


def create_engine(name: str, folder: Path, options: dict[str, Any]) -> Any:
    """An LLM of either engine with random weights of the shape in `folder`."""
    common = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
    }
    if name == "vllm":
        import vllm

        if options.get("quantization") == "auto":
            del options["quantization"]
        limits = {"max_model_len": 16384, "gpu_memory_utilization": 0.85}
        return vllm.LLM(str(folder), disable_log_stats=True, **common, **(limits | options))
    from bloomery import LLM

    return LLM(str(folder), **common, **options)


def run_vllm_workload(llm: Any, workload: OfflineWorkload) -> RunResult:
    import vllm

    params = [
        vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in workload.output_lens
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
    start = time.time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.time() - start
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return RunResult(seconds, num_tokens, 0.0)


def compare_with_vllm(shape: str, folder: Path, options: dict[str, Any], args: Any) -> None:
    """Print the times of the workloads in vLLM."""
    start = time.time()
    llm = create_engine("vllm", folder, options)
    startup = {"engine": "vllm", "shape": shape, "startup_s": round(time.time() - start, 1)}
    print(json.dumps(startup), flush=True)
    run_vllm_workload(llm, OfflineWorkload([[11] * 64] * 4, [8] * 4))  # warm-up
    for name in args.work:
        workload = build_workload(name, SHAPES[shape]["vocab_size"])
        results = [run_vllm_workload(llm, workload) for _ in range(args.repeat)]
        fastest = min(results, key=lambda result: result.seconds)
        row = {
            "engine": "vllm",
            "shape": shape,
            "work": name,
            "s": round(fastest.seconds, 4),
            "tok_s": round(fastest.num_tokens / fastest.seconds, 1),
            "ms_step": round(1000 * fastest.seconds / max(workload.output_lens), 3),
        }
        print(json.dumps(row), flush=True)


def run_workload(llm: Any, workload: OfflineWorkload) -> RunResult:
    from bloomery import SamplingParams
    from bloomery.messages import StepTiming

    params = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in workload.output_lens
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
    loop = llm.loop
    loop.timing = StepTiming()
    start = time.time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.time() - start
    timing = loop.timing
    idle_share = timing.idle / max(timing.idle + timing.device, 1e-9)
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return RunResult(seconds, num_tokens, idle_share)


def time_decode_steps(
    llm: Any, batch: int, prompt_len: int, num_steps: int, profile: bool = False
) -> RunResult:
    """Time decode steps of a batch whose prompts are computed; `profile`: and print kernels."""
    from bloomery.messages import StepTiming
    from bloomery.tools.profile import start_batch, stop_batch

    loop = llm.loop
    # Sequences decode while the prompts of others are computed, and must not end meanwhile.
    num_prefill_steps = -(-batch * prompt_len // llm.capacity.max_num_batched_tokens) + batch
    output_len = num_prefill_steps + 3 * num_steps
    request_ids = start_batch(loop, llm.capacity, batch, prompt_len, output_len)
    for _ in range(num_steps // 4):  # the steps in flight
        loop.step()
    loop.timing = StepTiming()
    start = time.time()
    num_tokens = sum(len(output.ids) for _ in range(num_steps) for output in loop.step())
    seconds = time.time() - start
    timing = loop.timing
    if profile:
        print_kernels(lambda: [loop.step() for _ in range(num_steps)])
    stop_batch(loop, request_ids)
    return RunResult(seconds, num_tokens, timing.idle / max(timing.idle + timing.device, 1e-9))


def print_kernels(work: Callable[[], object]) -> None:
    """Run the work under torch's profiler and print the kernels that took longest."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    averages = profiler.key_averages()
    total = sum(row.self_device_time_total for row in averages)
    print(f"kernels, {total / 1000:.1f} ms in all:")
    for row in sorted(averages, key=lambda row: -row.self_device_time_total)[:18]:
        microseconds = row.self_device_time_total
        print(
            f"  {microseconds / total:6.1%} {microseconds / 1000:9.2f} ms {row.count:6} x "
            f"{microseconds / row.count:9.2f} us  {row.key[:110]}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("work", nargs="+")
    parser.add_argument("--engine", choices=("bloomery", "vllm"), default="bloomery")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="print where the GPU's time went")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE for LLM(...)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp()) / args.shape
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES[args.shape]))
    options: dict[str, Any] = {"quantization": args.quantization}
    for pair in args.option:
        name, _, value = pair.partition("=")
        options[name] = parse_value(value)
    if args.engine == "vllm":
        compare_with_vllm(args.shape, folder, options, args)
        return
    import torch

    rates = measure_rates()
    torch.cuda.empty_cache()
    print(
        f"{args.shape}: copies at {rates.copy / 1e12:.2f} TB/s, "
        f"multiplies at {rates.matmul / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    start = time.time()
    llm = create_engine("bloomery", folder, options)
    weights_gib = llm.capacity.weights_bytes / 2**30
    startup = {
        "shape": args.shape,
        "quantization": args.quantization,
        "startup_s": round(time.time() - start, 1),
        "weights_gib": round(weights_gib, 2),
    }
    print(json.dumps(startup), flush=True)
    run_workload(llm, OfflineWorkload([[11] * 64] * 4, [8] * 4))  # warm-up
    floor = WorkFloor(llm, rates)
    for name in args.work:
        kind, *numbers = name.split(":")
        work: Callable[[], RunResult]
        if kind == "decode":
            batch, prompt_len, num_steps = map(int, numbers)
            work = partial(time_decode_steps, llm, batch, prompt_len, num_steps, args.profile)
            middle = prompt_len + num_steps // 2
            floor_seconds = num_steps * floor.decode_seconds([middle] * batch)
        else:
            workload = build_workload(name, SHAPES[args.shape]["vocab_size"])
            num_steps = max(workload.output_lens)
            work = partial(run_workload, llm, workload)
            floor_seconds = floor.workload_seconds(workload)
        results = [work() for _ in range(args.repeat)]
        fastest = min(results, key=lambda result: result.seconds)
        row = {
            "shape": args.shape,
            "quantization": args.quantization,
            "work": name,
            "s": round(fastest.seconds, 4),
            "tok_s": round(fastest.num_tokens / fastest.seconds, 1),
            "ms_step": round(1000 * fastest.seconds / num_steps, 3),
            "floor_ms_step": round(1000 * floor_seconds / num_steps, 3),
            "share": round(floor_seconds / fastest.seconds, 3),
            "idle": round(fastest.idle_share, 4),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        }
        print(json.dumps(row), flush=True)
        if args.profile and kind != "decode":
            print_kernels(work)


if __name__ == "__main__":
    main()
