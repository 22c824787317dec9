"""Products of full precision on one CPU core: the native kernels beside torch's BLAS.

    PYTHONPATH=src:. python3 benchmarks/cpu_products.py [--rows 8192 --columns 2048] [--avx2]

Prints the milliseconds of processor time of a product, the least of several, by the number of
activation rows. BLAS multiplies float32 weights, because it has no product of 16-bit weights and
float32 activations. --avx2 compiles the kernels for processors without AVX-512.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from bloomery.native import ops
from bloomery.native.build import build_library
from bloomery.native.thread_pool import ThreadPool, load_library

TOKENS = (1, 4, 16, 64, 512)
NUM_ROUNDS = 7
AVX2_FLAGS = ("-mno-avx512f", "-mno-avxvnni")


def time_product(product: Callable[[], object]) -> float:
    """Milliseconds of processor time."""
    product()
    seconds = []
    for _ in range(NUM_ROUNDS):
        start = time.process_time()
        product()
        seconds.append(time.process_time() - start)
    return 1e3 * min(seconds)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8192, help="of the weights")
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--avx2", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    library = load_library(str(build_library(AVX2_FLAGS))) if args.avx2 else None
    pool = ThreadPool(1, library)
    weight = torch.randn(args.rows, args.columns)
    matrices = {dtype: weight.to(dtype) for dtype in ops.FLOAT_KINDS}
    native = {
        str(dtype).removeprefix("torch."): ops.NativeMatrix.from_floats(pool, matrix)
        for dtype, matrix in matrices.items()
    }
    print("| rows | BLAS, float32 | " + " | ".join(f"native, {name}" for name in native) + " |")
    print("|---" * (2 + len(native)) + "|")
    for tokens in TOKENS:
        x = torch.randn(tokens, args.columns)
        products = [partial(F.linear, x, weight)]
        products += [partial(ops.linear, pool, matrix, x) for matrix in native.values()]
        times = map(time_product, products)
        print(f"| {tokens} | " + " | ".join(f"{ms:.2f}" for ms in times) + " |", flush=True)


if __name__ == "__main__":
    main()
