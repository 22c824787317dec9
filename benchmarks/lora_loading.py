"""What running streams notice of LoRA adapters that are loaded meanwhile.

    PYTHONPATH=src:. python3 benchmarks/lora_loading.py llama-8b --loads 100 --streams 32

Runs streams, half of them with adapters, and loads other adapters from disk. Prints the inter-token
latency without loads and during the loads: median, 99th percentile and longest gap. The longest gap
during the loads should be at most twice the longest one without.

At last the first adapter that changes the head is loaded and used by another stream, whose steps
launch kernels that no step has launched before.

Weights and adapters are random and have real shapes: the adapters change all linear layers. Only
--files different ones are written; the others are links to them. For a CPU: llama-1b --layers 2
--rank 8 --streams 4.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.offline import SHAPES
from bloomery import AsyncLLM, LoRARequest, SamplingParams
from bloomery.messages import AdapterInfo

PROMPT_TOKENS = 64
WARMUP_SECONDS = 2.0


# ---- the model and its adapters ------------------------------------------------------------------


def linear_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The inputs and outputs of the linear layers of a Llama layer."""
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    return {
        "self_attn.q_proj": (hidden, query),
        "self_attn.k_proj": (hidden, key),
        "self_attn.v_proj": (hidden, key),
        "self_attn.o_proj": (query, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }


def write_adapters(folder: Path, config: dict[str, Any], args: argparse.Namespace) -> list[Path]:
    """Write --files random adapters, and links to them until there are --loads folders."""
    shapes = linear_shapes(config)
    settings = {
        "peft_type": "LORA",
        "r": args.rank,
        "lora_alpha": 2 * args.rank,
        "target_modules": [name.partition(".")[2] for name in shapes],
        "bias": "none",
    }
    paths = []
    for number in range(args.loads):
        path = folder / f"adapter{number}"
        path.mkdir()
        (path / "adapter_config.json").write_text(json.dumps(settings))
        weights = path / "adapter_model.safetensors"
        paths.append(path)
        if number >= args.files:
            weights.symlink_to(paths[number % args.files] / weights.name)
            continue
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            for name, (inputs, outputs) in shapes.items():
                prefix = f"base_model.model.model.layers.{layer}.{name}"
                down = torch.randn(args.rank, inputs, dtype=torch.bfloat16)
                up = torch.randn(outputs, args.rank, dtype=torch.bfloat16)
                tensors[f"{prefix}.lora_A.weight"] = down / 100
                tensors[f"{prefix}.lora_B.weight"] = up / 100
        save_file(tensors, weights)
    return paths


def write_head_adapter(folder: Path, config: dict[str, Any], rank: int) -> Path:
    """Write a random adapter of the head alone."""
    path = folder / "head"
    path.mkdir()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["lm_head"]}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    name = "base_model.model.lm_head"
    tensors = {
        f"{name}.lora_A.weight": torch.randn(rank, config["hidden_size"]) / 100,
        f"{name}.lora_B.weight": torch.randn(config["vocab_size"], rank) / 100,
    }
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def create_engine(folder: Path, config: dict[str, Any], args: argparse.Namespace) -> AsyncLLM:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    options = dict(option.split("=", 1) for option in args.option)
    return AsyncLLM(
        str(model),
        skip_tokenizer_init=True,
        load_format="dummy",
        enable_lora=True,
        max_loras=args.slots,
        max_lora_rank=args.rank,
        max_cpu_loras=args.host,
        max_model_len=4096,
        progress=True,
        **{name: json.loads(value) for name, value in options.items()},
    )


def load_adapter(engine: AsyncLLM, path: Path) -> Future[AdapterInfo]:
    loading = engine.client.load_adapter(f"load-{path.name}", str(path))
    return asyncio.run_coroutine_threadsafe(loading, engine.client_loop)


