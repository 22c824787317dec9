"""How near an engine runs to its limit, in a number and in words; time is an argument.

The share of the limit is the floor of some steps over what they took. The words say where the rest went, once a minute,
and once, after some steps, whether the engine keeps what its plan promised.
"""

from __future__ import annotations

import logging
from collections import deque

from bloomery.messages import StepTiming

log = logging.getLogger("bloomery.engine")

# seconds between two looks; looks that a share is taken over
EVERY = 1.0
SPAN = 5
MINUTE = 60.0
# steps while kernels may still be compiling; steps that the plan is held against
WARM = 32
ENOUGH = 128
# times what was planned; spans in a row that may take so long
FAR = 1.5
PATIENCE = 3


class Gauge:
    def __init__(self) -> None:
        self.seen: deque[tuple[float, StepTiming]] = deque(maxlen=SPAN)
        self.share: float | None = None
        self.told = 0.0, StepTiming()  # the last line of the log
        self.since: StepTiming | None = (
            None  # where the span that is held against the plan begins; None while warming up
        )
        self.far = 0
        self.judged = False

    def look(self, timing: StepTiming, now: float) -> float | None:
        """The share of the limit in the last seconds; None while nothing runs."""
        if self.seen and now - self.seen[-1][0] < EVERY:
            return self.share
        recent = less(timing, self.seen[0][1]) if self.seen else timing
        self.share = share(recent)
        self.seen.append((now, timing))
        if now - self.told[0] >= MINUTE:
            lately = less(timing, self.told[1])
            if lately.steps:
                log.info("%s", words(lately))
            self.told = now, timing
        self._judge(timing)
        return self.share

    def _judge(self, timing: StepTiming) -> None:
        """One span near the plan is enough, for others may have been compiling; several far from it are too many."""
        if self.since is None:
            self.since = timing if timing.steps >= WARM else None
            return
        if self.judged or timing.steps < self.since.steps + ENOUGH:
            return
        lately = less(timing, self.since)
        self.since = timing
        ratio = (lately.device + lately.idle) / max(lately.expected, 1e-9)
        self.far = self.far + 1 if ratio > FAR else 0
        self.judged = self.far in (0, PATIENCE)
        if self.far == PATIENCE:
            log.warning(
                "steps take %.1f times what the plan of this model on this machine expects: %s. Is the machine shared, "
                "or its speed not the one `bloomery plan --measure` would find?",
                ratio,
                words(lately),
            )
        elif self.judged:
            log.info(
                "as planned: steps take %.2f times what is expected of them; %s",
                ratio,
                words(lately),
            )


def share(timing: StepTiming) -> float | None:
    took = timing.device + timing.idle
    return timing.floor / took if took > 0 else None


def parts(timing: StepTiming) -> dict[str, float]:
    """Seconds by where they went; with the floor they are all the time there was. Padding and messages are known by
    calculation only, so none of them is more than what is left."""
    left = max(timing.device - timing.floor, 0.0)
    found = {"device idle": timing.idle}
    for name in ("padding", "sampling", "communication"):
        found[name] = min(getattr(timing, name), left)
        left -= found[name]
    return {**found, "kernels": left}


def words(timing: StepTiming) -> str:
    """One line: the share, and what each part of the rest is of the whole."""
    took = max(timing.device + timing.idle, 1e-9)
    steps = max(timing.steps, 1)
    rest = ", ".join(
        f"{name} {value / took:.0%}"
        for name, value in parts(timing).items()
        if value / took >= 0.005
    )
    return (
        f"{timing.floor / took:.0%} of the limit: {timing.steps} steps of {1e3 * took / steps:.2f} ms, floor "
        f"{1e3 * timing.floor / steps:.2f} ms; {rest or 'nothing else'}; host busy {timing.host / took:.0%}"
    )


def less(one: StepTiming, other: StepTiming) -> StepTiming:
    return StepTiming(*(getattr(one, name) - getattr(other, name) for name in StepTiming.__slots__))
