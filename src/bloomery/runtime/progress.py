"""What a person sees of long work: a progress bar, and where the time went."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(title: str, total: int, show: bool) -> Iterator[Callable[[], None]]:
    """Show a bar until the block ends; yields a function that advances it by one.

    Without `show`, or when stderr is not a terminal, nothing is printed.
    """
    if not show or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (title, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


class PhaseTimer:
    """Measures the phases of a start, one after another."""

    def __init__(self) -> None:
        self.last_time = time.monotonic()
        self.phases: list[tuple[str, float]] = []  # name and seconds

    def end(self, phase: str) -> None:
        """Count the time since the last phase ended as this phase."""
        now = time.monotonic()
        self.phases.append((phase, now - self.last_time))
        self.last_time = now

    def __str__(self) -> str:
        return ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.phases)
