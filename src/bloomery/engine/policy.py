"""Who goes next, and who gives way. The scheduler asks; it has no opinion of its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from bloomery.engine.sequence import Sequence


class Policy(Protocol):
    def next(self, waiting: Collection[Sequence]) -> Sequence:
        """Of a non-empty queue, in order of arrival, whom to admit."""
        ...

    def victim(self, running: Collection[Sequence]) -> Sequence:
        """Of a non-empty batch, in order of admission, whom to preempt when memory is short."""
        ...


class FirstCome:
    """First come, first served; the last to be admitted gives way."""

    def next(self, waiting: Collection[Sequence]) -> Sequence:
        return next(iter(waiting))

    def victim(self, running: Collection[Sequence]) -> Sequence:
        return next(reversed(running))  # type: ignore[call-overload, no-any-return]  # dict views are reversible
