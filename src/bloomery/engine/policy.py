"""Who goes next, how much a step may hold, and who gives way. The scheduler asks; it has no opinion of its own.

Fair keeps the promise that a short request is never stuck behind long ones. A request is short by the time it would
take alone, as the pace of measured steps foretells, and it is promised some multiple of that. Short ones enter first,
into rows kept for them while some have been there of late; where none is free, a long one may have to give way. Streams
are given their next token lap by lap, and a lap is as long as two tokens of a stream may be apart. While nobody is in a
hurry a step is a whole lap.
While short ones are there, a step takes what is left of the most urgent promise by the tokens it still owes, and holds
that share of the lap: all short sequences, a part of the streams in turn, and the same part of the lap's prompts. Small
steps are less well spent, and that is the tax on long requests: counted, and bounded by cutting less.

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

    def foretell(self, work: Work) -> float:
        """How long one will take; 0 is not known."""
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

    def foretell(self, work: Work) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Aims:
    """What Fair tries to keep, in seconds; None is derived from the measured pace."""

    between: float | None = None  # two tokens of a running stream; None: ten lone steps, but no slower than one reads
    short: float | None = None  # a request that takes no longer alone is short; None: 64 lone steps
    stretch: float = 3.5  # a short request is promised so many times what it takes alone
    tax: float = 0.05  # the most of their time that long ones give for the short

    def target(self, lone: float) -> float:
        return self.between or min(max(10 * lone, 0.02), INSTANT)

    def limit(self, lone: float) -> float:
        return self.short or min(max(64 * lone, INSTANT), SLOW)


PRIORITY = 10.0  # seconds of waiting that one degree of priority is worth
PREFILL = 1.5  # a lap of all streams may grow to so many times itself, for the sake of prompts
FINEST = 3.0  # lone steps: the smallest step worth making
KNOWN = 64  # measured steps from which on the pace is to be relied on
RESERVED = 30.0  # seconds after a short one for which rows are kept for others
SPAN = 10.0  # seconds over which the tax is judged
GRAINS = ((512, 128), (128, 64), (0, 16))  # from so many positions on a step has a multiple of this: sizes are few


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
        self.now, self.asked = 0.0, -RESERVED  # the last step, and when a short one last came
        self.latest = 0.0  # seconds the last step took
        self.owed = self.spent = 0.0  # tax and time of late, fading
        self.tax = 0.0  # in seconds, since the beginning

    # ---- the queue -------------------------------------------------------------------------------

    def enqueue(self, sequence: Sequence, now: float) -> None:
        request = sequence.request
        if not sequence.losses:
            alone = self._alone(sequence)
            sequence.short = alone <= self.aims.limit(self.pace.lone)
            # requests are taken in between two steps: it may have come when the last one began
            sequence.cost, sequence.due = alone, sequence.arrived + self.aims.stretch * alone - self.latest
            sequence.promise = sequence.due + PRIORITY * request.priority
        if sequence.short:
            self.asked = now
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
        kept = self.spare_rows if self.now - self.asked < RESERVED else 0
        if rows <= kept or (short is not None and self.inside < kept):
            return short
        long = self.long.top(self.served)
        if short is None or long is None:
            return short or long
        return short if short.promise <= long.promise else long

    def admit(self, sequence: Sequence, free: int, growth: int, alone: bool) -> bool:
        """A long one leaves a reserve; one that had to give way comes back when all it may grow to fits as well."""
        needed = self.spare_blocks + (growth if sequence.losses else 0)
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
        own = attended = context = 0
        for sequence in running.values():
            behind = len(sequence.tokens) + sequence.pending - sequence.computed > 1
            if behind:
                context = max(context, sequence.computed)
            if sequence.short:
                shorts.append(sequence)
                own += 0 if behind else sequence.computed
            elif behind:
                prompts.append(sequence)
            else:
                streams.append(sequence)
                attended += sequence.computed
        self.inside = len(shorts)
        door = self.short.top(self.served)
        waiting = bool(prompts or self.long.lines or door)
        lap = self.pace.seconds(Work(len(shorts) + len(streams), own + attended))
        if waiting:
            lap = max(self.aims.target(self.pace.lone), PREFILL * lap, 0.0 if streams else INSTANT)
        beat = self._beat(shorts if door is None else [*shorts, door], lap, now)
        share = beat / lap if lap > 0 else 1.0
        if share < 1 and streams:
            streams.sort(key=lambda sequence: sequence.turn)
            del streams[ceil(share * len(streams)) :]
        work = Work(len(shorts) + len(streams), own + int(share * attended))
        chunk = min(self._chunk(work, beat, context, tokens), tokens) if waiting else tokens
        kept = 0 if door is None else max(min(len(door.tokens), chunk - max(chunk // 4, 1)), 0)  # others go on
        tax = self._levy(len(shorts), work.tokens + chunk * waiting, share) if streams or prompts else 0.0
        return Portion([*shorts, *streams, *prompts], chunk, kept, tax)

    def _beat(self, pressing: list[Sequence], lap: float, now: float) -> float:
        """Seconds of the step: a lap, or less while there are short ones."""
        if not pressing:
            return lap
        wanted = min((short.due - now) / max(short.request.max_tokens - short.produced, 1) for short in pressing)
        wanted = min(max(wanted, FINEST * self.pace.lone), lap)
        excess = self.owed / max(self.aims.tax * self.spent, 1e-9)  # from 0.9 to 1.1 of the bound: cut less and less
        return wanted + (lap - wanted) * min(max(5 * (excess - 0.9), 0.0), 1.0)

    def _chunk(self, work: Work, seconds: float, context: int, most: int) -> int:
        """Positions of prompts that fill the step, to a size that is often seen."""
        room = min(self.pace.room(work, seconds, context), most)
        room = work.tokens + min(self.pace.room(work, seconds, context + room // 2), most)  # they see each other, too
        grain = next(grain for least, grain in GRAINS if room >= least)
        size = max(round(room / grain), 1) * grain
        return size - work.tokens if size > work.tokens else grain

    def _levy(self, shorts: int, tokens: int, share: float) -> float:
        """What the short ones' own positions take, and what a share of a lap costs beyond its share."""
        return shorts * self.pace.marginal() + self.pace.fixed(tokens) - share * self.pace.fixed(tokens / share)

    def observe(self, portion: Portion, work: Work, seconds: float) -> None:
        self.pace.learn(work, seconds)
        self.latest = seconds
        self._pay(portion.tax, seconds)

    def foretell(self, work: Work) -> float:
        return self.pace.seconds(work) if self.pace.steps >= KNOWN else 0.0

    def _pay(self, tax: float, seconds: float) -> None:
        fade = exp(-seconds / SPAN)
        self.owed, self.spent = fade * self.owed + tax, fade * self.spent + seconds
        self.tax += tax

    # ---- who gives way ---------------------------------------------------------------------------

    def victim(self, running: Collection[Sequence], claimant: Sequence, now: float) -> Sequence | None:
        """The long one whose work is least to do again, of the lowest priority, spared if it lost before.

        A short one at the door waits for those inside, which are soon done; else it displaces whom the tax can pay for,
        or anyone once its promise is broken; nobody twice.
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
        dear = price > self.aims.tax * max(self.spent, SPAN) - self.owed
        if now < claimant.due and (self.inside or dear):
            return None
        self._pay(price, 0.0)
        return found


def policy_for(plan: Plan, capacity: Capacity) -> Policy:
    if plan.policy == "first-come":
        return FirstCome()
    aims = Aims(between=plan.target_inter_token, short=plan.short_request)
    return Fair(capacity.max_sequences, capacity.blocks, aims)
