"""How a server's processes write their log: for people, or one JSON object a line, in all of them alike."""

from __future__ import annotations

import json
import logging
import sys


class Lines(logging.Formatter):
    """For people: the message, behind the time."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return f"{self.formatTime(record, '%H:%M:%S')} {level}{super().format(record)}"


class Json(logging.Formatter):
    """For machines: one object a line, with the fields of a request's timings."""

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", {})
        text = super().format(record)
        return json.dumps({**said, "message": text, **fields}, default=str)


def resolved(wish: str) -> str:
    """`auto` is for people where one looks on."""
    return ("human" if sys.stderr.isatty() else "json") if wish == "auto" else wish


def write(style: str, format: str = "%(message)s") -> None:
    """From now on, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(format) if style == "human" else Json(format))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
