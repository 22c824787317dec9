"""How many tokens of chats a cache with recurrent states reuses, in the simulator.

`benchmarks/cache_groups.py --chats` prints the table. The trace: chats of 2 to 12 turns in an hour,
one system prompt or many, a minute between turns, 15 % of the turns asked again (with other words,
or for another answer). Scheduler, prefix cache, checkpoints and steps in flight are those of the
engine. Only the device is simulated: an H200 that runs Qwen3.6-35B-A3B, at the speed of its
roofline model. Arrivals do not depend on hits, so every pool serves the same trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from bloomery.config import EngineConfig, resolve_plan
from bloomery.engine.build import build_engine
from bloomery.engine.state_pool import StatePool
from bloomery.hardware import find_hardware
from bloomery.messages import (
    EngineRequest,
    ResolvedSampling,
    SampledTokens,
    ScheduledStep,
    StepOutput,
)
from bloomery.roofline import PRECISIONS, Roofline
from bloomery.spec import (
    AttentionGateSpec,
    AttentionSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    RopeSpec,
)
from bloomery.tools.plan.estimate import DeviceLayout, PlacedModel
from bloomery.tools.simulate import (
    SimulatedExecutor,
    SimulatedResult,
    VirtualClock,
    compute_replica_capacity,
)

SYSTEM_PROMPT_TOKENS = 2000
SPAN_SECONDS = 3600.0
SHARING_SECONDS = 300.0  # in which the chats with one of many system prompts begin
REPEATED_SHARE = 0.15  # of the turns
PAUSE_SECONDS = 60.0  # between an answer and the next turn, on average
# What the trace assumes of the device: the next turn comes after the answer.
TOKENS_PER_SECOND = 300
PREFILL_TOKENS_PER_SECOND = 20_000
PAGE_SIZE = 64
VOCAB = 248_320
MAX_LEN = 32_768


def build_qwen_3_6_35b() -> ModelSpec:
    """40 layers: every fourth one attends, the others are gated delta nets; 256 experts."""
    gate = AttentionGateSpec()
    attention = AttentionSpec(16, 2, 256, RopeSpec(64, 1e7), gate=gate)
    delta_net = GatedDeltaNetSpec(16, 32, 128, 128)
    experts = MoeSpec(256, 8, MlpSpec(512), shared=MlpSpec(512), shared_gate=True)
    norm = NormSpec()
    attends = LayerSpec(attention, experts, norm, mlp_norm=norm)
    recurs = LayerSpec(None, experts, norm, mlp_norm=norm, recurrent=delta_net)
    layers = [attends if index % 4 == 3 else recurs for index in range(40)]
    return ModelSpec(VOCAB, 2048, tuple(layers), norm, context=MAX_LEN)


# ---- the trace -----------------------------------------------------------------------------------


@dataclass(eq=False)
class ChatTurn:
    """One request of a chat, and the answer that the simulated model gives."""

    time: float
    prompt: list[int]
    answer: list[int]
    message: list[int]  # of the user: the end of the prompt
    earlier: ChatTurn | None  # the turn whose prompt and answer the prompt begins with
    num_removed: int  # tokens at the begin of the answer that later prompts leave out
    reusable: int = 0  # prompt tokens that a cache without limits would reuse


class ChatTrace:
    """The turns of some chats, in order of time.

    `removes_reasoning`: each answer begins with tokens that later prompts leave out.
    """

    def __init__(
        self,
        seed: int,
        num_chats: int,
        removes_reasoning: bool,
        chats_per_prompt: int = 0,
        vocab: int = VOCAB,
    ):
        self.rng = Random(seed)
        self.vocab = vocab
        self.removes_reasoning = removes_reasoning
        self.turns: list[ChatTurn] = []
        num_chats_left = num_chats
        while num_chats_left:
            num_sharing = min(chats_per_prompt or num_chats, num_chats_left)
            num_chats_left -= num_sharing
            self.turns += self._make_sharing_chats(num_sharing, bool(chats_per_prompt))
        self.turns.sort(key=lambda turn: turn.time)

    def _make_sharing_chats(self, num_chats: int, is_short: bool) -> list[ChatTurn]:
        """Chats with one system prompt, over the hour or within a few minutes."""
        self.system_prompt = self._make_text(SYSTEM_PROMPT_TOKENS)
        start = self.rng.uniform(0, SPAN_SECONDS) if is_short else 0.0
        span = SHARING_SECONDS if is_short else SPAN_SECONDS
        turns: list[ChatTurn] = []
        for _ in range(num_chats):
            chat = self._make_chat(start + self.rng.uniform(0, span))
            count_reusable(chat)
            turns += chat
        turns.sort(key=lambda turn: turn.time)
        for turn in turns[1:]:
            turn.reusable = max(turn.reusable, SYSTEM_PROMPT_TOKENS)
        return turns

    @property
    def reusable(self) -> int:
        return sum(turn.reusable for turn in self.turns)

    def _make_text(self, length: float) -> list[int]:
        return [self.rng.randrange(self.vocab) for _ in range(max(1, int(length)))]

    def _make_chat(self, time: float) -> list[ChatTurn]:
        rng = self.rng
        history = list(self.system_prompt)
        turns: list[ChatTurn] = []
        earlier: ChatTurn | None = None

        def ask(message: list[int], answer: list[int]) -> None:
            nonlocal time
            prompt = history + message
            turns.append(ChatTurn(time, prompt, answer, message, earlier, len(reasoning)))
            seconds = len(history + message) / PREFILL_TOKENS_PER_SECOND
            seconds += len(answer) / TOKENS_PER_SECOND
            time += seconds + rng.expovariate(1 / PAUSE_SECONDS)

        for number in range(rng.randint(2, 12)):
            message = self._make_text(rng.lognormvariate(4.5 if number else 6.0, 0.8))
            reasoning: list[int] = []
            if self.removes_reasoning:
                reasoning = self._make_text(rng.lognormvariate(6.0, 0.6))
            answer = self._make_text(rng.lognormvariate(5.5, 0.7))
            ask(message, reasoning + answer)
            if rng.random() < REPEATED_SHARE:
                if rng.random() < 0.5:
                    message = self._make_text(len(message))
                answer = self._make_text(len(answer))
                ask(message, reasoning + answer)
            history = history + message + answer
            earlier = turns[-1]
        return turns


def count_reusable(chat: Sequence[ChatTurn]) -> None:
    """Count the prompt tokens that are known from earlier turns of the same chat.

    The last token of an answer is not computed, the last one of a prompt must be.
    """
    for number, turn in enumerate(chat):
        for earlier in chat[:number]:
            known = earlier.prompt + earlier.answer[:-1]
            common = count_common(known, turn.prompt[:-1])
            turn.reusable = max(turn.reusable, common)


def count_common(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    return next(i for i in range(length) if left[i] != right[i])


# ---- the server ----------------------------------------------------------------------------------


class ChatExecutor(SimulatedExecutor):
    """Answers with the tokens of the trace."""

    def __init__(self, roofline: Roofline, clock: VirtualClock):
        super().__init__(roofline, clock)
        self.texts: dict[int, list[int]] = {}  # by sequence id: prompt and answer

    def submit(self, step: ScheduledStep) -> SimulatedResult:
        texts = self.texts
        result = super().submit(step)
        samples = [
            SampledTokens(chunk.sequence, (texts[chunk.sequence][chunk.start + chunk.count],))
            for chunk in step.chunks
            if chunk.samples
        ]
        positions = zip(step.decodes, step.decode_positions, strict=True)
        tokens = tuple([texts[sequence][position + 1] for sequence, position in positions])
        return replace(result, output=StepOutput(tuple(samples), None, tokens))


@dataclass
class ReuseResult:
    """What a pool made of a trace."""

    reused: int = 0
    preemptions: int = 0
    checkpoint_bytes: list[float] = field(default_factory=list)  # at each end of a request

    @property
    def mean_checkpoint_bytes(self) -> float:
        return sum(self.checkpoint_bytes) / max(len(self.checkpoint_bytes), 1)


def serve_chats(trace: ChatTrace, pool_bytes: float) -> ReuseResult:
    """Serve a trace with a pool of so many bytes."""
    placed = PlacedModel(
        build_qwen_3_6_35b(), find_hardware("h200"), PRECISIONS["bf16"], 16, DeviceLayout()
    )
    plan = resolve_plan(
        EngineConfig(policy="fcfs", max_num_seqs=64),
        name="",
        path="",
        kind="",
        dtype="bfloat16",
        device="cuda",
        context=MAX_LEN,
    )
    capacity = compute_replica_capacity(placed, plan)
    capacity = replace(capacity, blocks=int(pool_bytes // placed.kv_block_bytes))
    clock = VirtualClock()
    executor = ChatExecutor(placed.roofline, clock)
    loop = build_engine(plan, executor, capacity, clock)
    scheduler = loop.scheduler
    pool = scheduler.block_pool
    assert isinstance(pool, StatePool)
    result = ReuseResult()
    waiting = deque(enumerate(trace.turns))
    while waiting or loop.busy:
        if not loop.busy:
            clock.now = max(clock.now, waiting[0][1].time)
        while waiting and waiting[0][1].time <= clock.now:
            number, turn = waiting.popleft()
            request = EngineRequest(
                str(number),
                tuple(turn.prompt),
                ResolvedSampling(temperature=0),
                len(turn.answer),
                system_length=SYSTEM_PROMPT_TOKENS,
            )
            loop.add(request)
            executor.texts[scheduler.by_request[request.id].id] = turn.prompt + turn.answer
        for output in loop.step():
            if output.finish:
                result.reused += output.cached
                checkpoint_blocks = pool.cache.num_checkpoint_blocks
                result.checkpoint_bytes.append(checkpoint_blocks * placed.kv_block_bytes)
    result.preemptions = scheduler.num_preemptions
    return result


def report_reuse(
    num_seeds: int, pools: Sequence[float], num_chats: int, chats_per_prompt: int
) -> None:
    """Print the share of the reusable tokens that each pool reuses, on several traces."""
    print(
        f"{num_chats} chats on a simulated H200, Qwen3.6-35B-A3B: share of the tokens reused that\n"
        "a cache without limits would reuse (GB of checkpoints: mean, most; preemptions)\n"
    )
    columns = " | ".join(f"{pool / 1e9:g} GB" for pool in pools)
    print(f"| history | seed | turns | prompt tokens | reusable | {columns} |")
    print("|---" * (5 + len(pools)) + "|")
    for removes_reasoning in (False, True):
        history = "reasoning removed" if removes_reasoning else "answers kept"
        for seed in range(1, num_seeds + 1):
            trace = ChatTrace(seed, num_chats, removes_reasoning, chats_per_prompt)
            num_tokens = sum(len(turn.prompt) for turn in trace.turns)
            cells = [describe_reuse(trace, serve_chats(trace, pool)) for pool in pools]
            print(
                f"| {history} | {seed} | {len(trace.turns):,} | {num_tokens:,} "
                f"| {trace.reusable:,} | {' | '.join(cells)} |",
                flush=True,
            )


def describe_reuse(trace: ChatTrace, result: ReuseResult) -> str:
    mean = result.mean_checkpoint_bytes / 1e9
    most = max(result.checkpoint_bytes) / 1e9
    share = result.reused / trace.reusable
    return f"{share:.1%} ({mean:.2f}, {most:.2f}; {result.preemptions})"
