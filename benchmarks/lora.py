"""What LoRA adapters cost on one GPU, with random weights of a real shape.

    PYTHONPATH=src:. python3 benchmarks/lora.py check
    PYTHONPATH=src:. python3 benchmarks/lora.py tokens
    PYTHONPATH=src:. python3 benchmarks/lora.py step llama-8b --rows 1 64
    PYTHONPATH=src:. python3 benchmarks/lora.py load llama-8b --registered 256 --slots 32

check: the kernels against their references on the GPU, and the matrices of one layer, timed.

tokens: greedy tokens of tiny models whose requests have different adapters, on the GPU and on the
CPU.

step: the time of a decode step, for each number of rows: without adapters in an engine that takes
none, then in an engine that has loaded sixteen of them: rows of the base model, all rows with one
adapter, and rows with sixteen adapters in turn. Adapters have rank 16 on all projections. `cost` is
relative to the engine that takes no adapters, `bytes` the share of the weights that the adapters of
the step add to what has to be read.

load: tokens per second of 256 requests whose adapters are chosen from many with skewed popularity
(Zipf), and of the same requests without adapters, in one engine.

Prints one JSON line per measurement.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.offline import SHAPES, create_engine

RANK = 16
NUM_ADAPTERS = 16  # mixed in one step
CONTEXT = 128  # tokens of each prompt
STEPS = 96  # timed steps
# Name, inputs, outputs, gated.
FUSED_LAYERS = (
    ("o", 4096, 4096, False),
    ("gate | up", 4096, 28672, True),
    ("down", 14336, 4096, False),
)
REPEAT = 3


def write_adapter(shape: str, folder: Path, seed: int = 0, layers: int | None = None) -> Path:
    """Write a random adapter of a Llama in PEFT's format; returns its folder.

    `layers`: of the model, if it is not the shape's whole number.
    """
    import torch
    from safetensors.torch import save_file

    config = SHAPES[shape]
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    sizes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers or config["num_hidden_layers"]):
        for name, (outputs, inputs) in sizes.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            a = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
            b = torch.randn(outputs, RANK, generator=generator) * 0.01
            tensors[f"{path}.lora_A.weight"] = a.bfloat16()
            tensors[f"{path}.lora_B.weight"] = b.bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    names = sorted({name.rpartition(".")[2] for name in sizes})
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def start_engine(shape: str, folder: Path, **options: Any) -> Any:
    """An LLM with random weights."""
    if not folder.exists():
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    start = time.time()
    llm = create_engine("bloomery", folder, options)
    print(json.dumps({"startup_s": round(time.time() - start, 1), **options}), flush=True)
    return llm


def time_steps(llm: Any, rows: int, adapters: Sequence[str], path: Path) -> float:
    """Seconds of a decode step of `rows` requests that have these adapters in turn."""
    from bloomery.messages import EngineRequest, ResolvedSampling

    loop = llm.loop
    vocab = llm.capacity.vocab
    results = []
    for _ in range(REPEAT):
        pending = set()
        for i in range(rows):
            prompt = tuple((37 * i + 11 * j) % (vocab - 20) + 10 for j in range(CONTEXT))
            request = EngineRequest(
                f"row {i}",
                prompt,
                ResolvedSampling(temperature=0.0),
                4 * STEPS,
                cache_salt=f"{i} {time.time()}",
            )
            if adapters:
                name = adapters[i % len(adapters)]
                request = replace(request, lora=name, lora_path=str(path))
            loop.add(request)
            pending.add(request.id)
        while pending:
            outputs = loop.step()
            errors = [output.error for output in outputs if output.error]
            if errors:
                raise SystemExit(errors[0])
            pending -= {output.request for output in outputs if output.ids}
        for _ in range(8):
            loop.step()
        start = time.time()
        for _ in range(STEPS):
            loop.step()
        results.append((time.time() - start) / STEPS)
        for i in range(rows):
            loop.abort(f"row {i}")
        while loop.busy:
            loop.step()
    return statistics.median(results)


def measure_steps(shape: str, row_counts: Sequence[int], adapter: Path, folder: Path) -> None:
    """Print the times of decode steps with and without adapters."""
    import gc

    import torch

    options: dict[str, Any] = {"max_num_seqs": max(row_counts), "kv_cache_gib": 8.0}
    llm = start_engine(shape, folder, **options)
    base = {rows: time_steps(llm, rows, (), adapter) for rows in row_counts}
    weights = llm.capacity.weights_bytes
    llm.executor.close()
    del llm
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()
    llm = start_engine(shape, folder, enable_lora=True, max_loras=NUM_ADAPTERS, **options)
    names = [f"adapter {i}" for i in range(NUM_ADAPTERS)]
    time_steps(llm, max(row_counts), names, adapter)  # all are loaded
    adapter_bytes = (adapter / "adapter_model.safetensors").stat().st_size
    for rows in row_counts:
        cases = {"base rows": (), "one adapter": names[:1], "mixed": names}
        for case, chosen in cases.items():
            seconds = time_steps(llm, rows, chosen, adapter)
            distinct = min(rows, len(chosen))
            row = {
                "shape": shape,
                "rows": rows,
                "case": case,
                "adapters": distinct,
                "ms": round(1000 * seconds, 3),
                "base_ms": round(1000 * base[rows], 3),
                "cost": f"{100 * (seconds / base[rows] - 1):.1f} %",
                "bytes": f"{100 * distinct * adapter_bytes / weights:.1f} %",
            }
            print(json.dumps(row), flush=True)


def measure_popularity(
    shape: str, registered: int, slots: int, adapter: Path, folder: Path, rows: int
) -> None:
    """Print the throughput of requests with many adapters of skewed popularity."""
    from bloomery.messages import EngineRequest, ResolvedSampling

    llm = start_engine(
        shape,
        folder,
        enable_lora=True,
        max_loras=slots,
        max_cpu_loras=registered,
        max_num_seqs=rows,
    )
    loop = llm.loop
    numbers = random.Random(0)
    weights = [1 / (rank + 1) for rank in range(registered)]
    choices = numbers.choices(range(registered), weights, k=4 * rows)

    def run(name: str, with_adapters: bool) -> float:
        sampling = ResolvedSampling(temperature=0.0)
        for i, choice in enumerate(choices):
            prompt = tuple(numbers.randrange(10, 30000) for _ in range(CONTEXT))
            request = EngineRequest(f"{name} {i}", prompt, sampling, CONTEXT)
            if with_adapters:
                request = replace(request, lora=f"adapter {choice}", lora_path=str(adapter))
            loop.add(request)
        start = time.time()
        num_tokens = 0
        while loop.busy:
            for output in loop.step():
                if output.error:
                    raise SystemExit(output.error)
                num_tokens += len(output.ids)
        return num_tokens / (time.time() - start)

    run("warm-up", True)  # reads the adapters into host memory
    base = run("base", False)
    adapted = run("adapted", True)
    row = {
        "shape": shape,
        "rows": rows,
        "registered": registered,
        "used": len(set(choices)),
        "slots": slots,
        "base_tok_s": round(base, 1),
        "tok_s": round(adapted, 1),
        "share": f"{100 * adapted / base:.1f} %",
    }
    print(json.dumps(row), flush=True)


def check_kernels() -> None:
    """Compare the kernels with their references on the GPU, and time those of one 8B layer."""
    import torch

    from bloomery.kernels.lora import (
        LoraMatrices,
        LoraRows,
        group_rows,
        lora_expand_reference,
        lora_expand_triton,
        lora_shrink_reference,
        lora_shrink_triton,
    )

    torch.manual_seed(0)
    device = torch.device("cuda")
    layers = {
        "qkv": (4096, (4096, 1024, 1024)),
        "o": (4096, (4096,)),
        "gate | up": (4096, (14336, 14336)),
        "down": (14336, (4096,)),
    }
    for name, (inputs, parts) in layers.items():
        outputs = sum(parts)
        shape_a = (NUM_ADAPTERS, 1, len(parts) * RANK, inputs)
        a = (torch.randn(shape_a, device=device) / inputs**0.5).bfloat16()
        b = torch.randn(NUM_ADAPTERS, 1, outputs, RANK, device=device).bfloat16()
        bias = torch.zeros(NUM_ADAPTERS, outputs, device=device).bfloat16()
        counts = torch.tensor(parts, device=device)
        row_parts = torch.arange(len(parts), device=device).repeat_interleave(counts).int()
        matrices = LoraMatrices(a, b, row_parts, bias)
        for rows in (1, 64, 1000):
            for distinct in (1, NUM_ADAPTERS)[: 1 + (rows > 1)]:
                slots = (torch.arange(rows, device=device) % (distinct + 1) - 1).int()
                slots[0] = 0
                groups = group_rows(slots, NUM_ADAPTERS) if rows > 1 else None
                lora_rows = LoraRows(slots, None, groups)
                x = torch.randn(rows, inputs, device=device).bfloat16()
                y = torch.randn(rows, outputs, device=device).bfloat16()
                expected = y.clone()
                low = lora_shrink_reference(x, matrices, lora_rows)
                lora_expand_reference(low, matrices, lora_rows, expected)
                actual = y.clone()
                shrunk = lora_shrink_triton(x, matrices, lora_rows)
                lora_expand_triton(shrunk, matrices, lora_rows, actual)
                error = (actual.float() - expected.float()).abs().max() / expected.abs().max()
                row = {
                    "layer": name,
                    "rows": rows,
                    "adapters": distinct,
                    "error": round(float(error), 5),
                    "shrink_us": time_kernel(partial(lora_shrink_triton, x, matrices, lora_rows)),
                    "expand_us": time_kernel(
                        partial(lora_expand_triton, shrunk, matrices, lora_rows, y)
                    ),
                }
                print(json.dumps(row), flush=True)
                if error > 0.02:
                    raise SystemExit(f"{name}: the kernels differ from their references")


def run_fused(
    shrunk: Iterator[Any], lora: Any, arguments: tuple[Any, ...], tiling: Any = None
) -> object:
    """Run the GEMV with an adapter and the next memory for its shrunk row."""
    from bloomery.kernels.gemv import gemv_triton

    return gemv_triton(*arguments, tiling, lora=lora._replace(shrunk=next(shrunk)))


def check_fused(layers: Sequence[tuple[str, int, int, bool]] = FUSED_LAYERS) -> None:
    """Compare the GEMV that has an adapter in it with its reference, and time both kinds."""
    import torch

    from bloomery.fusion import ActivationEpilogue, NormPrologue
    from bloomery.kernels.gemv import fused_linear_reference, gemv_triton
    from bloomery.kernels.lora import (
        SHRUNK_COPIES,
        FusedLora,
        LoraMatrices,
        LoraRows,
        lora_expand_reference,
        lora_shrink_reference,
    )

    device = torch.device("cuda")
    for name, inputs, outputs, gated in layers:
        width = 2 * RANK if gated else RANK
        a = (torch.randn(2, 1, width, inputs, device=device) / inputs**0.5).bfloat16()
        b = torch.randn(2, 1, outputs, RANK, device=device).bfloat16()
        bias = torch.randn(2, outputs, device=device).bfloat16()
        half = outputs // 2 if gated else outputs
        parts = (torch.arange(outputs, device=device) // half).int()
        matrices = LoraMatrices(a, b, parts, bias)
        weight = (torch.randn(outputs, inputs, device=device) / inputs**0.5).bfloat16()
        x = torch.randn(1, inputs, device=device).bfloat16()
        norm = NormPrologue("rms", torch.rand(inputs, device=device) + 0.5, None, 1e-5)
        epilogue = ActivationEpilogue("silu", True) if gated else None
        shrunk = torch.zeros(201, SHRUNK_COPIES, width, device=device)
        slots = torch.ones(1, dtype=torch.int32, device=device)
        rows = LoraRows(slots)
        normed = fused_linear_reference(x, torch.eye(inputs, device=device).bfloat16(), None, norm)
        added = torch.zeros(1, outputs, device=device)
        lora_expand_reference(lora_shrink_reference(normed, matrices, rows), matrices, rows, added)
        expected = fused_linear_reference(x.float(), weight.float(), added[0], norm, epilogue)
        lora = FusedLora(matrices, slots, shrunk[200])
        actual = gemv_triton(x, weight, None, norm, epilogue, lora=lora)
        error = (actual.float() - expected.float()).abs().max() / expected.abs().max()
        used = iter(shrunk[:200])
        row = {
            "layer": name,
            "fused_error": round(float(error), 5),
            "base_us": time_kernel(partial(gemv_triton, x, weight, None, norm, epilogue)),
            "adapted_us": time_kernel(
                partial(run_fused, used, lora, (x, weight, None, norm, epilogue)), shrunk.zero_
            ),
        }
        print(json.dumps(row), flush=True)
        if error > 0.02:
            raise SystemExit(f"{name}: the fused kernel differs from its reference")


def write_random_adapter(model: Any, folder: Path, seed: int) -> Path:
    """Write a random adapter of all linear layers of a transformers model in PEFT's format."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}

    def add(path: str, rank: int, inputs: int, outputs: int) -> None:
        a = torch.randn(rank, inputs, generator=generator)
        b = torch.randn(outputs, rank, generator=generator)
        tensors[f"base_model.model.{path}.lora_A.weight"] = a / inputs**0.5
        tensors[f"base_model.model.{path}.lora_B.weight"] = 0.3 * b

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            add(name, 4, module.in_features, module.out_features)
        stack = getattr(module, "gate_up_proj", None)
        if isinstance(stack, torch.nn.Parameter):
            experts, outputs, inputs = stack.shape
            add(f"{name}.base_layer", 4 * experts, inputs, outputs)
            add(name, 4 * experts, outputs // 2, inputs)
    folder.mkdir(parents=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ".*"}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def check_tokens(families: Sequence[str] = ("llama", "mixtral", "gpt_neox")) -> None:
    """Compare greedy tokens of requests with several adapters on the GPU and on the CPU."""
    from bloomery import LLM
    from bloomery.messages import EngineRequest, ResolvedSampling
    from tests.parity.cases import CASES, make_checkpoint

    for family in families:
        case = next(c for c in CASES if c.name.replace("-", "_").startswith(family))
        work = Path(tempfile.mkdtemp())
        model = make_checkpoint(case, work / "model")
        paths = [write_random_adapter(model, work / f"adapter{i}", i) for i in range(3)]
        choices = [*paths, None, paths[0], None, paths[2]]
        results = {}
        for device in ("cpu", "cuda"):
            llm = LLM(
                str(work / "model"),
                device=device,
                dtype="float32",
                skip_tokenizer_init=True,
                enable_lora=True,
                max_loras=2,
                max_num_seqs=8,
                max_model_len=96,
                kv_cache_gib=0.05,
            )
            outputs: dict[str, list[int]] = {str(i): [] for i in range(len(choices))}
            alone = EngineRequest("alone", tuple(range(5, 30)), ResolvedSampling(0.0), 16)
            outputs["alone"] = []
            batches = [[replace(alone, lora=str(paths[1]), lora_path=str(paths[1]))], []]
            for i, path in enumerate(choices):
                prompt = tuple((7 * i + 3 * j) % 90 + 5 for j in range(10 + i))
                request = EngineRequest(str(i), prompt, ResolvedSampling(temperature=0.0), 16)
                name = "" if path is None else str(path)
                batches[1].append(replace(request, lora=name, lora_path=name))
            for batch in batches:
                for request in batch:
                    llm.loop.add(request)
                while llm.loop.busy:
                    for output in llm.loop.step():
                        if output.error:
                            raise SystemExit(output.error)
                        outputs[output.request] += output.ids
            results[device] = outputs
            llm.executor.close()
        equal = [name for name, ids in results["cpu"].items() if results["cuda"][name] == ids]
        print(json.dumps({"family": case.name, "equal": len(equal), "of": len(choices) + 1}))
        if len(equal) <= len(choices):
            print(results, flush=True)


def time_kernel(work: Any, prepare: Any = None) -> float:
    """Microseconds of a launch within a CUDA graph of a hundred; `prepare` runs before each."""
    import torch

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            work()
    if prepare is not None:
        prepare()
    graph.replay()
    if prepare is not None:
        prepare()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return round(start.elapsed_time(end) * 10, 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("check", "tokens", "step", "load"))
    parser.add_argument("shape", nargs="?", default="llama-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--registered", type=int, default=256)
    parser.add_argument("--slots", type=int, default=32)
    args = parser.parse_args()
    if args.command == "check":
        check_kernels()
        check_fused()
        return
    if args.command == "tokens":
        check_tokens()
        return
    work = Path(tempfile.mkdtemp())
    adapter = write_adapter(args.shape, work / "adapter")
    folder = work / args.shape
    if args.command == "step":
        measure_steps(args.shape, args.rows, adapter, folder)
    else:
        measure_popularity(args.shape, args.registered, args.slots, adapter, folder, max(args.rows))


if __name__ == "__main__":
    main()
