"""The LoRA adapters in host memory, and the requests that wait until theirs is there.

Host memory holds a limited number of adapters. The least recently used one that no request uses is
dropped when another one needs its place, and read from disk again when a request needs it.

Executors read adapters while steps go on. One is read at a time, and those that requests wait for
come first. An adapter that cannot be read fails the requests that wait for it, and no others.

This module knows no devices: which adapters are in device slots is the scheduler's matter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from bloomery.engine.adapter_catalog import adapter_name_of
from bloomery.engine.adapter_slots import AdapterSlot, AdapterSlots
from bloomery.engine.background import run_in_background
from bloomery.engine.executor import Executor
from bloomery.errors import UNUSABLE_ADAPTER, BloomeryError
from bloomery.messages import AdapterInfo, AdapterRefusal, EngineRequest

log = logging.getLogger("bloomery.engine")

# Of an error, at its two ends. It has the path first, which may have 4,096, and the remedy last.
REASON_CHARACTERS = (6000, 300)
LOAD_USER = "\0"  # stands for a request that uses an adapter while it is being read


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """A request that needs an adapter in host memory, or the wish to have it there."""

    name: str
    path: str
    request: EngineRequest | None = None  # None: nobody needs it yet
    arrival_time: float = 0.0

    @property
    def id(self) -> str:
        return LOAD_USER if self.request is None else self.request.id


@dataclass(eq=False, slots=True)
class HostAdapter:
    """An adapter that has a place in host memory."""

    name: str
    path: str
    version: str = ""  # of its files
    info: AdapterInfo | None = None  # None: it has not been read yet
    waiting: dict[str, AdapterUse] = field(default_factory=dict)  # requests, by id


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """An adapter that is being read."""

    adapter: HostAdapter
    info: Future[AdapterInfo]
    version: Future[str]

    @property
    def is_done(self) -> bool:
        return self.info.done() and self.version.done()


@dataclass(slots=True)
class AdapterEvents:
    """What has happened since the last look."""

    ready: list[AdapterUse] = field(default_factory=list)  # requests whose adapter is there
    failed: list[tuple[AdapterUse, str]] = field(default_factory=list)  # and why
    answers: list[AdapterInfo | AdapterRefusal] = field(default_factory=list)


class AdapterStore:
    """Holds adapters in host memory for as long as requests use them, and longer if it can."""

    def __init__(
        self,
        executor: Executor,
        max_adapters: int,
        on_evict: Callable[[str], None],
        on_load: Callable[[list[str]], None] | None = None,
    ):
        """`on_evict` is called with each adapter that leaves host memory.

        `on_load` is called with the ids of the requests for which a load begins, right before it.
        """
        self.read_version = start_reading_version
        self.executor = executor
        self.on_evict = on_evict
        self.on_load = on_load
        self.places: AdapterSlots[AdapterUse] = AdapterSlots(max_adapters, self._drop)
        self.adapters: dict[str, HostAdapter] = {}  # by name
        self.unread: dict[str, HostAdapter] = {}  # those whose load has not begun, in order
        self.load: AdapterLoad | None = None
        self.retired: set[str] = set()  # to be dropped when no request uses them
        self.num_evictions = 0
        self.num_loads = 0

    # ---- requests ------------------------------------------------------------------------------

    def acquire(self, use: AdapterUse, now: float) -> bool:
        """Begin to use an adapter. Returns False if the request must wait for `poll`."""
        place = self.places.find(use.name)
        if place is None:
            self.places.wait(use.name, use.id, use, now)
            return False
        return self._use_place(place, use)

    def _use_place(self, place: AdapterSlot, use: AdapterUse) -> bool:
        """Use a place in host memory. Returns False if the adapter must be read into it first."""
        must_load = self.places.use(place, use.name, use.id)
        if must_load:
            adapter = HostAdapter(use.name, use.path)
            self.adapters[use.name] = adapter
            self.unread[use.name] = adapter
        adapter = self.adapters[use.name]
        if adapter.info is not None:
            return True
        adapter.waiting[use.id] = use
        return False

    def release(self, name: str) -> None:
        """Note that a request which had its adapter has ended."""
        self.places.release(name)
        self._drop_if_retired(name)

    def cancel(self, request_id: str) -> bool:
        """Forget a request that waits for its adapter. Returns False if there is none."""
        for name in list(self.places.waiting):
            if self.places.cancel(name, request_id) is not None:
                return True
        for adapter in self.adapters.values():
            if adapter.waiting.pop(request_id, None) is not None:
                self.release(adapter.name)
                return True
        return False

    def holds(self, request_id: str) -> bool:
        """Whether a request with this id waits for its adapter."""
        return any(
            request_id in waiting.requests for waiting in self.places.waiting.values()
        ) or any(request_id in adapter.waiting for adapter in self.adapters.values())

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their adapters."""
        uses = [use for adapter in self.adapters.values() for use in adapter.waiting.values()]
        uses += [use for entry in self.places.waiting.values() for use in entry.requests.values()]
        return sum(use.request is not None for use in uses)

    @property
    def is_busy(self) -> bool:
        """Whether an adapter is being read or somebody waits for one."""
        return bool(self.load or self.unread or self.places.waiting)

    def version_of(self, name: str) -> str:
        """The version of an adapter in use."""
        return self.adapters[name].version

    def is_ready(self, name: str) -> bool:
        adapter = self.adapters.get(name)
        return adapter is not None and adapter.info is not None

    # ---- operators -----------------------------------------------------------------------------

    def preload(self, name: str, path: str, now: float) -> AdapterInfo | None:
        """Read an adapter before a request needs it. Returns it if it is there already.

        Otherwise an answer follows among the events of `poll`.
        """
        self.retired.discard(name)
        adapter = self.adapters.get(name)
        if adapter is not None:
            return adapter.info
        self.acquire(AdapterUse(name, path), now)
        return None

    def retire(self, name: str) -> None:
        """Drop an adapter as soon as no request uses it."""
        self.retired.add(name)
        self._drop_if_retired(name)

    def _drop_if_retired(self, name: str) -> None:
        place = self.places.by_adapter.get(name)
        if name in self.retired and (place is None or place.is_free):
            self.retired.discard(name)
            self.places.forget(name)
            if name in self.adapters:
                self._drop(name)

    def _drop(self, name: str) -> None:
        """Take an adapter out of host memory. No request uses it."""
        adapter = self.adapters.pop(name)
        self.unread.pop(name, None)
        self.on_evict(name)
        if adapter.info is not None:
            self.num_evictions += 1
            self.executor.unload_adapter(name)

    # ---- loading -------------------------------------------------------------------------------

    def poll(self, now: float, wait_seconds: float = 0.0) -> AdapterEvents:
        """Advance the loads, after at most `wait_seconds` of waiting for the current one."""
        events = AdapterEvents()
        if self.load is None:
            self._begin_load()
        if self.load is not None:
            if wait_seconds:
                pending: list[Future[Any]] = [self.load.info, self.load.version]
                wait(pending, wait_seconds)
            if self.load.is_done:
                self._finish_load(self.load, events)
                self._begin_load()
        for use in self.places.grant_slots(now):
            place = self.places.by_adapter[use.name]
            if self._use_place(place, use):
                self._add_ready(use, events)
        return events

    def _begin_load(self) -> None:
        """Begin to read the next adapter. Its place is in use until that is done."""
        self.load = None
        if not self.unread:
            return
        wanted = [
            adapter
            for adapter in self.unread.values()
            if any(use.request is not None for use in adapter.waiting.values())
        ]
        adapter = wanted[0] if wanted else next(iter(self.unread.values()))
        del self.unread[adapter.name]
        request_ids = [use.id for use in adapter.waiting.values() if use.request is not None]
        if request_ids and self.on_load is not None:
            self.on_load(request_ids)
        if LOAD_USER not in adapter.waiting:
            self.places.use(self.places.by_adapter[adapter.name], adapter.name, LOAD_USER)
            adapter.waiting[LOAD_USER] = AdapterUse(adapter.name, adapter.path)
        version = self.read_version(adapter.path)
        info = self.executor.load_adapter(adapter.name, adapter.path)
        self.load = AdapterLoad(adapter, info, version)

    def _finish_load(self, load: AdapterLoad, events: AdapterEvents) -> None:
        """Note what a load that has ended means for those who wait for the adapter."""
        adapter = load.adapter
        uses = list(adapter.waiting.values())
        adapter.waiting.clear()
        error = ""
        try:
            info = load.info.result()
            adapter.version = load.version.result()
            adapter.info = info
        except BloomeryError as refusal:
            error = str(refusal)
        except OSError as failure:
            error = f"{failure.filename}: {failure.strerror}"
        except Exception:
            log.exception("the adapter %s could not be read", adapter.name)
            error = "it could not be read"
        if adapter.info is not None:
            self.num_loads += 1
            events.answers.append(adapter.info)
            for use in uses:
                self._add_ready(use, events)
            return
        error = f"{UNUSABLE_ADAPTER} {adapter_name_of(adapter.name)!r}: {shorten_reason(error)}"
        log.warning("%s", error)
        events.answers.append(AdapterRefusal(adapter.name, error))
        for use in uses:
            self.places.release(adapter.name)
            if use.request is not None:
                events.failed.append((use, error))
        self.retired.discard(adapter.name)
        self.places.forget(adapter.name)
        self._drop(adapter.name)

    def _add_ready(self, use: AdapterUse, events: AdapterEvents) -> None:
        if use.request is not None:
            events.ready.append(use)
        else:
            self.release(use.name)


def shorten_reason(reason: str) -> str:
    """Leave out the middle of an error that quotes a long value from the files of an adapter."""
    first, last = REASON_CHARACTERS
    if len(reason) <= first + last:
        return reason
    return f"{reason[:first]} ... {reason[-last:]}"


def start_reading_version(path: str) -> Future[str]:
    return run_in_background(lambda: read_adapter_version(path))


def read_adapter_version(path: str) -> str:
    """Return a text that changes when the files of an adapter do.

    Tools that copy files may keep their times, but none can set the time of the last change.
    """
    folder = Path(path)
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    versions = []
    for file in files:
        status = file.stat()
        numbers = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        versions.append(f"{file.name}:{numbers}")
    return blake2b("/".join(versions).encode(errors="replace"), digest_size=16).hexdigest()
