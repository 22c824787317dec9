"""The web page, the API's description, and the log."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from bloomery.server.routes import table
from bloomery.server.service import Settings
from tests.server.conftest import Running

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def test_browsers_get_the_page_and_others_health(server: Running) -> None:
    page = server.get("/", headers=BROWSER)
    assert page.headers["content-type"].startswith("text/html") and "Bloomery" in page.text
    policy = page.headers["content-security-policy"]
    assert (
        "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    )
    assert server.get("/").content == b""
    named = re.findall(r'(?:src|href)="\./([^"]+)"', page.text)
    assert len(named) >= 2
    for path in named:
        asset = server.get(f"/{path}")
        assert asset.status_code == 200 and "immutable" in asset.headers["cache-control"]
        plain = server.get(f"/{path}", headers={"accept-encoding": "identity"})
        assert plain.content == asset.content and "content-encoding" not in plain.headers
        kind = {"js": "javascript", "css": "text/css", "svg": "image/svg"}[path.rpartition(".")[2]]
        assert kind in asset.headers["content-type"]


@pytest.mark.parametrize(
    "path",
    [
        "/assets/nothing.js",
        "/assets/../index.html",
        "/assets/..%2f..%2fapp.py",
        "/assets/%2fetc%2fpasswd",
        "/assets/a%00b",
    ],
)
def test_no_other_file_is_served(server: Running, path: str) -> None:
    with server.raw() as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        assert connection.recv(12) == b"HTTP/1.1 404"


def test_the_document_covers_the_table(server: Running) -> None:
    document = server.get("/openapi.json").json()
    for route in table(Settings(model="m")):
        operation = document["paths"][route.path][route.method.lower()]
        assert operation["summary"], f"{route.path} has nothing to say for itself"
        if route.body:
            reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            assert reference.rpartition("/")[2] in document["components"]["schemas"]
    identifiers = [o["operationId"] for path in document["paths"].values() for o in path.values()]
    assert len(identifiers) == len(set(identifiers))
    for reference in re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document)):
        assert reference in document["components"]["schemas"]


def test_the_document_says_where_a_key_is_needed(serve: Callable[..., Running]) -> None:
    server = serve(Settings(model="m", keys=("k",)))
    document = server.get("/openapi.json", headers={"x-api-key": "k"}).json()
    assert document["paths"]["/generate"]["post"]["security"] == [{"key": []}]
    assert "security" not in document["paths"]["/health"]["get"]


def test_docs_need_nothing_from_elsewhere(server: Running) -> None:
    page = server.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "<script" not in page.text and "http://" not in page.text and "https://" not in page.text
    for path in ("/generate", "/v1/chat/completions", "max_new_tokens", "include_usage"):
        assert path in page.text
    assert "'none'" in page.headers["content-security-policy"]


def test_one_line_a_request_and_never_a_prompt(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bloomery.server")
    secret = "canary-in-the-forge"
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": secret}],
        "max_tokens": 3,
        "ignore_eos": True,
        "user": secret,
        "stop": [secret],
    }
    server.post(
        "/v1/chat/completions",
        body,
        headers={"authorization": f"Bearer {secret}", "x-request-id": "mine"},
    )
    server.post("/v1/chat/completions", {**body, "messages": secret})
    server.post(f"/{secret}", body)
    server.get("/health")
    lines = [record for record in caplog.records if record.name == "bloomery.server"]
    assert len(lines) == 3
    assert not any(secret in record.getMessage() or secret in str(vars(record)) for record in lines)
    fields = lines[0].fields  # type: ignore[attr-defined]
    assert (
        fields["request"] == "mine"
        and fields["status"] == 200
        and fields["tokens"] == 3
        and fields["first_token"] > 0
    )
    assert lines[1].fields["error"] == "validation" and lines[2].fields["path"] == "unknown"  # type: ignore[attr-defined]
