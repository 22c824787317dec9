"""The journal without engines: what is accepted, what is replayed, who is blamed."""

from __future__ import annotations

from random import Random

import pytest

from bloomery.engine.journal import PROBATION, Entry, Journal
from bloomery.engine.wire import WireError
from bloomery.errors import InvalidRequest
from bloomery.messages import EngineRequest, ResolvedSampling, TokenLogprob, TokenOutput


class Reader:
    def __init__(self) -> None:
        self.rung: list[Entry] = []

    def ring(self, entry: Entry) -> None:
        self.rung.append(entry)


def opened(journal: Journal, *names: str) -> list[Entry]:
    return [
        journal.open(EngineRequest(name, (1, 2), ResolvedSampling(), 100), Reader(), 5.0)
        for name in names
    ]


def run(journal: Journal, entry: Entry, count: int) -> None:
    """An engine admits the entry and gives it ids."""
    journal.admit(entry.serial, 6.0)
    for _ in range(count):
        journal.accept(TokenOutput(entry.serial, len(entry.emitted), (3,)))


def test_only_what_comes_next_is_accepted() -> None:
    journal = Journal()
    (entry,) = opened(journal, "a")
    journal.accept(TokenOutput(entry.serial, 0, (10, 11)))
    journal.accept(TokenOutput(entry.serial, 0, (10, 11)))
    journal.accept(TokenOutput(entry.serial, 1, (99,)))
    journal.accept(TokenOutput("nobody", 0, (99,)))
    assert list(entry.emitted) == [10, 11]
    with pytest.raises(WireError, match="ids from 2 to 2 of a request are missing"):
        journal.accept(TokenOutput(entry.serial, 3, (13,)))


def test_a_slow_reader_gets_several_news_as_one() -> None:
    journal = Journal()
    (entry,) = opened(journal, "a")
    one = TokenLogprob(10, -0.5, 1)
    two = TokenLogprob(11, -0.7, 2)
    journal.admit(entry.serial, 7.5)
    journal.accept(TokenOutput(entry.serial, 0, (10,), (one,), (two,), cached=4))
    journal.accept(TokenOutput(entry.serial, 1, (11,), (two,), cached=4))
    assert entry.take() == TokenOutput("a", 0, (10, 11), (one, two), (two,), 4, queued=2.5)
    journal.accept(TokenOutput(entry.serial, 2, (12,), (one,), cached=4, finish="length"))
    assert entry.take() == TokenOutput("a", 2, (12,), (one,), (), 4, "length", queued=2.5)
    assert not journal.entries and not journal.by_request


def test_a_replay_goes_on_where_the_ids_end() -> None:
    journal = Journal()
    request = EngineRequest(
        "a", (1, 2), ResolvedSampling(seed=9, prompt_logprobs=1), 50, (0,), (7,), "salt"
    )
    entry = journal.open(request, Reader(), 0.0)
    assert journal.due() == [entry]
    first = entry.replay(0.0)
    assert (first.prompt, first.emitted, first.sampling.prompt_logprobs, first.salt) == (
        (1, 2),
        (7,),
        1,
        "salt",
    )
    journal.accept(TokenOutput(entry.serial, 1, (8, 9), cached=16))
    assert entry.take() == TokenOutput("a", 1, (8, 9), cached=16)
    journal.crash()
    assert journal.due() == [entry]
    again = entry.replay(0.0)
    assert (again.emitted, again.max_tokens, again.sampling) == (
        (7, 8, 9),
        50,
        ResolvedSampling(seed=9),
    )
    journal.accept(
        TokenOutput(entry.serial, 3, (1,), cached=99)
    )  # what a replay finds cached is not the client's affair
    assert entry.take() == TokenOutput("a", 3, (1,), cached=16)


def test_an_id_may_be_used_again_but_not_twice_at_once() -> None:
    journal = Journal()
    (entry,) = opened(journal, "a")
    with pytest.raises(InvalidRequest, match="already in use"):
        opened(journal, "a")
    journal.end(entry, "abort")
    (other,) = opened(journal, "a")
    journal.accept(
        TokenOutput(entry.serial, 0, (99,))
    )  # late news of the first do not reach the second
    assert not other.emitted


