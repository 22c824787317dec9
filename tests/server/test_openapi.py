"""The OpenAPI document is right: golden files have its shapes, and no request gets a 5xx."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from bloomery.server.openapi import build_openapi_document
from bloomery.server.routes import build_routes
from bloomery.server.service import ServerSettings
from bloomery.text.tokenizer import Tokenizer
from tests.server.conftest import HttpTestServer, start_server
from tests.server.golden_cases import CASES
from tests.server.scripted_engine import InProcessEngine
from tests.server.test_golden import FOLDER, VARYING_FIELDS
from tests.waiting import WAIT_SECONDS

schemathesis = pytest.importorskip("schemathesis", reason="not installed; `make test` installs it")
jsonschema_rs = pytest.importorskip("jsonschema_rs")

DOCUMENT = build_openapi_document(build_routes(ServerSettings(model="speaker")), needs_key=False)
# Golden files whose body is not JSON of the described shape: empty, or types in place of values.
UNCHECKED = ("root_health", "generate_best_of")


@pytest.mark.parametrize("name", CASES)
def test_golden_files_have_the_described_shape(name: str) -> None:
    golden = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    method, path, _, _ = CASES[name]
    path = path.partition("?")[0].replace("org/speaker-1", "{model}")
    path = path.replace("resp_unknown", "{response_id}")
    if "body" not in golden or path not in DOCUMENT["paths"] or name in UNCHECKED:
        return
    responses = DOCUMENT["paths"][path][method.lower()]["responses"]
    response = responses["200" if golden["status"] == 200 else "default"]
    schema = response["content"]["application/json"]["schema"]
    schema = {**schema, "components": DOCUMENT["components"]}
    jsonschema_rs.validate(schema, restore_numbers(golden["body"]))


def restore_numbers(value: Any, key: str = "") -> Any:
    """Put a number where a golden file has a placeholder for a varying one."""
    if isinstance(value, dict):
        return {name: restore_numbers(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [restore_numbers(inner) for inner in value]
    return 1 if key in VARYING_FIELDS and value is not None else value


@pytest.fixture(scope="module")
def api(tokenizer: Tokenizer) -> Iterator[HttpTestServer]:
    backend = InProcessEngine(tokenizer, max_model_len=64)
    with ExitStack() as exit_stack:
        yield start_server(backend, tokenizer, ServerSettings(model="speaker"), exit_stack)


schema = schemathesis.openapi.from_dict(DOCUMENT)
CHECKS = [
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
]


def send_case(api: HttpTestServer, case: Any) -> None:
    """Send a generated request. A short deadline is extended, because it would give a 504."""
    body = case.body if isinstance(case.body, dict) else {}
    for part in (body, body.get("parameters")):
        if not isinstance(part, dict):
            continue
        deadline_ms = part.get("deadline_ms")
        if isinstance(deadline_ms, int) and deadline_ms > 0:
            part["deadline_ms"] = deadline_ms + int(1000 * WAIT_SECONDS)
    base_url = f"http://127.0.0.1:{api.address[1]}"
    case.call_and_validate(base_url=base_url, checks=CHECKS, timeout=WAIT_SECONDS)


@schema.parametrize()
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_a_few_generated_requests_of_every_route(api: HttpTestServer, case: Any) -> None:
    """Valid and invalid requests get a described response and no 5xx."""
    send_case(api, case)


@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_generated_requests_of_every_route(api: HttpTestServer, case: Any) -> None:
    send_case(api, case)
