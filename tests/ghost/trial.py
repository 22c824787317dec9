"""One random engine: sizes, arrivals, drafts, aborts and steps in flight drawn from a seed, checked to the end."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from random import Random

from bloomery.engine.blocks import Blocks
from bloomery.engine.loop import Loop
from bloomery.engine.policy import Aims, FairPolicy, FcfsPolicy
from bloomery.engine.scheduler import Scheduler
from bloomery.messages import EngineRequest, ResolvedSampling
from tests.ghost.ghost import VOCAB, Ghost, next_token, plain


def requests(random: Random, blocks: Blocks, drafts: int) -> deque[EngineRequest]:
    """A few stems shared by many prompts, so that prefixes are hit; some start with tokens already emitted."""
    stems = [
        [random.randrange(VOCAB) for _ in range(random.randrange(1, blocks.size * 4 + 2))]
        for _ in range(3)
    ]
    todo: deque[EngineRequest] = deque()
    for number in range(random.randrange(3, 14)):
        prompt = random.choice(stems) + [
            random.randrange(VOCAB) for _ in range(random.randrange(0, 6))
        ]
        request = EngineRequest(
            str(number),
            tuple(prompt),
            ResolvedSampling(min_tokens=random.choice([0, 0, 4])),
            random.randrange(2, 12),
            stop_ids=random.choice([(), (3,), (1, 3)]),
            salt=random.choice(["", "", "other"]),
            priority=random.choice([0, 0, -1, 2]),
            tenant=random.choice(["", "guest"]),
        )
        if random.random() < 0.1:
            first = plain(request)[len(prompt)]
            if first not in request.stop_ids:
                request = replace(request, emitted=(first,), salt="")
        if len(prompt) + request.max_tokens + drafts <= blocks.count * blocks.size:
            todo.append(request)
    return todo


class Trial:
    def __init__(self, seed: int):
        self.random = random = Random(seed)
        self.blocks = Blocks(
            random.choice([12, 24, 60]), random.choice([1, 2, 4, 8]), random.random() < 0.9
        )
        tokens = random.choice([3, 8, 40])
        rows = random.choice([1, 3, 8])
        policy = random.choice(
            [
                FcfsPolicy(),
                FairPolicy(rows, self.blocks.count, Aims(short=random.choice([1e-3, 0.02, 0.1]))),
            ]
        )
        self.scheduler = Scheduler(self.blocks, tokens, rows, policy)
        self.ghost = Ghost(self.blocks.size, terse=seed % 2 == 0)
        self.time = 0.0
        self.loop = Loop(self.scheduler, self.ghost, random.choice([1, 2, 3]), self.clock)
        self.drafts = random.choice([0, 0, 1, 3])
        self.aborts = random.choice([0.0, 0.0, 0.1])
        self.todo = requests(random, self.blocks, self.drafts)
        self.want = {request.id: plain(request) for request in self.todo}
        self.got = {request.id: [*request.prompt, *request.emitted] for request in self.todo}
        self.prompts = {request.id: len(request.prompt) for request in self.todo}
        self.alive: set[str] = set()
        self.aborted: set[str] = set()
        self.stats: Counter[str] = Counter()

    def clock(self) -> float:
        self.time += self.random.choice([0.0, 0.001, 0.02])
        return self.time

    def run(self) -> Counter[str]:
        quiet = 0
        while self.todo or self.loop.busy:
            while self.todo and self.random.random() < 0.5:
                self.alive.add(self.todo[0].id)
                self.loop.add(self.todo.popleft())
            if self.alive and self.random.random() < self.aborts:
                self.abort(self.random.choice(sorted(self.alive)))
            ran = self.ghost.steps
            self.step()
            quiet = 0 if self.ghost.steps > ran or self.loop.flight else quiet + 1
            assert quiet < 50, "stuck"
        self.check()
        return self.stats

    def step(self) -> None:
        for news in self.loop.step():
            assert news.request in self.alive, "news of a request that has ended"
            assert news.position == len(self.got[news.request]) - self.prompts[news.request], (
                "a gap or a repeat"
            )
            self.got[news.request] += news.ids
            self.stats["accepted"] += len(news.ids) - 1
            self.stats["hits"] += news.cached > 0
            if news.finish:
                self.alive.remove(news.request)
        self.draft()

    def draft(self) -> None:
        """Guesses that are right seven times in ten."""
        for sequence in self.scheduler.running.values():
            if not self.drafts or sequence.pending:
                continue
            tokens = list(sequence.tokens)
            sequence.drafts.clear()
            for _ in range(min(self.drafts, sequence.request.max_tokens - sequence.produced - 1)):
                tokens.append(
                    next_token(tokens)
                    if self.random.random() < 0.7
                    else self.random.randrange(VOCAB)
                )
                sequence.drafts.append(tokens[-1])

    def abort(self, request: str) -> None:
        assert self.loop.abort(request) and not self.loop.abort(request)
        self.alive.remove(request)
        self.aborted.add(request)
        self.stats["aborts"] += 1

    def check(self) -> None:
        for request, want in self.want.items():
            got = self.got[request]
            assert got == (want[: len(got)] if request in self.aborted else want), request
        self.stats["preemptions"] += self.scheduler.preemptions
        self.stats["chunks"] += self.ghost.chunks
        assert not self.scheduler.scheduled and not self.scheduler.by_request
        sound(self.blocks)
        assert self.blocks.available == self.blocks.count, "blocks leaked"


def sound(blocks: Blocks) -> None:
    """What must hold of the blocks at any moment."""
    assert all(refs >= 0 for refs in blocks.refs)
    assert set(blocks.free) == {block for block, refs in enumerate(blocks.refs) if refs == 0}
    assert {block: key for key, block in blocks.published.items()} == blocks.key_of
    assert set(blocks.serial_of) == set(blocks.key_of)
