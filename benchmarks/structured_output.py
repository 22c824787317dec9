"""What structured output costs: throughput with and without grammars, and the first mask.

    PYTHONPATH=src:. python3 benchmarks/structured_output.py llama-8b      (a GPU, random weights)
    PYTHONPATH=src:. python3 benchmarks/structured_output.py embedded      (this CPU)

Three workloads run in turn, several times, and the fastest run of each counts: no request has a
grammar, one request has one, all requests have one. Each request has a JSON schema of its own, so
no two share a grammar. The schemas ask for lists that are too long to end before max_tokens, so all
workloads produce the same number of tokens. All three include prefill. In the second workload the
time and the tokens are those of the requests without a grammar.

`share` is the throughput relative to the workload without grammars. `masks_ms` is the mean time in
which the masks of one step were computed, `admit_ms` the time until all grammars were compiled. The
GPU waited for the host between two steps for the share `idle` of its time, and inside of steps for
their masks for the share `waits`; `sampling` is the share of sampling outside of the graph of the
forward pass. `steps` counts steps of any size. `floor_ms_step` is the bytes of weights and KV cache
over the copy rate of this GPU.

The last line is the latency of a first mask: from a request's arrival in the engine to the mask of
its first token, for the schemas of tests/structured/schemas.json, each of them new to the engine.

With random weights the vocabulary is made from the words of this repository's texts.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.offline import (
    SHAPES,
    OfflineWorkload,
    WorkFloor,
    create_engine,
    measure_rates,
)
from bloomery.messages import StepTiming

REPOSITORY = Path(__file__).parents[1]
SAMPLE_SCHEMAS = REPOSITORY / "tests/structured/schemas.json"
CITIES = ["Lisbon", "Oslo", "Nairobi", "Lima", "Hanoi", "Quito"]


class WordVocabulary:
    """A tokenizer's vocabulary of a given size: all bytes, then pieces of this repository's words.

    The last id is the end-of-sequence token.
    """

    bos_id = None

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.eos_ids = (vocab_size - 1,)
        self.special_ids = {vocab_size - 1}
        pieces = {bytes([byte]) for byte in range(256)}
        self.tokens = sorted(pieces) + count_pieces(vocab_size - 257)
        self.tokens.append(b"<end>")

    def token_bytes(self, id: int) -> bytes:
        return self.tokens[id]


def count_pieces(count: int) -> list[bytes]:
    """The `count` most frequent beginnings and words of the repository's texts."""
    frequencies: Counter[str] = Counter()
    for path in sorted(REPOSITORY.glob("**/*.md")) + sorted(REPOSITORY.glob("src/**/*.py")):
        frequencies.update(
            re.findall(r" ?[A-Za-z]+| ?[0-9]+|[^\sA-Za-z0-9]+|\s+", path.read_text())
        )
    pieces: Counter[str] = Counter()
    for word, frequency in frequencies.items():
        for length in range(2, min(len(word), 12) + 1):
            pieces[word[:length]] += frequency
    rng = random.Random(0)
    chosen = [piece for piece, _ in pieces.most_common(count)]
    known = set(chosen)
    while len(chosen) < count:  # real vocabularies have compounds, too
        compound = rng.choice(chosen) + rng.choice(chosen).strip()
        if compound not in known and len(compound) < 24:
            known.add(compound)
            chosen.append(compound)
    return [piece.encode() for piece in chosen]


