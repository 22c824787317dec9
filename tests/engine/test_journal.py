"""The journal without engines: accepted tokens, replays, deadlines and quarantine."""

from __future__ import annotations

from random import Random

import pytest

from bloomery.engine.journal import CLEARING_TOKENS, JournalEntry, RequestJournal
from bloomery.errors import InvalidRequest
from bloomery.ipc import ProtocolError
from bloomery.messages import EngineRequest, ResolvedSampling, TokenLogprob, TokenOutput


class RecordingListener:
    """Records the entries it is notified of."""

    def __init__(self) -> None:
        self.notified: list[JournalEntry] = []

    def notify(self, entry: JournalEntry) -> None:
        self.notified.append(entry)


def open_entries(journal: RequestJournal, *request_ids: str) -> list[JournalEntry]:
    requests = [EngineRequest(name, (1, 2), ResolvedSampling(), 100) for name in request_ids]
    return [journal.open(request, RecordingListener(), 5.0) for request in requests]


def run(journal: RequestJournal, entry: JournalEntry, num_tokens: int) -> None:
    """Act as an engine that admits the entry and generates tokens for it."""
    journal.record_admission(entry.engine_id, 6.0)
    for _ in range(num_tokens):
        journal.record_output(TokenOutput(entry.engine_id, len(entry.emitted), (3,)))


def test_tokens_are_accepted_only_in_order() -> None:
    journal = RequestJournal()
    (entry,) = open_entries(journal, "a")
    journal.record_output(TokenOutput(entry.engine_id, 0, (10, 11)))
    journal.record_output(TokenOutput(entry.engine_id, 0, (10, 11)))
    journal.record_output(TokenOutput(entry.engine_id, 1, (99,)))
    journal.record_output(TokenOutput("unknown", 0, (99,)))
    assert list(entry.emitted) == [10, 11]
    with pytest.raises(ProtocolError, match="tokens 2 to 2 of a request are missing"):
        journal.record_output(TokenOutput(entry.engine_id, 3, (13,)))


def test_a_slow_reader_gets_several_outputs_as_one() -> None:
    journal = RequestJournal()
    (entry,) = open_entries(journal, "a")
    first_logprob = TokenLogprob(10, -0.5, 1)
    second_logprob = TokenLogprob(11, -0.7, 2)
    journal.record_admission(entry.engine_id, 7.5)
    first = TokenOutput(entry.engine_id, 0, (10,), (first_logprob,), (second_logprob,), cached=4)
    journal.record_output(first)
    journal.record_output(TokenOutput(entry.engine_id, 1, (11,), (second_logprob,), cached=4))
    logprobs = (first_logprob, second_logprob)
    expected = TokenOutput("a", 0, (10, 11), logprobs, (second_logprob,), 4, queued=2.5)
    assert entry.take_output() == expected
    last = TokenOutput(entry.engine_id, 2, (12,), (first_logprob,), cached=4, finish="length")
    journal.record_output(last)
    expected = TokenOutput("a", 2, (12,), (first_logprob,), (), 4, "length", queued=2.5)
    assert entry.take_output() == expected
    assert not journal.entries and not journal.by_request


def test_a_replay_continues_after_the_last_token() -> None:
    journal = RequestJournal()
    sampling = ResolvedSampling(seed=9, prompt_logprobs=1)
    request = EngineRequest("a", (1, 2), sampling, 50, (0,), (7,), "salt")
    entry = journal.open(request, RecordingListener(), 0.0)
    assert journal.take_sendable() == [entry]
    first = entry.replay_request(0.0)
    assert first.prompt == (1, 2)
    assert first.emitted == (7,)
    assert first.sampling.prompt_logprobs == 1
    assert first.cache_salt == "salt"
    journal.record_output(TokenOutput(entry.engine_id, 1, (8, 9), cached=16))
    assert entry.take_output() == TokenOutput("a", 1, (8, 9), cached=16)
    journal.record_crash()
    assert journal.take_sendable() == [entry]
    second = entry.replay_request(0.0)
    assert second.emitted == (7, 8, 9)
    assert second.max_tokens == 50
    assert second.sampling == ResolvedSampling(seed=9)
    # The prefix hit of a replay is not reported to the client.
    journal.record_output(TokenOutput(entry.engine_id, 3, (1,), cached=99))
    assert entry.take_output() == TokenOutput("a", 3, (1,), cached=16)


def test_a_request_id_may_be_used_again_but_not_twice_at_once() -> None:
    journal = RequestJournal()
    (entry,) = open_entries(journal, "a")
    with pytest.raises(InvalidRequest, match="already in use"):
        open_entries(journal, "a")
    journal.finish(entry, "abort")
    (other,) = open_entries(journal, "a")
    # Late output of the first request does not reach the second.
    journal.record_output(TokenOutput(entry.engine_id, 0, (99,)))
    assert not other.emitted


def test_a_request_without_progress_fails_alone_at_its_third_crash() -> None:
    journal = RequestJournal()
    (bad,) = open_entries(journal, "bad")
    listener = bad.listener
    assert isinstance(listener, RecordingListener)
    for num_given_up in (0, 0, 1):
        assert journal.take_sendable() == [bad]
        run(journal, bad, 1)
        assert journal.record_crash() == num_given_up
    assert bad.finish == "error" and "3 times" in str(bad.error)
    assert listener.notified[-1] is bad
    assert not journal.entries and journal.take_sendable() == []


