"""Slots for adapters: the least recently used one changes its adapter, and nobody starves."""

from __future__ import annotations

from random import Random

from bloomery.engine.adapter_slots import MAX_WAIT_SECONDS, AdapterSlots


def use(slots: AdapterSlots[str], adapter: str, request_id: str) -> bool:
    slot = slots.find(adapter)
    assert slot is not None
    return slots.use(slot, adapter, request_id)


def test_requests_of_one_adapter_share_a_slot_that_is_loaded_once() -> None:
    slots = AdapterSlots[str](2)
    assert use(slots, "a", "1")
    assert not use(slots, "a", "2")
    assert use(slots, "b", "3")
    assert [slot.adapter for slot in slots.slots] == ["a", "b"]
    assert slots.find("c") is None
    assert slots.num_loads == 2


def test_the_least_recently_used_free_slot_changes_its_adapter() -> None:
    evicted: list[str] = []
    slots = AdapterSlots[str](3, evicted.append)
    for adapter in "abca":
        use(slots, adapter, adapter)
        slots.release(adapter)
    assert use(slots, "d", "d")
    assert evicted == ["b"]
    assert not use(slots, "a", "a2")  # it kept its slot
    assert [slot.adapter for slot in slots.slots] == ["a", "d", "c"]


def test_a_free_slot_is_kept_for_those_who_waited() -> None:
    slots = AdapterSlots[str](1)
    use(slots, "a", "1")
    for number in (2, 3):
        slots.wait("b", str(number), f"request {number}", now=0.0)
    slots.wait("c", "4", "request 4", now=0.1)
    assert slots.grant_slots(0.2) == []
    slots.release("a")
    assert slots.grant_slots(0.3) == ["request 2", "request 3"]
    assert slots.find("a") is None, "the slot was promised to b"
    assert slots.cancel("b", "2") is None  # it was aborted in the queue of the policy
    assert use(slots, "b", "3")
    slots.release("b")
    assert slots.grant_slots(0.4) == ["request 4"]
    assert slots.cancel("c", "4") is None
    assert slots.slots[0].is_free


def test_an_adapter_that_waits_long_makes_a_slot_drain() -> None:
    slots = AdapterSlots[str](2)
    for adapter, request_id in (("a", "1"), ("a", "2"), ("b", "3")):
        use(slots, adapter, request_id)
    slots.wait("c", "4", "request 4", now=0.0)
    slots.grant_slots(MAX_WAIT_SECONDS / 2)
    assert slots.find("b") is not None
    slots.grant_slots(MAX_WAIT_SECONDS)
    assert slots.find("b") is None, "the slot with fewer requests drains"
    assert slots.find("a") is not None
    slots.wait("b", "5", "request 5", now=1.1)
    slots.release("b")
    assert slots.grant_slots(1.2) == ["request 4"]
    assert use(slots, "c", "4")
    assert slots.find("a") is not None, "nothing drains any more"


def test_a_slot_stops_draining_when_its_waiting_request_is_aborted() -> None:
    slots = AdapterSlots[str](1)
    use(slots, "a", "1")
    slots.wait("b", "2", "request 2", now=0.0)
    slots.grant_slots(2.0)
    slots.wait("a", "3", "request 3", now=2.0)
    assert slots.cancel("b", "2") == "request 2"
    assert slots.grant_slots(2.1) == ["request 3"]
    assert slots.find("a") is not None


def test_no_adapter_starves_under_a_steady_load_of_others() -> None:
    """Two adapters always have running requests, and eight more share two slots with them."""
    rng = Random(1)
    slots = AdapterSlots[tuple[str, str]](2)
    running: list[tuple[float, str]] = []  # end, adapter
    waited: dict[str, float] = {}
    arrived: dict[str, float] = {}
    now = 0.0
    number = 0
    while now < 200.0:
        now += 0.05
        for end, adapter in [entry for entry in running if entry[0] <= now]:
            running.remove((end, adapter))
            slots.release(adapter)
        granted = slots.grant_slots(now)
        popular = rng.choice("ab")
        arrivals = [(popular, f"{popular}{number}")]
        if rng.random() < 0.05:
            arrivals.append((rng.choice("cdefghij"), f"r{number}"))
        for adapter, request_id in [*granted, *arrivals]:
            number += 1
            arrived.setdefault(request_id, now)
            slot = slots.find(adapter)
            if slot is None:
                slots.wait(adapter, request_id, (adapter, request_id), now)
                continue
            slots.use(slot, adapter, request_id)
            running.append((now + rng.uniform(0.2, 1.0), adapter))
            waited[adapter] = max(waited.get(adapter, 0.0), now - arrived[request_id])
    assert waited.keys() == set("abcdefghij")
    # At most ten adapters are in line, and each of the two slots changes its adapter about every
    # two seconds.
    assert max(waited.values()) < 20.0
