"""Compares every model family on the GPU with transformers on the same GPU, and prints one table.

    PYTHONPATH=src:. python3 benchmarks/gpu_parity.py [WORD ...] [--times 16] [--part 1/3]

WORDs select the cases whose name contains one of them. --times N makes their models N times as
wide, which gives head dimensions of 64 to 256 and matrices of the sizes that have specialised
kernels. --part I/N keeps every N-th case from the I-th on. --seconds S ends the run after S seconds
and names the cases that were not checked, which count as failed.

float32: greedy tokens of ten prompts of several lengths, four at a time, so that prompts arrive
while other requests decode. They must equal transformers' tokens with CUDA graphs, without, and
with one step in flight. Mixed steps (decodes with prefill chunks) must have been captured.
bfloat16: log-probabilities of a prompt's tokens. The table shows the largest difference from
transformers in float32, ours and transformers' own in bfloat16.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

NUM_PROCESSES = 14  # compiling takes longest
MAX_TOKENS = 24
NUM_PROMPTS = 10
# Cases whose configs older versions of transformers read differently.
MIN_TRANSFORMERS = (5, 22)
NEW_ORACLE_CASES = {
    "gpt_oss-full": "swiglu_limit is not read",
    "minimax_m2-partial": "rotary_dim is not read",
    "bamba": "the gated norm has no groups",
    "granitemoehybrid-dense": "the gated norm has no groups",
}
ENGINE_VARIANTS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"cuda_graphs": False},
    "one step": {"steps_in_flight": 1},
}


def check_case(name: str, times: int) -> tuple[str, float, float]:
    """Run one case; returns the differences, and both largest errors in bfloat16."""
    import torch
    import transformers

    from bloomery import LLM, SamplingParams
    from tests.parity.cases import CASES, VOCAB, make_checkpoint

    transformers.utils.logging.set_verbosity_error()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    case = next(case for case in CASES if case.name == name)
    generator = torch.Generator().manual_seed(7)
    max_tokens = [
        min(MAX_TOKENS - 3 * (i % 7), case.length - case.prompt) for i in range(NUM_PROMPTS)
    ]
    prompt_lens = [case.prompt - 2 * (i % 3) for i in range(NUM_PROMPTS)]
    prompts = [
        torch.randint(3, VOCAB, (prompt_len,), generator=generator).tolist()
        for prompt_len in prompt_lens
    ]
    fixed = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(max_tokens=count, **fixed) for count in max_tokens]
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(case, Path(folder), times).cuda()
        options = {
            "skip_tokenizer_init": True,
            "max_num_seqs": 4,
            "kv_cache_gib": 0.02,
            "max_model_len": case.length,
        }
        expected = [
            generate_greedy(model, prompt, count)
            for prompt, count in zip(prompts, max_tokens, strict=True)
        ]
        problems = []
        for variant, variant_options in ENGINE_VARIANTS.items():
            llm = LLM(folder, dtype="float32", **options, **variant_options)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            if [output.outputs[0].token_ids for output in outputs] != expected:
                problems.append(variant)
            if variant == "graphs" and count_mixed_graphs(llm) < 2:
                problems.append("no mixed steps captured")
            del llm
        scored = SamplingParams(max_tokens=1, prompt_logprobs=0, **fixed)
        llm = LLM(folder, dtype="bfloat16", **options)
        output = llm.generate(prompts[:1], scored, use_tqdm=False)[0]
        entries = zip(output.prompt_logprobs[1:], prompts[0][1:], strict=True)
        ours = torch.tensor([entry[token].logprob for entry, token in entries])
        exact = prompt_logprobs(model, prompts[0])
        reference = prompt_logprobs(model.bfloat16(), prompts[0])
    our_error = float((ours - exact).abs().max())
    reference_error = float((reference - exact).abs().max())
    return ", ".join(problems), our_error, reference_error


def count_mixed_graphs(llm: Any) -> int:
    """CUDA graphs of mixed steps; the largest one is always captured at the start."""
    graph_runner = llm.executor.worker.runner.graph_runner
    return sum(shape.num_prefills > 0 for shape in graph_runner.graphs)


def prompt_logprobs(model: Any, prompt: list[int]) -> Any:
    """Log-probabilities of a prompt's tokens by transformers."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt], device="cuda")).logits[0].float().cpu()
    logprobs = logits.log_softmax(-1)[:-1]
    return logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


