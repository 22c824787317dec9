"""Matches the regular expressions of adapters with paths of modules.

Adapters are untrusted, and Python's `re` takes exponential time for some expressions. It keeps the
interpreter's lock meanwhile, so all requests of an engine would stop. Names with dots, which most
adapters have, are compared here. All other expressions are matched by a small process with limits
on its time and memory.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from bloomery.errors import InvalidRequest

MAX_PATTERN_LENGTH = 2000
MATCH_SECONDS = 2  # of processor time, for all expressions of an adapter
NAME = re.compile(r"(?:[\w-]|\\?\.)+")  # dots stand for themselves, as their authors mean them
MATCH_PROGRAM = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({MATCH_SECONDS}, {MATCH_SECONDS}))
try:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
except (OSError, ValueError):
    pass  # macOS has no such limit
for line in sys.stdin:
    pattern, text = json.loads(line)
    print(int(re.fullmatch(pattern, text) is not None), flush=True)
"""


class PatternMatcher:
    """Matches patterns, and owns the process that does so where one is needed."""

    def __init__(self, origin: Path) -> None:
        """`origin` is the file that the patterns come from, for messages."""
        self.origin = origin
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()

    def is_path(self, pattern: str, path: str) -> bool:
        """Whether the pattern stands for the whole path."""
        if NAME.fullmatch(pattern):
            return path == pattern.replace("\\.", ".")
        return self._match(pattern, path)

    def is_end(self, pattern: str, path: str) -> bool:
        """Whether the pattern stands for the last parts of the path."""
        if NAME.fullmatch(pattern):
            return f".{path}".endswith("." + pattern.replace("\\.", "."))
        return self._match(rf"(.*\.)?({pattern})", path)

    def _match(self, pattern: str, path: str) -> bool:
        """Match the whole path in the other process."""
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", MATCH_PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([pattern, path]) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise InvalidRequest(
                f"{self.origin}: the regular expression {pattern[:80]!r} takes too long to match; "
                "list the names of the modules instead",
                "model",
            )
        return answer == "1\n"


def find_pattern_error(pattern: str) -> str | None:
    """Return why a text cannot be used as a pattern, if so."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        return f"longer than {MAX_PATTERN_LENGTH} characters"
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return str(error)
    return None
