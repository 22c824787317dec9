"""/v1/completions: null prompts, log-probabilities of the sampled token, fill in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from bloomery.server.service import ServerSettings
from bloomery.text.tokenizer import Tokenizer, TokenizerConfig
from tests.server.conftest import HttpTestServer, start_server
from tests.server.scripted_engine import InProcessEngine, load_test_tokenizer

COMPLETIONS = "/v1/completions"


def test_a_null_prompt_begins_a_text(server: HttpTestServer) -> None:
    response = server.post(COMPLETIONS, {"prompt": None, "max_tokens": 3})
    assert response.status_code == 200
    assert response.json()["usage"]["prompt_tokens"] == 1
    assert server.backend.received[-1].prompt == (1,), "the BOS token"
    missing = server.post(COMPLETIONS, {"max_tokens": 3})
    assert missing.status_code == 400 and missing.json()["error"]["param"] == "prompt"


def test_zero_logprobs_show_the_sampled_token(server: HttpTestServer) -> None:
    body = {"prompt": "The iron", "max_tokens": 3, "logprobs": 0, "temperature": 0}
    (choice,) = server.post(COMPLETIONS, body).json()["choices"]
    logprobs = choice["logprobs"]
    own = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    assert logprobs["top_logprobs"] == [{token: logprob} for token, logprob in own]


@pytest.mark.parametrize("field", ["tools", "functions", "reasoning_effort"])
def test_fields_of_chats_are_refused(server: HttpTestServer, field: str) -> None:
    response = server.post(COMPLETIONS, {"prompt": "The iron", field: [{"name": "f"}]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field and "/v1/chat/completions" in error["message"]


# ---- fill in the middle --------------------------------------------------------------------

GAP_TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")


@pytest.fixture(scope="module")
def code_tokenizer() -> Tokenizer:
    plain = load_test_tokenizer()
    plain.backend.add_special_tokens(list(GAP_TOKENS))
    config = TokenizerConfig(1, (2,), plain.special_tokens, plain.chat_templates)
    return Tokenizer(plain.backend, config)


@pytest.fixture(scope="module")
def code_server(code_tokenizer: Tokenizer) -> Iterator[HttpTestServer]:
    with ExitStack() as exit_stack:
        engine = InProcessEngine(code_tokenizer)
        settings = ServerSettings(model="coder")
        yield start_server(engine, code_tokenizer, settings, exit_stack)


def test_a_suffix_is_refused_without_the_tokens(server: HttpTestServer) -> None:
    response = server.post(COMPLETIONS, {"prompt": "a", "suffix": "b"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "suffix" and "fill in the middle" in error["message"]


def test_a_suffix_becomes_a_gap_to_fill(
    code_server: HttpTestServer, code_tokenizer: Tokenizer
) -> None:
    body = {"prompt": "iron = ", "suffix": " + slag", "max_tokens": 2}
    response = code_server.post(COMPLETIONS, body)
    assert response.status_code == 200
    request = code_server.backend.received[-1]
    text = code_tokenizer.decode(request.prompt, skip_special=False)
    assert text == "<|fim_prefix|>iron = <|fim_suffix|> + slag<|fim_middle|>"
    assert code_tokenizer.token_to_id("<|file_sep|>") in request.stop_ids
    echoed = code_server.post(COMPLETIONS, {**body, "echo": True}).json()["choices"][0]["text"]
    assert echoed.startswith("iron = ") and "fim" not in echoed


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "{0}1{1}2{2}"),
        (("[SUFFIX]", "[PREFIX]"), "{0}2{1}1"),
    ],
)
def test_each_family_has_its_own_order(names: tuple[str, ...], expected: str) -> None:
    tokenizer = load_test_tokenizer()
    tokenizer.backend.add_special_tokens(list(names))
    gap_tokens = Tokenizer(tokenizer.backend).find_gap_tokens()
    assert gap_tokens is not None
    one, two = (tokenizer.encode(text, add_special=False) for text in "12")
    prompt = gap_tokens.build_prompt(one, two)
    assert tokenizer.decode(prompt, skip_special=False) == expected.format(*names)


def test_a_suffix_works_for_several_prompts(code_server: HttpTestServer) -> None:
    body = {"prompt": ["iron", "slag"], "suffix": "!", "max_tokens": 2, "n": 2}
    choices = code_server.post(COMPLETIONS, body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
