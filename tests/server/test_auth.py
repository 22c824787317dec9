"""API keys, Host names and CORS."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from starlette.datastructures import Headers

from bloomery.messages import EngineStatus
from bloomery.server.auth import ApiKeys, is_loopback
from bloomery.server.routes import build_routes
from bloomery.server.service import ServerSettings
from tests.server.conftest import HttpTestServer

PUBLIC_PATHS = {"/", "/health", "/ping", "/ready", "/live", "/assets/{file}", "/docs"}
BODY = {"prompt": "The iron", "max_tokens": 3}


@pytest.fixture
def server_with_keys(serve: Callable[..., HttpTestServer]) -> HttpTestServer:
    return serve(ServerSettings(model="speaker", keys=("first-key", "second-key")))


def test_every_route_but_the_public_ones_needs_a_key(server_with_keys: HttpTestServer) -> None:
    """Checked over the route table, so a new route is covered as soon as it exists."""
    routes = build_routes(ServerSettings(model="speaker"))
    public_routes = {("GET", path) for path in PUBLIC_PATHS}
    for route in routes:
        path = route.path.replace("{file}", "x").replace("{model}", "speaker")
        body = {} if route.method == "POST" else None
        status = server_with_keys.client.request(route.method, path, json=body).status_code
        needs_key = (route.method, route.path) not in public_routes
        assert (status == 401) == needs_key, (route.method, path, status)
    assert {route.path for route in routes if route.public} == PUBLIC_PATHS


@pytest.mark.parametrize(
    "path",
    [
        "/nope",
        "/v1/nope",
        "/health/",
        "//health",
        "/health%2f..%2fmetrics",
        "/assets",
        "/HEALTH",
        "/./health",
    ],
)
def test_an_unknown_path_needs_a_key(server_with_keys: HttpTestServer, path: str) -> None:
    with server_with_keys.open_socket() as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        assert connection.recv(12) == b"HTTP/1.1 401", path


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic first-key"},
        {"authorization": "first-key"},
        {"x-api-key": "first-ke"},
        [("authorization", "Bearer first-key"), ("authorization", "Bearer first-key")],
        [("authorization", "Bearer first-key"), ("x-api-key", "a"), ("x-api-key", "b")],
    ],
    ids=str,
)
def test_a_missing_or_wrong_key_is_refused_by_every_api(
    server_with_keys: HttpTestServer, headers: dict[str, str]
) -> None:
    openai = server_with_keys.post("/v1/completions", BODY, headers=headers)
    assert openai.status_code == 401
    assert openai.json()["error"]["code"] == "invalid_api_key"
    tgi = server_with_keys.post("/generate", {"inputs": "a"}, headers=headers)
    assert tgi.status_code == 401
    assert set(tgi.json()) == {"error", "error_type"}
    anthropic = server_with_keys.post("/v1/messages", {}, headers=headers)
    assert anthropic.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer second-key"},
        {"x-api-key": "first-key"},
        {"Authorization": "bearer first-key"},
    ],
)
def test_a_valid_key_is_accepted(server_with_keys: HttpTestServer, headers: dict[str, str]) -> None:
    assert server_with_keys.post("/v1/completions", BODY, headers=headers).status_code == 200
    assert server_with_keys.get("/nope", headers=headers).status_code == 404
    assert server_with_keys.get("/metrics", headers=headers).status_code == 200


def test_prefix_hits_are_shared_within_one_key_only(server_with_keys: HttpTestServer) -> None:
    body = {"prompt": [5] * 40, "max_tokens": 1}
    cached_tokens = []
    for key in ("first-key", "first-key", "second-key"):
        response = server_with_keys.post("/v1/completions", body, headers={"x-api-key": key})
        usage = response.json()["usage"]
        cached_tokens.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached_tokens == [0, 32, 0]


def test_a_single_key_has_no_tenant_name() -> None:
    assert ApiKeys(["a"]).authenticate(Headers({"x-api-key": "a"})) == ""
    keys = ApiKeys(["a", "b"])
    tenant_a = keys.authenticate(Headers({"x-api-key": "a"}))
    tenant_b = keys.authenticate(Headers({"x-api-key": "b"}))
    assert tenant_a != tenant_b != ""


def test_metrics_can_be_public(serve: Callable[..., HttpTestServer]) -> None:
    server = serve(ServerSettings(model="speaker", keys=("k",), open_metrics=True))
    assert server.get("/metrics").status_code == 200
    assert server.get("/stats").status_code == 401


def test_engine_errors_are_hidden_from_callers_without_a_key(
    server_with_keys: HttpTestServer,
) -> None:
    detail = "the engine could not load: /models/secret/model.safetensors"
    server_with_keys.backend.status = EngineStatus("restarting", 0.0, detail)
    assert server_with_keys.get("/ready").json()["detail"] == ""
    server_with_keys.backend.status = EngineStatus("loading", 0.5, "reading weights")
    assert server_with_keys.get("/ready").json()["detail"] == "reading weights"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("127.1.2.3:80", 200),
        ("[::1]:8000", 200),
        ("evil.com", 421),
        ("evil.com:8000", 421),
        ("localhost.evil.com", 421),
        ("127.0.0.1.evil.com", 421),
        ("", 421),
        ("a/../health", 421),
    ],
)
def test_a_loopback_server_accepts_local_host_names_only(
    server: HttpTestServer, host: str, status: int
) -> None:
    headers = {"host": host}
    assert server.get("/health", headers=headers).status_code == status
    assert server.post("/generate", {"inputs": "a"}, headers=headers).status_code == status


def test_a_public_server_accepts_any_host_name(serve: Callable[..., HttpTestServer]) -> None:
    public = serve(ServerSettings(model="speaker", host="0.0.0.0"))
    assert public.get("/health", headers={"host": "my.example"}).status_code == 200
    named = serve(ServerSettings(model="speaker", allowed_hosts=("box.lan",)))
    assert named.get("/health", headers={"host": "box.lan:8000"}).status_code == 200


def test_is_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost", "127.9.9.9", "/run/x.sock")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "", "192.168.0.1", "example.com")))


def test_cors_is_off_unless_configured(
    serve: Callable[..., HttpTestServer], server: HttpTestServer
) -> None:
    origin = "http://page.example"
    preflight = {"origin": origin, "access-control-request-method": "POST"}
    assert server.client.options("/generate", headers=preflight).status_code == 405
    cors = serve(ServerSettings(model="speaker", keys=("k",), cors_origins=(origin,)))
    response = cors.client.options("/generate", headers=preflight)
    assert response.headers["access-control-allow-origin"] == origin
    response = cors.post("/generate", {"inputs": "a"}, headers={"origin": origin})
    assert response.status_code == 401