def build_schema(number: int) -> dict[str, Any]:
    """A schema as applications use them. Its list is too long to end."""
    person = {
        "type": "object",
        "properties": {
            f"name_{number}": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "score": {"type": "number"},
            "active": {"type": "boolean"},
            "city": {"enum": [f"{city} {number}" for city in CITIES]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        },
        "required": [f"name_{number}", "age", "city", "tags"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": person, "minItems": 5000}


class StructuredRun(NamedTuple):
    """One run of a workload."""

    seconds: float
    num_tokens: int
    timing: StepTiming
    masks_seconds: float  # mean over the steps that had masks
    admit_seconds: float  # until all grammars were compiled


class MaskTimer:
    """Measures how long the masks of each step take."""

    def __init__(self, builder: Any):
        self.compute = builder.compute_masks
        self.seconds: list[float] = []
        builder.compute_masks = self

    def __call__(self, matchers: Any) -> Any:
        start = time.perf_counter()
        masks = self.compute(matchers)
        self.seconds.append(time.perf_counter() - start)
        return masks


def run_structured(
    llm: Any, workload: OfflineWorkload, num_constrained: int, temperature: float
) -> StructuredRun:
    from bloomery import SamplingParams, StructuredOutputs

    params = []
    for number, count in enumerate(workload.output_lens):
        outputs = None
        if number < num_constrained:
            outputs = StructuredOutputs(json=build_schema(number))
        params.append(
            SamplingParams(
                temperature=temperature,
                seed=number,
                max_tokens=count,
                ignore_eos=True,
                detokenize=False,
                structured_outputs=outputs,
            )
        )
    prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
    loop = llm.loop
    loop.timing = StepTiming()
    timer = MaskTimer(loop.mask_builder) if loop.mask_builder is not None else None
    # Compiling belongs to the API process of a server, so it is not part of the measured time.
    requests = [llm.request_builder.build_generation(*pair) for pair in zip(prompts, params)]
    start = time.perf_counter()
    for request in requests:
        llm._submit(request, None)
    # With some constrained requests, the time is that of the others.
    timed = requests[num_constrained:] or requests
    seconds = 0.0
    admit_seconds = 0.0
    while not all(request.finished for request in requests):
        llm._step()
        if not loop.pending_grammars and not admit_seconds:
            admit_seconds = time.perf_counter() - start
        if not seconds and all(request.finished for request in timed):
            seconds = time.perf_counter() - start
    for request in requests:
        llm._remove(request)
    masks_seconds = 0.0
    if timer is not None:
        loop.mask_builder.compute_masks = timer.compute
        if timer.seconds:
            masks_seconds = statistics.mean(timer.seconds)
    timing = loop.timing
    num_tokens = sum(
        len(completion.token_ids)
        for request in requests
        for completion in request.completions.values()
    )
    assert num_tokens == sum(workload.output_lens), "a grammar ended early"
    num_tokens -= sum(workload.output_lens[len(timed) :])
    return StructuredRun(seconds, num_tokens, timing, masks_seconds, admit_seconds)


def share_times(timing: StepTiming) -> dict[str, float]:
    """The shares of the device's time in which it waited or sampled."""
    total = max(timing.idle + timing.device, 1e-9)
    return {
        "idle": round(timing.idle / total, 4),
        "waits": round(timing.masks / total, 4),
        "sampling": round(timing.sampling / total, 4),
    }


def use_vocabulary(llm: Any, source: Any) -> None:
    """Give an engine that has no tokenizer the tokens for its grammars."""
    from bloomery.structured.matcher import MaskBuilder, TokenVocabulary

    vocabulary: Future[TokenVocabulary] = Future()
    start = time.perf_counter()
    vocabulary.set_result(TokenVocabulary(source))
    print(json.dumps({"vocabulary_s": round(time.perf_counter() - start, 2)}), flush=True)
    llm.request_builder.vocabulary = vocabulary
    llm.loop.create_mask_builder = lambda: MaskBuilder(vocabulary, llm.capacity.vocab)


def measure_first_masks(llm: Any) -> dict[str, float]:
    """Milliseconds from arrival to the first mask, for schemas that the engine has not seen."""
    from bloomery.errors import InvalidRequest
    from bloomery.messages import EngineRequest, ResolvedSampling
    from bloomery.sampling import StructuredOutputs
    from bloomery.structured.grammar import compile_grammar

    builder = llm.loop.mask_builder
    vocabulary = llm.request_builder.load_vocabulary().result()
    latencies = []
    for entry in json.loads(SAMPLE_SCHEMAS.read_text()):
        outputs = StructuredOutputs(json=entry["schema"])
        try:
            grammar, _ = compile_grammar(outputs, vocabulary, "schema")
        except InvalidRequest:
            continue  # refused with an error; see maskbench.py
        request = EngineRequest("0", (1,), ResolvedSampling(), 16, grammar=grammar)
        start = time.perf_counter()
        matcher = builder.create_matcher(request).result()
        builder.compute_masks([matcher])
        latencies.append(1000 * (time.perf_counter() - start))
    latencies.sort()
    return {
        "schemas": len(latencies),
        "first_mask_p50_ms": round(statistics.median(latencies), 2),
        "first_mask_p99_ms": round(latencies[int(0.99 * (len(latencies) - 1))], 2),
        "first_mask_max_ms": round(latencies[-1], 2),
    }


def load_engine(shape: str) -> tuple[Any, Any]:
    """The engine, and the rates of its device for the floor (None on a CPU)."""
    if shape == "embedded":
        from bloomery import LLM

        return LLM(enable_prefix_caching=False), None
    rates = measure_rates()
    folder = Path(tempfile.mkdtemp()) / shape
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    llm = create_engine("bloomery", folder, {})
    use_vocabulary(llm, WordVocabulary(llm.capacity.vocab))
    return llm, rates


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=("embedded", *SHAPES))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    llm, rates = load_engine(args.shape)
    rng = random.Random(0)
    prompts = [[rng.randrange(300, 20000) for _ in range(args.prompt)] for _ in range(args.batch)]
    workload = OfflineWorkload(prompts, [args.output] * args.batch)
    cases = {"none": 0, "one": 1, "all": args.batch}
    warm_up = OfflineWorkload(prompts, [24] * args.batch)
    for num_constrained in cases.values():  # captures the graphs and compiles the kernels
        for _ in range(2):
            run_structured(llm, warm_up, num_constrained, args.temperature)
    runs: dict[str, list[StructuredRun]] = {name: [] for name in cases}
    for _ in range(args.repeat):
        for name, num_constrained in cases.items():
            run = run_structured(llm, workload, num_constrained, args.temperature)
            runs[name].append(run)
    fastest = {name: min(results, key=lambda run: run.seconds) for name, results in runs.items()}
    for name, run in fastest.items():
        row: dict[str, Any] = {
            "shape": args.shape,
            "constrained": f"{cases[name]} of {args.batch}",
            "tok_s": round(run.num_tokens / run.seconds, 1),
            "share": round(fastest["none"].seconds / run.seconds, 4),
            "ms_step": round(1000 * run.seconds / args.output, 3),
            "masks_ms": round(1000 * run.masks_seconds, 3),
            "admit_ms": round(1000 * run.admit_seconds, 1),
            "steps": run.timing.steps,
            **share_times(run.timing),
        }
        if rates is not None:
            floor = WorkFloor(llm, rates).workload_seconds(workload)
            row["floor_ms_step"] = round(1000 * floor / args.output, 3)
        print(json.dumps(row), flush=True)
    print(json.dumps({"shape": args.shape, **measure_first_masks(llm)}), flush=True)


if __name__ == "__main__":
    main()
