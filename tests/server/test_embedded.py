"""The whole way: HTTP, the engine in a process of its own, the embedded model. It says what transformers says."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bloomery.artifacts.locate import locate
from bloomery.config import Config, resolve
from bloomery.engine.client import EngineClient
from bloomery.server.service import Settings
from bloomery.text.load import load_tokenizer
from tests.server.conftest import Running, run
from tests.server.events import parse
from tests.waiting import until

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "embedded.json").read_text(encoding="utf-8")
)
QUESTION = {
    "messages": [{"role": "user", "content": "What is iron made from? Answer in one sentence."}]
}


@pytest.fixture(scope="module")
def smol() -> Iterator[Running]:
    artifact = locate(None, None)
    config = Config(
        native=False, threads=1, kv_cache_gib=0.25, max_model_len=1024
    )  # as transformers computes
    plan = resolve(
        config,
        name=artifact.name,
        path=str(artifact.path),
        kind=artifact.kind,
        dtype="float32",
        device="cpu",
        context=8192,
    )
    client = EngineClient(plan)
    with ExitStack() as exit:
        server = run(
            client,
            load_tokenizer(artifact),
            Settings(model=artifact.name),
            exit,
            before=client.start,
            after=client.close,
        )
        assert server.get("/ready").json()["state"] in ("loading", "ready")
        assert until(lambda: server.get("/ready").status_code == 200, 240), (
            "the model does not get ready"
        )
        yield server


def test_greedy_answers_are_those_of_transformers(smol: Running) -> None:
    """Twenty requests at once, over both APIs."""
    answers: dict[int, Any] = {}

    def ask(number: int, entry: dict[str, Any]) -> None:
        if number % 2:
            body = {
                "prompt": entry["prompt"],
                "max_tokens": 24,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            answers[number] = smol.post("/v1/completions", body, timeout=120).json()["choices"][0][
                "token_ids"
            ]
        else:
            body = {
                "inputs": entry["prompt"],
                "parameters": {"max_new_tokens": 24, "details": True},
            }
            details = smol.post("/generate", body, timeout=120).json()["details"]
            answers[number] = [token["id"] for token in details["tokens"]]

    threads = [threading.Thread(target=ask, args=pair) for pair in enumerate(GOLDEN)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, entry in enumerate(GOLDEN):
        got = answers[number]
        want = entry["ids"][:24]
        assert got == want if number % 2 else got == want[: len(got)], entry["prompt"]


def test_a_conversation_streams_what_it_says_whole(smol: Running) -> None:
    body = {**QUESTION, "max_tokens": 24, "temperature": 0}
    whole = smol.post("/v1/chat/completions", body, timeout=120).json()
    events = parse(smol.post("/v1/chat/completions", {**body, "stream": True}, timeout=120).text)
    said = "".join(
        choice["delta"].get("content", "") for event in events[:-1] for choice in event["choices"]
    )
    assert said == whole["choices"][0]["message"]["content"] and "iron" in said.lower()
    again = smol.post("/v1/chat/completions", body, timeout=120).json()["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] > 0


def test_scores_of_a_prompt_are_the_same_by_every_route(smol: Running) -> None:
    text = "The capital of France is Paris."
    tgi = smol.post(
        "/generate",
        {"inputs": text, "parameters": {"max_new_tokens": 1, "decoder_input_details": True}},
        timeout=120,
    ).json()
    openai = smol.post(
        "/v1/completions",
        {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 1},
        timeout=120,
    ).json()
    prefill = [token["logprob"] for token in tgi["details"]["prefill"]]
    scores = openai["choices"][0]["logprobs"]["token_logprobs"]
    assert prefill[0] is None and scores[0] is None
    assert prefill[1:] == pytest.approx(scores[1:], abs=1e-4)
    assert "".join(openai["choices"][0]["logprobs"]["tokens"]) == text
    assert scores[-2] > -4, "Paris is no surprise"
