"""The dense products of a long prefill on one GPU: which way of calling the library is fastest.

    PYTHONPATH=src:. python3 benchmarks/prefill_products.py [SHAPE ...] [--tokens 8192 ...]

For every linear layer it prints TFLOP/s of the product as the model calls it, of the product
cut into parts along its tokens or its outputs, with the weights stored the other way round, and by
the other library interface of torch. Inputs and weights are random, and several copies of the
weights take turns, as the layers of a model do. A product of 8,192 in all directions is the
ceiling.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.offline import SHAPES

NUM_COPIES = 4  # of the weights
NUM_REPLAYS = 5

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


def one_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(x, weight.T, out=out)


def cut_tokens(parts: int, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    for x_part, out_part in zip(x.chunk(parts), out.chunk(parts), strict=True):
        torch.mm(x_part, weight.T, out=out_part)


def cut_outputs(parts: int, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    for weight_part, out_part in zip(weight.chunk(parts), out.chunk(parts, 1), strict=True):
        torch.mm(x, weight_part.T, out=out_part)


def layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a Llama's linear layers."""
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    kv_heads = config["num_key_value_heads"] * config["head_dim"]
    width = config["intermediate_size"]
    return {
        "qkv": (heads + 2 * kv_heads, hidden),
        "o": (hidden, heads),
        "gate and up": (2 * width, hidden),
        "down": (hidden, width),
    }


def time_product(
    product: Product, x: torch.Tensor, weights: list[torch.Tensor], out: torch.Tensor
) -> float:
    """Seconds of one product: the fastest of some replays of a CUDA graph."""
    product(x, weights[0], out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            product(x, weight, out)
    graph.replay()
    times = []
    for _ in range(NUM_REPLAYS):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / len(weights))
    return min(times)


def random_matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


def compare_products(name: str, tokens: int, outputs: int, inputs: int) -> None:
    x = random_matrix(tokens, inputs)
    out = torch.empty(tokens, outputs, device="cuda", dtype=torch.bfloat16)
    weights = [random_matrix(outputs, inputs) for _ in range(NUM_COPIES)]
    products: dict[str, Product] = {"one product": one_product}
    for parts in (2, 4):
        products[f"tokens / {parts}"] = partial(cut_tokens, parts)
        products[f"outputs / {parts}"] = partial(cut_outputs, parts)
    operations = 2 * tokens * outputs * inputs
    figures = []
    for title, product in products.items():
        figures.append((title, time_product(product, x, weights, out)))
    transposed = [weight.T.contiguous().T for weight in weights]
    figures.append(("weights transposed", time_product(one_product, x, transposed, out)))
    torch.backends.cuda.preferred_blas_library("cublaslt")
    figures.append(("cublaslt", time_product(one_product, x, weights, out)))
    torch.backends.cuda.preferred_blas_library("cublas")
    figures.append(("cublas", time_product(one_product, x, weights, out)))
    torch.backends.cuda.preferred_blas_library("default")
    rates = ", ".join(f"{title} {operations / seconds / 1e12:.0f}" for title, seconds in figures)
    print(f"{name} {tokens} x {inputs} -> {outputs}: TFLOP/s: {rates}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", default=["llama-8b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 4096, 8192])
    args = parser.parse_args()
    compare_products("ceiling", 8192, 8192, 8192)
    for shape in args.shapes:
        for tokens in args.tokens:
            for name, (outputs, inputs) in layer_shapes(SHAPES[shape]).items():
                compare_products(f"{shape} {name}", tokens, outputs, inputs)


if __name__ == "__main__":
    main()
