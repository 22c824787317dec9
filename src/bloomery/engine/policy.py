"""Who goes next, how much a step may hold, and who gives way. The scheduler asks; it has no opinion of its own.

Fair keeps the promise that a short request is never stuck behind long ones. A request is short by the time it would
take alone, as the pace of measured steps foretells. Short ones enter first, into rows kept for them as long as some
have been there of late; where all rows are taken, a long one may have to give way. While one is there, a step is cut to
what its promise allows: every step has all short sequences, a part of the long ones in turn, and as much of a prompt as
fits the time. What that costs long ones is their tax: counted, and bounded by cutting less.

The queue is in order of promised times (arrival, plus some multiple of the time alone), which are fixed on arrival:
whoever waits long enough comes before everybody who arrives later, so nobody starves. Among the keys that share a
server the one that was served least comes first.

Pure: time is an argument, and all times are seconds on the clock of whoever drives the scheduler.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import ceil, exp
from typing import Protocol

from bloomery.config import Plan
from bloomery.engine.pace import Pace, Work
from bloomery.engine.sequence import Sequence
from bloomery.messages import Capacity

INSTANT, FAST, SLOW = 0.1, 1.0, 10.0  # seconds, as people feel them


@dataclass(frozen=True, slots=True)
class Portion:
    """What the next step may hold of the running sequences, and of those to be admitted."""

    order: Iterable[Sequence]  # who takes part
    chunk: int  # positions of prompts, together
    kept: int = 0  # of them, for those at the door: running long ones leave them
    tax: float = 0.0  # seconds this step is expected to cost the long ones for the sake of the short


class Policy(Protocol):
    tax: float  # seconds that long requests gave for the sake of short ones

    def enqueue(self, sequence: Sequence, now: float) -> None:
        """It waits from now on: it has arrived, or was preempted."""
        ...

    def next(self, rows: int) -> Sequence | None:
        """Whom to admit while so many rows are free; one for whom room should be made if none is; or nobody."""
        ...

    def admit(self, sequence: Sequence, free: int, growth: int, alone: bool) -> bool:
        """Whether it may enter. `free` blocks would remain with all its tokens held; it may take `growth` more; nobody
        else runs if it is `alone`."""
        ...

    def compose(self, running: Mapping[int, Sequence], tokens: int, now: float) -> Portion:
        """The next step, of at most so many positions."""
        ...

    def victim(self, running: Collection[Sequence], claimant: Sequence, now: float) -> Sequence | None:
        """Of a non-empty batch, in order of admission, who gives way to the claimant; None: it waits."""
        ...

    def observe(self, portion: Portion, work: Work, seconds: float) -> None:
        """How long a step took."""
        ...


class FirstCome:
    """First come, first served; the last to be admitted gives way. What Fair is compared with."""

    tax = 0.0

    def __init__(self) -> None:
        self.queue: list[tuple[int, Sequence]] = []

    def enqueue(self, sequence: Sequence, now: float) -> None:
        heapq.heappush(self.queue, (sequence.id, sequence))  # ids count arrivals: who was preempted comes first

    def next(self, rows: int) -> Sequence | None:
        while self.queue and not self.queue[0][1].waiting:
            heapq.heappop(self.queue)
        return self.queue[0][1] if self.queue and rows > 0 else None

    def admit(self, sequence: Sequence, free: int, growth: int, alone: bool) -> bool:
        return True

    def compose(self, running: Mapping[int, Sequence], tokens: int, now: float) -> Portion:
        return Portion(list(running.values()), tokens)

    def victim(self, running: Collection[Sequence], claimant: Sequence, now: float) -> Sequence | None:
        if claimant.waiting:
            return None
        return next(reversed(running))  # type: ignore[call-overload, no-any-return]  # dict views are reversible

    def observe(self, portion: Portion, work: Work, seconds: float) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Aims:
    """What Fair tries to keep, in seconds; None is derived from the measured pace."""

    between: float | None = None  # two tokens of a running stream; None: ten lone steps, but no slower than one reads
    short: float | None = None  # a request that takes no longer alone is short; None: 64 lone steps
    stretch: float = 3.0  # a short request is promised so many times what it takes alone
    tax: float = 0.05  # the most of their time that long ones give for the short

    def target(self, lone: float) -> float:
        return self.between or min(max(10 * lone, 0.02), INSTANT)

    def limit(self, lone: float) -> float:
        return self.short or min(max(64 * lone, INSTANT), SLOW)


PRIORITY = 10.0  # seconds of waiting that one degree of priority is worth
EXPECTED = 2.0  # seconds after a short one for which another is expected
RESERVED = 30.0  # seconds after a short one for which rows and blocks are kept for others
PREFILL = 1.5  # a round of all streams may grow to so many times itself, for the sake of prompts
FINEST = 2.0  # lone steps: the smallest step worth making
CHUNK = 5.0  # the same for a step with chunks: it is not captured, and the host starts its kernels one by one
PARTS = 4  # of a lap at the most: no stream waits for more steps than these, however wrong the pace may be
SPAN = 10.0  # seconds over which the tax is judged
GRAIN = 16  # positions: the least that prompts advance by


class Queue:
    """Waiting sequences in order of promise, one line a tenant; the tenant who was served least comes first."""

    def __init__(self) -> None:
        self.lines: dict[str, list[tuple[float, int, Sequence]]] = {}

    def push(self, sequence: Sequence) -> None:
        line = self.lines.setdefault(sequence.request.tenant, [])
        heapq.heappush(line, (sequence.promise, sequence.id, sequence))

    def top(self, served: Mapping[str, float]) -> Sequence | None:
        best: tuple[float, float, Sequence] | None = None
        for tenant, line in list(self.lines.items()):
            while line and not line[0][2].waiting:
                heapq.heappop(line)
            if not line:
                del self.lines[tenant]
            elif best is None or (served.get(tenant, 0.0), line[0][0]) < best[:2]:
                best = served.get(tenant, 0.0), line[0][0], line[0][2]
        return best[2] if best else None


class Fair:
    def __init__(self, rows: int, blocks: int, aims: Aims | None = None, pace: Pace | None = None):
        """For batches of so many rows, in a cache of so many blocks."""
        self.aims, self.pace = aims or Aims(), pace or Pace()
        self.spare_rows = max(rows // 32, int(rows >= 4))  # kept for short ones
        self.spare_blocks = blocks // 32
        self.short, self.long = Queue(), Queue()
        self.served: dict[str, float] = {}  # seconds by tenant
        self.virtual = 0.0  # what the tenant served last had been served before: a newcomer starts there
        self.inside = 0  # short ones in the batch
        self.part = 0  # of a lap, the last step
        self.now = 0.0
        self.seen = float("-inf")  # when a short one was last there
        self.owed = self.spent = 0.0  # tax and time of late, fading
        self.tax = 0.0  # in seconds, since the beginning

    # ---- the queue -------------------------------------------------------------------------------

    def enqueue(self, sequence: Sequence, now: float) -> None:
        request = sequence.request
        if not sequence.losses:
            alone = self._alone(sequence)
            sequence.short = alone <= self.aims.limit(self.pace.lone)
            sequence.cost, sequence.due = alone, sequence.arrived + self.aims.stretch * alone
            sequence.promise = sequence.due + PRIORITY * request.priority
        self.now = now
        if sequence.short:
            self.seen = now
        queue = self.short if sequence.short else self.long
        if request.tenant not in self.short.lines and request.tenant not in self.long.lines:
            self.served[request.tenant] = max(self.served.get(request.tenant, 0.0), self.virtual)
        queue.push(sequence)

    def _alone(self, sequence: Sequence) -> float:
        """Seconds it would take with nobody else there."""
        length = len(sequence.tokens)
        left = max(sequence.request.max_tokens - sequence.produced, 1)
        prompt = self.pace.seconds(Work(length, 0, length * length / 2))
        return prompt + (left - 1) * self.pace.seconds(Work(1, length))

    def next(self, rows: int) -> Sequence | None:
        short = self.short.top(self.served)
        if rows <= (self.spare_rows if self._reserving else 0) or (short is not None and self.inside < self.spare_rows):
            return short
        long = self.long.top(self.served)
        if short is None or long is None:
            return short or long
        return short if short.promise <= long.promise else long

    @property
    def _reserving(self) -> bool:
        return self.now - self.seen < RESERVED

    def admit(self, sequence: Sequence, free: int, growth: int, alone: bool) -> bool:
        """A long one leaves a reserve; one that had to give way comes back when all it may grow to fits as well."""
        needed = (self.spare_blocks if self._reserving else 0) + (growth if sequence.losses else 0)
        if not alone and not sequence.short and free < needed:
            return False
        tenant = sequence.request.tenant
        self.inside += sequence.short
        self.virtual = self.served[tenant]
        self.served[tenant] += sequence.cost
        sequence.cost = 0.0  # who comes back has paid
        return True

    # ---- the step --------------------------------------------------------------------------------

    def compose(self, running: Mapping[int, Sequence], tokens: int, now: float) -> Portion:
        self.now = now
        shorts, streams, prompts = list[Sequence](), list[Sequence](), list[Sequence]()
        attended = context = 0
        for sequence in running.values():
            if sequence.short:
                shorts.append(sequence)
                attended += sequence.computed
            elif len(sequence.tokens) + sequence.pending - sequence.computed > 1:
                prompts.append(sequence)
                context = max(context, sequence.computed)
            else:
                streams.append(sequence)
                attended += sequence.computed
        self.inside = len(shorts)
        whole = Work(len(shorts) + len(streams), attended)
        waiting = bool(prompts or self.long.lines or self.short.lines)
        lap = lap_work = self.pace.seconds(whole)  # until every stream has its next token
        if waiting:
            lap = max(self.aims.target(self.pace.lone), PREFILL * lap)
        seconds = self._seconds(shorts, bool(streams), lap, now)
        parts = min(max(round(lap / seconds), 1), PARTS) if streams else 1
        if parts > 1:
            streams.sort(key=lambda sequence: sequence.turn)
            streams = streams[: ceil(len(streams) / parts)]
            rest = (parts - 1) * (self.pace.lone + (lap_work - self.pace.lone) / parts)
            seconds = max(lap - rest, CHUNK * self.pace.lone)  # of the one part that has prompts
        work = Work(len(shorts) + len(streams), attended // parts)
        self.part = (self.part + 1) % parts
        door = self.short.top(self.served)
        chunk = tokens
        if waiting and self.part == 0:
            chunk = min(max(self.pace.room(work, seconds, context), GRAIN), tokens)
        elif waiting:  # the short ones' own prompts at the most
            knocking = max((len(one.tokens) - one.computed for one in shorts), default=1)
            chunk = min(len(door.tokens) if door is not None else knocking if knocking > 1 else 0, tokens)
        kept = 0 if door is None else max(min(len(door.tokens), chunk - max(chunk // 4, 1)), 0)  # others go on
        tax = self._levy(shorts, work.tokens, chunk if waiting else 0, parts) if streams or prompts else 0.0
        return Portion([*shorts, *streams, *prompts], chunk, kept, tax)

    def _seconds(self, shorts: list[Sequence], streaming: bool, lap: float, now: float) -> float:
        """How long the step may take: a lap of all streams, or less while there are short ones, or may be."""
        waiting = self.short.top(self.served)
        if waiting is None and not shorts:
            if now - self.seen < EXPECTED and self.owed < self.aims.tax * self.spent:
                return max(lap / 2, FINEST * self.pace.lone)
            return lap if streaming else max(lap, INSTANT)
        self.seen = now
        pressing = shorts if waiting is None else [*shorts, waiting]
        wanted = min((short.due - now) / max(short.request.max_tokens - short.produced, 1) for short in pressing)
        wanted = min(max(wanted, FINEST * self.pace.lone), lap)
        excess = self.owed / max(self.aims.tax * self.spent, 1e-9)  # from 0.8 to 1 of the bound: cut less and less
        return wanted + (lap - wanted) * min(max(5 * (excess - 0.8), 0.0), 1.0)

    def _levy(self, shorts: list[Sequence], tokens: int, chunk: int, parts: int) -> float:
        """What the short ones' own positions take, and what cutting the round of the others in parts loses."""
        own = len(shorts) * self.pace.marginal()
        return own + self.pace.fixed(tokens + chunk) * (1 - 1 / parts)

    def observe(self, portion: Portion, work: Work, seconds: float) -> None:
        self.pace.learn(work, seconds)
        self._pay(portion.tax, seconds)

    def _pay(self, tax: float, seconds: float) -> None:
        fade = exp(-seconds / SPAN)
        self.owed, self.spent = fade * self.owed + tax, fade * self.spent + seconds
        self.tax += tax

    # ---- who gives way ---------------------------------------------------------------------------

    def victim(self, running: Collection[Sequence], claimant: Sequence, now: float) -> Sequence | None:
        """The long one whose work is least to do again, of the lowest priority, spared if it lost before.

        A short one at the door displaces whom the tax can pay for, or anyone once its promise is broken; nobody twice.
        """
        inside = not claimant.waiting
        candidates = [sequence for sequence in running if not sequence.short]
        if not inside:
            candidates = [sequence for sequence in candidates if not sequence.losses]
        elif not candidates:
            candidates = list(running)
        if not candidates:
            return None
        found = min(candidates, key=lambda one: (-one.request.priority, one.losses, one.computed, -one.id))
        if inside:
            return found
        price = found.computed * self.pace.marginal(found.computed // 2)
        if price > self.aims.tax * max(self.spent, SPAN) - self.owed and now < claimant.due:
            return None
        self._pay(price, 0.0)
        return found


def policy_for(plan: Plan, capacity: Capacity) -> Policy:
    if plan.policy == "first-come":
        return FirstCome()
    aims = Aims(between=plan.target_inter_token, short=plan.short_request)
    return Fair(capacity.max_sequences, capacity.blocks, aims)
