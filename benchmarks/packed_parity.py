"""A checkpoint of fewer bits on the CPU and on the GPU: the same tokens? One table over the formats we write.

    PYTHONPATH=src:. python3 benchmarks/packed_parity.py [--times 4] [--only int4 fp8]

A random Llama, so many times as wide as the tests' own, is written by `bloomery quantize` in each format and served in
float32 on both devices: greedy tokens of eight prompts, and the largest difference of their tokens' log-probabilities.
Both devices read the same codes; what differs is the order of sums and, in fp8, that the GPU rounds the input of
products of more than a few tokens to eight bits as well, which is the format's own way: tokens may differ there, and
log-probabilities by FP8. (Rounded the same way on a CPU this model's move by up to 0.51: nothing in random weights
forgives.) The CPU's own kernels, which round the input of every product in a way of their own, stay out of it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

FORMS = ("int8", "int4", "nf4", "fp8", "gptq", "gptq act-order")
CLOSE = 2e-3
FP8 = 0.8
COUNT = 24


def check(form: str, times: int, threads: int) -> tuple[str, int, int, float]:
    """Format, answers that are equal, answers, largest difference of a log-probability."""
    import torch

    from bloomery import LLM, SamplingParams
    from bloomery.artifacts.locate import locate
    from bloomery.tools.quantize_checkpoint import Wish, convert
    from tests.parity.cases import CASES, VOCAB, make_checkpoint

    torch.set_num_threads(threads)  # the formats run side by side
    torch.backends.cuda.matmul.allow_tf32 = False
    case = next(case for case in CASES if case.name == "llama")
    generator = torch.Generator().manual_seed(7)
    prompts = [
        torch.randint(3, VOCAB, (case.prompt - i,), generator=generator).tolist() for i in range(8)
    ]
    method, _, act_order = form.partition(" ")
    wish = Wish(method, group=64, act_order=bool(act_order))
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain"
        packed = Path(folder) / "packed"
        make_checkpoint(case, plain, times)
        convert(locate(str(plain)), packed, wish, prompts if method == "gptq" else [])
        found = []
        params = SamplingParams(
            temperature=0.0, max_tokens=COUNT, ignore_eos=True, detokenize=False, prompt_logprobs=0
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
                native=False,
            )
            outs = llm.generate(prompts, params, use_tqdm=False)
            scored = [
                entry[token].logprob
                for out, prompt in zip(outs, prompts, strict=True)
                for entry, token in zip(out.prompt_logprobs[1:], prompt[1:], strict=True)
            ]
            found.append(([out.outputs[0].token_ids for out in outs], torch.tensor(scored)))
            del llm
    (ours, one), (theirs, other) = found
    equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    return form, equal, len(prompts), float((one - other).abs().max())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--only", nargs="+", default=list(FORMS), choices=FORMS)
    args = parser.parse_args()
    threads = max(1, (os.cpu_count() or 1) // len(args.only))
    bad = 0
    print(f"{'format':18}{'equal answers':>15}{'log-probabilities, at most':>30}")
    with ProcessPoolExecutor(len(args.only), get_context("spawn")) as pool:
        for form, future in [
            (form, pool.submit(check, form, args.times, threads)) for form in args.only
        ]:
            try:
                _, equal, count, far = future.result()
            except Exception as error:
                bad += 1
                print(f"{form:18}{type(error).__name__}: {str(error)[:160]}", flush=True)
                continue
            bad += far > FP8 if form == "fp8" else far > CLOSE or equal < count
            print(f"{form:18}{f'{equal} of {count}':>15}{far:30.2e}", flush=True)
    return bad


if __name__ == "__main__":
    raise SystemExit(main())
