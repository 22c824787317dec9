"""Which LoRA adapters have a place: in the slots of the device, and in host memory.

Both hold a limited number of adapters, each of which is used by any number of requests, so both are
AdapterSlots. A slot that no request uses keeps its adapter until another one needs the slot; the
least recently used slot is taken first.

A request that finds no slot waits, and no other request waits for it. Slots that become free go to
the adapters that have waited longest. If every slot is used all the time, an adapter that has
waited for MAX_WAIT_SECONDS makes a slot drain: the slot takes no more requests, and when its last
one has ended it changes its adapter. So no adapter starves.

A pure state machine: no clock, no I/O. Adapters and requests are only names here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

RequestT = TypeVar("RequestT")

# Seconds that an adapter waits for a slot before another adapter must give one up. Chosen: long
# enough that most slots become free by themselves, short for a reader who waits for a first token.
MAX_WAIT_SECONDS = 1.0


@dataclass(eq=False, slots=True)
class AdapterSlot:
    """A place for one adapter."""

    number: int  # from 1, as 0 stands for the base model
    adapter: str = ""  # "": empty
    is_loaded: bool = False  # with the adapter; False: the first request must load it
    num_users: int = 0  # requests
    # Ids of requests that have waited for this slot and have not used it yet.
    promised: set[str] = field(default_factory=set)
    last_use: int = 0  # counts uses of all slots
    is_draining: bool = False  # takes no more requests of its adapter

    @property
    def is_free(self) -> bool:
        return not self.num_users and not self.promised


@dataclass(slots=True)
class WaitingRequests(Generic[RequestT]):
    """The requests of one adapter that wait for a slot."""

    since: float  # when the first of them began to wait
    requests: dict[str, RequestT] = field(default_factory=dict)  # by id


class AdapterSlots(Generic[RequestT]):
    """A fixed number of slots, the adapters in them, and the requests that wait for one."""

    def __init__(self, num_slots: int, on_evict: Callable[[str], None] | None = None):
        """`on_evict` is called with each adapter that loses its slot to another one."""
        self.on_evict = on_evict
        self.slots = [AdapterSlot(number) for number in range(1, num_slots + 1)]
        self.by_adapter: dict[str, AdapterSlot] = {}
        self.waiting: dict[str, WaitingRequests[RequestT]] = {}  # by adapter, the longest first
        self.max_wait_seconds = MAX_WAIT_SECONDS
        self.num_uses = 0
        self.num_drains = 0
        self.num_loads = 0
        self.num_evictions = 0

    def find(self, adapter: str) -> AdapterSlot | None:
        """Return the slot that a request of this adapter may use now, or None if it must wait."""
        own = self.by_adapter.get(adapter)
        if own is not None:
            return None if own.is_draining else own
        return self._find_free()

    def _find_free(self) -> AdapterSlot | None:
        """Return the least recently used slot that no request uses."""
        free = [slot for slot in self.slots if slot.is_free and not slot.is_draining]
        return min(free, key=lambda slot: slot.last_use, default=None)

    def use(self, slot: AdapterSlot, adapter: str, request_id: str) -> bool:
        """Count a request that uses the slot. Returns whether the adapter must be loaded into it.

        `slot` is what `find` returned.
        """
        if slot.adapter != adapter:
            self._place(slot, adapter)
        slot.promised.discard(request_id)
        slot.num_users += 1
        self.num_uses += 1
        slot.last_use = self.num_uses
        must_load = not slot.is_loaded
        slot.is_loaded = True
        self.num_loads += must_load
        return must_load

    def release(self, adapter: str) -> None:
        """Note that a request has stopped using its adapter."""
        self.by_adapter[adapter].num_users -= 1

    def wait(self, adapter: str, request_id: str, request: RequestT, now: float) -> None:
        """Let a request wait until `grant_slots` returns it."""
        if adapter not in self.waiting:
            self.waiting[adapter] = WaitingRequests(now)
        self.waiting[adapter].requests[request_id] = request

    def cancel(self, adapter: str, request_id: str) -> RequestT | None:
        """Forget a request that has not used its slot yet; returns it if it was waiting."""
        slot = self.by_adapter.get(adapter)
        if slot is not None:
            slot.promised.discard(request_id)
        waiting = self.waiting.get(adapter)
        if waiting is None:
            return None
        request = waiting.requests.pop(request_id, None)
        if not waiting.requests:
            del self.waiting[adapter]
        return request

    def forget(self, adapter: str) -> None:
        """Empty the slot of an adapter that no request uses."""
        slot = self.by_adapter.pop(adapter, None)
        if slot is not None:
            assert slot.is_free, "an adapter in use was forgotten"
            slot.adapter = ""
            slot.is_loaded = False
            slot.is_draining = False
            slot.last_use = 0

    def grant_slots(self, now: float) -> list[RequestT]:
        """Promise free slots to the adapters that wait longest; returns their requests."""
        granted: list[RequestT] = []
        self._update_draining(now)
        for adapter, waiting in list(self.waiting.items()):
            slot = self.by_adapter.get(adapter)
            if slot is not None and slot.is_draining:
                continue  # it gives this slot up and gets another one later
            if slot is None:
                slot = self._find_drained() or self._find_free()
                if slot is None:
                    continue
                self._place(slot, adapter)
            del self.waiting[adapter]
            slot.promised.update(waiting.requests)
            granted += waiting.requests.values()
        return granted

    def _find_drained(self) -> AdapterSlot | None:
        return next((slot for slot in self.slots if slot.is_draining and slot.is_free), None)

    def _update_draining(self, now: float) -> None:
        """Drain as many slots as adapters have waited too long; never more."""
        draining = [slot for slot in self.slots if slot.is_draining]
        num_overdue = sum(
            adapter not in self.by_adapter and now - waiting.since >= self.max_wait_seconds
            for adapter, waiting in self.waiting.items()
        )
        for slot in draining[num_overdue:]:
            slot.is_draining = False
        in_use = [slot for slot in self.slots if slot.num_users and not slot.promised]
        candidates = [slot for slot in in_use if not slot.is_draining]
        candidates.sort(key=lambda slot: (slot.num_users, slot.last_use))
        for slot in candidates[: max(num_overdue - len(draining), 0)]:
            slot.is_draining = True
            self.num_drains += 1

    def _place(self, slot: AdapterSlot, adapter: str) -> None:
        """Give the slot to an adapter, which is not loaded yet."""
        if slot.adapter:
            del self.by_adapter[slot.adapter]
            self.num_evictions += 1
            if self.on_evict is not None:
                self.on_evict(slot.adapter)
        self.by_adapter[adapter] = slot
        slot.adapter = adapter
        slot.is_loaded = False
        slot.is_draining = False
