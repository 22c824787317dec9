"""Who is let in: keys, hosts, the state of the engine, and how many at once."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from bloomery.messages import EngineStatus
from bloomery.server.auth import Keys, is_loopback
from bloomery.server.limits import Limits
from bloomery.server.routes import table
from bloomery.server.service import Settings
from tests.server.conftest import Running
from tests.waiting import until

OPEN = {"/", "/health", "/ping", "/ready", "/live", "/assets/{file}"}
BODY = {"prompt": "The iron", "max_tokens": 3}


@pytest.fixture
def locked(serve: Callable[..., Running]) -> Running:
    return serve(Settings(model="speaker", keys=("first-key", "second-key")))


def test_every_route_but_the_open_ones_needs_a_key(locked: Running) -> None:
    """A law over the table, so that a new route is denied by existing."""
    for route in table(Settings(model="speaker")):
        path = route.path.replace("{file}", "x").replace("{model}", "speaker")
        status = locked.client.request(
            route.method, path, json={} if route.method == "POST" else None
        ).status_code
        denied = (route.method, route.path) not in {("GET", path) for path in OPEN}
        assert (status == 401) == denied, (route.method, path, status)
    assert {route.path for route in table(Settings(model="m")) if route.open} == OPEN
    for path in (
        "/nope",
        "/v1/nope",
        "/health/",
        "//health",
        "/health%2f..%2fmetrics",
        "/assets",
        "/HEALTH",
        "/./health",
    ):
        with locked.raw() as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            assert connection.recv(12) == b"HTTP/1.1 401", path


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic first-key"},
        {"authorization": "first-key"},
        {"x-api-key": "first-ke"},
        [("authorization", "Bearer first-key"), ("authorization", "Bearer first-key")],
        [("authorization", "Bearer first-key"), ("x-api-key", "a"), ("x-api-key", "b")],
    ],
    ids=str,
)
def test_bad_keys(locked: Running, headers: dict[str, str]) -> None:
    openai = locked.post("/v1/completions", BODY, headers=headers)
    assert openai.status_code == 401 and openai.json()["error"]["code"] == "invalid_api_key"
    tgi = locked.post("/generate", {"inputs": "a"}, headers=headers)
    assert tgi.status_code == 401 and set(tgi.json()) == {"error", "error_type"}
    assert (
        locked.post("/v1/messages", {}, headers=headers).json()["error"]["type"]
        == "authentication_error"
    )


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer second-key"},
        {"x-api-key": "first-key"},
        {"Authorization": "bearer first-key"},
    ],
)
def test_good_keys(locked: Running, headers: dict[str, str]) -> None:
    assert locked.post("/v1/completions", BODY, headers=headers).status_code == 200
    assert locked.get("/nope", headers=headers).status_code == 404
    assert locked.get("/metrics", headers=headers).status_code == 200


def test_prefixes_are_shared_within_a_key_only(locked: Running) -> None:
    prompt = {"prompt": [5] * 40, "max_tokens": 1}
    cached = []
    for key in ("first-key", "first-key", "second-key"):
        answer = locked.post("/v1/completions", prompt, headers={"x-api-key": key})
        cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 32, 0]


def test_one_key_is_one_tenant() -> None:
    from starlette.datastructures import Headers

    assert Keys(["a"]).check(Headers({"x-api-key": "a"})) == ""
    assert (
        Keys(["a", "b"]).check(Headers({"x-api-key": "a"}))
        != Keys(["a", "b"]).check(Headers({"x-api-key": "b"}))
        != ""
    )


def test_metrics_may_be_open(serve: Callable[..., Running]) -> None:
    server = serve(Settings(model="speaker", keys=("k",), open_metrics=True))
    assert server.get("/metrics").status_code == 200 and server.get("/stats").status_code == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("127.1.2.3:80", 200),
        ("[::1]:8000", 200),
        ("evil.com", 421),
        ("evil.com:8000", 421),
        ("localhost.evil.com", 421),
        ("127.0.0.1.evil.com", 421),
        ("", 421),
        ("a/../health", 421),
    ],
)
def test_a_server_on_the_loopback_answers_to_local_names(
    server: Running, host: str, status: int
) -> None:
    assert server.get("/health", headers={"host": host}).status_code == status
    assert server.post("/generate", {"inputs": "a"}, headers={"host": host}).status_code == status


def test_a_public_server_answers_to_any_name(serve: Callable[..., Running]) -> None:
    server = serve(Settings(model="speaker", host="0.0.0.0"))
    assert server.get("/health", headers={"host": "my.example"}).status_code == 200
    named = serve(Settings(model="speaker", allowed_hosts=("box.lan",)))
    assert named.get("/health", headers={"host": "box.lan:8000"}).status_code == 200


def test_what_is_a_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost", "127.9.9.9", "/run/x.sock")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "", "192.168.0.1", "example.com")))


def test_cors_only_where_asked_for(serve: Callable[..., Running], server: Running) -> None:
    ask = {"origin": "http://page.example", "access-control-request-method": "POST"}
    assert server.client.options("/generate", headers=ask).status_code == 405
    shared = serve(Settings(model="speaker", keys=("k",), cors_origins=("http://page.example",)))
    assert (
        shared.client.options("/generate", headers=ask).headers["access-control-allow-origin"]
        == "http://page.example"
    )
    assert (
        shared.post(
            "/generate", {"inputs": "a"}, headers={"origin": "http://page.example"}
        ).status_code
        == 401
    )


# ---- the state of the engine --------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["loading", "failed", "draining", "restarting", "closed"])
def test_health_and_requests_while_not_ready(serve: Callable[..., Running], state: str) -> None:
    server = serve()
    server.backend.status = EngineStatus(state, 0.25, "reading weights")
    if state == "loading":
        server.backend.capacity = None
    for path in ("/health", "/ping", "/"):
        answer = server.get(path)
        assert answer.status_code == 503 and answer.json() == {
            "error": "unhealthy",
            "error_type": "healthcheck",
        }
    assert server.get("/live").status_code == 200
    ready = server.get("/ready")
    assert ready.status_code == 503
    assert ready.json() == {
        "state": state,
        "model": "speaker",
        "progress": 0.25,
        "detail": "reading weights",
    }
    for path in ("/info", "/v1/models", "/stats", "/metrics", "/docs"):
        assert server.get(path).status_code == 200
    assert server.get("/", headers={"accept": "text/html"}).status_code == 200
    for path, body in (
        ("/v1/completions", BODY),
        ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 2}}),
    ):
        answer = server.post(path, body)
        if state == "restarting":
            assert answer.status_code == 200
        else:
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
            assert (answer.headers.get("connection") == "close") == (
                state in ("draining", "closed")
            )


def test_who_shows_no_key_is_not_told_what_went_wrong(locked: Running) -> None:
    locked.backend.status = EngineStatus(
        "restarting", 0.0, "the engine could not load: /models/secret/model.safetensors"
    )
    assert locked.get("/ready").json()["detail"] == ""
    locked.backend.status = EngineStatus("loading", 0.5, "reading weights")
    assert locked.get("/ready").json()["detail"] == "reading weights"


# ---- how many at once -----------------------------------------------------------------------------------------


def test_a_full_house(serve: Callable[..., Running]) -> None:
    server = serve(Settings(model="speaker", limits=Limits(requests=3)))
    assert server.post("/v1/completions", {**BODY, "n": 4}).status_code == 400, (
        "could never be let in"
    )
    long = {"prompt": "The iron", "max_tokens": 9, "ignore_eos": True, "n": 3}
    done: list[int] = []
    server.backend.hold = 1  # whoever is refused is refused at once: there is nothing to wait for
    thread = threading.Thread(
        target=lambda: done.append(server.post("/v1/completions", long).status_code)
    )
    thread.start()
    assert until(lambda: server.backend.steps == 1)
    answer = server.post("/v1/completions", BODY)
    assert answer.status_code == 429
    assert (
        answer.json()["error"]["type"] == "rate_limit_error"
        and 1 <= int(answer.headers["retry-after"]) <= 40
    )
    tgi = server.post("/generate", {"inputs": "a"})
    assert tgi.status_code == 429 and tgi.json() == {
        "error": "Model is overloaded",
        "error_type": "overloaded",
    }
    server.backend.status = EngineStatus("restarting")
    assert server.post("/v1/completions", BODY).status_code == 503
    server.backend.status = EngineStatus("ready")
    server.backend.hold = None
    thread.join()
    assert done == [200]
    assert server.post("/v1/completions", BODY).status_code == 200


def test_too_many_tokens_in_the_queue(serve: Callable[..., Running]) -> None:
    server = serve(Settings(model="speaker", limits=Limits(waiting_tokens=500)), batch=1)
    body = {"prompt": [5] * 300, "max_tokens": 3, "ignore_eos": True}
    statuses: list[int] = []
    server.backend.hold = 0
    thread = threading.Thread(
        target=lambda: statuses.append(server.post("/v1/completions", body).status_code)
    )
    thread.start()
    assert until(lambda: server.backend.loop.busy)
    assert server.post("/v1/completions", body).status_code == 429
    server.backend.hold = None
    thread.join()
    assert statuses == [200] and server.post("/v1/completions", body).status_code == 200
    assert server.post("/v1/completions", BODY).status_code == 200


def test_who_never_finishes_its_head_is_cut_off(serve: Callable[..., Running]) -> None:
    """Nor one that says nothing at all, nor one that stops in the head of its second request; one between two requests
    is not cut off."""
    server = serve(Settings(model="speaker", limits=Limits(body_seconds=2)))
    whole = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with ExitStack() as exit:
        patient = exit.enter_context(server.raw())
        patient.sendall(whole)
        assert answered(patient)
        opened = {
            said: exit.enter_context(server.raw()) for said in (b"", whole[:-2], whole + whole[:20])
        }
        for said, connection in opened.items():
            connection.sendall(said)
        for said, connection in opened.items():
            answers = b""
            with suppress(ConnectionResetError):
                while part := connection.recv(65536):
                    answers += part
            assert answers.count(b"HTTP/1.1 200") == said.count(whole)
        patient.sendall(whole)
        assert answered(patient)


def answered(connection: socket.socket) -> bool:
    """Whether the answer, which has no body, is a good one."""
    said = b""
    while not said.endswith(b"\r\n\r\n"):
        said += connection.recv(65536)
    return said.startswith(b"HTTP/1.1 200")


def test_long_texts_are_tokenized_beside_the_event_loop(serve: Callable[..., Running]) -> None:
    """In a process: while that stands still the text is not done, and others are answered."""
    server = serve(context=60_000, blocks=8000)
    body = {"inputs": "Iron, ash and slag! " * 500}
    before = children()
    want = server.post("/tokenize", body).json()
    (apart,) = children() - before
    os.kill(apart, signal.SIGSTOP)
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(server.post("/tokenize", body).json()))
    thread.start()
    for _ in range(20):
        assert server.get("/live").status_code == 200
    thread.join(0.3)
    assert not done, "it was done by somebody else"
    os.kill(apart, signal.SIGCONT)
    thread.join()
    assert done == [want]


def children() -> set[int]:
    """Of this process, whichever of its threads has started them."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has ended meanwhile
            found.update(map(int, (task / "children").read_text().split()))
    return found
