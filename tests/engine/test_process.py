"""The engine process as its client sees it: a real child, driven frame by frame."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bloomery.engine.process import HEARTBEAT
from bloomery.engine.wire import Channel, Hello, Message, encode
from bloomery.messages import (
    AbortRequest,
    AdmittedRequests,
    EngineCapacity,
    EngineOutput,
    EngineRequest,
    ResolvedSampling,
    EngineStatus,
    TokenOutput,
)
from tests.chaos.ghost_engine import BLOCKS, POISON, command, plan
from tests.ghost.ghost import plain
from tests.waiting import LONG


class Driver:
    """The other end of an engine's line."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket):
        self.process = process
        self.line = line
        self.channel = Channel(line)
        self.heard: list[Message] = []

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.channel.send(message)

    def hear(self) -> Message:
        while not self.heard:
            self.heard = self.channel.receive(10)
        return self.heard.pop(0)

    def ready(self) -> list[Message]:
        """Load it; what it said on the way."""
        self.say(Hello(7, plan()))
        said = [self.hear()]
        while not isinstance(said[-1], EngineCapacity):
            said.append(self.hear())
        return said

    def news(self) -> Iterator[EngineOutput]:
        while True:
            message = self.hear()
            if isinstance(message, EngineOutput):
                yield message

    def tokens(self, *requests: EngineRequest) -> dict[str, list[TokenOutput]]:
        """All the news of the requests, to their ends."""
        self.say(*requests)
        got: dict[str, list[TokenOutput]] = {request.id: [] for request in requests}
        for news in self.news():
            for tokens in news.tokens:
                got[tokens.request].append(tokens)
            if all(found and found[-1].finish for found in got.values()):
                return got
        raise AssertionError

    def status(self) -> int:
        return self.process.wait(LONG)


@contextmanager
def engine(*options: str) -> Iterator[Driver]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*command(*options), str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
    try:
        with ours:
            yield Driver(process, ours)
    finally:
        process.kill()
        process.wait()


def request(name: str, *prompt: int, tokens: int = 12) -> EngineRequest:
    return EngineRequest(name, prompt, ResolvedSampling(), tokens)


def test_it_loads_with_reports_then_answers_as_the_plain_loop_does() -> None:
    with engine("--load", "0.5") as driver:
        *reports, capacity = driver.ready()
        assert isinstance(capacity, EngineCapacity) and capacity.blocks == BLOCKS
        assert reports == [EngineStatus("loading", part / 5, "ectoplasm") for part in range(5)]
        asked = [request(str(i), 1, 2, 3, i) for i in range(5)]
        got = driver.tokens(*asked)
        for one in asked:
            assert [*one.prompt, *(id for tokens in got[one.id] for id in tokens.ids)] == plain(one)
            assert [tokens.position for tokens in got[one.id]] == list(range(12))


def test_who_is_in_a_step_is_said_before_it_runs_and_a_step_is_one_frame() -> None:
    with engine("--delay", "0.05") as driver:
        driver.ready()
        driver.line.sendall(b"".join(encode(request(name, 1, 2, 3)) for name in "abc"))
        seen: list[Message] = []
        while not (seen and isinstance(seen[-1], EngineOutput) and seen[-1].tokens):
            seen.append(driver.hear())
        assert seen[-2:-1] == [AdmittedRequests(7, ("a", "b", "c"))]
        assert isinstance(seen[-1], EngineOutput)
        assert seen[-1].epoch == 7 and [tokens.request for tokens in seen[-1].tokens] == [
            "a",
            "b",
            "c",
        ]


def test_it_names_the_poison_before_it_dies_of_it() -> None:
    with engine() as driver:
        driver.ready()
        driver.say(request("bad", *POISON))
        heard: list[Message] = []
        with pytest.raises(EOFError):
            while True:
                heard.append(driver.hear())
        assert AdmittedRequests(7, ("bad",)) in heard
        assert driver.status() == -signal.SIGSEGV


