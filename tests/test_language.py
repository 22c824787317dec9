"""Readable names and files: words of the field, unique class names, documented modules.

An engineer with experience of other inference servers should find each thing by the usual word.
This test rejects words that only their author would search for. It checks the names that our code
defines (modules, classes, functions, parameters, variables, attributes), not the names of libraries
that it uses.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "tests", "benchmarks")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
MAX_COLUMNS = 100

# Words that must not occur as a part of any name, and the field's words for them.
FORBIDDEN_PARTS = {
    "going": "decode requests, num_decodes",
    "lineup": "batch order",
    "nobody": "padding row, null block",
    "somebody": "name the thing",
    "wish": "options, params",
    "wishes": "options, params",
    "wished": "options, params",
    "ragged": "metadata",
    "phrase": "fused linear",
    "woven": "pipelined wgmma",
    "dice": "random numbers",
    "foretell": "predict",
    "plainly": "eager",
    "census": "batch stats",
    "owing": "prefill backlog",
    "lone": "batch-1",
    "tax": "overhead, delay budget",
    "knock": "check_capacity",
    "greed": "per-key share",
    "bury": "handle a crash",
    "born": "spawned",
    "crew": "thread pool",
    "hire": "start a worker",
    "suspects": "quarantine",
    "strikes": "quarantine",
    "news": "outputs",
    "hear": "on_message",
    "heard": "received",
}
# Words that must not be a whole name, in any case. As parts of longer names they may be ordinary.
FORBIDDEN_NAMES = {
    "go_on": "decode",
    "line_up": "batch order",
    "throw": "random init",
    "tell": "send, report",
    "told": "name the thing",
    "said": "name the thing",
    "bear": "spawn",
    "birth": "spawn",
    "deaths": "crashes",
    "team": "thread pool",
    "door": "admission",
    "shed": "load shedding",
    "lap": "scheduling round",
    "apart": "worker pool",
    "asking": "prefill backlog",
    "beside": "name the thing",
    "turn_and_store": "apply_rope_and_cache",
    "turned": "apply_rope",
    "unprepared": "pending captures",
    "words": "seed words, vocab shard, text: one name each",
    "whole": "name the thing",
    "kept": "name the result",
    "found": "name the result",
    "made": "name the result",
    "seen": "name the result",
    "who": "name the thing",
    "everybody": "name the thing",
    "singles": "num_decodes",
}
FORBIDDEN_CLASSES = {
    "Arriving",
    "Ask",
    "Author",
    "Bell",
    "Born",
    "Captured",
    "Coded",
    "Crew",
    "Cut",
    "Far",
    "Flight",
    "Grid",
    "Hand",
    "Held",
    "Item",
    "Job",
    "Line",
    "Lineup",
    "Near",
    "Plainly",
    "Portion",
    "Ragged",
    "Ready",
    "Recorded",
    "Scattered",
    "Share",
    "SideBySide",
    "Steady",
    "Stored",
    "Ticket",
    "Turn",
    "Whole",
    "Wishes",
}
# Names that are right in some files: the limit `greed`, which GET /info shows, and the 32-bit words
# of packed weights.
ALLOWED_NAMES = {
    "greed": ("src/bloomery/server/limits.py",),
    "words": (
        "src/bloomery/kernels/",
        "src/bloomery/native/",
        "src/bloomery/quant/",
        "tests/kernels/",
        "tests/quant/",
        "benchmarks/kernels.py",
        "benchmarks/packed.py",
        "benchmarks/products.py",
    ),
}
# Files whose tables the formatter may not touch.
UNFORMATTED_FILES: frozenset[str] = frozenset()


class DefinedName(NamedTuple):
    """A name that our code defines."""

    name: str
    place: str  # path:line


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def relative_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def find_defined_names(path: Path) -> Iterator[DefinedName]:
    """Yield the module's name and every name that it defines."""
    yield DefinedName(path.stem, relative_name(path))
    for node in ast.walk(parse(path)):
        name = defined_name(node)
        if name is not None:
            yield DefinedName(name, f"{relative_name(path)}:{getattr(node, 'lineno', 0)}")


def defined_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.alias):
        return node.asname
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr
    return None


def split_name(name: str) -> list[str]:
    """The lower-case words of a snake_case or CamelCase name."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return [part for part in spaced.lower().split("_") if part]


def find_private_words(defined: DefinedName) -> Iterator[str]:
    lower_name = defined.name.strip("_").lower()
    if defined.place.startswith(ALLOWED_NAMES.get(lower_name, ())):
        return
    if lower_name in FORBIDDEN_NAMES:
        yield f"{defined.place}: {defined.name} (say: {FORBIDDEN_NAMES[lower_name]})"
    for part in split_name(defined.name):
        if part in FORBIDDEN_PARTS:
            yield f"{defined.place}: {defined.name} (say: {FORBIDDEN_PARTS[part]})"


@pytest.mark.parametrize("path", FILES, ids=relative_name)
def test_names_use_the_words_of_the_field(path: Path) -> None:
    wrong = [
        problem for defined in find_defined_names(path) for problem in find_private_words(defined)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", FILES, ids=relative_name)
def test_every_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(parse(path)), f"{relative_name(path)}: say what the file is for"


@pytest.mark.parametrize("path", FILES, ids=relative_name)
def test_lines_are_short_and_formatted(path: Path) -> None:
    text = path.read_text()
    lines = enumerate(text.splitlines(), 1)
    long_lines = [number for number, line in lines if len(line) > MAX_COLUMNS]
    assert not long_lines, f"{relative_name(path)}: over {MAX_COLUMNS} columns: {long_lines}"
    if relative_name(path) not in UNFORMATTED_FILES:
        comments = re.findall(r"#\s*fmt:\s*(?:skip|off)", text)
        assert not comments, f"{relative_name(path)}: the formatter decides"


def test_class_names_are_unique_and_of_the_field() -> None:
    places = defaultdict[str, list[str]](list)
    for path in FILES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{relative_name(path)}:{node.lineno}")
    duplicates = {name: lines for name, lines in places.items() if len(lines) > 1}
    assert not duplicates, f"defined more than once: {duplicates}"
    private = {name: lines for name, lines in places.items() if name in FORBIDDEN_CLASSES}
    assert not private, f"not words of the field: {private}"
