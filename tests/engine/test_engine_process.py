"""The engine process: a real child process, driven message by message in place of a client."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bloomery.engine.engine_process import HEARTBEAT_SECONDS
from bloomery.ipc import (
    ENGINE_CODEC,
    BlockingChannel,
    ChildHandle,
    EngineHello,
    EngineMessage,
    spawn_child,
)
from bloomery.messages import (
    AbortRequest,
    AdmittedRequests,
    EngineCapacity,
    EngineOutput,
    EngineRequest,
    EngineStatus,
    ResolvedSampling,
    TokenOutput,
)
from tests.chaos.fake_engine import BLOCKS, POISON, fake_engine_command, fake_plan
from tests.engine.fake_executor import reference_tokens
from tests.waiting import WAIT_SECONDS

EPOCH = 7


class EngineDriver:
    """The client's end of an engine process."""

    def __init__(self, handle: ChildHandle):
        self.process = handle.process
        self.connection = handle.connection
        self.channel = BlockingChannel(handle.connection, ENGINE_CODEC)
        self.received: list[EngineMessage] = []

    def send(self, *messages: EngineMessage) -> None:
        for message in messages:
            self.channel.send(message)

    def receive(self) -> EngineMessage:
        while not self.received:
            self.received = self.channel.receive(10)
        return self.received.pop(0)

    def load(self) -> list[EngineMessage]:
        """Load the plan and return all messages up to the capacity."""
        self.send(EngineHello(EPOCH, fake_plan()))
        messages = [self.receive()]
        while not isinstance(messages[-1], EngineCapacity):
            messages.append(self.receive())
        return messages

    def outputs(self) -> Iterator[EngineOutput]:
        while True:
            message = self.receive()
            if isinstance(message, EngineOutput):
                yield message

    def run(self, *requests: EngineRequest) -> dict[str, list[TokenOutput]]:
        """Send requests and return all their outputs."""
        self.send(*requests)
        collected: dict[str, list[TokenOutput]] = {request.id: [] for request in requests}
        for engine_output in self.outputs():
            for output in engine_output.tokens:
                collected[output.request].append(output)
            if all(outputs and outputs[-1].finish for outputs in collected.values()):
                return collected
        raise AssertionError

    def wait_exit(self) -> int:
        return self.process.wait(WAIT_SECONDS)


@contextmanager
def engine_driver(*options: str) -> Iterator[EngineDriver]:
    handle = spawn_child(fake_engine_command(*options))
    try:
        yield EngineDriver(handle)
    finally:
        handle.kill()


def create_request(request_id: str, *prompt: int, max_tokens: int = 12) -> EngineRequest:
    return EngineRequest(request_id, prompt, ResolvedSampling(), max_tokens)


def join_prompt_and_output(request: EngineRequest, outputs: list[TokenOutput]) -> list[int]:
    """Return the tokens of the prompt and of the outputs."""
    return [*request.prompt, *(token for output in outputs for token in output.ids)]


def test_an_engine_loads_with_progress_and_generates_the_reference_tokens() -> None:
    with engine_driver("--load", "0.5") as driver:
        *reports, capacity = driver.load()
        assert isinstance(capacity, EngineCapacity) and capacity.blocks == BLOCKS
        assert reports == [EngineStatus("loading", part / 5, "weights") for part in range(5)]
        requests = [create_request(str(i), 1, 2, 3, i) for i in range(5)]
        collected = driver.run(*requests)
        for request in requests:
            outputs = collected[request.id]
            assert join_prompt_and_output(request, outputs) == reference_tokens(request)
            assert [output.position for output in outputs] == list(range(12))


def test_admitted_requests_are_named_before_their_step_and_a_step_is_one_message() -> None:
    with engine_driver("--delay", "0.05") as driver:
        driver.load()
        frames = [ENGINE_CODEC.encode(create_request(name, 1, 2, 3)) for name in "abc"]
        driver.connection.sendall(b"".join(frames))
        messages: list[EngineMessage] = []
        last: EngineMessage | None = None
        while not (isinstance(last, EngineOutput) and last.tokens):
            last = driver.receive()
            messages.append(last)
        assert messages[-2:-1] == [AdmittedRequests(EPOCH, ("a", "b", "c"))]
        assert last.epoch == EPOCH
        assert [output.request for output in last.tokens] == ["a", "b", "c"]


def test_a_request_is_named_before_it_crashes_the_engine() -> None:
    with engine_driver() as driver:
        driver.load()
        driver.send(create_request("bad", *POISON))
        messages: list[EngineMessage] = []
        with pytest.raises(EOFError):
            while True:
                messages.append(driver.receive())
        assert AdmittedRequests(EPOCH, ("bad",)) in messages
        assert driver.wait_exit() == -signal.SIGSEGV


