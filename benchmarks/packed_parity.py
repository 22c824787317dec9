"""Compares the tokens and logprobs of quantized checkpoints on the CPU and on the GPU.

    PYTHONPATH=src:. python3 benchmarks/packed_parity.py [--width 4] [--only int4 fp8]

`bloomery quantize` writes a random Llama, WIDTH times as wide as in the tests, in each format. Both
devices serve it in float32: greedy tokens of eight prompts, and the logprobs of the prompts'
tokens. Both read the same codes. They differ in the order of sums. For fp8 the GPU also quantizes
the inputs of larger GEMMs to 8 bits (W8A8), as the format intends. There tokens may differ, and
logprobs by up to MAX_FP8_DIFFERENCE: with the same rounding on a CPU the logprobs of this model
change by up to 0.51, because random weights amplify every error.

The native CPU kernels are off, because they quantize the inputs of every GEMM in another way.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

FORMATS = ("int8", "int4", "nf4", "fp8", "gptq", "gptq act-order")
MAX_DIFFERENCE = 2e-3  # of a logprob
MAX_FP8_DIFFERENCE = 0.8
NUM_TOKENS = 24  # generated per prompt


class ParityResult(NamedTuple):
    """The comparison of a format on the two devices."""

    num_equal: int  # prompts with equal tokens
    num_prompts: int
    max_difference: float  # of a logprob


def compare_devices(format_name: str, width: int, threads: int) -> ParityResult:
    """Quantize the model, serve it on both devices and compare."""
    import torch

    from bloomery import LLM, SamplingParams
    from bloomery.artifacts.locate import locate_model
    from bloomery.tools.quantize_checkpoint import QuantizeOptions, quantize_checkpoint
    from tests.parity.cases import CASES, VOCAB, make_checkpoint

    torch.set_num_threads(threads)  # the formats run in parallel
    torch.backends.cuda.matmul.allow_tf32 = False
    case = next(case for case in CASES if case.name == "llama")
    generator = torch.Generator().manual_seed(7)
    prompts = [
        torch.randint(3, VOCAB, (case.prompt - i,), generator=generator).tolist() for i in range(8)
    ]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=0,
    )
    method, _, act_order = format_name.partition(" ")
    options = QuantizeOptions(method, group_size=64, act_order=bool(act_order))
    tokens = []
    logprobs = []
    with tempfile.TemporaryDirectory() as folder:
        dense = Path(folder) / "dense"
        packed = Path(folder) / "packed"
        make_checkpoint(case, dense, width)
        quantize_checkpoint(
            locate_model(str(dense)), packed, options, prompts if method == "gptq" else []
        )
        for device in ("cpu", "cuda"):
            llm = LLM(
                str(packed),
                dtype="float32",
                device=device,
                skip_tokenizer_init=True,
                max_num_seqs=4,
                kv_cache_gib=0.02,
                max_model_len=case.length,
                cpu_kernels=False,
            )
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens.append([output.outputs[0].token_ids for output in outputs])
            device_logprobs = [
                logprobs_at[token].logprob
                for output, prompt in zip(outputs, prompts, strict=True)
                for logprobs_at, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
            ]
            logprobs.append(torch.tensor(device_logprobs))
            del llm
    num_equal = sum(cpu == gpu for cpu, gpu in zip(*tokens, strict=True))
    max_difference = float((logprobs[0] - logprobs[1]).abs().max())
    return ParityResult(num_equal, len(prompts), max_difference)


def is_within_limits(format_name: str, result: ParityResult) -> bool:
    """Whether the devices agree as far as the format allows."""
    if format_name == "fp8":
        return result.max_difference <= MAX_FP8_DIFFERENCE
    return result.max_difference <= MAX_DIFFERENCE and result.num_equal == result.num_prompts


def main() -> int:
    """Compare the formats in parallel, print a table, and return the number of failures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--only", nargs="+", default=list(FORMATS), choices=FORMATS)
    args = parser.parse_args()
    threads = max(1, (os.cpu_count() or 1) // len(args.only))
    failures = 0
    print(f"{'format':18}{'equal outputs':>15}{'largest logprob difference':>30}")
    with ProcessPoolExecutor(len(args.only), get_context("spawn")) as pool:
        futures = {
            name: pool.submit(compare_devices, name, args.width, threads) for name in args.only
        }
        for name, future in futures.items():
            try:
                result = future.result()
            except Exception as error:
                failures += 1
                print(f"{name:18}{type(error).__name__}: {str(error)[:160]}", flush=True)
                continue
            failures += not is_within_limits(name, result)
            equal = f"{result.num_equal} of {result.num_prompts}"
            print(f"{name:18}{equal:>15}{result.max_difference:30.2e}", flush=True)
    return failures


if __name__ == "__main__":
    raise SystemExit(main())
