"""The web page, the OpenAPI document, the documentation page, and the access log."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from bloomery.server.openapi import EXAMPLES
from bloomery.server.routes import build_routes
from bloomery.server.service import ServerSettings
from tests.server.conftest import HttpTestServer

BROWSER_HEADERS = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
MEDIA_TYPES = {"js": "javascript", "css": "text/css", "svg": "image/svg"}


def test_browsers_get_the_page_and_others_a_short_text(server: HttpTestServer) -> None:
    page = server.get("/", headers=BROWSER_HEADERS)
    assert page.headers["content-type"].startswith("text/html") and "Bloomery" in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy
    assert "unsafe" not in policy
    text = server.get("/").text
    assert text.startswith("Bloomery") and "/v1/chat/completions" in text
    asset_paths = re.findall(r'(?:src|href)="\./([^"]+)"', page.text)
    assert len(asset_paths) >= 2
    for path in asset_paths:
        asset = server.get(f"/{path}")
        assert asset.status_code == 200 and "immutable" in asset.headers["cache-control"]
        uncompressed = server.get(f"/{path}", headers={"accept-encoding": "identity"})
        assert uncompressed.content == asset.content
        assert "content-encoding" not in uncompressed.headers
        assert MEDIA_TYPES[path.rpartition(".")[2]] in asset.headers["content-type"]


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
def test_no_other_file_is_served(server: HttpTestServer, path: str) -> None:
    with server.open_socket() as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        assert connection.recv(12) == b"HTTP/1.1 404"


def test_the_openapi_document_covers_all_routes(server: HttpTestServer) -> None:
    document = server.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for route in build_routes(ServerSettings(model="m")):
        operation = document["paths"][route.path][route.method.lower()]
        assert operation["summary"], f"the handler of {route.path} has no docstring"
        if route.body_type:
            reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            assert reference.rpartition("/")[2] in schemas
    operations = [
        operation for methods in document["paths"].values() for operation in methods.values()
    ]
    identifiers = [operation["operationId"] for operation in operations]
    assert len(identifiers) == len(set(identifiers))
    for name in re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document)):
        assert name in schemas


def test_the_openapi_document_says_where_a_key_is_needed(
    serve: Callable[..., HttpTestServer],
) -> None:
    server = serve(ServerSettings(model="m", keys=("k",)))
    document = server.get("/openapi.json", headers={"x-api-key": "k"}).json()
    assert document["paths"]["/generate"]["post"]["security"] == [{"key": []}]
    assert "security" not in document["paths"]["/health"]["get"]


def test_the_documentation_page_is_as_strict_as_the_web_page(server: HttpTestServer) -> None:
    page = server.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    asset_paths = re.findall(r'(?:src|href)="\./([^"]+)"', page.text)
    assert any(path.endswith(".js") for path in asset_paths)
    for path in asset_paths:
        assert server.get(f"/{path}").status_code == 200


def test_the_documentation_page_needs_no_key_but_its_document_does(
    serve: Callable[..., HttpTestServer],
) -> None:
    server = serve(ServerSettings(model="m", keys=("k",)))
    assert server.get("/docs").status_code == 200
    assert server.get("/openapi.json").status_code == 401


@pytest.mark.parametrize("path", EXAMPLES)
def test_every_example_of_the_document_is_answered(server: HttpTestServer, path: str) -> None:
    documented = server.get("/openapi.json").json()["paths"]
    media = documented[path]["post"]["requestBody"]["content"]["application/json"]
    response = server.post(path, media["example"])
    assert response.status_code == 200, response.text


def test_each_request_is_logged_in_one_line_without_its_text(
    server: HttpTestServer, caplog: pytest.LogCaptureFixture
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
    headers = {"authorization": f"Bearer {secret}", "x-request-id": "mine"}
    server.post("/v1/chat/completions", body, headers=headers)
    server.post("/v1/chat/completions", {**body, "messages": secret})
    server.post(f"/{secret}", body)
    server.get("/health")
    records: list[Any] = [record for record in caplog.records if record.name == "bloomery.server"]
    assert len(records) == 3
    for record in records:
        assert secret not in record.getMessage() and secret not in str(vars(record))
    fields = records[0].fields
    assert fields["request"] == "mine" and fields["status"] == 200
    assert fields["tokens"] == 3 and fields["ttft"] > 0
    assert records[1].fields["error"] == "validation"
    assert records[2].fields["path"] == "unknown"
