"""Requests with grammars in the real engine: every combination gives the tokens it should.

The model is tiny and random, so that only the grammar decides what its output looks like. Its ids
are those of BYTES. An output must match its grammar, and it must be the same with the fused sampler
and the torch sampler, in any batch, after a preemption, after a restart, and on two ranks.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers as tf

from bloomery import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from bloomery.engine.executor import Executor
from bloomery.engine.loop import EngineLoop
from bloomery.errors import InvalidRequest
from bloomery.executors.multiprocess import MultiprocessExecutor
from bloomery.messages import EngineRequest, ResolvedSampling, TokenOutput
from bloomery.structured.grammar import compile_grammar
from bloomery.structured.matcher import TokenVocabulary
from tests.parity.cases import ParityCase, make_checkpoint
from tests.parity.serve import build_engine_loop, build_plan, output_token_ids, run_requests
from tests.structured.byte_vocabulary import BYTES, END, use_grammars

VOCAB = 160
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["yes", "maybe"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
OPTIONS: dict[str, Any] = {
    "block_size": 4,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "kv_cache_gib": 0.01,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"seed": 1},
    "truncated": {"seed": 2, "top_k": 50, "top_p": 0.9, "min_p": 0.001},
    "penalties": {"seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "logprobs": {"seed": 1, "logprobs": 2},
    "min tokens": {"seed": 4, "min_tokens": 100},
    "bias": {"seed": 5, "logit_bias": ((ord("a"), 5.0),)},
    "bad words": {"seed": 6, "bad_words": ((ord("0"),), (ord("e"), ord("s")))},
    "typical": {"seed": 7, "typical_p": 0.9},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    config = tf.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    make_checkpoint(ParityCase("llama", lambda: config), folder)
    return folder


@pytest.fixture(scope="module")
def grammar() -> str:
    outputs = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
    return compile_grammar(outputs, TokenVocabulary(BYTES), "schema")[0]


@pytest.fixture(scope="module")
def loop(folder: Path) -> EngineLoop:
    return start_loop(folder)


def start_loop(folder: Path, blocks: int | None = None, **options: Any) -> EngineLoop:
    loop = build_engine_loop(build_plan(folder, 200, **(OPTIONS | options)), blocks)
    use_grammars(loop, VOCAB)
    return loop


def make_requests(grammar: str) -> list[EngineRequest]:
    """One request for each variant, and free ones among them."""
    requests = []
    for name, options in VARIANTS.items():
        sampling = ResolvedSampling(**options)
        prompt = tuple(range(40, 50))
        requests.append(EngineRequest(name, prompt, sampling, 100, (END,), grammar=grammar))
        free = EngineRequest(f"free {name}", prompt, sampling, 12, (END,))
        requests.append(free)
    return requests


def read_object(outputs: list[TokenOutput]) -> dict[str, Any]:
    assert outputs[-1].finish == "stop", outputs[-1].error
    person = json.loads(BYTES.decode(output_token_ids(outputs)))
    assert list(person) == ["name", "age", "kind"]
    assert len(person["name"]) <= 4 and 0 <= person["age"] <= 120
    assert person["kind"] in ("yes", "maybe")
    return person


def collect_tokens(outputs: dict[str, list[TokenOutput]]) -> dict[str, list[int]]:
    return {name: output_token_ids(entries) for name, entries in outputs.items()}


@pytest.fixture(scope="module")
def expected(loop: EngineLoop, grammar: str) -> dict[str, list[int]]:
    """The tokens of all requests, each alone."""
    outputs = {}
    for request in make_requests(grammar):
        outputs |= run_requests(loop, [request])
    for name in VARIANTS:
        read_object(outputs[name])
    return collect_tokens(outputs)


def test_the_fused_sampler_and_the_torch_sampler_agree(expected: dict[str, list[int]]) -> None:
    """Log-probabilities need the torch sampler, and change no token."""
    assert expected["sampled"] == expected["logprobs"]
    assert expected["free sampled"] == expected["free logprobs"]


def test_other_requests_of_the_batch_change_nothing(
    loop: EngineLoop, grammar: str, expected: dict[str, list[int]]
) -> None:
    assert collect_tokens(run_requests(loop, make_requests(grammar))) == expected


@pytest.mark.parametrize("options", [{"steps_in_flight": 2}, {"cpu_kernels": False}])
def test_steps_in_flight_and_kernels_change_nothing(
    folder: Path, grammar: str, expected: dict[str, list[int]], options: dict[str, Any]
) -> None:
    loop = start_loop(folder, **options)
    assert collect_tokens(run_requests(loop, make_requests(grammar))) == expected


def test_preemption_changes_nothing(
    folder: Path, grammar: str, expected: dict[str, list[int]]
) -> None:
    loop = start_loop(folder, blocks=30, steps_in_flight=2)
    assert collect_tokens(run_requests(loop, make_requests(grammar))) == expected
    assert loop.scheduler.num_preemptions > 0


def test_a_replayed_request_goes_on_where_it_was(
    loop: EngineLoop, grammar: str, expected: dict[str, list[int]]
) -> None:
    requests = [request for request in make_requests(grammar) if request.grammar]
    replayed = [
        replace(request, emitted=tuple(expected[request.id][: 3 + number]))
        for number, request in enumerate(requests)
    ]
    tokens = collect_tokens(run_requests(loop, replayed))
    for request in replayed:
        assert [*request.emitted, *tokens[request.id]] == expected[request.id]


@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_ranks_change_nothing(
    folder: Path, grammar: str, expected: dict[str, list[int]], parallel: str
) -> None:
    tokens = run_on_ranks(MultiprocessExecutor(), folder, grammar, **{parallel: 2})
    assert tokens == {name: expected[name] for name in tokens}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_ranks_on_ray_change_nothing(
    folder: Path,
    grammar: str,
    expected: dict[str, list[int]],
    parallel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("ray")
    from bloomery.executors.ray import RayExecutor

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    options = {parallel: 2, "executor": "ray"}
    tokens = run_on_ranks(RayExecutor(), folder, grammar, **options)
    assert tokens == {name: expected[name] for name in tokens}


def run_on_ranks(
    rank_executor: Executor, folder: Path, grammar: str, **options: Any
) -> dict[str, list[int]]:
    """Return the tokens of the first requests."""
    plan = build_plan(folder, 200, **options, **OPTIONS)
    loop = build_engine_loop(plan, executor=rank_executor)
    loop.scheduler.stages = plan.pipeline_parallel_size
    use_grammars(loop, VOCAB)
    try:
        return collect_tokens(run_requests(loop, make_requests(grammar)[:8]))
    finally:
        rank_executor.close()


def test_a_request_that_cannot_go_on_fails_alone(loop: EngineLoop, grammar: str) -> None:
    sampling = ResolvedSampling(allowed_token_ids=(ord("#"),))
    impossible = EngineRequest("bad", (1, 2), sampling, 20, (END,), grammar=grammar)
    wrong = EngineRequest("wrong", (1, 2), ResolvedSampling(), 20, (END,), grammar="start: x")
    fine = EngineRequest("fine", (1, 2), ResolvedSampling(seed=9), 99, (END,), grammar=grammar)
    outputs = run_requests(loop, [impossible, wrong, fine])
    assert outputs["bad"][-1].finish == "error"
    assert "no token is left" in (outputs["bad"][-1].error or "")
    assert "unknown name" in (outputs["wrong"][-1].error or "")
    read_object(outputs["fine"])


def test_ignore_eos_ends_with_the_grammar(loop: EngineLoop, grammar: str) -> None:
    request = EngineRequest("0", (1, 2, 3), ResolvedSampling(seed=3), 150, (), grammar=grammar)
    read_object(run_requests(loop, [request])["0"])


def test_an_aborted_request_leaves_the_others_alone(loop: EngineLoop, grammar: str) -> None:
    for number in range(4):
        sampling = ResolvedSampling(seed=number)
        request = EngineRequest(str(number), (7, 8), sampling, 120, (END,), grammar=grammar)
        loop.add(request)
    assert loop.abort("3")  # perhaps while its grammar is being compiled
    outputs: dict[str, list[TokenOutput]] = {"0": [], "1": [], "2": []}
    steps = 0
    while loop.busy:
        for output in loop.step():
            outputs[output.request].append(output)
        steps += 1
        if steps == 5:
            loop.abort("1")
    read_object(outputs["0"])
    read_object(outputs["2"])


def test_an_engine_without_a_tokenizer_refuses_grammars(folder: Path, grammar: str) -> None:
    loop = build_engine_loop(build_plan(folder, 64, **OPTIONS))
    request = EngineRequest("0", (1,), ResolvedSampling(), 5, grammar=grammar)
    with pytest.raises(InvalidRequest, match="tokenizer"):
        loop.add(request)


# ---- the offline API, with the embedded model ----------------------------------------------------

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "size": {"enum": ["big", "small"]}},
    "required": ["city", "size"],
}


@pytest.mark.slow
def test_the_offline_api_takes_structured_outputs() -> None:
    llm = LLM(max_model_len=256, device="cpu")
    outputs = StructuredOutputs(json=CITY)
    params = [
        SamplingParams(max_tokens=60, seed=1, n=2, structured_outputs=outputs),
        SamplingParams(max_tokens=60, seed=2, stop='"size"', structured_outputs=outputs),
        SamplingParams(max_tokens=8, seed=3, structured_outputs=StructuredOutputs(choice=["a b"])),
    ]
    answers = llm.generate(["A city as JSON:"] * 3, params, use_tqdm=False)
    for completion in answers[0].outputs:
        city = json.loads(completion.text)
        assert city["size"] in ("big", "small")
        assert len(city) == 2, "properties that the schema does not name are not allowed"
    assert answers[1].outputs[0].text.startswith("{") and "size" not in answers[1].outputs[0].text
    assert answers[2].outputs[0].text == "a b"
    with pytest.raises(InvalidRequest, match='"not" at #'):
        wrong = StructuredOutputs(json={"not": {}})
        llm.generate(["A"], SamplingParams(structured_outputs=wrong), use_tqdm=False)
    llm.close()


@pytest.mark.slow
def test_a_constrained_stream_survives_a_killed_engine() -> None:
    params = SamplingParams(
        max_tokens=80,
        seed=5,
        structured_outputs=StructuredOutputs(
            json={"type": "array", "items": CITY, "minItems": 3, "maxItems": 3}
        ),
    )

    async def read(llm: AsyncLLM, kill: bool) -> str:
        text = ""
        async for delta in llm.stream("Cities as JSON:", params):
            text += delta.text
            if kill and len(text) > 20 and llm.client.pid is not None:
                os.kill(llm.client.pid, signal.SIGKILL)
                kill = False
        return text

    llm = AsyncLLM(max_model_len=256, device="cpu")
    try:
        expected_text = asyncio.run(read(llm, kill=False))
        assert asyncio.run(read(llm, kill=True)) == expected_text
        assert llm.client.epoch == 2
    finally:
        llm.close()
    assert expected_text.startswith("[")
