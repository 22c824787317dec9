"""What an engine may forget: every open request, the ids its reader was given, and how often an engine died of it.

An entry holds all it takes to begin a request again in another engine, right after the last id that arrived. Ids count
only if they come next, so a reader sees no gap and no duplicate, whatever happens to engines. A pure state machine:
no clock, no I/O; it must not know sockets or processes.

Blame. Whoever was in the batch of an engine that died gets a strike; a few ids after its replay wipe it out. A request
with two strikes is a suspect: suspects go one at a time, nobody new beside them, so at the third strike the culprit is
known and fails alone.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import Protocol

from bloomery.engine.wire import WireError
from bloomery.errors import InvalidRequest
from bloomery.messages import FinishReason, EngineRequest, TokenLogprob, TokenOutput

STRIKES = 3
GRACE = 1.0  # seconds that an engine may be late with the end of a request
PROBATION = 8  # ids that clear a request; more than an engine has steps in flight


class Reader(Protocol):
    def ring(self, entry: Entry) -> None:
        """`entry` has something to take."""
        ...


@dataclass(eq=False, slots=True)
class Entry:
    request: EngineRequest
    serial: str  # its name on the wire, never used twice
    reader: Reader
    arrived: float
    emitted: array[int]  # output ids so far
    taken: int  # ids the reader has
    cached: int | None = None
    queued: float = 0.0
    logprobs: list[TokenLogprob] = field(default_factory=list)  # not taken yet
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    embedding: tuple[float, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None
    sent: bool = False  # to the engine of now
    admitted: bool = False  # to a batch of the engine of now
    begun: bool = False  # it was in a batch, be it of a former engine
    fresh: int = 0  # ids from the engine of now
    strikes: int = 0

    def replay(self, now: float) -> EngineRequest:
        """The request as an engine must get it now."""
        left = (
            None
            if self.request.deadline is None
            else max(self.request.deadline - (now - self.arrived), 0.0)
        )
        request = replace(self.request, id=self.serial, emitted=tuple(self.emitted), deadline=left)
        if len(self.emitted) > len(
            self.request.emitted
        ):  # log-probabilities of the prompt came with the first id
            request = replace(request, sampling=replace(request.sampling, prompt_logprobs=None))
        return request

    def take(self) -> TokenOutput:
        """All the news since the last call, as one."""
        position = self.taken
        ids = tuple(self.emitted[self.taken :])
        news = TokenOutput(
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
        self.taken += len(ids)
        self.logprobs.clear()
        self.prompt_logprobs = ()
        return news


class Journal:
    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}  # by serial; open ones only
        self.by_request: dict[str, Entry] = {}
        self.unsent: dict[str, Entry] = {}
        self.suspects: dict[str, Entry] = {}
        self.trial: Entry | None = None  # the suspect that an engine has
        self.count = 0

    def open(self, request: EngineRequest, reader: Reader, now: float) -> Entry:
        if request.id in self.by_request:
            raise InvalidRequest(f"request id {request.id!r} is already in use", "id")
        self.count += 1
        entry = Entry(
            request, str(self.count), reader, now, array("I", request.emitted), len(request.emitted)
        )
        self.entries[entry.serial] = self.unsent[entry.serial] = self.by_request[request.id] = entry
        return entry

    def due(self) -> list[Entry]:
        """Whom to send now; the caller sends them."""
        if self.trial is not None:
            return []
        if self.suspects:
            self.trial = self.suspects.pop(next(iter(self.suspects)))
            found = [self.trial]
        else:
            found = list(self.unsent.values())
            self.unsent.clear()
        for entry in found:
            entry.sent = True
        return found

    def admit(self, serial: str, now: float) -> None:
        entry = self.entries.get(serial)
        if entry is not None:
            entry.queued = entry.queued if entry.begun else now - entry.arrived
            entry.admitted = entry.begun = True

    def expire(self, now: float, patience: float) -> list[Entry]:
        """End whose time is up, and who has waited for so long and was in no batch yet; the caller tells the engine."""
        late = []
        for entry in list(self.entries.values()):
            waited = now - entry.arrived
            if waited > patience and not entry.begun:
                late.append(entry)
                self.end(entry, "deadline", f"waited {patience:.0f} s in the queue")
            elif entry.request.deadline is not None and waited > entry.request.deadline + GRACE:
                late.append(entry)  # an engine that lives does this itself
                self.end(entry, "deadline", "its deadline has passed")
        return late

    def accept(self, news: TokenOutput) -> None:
        """Fold in what an engine says; of requests that are closed, and what was said before, nothing."""
        entry = self.entries.get(news.request)
        if entry is None or news.position < len(entry.emitted):
            return
        if news.position > len(entry.emitted):
            raise WireError(
                f"ids from {len(entry.emitted)} to {news.position - 1} of a request are missing"
            )
        entry.emitted.extend(news.ids)
        entry.logprobs += news.logprobs
        entry.prompt_logprobs = entry.prompt_logprobs or news.prompt_logprobs
        entry.embedding = news.embedding
        entry.cached = news.cached if entry.cached is None else entry.cached
        entry.fresh += len(news.ids)
        if entry.fresh >= PROBATION:
            entry.strikes = 0
            if entry is self.trial:
                self.trial = None
        if news.finish is not None:
            self.end(entry, news.finish, news.error)
        else:
            entry.reader.ring(entry)

    def end(self, entry: Entry, finish: FinishReason, error: str | None = None) -> None:
        """Its reader gets what is there and the reason; the journal forgets it."""
        if self.entries.pop(entry.serial, None) is None:
            return
        del self.by_request[entry.request.id]
        self.unsent.pop(entry.serial, None)
        self.suspects.pop(entry.serial, None)
        if entry is self.trial:
            self.trial = None
        entry.finish = finish
        entry.error = error
        entry.reader.ring(entry)

    def crash(self) -> int:
        """The engine is gone: strikes for whom it concerns, everyone else is merely unsent; how many were given up."""
        count = len(self.entries)
        self.trial = None
        batch = any(entry.admitted for entry in self.entries.values())
        self.unsent = {}
        self.suspects = {}
        for entry in list(self.entries.values()):
            entry.strikes += entry.admitted if batch else entry.sent
            entry.sent = entry.admitted = False
            entry.fresh = 0
            if entry.strikes >= STRIKES:
                self.end(
                    entry,
                    "error",
                    f"given up: the engine stopped {STRIKES} times while it ran this request",
                )
            else:
                waiting = self.suspects if entry.strikes == STRIKES - 1 else self.unsent
                waiting[entry.serial] = entry
        return count - len(self.entries)