def test_a_refused_request_is_answered_and_does_not_affect_others() -> None:
    with engine_driver() as driver:
        driver.load()
        good = create_request("good", 1, 2)
        collected = driver.run(create_request("large", 1, max_tokens=10**6), good)
        error = "prompt and max_tokens need 1000001 cache positions, there are 2048"
        assert collected["large"] == [TokenOutput("large", 0, finish="error", error=error)]
        assert join_prompt_and_output(good, collected["good"]) == reference_tokens(good)


def test_the_statistics_count_tokens_prefix_hits_and_steps() -> None:
    with engine_driver() as driver:
        driver.load()
        prompt = tuple(i % 7 for i in range(30))
        sampling = ResolvedSampling()
        driver.run(EngineRequest("first", prompt, sampling, 9))
        driver.run(
            EngineRequest("again", prompt, sampling, 4),
            EngineRequest("replay", prompt, sampling, 9, emitted=(1, 2)),
        )
        stats = next(driver.outputs()).stats
        assert (stats.running, stats.waiting, stats.kv_used, stats.kv_blocks) == (0, 0, 0, BLOCKS)
        assert stats.tokens_in == 60 and stats.tokens_out == 9 + 4 + 7
        assert stats.prefix_queried == 30 + 30 + 32 and stats.prefix_hit == 28 + 28
        assert stats.steps >= 16 and 0 < stats.step_seconds < 10 and stats.preemptions == 0


def test_an_idle_engine_sends_heartbeats() -> None:
    with engine_driver() as driver:
        begin = time.monotonic()
        driver.load()
        assert [next(driver.outputs()).tokens for _ in range(3)] == [(), (), ()]
        assert time.monotonic() - begin > 2 * HEARTBEAT_SECONDS


def test_an_abort_frees_the_blocks_within_a_step() -> None:
    with engine_driver("--delay", "0.05") as driver:
        driver.load()
        driver.send(create_request("a", 1, 2, 3, max_tokens=1000))
        next(output for output in driver.outputs() if output.tokens)
        driver.send(
            AbortRequest("a"),
            AbortRequest("a"),
            AbortRequest("unknown"),
            create_request("b", 4, max_tokens=1),
        )
        while driver.receive() != AdmittedRequests(EPOCH, ("b",)):
            pass
        after_abort = [next(driver.outputs())]
        while after_abort[-1].stats.running:
            after_abort.append(next(driver.outputs()))
        request_ids = [output.request for message in after_abort for output in message.tokens]
        assert request_ids.count("a") <= fake_plan().steps_in_flight, "only steps in flight"
        assert request_ids.count("b") == 1
        last = next(driver.outputs())
        assert (last.stats.kv_used, last.tokens) == (0, ())


@pytest.mark.parametrize("busy", [False, True])
def test_an_engine_exits_when_its_connection_closes(busy: bool) -> None:
    with engine_driver("--delay", "0.01") as driver:
        driver.load()
        if busy:
            driver.send(create_request("a", 1, 2, 3, max_tokens=1000))
            next(output for output in driver.outputs() if output.tokens)
        driver.connection.close()
        assert driver.wait_exit() == 0


def test_an_engine_exits_on_sigterm_but_not_on_an_interrupt() -> None:
    with engine_driver() as driver:
        driver.load()
        driver.process.send_signal(signal.SIGINT)
        assert driver.run(create_request("a", 1, 2))
        driver.process.terminate()
        assert driver.wait_exit() == 0


@pytest.mark.parametrize(
    "frame",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        ENGINE_CODEC.encode(AbortRequest("a"))[:-1] + b"\xff",
        ENGINE_CODEC.encode(EngineStatus("ready")),
    ],
    ids=["noise", "malformed", "unexpected"],
)
@pytest.mark.parametrize("loaded", [False, True])
def test_an_engine_exits_on_a_frame_it_cannot_handle(frame: bytes, loaded: bool) -> None:
    with engine_driver() as driver:
        if loaded:
            driver.load()
        driver.connection.sendall(frame)
        assert driver.wait_exit() == 1


def test_a_failure_to_load_is_reported() -> None:
    with engine_driver("--refuse") as driver:
        driver.send(EngineHello(1, fake_plan()))
        detail = "model.safetensors: 12 bytes are missing"
        assert driver.receive() == EngineStatus("failed", detail=detail)
        assert driver.wait_exit() == 1


def test_a_request_that_is_sent_twice_runs_once() -> None:
    with engine_driver() as driver:
        driver.load()
        request = create_request("a", 1, 2, max_tokens=6)
        driver.send(request)
        outputs = driver.run(request)["a"]
        assert join_prompt_and_output(request, outputs) == reference_tokens(request)
        assert outputs[-1].finish == "length"
