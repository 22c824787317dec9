"""The whole engine through the offline API on one GPU: random weights of real shapes, token ids in and out.

    PYTHONPATH=src python3 benchmarks/offline.py llama-8b fixed:1:32:256 fixed:64:128:256 mixed:256 prefill:8192

fixed:BATCH:IN:OUT, mixed:N (in and out uniform 100..1024), prefill:N (one prompt, one token). ms/step is all the time
over the output length, prompts included; idle is the share of its time for which the card waited for the host, by the
live meter. --quantize FORMAT rounds the weights while loading; peak_gib is read with
--option kv_cache_gib=0.5, or the cache takes what there is.
Floor: bytes of the weights and of the keys and values each step reads, over
the rate at which this card copies, or operations over the rate of a large product, both measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

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
SHAPES = {
    "llama-8b": LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "llama-1b": LLAMA
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    | {"head_dim": 64, "tie_word_embeddings": True},
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


def workload(name: str, vocab: int) -> tuple[list[list[int]], list[int]]:
    chance = random.Random(0)

    def ids(count: int) -> list[int]:
        return [chance.randrange(10, vocab - 10) for _ in range(count)]

    kind, *numbers = name.split(":")
    if kind == "fixed":
        batch, length, out = map(int, numbers)
        return [ids(length) for _ in range(batch)], [out] * batch
    if kind == "mixed":
        count = int(numbers[0])
        return [ids(chance.randint(100, 1024)) for _ in range(count)], [
            chance.randint(100, 1024) for _ in range(count)
        ]
    if kind == "prefill":
        return [ids(int(numbers[0]))], [1]
    raise SystemExit(f"unknown work {name!r}: fixed:BATCH:IN:OUT, mixed:N or prefill:N")


def rates() -> tuple[float, float]:
    """Bytes a second of a copy and operations a second of a bf16 product, on this card, now."""
    import torch

    def seconds(work, repeat: int = 10) -> float:
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

    a = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)
    copy = 2 * a.nbytes / seconds(lambda: b.copy_(a))
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = 2 * 8192**3 / seconds(lambda: x @ x)
    return copy, product


def floor(llm, prompts: list[list[int]], outs: list[int], copy: float, product: float) -> float:
    """Seconds: each prompt position's operations, then a pass over weights and cache for every step."""
    from bloomery.roofline import parameters

    decoder = llm.front.stack.executor.worker.decoder
    spec = decoder.spec
    capacity = llm.front.stack.capacity
    per_token = sum(2 * l.attention.num_kv_heads * l.attention.head_dim * 2 for l in spec.layers)
    embed = 0 if spec.tied else decoder.embed.matrix.nbytes
    weights = capacity.weights_bytes - embed
    count = parameters(spec)
    body = count.matrices + count.experts
    attention = sum(4 * l.attention.num_heads * l.attention.head_dim for l in spec.layers)
    total = sum(2 * body * len(p) + attention * len(p) ** 2 / 2 for p in prompts) / product
    for step in range(1, max(outs)):
        alive = [len(p) + step for p, out in zip(prompts, outs, strict=True) if out > step]
        bytes_moved = weights + per_token * sum(alive)
        operations = 2 * (body + spec.vocab * spec.hidden) * len(alive)
        total += max(bytes_moved / copy, operations / product + per_token * sum(alive) / copy)
    return total


def number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("work", nargs="+")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--quantize", default="auto")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE for LLM(...)")
    args = parser.parse_args()
    import torch

    from bloomery import LLM, SamplingParams
    from bloomery.messages import StepTiming

    copy, product = rates()
    torch.cuda.empty_cache()
    print(
        f"{args.shape}: copies at {copy / 1e12:.2f} TB/s, multiplies at {product / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    folder = Path(tempfile.mkdtemp()) / args.shape
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES[args.shape]))
    options: dict[str, int | float | str] = {"quantize": args.quantize}
    options |= {name: number(value) for name, value in (pair.split("=", 1) for pair in args.option)}
    begun = time.time()
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        **options,
    )
    capacity = llm.front.stack.capacity
    print(
        json.dumps(
            {
                "shape": args.shape,
                "quantize": args.quantize,
                "startup_s": round(time.time() - begun, 1),
            }
            | {"weights_gib": round(capacity.weights_bytes / 2**30, 2)}
        ),
        flush=True,
    )

    loop = llm.front.stack.loop

    def run(prompts: list[list[int]], outs: list[int]) -> tuple[float, int, float]:
        """Seconds, tokens, and the share of its time for which the card waited for the host."""
        params = [
            SamplingParams(temperature=0.0, max_tokens=o, ignore_eos=True, detokenize=False)
            for o in outs
        ]
        loop.timing = StepTiming()
        started = time.time()
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        spent = time.time() - started
        timing = loop.timing
        idle = timing.idle / max(timing.idle + timing.device, 1e-9)
        return spent, sum(len(out.outputs[0].token_ids) for out in outputs), idle

    run([[11] * 64] * 4, [8] * 4)
    for name in args.work:
        prompts, outs = workload(name, SHAPES[args.shape]["vocab_size"])
        spent, count, idle = min(
            (run(prompts, outs) for _ in range(args.repeat)), key=lambda found: found[0]
        )
        least = floor(llm, prompts, outs, copy, product)
        row = {
            "shape": args.shape,
            "quantize": args.quantize,
            "work": name,
            "s": round(spent, 4),
            "tok_s": round(count / spent, 1),
            "ms_step": round(1000 * spent / max(outs), 3),
            "floor_ms_step": round(1000 * least / max(outs), 3),
            "share": round(least / spent, 3),
            "idle": round(idle, 4),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
