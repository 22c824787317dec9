"""How near an engine runs to its limit, in a number and in words; time is an argument.

The share of the limit is the floor of some steps over what they took. The words say where the rest went, once a minute,
and once, after some steps, whether the engine keeps what its plan promised.
"""

from __future__ import annotations

import logging
from collections import deque

from bloomery.messages import Timing

log = logging.getLogger("bloomery.engine")

EVERY, SPAN = 1.0, 5  # seconds between two looks; looks that a share is taken over
MINUTE = 60.0
WARM, ENOUGH = 64, 512  # steps while kernels may still be compiling; steps after which the plan is held against them
FAR = 1.5  # times what was planned


class Gauge:
    def __init__(self) -> None:
        self.seen: deque[tuple[float, Timing]] = deque(maxlen=SPAN)
        self.share: float | None = None
        self.told = 0.0, Timing()  # the last line of the log
        self.warm: Timing | None = None  # what the first steps took; None until they are over
        self.judged = False

    def look(self, timing: Timing, now: float) -> float | None:
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

    def _judge(self, timing: Timing) -> None:
        if self.warm is None and timing.steps >= WARM:
            self.warm = timing
        if self.judged or self.warm is None or timing.steps < self.warm.steps + ENOUGH:
            return
        self.judged = True
        since = less(timing, self.warm)
        ratio = (since.device + since.idle) / max(since.expected, 1e-9)
        if ratio > FAR:
            log.warning(
                "steps take %.1f times what the plan of this model on this machine expects: %s. Is the machine shared, "
                "or its speed not the one `bloomery plan --measure` would find?", ratio, words(since),
            )  # fmt: skip


def share(timing: Timing) -> float | None:
    took = timing.device + timing.idle
    return timing.floor / took if took > 0 else None


def words(timing: Timing) -> str:
    """One line: the share, and what each part of the rest is of the whole."""
    took, steps = timing.device + timing.idle, max(timing.steps, 1)
    known = timing.sampling + timing.padding + timing.communication
    parts = {
        "device idle": timing.idle, "padding": timing.padding, "sampling": timing.sampling,
        "communication": timing.communication, "kernels": max(timing.device - timing.floor - known, 0.0),
    }  # fmt: skip
    rest = ", ".join(f"{name} {value / took:.0%}" for name, value in parts.items() if value / took >= 0.005)
    return (
        f"{timing.floor / took:.0%} of the limit: {timing.steps} steps of {1e3 * took / steps:.2f} ms, floor "
        f"{1e3 * timing.floor / steps:.2f} ms; {rest or 'nothing else'}; host busy {timing.host / took:.0%}"
    )


def less(one: Timing, other: Timing) -> Timing:
    return Timing(*(getattr(one, name) - getattr(other, name) for name in Timing.__slots__))
