"""Terminal output of the server's processes: log formats, and a bar while a model loads.

All processes of a server write their log to standard error in the same format: lines for people, or
one JSON object per line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROCESS_IMPORT_TIME = time.monotonic()
CLEAR_LINE = "\r\x1b[2K"  # returns to the beginning of the terminal's line and erases it
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


class TerminalHandler(logging.StreamHandler[Any]):
    """Writes log lines to standard error and keeps them apart from a progress bar.

    A progress bar redraws its line several times a second, in this process or in its parent. A log
    line erases the bar and takes its place, and the bar appears again below it.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.is_terminal = sys.stderr.isatty()

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return CLEAR_LINE + text if self.is_terminal else text


def configure_logging(
    log_format: str, message_format: str = "%(message)s", level: str = "info"
) -> None:
    """Write the log of this process to standard error from now on."""
    formatter = HumanFormatter if log_format == "human" else JsonFormatter
    handler = TerminalHandler()
    handler.setFormatter(formatter(message_format))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def process_age_seconds() -> float:
    """Seconds since this process was started, its interpreter included where Linux tells."""
    since_import = time.monotonic() - PROCESS_IMPORT_TIME
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start_seconds = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - start_seconds
    except (OSError, ValueError, IndexError, AttributeError):
        return since_import
    # A container may hide its own start behind another clock; then the import is all we know.
    return age if since_import <= age < since_import + 60 else since_import


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
