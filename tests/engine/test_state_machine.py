"""A hypothesis state machine over add, step and abort: invariants hold after every call."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bloomery.cache_groups import count_state_blocks
from bloomery.engine.block_pool import BlockPool
from bloomery.engine.chunk_planner import LatencyTargets
from bloomery.engine.loop import EngineLoop
from bloomery.engine.policy import FairPolicy, FcfsPolicy, Policy
from bloomery.engine.scheduler import Scheduler
from bloomery.engine.state_pool import StatePool
from bloomery.messages import CacheGroup, EngineRequest, ResolvedSampling
from tests.engine.fake_executor import VOCAB, FakeExecutor, reference_tokens
from tests.engine.random_engine import check_block_pool, check_state_pool, holders_of_pages

prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14)


GROUPS = (
    (CacheGroup(),),
    (CacheGroup(5),),
    (CacheGroup(), CacheGroup(3, num_tables=2)),
    (CacheGroup(), CacheGroup(state_blocks=4)),
    (CacheGroup(4), CacheGroup(state_blocks=3)),
)


class EngineStateMachine(RuleBasedStateMachine):
    """An engine with a fake executor. Each call of its clock advances it by 10 ms."""

    @initialize(
        num_blocks=st.integers(10, 20),
        block_size=st.sampled_from([2, 4]),
        max_tokens=st.integers(1, 12),
        max_num_seqs=st.integers(1, 4),
        max_in_flight=st.integers(1, 3),
        fair=st.booleans(),
        compact_output=st.booleans(),
        groups=st.sampled_from(GROUPS),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_tokens: int,
        max_num_seqs: int,
        max_in_flight: int,
        fair: bool,
        compact_output: bool,
        groups: tuple[CacheGroup, ...],
    ) -> None:
        num_blocks *= sum(group.page_blocks for group in groups)
        num_blocks += 2 * count_state_blocks(groups)
        kind = StatePool if count_state_blocks(groups) else BlockPool
        self.block_pool = kind(num_blocks, block_size, groups=groups)
        policy: Policy = FcfsPolicy()
        if fair:
            targets = LatencyTargets(short_request_seconds=0.02)
            policy = FairPolicy(max_num_seqs, num_blocks, targets)
        scheduler = Scheduler(self.block_pool, max_tokens, max_num_seqs, policy)
        executor = FakeExecutor(block_size, compact_output, groups)
        ticks = itertools.count()
        self.loop = EngineLoop(scheduler, executor, max_in_flight, lambda: 0.01 * next(ticks))
        self.requests: dict[str, EngineRequest] = {}
        self.received: dict[str, list[int]] = {}
        self.ended: set[str] = set()

    @rule(prompt=prompts, max_tokens=st.integers(1, 6), stop_ids=st.sampled_from([(), (3,)]))
    def add(self, prompt: list[int], max_tokens: int, stop_ids: tuple[int, ...]) -> None:
        request_id = str(len(self.requests))
        request = EngineRequest(request_id, tuple(prompt), ResolvedSampling(), max_tokens, stop_ids)
        self.requests[request_id] = request
        self.received[request_id] = []
        self.loop.add(request)

    @rule()
    def step(self) -> None:
        for output in self.loop.step():
            request = self.requests[output.request]
            received = self.received[output.request]
            assert output.request not in self.ended
            assert output.position == len(received)
            received += output.ids
            if output.finish:
                self.ended.add(output.request)
                expected = reference_tokens(request, self.block_pool.groups)
                assert [*request.prompt, *received] == expected

    @precondition(lambda self: self.requests.keys() - self.ended)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests.keys() - self.ended)))
        assert self.loop.abort(request_id)
        self.ended.add(request_id)

    @rule()
    def abort_an_unknown_request(self) -> None:
        assert not self.loop.abort("unknown")

    @invariant()
    def block_pool_is_consistent(self) -> None:
        if hasattr(self, "block_pool"):
            self.check_pool()

    def check_pool(self) -> None:
        scheduler = self.loop.scheduler
        if isinstance(self.block_pool, BlockPool):
            check_block_pool(self.block_pool)
        else:
            check_state_pool(self.block_pool, holders_of_pages(scheduler))

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        for _ in range(2000):
            if not self.loop.busy:
                break
            self.step()
        assert not self.loop.busy, "the engine is stuck"
        assert self.ended == self.requests.keys()
        assert self.block_pool.num_free_blocks == self.block_pool.num_blocks, "blocks leaked"


TestEngineStateMachine = EngineStateMachine.TestCase
TestEngineStateMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
