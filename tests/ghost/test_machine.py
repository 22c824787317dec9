"""A state machine over add, step and abort: the invariants hold after every call, in any order hypothesis thinks of."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bloomery.engine.blocks import Blocks
from bloomery.engine.loop import Loop
from bloomery.engine.policy import Aims, FairPolicy, FcfsPolicy
from bloomery.engine.scheduler import Scheduler
from bloomery.messages import EngineRequest, ResolvedSampling
from tests.ghost.ghost import VOCAB, Ghost, plain
from tests.ghost.trial import sound

prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14)


class Engine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(10, 20),
        size=st.sampled_from([2, 4]),
        tokens=st.integers(1, 12),
        sequences=st.integers(1, 4),
        depth=st.integers(1, 3),
        fair=st.booleans(),
        terse=st.booleans(),
    )
    def start(
        self,
        blocks: int,
        size: int,
        tokens: int,
        sequences: int,
        depth: int,
        fair: bool,
        terse: bool,
    ) -> None:
        self.blocks = Blocks(blocks, size)
        policy = FairPolicy(sequences, blocks, Aims(short=0.02)) if fair else FcfsPolicy()
        self.scheduler = Scheduler(self.blocks, tokens, sequences, policy)
        ticks = itertools.count()
        self.loop = Loop(self.scheduler, Ghost(size, terse), depth, lambda: 0.01 * next(ticks))
        self.asked: dict[str, EngineRequest] = {}
        self.got: dict[str, list[int]] = {}
        self.ended: set[str] = set()

    @rule(prompt=prompts, output=st.integers(1, 6), stop=st.sampled_from([(), (3,)]))
    def add(self, prompt: list[int], output: int, stop: tuple[int, ...]) -> None:
        request = EngineRequest(
            str(len(self.asked)), tuple(prompt), ResolvedSampling(), output, stop
        )
        self.asked[request.id] = request
        self.got[request.id] = []
        self.loop.add(request)

    @rule()
    def step(self) -> None:
        for news in self.loop.step():
            assert news.request not in self.ended
            assert news.position == len(self.got[news.request])
            self.got[news.request] += news.ids
            if news.finish:
                self.ended.add(news.request)
                assert [*self.asked[news.request].prompt, *self.got[news.request]] == plain(
                    self.asked[news.request]
                )

    @precondition(lambda self: self.asked.keys() - self.ended)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.asked.keys() - self.ended)))
        assert self.loop.abort(request)
        self.ended.add(request)

    @rule()
    def abort_nobody(self) -> None:
        assert not self.loop.abort("never heard of")

    @invariant()
    def blocks_are_sound(self) -> None:
        if hasattr(self, "blocks"):
            sound(self.blocks)

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            for _ in range(2000):
                if not self.loop.busy:
                    break
                self.step()
            assert not self.loop.busy, "stuck"
            assert self.ended == self.asked.keys()
            assert self.blocks.available == self.blocks.count, "blocks leaked"


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