def test_progress_resets_the_crash_count() -> None:
    journal = RequestJournal()
    (entry,) = open_entries(journal, "a")
    for _ in range(20):
        assert journal.take_sendable() == [entry]
        run(journal, entry, CLEARING_TOKENS)
        assert journal.record_crash() == 0


def test_a_request_that_only_waited_has_no_crash_counted() -> None:
    journal = RequestJournal()
    bad, waiting = open_entries(journal, "bad", "waiting")
    for _ in range(3):
        journal.take_sendable()
        journal.record_admission(bad.engine_id, 0.0)
        journal.record_crash()
    assert bad.finish == "error"
    assert waiting.finish is None and waiting.num_crashes == 0


def test_quarantined_requests_run_alone() -> None:
    journal = RequestJournal()
    entries = open_entries(journal, "a", "b", "c")
    for _ in range(2):
        assert journal.take_sendable() == entries
        for entry in entries:
            run(journal, entry, 1)
        assert journal.record_crash() == 0
    (new,) = open_entries(journal, "new")
    a, b, c = entries
    assert journal.take_sendable() == [a] and journal.take_sendable() == []
    run(journal, a, CLEARING_TOKENS)
    assert journal.take_sendable() == [b] and journal.take_sendable() == []
    journal.finish(b, "abort")
    assert journal.take_sendable() == [c] and journal.take_sendable() == []
    journal.record_admission(c.engine_id, 0.0)
    assert journal.record_crash() == 1
    assert c.finish == "error" and a.finish is None
    assert journal.take_sendable() == [a, new]


@pytest.mark.parametrize("seed", range(200))
def test_all_requests_that_kill_engines_fail_and_no_other(seed: int) -> None:
    """Act as an engine with random batches that crashes whenever a culprit is in its batch."""
    random = Random(seed)
    journal = RequestJournal()
    entries = open_entries(journal, *map(str, range(random.randrange(1, 33))))
    num_culprits = random.randrange(0, min(4, len(entries)) + 1)
    culprits = set(random.sample(entries, num_culprits))
    batch: list[JournalEntry] = []
    queue: list[JournalEntry] = []
    num_crashes = 0
    for _ in range(100_000):
        if not journal.entries:
            break
        queue += journal.take_sendable()
        while queue and len(batch) < 16 and random.random() < 0.9:
            batch.append(queue.pop(0))
            journal.record_admission(batch[-1].engine_id, 0.0)
        if culprits & set(batch):
            batch = []
            queue = []
            num_crashes += 1
            journal.record_crash()
            continue
        for entry in batch:
            position = len(entry.emitted)
            finish = "length" if position == 99 else None
            journal.record_output(TokenOutput(entry.engine_id, position, (3,), finish=finish))
        batch = [entry for entry in batch if entry.finish is None]
    assert not journal.entries, "stuck"
    assert {entry for entry in entries if entry.finish == "error"} == culprits
    assert all(len(entry.emitted) == 100 for entry in entries if entry not in culprits)
    assert num_crashes <= 3 * len(culprits)


def test_a_crash_counts_only_if_no_request_explains_it() -> None:
    journal = RequestJournal()
    bad, harmless = open_entries(journal, "bad", "harmless")
    for time in range(2):
        journal.take_sendable()
        run(journal, bad, 1)
        run(journal, harmless, 1)
        journal.record_crash(float(time))
    assert journal.count_unexplained_crashes() == 0, "both requests may have caused it"
    journal.take_sendable()
    run(journal, bad, 1)
    assert journal.record_crash(2.0) == 1
    assert journal.crashes == [], "the request that was given up explains all three"
    journal.take_sendable()
    run(journal, harmless, CLEARING_TOKENS)
    journal.record_crash(3.0)
    journal.take_sendable()
    run(journal, harmless, CLEARING_TOKENS)
    assert journal.count_unexplained_crashes() == 1, "its only request has proved harmless"
    journal.record_crash(4.0)
    journal.finish(harmless, "abort")
    assert journal.count_unexplained_crashes() == 1, "the aborted request may explain the last one"
    journal.record_crash(5.0)
    assert journal.count_unexplained_crashes() == 2, "the engine was idle"
    assert journal.count_unexplained_crashes(begin=4.5) == 1


def test_requests_end_after_the_queue_timeout_or_their_deadline() -> None:
    journal = RequestJournal()
    listener = RecordingListener()
    sampling = ResolvedSampling()
    waiting = journal.open(EngineRequest("waiting", (1,), sampling, 5), listener, 0.0)
    running = journal.open(EngineRequest("running", (1,), sampling, 5), listener, 0.0)
    limited = EngineRequest("limited", (1,), sampling, 5, deadline=20.0)
    late = journal.open(limited, listener, 0.0)
    journal.take_sendable()
    for entry in (running, late):
        journal.record_admission(entry.engine_id, 3.0)
    assert running.queued == 3.0
    assert journal.expire(10.0, 60.0) == []
    assert late.replay_request(15.0).deadline == 5.0
    assert running.replay_request(15.0).deadline is None
    assert journal.expire(21.5, 60.0) == [late] and late.finish == "deadline"
    assert journal.expire(61.0, 60.0) == [waiting]
    assert waiting.error == "waited 60 s in the queue"
    assert list(journal.entries.values()) == [running]
    journal.record_crash()
    assert journal.expire(1000.0, 60.0) == [], "a request that has run does not wait"
