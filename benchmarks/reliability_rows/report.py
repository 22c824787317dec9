"""How rows report: figures as JSON lines, quantiles, and a progress bar."""

from __future__ import annotations

import functools
import json
import sys
from typing import Any


def print_row(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


def to_milliseconds(seconds: float, digits: int = 1) -> float:
    return round(1000 * seconds, digits)


def quantile(values: list[float], share: float) -> float:
    """Return the value below which `share` of the values lie, or 0 if there are none."""
    if not values:
        return 0.0
    rank = min(int(share * len(values)), len(values) - 1)
    return sorted(values)[rank]


@functools.cache
def progress_bar() -> Any:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    return Progress(
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


@functools.cache
def progress_task(name: str, total: int) -> Any:
    progress_bar().start()
    return progress_bar().add_task(name, total=total)


def show_progress(name: str, total: int, step: int = 1) -> None:
    """Advance the progress bar if standard error is a terminal."""
    if sys.stderr.isatty():
        progress_bar().advance(progress_task(name, total), step)
