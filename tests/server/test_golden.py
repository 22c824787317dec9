"""Whole answers of every route, as they were when somebody last looked at them closely.

`python -m tests.server.test_golden` writes them anew; what changed is then for `git diff` and the eye.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bloomery import __version__
from bloomery.server.routes import table
from bloomery.server.service import Settings
from tests.server.cases import CASES, PAGES
from tests.server.conftest import Running, run
from tests.server.events import parse
from tests.server.speaker import InProcess, words

FOLDER = Path(__file__).parent.parent / "golden" / "http"
SETTINGS = Settings(model="speaker", aliases=("org/speaker-1",))
VARIES = {
    "created",
    "created_at",
    "time",
    "uptime",
    "tokens_per_second",
    "prompt_tokens_per_second",
    "p50",
    "p90",
    "p99",
}
CLOCKS = re.compile(r"x-(compute|total|validation|queue|inference)-time|x-time-per-token")


def normal(value: Any, key: str = "") -> Any:
    """Without what differs from run to run: ids, times, and seeds nobody asked for."""
    if isinstance(value, dict):
        return {name: normal(inner, name) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [normal(inner) for inner in value]
    if key in VARIES and value is not None:
        return f"<{key}>"
    if isinstance(value, str):
        return re.sub(r"[0-9a-f]{32}", "<id>", value).replace(__version__, "<version>")
    return round(value, 6) if isinstance(value, float) else value


def answer(server: Running, name: str) -> dict[str, Any]:
    method, path, body, headers = CASES[name]
    got = (
        server.client.request(method, path, json=body, headers=headers)
        if body
        else server.get(path, headers=headers)
    )
    kept = {
        "content-type",
        "retry-after",
        "allow",
        "cache-control",
        "connection",
        "x-accel-buffering",
    }
    shown = {
        n: "<time>" if CLOCKS.match(n) else v
        for n, v in got.headers.items()
        if n in kept or (n.startswith("x-") and n != "x-request-id")
    }
    whole: dict[str, Any] = {
        "request": {"method": method, "path": path, "body": body},
        "status": got.status_code,
        "headers": shown,
    }
    whole |= content(got)
    if name == "generate_best_of":  # two seeds of the server's choosing: only the shape is the same
        whole["body"] = shape(whole["body"])
    return whole


def content(got: httpx2.Response) -> dict[str, Any]:
    kind = got.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        return {"events": normal(parse(got.text))}
    if kind.startswith("application/json"):
        return {"body": normal(got.json())}
    return {
        "text": sorted(
            {
                line.partition("{")[0].partition(" ")[0]
                for line in got.text.splitlines()
                if line[0] != "#"
            }
        )
    }


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in value.items()}
    return (
        [shape(inner) for inner in value[:1]] if isinstance(value, list) else type(value).__name__
    )


@pytest.mark.parametrize("name", CASES)
def test_golden(serve: Callable[..., Running], name: str) -> None:
    golden = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert json.loads(json.dumps(answer(serve(SETTINGS), name))) == golden


def test_every_route_has_a_golden_answer() -> None:
    seen = {(method, path.partition("?")[0]) for method, path, _, _ in CASES.values()}
    for route in table(SETTINGS):
        path = route.path.replace("{model}", "org/speaker-1")
        assert (route.method, path) in seen or route.path in PAGES, (
            f"{route.method} {route.path} has none"
        )
    assert {path.stem for path in FOLDER.glob("*.json")} == set(CASES), (
        "files of cases that are gone, or the other way"
    )


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    tokenizer = words()
    for name in CASES:
        with ExitStack() as exit:
            server = run(InProcess(tokenizer), tokenizer, SETTINGS, exit)
            text = json.dumps(answer(server, name), indent=1, ensure_ascii=False)
            (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write())
