"""Every family on the GPU against transformers on the same GPU: one table, in float32 and bfloat16.

    PYTHONPATH=src:. python3 benchmarks/gpu_parity.py [WORD] [--times 16]

A word keeps the cases that have it in their name; --times makes their models so many times as wide, which gives heads
of 64 to 256 dimensions and products of the sizes that have kernels of their own.

float32: greedy tokens of ten prompts of several lengths, four at a time, so that prompts arrive while others go on.
With graphs, without, and with one step in flight they must be transformers' own, and steps with chunks be captured.
bfloat16: log-probabilities of a prompt's tokens, largest difference from transformers in float32, beside
transformers' own in bfloat16.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

WORKERS = 10
TOKENS = 24
PROMPTS = 10


def check(name: str, times: int) -> tuple[str, str, float, float]:
    import torch
    import transformers

    from bloomery import LLM, SamplingParams
    from tests.parity.cases import CASES, VOCAB, make_checkpoint

    transformers.utils.logging.set_verbosity_error()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    case = next(case for case in CASES if case.name == name)
    generator = torch.Generator().manual_seed(7)
    counts = [min(TOKENS - 3 * (i % 7), case.length - case.prompt) for i in range(PROMPTS)]
    lengths = [case.prompt - 2 * (i % 3) for i in range(PROMPTS)]
    prompts = [
        torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths
    ]
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(case, Path(folder), times).cuda()
        common = {
            "skip_tokenizer_init": True,
            "max_num_seqs": 4,
            "kv_cache_gib": 0.02,
            "max_model_len": case.length,
        }
        want = [greedy(model, prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
        wish = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(max_tokens=count, **wish) for count in counts]
        wrong = []
        for way, options in (
            ("graphs", {}),
            ("eager", {"cuda_graphs": False}),
            ("one step", {"steps_in_flight": 1}),
        ):
            llm = LLM(folder, dtype="float32", **common, **options)
            got = [
                out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)
            ]
            if got != want:
                wrong.append(way)
            mixed = llm.front.stack.executor.worker.mixed
            if way == "graphs" and not (
                mixed and len(mixed.runs.found) > 1
            ):  # the largest is there from the start
                wrong.append("no chunks captured")
            del llm
        scored = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False
        )
        out = LLM(folder, dtype="bfloat16", **common).generate(prompts[:1], scored, use_tqdm=False)[
            0
        ]
        ours = torch.tensor(
            [
                entry[t].logprob
                for entry, t in zip(out.prompt_logprobs[1:], prompts[0][1:], strict=True)
            ]
        )
        exact = own_logprobs(model, prompts[0])
        theirs = own_logprobs(model.bfloat16(), prompts[0])
    return (
        name,
        ", ".join(wrong),
        float((ours - exact).abs().max()),
        float((theirs - exact).abs().max()),
    )


def own_logprobs(model, prompt: list[int]):
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt], device="cuda")).logits[0].float().cpu()
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


def greedy(model, prompt: list[int], count: int) -> list[int]:
    import torch

    with torch.no_grad():
        answer = model(torch.tensor([prompt], device="cuda"), use_cache=True)
        out = [int(answer.logits[0, -1].argmax())]
        while len(out) < count:
            token = torch.tensor([[out[-1]]], device="cuda")
            answer = model(token, past_key_values=answer.past_key_values, use_cache=True)
            out.append(int(answer.logits[0, -1].argmax()))
    return out


def main() -> int:
    from tests.parity.cases import CASES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("word", nargs="?", default="")
    parser.add_argument("--times", type=int, default=1)
    args = parser.parse_args()
    names = [case.name for case in CASES if args.word in case.name]
    bad = 0
    print(f"{'case':26}{'float32, greedy':>28}{'bf16, ours':>12}{'theirs':>9}")
    with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
        for name, future in [(name, pool.submit(check, name, args.times)) for name in names]:
            try:
                _, wrong, ours, theirs = future.result()
            except Exception as error:
                bad += 1
                print(f"{name:26}{type(error).__name__}: {str(error)[:120]}", flush=True)
                continue
            bad += bool(wrong)
            print(
                f"{name:26}{'differs: ' + wrong if wrong else 'equal':>28}{ours:12.4f}{theirs:9.4f}",
                flush=True,
            )
    print(f"{len(names)} cases, {bad} failed")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
