"""HTTP, an engine process and the embedded model together: the answers equal transformers'."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bloomery.artifacts.locate import locate_model
from bloomery.config import EngineConfig, resolve_plan
from bloomery.engine.client import EngineClient
from bloomery.server.service import ServerSettings
from bloomery.text.load import load_tokenizer
from tests.server.conftest import HttpTestServer, start_server
from tests.server.sse import parse_events
from tests.waiting import wait_until

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "embedded.json").read_text(encoding="utf-8")
)
CHAT_BODY = {
    "messages": [{"role": "user", "content": "What is iron made from? Answer in one sentence."}]
}


@pytest.fixture(scope="module")
def smol() -> Iterator[HttpTestServer]:
    artifact = locate_model(None, None)
    config = EngineConfig(
        cpu_kernels=False,  # compute as transformers does
        threads=1,
        kv_cache_gib=0.25,
        max_model_len=1024,
    )
    plan = resolve_plan(
        config,
        name=artifact.name,
        path=str(artifact.path),
        kind=artifact.kind,
        dtype="float32",
        device="cpu",
        context=8192,
    )
    client = EngineClient(plan)
    with ExitStack() as exit_stack:
        server = start_server(
            client,
            load_tokenizer(artifact),
            ServerSettings(model=artifact.name),
            exit_stack,
            on_startup=client.start,
            on_shutdown=client.close,
        )
        assert server.get("/ready").json()["state"] in ("loading", "ready")
        is_ready = wait_until(lambda: server.get("/ready").status_code == 200, 240)
        assert is_ready, "the model does not get ready"
        yield server


def test_greedy_answers_equal_those_of_transformers(smol: HttpTestServer) -> None:
    """Twenty requests at once, over both APIs."""
    answers: dict[int, Any] = {}

    def post(number: int, entry: dict[str, Any]) -> None:
        if number % 2:
            body = {
                "prompt": entry["prompt"],
                "max_tokens": 24,
                "temperature": 0,
                "repetition_penalty": 1.0,
                "frequency_penalty": 0.0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            response = smol.post("/v1/completions", body, timeout=120).json()
            answers[number] = response["choices"][0]["token_ids"]
        else:
            body = {
                "inputs": entry["prompt"],
                "parameters": {"max_new_tokens": 24, "details": True},
            }
            details = smol.post("/generate", body, timeout=120).json()["details"]
            answers[number] = [token["id"] for token in details["tokens"]]

    threads = [threading.Thread(target=post, args=pair) for pair in enumerate(GOLDEN)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, entry in enumerate(GOLDEN):
        answer = answers[number]
        expected = entry["ids"][:24]
        if not number % 2:
            expected = expected[: len(answer)]  # TGI's API stops at the end of sequence
        assert answer == expected, entry["prompt"]


def test_a_streamed_conversation_equals_the_full_response(smol: HttpTestServer) -> None:
    body = {**CHAT_BODY, "max_tokens": 24, "temperature": 0}
    full = smol.post("/v1/chat/completions", body, timeout=120).json()
    events = parse_events(
        smol.post("/v1/chat/completions", {**body, "stream": True}, timeout=120).text
    )
    text = "".join(
        choice["delta"].get("content", "") for event in events[:-1] for choice in event["choices"]
    )
    assert text == full["choices"][0]["message"]["content"] and "iron" in text.lower()
    usage = smol.post("/v1/chat/completions", body, timeout=120).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_prompt_logprobs_are_the_same_in_both_apis(smol: HttpTestServer) -> None:
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
    logprobs = openai["choices"][0]["logprobs"]["token_logprobs"]
    assert prefill[0] is None and logprobs[0] is None
    assert prefill[1:] == pytest.approx(logprobs[1:], abs=1e-4)
    assert "".join(openai["choices"][0]["logprobs"]["tokens"]) == text
    assert logprobs[-2] > -4, "Paris is likely"
