"""The API's description is true: goldens have the shapes it says, and no request, right or wrong, gets a 5xx."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from bloomery.server.openapi import document
from bloomery.server.routes import table
from bloomery.server.service import Settings
from bloomery.text.tokenizer import Tokenizer
from tests.server.cases import CASES
from tests.server.conftest import run
from tests.server.speaker import InProcess, words
from tests.server.test_golden import FOLDER, VARIES
from tests.waiting import LONG

schemathesis = pytest.importorskip("schemathesis", reason="not installed; `make test` installs it")
jsonschema_rs = pytest.importorskip("jsonschema_rs")

DOCUMENT = document(table(Settings(model="speaker")), keyed=False)


@pytest.mark.parametrize("name", CASES)
def test_goldens_have_the_shape_they_are_said_to_have(name: str) -> None:
    golden = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    path = CASES[name][1].partition("?")[0].replace("org/speaker-1", "{model}")
    if "body" not in golden or path not in DOCUMENT["paths"]:
        return
    said = DOCUMENT["paths"][path][CASES[name][0].lower()]["responses"][
        "200" if golden["status"] == 200 else "default"
    ]
    if name in (
        "root_health",
        "generate_best_of",
    ):  # no JSON of that kind; and one whose values are kept as types
        return
    whole = {**said["content"]["application/json"]["schema"], "components": DOCUMENT["components"]}
    jsonschema_rs.validate(whole, unvaried(golden["body"]))


def unvaried(value: Any, key: str = "") -> Any:
    """What differs from run to run stands in a golden as <its name>."""
    if isinstance(value, dict):
        return {name: unvaried(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [unvaried(inner) for inner in value]
    return 1 if key in VARIES and value is not None else value


@pytest.fixture(scope="module")
def api(tokenizer: Tokenizer) -> Iterator[Any]:
    with ExitStack() as exit:
        yield run(InProcess(words(), context=64), tokenizer, Settings(model="speaker"), exit)


schema = schemathesis.openapi.from_dict(DOCUMENT)
CHECKS = [
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
]


def sent(api: Any, case: Any) -> None:
    """A deadline of milliseconds asks for a 504: here all have time."""
    body = case.body if isinstance(case.body, dict) else {}
    for part in (body, body.get("parameters")):
        if (
            isinstance(part, dict)
            and isinstance(given := part.get("deadline_ms"), int)
            and given > 0
        ):
            part["deadline_ms"] = given + int(1000 * LONG)
    case.call_and_validate(
        base_url=f"http://127.0.0.1:{api.address[1]}", checks=CHECKS, timeout=LONG
    )


@schema.parametrize()
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_a_few_requests_of_every_route(api: Any, case: Any) -> None:
    """Valid and invalid ones."""
    sent(api, case)


@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_requests_of_every_route(api: Any, case: Any) -> None:
    sent(api, case)
