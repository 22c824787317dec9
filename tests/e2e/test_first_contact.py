"""A server as a newcomer and an operator meet it: configuration file, HTTPS, first requests."""

from __future__ import annotations

import http.client
import json
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.chaos.http import free_port
from tests.waiting import WAIT_SECONDS, wait_until

TEMPLATE = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
CONFIG = """
port = {port}
threads = 1
kv-cache-gib = 0.1
max-model-len = 1024
ssl-certfile = "{folder}/cert.pem"
ssl-keyfile = "{folder}/key.pem"
chat-template = "{folder}/template.jinja"
log-level = "warning"
log-format = "human"
"""


class HttpsAnswer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class HttpsServer(NamedTuple):
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    folder: Path

    def request(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> HttpsAnswer:
        """Send a request that states nothing but `headers`, as curl and small scripts do."""
        context = ssl.create_default_context(cafile=str(self.folder / "cert.pem"))
        connection = http.client.HTTPSConnection("localhost", self.port, context=context)
        connection.request(method, path, body, {"Accept": "*/*", **headers})
        response = connection.getresponse()
        answer = HttpsAnswer(response.status, dict(response.getheaders()), response.read())
        connection.close()
        return answer


def is_ready(server: HttpsServer) -> bool:
    try:
        return server.request("GET", "/ready").status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpsServer]:
    """`bloomery serve --config FILE` with the embedded model and a certificate of its own."""
    folder = tmp_path_factory.mktemp("server")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names, *files],
        check=True,
        capture_output=True,
    )
    port = free_port()
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "bloomery.toml").write_text(CONFIG.format(port=port, folder=folder))
    log = folder / "log"
    command = [sys.executable, "-m", "bloomery", "serve", "--config", str(folder / "bloomery.toml")]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file)
    server = HttpsServer(port, process, log, folder)
    try:
        assert wait_until(lambda: process.poll() is not None or is_ready(server), 240)
        assert process.poll() is None, log.read_text()
        yield server
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


def test_curl_gets_a_short_text_with_an_example(server: HttpsServer) -> None:
    answer = server.request("GET", "/")
    text = answer.body.decode()
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain")
    assert "SmolLM2-135M-Instruct" in text and "(ready)" in text
    assert f"curl https://localhost:{server.port}/v1/chat/completions -d" in text


@pytest.mark.parametrize("media_type", [None, "application/x-www-form-urlencoded"])
def test_json_needs_no_content_type(server: HttpsServer, media_type: str | None) -> None:
    """The second is what `curl -d` sends."""
    body = {"messages": [{"role": "user", "content": "The capital of France is"}], "max_tokens": 4}
    headers = {"Content-Type": media_type} if media_type else {}
    answer = server.request(
        "POST", "/v1/chat/completions", json.dumps({**body, "temperature": 0}).encode(), **headers
    )
    assert answer.status == 200, answer.body
    from_page = server.request("POST", "/v1/chat/completions", b"{}", Origin="https://other.org")
    assert from_page.status == 415, "a page of another site could send this"


def test_the_chat_template_of_the_file_is_used(server: HttpsServer) -> None:
    body = {"messages": [{"role": "user", "content": "slag"}]}
    answer = server.request("POST", "/chat_tokenize", json.dumps(body).encode())
    assert json.loads(answer.body)["templated_text"] == "[slag]"


def test_info_states_the_sampling_defaults_and_a_better_model(server: HttpsServer) -> None:
    info = json.loads(server.request("GET", "/info").body)
    assert info["sampling_defaults"] == {
        "temperature": 0.2,
        "top_k": 0,
        "top_p": 0.9,
        "min_p": 0.0,
        "typical_p": 1.0,
        "repetition_penalty": 1.05,
        "frequency_penalty": 0.3,
        "source": "the embedded model's",
    }
    assert info["demo"] and info["has_chat_template"]
    assert "/" in info["recommended_model"]["model"]


def test_a_wrong_host_is_told_about_the_flag(server: HttpsServer) -> None:
    answer = server.request("GET", "/info", Host="example.org")
    assert answer.status == 421 and b"--allowed-hosts" in answer.body


def test_the_log_level_of_the_file_is_used(server: HttpsServer) -> None:
    log = server.log.read_text()
    assert "ready in" not in log and "GET" not in log, "only warnings are logged"


def test_a_second_server_on_the_port_is_one_sentence(server: HttpsServer) -> None:
    command = [sys.executable, "-m", "bloomery", "serve", "--port", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"port {server.port} of 127.0.0.1 is in use" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and "--port" in done.stderr


@pytest.mark.slow
def test_everyday_questions_get_bounded_answers_without_loops(tmp_path: Path) -> None:
    transcript = tmp_path / "first-minutes.md"
    root = Path(__file__).parent.parent.parent
    script = str(root / "benchmarks" / "first_minutes.py")
    options = ["--questions", "5", "--port", str(free_port()), "--output", str(transcript)]
    done = subprocess.run(
        [sys.executable, script, *options], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 answers, 0 bad" in done.stdout
    assert transcript.read_text().count("## ") == 5
