"""A short scenario with a fault at any moment: a crash, readers that leave, a deadline, shutdown.

Six requests in five streams run in a batch of two, with chunked prefill, a shared prefix,
preemption and one stream of two requests. A step takes up to 20 ms of virtual time. A run is
correct if every reader that stayed got the reference tokens or the reason why not, exactly once,
and if the journal and the block pool are empty in the end. `observed` counts the states of the
requests at the moment of the fault.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from random import Random

from bloomery.engine.client import EngineClient, EngineTimeouts
from bloomery.messages import EngineRequest, FinishReason, ResolvedSampling
from tests.chaos.fake_engine import fake_plan
from tests.engine.fake_executor import reference_tokens
from tests.simulation.simulated_engine import (
    EngineSize,
    FaultInjector,
    FaultRates,
    SimulatedChild,
    SimulationReport,
    VirtualTimeLoop,
    is_journal_empty,
    wait_idle,
)

EVENTS = ("kill", "kill twice", "leave", "deadline", "drain")
SIZE = EngineSize(blocks=11, block_size=4, max_num_seqs=2, max_num_batched_tokens=8)
# Seconds of virtual time: between two moments, and until all answers are complete.
TICK_SECONDS = 0.002
SCENARIO_SECONDS = 0.5
REQUEST_STATES = {
    "not sent",
    "queued",
    "first chunk",
    "middle chunk",
    "before the first token",
    "decoding",
    "preempted",
    "ended and not reported",
    "one of two ended",
    "no engine",
}


@dataclass
class ScenarioReader:
    """The reader of one stream: its requests, and the tokens and finish reasons it has read."""

    requests: list[EngineRequest]
    is_slow: bool  # waits between two outputs
    tokens: dict[str, list[int]]
    finishes: dict[str, FinishReason]
    has_left: bool = False


def create_readers() -> list[ScenarioReader]:
    prefix = (1, 2, 3, 4, 1, 2, 3, 4)
    prompts = ((4, 3) * 12, (*prefix, 1), (*prefix, 2), (2, 2, 2), (3, 1, 4, 1))
    readers = []
    for number, prompt in enumerate(prompts):
        max_tokens = 12 if number else 18
        stop_ids = [3] if number == 3 else []
        sampling = ResolvedSampling(min_tokens=4)
        request = EngineRequest(str(number), prompt, sampling, max_tokens, tuple(stop_ids))
        requests = [request]
        if number == 2:
            requests.append(replace(request, id="second", max_tokens=6))
        tokens: dict[str, list[int]] = {request.id: [] for request in requests}
        readers.append(ScenarioReader(requests, number == 1, tokens, {}))
    return readers


def run_scenario(event: str, at: float, observed: Counter[str]) -> None:
    """Run the scenario with `event` at second `at`. Raises if the result is not correct."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(asyncio.wait_for(_run_scenario(event, at, observed), 3600))


async def _run_scenario(event: str, at: float, observed: Counter[str]) -> None:
    report = SimulationReport()
    faults = FaultInjector(Random(1), FaultRates(), report)
    readers = create_readers()
    leaving = readers[:3] if event == "leave" else []
    if event == "deadline":
        deadline = max(at, TICK_SECONDS)
        for reader in readers[:3]:
            reader.requests = [replace(request, deadline=deadline) for request in reader.requests]
    timeouts = EngineTimeouts(max_restarts=10**9, restart_delay_seconds=0.05, queue_seconds=3600.0)
    client = EngineClient(
        fake_plan(steps_in_flight=2, block_size=4),
        (),
        timeouts,
        lambda on_message: SimulatedChild(on_message, faults, SIZE),
    )
    await client.start()
    tasks = [asyncio.create_task(_read_stream(client, reader)) for reader in readers]
    await asyncio.sleep(at)
    observed.update(observe_states(client, readers))
    leaving_tasks = [tasks[readers.index(reader)] for reader in leaving]
    closing = _apply_event(event, client, leaving_tasks)
    for reader in leaving:
        reader.has_left = True
    if event == "kill twice":
        await asyncio.sleep(0.08)  # the next engine may be loading, or have just started
        observed.update(observe_states(client, readers))
        _apply_event("kill", client, [])
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    for reader in readers:
        _check_reader(reader, event)
    if closing is None:
        await wait_idle(client)
        await client.close()
    else:
        await closing
    if not is_journal_empty(client) or report.leaks:
        raise AssertionError(f"{event} at {at:.3f}: requests or blocks remain: {report.leaks}")


def _apply_event(
    event: str, client: EngineClient, leaving: list[asyncio.Task[None]]
) -> asyncio.Task[None] | None:
    if event.startswith("kill") and isinstance(client.child, SimulatedChild):
        client.child.die()
    for task in leaving:
        task.cancel()
    return asyncio.create_task(client.close(0.1)) if event == "drain" else None


async def _read_stream(client: EngineClient, reader: ScenarioReader) -> None:
    async with aclosing(client.stream(reader.requests)) as stream:
        async for output in stream:
            tokens = reader.tokens[output.request]
            if output.position != len(tokens) or output.request in reader.finishes:
                raise AssertionError(
                    f"position {output.position} after {len(tokens)} tokens, "
                    "or output after the end"
                )
            tokens += output.ids
            if output.finish is not None:
                reader.finishes[output.request] = output.finish
            if reader.is_slow:
                await asyncio.sleep(0.15)


def _check_reader(reader: ScenarioReader, event: str) -> None:
    for request in reader.requests:
        expected = reference_tokens(request)[len(request.prompt) :]
        tokens = reader.tokens[request.id]
        finish = reader.finishes.get(request.id)
        may_be_cut = (event, finish) in (("deadline", "deadline"), ("drain", "error"))
        is_complete = tokens == expected and finish in ("stop", "length")
        is_prefix = tokens == expected[: len(tokens)]
        if not is_prefix or not (reader.has_left or may_be_cut or is_complete):
            raise AssertionError(
                f"{event}: request {request.id} has {tokens} of {expected} "
                f"and finished with {finish}"
            )


def observe_states(client: EngineClient, readers: list[ScenarioReader]) -> Iterator[str]:
    """Yield the state of every open request, one of REQUEST_STATES."""
    child = client.child
    engine = child.engine if isinstance(child, SimulatedChild) else None
    if engine is None:
        yield "no engine"
        return
    for entry in client.journal.entries.values():
        sequence = engine.scheduler.by_request.get(entry.engine_id)
        if not entry.sent:
            yield "not sent"
        elif sequence is None:  # the request has ended, or has not reached the engine yet
            yield "ended and not reported" if entry.admitted else "not sent"
        elif sequence.is_waiting:
            yield "preempted" if sequence.num_preemptions else "queued"
        elif sequence.num_computed < len(sequence.request.prompt):
            is_middle = sequence.num_computed > SIZE.max_num_batched_tokens
            yield "middle chunk" if is_middle else "first chunk"
        else:
            yield "decoding" if entry.emitted else "before the first token"
    if any(0 < len(reader.finishes) < len(reader.requests) for reader in readers):
        yield "one of two ended"


def fault_moments(every: int = 1) -> Iterator[tuple[str, float]]:
    """Yield pairs of event and second: all moments, or every n-th one."""
    for event in EVENTS:
        for number in range(0, int(SCENARIO_SECONDS / TICK_SECONDS), every):
            yield event, number * TICK_SECONDS