def test_a_request_without_progress_fails_alone_at_its_third_crash() -> None:
    journal = Journal()
    (bad,) = opened(journal, "bad")
    for count in (0, 0, 1):
        assert journal.due() == [bad]
        run(journal, bad, 1)
        assert journal.crash() == count
    assert bad.finish == "error" and "3 times" in str(bad.error) and bad.reader.rung[-1] is bad
    assert not journal.entries and journal.due() == []


def test_progress_wipes_strikes_out() -> None:
    journal = Journal()
    (entry,) = opened(journal, "a")
    for _ in range(20):
        assert journal.due() == [entry]
        run(journal, entry, PROBATION)
        assert journal.crash() == 0


def test_who_only_waited_is_not_blamed() -> None:
    journal = Journal()
    bad, waiting = opened(journal, "bad", "waiting")
    for _ in range(3):
        journal.due()
        journal.admit(bad.serial, 0.0)
        journal.crash()
    assert bad.finish == "error" and waiting.finish is None and waiting.strikes == 0


def test_suspects_go_one_at_a_time_and_nobody_new_beside_them() -> None:
    journal = Journal()
    entries = opened(journal, "a", "b", "c")
    for _ in range(2):
        assert journal.due() == entries
        for entry in entries:
            run(journal, entry, 1)
        assert journal.crash() == 0
    (new,) = opened(journal, "new")
    a, b, c = entries
    assert journal.due() == [a] and journal.due() == []
    run(journal, a, PROBATION)
    assert journal.due() == [b] and journal.due() == []
    journal.end(b, "abort")
    assert journal.due() == [c] and journal.due() == []
    journal.admit(c.serial, 0.0)
    assert journal.crash() == 1 and c.finish == "error" and a.finish is None
    assert journal.due() == [a, new]


@pytest.mark.parametrize("seed", range(200))
def test_any_number_of_culprits_among_many_fail_and_nobody_else(seed: int) -> None:
    """An engine that dies whenever a culprit is in its batch, at a random moment of that batch; batches are random."""
    random = Random(seed)
    journal = Journal()
    entries = opened(journal, *map(str, range(random.randrange(1, 33))))
    culprits = set(random.sample(entries, random.randrange(0, min(4, len(entries)) + 1)))
    inside: list[Entry] = []
    queue: list[Entry] = []
    crashes = 0
    for _ in range(100_000):
        if not journal.entries:
            break
        queue += journal.due()
        while queue and len(inside) < 16 and random.random() < 0.9:
            inside.append(queue.pop(0))
            journal.admit(inside[-1].serial, 0.0)
        if culprits & set(inside):
            inside = []
            queue = []
            crashes = crashes + 1
            journal.crash()
            continue
        for entry in inside:
            position = len(entry.emitted)
            journal.accept(
                TokenOutput(
                    entry.serial, position, (3,), finish="length" if position == 99 else None
                )
            )
        inside = [entry for entry in inside if entry.finish is None]
    assert not journal.entries, "stuck"
    assert {entry for entry in entries if entry.finish == "error"} == culprits
    assert all(len(entry.emitted) == 100 for entry in entries if entry not in culprits)
    assert crashes <= 3 * len(culprits)


def test_who_waits_too_long_or_is_past_its_deadline_is_ended() -> None:
    journal = Journal()
    reader = Reader()
    waits = journal.open(EngineRequest("waits", (1,), ResolvedSampling(), 5), reader, 0.0)
    runs = journal.open(EngineRequest("runs", (1,), ResolvedSampling(), 5), reader, 0.0)
    due = journal.open(
        EngineRequest("due", (1,), ResolvedSampling(), 5, deadline=20.0), reader, 0.0
    )
    journal.due()
    for entry in (runs, due):
        journal.admit(entry.serial, 3.0)
    assert runs.queued == 3.0
    assert journal.expire(10.0, 60.0) == []
    assert due.replay(15.0).deadline == 5.0 and runs.replay(15.0).deadline is None
    assert journal.expire(21.5, 60.0) == [due] and due.finish == "deadline"
    assert journal.expire(61.0, 60.0) == [waits] and waits.error == "waited 60 s in the queue"
    assert list(journal.entries.values()) == [runs]
    journal.crash()
    assert journal.expire(1000.0, 60.0) == [], "who has begun does not wait"
