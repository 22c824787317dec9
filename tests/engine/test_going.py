"""Steps say of those that go on no more than what is new. Spelled out they are the steps an engine always made, and an
answer of mere tokens brings the news that an answer sequence by sequence brings."""

from __future__ import annotations

from random import Random

import pytest

from bloomery.engine.blocks import Blocks
from bloomery.engine.loop import Loop
from bloomery.engine.scheduler import Scheduler, work_of
from bloomery.messages import EngineRequest, ResolvedSampling, TokenOutput
from tests.ghost.ghost import VOCAB, Ghost


def asked(seed: int) -> list[tuple[int, EngineRequest]]:
    """At different steps; some end at a stop id, some of them only after a few tokens."""
    random = Random(seed)
    made = []
    for number in range(12):
        prompt = tuple(random.randrange(VOCAB) for _ in range(random.randint(1, 18)))
        wish = ResolvedSampling(min_tokens=random.choice((0, 3)))
        stops = random.choice(((), (), (2,)))
        made.append(
            (
                random.randrange(20),
                EngineRequest(str(number), prompt, wish, random.randint(1, 24), stops),
            )
        )
    return made


def told(
    ghost: Ghost, seed: int, depth: int, caching: bool
) -> tuple[list[list[TokenOutput]], Scheduler]:
    """What every step brings, one request aborted on the way."""
    scheduler = Scheduler(Blocks(12, 4, caching), 10, 5)
    loop = Loop(scheduler, ghost, depth)
    requests = asked(seed)
    brought = list[list[TokenOutput]]()
    while loop.busy or len(brought) < 20:
        for at, request in requests:
            if at == len(brought):
                loop.add(request)
        if len(brought) == 15:
            loop.abort(next(iter(scheduler.by_request)))
        brought.append(loop.step())
    return brought, scheduler


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_mere_tokens_bring_the_same_news(seed: int, depth: int, caching: bool) -> None:
    (terse, one), (spelled, other) = (
        told(Ghost(4, terse), seed, depth, caching) for terse in (True, False)
    )
    assert terse == spelled
    assert (
        one.blocks.published == other.blocks.published and one.preemptions == other.preemptions > 0
    )
    assert any(news.finish == "stop" for step in terse for news in step)


def test_the_policy_hears_of_all_the_work() -> None:
    scheduler = Scheduler(Blocks(30, 4), 10, 5)
    for number in range(3):
        scheduler.add(EngineRequest(str(number), (1, 2, 3) * (number + 1), ResolvedSampling(), 8))
    ghost = Ghost(4)
    mixed = 0
    while (step := scheduler.schedule()) is not None:
        assert scheduler.scheduled[-1].work == work_of(step.requests)
        mixed += bool(step.decodes and step.chunks)
        scheduler.update(step, ghost.run(step))
    assert mixed
