"""Terminal output of the server's processes: log formats, and a bar while a model loads.

All processes of a server write their log to standard error in the same format: lines for people, or
one JSON object per line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

PROGRESS_INTERVAL_SECONDS = 0.1  # between two updates of the load progress bar


class HumanFormatter(logging.Formatter):
    """Lines for people: the time, the level if it is a warning or worse, and the message."""

    def format(self, record: logging.LogRecord) -> str:
        time = self.formatTime(record, "%H:%M:%S")
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return f"{time} {level}{super().format(record)}"


class JsonFormatter(logging.Formatter):
    """Lines for machines: one JSON object each, with the `fields` of the log record."""

    def format(self, record: logging.LogRecord) -> str:
        header = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", {})
        message = super().format(record)
        return json.dumps({**header, "message": message, **fields}, default=str)


def resolve_log_format(log_format: str) -> str:
    """Return "human" or "json"; "auto" is "human" in a terminal."""
    if log_format != "auto":
        return log_format
    return "human" if sys.stderr.isatty() else "json"


def configure_logging(log_format: str, message_format: str = "%(message)s") -> None:
    """Write the log of this process to standard error from now on."""
    formatter = HumanFormatter if log_format == "human" else JsonFormatter
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(message_format))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


async def show_load_progress(
    loaded: asyncio.Future[Any], read_progress: Callable[[], tuple[str, float]]
) -> None:
    """Show a bar until `loaded` is done, if standard error is a terminal.

    `read_progress` returns what is being loaded and the fraction that is done.
    """
    if not sys.stderr.isatty():
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=1.0)
        while not loaded.done():
            description, fraction = read_progress()
            bar.update(task, completed=fraction, description=description or "loading")
            await asyncio.wait((loaded,), timeout=PROGRESS_INTERVAL_SECONDS)
