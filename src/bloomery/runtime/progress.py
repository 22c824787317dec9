"""A progress bar for long counted work on a terminal."""

from __future__ import annotations

import sys
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
