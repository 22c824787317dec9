"""nginx and Caddy before a server, with the configurations of deploy/: streams are not buffered."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

from bloomery.server.service import ServerSettings
from tests.chaos.http import free_port
from tests.server.conftest import HttpTestServer, start_server
from tests.server.scripted_engine import InProcessEngine, load_test_tokenizer
from tests.waiting import wait_until

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
BODY = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
}


class ProxiedServer(NamedTuple):
    """A server, and a client that reaches it through a proxy with TLS."""

    server: HttpTestServer
    client: httpx2.Client


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate and its key."""
    folder = tmp_path_factory.mktemp("certificate")
    certificate_file = folder / "certificate.pem"
    key_file = folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-out", str(certificate_file), "-keyout", str(key_file)]
    subprocess.run([*command, *names, *files], check=True, capture_output=True)
    return certificate_file, key_file


def configure_nginx(
    folder: Path, upstream: str, port: int, certificate: tuple[Path, Path]
) -> list[str]:
    """Adapt our configuration to this machine and return the command that runs nginx with it."""
    site = (DEPLOY / "nginx" / "bloomery.conf").read_text()
    site = site.replace("127.0.0.1:8000", upstream)
    site = site.replace("listen 80;", f"listen 127.0.0.1:{free_port()};")
    site = site.replace("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;")
    site = re.sub(r"ssl_certificate .*;", f"ssl_certificate {certificate[0]};", site)
    site = re.sub(r"ssl_certificate_key .*;", f"ssl_certificate_key {certificate[1]};", site)
    (folder / "site.conf").write_text(site)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary_paths = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    (folder / "nginx.conf").write_text(
        f"daemon off;\nuser root;\npid {folder}/pid;\nerror_log {folder}/error.log;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temporary_paths}include {folder}/site.conf;\n}}\n"
    )
    command = ["nginx", "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert "warn" not in checked.stderr
    return command


def configure_caddy(
    folder: Path, upstream: str, port: int, certificate: tuple[Path, Path]
) -> list[str]:
    """Adapt our configuration to this machine and return the command that runs Caddy with it."""
    site = (DEPLOY / "caddy" / "Caddyfile").read_text()
    site = site.replace("reverse_proxy 127.0.0.1:8000", f"reverse_proxy {upstream}")
    site = site.replace(
        "llm.example.com {",
        "{\n\tadmin off\n\tauto_https disable_redirects\n}\n"
        f"https://127.0.0.1:{port} {{\n\ttls {certificate[0]} {certificate[1]}",
    )
    path = folder / "Caddyfile"
    path.write_text(site)
    options = ["--config", str(path), "--adapter", "caddyfile"]
    checked = subprocess.run(["caddy", "validate", *options], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    return ["caddy", "run", *options]


CONFIGURE: dict[str, Callable[..., list[str]]] = {
    "nginx": configure_nginx,
    "caddy": configure_caddy,
}


@pytest.fixture(scope="module", params=list(CONFIGURE))
def proxied(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    certificate: tuple[Path, Path],
) -> Iterator[ProxiedServer]:
    """A scripted server behind the proxy, which runs in a process of its own."""
    name = request.param
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    folder = tmp_path_factory.mktemp(name)
    tokenizer = load_test_tokenizer()
    with ExitStack() as exit_stack:
        engine = InProcessEngine(tokenizer)
        server = start_server(engine, tokenizer, ServerSettings(model="speaker"), exit_stack)
        port = free_port()
        upstream = f"127.0.0.1:{server.address[1]}"
        command = CONFIGURE[name](folder, upstream, port, certificate)
        log_file = exit_stack.enter_context((folder / "log").open("wb"))
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log_file)
        exit_stack.callback(process.wait, 30)
        exit_stack.callback(process.terminate)
        client = httpx2.Client(base_url=f"https://127.0.0.1:{port}", verify=False, timeout=60)
        exit_stack.callback(client.close)
        assert wait_until(lambda: answers(client), 30), (folder / "log").read_text()
        yield ProxiedServer(server, client)


def answers(client: httpx2.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx2.HTTPError:
        return False


def read_text(lines: Iterator[str]) -> Iterator[str]:
    """The pieces of text of an event stream, as they arrive."""
    for line in lines:
        if line.startswith("data: {"):
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            for choice in event["choices"]:
                if choice["delta"].get("content"):
                    yield choice["delta"]["content"]


def test_tokens_are_passed_on_one_by_one(proxied: ProxiedServer) -> None:
    """The engine pauses after five steps. What it has generated until then arrives meanwhile."""
    engine = proxied.server.backend
    expected = proxied.client.post("/v1/chat/completions", json=BODY).json()
    whole_text = expected["choices"][0]["message"]["content"]
    engine.max_steps = engine.num_steps + 5
    body = {**BODY, "stream": True}
    with proxied.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        pieces = read_text(response.iter_lines())
        text = next(pieces) + next(pieces)
        assert wait_until(lambda: engine.num_steps == engine.max_steps), "the engine never paused"
        engine.max_steps = None
        text += "".join(pieces)
    assert text == whole_text


def test_a_client_that_leaves_ends_its_request(proxied: ProxiedServer) -> None:
    engine = proxied.server.backend
    engine.max_steps = engine.num_steps + 5
    body = {**BODY, "stream": True, "max_tokens": 400}
    with proxied.client.stream("POST", "/v1/chat/completions", json=body) as response:
        next(read_text(response.iter_lines()))
    try:
        assert wait_until(lambda: engine.is_idle, 30), "the request still runs"
    finally:
        engine.max_steps = None


def test_bodies_and_errors_pass_the_proxy(proxied: ProxiedServer) -> None:
    long_prompt = {"prompt": "iron " * 400_000, "max_tokens": 1}  # 2 MB: the proxy lets it pass
    answer = proxied.client.post("/v1/completions", json=long_prompt)
    assert answer.status_code == 400 and "token" in answer.json()["error"]["message"]
    too_large = proxied.client.post("/v1/completions", content=b"x" * (9 << 20))
    assert too_large.status_code == 413
    unknown = proxied.client.post("/v1/chat/completions", json={**BODY, "model": "other"})
    assert unknown.status_code == 404
    assert "bloomery_ready" in proxied.client.get("/metrics").text
