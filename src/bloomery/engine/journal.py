"""The journal of open requests: everything an engine may lose when it crashes.

An entry holds what it takes to resume a request in another engine right after the last token that
arrived. Tokens are accepted only in order, so a reader sees no gap and no duplicate, whatever
happens to engines. The journal is a pure state machine: no clock, no I/O, no sockets or processes.

Quarantine: a crash of an engine is counted for every request in its batch. When a request has
generated a few tokens after its replay, its count is reset. A request with two crashes is
quarantined: quarantined requests run one at a time, and no other request is sent meanwhile. A third
crash therefore identifies the request that kills engines, and only that request fails.

A crash that a request explains is no fault of the engine, so it does not count towards the limit of
restarts. The crash counts once every request in its batch has proved harmless.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import Protocol

from bloomery.errors import InvalidRequest
from bloomery.ipc import ProtocolError
from bloomery.messages import EngineRequest, FinishReason, TokenLogprob, TokenOutput

MAX_CRASHES = 3  # engine crashes after which a request fails
GIVEN_UP = f"given up: the engine stopped {MAX_CRASHES} times while it ran this request"
DEADLINE_GRACE_SECONDS = 1.0  # an engine may report the end of a request this late
# Tokens that reset the crash count of a request: more than an engine has steps in flight.
CLEARING_TOKENS = 8


class OutputListener(Protocol):
    """Is notified when an entry has new output."""

    def notify(self, entry: JournalEntry) -> None:
        """Note that `entry` has output to take."""
        ...


@dataclass(eq=False, slots=True)
class JournalEntry:
    """One open request. Times are in seconds on the client's clock."""

    request: EngineRequest
    engine_id: str  # the id that engines see; never used twice
    listener: OutputListener
    arrived: float
    emitted: array[int]  # output token ids so far
    num_taken: int  # output tokens that the reader has taken
    cached: int | None = None  # prompt tokens that were a prefix hit; None: not known yet
    queued: float = 0.0  # from arrival to the first step
    logprobs: list[TokenLogprob] = field(default_factory=list)  # not taken yet
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    embedding: tuple[float, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None
    sent: bool = False  # to the current engine
    admitted: bool = False  # to a batch of the current engine
    has_run: bool = False  # it was in a batch, of this engine or an earlier one
    num_new_tokens: int = 0  # output tokens from the current engine
    num_crashes: int = 0

    def replay_request(self, now: float) -> EngineRequest:
        """Return the request in the form that resumes it in the current engine."""
        deadline = self.request.deadline
        if deadline is not None:
            deadline = max(deadline - (now - self.arrived), 0.0)
        request = replace(
            self.request, id=self.engine_id, emitted=tuple(self.emitted), deadline=deadline
        )
        if len(self.emitted) > len(self.request.emitted):
            # The log-probabilities of the prompt came with the first token.
            sampling = replace(request.sampling, prompt_logprobs=None)
            request = replace(request, sampling=sampling)
        return request

    def take_output(self) -> TokenOutput:
        """Return everything since the last call as one output."""
        position = self.num_taken
        ids = tuple(self.emitted[position:])
        output = TokenOutput(
            self.request.id,
            position,
            ids,
            tuple(self.logprobs),
            self.prompt_logprobs,
            self.cached or 0,
            self.finish,
            self.error,
            self.queued,
            self.embedding,
        )
        self.num_taken += len(ids)
        self.logprobs.clear()
        self.prompt_logprobs = ()
        return output


@dataclass(eq=False, slots=True)
class EngineCrash:
    """A crash that no request explains so far."""

    time: float
    possible_causes: set[str]  # engine ids of the requests in its batch that are not cleared yet


class RequestJournal:
    """All open requests, in the order they arrived."""

    def __init__(self) -> None:
        self.entries: dict[str, JournalEntry] = {}  # by engine id; open ones only
        self.by_request: dict[str, JournalEntry] = {}  # by the id of the request
        self.unsent: dict[str, JournalEntry] = {}
        self.quarantine: dict[str, JournalEntry] = {}  # entries that must run alone, not sent yet
        self.running_alone: JournalEntry | None = None  # the quarantined entry an engine has
        self.num_opened = 0
        self.crashes: list[EngineCrash] = []

    def open(self, request: EngineRequest, listener: OutputListener, now: float) -> JournalEntry:
        """Add a request. Raises InvalidRequest if its id is in use."""
        if request.id in self.by_request:
            raise InvalidRequest(f"request id {request.id!r} is already in use", "id")
        self.num_opened += 1
        engine_id = str(self.num_opened)
        emitted = array("I", request.emitted)
        entry = JournalEntry(request, engine_id, listener, now, emitted, len(emitted))
        self.entries[engine_id] = entry
        self.unsent[engine_id] = entry
        self.by_request[request.id] = entry
        return entry

    def take_sendable(self) -> list[JournalEntry]:
        """Return the entries to send to the engine now; the caller sends them."""
        if self.running_alone is not None:
            return []
        if self.quarantine:
            first_id = next(iter(self.quarantine))
            self.running_alone = self.quarantine.pop(first_id)
            sendable = [self.running_alone]
        else:
            sendable = list(self.unsent.values())
            self.unsent.clear()
        for entry in sendable:
            entry.sent = True
        return sendable

    def record_admission(self, engine_id: str, now: float, has_started: bool = True) -> None:
        """Note that a crash of the current engine may be due to the request.

        A batch holds it, or it has not started and its LoRA adapter is being read.
        """
        entry = self.entries.get(engine_id)
        if entry is None:
            return
        entry.admitted = True
        if not has_started:
            return
        if not entry.has_run:
            entry.queued = now - entry.arrived
        entry.has_run = True

    def expire(self, now: float, queue_timeout: float) -> list[JournalEntry]:
        """Finish requests that are past their deadline or have waited in the queue for too long.

        The caller aborts the returned entries in the engine.
        """
        expired = []
        for entry in list(self.entries.values()):
            waited = now - entry.arrived
            deadline = entry.request.deadline
            if waited > queue_timeout and not entry.has_run:
                expired.append(entry)
                self.finish(entry, "deadline", f"waited {queue_timeout:.0f} s in the queue")
            elif deadline is not None and waited > deadline + DEADLINE_GRACE_SECONDS:
                # A working engine ends such a request itself.
                expired.append(entry)
                self.finish(entry, "deadline", "its deadline has passed")
        return expired

    def record_output(self, output: TokenOutput) -> None:
        """Add an engine's output to its entry; ignore closed requests and repeated tokens."""
        entry = self.entries.get(output.request)
        if entry is None or output.position < len(entry.emitted):
            return
        if output.position > len(entry.emitted):
            first_missing = len(entry.emitted)
            last_missing = output.position - 1
            raise ProtocolError(
                f"tokens {first_missing} to {last_missing} of a request are missing"
            )
        entry.emitted.extend(output.ids)
        entry.logprobs += output.logprobs
        entry.prompt_logprobs = entry.prompt_logprobs or output.prompt_logprobs
        entry.embedding = output.embedding
        if entry.cached is None:
            entry.cached = output.cached
        entry.num_new_tokens += len(output.ids)
        if entry.num_new_tokens >= CLEARING_TOKENS:
            if entry.num_crashes:
                self._clear(entry)
            if entry is self.running_alone:
                self.running_alone = None
        if output.finish is not None:
            self.finish(entry, output.finish, output.error)
        else:
            entry.listener.notify(entry)

    def finish(
        self, entry: JournalEntry, finish_reason: FinishReason, error: str | None = None
    ) -> None:
        """Close an entry; its reader can still take the remaining output and the reason."""
        if self.entries.pop(entry.engine_id, None) is None:
            return
        del self.by_request[entry.request.id]
        self.unsent.pop(entry.engine_id, None)
        self.quarantine.pop(entry.engine_id, None)
        if entry is self.running_alone:
            self.running_alone = None
        entry.finish = finish_reason
        entry.error = error
        if finish_reason in ("stop", "length"):
            self._clear(entry)
        else:
            self._blame(entry)
        entry.listener.notify(entry)

    def _clear(self, entry: JournalEntry) -> None:
        """Note that the request is harmless: it ran after the crashes that it was part of."""
        entry.num_crashes = 0
        for crash in self.crashes:
            crash.possible_causes.discard(entry.engine_id)

    def _blame(self, entry: JournalEntry) -> None:
        """Note that the request may explain its crashes and will not run again."""
        engine_id = entry.engine_id
        self.crashes = [crash for crash in self.crashes if engine_id not in crash.possible_causes]

    def count_unexplained_crashes(self, begin: float = 0.0) -> int:
        """Forget crashes before `begin` and count those that no open request may have caused."""
        self.crashes = [crash for crash in self.crashes if crash.time >= begin]
        return sum(not crash.possible_causes for crash in self.crashes)

    def record_crash(self, now: float = 0.0) -> int:
        """Prepare all entries for the next engine and return how many requests were given up.

        The crash is counted for the requests in the batch. If there was no batch yet, it is counted
        for all requests that were sent.
        """
        crash = EngineCrash(now, set())
        self.crashes.append(crash)
        num_open = len(self.entries)
        had_batch = any(entry.admitted for entry in self.entries.values())
        self.running_alone = None
        self.unsent = {}
        self.quarantine = {}
        for entry in list(self.entries.values()):
            was_involved = entry.admitted if had_batch else entry.sent
            if was_involved:
                entry.num_crashes += 1
                crash.possible_causes.add(entry.engine_id)
            entry.sent = False
            entry.admitted = False
            entry.num_new_tokens = 0
            if entry.num_crashes >= MAX_CRASHES:
                self.finish(entry, "error", GIVEN_UP)
            elif entry.num_crashes == MAX_CRASHES - 1:
                self.quarantine[entry.engine_id] = entry
            else:
                self.unsent[entry.engine_id] = entry
        return num_open - len(self.entries)
