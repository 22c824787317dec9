"""Requests that must be refused, each with its exact status and field, on every API's routes.

After each of them a canary request must get its usual answer, the engine must hold no block of
the KV cache and the server must be ready. So the list detects crashes and leaks as well.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import httpx2
import pytest

from tests.server.conftest import HttpTestServer
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
INTERNAL_DETAIL = re.compile(r"0x[0-9a-f]{6,}|/(home|tmp|dev/shm|usr|work)/|Traceback|\.py\b")
HELLO = [{"role": "user", "content": "hi"}]
NESTED_LISTS = "[" * 200_000
NAN_BODY = '{"prompt": "a", "temperature": NaN}'


def canary_answer(server: HttpTestServer) -> str:
    body = {"prompt": "The smith", "max_tokens": 8, "temperature": 0}
    response = server.post(COMPLETIONS, body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def expected_canary(server: HttpTestServer) -> str:
    return canary_answer(server)


@pytest.fixture(autouse=True)
def server_stays_healthy(server: HttpTestServer, expected_canary: str) -> Any:
    yield
    assert canary_answer(server) == expected_canary
    assert server.get("/ready").status_code == 200
    assert wait_until(lambda: server.backend.is_idle)


def check_refusal(response: httpx2.Response, status: int, tgi: bool) -> Any:
    """Check status and form of an error, and that it shows no internals; return its content."""
    assert response.status_code == status, response.text[:300]
    assert not INTERNAL_DETAIL.search(response.text), response.text
    assert len(response.text) < 1000
    assert response.headers["x-request-id"]
    body = response.json()
    if tgi:
        assert set(body) == {"error", "error_type"}
        assert all(isinstance(value, str) for value in body.values())
        return body
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    expected_type = "invalid_request_error"
    if status == 429:
        expected_type = "rate_limit_error"
    elif status >= 500:
        expected_type = "server_error"
    assert body["error"]["type"] == expected_type
    return body["error"]


# ---- malformed bodies -----------------------------------------------------------------------

BODIES = [
    ("empty", b"", 400, 400),
    ("blank", b"  \n", 400, 400),
    ("half an object", b"{", 400, 400),
    ("a list", b"[]", 400, 422),
    ("a string", b'"x"', 400, 422),
    ("null", b"null", 400, 422),
    ("not UTF-8", b'{"prompt": "\xff", "inputs": "\xff"}', 400, 400),
    ("half a surrogate pair", b'{"prompt": "\\ud800"}', 400, 400),
    ("trailing text", b'{"prompt": "a"} x', 400, 400),
    ("200,000 brackets", NESTED_LISTS.encode(), 400, 400),
    (
        "the same field twice",
        b'{"prompt": "a", "messages": [], "prompt": 5, "inputs": "a", "inputs": 5}',
        400,
        422,
    ),
    ("100,000 objects in one another", b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 400, 400),
    ("a pickle", b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94", 400, 400),
    ("NaN", NAN_BODY.encode(), 400, 422),
    ("Infinity", NAN_BODY.replace("NaN", "-Infinity").encode(), 400, 422),
    ("1e999", NAN_BODY.replace("NaN", "1e999").encode(), 400, 422),
    ("5,000 digits", NAN_BODY.replace("NaN", "9" * 5000).encode(), 400, 422),
]


@pytest.mark.parametrize(
    ("body", "openai", "tgi"), [case[1:] for case in BODIES], ids=[case[0] for case in BODIES]
)
def test_malformed_bodies_are_refused(
    server: HttpTestServer, body: bytes, openai: int, tgi: int
) -> None:
    headers = {"content-type": "application/json"}
    for path in (CHAT, COMPLETIONS):
        error = check_refusal(
            server.client.post(path, content=body, headers=headers), openai, tgi=False
        )
        if b"temperature" in body:
            assert error["param"] == "temperature"
    check_refusal(server.client.post(GENERATE, content=body, headers=headers), tgi, tgi=True)


# ---- OpenAI ---------------------------------------------------------------------------------

# (fields added to a valid request, the field that the error must name)
CHAT_CASES: list[tuple[dict[str, Any], str | None]] = [
    ({"model": 5}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9"}}],
                }
            ]
        },
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1e12}, "max_tokens"),
    ({"max_tokens": "ten"}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_tokens"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": "x"}, "logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions[0].name"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
        "response_format.json_schema.schema",
    ),
    ({"guided_regex": "("}, "guided_regex"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"a": {"b": 1}}}, "chat_template_kwargs[...]"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"messages": HELLO * 5000}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 5000}]},
        "messages",
    ),
    (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "parameters": {"type": "string", "pattern": "(a+)+b"},
                    },
                }
            ]
        },
        "tools",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"$ref": "#"}},
            }
        },
        "response_format",
    ),
]
COMPLETION_CASES: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": 5}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": [2**63]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [{"a": 1}]}, "prompt"),
    ({"prompt": [[1, 2], [3, 10**6]]}, "prompt[1]"),
    ({"prompt": ["a"] * 10_000}, "n"),
    ({"prompt": [[5]] * 10_000}, "n"),
    ({"prompt": ["a"] * 100, "n": 2}, "n"),
    ({"prompt": [5] * 600}, "prompt"),
    ({"prompt": "word " * 2000}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1, "echo": True}, "max_tokens"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 10**6, "n": 128}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
]
COMMON_CASES: list[tuple[dict[str, Any], str | None]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.01}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"n": "2"}, "n"),
    ({"min_tokens": 50, "max_tokens": 5}, "min_tokens"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": "x" * 1_000_000}, "stop"),
    ({"stop": 5}, "stop"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**64)}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"user": "x" * 1_000_000}, "user"),
    ({"metadata": {"a": "x" * 1_000_000}}, "metadata"),
    ({"metadata": {"a": 5}}, "metadata[...]"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"adapter_id": "../../etc/passwd"}, "adapter_id"),
    ({f"unknown {i}": i for i in range(300)}, None),
    ({"stop": ["x"] * 100_000}, "stop"),
    ({"logit_bias": {str(i): 1 for i in range(50_000)}}, "logit_bias"),
    ({"logit_bias": {"5": 1e308}}, "logit_bias"),
    ({"stop_token_ids": [5] * 200_000}, "stop_token_ids"),
    ({"metadata": {str(i): "x" for i in range(100_000)}}, "metadata"),
]


def case_id(case: tuple[dict[str, Any], str | None]) -> str:
    return json.dumps(case[0])[:60]


@pytest.mark.parametrize(
    ("more", "field"), CHAT_CASES + COMMON_CASES, ids=map(case_id, CHAT_CASES + COMMON_CASES)
)
def test_invalid_chat_fields_are_refused(
    server: HttpTestServer, more: dict[str, Any], field: str | None
) -> None:
    body = {"model": "speaker", "messages": HELLO, "max_tokens": 3, **more}
    assert check_refusal(server.post(CHAT, body), 400, tgi=False)["param"] == field


@pytest.mark.parametrize(
    ("more", "field"),
    COMPLETION_CASES + COMMON_CASES,
    ids=map(case_id, COMPLETION_CASES + COMMON_CASES),
)
def test_invalid_completion_fields_are_refused(
    server: HttpTestServer, more: dict[str, Any], field: str | None
) -> None:
    error = check_refusal(
        server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 3, **more}), 400, tgi=False
    )
    assert error["param"] == field
    if len(str(more.get("prompt"))) > 1000 and field == "prompt":
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("model", ["gpt-4o", "../../etc/passwd", "x" * 1_000_000])
def test_unknown_models_are_refused(server: HttpTestServer, model: str) -> None:
    error = check_refusal(server.post(CHAT, {"model": model, "messages": HELLO}), 404, tgi=False)
    assert error["code"] == "model_not_found" and error["message"].count("x") < 80
    assert server.get(f"/v1/models/{model[:100]}").status_code == 404


@pytest.mark.parametrize("model", ["speaker", "org/speaker-1", "tgi", "dummy", "default", "", None])
def test_known_and_placeholder_models_are_accepted(
    server: HttpTestServer, model: str | None
) -> None:
    body = {"model": model, "messages": HELLO, "max_tokens": 1}
    assert server.post(CHAT, body).status_code == 200
    if model:
        assert server.get(f"/v1/models/{model}").json()["id"] == model


ACCEPTED_FIELDS = [
    {"temperature": 0},
    {"top_p": 0},
    {"top_p": 1.0},
    {"top_k": -1},
    {"top_k": 0},
    {"max_tokens": 10**6},
    {"content": "x"},
    {"unheard_of": {"a": 1}},
    {"stop": None},
    {"n": None},
    {"stream": None},
    {"logit_bias": {}},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {"seed": 2**64 - 1},
    {"seed": -1},
    {"user": "me"},
    {"metadata": {"a": "b"}},
    {"tools": []},
    {"tool_choice": "none"},
    {"functions": None},
    {"stream_options": None},
    {"messages": [*HELLO, {"role": "tool", "content": "x", "tool_call_id": "1"}]},
]


@pytest.mark.parametrize("more", ACCEPTED_FIELDS, ids=json.dumps)
def test_valid_and_unknown_fields_are_accepted(
    server: HttpTestServer, more: dict[str, Any]
) -> None:
    response = server.post(
        CHAT, {"messages": [{"role": "user", "content": "a\x00b"}], "max_tokens": 2, **more}
    )
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("more", [{"prompt": None}, {"top_p": 0}, {"seed": -1}], ids=json.dumps)
def test_valid_completion_fields_are_accepted(server: HttpTestServer, more: dict[str, Any]) -> None:
    response = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2, **more})
    assert response.status_code == 200, response.text


def test_max_tokens_is_cut_to_the_context(server: HttpTestServer) -> None:
    body = {"prompt": [5] * 500, "max_tokens": 1000, "ignore_eos": True}
    choice = server.post(COMPLETIONS, body).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    for length, status in ((511, 200), (512, 400), (513, 400)):
        assert server.post(COMPLETIONS, {**body, "prompt": [5] * length}).status_code == status


# ---- TGI ------------------------------------------------------------------------------------

PREFIX = "Input validation error: "
TGI_CASES: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0}, "`temperature` must be strictly positive"),
    ({"temperature": -0.1}, "`temperature` must be strictly positive"),
    ({"temperature": "hot"}, "parameters.temperature must be a number, not a string"),
    ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": -2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 1.0}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"top_k": 1.5}, "parameters.top_k must be a whole number, not a number"),
    ({"best_of": 3, "do_sample": True}, "`best_of` must be > 0 and <= 2. Given: 3"),
    ({"best_of": 0}, "`best_of` must be > 0 and <= 2. Given: 0"),
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"max_new_tokens": -1}, "`max_new_tokens` must be strictly positive"),
    (
        {"max_new_tokens": True},
        "parameters.max_new_tokens must be a whole number, not true or false",
    ),
    (
        {"max_new_tokens": 512},
        "`inputs` tokens + `max_new_tokens` must be <= 512. "
        "Given: 1 `inputs` tokens and 512 `max_new_tokens`",
    ),
    ({"stop": ["a", "b", "c", "d", "e"]}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"stop": [""]}, "stop must be a string or a list of strings, none of them empty, not ['']"),
    ({"stop": ["x" * 1_000_000]}, "an entry of stop may have at most 256 bytes"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"truncate": 0}, "`truncate` must be strictly positive and less than 511. Given: 0"),
    ({"truncate": 600}, "`truncate` must be strictly positive and less than 511. Given: 600"),
    ({"seed": 2**64}, None),
    ({"seed": -1}, None),
    (
        {"grammar": {"type": "regex", "value": "("}},
        "the regular expression is not valid: unclosed group",
    ),
    (
        {"adapter_id": "x"},
        "adapter_id is not supported: this server runs without LoRA adapters: start the server "
        "with --enable-lora, --lora-modules NAME=PATH or --lora-allow FOLDER",
    ),
]


@pytest.mark.parametrize(
    ("parameters", "message"), TGI_CASES, ids=[json.dumps(case[0])[:60] for case in TGI_CASES]
)
def test_invalid_tgi_parameters_are_refused_in_tgis_words(
    server: HttpTestServer, parameters: dict[str, Any], message: str | None
) -> None:
    for path in (GENERATE, "/", "/invocations", "/generate_stream"):
        if path == "/generate_stream" and parameters.get("best_of", 1) != 1:
            message = "`best_of` != 1 is not supported when streaming tokens"
        body = check_refusal(
            server.post(path, {"inputs": "a", "parameters": {"max_new_tokens": 3, **parameters}}),
            422,
            tgi=True,
        )
        assert body["error_type"] == "validation" and body["error"].startswith(PREFIX)
        if message is not None:
            assert body["error"] == PREFIX + message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "inputs is missing"),
        ({"inputs": ""}, "`inputs` cannot be empty"),
        ({"inputs": ["a"] * 5}, "inputs must be a string, not a list"),
        ({"inputs": "a", "stream": "yes"}, "stream must be true or false, not a string"),
        (
            {"inputs": "a", "parameters": {"decoder_input_details": True}, "stream": True},
            "`decoder_input_details` == true is not supported when streaming tokens",
        ),
        ({"inputs": "iron " * 600}, None),
        (
            {"inputs": "x" * 100_000},
            "the prompt has 100000 characters: a context of 512 tokens holds at most 8192",
        ),
    ],
)
def test_invalid_tgi_inputs_are_refused_in_tgis_words(
    server: HttpTestServer, body: dict[str, Any], message: str | None
) -> None:
    error = check_refusal(server.post("/", body), 422, tgi=True)["error"]
    assert error == PREFIX + message if message else error.startswith(PREFIX)


def test_a_chat_template_error_is_reported(server: HttpTestServer) -> None:
    body = {"messages": [{"role": "assistant", "content": "x"}]}
    error = check_refusal(server.post("/chat_tokenize", body), 422, tgi=True)
    assert error == {
        "error": "Template error: the first word is not the assistant's",
        "error_type": "template_error",
    }


def test_markdown_images_are_plain_text(server: HttpTestServer) -> None:
    body = {"inputs": "![](http://127.0.0.1:1/x.png)", "parameters": {"max_new_tokens": 2}}
    assert server.post(GENERATE, body).status_code == 200


# ---- HTTP -----------------------------------------------------------------------------------


def test_unknown_routes_and_methods_are_refused(server: HttpTestServer) -> None:
    check_refusal(server.post("/v1/nope", {}), 404, tgi=False)
    check_refusal(server.post("/nope", {}), 404, tgi=True)
    for path in (COMPLETIONS, GENERATE):
        response = server.get(path)
        check_refusal(response, 405, tgi=path == GENERATE)
        assert response.headers["allow"] == "POST"
    assert server.get(CHAT).json()["object"] == "list"  # of stored chats
    response = server.client.request("PUT", CHAT)
    check_refusal(response, 405, tgi=False)
    assert response.headers["allow"] == "GET, POST"
    assert server.client.request("DELETE", "/health").headers["allow"] == "GET"
    assert server.client.head("/health").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/json", "content-encoding": "gzip"},
        {"content-type": "", "content-encoding": "gzip"},
    ],
)
def test_bodies_that_are_not_plain_json_are_refused(
    server: HttpTestServer, headers: dict[str, str]
) -> None:
    for path in (CHAT, GENERATE):
        check_refusal(
            server.client.post(path, content=b"{}", headers=headers), 415, tgi=path == GENERATE
        )


def test_json_without_a_content_type_is_accepted(server: HttpTestServer) -> None:
    headers = {"content-type": ""}
    bodies = {
        COMPLETIONS: b'{"prompt": "a", "max_tokens": 1}',
        GENERATE: b'{"inputs": "a", "parameters": {"max_new_tokens": 1}}',
    }
    for path, body in bodies.items():
        response = server.client.post(path, content=body, headers=headers)
        assert response.status_code == 200, response.text
        broken = server.client.post(path, content=b"{", headers=headers)
        check_refusal(broken, 400, tgi=path == GENERATE)


def exchange(server: HttpTestServer, data: bytes) -> bytes:
    """Send bytes and return what arrives before the connection is closed."""
    received = b""
    # The server resets a connection on which it has left something unread.
    with server.open_socket() as connection, suppress(ConnectionResetError):
        connection.sendall(data)
        while part := connection.recv(65536):
            received += part
    return received


def test_a_large_body_is_refused_before_it_is_read(server: HttpTestServer) -> None:
    head = (
        "POST {} HTTP/1.1\r\n"
        "host: localhost\r\n"
        "content-type: application/json\r\n"
        "content-length: {}\r\n\r\n"
    )
    for path, size in ((CHAT, 8 << 20), (GENERATE, 2 << 20)):
        response = exchange(server, head.format(path, size + 1).encode() + b"{")
        assert response.startswith(b"HTTP/1.1 413") and b"connection: close" in response
        chunked = (
            head.format(path, 0).replace("content-length: 0", "transfer-encoding: chunked").encode()
        )
        with server.open_socket() as connection:
            connection.sendall(chunked)
            chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
            try:
                for _ in range(200):
                    connection.sendall(chunk)
            except OSError:
                pass  # the server has closed the connection, as it should
            assert connection.recv(12) == b"HTTP/1.1 413"


def test_many_or_large_headers_are_refused(server: HttpTestServer) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    many = head + b"".join(b"x-%d: y\r\n" % i for i in range(300)) + b"\r\n"
    large = head + b"x: " + b"y" * 70_000 + b"\r\n\r\n"
    unfinished = head + b"x: " + b"y" * 66_000
    for data in (many, large, unfinished):
        assert exchange(server, data).startswith(b"HTTP/1.1 431")


# Two statements of where a body ends, or one that two parsers may read differently.
AMBIGUOUS_LENGTHS = [
    b"content-length: 4\r\ntransfer-encoding: chunked",
    b"content-length: 4\r\ncontent-length: 5",
    b"content-length: 4, 4",
    b"content-length: +4",
    b"content-length: -1",
    b"content-length: 0x4",
    b"content-length: 99999999999999999999999",
    b"transfer-encoding: chunked, chunked",
    b"transfer-encoding: xchunked",
    b"transfer-encoding : chunked",
    b"transfer-encoding:\r\n chunked",
    b"x: a\x00b\r\ncontent-length: 4",
]


@pytest.mark.parametrize(
    "lengths", AMBIGUOUS_LENGTHS, ids=[lengths.decode() for lengths in AMBIGUOUS_LENGTHS]
)
def test_ambiguous_body_lengths_are_refused(server: HttpTestServer, lengths: bytes) -> None:
    head = b"POST /generate HTTP/1.1\r\nhost: localhost\r\n" + lengths
    assert exchange(server, head + b"\r\n\r\n0\r\n\r\n").startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (
            b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: gzip, chunked\r\n",
            415,
        ),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: evil.com\r\nhost: localhost\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: localhost:80@evil.com\r\nconnection: close\r\n", 421),
        (b"GET /health HTTP/1.1\r\nhost: [::1]evil.com\r\nconnection: close\r\n", 421),
        (b"GET http://evil.com/health HTTP/1.1\r\nhost: evil.com\r\nconnection: close\r\n", 421),
        (b"GET /he\xd0\xb0lth HTTP/1.1\r\nhost: localhost\r\n", 400),
        (b"GET /%2fhealth HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n", 404),
        (
            b"GET /v1/models/%00%0d%0aset-cookie:x HTTP/1.1\r\n"
            b"host: localhost\r\nconnection: close\r\n",
            404,
        ),
        (b"CONNECT 127.0.0.1:9 HTTP/1.1\r\nhost: localhost\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n", 400),
        (
            b"GET /generate HTTP/1.1\r\nhost: localhost\r\n"
            b"upgrade: websocket\r\nconnection: upgrade, close\r\n"
            b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n",
            405,
        ),
    ],
)
def test_unusual_request_heads(server: HttpTestServer, head: bytes, status: int) -> None:
    received = exchange(server, head + b"\r\n")
    assert received.startswith(b"HTTP/1.1 %d" % status)
    response_head = received.partition(b"\r\n\r\n")[0]
    assert b"set-cookie" not in response_head


def test_http_1_0_and_expect_100_continue_are_served(server: HttpTestServer) -> None:
    body = b'{"inputs": "a", "parameters": {"max_new_tokens": 1}}'
    head = (
        "POST /generate HTTP/{}\r\n"
        "host: localhost\r\n"
        "content-type: application/json\r\n"
        "{}content-length: {}\r\n\r\n"
    )
    http_1_0 = head.format("1.0", "", len(body)).encode() + body
    assert exchange(server, http_1_0).startswith(b"HTTP/1.1 200")
    more_headers = "expect: 100-continue\r\nconnection: close\r\n"
    received = exchange(server, head.format("1.1", more_headers, len(body)).encode() + body)
    assert received.startswith(b"HTTP/1.1 100") and b"HTTP/1.1 200" in received


def test_safe_request_ids_are_echoed(server: HttpTestServer) -> None:
    safe = server.get("/health", headers={"x-request-id": "abc-1.2:3"})
    assert safe.headers["x-request-id"] == "abc-1.2:3"
    assert server.get("/health", headers={"x-request-id": "\x1b[31m"}).status_code == 400
    for bad in ("a b", "x" * 200, "é"):
        response = server.get("/health", headers={"x-request-id": bad.encode("utf-8")})
        assert response.headers["x-request-id"].startswith("req_")


def test_invalid_anthropic_requests_are_refused(server: HttpTestServer) -> None:
    good = {"messages": HELLO, "max_tokens": 3}
    cases = [
        ({"max_tokens": None}, 400),
        ({"messages": []}, 400),
        ({"temperature": 1.5}, 400),
        ({"model": "x"}, 404),
        ({"tools": [{}]}, 400),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400),
    ]
    for more, status in cases:
        response = server.post("/v1/messages", {**good, **more})
        assert response.status_code == status
        body = response.json()
        assert body["type"] == "error" and set(body["error"]) == {"type", "message"}
        assert body["error"]["type"] == (
            "not_found_error" if status == 404 else "invalid_request_error"
        )
        assert not INTERNAL_DETAIL.search(response.text)


def test_invalid_responses_requests_are_refused(server: HttpTestServer) -> None:
    cases = [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_reference"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"tools": [{}]}, "tools[0]"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"conversation": {"name": "x"}}, "conversation"),
        ({"input": []}, "input"),
    ]
    for more, field in cases:
        assert (
            check_refusal(server.post("/v1/responses", {"input": "hi", **more}), 400, tgi=False)[
                "param"
            ]
            == field
        )