def test_a_refused_request_is_answered_and_harms_nobody() -> None:
    with engine() as driver:
        driver.ready()
        good = request("good", 1, 2)
        got = driver.tokens(request("vast", 1, tokens=10**6), good)
        assert got["vast"] == [
            TokenOutput(
                "vast",
                0,
                finish="error",
                error="prompt and max_tokens need 1000001 cache positions, there are 2048",
            )
        ]
        assert [*good.prompt, *(id for tokens in got["good"] for id in tokens.ids)] == plain(good)


def test_figures() -> None:
    with engine() as driver:
        driver.ready()
        long = tuple(i % 7 for i in range(30))
        driver.tokens(EngineRequest("first", long, ResolvedSampling(), 9))
        driver.tokens(
            EngineRequest("again", long, ResolvedSampling(), 4),
            EngineRequest("replay", long, ResolvedSampling(), 9, emitted=(1, 2)),
        )
        stats = next(driver.news()).stats
        assert (stats.running, stats.waiting, stats.kv_used, stats.kv_blocks) == (0, 0, 0, BLOCKS)
        assert stats.tokens_in == 60 and stats.tokens_out == 9 + 4 + 7
        assert stats.prefix_queried == 30 + 30 + 32 and stats.prefix_hit == 28 + 28
        assert stats.steps >= 16 and 0 < stats.step_seconds < 10 and stats.preemptions == 0


def test_an_idle_engine_gives_signs_of_life() -> None:
    with engine() as driver:
        begun = time.monotonic()
        driver.ready()
        assert [next(driver.news()).tokens for _ in range(3)] == [(), (), ()]
        assert time.monotonic() - begun > 2 * HEARTBEAT


def test_an_abort_frees_the_blocks_within_a_step() -> None:
    with engine("--delay", "0.05") as driver:
        driver.ready()
        driver.say(request("a", 1, 2, 3, tokens=1000))
        next(news for news in driver.news() if news.tokens)
        driver.say(
            AbortRequest("a"),
            AbortRequest("a"),
            AbortRequest("never heard of"),
            request("b", 4, tokens=1),
        )
        while driver.hear() != AdmittedRequests(7, ("b",)):
            pass
        behind = [next(driver.news())]  # what is said once the aborts have been heard
        while behind[-1].stats.running:
            behind.append(next(driver.news()))
        told = [tokens.request for news in behind for tokens in news.tokens]
        assert told.count("a") <= plan().depth and told.count("b") == 1, "more than was under way"
        last = next(driver.news())
        assert (last.stats.kv_used, last.tokens) == (0, ())


@pytest.mark.parametrize("busy", [False, True])
def test_it_ends_when_the_line_is_closed(busy: bool) -> None:
    with engine("--delay", "0.01") as driver:
        driver.ready()
        if busy:
            driver.say(request("a", 1, 2, 3, tokens=1000))
            next(news for news in driver.news() if news.tokens)
        driver.line.close()
        assert driver.status() == 0


def test_it_ends_on_sigterm_but_not_on_an_interrupt() -> None:
    with engine() as driver:
        driver.ready()
        driver.process.send_signal(signal.SIGINT)
        assert driver.tokens(request("a", 1, 2))
        driver.process.terminate()
        assert driver.status() == 0


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        encode(AbortRequest("a"))[:-1] + b"\xff",
        encode(EngineStatus("ready")),
    ],
    ids=["noise", "bad", "misplaced"],
)
@pytest.mark.parametrize("loaded", [False, True])
def test_it_ends_on_a_frame_it_cannot_read(said: bytes, loaded: bool) -> None:
    with engine() as driver:
        if loaded:
            driver.ready()
        driver.line.sendall(said)
        assert driver.status() == 1


def test_what_cannot_be_loaded_is_told() -> None:
    with engine("--refuse") as driver:
        driver.say(Hello(1, plan()))
        assert driver.hear() == EngineStatus(
            "failed", detail="model.safetensors: 12 bytes are missing"
        )
        assert driver.status() == 1


def test_a_request_said_twice_is_one() -> None:
    with engine() as driver:
        driver.ready()
        asked = request("a", 1, 2, tokens=6)
        driver.say(asked)
        got = driver.tokens(asked)["a"]
        assert [id for news in got for id in news.ids] == plain(asked)[2:] and got[
            -1
        ].finish == "length"