class GapRecorder:
    """The times between the tokens of all streams, in seconds."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self.num_started = 0  # streams with a token

    async def follow(self, tokens: AsyncIterator[Any]) -> None:
        last = 0.0
        async with aclosing(tokens) as deltas:  # type: ignore[type-var]
            async for _ in deltas:
                now = time.perf_counter()
                if last:
                    self.gaps.append(now - last)
                else:
                    self.num_started += 1
                last = now

    def take(self) -> list[float]:
        gaps = sorted(self.gaps)
        self.gaps = []
        return gaps


def describe_gaps(gaps: Sequence[float]) -> dict[str, float]:
    milliseconds = {
        "median_ms": median(gaps),
        "p99_ms": gaps[len(gaps) * 99 // 100],
        "p99_9_ms": gaps[len(gaps) * 999 // 1000],
        "longest_ms": gaps[-1],
    }
    return {name: round(1e3 * seconds, 2) for name, seconds in milliseconds.items()}


async def measure_stalls(
    engine: AsyncLLM, paths: list[Path], head: Path, args: argparse.Namespace
) -> None:
    rng = Random(0)
    recorder = GapRecorder()
    params = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True, detokenize=False)
    streams = []
    for number in range(args.streams):
        adapter = None
        if number % 2:  # half of the streams have an adapter
            index = number // 2 % max(args.slots - 1, 1)
            adapter = LoRARequest(f"stream{index}", index + 1, str(paths[index]))
        prompt = [rng.randrange(3, 1000) for _ in range(PROMPT_TOKENS)]
        tokens = engine.stream(prompt, params, adapter)
        streams.append(asyncio.create_task(recorder.follow(tokens)))
    while recorder.num_started < args.streams:
        await asyncio.sleep(0.1)
    await asyncio.sleep(WARMUP_SECONDS)
    recorder.take()
    rounds = []
    # Quiet spans before and after: a machine is never quite the same twice.
    for number in range(2 * args.rounds + 1):
        begin = time.perf_counter()
        if number % 2 == 0:
            await asyncio.sleep(args.seconds)
            rounds.append({"loads": 0, **describe_gaps(recorder.take())})
        else:
            loads = [load_adapter(engine, path) for path in paths[: args.loads]]
            infos = await asyncio.gather(*map(asyncio.wrap_future, loads))
            seconds = time.perf_counter() - begin
            gaps = describe_gaps(recorder.take())
            mib = sum(info.num_bytes for info in infos) / 2**20
            rounds.append({"loads": len(infos), **gaps, "seconds": round(seconds, 2), "mib": mib})
            for path in paths[: args.loads]:
                name = f"load-{path.name}"
                engine.client_loop.call_soon_threadsafe(engine.client.unload_adapter, name)
        print(json.dumps(rounds[-1]), flush=True)
    begin = time.perf_counter()
    adapter = LoRARequest("head", 10_000, str(head))
    prompt = [rng.randrange(3, 1000) for _ in range(PROMPT_TOKENS)]
    streams.append(asyncio.create_task(recorder.follow(engine.stream(prompt, params, adapter))))
    while recorder.num_started <= args.streams:
        await asyncio.sleep(0.1)
    seconds = round(time.perf_counter() - begin, 2)
    await asyncio.sleep(args.seconds)
    print(json.dumps({"first_head": True, "ttft": seconds, **describe_gaps(recorder.take())}))
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    usual = max(entry["longest_ms"] for entry in rounds if not entry["loads"])
    loading = max(entry["longest_ms"] for entry in rounds if entry["loads"])
    print(json.dumps({"longest_gap_ratio": round(loading / usual, 2), "promise": 2.0}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shape", choices=[name for name in SHAPES if name.startswith("llama")])
    parser.add_argument("--layers", type=int, help="default: those of the shape")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--host", type=int, default=64, help="adapters in host memory")
    parser.add_argument("--files", type=int, default=4, help="different files on the disk")
    parser.add_argument("--loads", type=int, default=100)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a span without loads")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON")
    args = parser.parse_args()
    config = dict(SHAPES[args.shape])
    if args.layers is not None:
        config["num_hidden_layers"] = args.layers
    with tempfile.TemporaryDirectory() as folder:
        paths = write_adapters(Path(folder), config, args)
        head = write_head_adapter(Path(folder), config, args.rank)
        engine = create_engine(Path(folder), config, args)
        try:
            asyncio.run(measure_stalls(engine, paths, head, args))
        finally:
            engine.close()


if __name__ == "__main__":
    main()
