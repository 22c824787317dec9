"""Who goes next, how much a step may hold, and who gives way. The scheduler asks; it has no opinion of its own.

Fair keeps the promise that a short request is never stuck behind long ones. A request is short by the time it would
take alone, as the pace of measured steps foretells, and it is promised some multiple of that. Short ones enter first,
into rows kept for them while some have been there of late; where none is free, a long one may have to give way.

Streams are given their next token all together, lap by lap, for a step's price hardly grows with those that share it.
While nobody is in a hurry a step is a whole lap: streams, and the prompts that a lap has room for. While short ones are
there the lap is cut, and they take part in every step of it: one of the streams, and between it and the next some of
prompts. Of the ways to cut it that keep the most urgent promises, as the pace foretells, the one is taken in which
prompts get on fastest. Steps of a good size waste little, smaller ones more: that is the tax on long requests, counted,
and bounded by cutting less.

The queue is in order of promised times (arrival, plus some multiple of the time alone), which are fixed on arrival:
whoever waits long enough comes before everybody who arrives later, so nobody starves. Among the keys that share a
server the one that was served least comes first, and one that holds its part of the rows leaves some to the others:
rows come free in bursts, and who asks for little would wait for the next.

Pure: time is an argument, and all times are seconds on the clock of whoever drives the scheduler.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import exp, inf
from typing import NamedTuple, Protocol

from bloomery.config import Plan
from bloomery.engine.pace import Pace, Work
from bloomery.engine.sequence import Sequence
from bloomery.messages import EngineCapacity

# seconds, as people feel them
INSTANT = 0.1
FAST = 1.0
SLOW = 10.0


@dataclass(frozen=True, slots=True)
class Portion:
    """What the next step may hold of the running sequences, and of those to be admitted."""

    order: Iterable[Sequence]  # who takes part
    chunk: int  # positions of prompts, together
    kept: int = 0  # of them, for those at the door: running long ones leave them
    tax: float = (
        0.0  # seconds this step is expected to cost the long ones for the sake of the short
    )
    whole: bool = (
        True  # False: a part of a lap; if nothing of it can be computed, the next part may
    )


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

    def victim(
        self, running: Collection[Sequence], claimant: Sequence, now: float
    ) -> Sequence | None:
        """Of a non-empty batch, in order of admission, who gives way to the claimant; None: it waits."""
        ...

    def observe(self, portion: Portion, work: Work, seconds: float) -> None:
        """How long a step took."""
        ...

    def foretell(self, work: Work) -> float:
        """How long one will take; 0 is not known."""
        ...


class FcfsPolicy:
    """First come, first served; the last to be admitted gives way. What Fair is compared with."""

    tax = 0.0

    def __init__(self) -> None:
        self.queue: list[tuple[int, Sequence]] = []

    def enqueue(self, sequence: Sequence, now: float) -> None:
        heapq.heappush(
            self.queue, (sequence.id, sequence)
        )  # ids count arrivals: who was preempted comes first

    def next(self, rows: int) -> Sequence | None:
        while self.queue and not self.queue[0][1].waiting:
            heapq.heappop(self.queue)
        return self.queue[0][1] if self.queue and rows > 0 else None

    def admit(self, sequence: Sequence, free: int, growth: int, alone: bool) -> bool:
        return True

    def compose(self, running: Mapping[int, Sequence], tokens: int, now: float) -> Portion:
        return Portion(list(running.values()), tokens)

    def victim(
        self, running: Collection[Sequence], claimant: Sequence, now: float
    ) -> Sequence | None:
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

    between: float | None = (
        None  # two tokens of a running stream; None: ten lone steps, but no slower than one reads
    )
    short: float | None = None  # a request that takes no longer alone is short; None: 64 lone steps
    stretch: float = 3.85  # a short request is promised so many times what it takes alone
    tax: float = 0.05  # the most of their time that long ones give for the short

    def target(self, lone: float) -> float:
        return self.between or min(max(10 * lone, 0.02), INSTANT)

    def limit(self, lone: float) -> float:
        return self.short or min(max(64 * lone, INSTANT), SLOW)


PRIORITY = 10.0  # seconds of waiting that one degree of priority is worth
LONGEST = (
    1.4  # times the target between two tokens that a lap may take; or, for the sake of prompts,
)
PREFILL = 1.5  # so many times what its streams take, if that is more
KNOWN = 64  # measured steps from which on the pace is to be relied on
RESERVED = 30.0  # seconds after a short one for which rows are kept for others
SPAN = 30.0  # seconds over which the tax is judged
MOST = 4  # steps between two of the streams
URGENT = 3  # promises that a lap is cut by
FLOOD = 6  # laps that prompts of short ones take by themselves, from which on none is
WIDTHS = (0, 1, 2, 3, 4, 6, 8, 12)  # of steps, in quarters of a good size
GRAINS = (
    512,
    256,
    128,
    64,
    32,
)  # a whole lap is a multiple of the first that is not too coarse: sizes are few
LEAST = 32  # positions that may be a good size


class Queue:
    """Waiting sequences in order of promise, one line a tenant; the tenant who was served least comes first."""

    def __init__(self) -> None:
        self.lines: dict[str, list[tuple[float, int, Sequence]]] = {}

    def push(self, sequence: Sequence) -> None:
        line = self.lines.setdefault(sequence.request.tenant, [])
        heapq.heappush(line, (sequence.promise, sequence.id, sequence))

    def positions(self) -> int:
        """Of prompts, about: each line by the first in it."""
        found = 0
        for line in self.lines.values():
            first = [len(one.tokens) for _, _, one in line[:8] if one.waiting]
            found += sum(first) * len(line) // max(len(first), 1)
        return found

    def top(self, served: Mapping[str, float], barred: Collection[str] = ()) -> Sequence | None:
        best: tuple[float, float, Sequence] | None = None
        for tenant, line in list(self.lines.items()):
            while line and not line[0][2].waiting:
                heapq.heappop(line)
            if not line:
                del self.lines[tenant]
            elif tenant in barred:
                continue
            elif best is None or (served.get(tenant, 0.0), line[0][0]) < best[:2]:
                best = served.get(tenant, 0.0), line[0][0], line[0][2]
        return best[2] if best else None


class Cut(NamedTuple):
    """A lap in steps: one of the streams, and some between it and the next."""

    beside: int  # positions of prompts in the streams' step
    between: int  # and in each of the others
    steps: int  # of others


class Census(NamedTuple):
    """Who is in the batch."""

    shorts: list[Sequence]
    streams: list[Sequence]  # long ones that go on by one
    prompts: list[Sequence]  # and those whose prompt is not computed
    own: int  # keys that short ones attend to
    attended: int  # and streams
    context: int  # the most that stands before a prompt's next position
    longest: int  # and the most that are left of one
    asking: int  # positions of short ones' prompts
    owing: int  # and of long ones'


def census(running: Mapping[int, Sequence]) -> Census:
    shorts = list[Sequence]()
    streams = list[Sequence]()
    prompts = list[Sequence]()
    own = attended = context = longest = asking = owing = 0
    for sequence in running.values():
        behind = len(sequence.tokens) + sequence.pending - sequence.computed
        if behind > 1:
            context = max(context, sequence.computed)
            longest = max(longest, behind)
        if sequence.short:
            shorts.append(sequence)
            asking, own = (
                (asking + behind, own) if behind > 1 else (asking, own + sequence.computed)
            )
        elif behind > 1:
            prompts.append(sequence)
            owing += behind
        else:
            streams.append(sequence)
            attended += sequence.computed
    return Census(shorts, streams, prompts, own, attended, context, longest, asking, owing)


class FairPolicy:
    def __init__(self, rows: int, blocks: int, aims: Aims | None = None, pace: Pace | None = None):
        """For batches of so many rows, in a cache of so many blocks."""
        self.aims = aims or Aims()
        self.pace = pace or Pace()
        self.rows = rows
        self.spare_rows = max(rows // 32, int(rows >= 4))  # kept for short ones
        self.spare_parts = round(
            rows**0.5 / 2
        )  # kept for tenants that hold few: as many as may come at once
        self.spare_blocks = blocks // 32
        self.short = Queue()
        self.long = Queue()
        self.served: dict[str, float] = {}  # seconds by tenant
        self.virtual = (
            0.0  # what the tenant served last had been served before: a newcomer starts there
        )
        self.seen: dict[str, float] = {}  # tenants of late, and when they last asked
        self.held: Counter[str] = Counter()  # rows by tenant, where there are several
        self.left = 0  # rows that tenants with their part of all leave free
        self.since = 0  # steps since the streams' last
        self.inside = 0  # short ones in the batch
        # the last step, and when a short one last came
        self.now = 0.0
        self.asked = -RESERVED
        self.owed = self.spent = 0.0  # tax and time of late, fading
        self.tax = 0.0  # in seconds, since the beginning

    # ---- the queue -------------------------------------------------------------------------------

    def enqueue(self, sequence: Sequence, now: float) -> None:
        request = sequence.request
        if not sequence.losses:
            alone = self._alone(sequence)
            sequence.short = alone <= self.aims.limit(self.pace.lone)
            sequence.cost = alone
            sequence.due = sequence.arrived + self.aims.stretch * alone
            sequence.promise = sequence.due + PRIORITY * request.priority
        if sequence.short:
            self.asked = now
        self.seen[request.tenant] = now
        queue = self.short if sequence.short else self.long
        if request.tenant not in self.short.lines and request.tenant not in self.long.lines:
            self.served[request.tenant] = max(self.served.get(request.tenant, 0.0), self.virtual)
        queue.push(sequence)

    def _alone(self, sequence: Sequence) -> float:
        """Seconds it would take with nobody else there."""
        length = len(sequence.tokens)
        left = max(sequence.request.max_tokens - sequence.produced, 1)
        wrong = self.pace.lone - self.pace.seconds(
            Work(1)
        )  # prices follow full batches, a promise must not
        prompt = self.pace.seconds(Work(length, 0, length * length / 2))
        return prompt + (left - 1) * self.pace.seconds(Work(1, length)) + left * wrong

    def next(self, rows: int) -> Sequence | None:
        barred = self._barred(rows)
        short = self.short.top(self.served, barred)
        kept = self._kept()
        if rows <= kept or (short is not None and self.inside < kept):
            return short
        long = self.long.top(self.served, barred)
        if short is None or long is None:
            return short or long
        return short if short.promise <= long.promise else long

    def _kept(self) -> int:
        """Rows that are for short ones."""
        return self.spare_rows if self.now - self.asked < RESERVED else 0

    def _apportion(self, running: Mapping[int, Sequence], now: float) -> None:
        """What each tenant holds, and what those with their part leave: the last rows, and half of those now free, so
        that rows which came free at once are not taken, and free again, at once."""
        self.seen = {tenant: last for tenant, last in self.seen.items() if now - last < RESERVED}
        self.held.clear()
        if len(self.seen) > 1:
            self.held.update([sequence.request.tenant for sequence in running.values()])
            self.left = max(self.spare_parts, (self.rows - len(running)) // 2)

    def _barred(self, rows: int) -> Collection[str]:
        """Tenants that get none of the rows left."""
        if not self.held or rows > self.left:
            return ()
        part = self.rows / len(self.seen)
        return {tenant for tenant, held in self.held.items() if held >= part}

    def admit(self, sequence: Sequence, free: int, growth: int, alone: bool) -> bool:
        """A long one leaves a reserve; one that had to give way comes back when all it may grow to fits as well."""
        needed = self.spare_blocks + (growth if sequence.losses else 0)
        if not alone and not sequence.short and free < needed:
            return False
        tenant = sequence.request.tenant
        self.inside += sequence.short
        self.virtual = self.served[tenant]
        self.served[tenant] += sequence.cost
        self.held[tenant] += len(self.seen) > 1
        sequence.cost = 0.0  # who comes back has paid
        return True

    # ---- the step --------------------------------------------------------------------------------

    def compose(self, running: Mapping[int, Sequence], tokens: int, now: float) -> Portion:
        self.now = now
        self._apportion(running, now)
        here = census(running)
        free = self.rows - len(running)
        self.inside = len(here.shorts)
        door = self.short.top(self.served, self._barred(free))
        asking = here.asking + (
            0 if door is None else self.short.positions() if free else 1
        )  # 1: to be made room for
        owing = here.owing
        longest = max(here.longest, 0 if door is None else len(door.tokens))
        if (
            free > self._kept()
            and (first := self.long.top(self.served, self._barred(free))) is not None
        ):
            owing = owing + self.long.positions()
            longest = max(longest, len(first.tokens))
        riding = Work(len(here.shorts), here.own)
        both = Work(riding.tokens + len(here.streams), here.own + here.attended)
        lap = self._lap(both) if both.tokens else INSTANT
        chunk = min(self._room(both, lap, here.context, longest, tokens), asking + owing)
        cut = Cut(chunk, 0, 0)
        pressing = self._pressing(here.shorts if door is None else [*here.shorts, door], lap, now)
        if pressing and (
            here.shorts or (chunk and (here.prompts or free))
        ):  # or a step between may be nobody's
            cut = self._cut(riding, both, min(asking + owing, tokens), here.context, pressing, lap)
        flood = asking > FLOOD * chunk  # their prompts alone are so many laps: cutting helps nobody
        if flood:
            cut = Cut(chunk, 0, 0)
        if self.since < cut.steps:
            self.since = self.since + 1
            streams = list[Sequence]()
            part = cut.between
        else:
            self.since = 0
            streams = here.streams
            part = cut.beside
        own = min(asking, chunk, self._size() if here.streams and not flood else chunk)
        part = max(
            part, own
        )  # laps are cut for the short: their own prompts are only beyond a good size
        order = [*here.shorts, *streams, *(here.prompts if cut.beside or self.since else ())]
        work = Work(
            len(here.shorts) + len(streams) + part, here.own + here.attended * (not self.since)
        )
        tax = (
            self._levy(here, work, min(part, owing))
            if pressing and (here.streams or owing)
            else 0.0
        )
        kept = 0 if door is None else max(min(asking, part - max(part // 4, 1)), 0)  # others go on
        return Portion(
            order,
            part if part or cut.steps or cut.beside != chunk else tokens,
            kept,
            tax,
            not self.since,
        )

    def _lap(self, work: Work) -> float:
        """Seconds from one token of the streams to the next. Prompts get 0.6 of the target of them, more the more rows
        have no stream yet, and no less than half of what the streams take."""
        streams = self.pace.seconds(work)
        target = self.aims.target(self.pace.lone)
        free = 1 - min(work.tokens / self.rows, 1.0)
        return max(min(streams + (0.6 + free) * target, LONGEST * target), PREFILL * streams)

    def _pressing(self, shorts: list[Sequence], lap: float, now: float) -> list[tuple[int, float]]:
        """The most urgent promises: tokens, and the seconds left for them; more of these the nearer the tax is to its
        bound, from 0.9 of it up to 1.1, where whole laps will do."""
        excess = self.owed / (self.aims.tax * max(self.spent, SPAN))
        if excess >= 1.1:
            return []
        more = lap * max(5 * (excess - 0.9), 0.0)
        left = [
            (max(one.request.max_tokens - one.produced - one.pending, 1), one.due - now)
            for one in shorts
        ]
        return sorted(
            [(n, seconds + n * more) for n, seconds in left], key=lambda one: one[1] / one[0]
        )[:URGENT]

    def _cut(
        self,
        riding: Work,
        both: Work,
        most: int,
        context: int,
        pressing: list[tuple[int, float]],
        lap: float,
    ) -> Cut:
        """Of the laps that keep every promise and are not too long, the one in which prompts get on fastest; if none
        does, the one that breaks them least. Sizes are quarters of a good one: they are few."""
        part = max(self._size() // 4, 1)
        widest = sorted(WIDTHS, reverse=True)
        beside = dict.fromkeys(min(max(part * i - both.tokens, 0), most) for i in widest)
        between = (
            dict.fromkeys(max(part * i - riding.tokens, 0) for i in widest)
            if both != riding
            else {}
        )
        first = [
            (n, self.pace.seconds(Work(both.tokens + n, both.attended, n * context)))
            for n in beside
            if both.tokens + n  # a step of nobody is none
        ]
        other = [
            (n, self.pace.seconds(Work(riding.tokens + n, riding.attended, n * context)))
            for n in between
        ]
        best = (inf, 0.0, 0.0)
        found = Cut(0, 0, 0)
        for n, seconds in first:
            for m, each in [*other, (0, 0.0)]:
                for steps in range(1, MOST + 1) if each else (0,):
                    if m and n + (steps - 1) * m >= most:
                        break
                    total = seconds + steps * each
                    speed = min(n + steps * m, most) / max(total, 1e-9)
                    if not best[0] and -speed > best[1]:
                        continue  # it could keep all promises, and would be slower still
                    late = max(
                        [
                            self._takes(left, steps, seconds, each) - given
                            for left, given in pressing
                        ]
                    )
                    rank = max(late, total - lap if steps else 0.0, 0.0), -speed, total
                    if rank < best:
                        best = rank
                        found = Cut(n, m, steps)
        return found

    def _takes(self, tokens: int, steps: int, seconds: float, each: float) -> float:
        """Until a short one has so many more, in laps of one step and `steps` of the others, from the next step on."""
        before = max(steps - self.since, 0)
        if tokens <= before:
            return tokens * each
        laps, more = divmod(tokens - before, steps + 1)
        return (
            before * each
            + laps * (seconds + steps * each)
            + (seconds + (more - 1) * each if more else 0.0)
        )

    def _size(self) -> int:
        """Positions from which on a step is well spent: there is as much to compute as to read."""
        size = LEAST
        while size < 64 * LEAST and self.pace.seconds(Work(size)) < 2 * self.pace.lone:
            size *= 2
        return size

    def _room(self, work: Work, seconds: float, context: int, longest: int, most: int) -> int:
        """Positions of prompts that fill the step, to a size that is often seen; those of one see each other, too."""
        room = min(self.pace.room(work, seconds, context), most)
        room = work.tokens + min(
            self.pace.room(work, seconds, context + min(room, longest) // 2), most
        )
        grain = next((grain for grain in GRAINS if room >= 2 * grain), GRAINS[-1])
        size = max(round(room / grain), 1) * grain
        return min(size - work.tokens if size > work.tokens else grain, most)

    def _levy(self, here: Census, work: Work, prompts: int) -> float:
        """What a step takes beyond what is worth its streams by themselves and so many positions of long prompts, in
        steps of a good size: those are seen all the time, and whole laps hardly ever while short ones are about."""
        alone = (
            self.pace.seconds(Work(len(here.streams), here.attended))
            if here.streams and not self.since
            else 0.0
        )
        size = self._size()
        return max(
            self.pace.seconds(work) - alone - prompts * self.pace.seconds(Work(size)) / size, 0.0
        )

    def observe(self, portion: Portion, work: Work, seconds: float) -> None:
        self.pace.learn(work, seconds)
        self._pay(portion.tax, seconds)

    def foretell(self, work: Work) -> float:
        return self.pace.seconds(work) if self.pace.steps >= KNOWN else 0.0

    def _pay(self, tax: float, seconds: float) -> None:
        fade = exp(-seconds / SPAN)
        self.owed = fade * self.owed + tax
        self.spent = fade * self.spent + seconds
        self.tax += tax

    # ---- who gives way ---------------------------------------------------------------------------

    def victim(
        self, running: Collection[Sequence], claimant: Sequence, now: float
    ) -> Sequence | None:
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
        found = min(
            candidates, key=lambda one: (-one.request.priority, one.losses, one.computed, -one.id)
        )
        if inside:
            return found
        price = found.computed * self.pace.marginal(found.computed // 2)
        dear = price > self.aims.tax * max(self.spent, SPAN) - self.owed
        if now < claimant.due and (self.inside or dear):
            return None
        self._pay(price, 0.0)
        return found


def policy_for(plan: Plan, capacity: EngineCapacity) -> Policy:
    if plan.policy == "fcfs":
        return FcfsPolicy()
    aims = Aims(between=plan.target_inter_token, short=plan.short_request)
    return FairPolicy(capacity.max_num_seqs, capacity.blocks, aims, Pace(capacity.expected))
