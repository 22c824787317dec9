"""Matches the regular expressions of adapters with paths of modules.

Adapters are untrusted, and Python's `re` takes exponential time for some expressions, and long to
compile others. It keeps the interpreter's lock meanwhile, so all requests of an engine would stop.
Names with dots, which most adapters have, are compared here. All other expressions are compiled and
matched by a small process with limits on its time and memory.
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

# Of an adapter. Those that list every layer of a large model have some hundred patterns.
MAX_PATTERNS = 2000
MAX_PATTERN_LENGTH = 2000  # characters of a pattern
MAX_TOTAL_LENGTH = 200_000  # characters of all patterns
MATCH_SECONDS = 2  # of processor time, for all expressions of an adapter
END_OF_PATH = r"(.*\.)?({})"
NAME = re.compile(r"(?:[\w-]|\\?\.)+")  # dots stand for themselves, as their authors mean them
MATCH_PROGRAM = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({MATCH_SECONDS}, {MATCH_SECONDS}))
try:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
except (OSError, ValueError):
    pass  # macOS has no such limit
compiled = {{}}
for line in sys.stdin:
    pattern, text = json.loads(line)
    matches, error = None, None
    try:
        if pattern not in compiled:
            compiled[pattern] = re.compile(pattern)
        if text is not None:
            matches = compiled[pattern].fullmatch(text) is not None
    except (re.error, RecursionError, OverflowError, MemoryError) as failure:
        error = str(failure) or type(failure).__name__
    print(json.dumps([matches, error]), flush=True)
"""


class PatternMatcher:
    """Matches patterns, and owns the process that does so where one is needed."""

    def __init__(self, origin: Path) -> None:
        """`origin` is the file that the patterns come from, for messages."""
        self.origin = origin
        self.num_patterns = 0
        self.total_length = 0
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

    def check(self, key: str, pattern: str, is_end: bool) -> None:
        """Refuse what cannot be used as a pattern. `is_end`: it will be given to `is_end`."""
        self.num_patterns += 1
        self.total_length += len(pattern)
        if len(pattern) > MAX_PATTERN_LENGTH:
            raise self._refuse(
                f"{key} has a pattern longer than {MAX_PATTERN_LENGTH} characters; list the names "
                "of the modules instead"
            )
        if self.num_patterns > MAX_PATTERNS or self.total_length > MAX_TOTAL_LENGTH:
            raise self._refuse(
                f"it has more than {MAX_PATTERNS} patterns, or {MAX_TOTAL_LENGTH} characters of "
                f"them, up to {key}; let a regular expression stand for several modules"
            )
        if NAME.fullmatch(pattern):
            return
        _, error = self._ask(pattern, "{}")
        if error is not None:
            raise self._refuse(f"{key}: {pattern[:80]!r} is not a regular expression: {error}")
        if is_end:
            _, error = self._ask(pattern, END_OF_PATH)
        if error is not None:
            raise self._refuse(
                f"{key}: {pattern[:80]!r} cannot stand for the end of a path, where PEFT and this "
                f"server put '(.*\\.)?' before it: {error}; write flags as (?i:...)"
            )

    def is_path(self, pattern: str, path: str) -> bool:
        """Whether the pattern stands for the whole path."""
        if NAME.fullmatch(pattern):
            return path == pattern.replace("\\.", ".")
        return self._match(pattern, "{}", path)

    def is_end(self, pattern: str, path: str) -> bool:
        """Whether the pattern stands for the last parts of the path."""
        if NAME.fullmatch(pattern):
            return f".{path}".endswith("." + pattern.replace("\\.", "."))
        return self._match(pattern, END_OF_PATH, path)

    def _match(self, pattern: str, frame: str, path: str) -> bool:
        """Match the whole path in the other process."""
        matches, error = self._ask(pattern, frame, path)
        if error is not None:
            raise self._refuse(f"{pattern[:80]!r} is not a regular expression: {error}")
        return bool(matches)

    def _ask(
        self, pattern: str, frame: str, path: str | None = None
    ) -> tuple[bool | None, str | None]:
        """Let the other process compile a pattern, and match the path if there is one.

        The pattern takes the place of {} in `frame`. Returns whether it matches, and why it cannot
        be compiled.
        """
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
            self.process.stdin.write(json.dumps([frame.format(pattern), path]) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise self._refuse(
                f"the regular expression {pattern[:80]!r} takes too long to match; list the names "
                "of the modules instead"
            )
        matches, error = json.loads(answer)
        return matches, error

    def _refuse(self, reason: str) -> InvalidRequest:
        return InvalidRequest(f"{self.origin}: {reason}", "model")
