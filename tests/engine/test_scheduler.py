"""What the random engines do not state outright: order, sharing, refusals."""

from __future__ import annotations

import pytest

from bloomery.engine.blocks import Blocks
from bloomery.engine.loop import Loop
from bloomery.engine.scheduler import Scheduler
from bloomery.errors import InvalidRequest
from bloomery.messages import EngineRequest, ResolvedSampling
from tests.ghost.ghost import Ghost, plain


def engine(
    blocks: int = 32, size: int = 4, tokens: int = 16, sequences: int = 8, depth: int = 1
) -> Loop:
    return Loop(Scheduler(Blocks(blocks, size), tokens, sequences), Ghost(size), depth)


def run(loop: Loop) -> dict[str, list[int]]:
    got: dict[str, list[int]] = {}
    while loop.busy:
        for news in loop.step():
            got.setdefault(news.request, []).extend(news.ids)
    return got


def test_equal_prompts_admitted_together_share_their_blocks() -> None:
    loop = engine(tokens=64)
    prompt = tuple(i % 7 for i in range(18))
    for name in "abcd":
        loop.add(EngineRequest(name, prompt, ResolvedSampling(), 4))
    step = loop.scheduler.schedule()
    assert step is not None
    assert [item.count for item in step.requests] == [18, 2, 2, 2]
    assert len({item.blocks[:4] for item in step.requests}) == 1


def test_a_second_round_of_chat_computes_only_its_new_tokens() -> None:
    loop = engine(tokens=64)
    first = EngineRequest("first", tuple(range(7)) * 3, ResolvedSampling(), 5)
    loop.add(first)
    answer = run(loop)["first"]
    prompt = (*first.prompt, *answer, 1, 2, 3)
    loop.add(EngineRequest("second", prompt, ResolvedSampling(), 2))
    step = loop.scheduler.schedule()
    assert step is not None
    # Everything up to the last full block of what was computed; the answer's last token never was.
    assert step.requests[0].start == (len(first.prompt) + len(answer) - 1) // 4 * 4


def test_salts_do_not_share() -> None:
    loop = engine(tokens=64)
    prompt = tuple(range(7)) * 3
    loop.add(EngineRequest("mine", prompt, ResolvedSampling(), 2, salt="me"))
    run(loop)
    loop.add(EngineRequest("yours", prompt, ResolvedSampling(), 2, salt="you"))
    step = loop.scheduler.schedule()
    assert step is not None and step.requests[0].start == 0


def test_prompt_logprobs_bypass_the_cache() -> None:
    loop = engine(tokens=64)
    prompt = tuple(range(7)) * 3
    loop.add(EngineRequest("warm", prompt, ResolvedSampling(), 2))
    run(loop)
    loop.add(EngineRequest("probed", prompt, ResolvedSampling(prompt_logprobs=0), 2))
    step = loop.scheduler.schedule()
    assert step is not None and step.requests[0].start == 0


def test_first_come_first_served() -> None:
    loop = engine(sequences=1)
    for name in "abc":
        loop.add(EngineRequest(name, (1, 2, 3), ResolvedSampling(), 3))
    order: list[str] = []
    while loop.busy:
        order += [news.request for news in loop.step() if news.finish]
    assert order == ["a", "b", "c"]


def test_a_long_prompt_goes_in_chunks_while_others_decode() -> None:
    loop = engine(tokens=8)
    loop.add(EngineRequest("short", (1, 2), ResolvedSampling(), 6))
    loop.add(EngineRequest("long", tuple(range(7)) * 4, ResolvedSampling(), 2))
    lengths = []
    while loop.busy:
        step = loop.scheduler.schedule()
        if step is None:
            break
        lengths.append([item.count for item in step.requests])
        loop.scheduler.update(step, loop.executor.submit(step).result())
    assert lengths[:4] == [[2, 6], [1, 7], [1, 7], [1, 7]]


@pytest.mark.parametrize("when", range(12))
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_preemption_at_any_moment_changes_nothing(when: int, depth: int) -> None:
    """A newcomer squeezes an old one out of memory at every possible step of it."""
    loop = engine(blocks=9, size=4, tokens=6, depth=depth)
    requests = [
        EngineRequest("old", tuple(range(7)) * 2, ResolvedSampling(), 12),
        EngineRequest("new", (6, 5, 4, 3) * 3, ResolvedSampling(), 9),
    ]
    loop.add(requests[0])
    got: dict[str, list[int]] = {"old": [], "new": []}
    for turn in range(200):
        if turn == when:
            loop.add(requests[1])
        for news in loop.step():
            got[news.request] += news.ids
    for request in requests:
        assert [*request.prompt, *got[request.id]] == plain(request)


def test_a_request_that_can_never_fit_is_refused() -> None:
    loop = engine(blocks=4, size=4)
    with pytest.raises(InvalidRequest, match="need 17 cache positions, there are 16") as caught:
        loop.add(EngineRequest("big", (1,) * 10, ResolvedSampling(), 7))
    assert caught.value.field == "max_tokens"


def test_an_id_in_use_is_refused() -> None:
    loop = engine()
    loop.add(EngineRequest("twice", (1,), ResolvedSampling(), 2))
    with pytest.raises(InvalidRequest, match="already in use"):
        loop.add(EngineRequest("twice", (1,), ResolvedSampling(), 2))


def test_prefixes_are_told_apart_even_if_every_hash_collides() -> None:
    """Keys are compared, not only hashed: a dictionary whose keys all fall into one bucket still answers right."""

    class Same(dict[object, int]):
        """Looks a key up by comparing it with every other, as a table of one bucket does."""

        def get(self, key: object, default: int | None = None) -> int | None:
            return next((value for other, value in self.items() if other == key), default)

    loop = engine(blocks=64)
    loop.scheduler.blocks.published = Same()  # type: ignore[assignment]
    requests = [
        EngineRequest(str(i), (i % 2, 3, 3, 3) * 3 + (i % 3,), ResolvedSampling(), 5)
        for i in range(6)
    ]
    for request in requests:
        loop.add(request)
    got = run(loop)
    for request in requests:
        assert [*request.prompt, *got[request.id]] == plain(request)
