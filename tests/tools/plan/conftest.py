"""Shared fixtures and helpers of the tests of `bloomery plan`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bloomery.cli import main

PlanRunner = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def empty_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty home folder: saved measurements of this machine must not change any figure."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def plan_json(capsys: pytest.CaptureFixture[str]) -> PlanRunner:
    """Run `bloomery plan --json` with some arguments and return what it printed."""

    def run_plan(*arguments: str) -> dict[str, Any]:
        assert main(["plan", *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]

    return run_plan
