"""Limits: how they are set, admission control, load shedding, and the request head."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial

import pytest

from bloomery.errors import ConfigError
from bloomery.messages import EngineStatus
from bloomery.server.errors import HttpError
from bloomery.server.limits import AdmissionControl, ServerLimits
from bloomery.server.service import ServerSettings
from tests.server.conftest import HttpTestServer
from tests.waiting import wait_until

BODY = {"prompt": "The iron", "max_tokens": 3}


def test_limits_are_parsed_by_name() -> None:
    assert ServerLimits.parse(None) == ServerLimits()
    assert ServerLimits.parse("requests=5, deadline_seconds=1.5,waiting_tokens=9") == ServerLimits(
        requests=5, deadline_seconds=1.5, waiting_tokens=9
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=3", "no 'speed'; there are"),
        ("requests=many", "must be a number"),
        ("requests=0", "must be positive"),
        ("requests", "must be a number"),
        ("requests=1.5", "must be a number"),
        ("stall_seconds=nan", "must be positive"),
    ],
)
def test_invalid_limits_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerLimits.parse(text)


def test_info_reports_all_limits(serve: Callable[..., HttpTestServer]) -> None:
    server = serve(ServerSettings(model="speaker", limits=ServerLimits(stop_strings=3)))
    assert server.get("/info").json()["limits"] == asdict(ServerLimits(stop_strings=3))


# ---- admission control ---------------------------------------------------------------------


def admit_until_refused(admission: AdmissionControl, key: str) -> int:
    """Admit single sequences of one key until one is refused, and return their number."""
    count = 0
    while True:
        try:
            admission.admit(1, 1.0, key)
        except HttpError:
            return count
        count += 1


def test_one_key_of_several_leaves_room_for_the_others() -> None:
    admission = AdmissionControl(100, per_key_share=3)
    assert admit_until_refused(admission, "first") == 75
    assert (
        admit_until_refused(admission, "second") > 15
        and admit_until_refused(admission, "third") > 0
    )
    assert admit_until_refused(AdmissionControl(100), "") == 100, "a single key may take all places"


def test_released_permits_free_their_places_once() -> None:
    admission = AdmissionControl(4, per_key_share=3)
    permits = [admission.admit(1, 1.0, "a"), admission.admit(2, 1.0, "b")]
    for permit in permits:
        permit.release()
        permit.release()
    assert admission.num_admitted == 0 and not admission.admitted_by_key


def test_load_shedding_aborts_the_newest_waiting_requests() -> None:
    admission = AdmissionControl(100)
    aborted: list[int] = []
    permits = [admission.admit(1, 1.0) for _ in range(9)]
    for number, permit in enumerate(permits):
        permit.enqueue(10, 1000, 1.0, partial(aborted.append, number))
    permits[8].mark_started()  # it runs, so it is not shed
    admission.shed_load()
    assert aborted == [7, 6]
    assert [permit.was_shed for permit in permits] == [False] * 6 + [True, True, False]
    for _ in range(9):
        admission.shed_load()
    assert len(aborted) == 8 and not admission.waiting_permits


def test_a_full_server_answers_429(serve: Callable[..., HttpTestServer]) -> None:
    server = serve(ServerSettings(model="speaker", limits=ServerLimits(requests=3)))
    response = server.post("/v1/completions", {**BODY, "n": 4})
    assert response.status_code == 400, "a request that can never be admitted is invalid"
    long_body = {"prompt": "The iron", "max_tokens": 9, "ignore_eos": True, "n": 3}
    statuses: list[int] = []
    server.backend.max_steps = 1
    thread = threading.Thread(
        target=lambda: statuses.append(server.post("/v1/completions", long_body).status_code)
    )
    thread.start()
    assert wait_until(lambda: server.backend.num_steps == 1)
    response = server.post("/v1/completions", BODY)
    assert response.status_code == 429
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(response.headers["retry-after"]) <= 40
    tgi = server.post("/generate", {"inputs": "a"})
    assert tgi.status_code == 429
    assert tgi.json() == {"error": "Model is overloaded", "error_type": "overloaded"}
    server.backend.status = EngineStatus("restarting")
    assert server.post("/v1/completions", BODY).status_code == 503
    server.backend.status = EngineStatus("ready")
    server.backend.max_steps = None
    thread.join()
    assert statuses == [200]
    assert server.post("/v1/completions", BODY).status_code == 200


def test_a_full_server_refuses_before_it_reads_a_body(
    serve: Callable[..., HttpTestServer],
) -> None:
    """Even if the body never arrives."""
    server = serve(ServerSettings(model="speaker", limits=ServerLimits(requests=1)))
    server.backend.max_steps = 0
    thread = threading.Thread(
        target=server.post, args=("/v1/completions", {"prompt": "The iron", "max_tokens": 9})
    )
    thread.start()
    assert wait_until(lambda: server.backend.loop.busy)
    head = (
        "POST /v1/completions HTTP/1.1\r\n"
        "host: localhost\r\n"
        "content-type: application/json\r\n"
        "content-length: 1000\r\n\r\n"
    )
    with server.open_socket() as connection:
        connection.sendall(head.encode())
        assert connection.recv(12) == b"HTTP/1.1 429"
    server.backend.max_steps = None
    thread.join()


def test_too_many_waiting_prompt_tokens_are_refused(serve: Callable[..., HttpTestServer]) -> None:
    limits = ServerLimits(waiting_tokens=500)
    server = serve(ServerSettings(model="speaker", limits=limits), max_num_seqs=1)
    body = {"prompt": [5] * 300, "max_tokens": 3, "ignore_eos": True}
    statuses: list[int] = []
    server.backend.max_steps = 0
    thread = threading.Thread(
        target=lambda: statuses.append(server.post("/v1/completions", body).status_code)
    )
    thread.start()
    assert wait_until(lambda: server.backend.loop.busy)
    assert server.post("/v1/completions", body).status_code == 429
    server.backend.max_steps = None
    thread.join()
    assert statuses == [200]
    assert server.post("/v1/completions", body).status_code == 200
    assert server.post("/v1/completions", BODY).status_code == 200


# ---- memory pressure -----------------------------------------------------------------------


def test_requests_are_refused_under_memory_pressure(serve: Callable[..., HttpTestServer]) -> None:
    server = serve(ServerSettings(model="speaker", limits=ServerLimits(memory_bytes=1)))
    response = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert response.status_code == 429 and int(response.headers["retry-after"]) > 0
    assert server.get("/health").status_code == 200


class FakeMemory:
    """The memory of a process, as the test sets it."""

    used = 0

    def __call__(self) -> int:
        return self.used


def test_waiting_requests_are_shed_under_the_highest_memory_pressure(
    serve: Callable[..., HttpTestServer],
) -> None:
    """The running request continues. Waiting requests get 429, streamed or not."""
    memory = FakeMemory()
    settings = ServerSettings(model="speaker", limits=ServerLimits(memory_bytes=100))
    server = serve(settings, measure_memory=memory, max_num_seqs=1)
    body = {"prompt": "The iron", "max_tokens": 9, "ignore_eos": True}
    statuses: dict[str, int] = {}

    def post(name: str, **more: bool) -> None:
        statuses[name] = server.post("/v1/completions", body | more).status_code

    server.backend.max_steps = 1
    threads = [threading.Thread(target=post, args=("runs",))]
    threads[0].start()
    assert wait_until(lambda: server.backend.num_steps == 1)
    for name, stream in (("waits", False), ("waits and streams", True)):
        threads.append(threading.Thread(target=post, args=(name,), kwargs={"stream": stream}))
        threads[-1].start()
    assert wait_until(lambda: server.backend.stats.waiting == 2)
    memory.used = 96
    assert wait_until(lambda: len(statuses) == 2), "both waiting requests are shed, and no other"
    memory.used = 0
    server.backend.max_steps = None
    for thread in threads:
        thread.join()
    assert statuses == {"runs": 200, "waits": 429, "waits and streams": 429}
    short_body = body | {"max_tokens": 1}
    assert wait_until(lambda: server.post("/v1/completions", short_body).status_code == 200), (
        "requests are accepted again"
    )


# ---- the request head ----------------------------------------------------------------------


def test_a_connection_with_an_unfinished_head_is_cut_off(
    serve: Callable[..., HttpTestServer],
) -> None:
    """So is one that sends nothing, or stops in its second head. An idle one stays open."""
    server = serve(ServerSettings(model="speaker", limits=ServerLimits(body_seconds=2)))
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with ExitStack() as exit_stack:
        between_requests = exit_stack.enter_context(server.open_socket())
        between_requests.sendall(head)
        assert receives_ok(between_requests)
        connections = {
            sent: exit_stack.enter_context(server.open_socket())
            for sent in (b"", head[:-2], head + head[:20])
        }
        for sent, connection in connections.items():
            connection.sendall(sent)
        for sent, connection in connections.items():
            received = b""
            with suppress(ConnectionResetError):
                while part := connection.recv(65536):
                    received += part
            assert received.count(b"HTTP/1.1 200") == sent.count(head)
        between_requests.sendall(head)
        assert receives_ok(between_requests)


def receives_ok(connection: socket.socket) -> bool:
    """Whether the response, which has no body, has status 200."""
    received = b""
    while not received.endswith(b"\r\n\r\n"):
        received += connection.recv(65536)
    return received.startswith(b"HTTP/1.1 200")
