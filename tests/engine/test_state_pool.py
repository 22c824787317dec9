"""The block pool of a model with recurrent state: where sequences can resume, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from bloomery.engine.checkpoints import CheckpointIndex
from bloomery.engine.policy import FairPolicy, FcfsPolicy
from bloomery.engine.scheduler import Scheduler
from bloomery.engine.sequence import Sequence
from bloomery.engine.state_pool import StatePool
from bloomery.messages import (
    CacheGroup,
    EngineRequest,
    FinishReason,
    PoolingType,
    ResolvedSampling,
    SampledTokens,
    ScheduledStep,
    StepOutput,
)
from tests.engine.random_engine import check_state_pool

PAGE_SIZE = 4
FULL = CacheGroup()
STATE = CacheGroup(state_blocks=6)
SYSTEM = tuple(range(100, 108))  # two pages


def make_pool(num_blocks: int = 100, groups: tuple[CacheGroup, ...] = (FULL, STATE)) -> StatePool:
    return StatePool(num_blocks, PAGE_SIZE, groups=groups)


def start(
    pool: StatePool,
    id: int,
    prompt: Iterable[int],
    cache_salt: str = "",
    system_length: int = 0,
) -> Sequence:
    """Find the prefix of a new sequence and allocate its prompt."""
    request = EngineRequest(
        str(id),
        tuple(prompt),
        ResolvedSampling(),
        40,
        cache_salt=cache_salt,
        system_length=system_length,
    )
    sequence = Sequence.from_request(id, request)
    hit = pool.find_prefix(sequence)
    assert pool.extend(sequence, len(sequence.tokens), hit) is not None
    sequence.num_computed = hit.position
    return sequence


def compute(pool: StatePool, sequence: Sequence) -> list[tuple[int, int]]:
    """Compute the prompt in chunks, each in a step of its own. Returns the copies of the steps."""
    copies = list(pool.take_copies()) if not sequence.num_computed else []
    while sequence.num_computed < len(sequence.tokens):
        missing = len(sequence.tokens) - sequence.num_computed
        sequence.num_computed += pool.limit_chunk(sequence, missing)
        pool.publish(sequence)
        pool.save_due_checkpoint(sequence)
        pool.free_passed_pages(sequence, sequence.num_computed)
        copies += pool.take_copies()
    return copies


def answer(
    pool: StatePool,
    sequence: Sequence,
    tokens: Iterable[int],
    reason: FinishReason | None = "length",
    num_run_on: int = 0,
) -> None:
    """Append an answer, whose last token is not computed, and release the sequence."""
    sequence.tokens += tokens
    assert pool.extend(sequence, len(sequence.tokens)) is not None
    sequence.num_computed = len(sequence.tokens) - 1 + num_run_on
    sequence.finish_reason = reason
    pool.release(sequence)
    pool.take_copies()
    check_state_pool(pool, [])


def serve(
    pool: StatePool,
    id: int,
    prompt: Iterable[int],
    output: Iterable[int],
    system_length: int = 0,
) -> int:
    """Serve a request. Returns the position at which it resumed."""
    sequence = start(pool, id, prompt, system_length=system_length)
    position = sequence.num_computed
    compute(pool, sequence)
    answer(pool, sequence, output)
    return position


def test_a_sequence_gets_a_state_and_gives_it_back() -> None:
    pool = make_pool(10)
    sequence = start(pool, 0, range(5))
    assert len(sequence.state) == 6 and pool.used_by_group == [2, 6]
    assert pool.num_free_blocks == 2
    compute(pool, sequence)
    answer(pool, sequence, [7, 8])
    assert pool.num_free_blocks == 10 and pool.used_by_group == [0, 0]


def test_the_next_turn_resumes_where_the_answer_ended() -> None:
    pool = make_pool()
    serve(pool, 0, range(6), [7, 8, 9])
    sequence = start(pool, 1, [*range(6), 7, 8, 9, 50])
    # The last token of the answer was never computed: 8 positions are two whole pages.
    assert sequence.num_computed == 8
    copies = pool.take_copies()
    assert [destination for _, destination in copies] == list(sequence.state)
    pool.release(sequence)
    serve(pool, 2, range(30), [7, 8])
    tail = start(pool, 3, [*range(30), 7, 60])
    assert tail.num_computed == 31
    # Its last page is copied, because the sequence will write into it; the others are shared.
    own_page = tail.pages[0][7]
    assert own_page is not None and own_page.digest is None
    assert len(pool.take_copies()) == 6 + 1


def test_a_prompt_saves_its_state_with_the_copies_of_the_next_step() -> None:
    pool = make_pool()
    sequence = start(pool, 0, range(10))
    sequence.num_computed = pool.limit_chunk(sequence, 10)
    assert sequence.num_computed == 8
    pool.publish(sequence)
    pool.save_due_checkpoint(sequence)
    assert pool.take_copies() == ()  # of the step that computes the chunk
    assert pool.find_prefix(make_sequence(range(10))).position == 0
    copies = pool.take_copies()
    assert [source for source, _ in copies] == list(sequence.state)
    assert pool.find_prefix(make_sequence(range(10))).position == 8


def make_sequence(prompt: Iterable[int], **fields: object) -> Sequence:
    request = EngineRequest("x", tuple(prompt), ResolvedSampling(), 4)
    return Sequence.from_request(99, request)


def test_the_third_sequence_with_a_system_prompt_resumes_behind_it() -> None:
    pool = make_pool()
    assert serve(pool, 0, (*SYSTEM, 1, 2, 3, 4, 5), [6]) == 0
    assert serve(pool, 1, (*SYSTEM, 9, 8, 7, 6, 5), [6]) == 0
    assert serve(pool, 2, (*SYSTEM, 5, 5, 5, 5, 5), [6]) == len(SYSTEM)
    kinds = [node.kind for node in pool.cache.tree if node.checkpoint]
    assert kinds.count("fork") == 1


def test_the_second_sequence_resumes_behind_a_system_message_that_is_known() -> None:
    pool = make_pool()
    length = len(SYSTEM) + 1  # the checkpoint is at the end of a page
    assert serve(pool, 0, (*SYSTEM, 1, 2, 3, 4, 5), [6], system_length=length) == 0
    assert serve(pool, 1, (*SYSTEM, 9, 8, 7, 6, 5), [6], system_length=length) == len(SYSTEM)
    assert [node.kind for node in pool.cache.tree if node.checkpoint].count("system") == 1


def test_system_messages_that_are_not_met_again_get_no_checkpoints() -> None:
    pool = make_pool()
    checkpoints = pool.cache.checkpoints
    for number in range(40):
        prompt = [number + 100 * position for position in range(20)]
        serve(pool, number, (*prompt, 1), [6], system_length=16)
    assert checkpoints.num_made["system", 0] < 8


def test_prefixes_of_other_salts_are_not_shared() -> None:
    pool = make_pool()
    serve(pool, 0, range(10), [7])
    assert start(pool, 1, range(10), "other").num_computed == 0


def test_a_preempted_sequence_resumes_where_it_stopped() -> None:
    pool = make_pool()
    sequence = start(pool, 0, range(10))
    compute(pool, sequence)
    answer(pool, sequence, [7, 8, 9], reason=None)
    hit = pool.find_prefix(sequence)
    assert hit.position == 12
    assert hit.node is not None and hit.node.kind == "preempted"


def test_a_state_that_has_run_past_the_answer_is_not_kept() -> None:
    pool = make_pool()
    sequence = start(pool, 0, range(10))
    compute(pool, sequence)
    answer(pool, sequence, [7, 3], "stop", num_run_on=2)
    assert {node.kind for node in pool.cache.tree if node.checkpoint} == {"prompt"}
    # One step in flight computes the stop token itself, which the next prompt contains.
    exact = start(pool, 1, range(20, 30))
    compute(pool, exact)
    answer(pool, exact, [7, 3], "stop", num_run_on=1)
    assert start(pool, 2, [*range(20, 30), 7, 3, 1]).num_computed == 12


def test_a_prompt_whose_checkpoint_would_save_less_than_a_page_takes_no_extra_step() -> None:
    pool = make_pool()
    sequence = start(pool, 0, range(6))
    assert pool.limit_chunk(sequence, 6) == 6
    # Checkpoints of prompts that are never used again lower the odds.
    pool.cache.checkpoints.num_made["prompt", 0] = 10
    assert pool.limit_chunk(start(pool, 1, range(20, 30)), 10) == 10
    assert pool.limit_chunk(start(pool, 2, range(30, 90)), 60) == 56


def test_the_eviction_of_a_new_checkpoint_cancels_its_copy() -> None:
    pool = make_pool(3 + 6 + 6 + 1)
    first = start(pool, 0, range(9))
    first.num_computed = 8
    pool.publish(first)
    pool.save_due_checkpoint(first)
    assert len(pool.cache.new_saves) == 1
    pool.take_copies()
    second = start(pool, 1, (1, 2))  # needs the blocks of the checkpoint
    assert not pool.cache.due_saves
    destinations = [destination for _, destination in pool.take_copies()]
    assert not destinations and len(second.state) == 6
    assert pool.cache.num_cancelled == pool.cache.num_resume_nodes_evicted == 1
    check_state_pool(pool, [first, second])


def test_a_checkpoint_becomes_the_state_where_a_copy_has_no_room() -> None:
    pool = make_pool(3 + 6)
    serve(pool, 0, range(6), [7, 8, 9])
    (node,) = [node for node in pool.cache.tree if node.checkpoint]
    blocks = node.checkpoint
    sequence = start(pool, 1, [*range(6), 7, 8, 9, 1])
    assert sequence.num_computed == 8
    assert sequence.state == blocks and not node.checkpoint
    assert pool.take_copies() == ()
    check_state_pool(pool, [sequence])


def test_pages_behind_the_last_checkpoint_are_evicted_first() -> None:
    pool = make_pool(24)
    serve(pool, 0, range(9), [7])  # 3 pages and 2 checkpoints
    sequence = start(pool, 1, range(50, 53))
    compute(pool, sequence)
    answer(pool, sequence, [1, 1, 1, 1, 1, 1], "stop", num_run_on=2)  # 2 pages
    assert len(pool.cache.free_blocks) == 24 - 15 - 2
    pool.cache.take_blocks(9)
    assert len(pool.cache.checkpoints) == 2
    assert pool.find_prefix(make_sequence([*range(9), 7, 7])).position == 9


def test_a_page_is_kept_once_when_two_sequences_have_computed_it() -> None:
    pool = make_pool()
    first = start(pool, 0, range(9))
    second = start(pool, 1, range(9))
    compute(pool, first)
    compute(pool, second)
    assert pool.used_by_group == [6, 12]
    check_state_pool(pool, [first, second])
    pool.release(first)
    check_state_pool(pool, [second])
    own_page = second.pages[0][0]
    assert own_page is not None and own_page.digest is not None


def test_windows_are_kept_for_checkpoints() -> None:
    pool = make_pool(60, (FULL, CacheGroup(5), STATE))
    serve(pool, 0, range(30), [7, 8])
    blocks_before = pool.num_free_blocks
    assert blocks_before == 60
    hit = pool.find_prefix(make_sequence([*range(30), 7, 9]))
    assert hit.position == 31
    assert hit.pages[1][:6] == [None] * 6 and None not in hit.pages[1][6:]


def test_no_checkpoint_is_taken_where_a_window_is_missing() -> None:
    """The tree has the window pages of another sequence, which are evicted before they are needed.

    This happens only where both have computed the same pages at the same time.
    """
    pool = make_pool(200, (FULL, CacheGroup(9), STATE))
    longer = start(pool, 0, range(60))
    sequence = start(pool, 1, range(30))
    for one in (longer, sequence):
        one.num_computed = 24
        pool.publish(one)
    longer.num_computed = 56
    pool.publish(longer)
    pool.free_passed_pages(longer, 56)
    blocks = pool.cache.take_blocks(len(pool.cache.free_blocks) + 12)
    pool.cache.free_blocks += blocks
    sequence.num_computed = 28
    pool.publish(sequence)
    pool.save_due_checkpoint(sequence)
    assert not any(node.checkpoint for node in pool.cache.tree)
    check_state_pool(pool, [longer, sequence])


def test_a_model_without_attention_has_states_only() -> None:
    pool = make_pool(20, (STATE,))
    sequence = start(pool, 0, range(10))
    assert pool.extend(sequence, 100) == ()
    compute(pool, sequence)
    answer(pool, sequence, [7])
    assert start(pool, 1, [*range(10), 7]).num_computed == 10


# ---- values --------------------------------------------------------------------------------------


def test_the_rate_of_use_is_learned_by_kind_and_falls_with_age() -> None:
    index = CheckpointIndex()
    pool = make_pool(10_000)
    pool.cache.checkpoints = index
    for turn in range(20):
        index.now = 100.0 * turn
        serve(pool, turn, range(1000 * turn, 1000 * turn + 9), [7])
        index.now += 10
        serve(pool, 100 + turn, [*range(1000 * turn, 1000 * turn + 9), 7, 8], [9])
    assert index.num_made["answer", 0] == 40 and index.num_reused["answer", 0] == 20
    assert index.estimate_odds("answer", 0) == pytest.approx(0.5)
    assert index.mean_gaps["answer", 0] == pytest.approx(10)
    rates = [index.estimate_rate("answer", 0, age) for age in (0, 10, 100, 1000)]
    assert rates == sorted(rates, reverse=True)
    assert index.estimate_rate("answer", 0, 0) > index.estimate_rate("prompt", 0, 0)


# ---- in the scheduler ----------------------------------------------------------------------------


def finish_step(scheduler: Scheduler, step: ScheduledStep, token: int = 1) -> None:
    samples = [
        SampledTokens(request.sequence, (token,)) for request in step.requests if request.samples
    ]
    scheduler.update(step, StepOutput(tuple(samples)))


def test_chunks_end_where_a_checkpoint_is_due_and_the_next_step_copies_it() -> None:
    pool = make_pool()
    scheduler = Scheduler(pool, 64, 4)
    scheduler.add(EngineRequest("a", tuple(range(10)), ResolvedSampling(), 8))
    first = scheduler.schedule()
    assert first is not None
    (chunk,) = first.chunks
    assert (chunk.start, chunk.count, chunk.samples) == (0, 8, False)
    assert chunk.new_request is not None and len(chunk.new_request.state_blocks) == 6
    assert first.block_copies == ()
    second = scheduler.schedule()
    assert second is not None and second.chunks[0].count == 2
    assert [source for source, _ in second.block_copies] == list(chunk.new_request.state_blocks)
    finish_step(scheduler, first)
    finish_step(scheduler, second)


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    scheduler = Scheduler(make_pool(), 64, 4)
    for name in "abc":
        scheduler.add(EngineRequest(name, tuple(range(10)), ResolvedSampling(), 8))
    starts = []
    for _ in range(4):
        step = scheduler.schedule()
        assert step is not None
        starts += [chunk.start for chunk in step.chunks if chunk.new_request is not None]
    assert starts == [0, 8, 8]


@pytest.mark.parametrize("fair", [False, True])
def test_others_overtake_a_sequence_that_waits_for_a_state(fair: bool) -> None:
    policy = FairPolicy(4, 100) if fair else FcfsPolicy()
    scheduler = Scheduler(make_pool(), 16, 4, policy)
    first, twin, other = tuple(range(30)), tuple(range(30)), (91, 92, 93)
    for name, prompt in (("first", first), ("twin", twin), ("other", other)):
        scheduler.add(EngineRequest(name, prompt, ResolvedSampling(), 8))
    starts: list[list[tuple[int, int]]] = []
    for _ in range(4):
        step = scheduler.schedule()
        assert step is not None
        new_chunks = [chunk for chunk in step.chunks if chunk.new_request is not None]
        starts.append([(chunk.sequence, chunk.start) for chunk in new_chunks])
        finish_step(scheduler, step)
    by_sequence = {pair[0]: (number, pair[1]) for number, new in enumerate(starts) for pair in new}
    assert by_sequence[2][0] < by_sequence[1][0]  # the other one has not waited for the twin
    assert by_sequence[1][1] == 28  # the twin resumes at the state of the first one


def test_the_state_of_an_aborted_sequence_is_not_awaited() -> None:
    scheduler = Scheduler(make_pool(), 4, 4)
    scheduler.add(EngineRequest("a", tuple(range(12)), ResolvedSampling(), 8))
    step = scheduler.schedule()
    assert step is not None and step.chunks[0].count == 4
    scheduler.add(EngineRequest("b", tuple(range(12)), ResolvedSampling(), 8))
    scheduler.abort("a")
    finish_step(scheduler, step)
    step = scheduler.schedule()
    assert step is not None and step.chunks[0].start == 4


def test_drafts_are_dropped_because_a_state_cannot_be_rolled_back() -> None:
    scheduler = Scheduler(make_pool(), 64, 4)
    scheduler.add(EngineRequest("a", (1, 2, 3), ResolvedSampling(), 8))
    step = scheduler.schedule()
    assert step is not None
    finish_step(scheduler, step)
    (sequence,) = scheduler.running.values()
    sequence.drafts = [5, 6]
    step = scheduler.schedule()
    assert step is not None
    assert step.decodes == (sequence.id,) or not step.chunks[0].drafts
    assert not sequence.drafts


def test_an_embedded_prompt_resumes_at_a_checkpoint_and_leaves_none() -> None:
    pool = make_pool()
    scheduler = Scheduler(pool, 64, 4)
    serve(pool, 50, range(10), [1, 2, 3])
    prompt = (*range(10), 1, 2, 9)
    cases: list[tuple[PoolingType, int]] = [("last", 12), ("mean", 0)]
    for pooling, start_position in cases:
        request = EngineRequest(pooling, prompt, ResolvedSampling(), 1, pooling=pooling)
        scheduler.add(request)
        step = scheduler.schedule()
        assert step is not None and step.chunks[0].start == start_position
        sample = SampledTokens(step.chunks[0].sequence, embedding=(1.0,))
        (output,) = scheduler.update(step, StepOutput((sample,)))
        assert output.embedding == (1.0,) and output.finish == "stop"
    kinds = [node.kind for node in pool.cache.tree if node.checkpoint]
    assert sorted(kinds) == ["answer", "prompt"]
    check_state_pool(pool, [])


def test_a_replayed_request_resumes_with_the_tokens_that_were_sent() -> None:
    pool = make_pool()
    scheduler = Scheduler(pool, 64, 4)
    serve(pool, 50, range(10), [1, 2, 3])
    scheduler.add(EngineRequest("a", tuple(range(10)), ResolvedSampling(), 8, emitted=(1, 2, 3)))
    step = scheduler.schedule()
    assert step is not None and step.chunks[0].start == 12
