"""Log formats: lines for people, and one JSON object per line for machines."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys

import pytest

from bloomery.logs import (
    CLEAR_LINE,
    HumanFormatter,
    JsonFormatter,
    TerminalHandler,
    resolve_log_format,
    show_load_progress,
)


def make_record(level: int, **extra: object) -> logging.LogRecord:
    record = logging.LogRecord("bloomery", level, __file__, 1, "%d tokens", (7,), None)
    record.__dict__.update(extra)
    return record


def test_lines_for_people_name_the_level_only_of_warnings_and_errors() -> None:
    formatter = HumanFormatter("engine: %(message)s")
    info = formatter.format(make_record(logging.INFO))
    warning = formatter.format(make_record(logging.WARNING))
    assert info.split(" ", 1)[1] == "engine: 7 tokens"
    assert warning.split(" ", 1)[1] == "warning: engine: 7 tokens"


def test_json_lines_hold_the_fields_of_the_record() -> None:
    record = make_record(logging.ERROR, fields={"request": "a", "ttft": 0.5})
    line = json.loads(JsonFormatter("%(message)s").format(record))
    assert line.pop("time") == round(record.created, 3)
    assert line == {
        "level": "error",
        "logger": "bloomery",
        "message": "7 tokens",
        "request": "a",
        "ttft": 0.5,
    }


@pytest.mark.parametrize(("is_terminal", "expected"), [(True, "human"), (False, "json")])
def test_the_automatic_format_is_for_people_in_a_terminal(
    is_terminal: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert resolve_log_format("auto") == expected
    assert resolve_log_format("json") == "json"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_log_line_replaces_the_progress_bar_of_a_terminal(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    TerminalHandler().handle(make_record(logging.INFO))
    expected = f"{CLEAR_LINE}7 tokens\n" if is_terminal else "7 tokens\n"
    assert capsys.readouterr().err == expected


def test_the_age_of_a_process_includes_its_start() -> None:
    code = (
        "import time; time.sleep(0.3)\n"
        "from bloomery.logs import process_age_seconds; print(process_age_seconds())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.3 <= float(done.stdout) < 60


def test_the_load_bar_shows_progress_until_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def load(is_terminal: bool) -> int:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        fractions = iter([0.0, 0.5])

        def read_progress() -> tuple[str, float]:
            fraction = next(fractions, 1.0)
            if fraction == 1.0:
                loaded.set_result(None)
            return "weights", fraction

        await show_load_progress(loaded, read_progress)
        return sum(1 for _ in fractions)

    assert asyncio.run(load(is_terminal=True)) == 0
    assert asyncio.run(load(is_terminal=False)) == 2, "without a terminal nothing is shown"
