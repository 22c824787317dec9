"""A bar for long work that is counted, or nothing."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bloomery.models.checkpoint import Report


@contextmanager
def bar(what: str, total: int, show: bool, report: Report | None = None) -> Iterator[Callable[[], None]]:
    if report is not None:
        done = itertools.count(1)
        yield lambda: report(what, next(done), total)
        return
    if not show or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(
        what, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True)
    ) as drawn:
        task = drawn.add_task("", total=total)
        yield lambda: drawn.advance(task)
