"""Golden files: the complete response to each case of golden_cases.py, without ids and times.

`python -m tests.server.test_golden` writes them again. Review the changes with `git diff`.
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
from bloomery.engine.adapter_catalog import NamedAdapter
from bloomery.server.adapters import AdapterSettings
from bloomery.server.routes import build_routes
from bloomery.server.service import ServerSettings
from tests.server.conftest import HttpTestServer, start_server
from tests.server.golden_cases import CASES, PAGES
from tests.server.scripted_engine import InProcessEngine, load_test_tokenizer
from tests.server.sse import parse_events

FOLDER = Path(__file__).parent.parent / "golden" / "http"
SETTINGS = ServerSettings(model="speaker", aliases=("org/speaker-1",))
ADAPTER_NAMES = ("smith", "poet")
LORA_SETTINGS = ServerSettings(
    model="speaker",
    lora=AdapterSettings(
        enabled=True,
        modules=tuple(NamedAdapter(name, name, f"/lora/{name}", name) for name in ADAPTER_NAMES),
        max_loras=2,
    ),
)
# Fields that differ from run to run.
VARYING_FIELDS = {
    "created",
    "created_at",
    "completed_at",
    "modified_at",
    "total_duration",
    "prompt_eval_duration",
    "eval_duration",
    "time",
    "uptime",
    "tokens_per_second",
    "prompt_tokens_per_second",
    "p50",
    "p90",
    "p99",
}
TIMING_HEADERS = re.compile(r"x-(compute|total|validation|queue|inference)-time|x-time-per-token")
RECORDED_HEADERS = {
    "content-type",
    "retry-after",
    "allow",
    "cache-control",
    "connection",
    "x-accel-buffering",
}


def normalize(value: Any, key: str = "") -> Any:
    """Replace ids, times and the version, which differ from run to run."""
    if isinstance(value, dict):
        return {name: normalize(inner, name) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [normalize(inner) for inner in value]
    if key in VARYING_FIELDS and value is not None:
        return f"<{key}>"
    if isinstance(value, str):
        return re.sub(r"[0-9a-f]{32}", "<id>", value).replace(__version__, "<version>")
    return round(value, 6) if isinstance(value, float) else value


def record_response(server: HttpTestServer, name: str) -> dict[str, Any]:
    """The request of a case and its normalized response, as a golden file holds them."""
    method, path, body, headers = CASES[name]
    response = server.client.request(method, path, json=body, headers=headers)
    recorded_headers = {}
    for header, value in response.headers.items():
        is_own = header.startswith("x-") and header != "x-request-id"
        if header in RECORDED_HEADERS or is_own:
            recorded_headers[header] = "<time>" if TIMING_HEADERS.match(header) else value
    record: dict[str, Any] = {
        "request": {"method": method, "path": path, "body": body},
        "status": response.status_code,
        "headers": recorded_headers,
    }
    record |= record_content(response)
    if name == "generate_best_of":  # the server chooses two seeds, so only types are the same
        record["body"] = type_names(record["body"])
    return record


def record_content(response: httpx2.Response) -> dict[str, Any]:
    """Events, JSON, or the metric names of other text."""
    media_type = response.headers.get("content-type", "")
    if media_type.startswith("text/event-stream"):
        return {"events": normalize(parse_events(response.text))}
    if media_type.startswith("application/json"):
        return {"body": normalize(response.json())}
    if media_type.startswith("application/x-ndjson"):
        return {"lines": [normalize(json.loads(line)) for line in response.text.splitlines()]}
    if "version=" not in media_type:  # a text for people
        text = re.sub(r"http://[\w.]+:\d+", "<url>", response.text)
        return {"text": normalize(text.splitlines())}
    lines = [line for line in response.text.splitlines() if line[0] != "#"]
    return {"text": sorted({line.partition("{")[0].partition(" ")[0] for line in lines})}


def type_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: type_names(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [type_names(inner) for inner in value[:1]]
    return type(value).__name__


@pytest.mark.parametrize("name", CASES)
def test_responses_match_their_golden_files(
    serve: Callable[..., HttpTestServer], name: str
) -> None:
    golden = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    record = record_response(serve(settings_of(name)), name)
    assert json.loads(json.dumps(record)) == golden


def settings_of(name: str) -> ServerSettings:
    return LORA_SETTINGS if name.startswith("lora_") else SETTINGS


def test_every_route_has_a_golden_file() -> None:
    tested = {(method, path.partition("?")[0]) for method, path, _, _ in CASES.values()}
    for route in build_routes(SETTINGS):
        path = route.path.replace("{model}", "org/speaker-1")
        path = path.replace("{response_id}", "resp_unknown")
        path = path.replace("{completion_id}", "chatcmpl-unknown")
        path = path.replace("{conversation_id}", "conv_unknown").replace("{item_id}", "msg")
        is_tested = (route.method, path) in tested or route.path in PAGES
        assert is_tested, f"{route.method} {route.path} has no golden file"
    assert {path.stem for path in FOLDER.glob("*.json")} == set(CASES), (
        "every case has a golden file, and every golden file has a case"
    )


def write_golden_files() -> None:
    FOLDER.mkdir(exist_ok=True)
    tokenizer = load_test_tokenizer()
    for name in CASES:
        with ExitStack() as exit_stack:
            engine = InProcessEngine(tokenizer)
            server = start_server(engine, tokenizer, settings_of(name), exit_stack)
            text = json.dumps(record_response(server, name), indent=1, ensure_ascii=False)
            (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write_golden_files())