def generate_greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens by transformers."""
    import torch

    from tests.parity.cases import count_positions

    with torch.no_grad():
        output = model(torch.tensor([prompt], device="cuda"), use_cache=True)
        tokens = [int(output.logits[0, -1].argmax())]
        while len(tokens) < num_tokens:
            last_token = torch.tensor([[tokens[-1]]], device="cuda")
            length = len(prompt) + len(tokens)
            positions = count_positions(model, length - 1, length)
            output = model(
                last_token, past_key_values=output.past_key_values, use_cache=True, **positions
            )
            tokens.append(int(output.logits[0, -1].argmax()))
    return tokens


def select_names(filters: list[str], part: str) -> list[str]:
    """The cases whose name contains one of the filters, and of those the part I/N.

    Cases that the installed transformers cannot check are left out, with a line that says so.
    """
    import transformers

    from tests.parity.cases import CASES

    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    too_old = NEW_ORACLE_CASES if version < MIN_TRANSFORMERS else {}
    for name, reason in too_old.items():
        print(f"{name:26}left out, transformers is too old: {reason}", flush=True)

    first, count = map(int, part.split("/"))
    if not 1 <= first <= count:
        raise SystemExit(f"--part {part}: expected I/N with I from 1 to N")
    names = [
        case.name
        for case in CASES
        if case.name not in too_old and (not filters or any(word in case.name for word in filters))
    ]
    return names[first - 1 :: count]


def describe_result(result: Future[tuple[str, float, float]]) -> tuple[bool, str]:
    """Whether a case passed, and the columns of its row."""
    error = result.exception()
    if error is not None:
        return False, f"{type(error).__name__}: {str(error)[:160]}"
    problems, our_error, reference_error = result.result()
    verdict = f"differs: {problems}" if problems else "equal"
    return not problems, f"{verdict:>28}{our_error:12.4f}{reference_error:11.4f}"


def check_all(names: list[str], times: int, seconds: float) -> int:
    """Check cases in parallel, print a row for each, and return how many failed."""
    deadline = time.monotonic() + seconds
    num_failed = 0
    with ProcessPoolExecutor(NUM_PROCESSES, get_context("spawn")) as pool:
        running = {pool.submit(check_case, name, times): name for name in names}
        while running and time.monotonic() < deadline:
            ended, _ = wait(running, deadline - time.monotonic(), FIRST_COMPLETED)
            for result in ended:
                passed, columns = describe_result(result)
                num_failed += not passed
                print(f"{running.pop(result):26}{columns}", flush=True)
        if running:
            print(f"not checked within {seconds:.0f} s: {', '.join(running.values())}", flush=True)
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()
    return num_failed + len(running)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="keep cases with one of these in their name")
    parser.add_argument("--times", type=int, default=1, help="widen the models by this factor")
    parser.add_argument("--part", default="1/1", help="I/N: keep every N-th case from the I-th on")
    parser.add_argument("--seconds", type=float, default=3600, help="end the run after this time")
    args = parser.parse_args()
    names = select_names(args.words, args.part)
    if not names:
        parser.error(f"no case has one of these in its name: {', '.join(args.words)}")
    start = time.monotonic()
    print(f"{'case':26}{'float32, greedy':>28}{'bf16, ours':>12}{'reference':>11}", flush=True)
    num_failed = check_all(names, args.times, args.seconds)
    seconds = time.monotonic() - start
    print(f"{len(names)} cases, {num_failed} failed, {seconds:.0f} s", flush=True)
    return bool(num_failed)


if __name__ == "__main__":
    sys.exit(main())
