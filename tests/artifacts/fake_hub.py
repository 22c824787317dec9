"""A fake Hugging Face Hub: an HTTP server with the few routes that huggingface_hub uses."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class FakeHub:
    """Repositories by id, each a dict of commit -> files; `refs` are branches and tags."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    repository: str = "org/model"
    error_response: tuple[int, str] | None = None  # status and X-Error-Code of all responses
    missing_files: set[str] = field(default_factory=set)  # answered with 404
    # File name -> bytes after which its first download breaks off.
    interruptions: dict[str, int] = field(default_factory=dict)
    on_info: Any = None  # called after a response with the repository's info
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    url: str = ""

    def requested_paths(self, method: str) -> list[str]:
        return [path for verb, path, _ in self.requests if verb == method]

    def downloaded_files(self) -> set[str]:
        return {
            path.split("/resolve/")[1].split("/", 1)[1]
            for path in self.requested_paths("GET")
            if "/resolve/" in path
        }


def build_handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class HubRequestHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.handle_path(body=False)

        def do_GET(self) -> None:
            self.handle_path(body=True)

        def reply(
            self,
            status: int,
            data: bytes,
            headers: dict[str, str],
            body: bool = True,
            stop_after: int = 0,
        ) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data[:stop_after] if stop_after else data)
            if stop_after:
                self.close_connection = True

        def handle_path(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(
                (self.command, path, {name.lower(): value for name, value in self.headers.items()})
            )
            api = f"/api/models/{hub.repository}"
            if hub.error_response:
                self.reply(
                    hub.error_response[0], b"{}", {"X-Error-Code": hub.error_response[1]}, body
                )
            elif path == api or path.startswith(f"{api}/revision/"):
                self.send_info(path.removeprefix(api).removeprefix("/revision/") or "main")
            elif path.startswith(f"{api}/tree/"):
                self.send_tree(path.removeprefix(f"{api}/tree/"))
            elif path.startswith(f"/{hub.repository}/resolve/"):
                self.send_file(
                    *path.removeprefix(f"/{hub.repository}/resolve/").split("/", 1), body
                )
            else:
                self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

        def send_info(self, revision: str) -> None:
            commit = hub.refs.get(revision, revision)
            if commit not in hub.commits:
                self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return
            files = [{"rfilename": name} for name in hub.commits[commit]]
            info = {
                "id": hub.repository,
                "modelId": hub.repository,
                "sha": commit,
                "siblings": files,
                "tags": [],
            }
            self.reply(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
            if hub.on_info:
                hub.on_info()

        def send_tree(self, revision: str) -> None:
            files = hub.commits[hub.refs.get(revision, revision)]
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": etag(data)}
                for name, data in files.items()
            ]
            self.reply(200, json.dumps(rows).encode(), {"Content-Type": "application/json"})

        def send_file(self, revision: str, name: str, body: bool) -> None:
            commit = hub.refs.get(revision, revision)
            data = hub.commits[commit].get(name)
            if data is None or (body and name in hub.missing_files):
                self.reply(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
                return
            headers = {"ETag": f'"{etag(data)}"', "X-Repo-Commit": commit}
            byte_range = self.headers.get("Range")
            if body and byte_range:
                first, _, last = byte_range.removeprefix("bytes=").partition("-")
                start = int(first)
                end = min(int(last or len(data)), len(data) - 1)
                headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
                self.reply(206, data[start : end + 1], headers)
                return
            self.reply(
                200, data, headers, body, stop_after=hub.interruptions.pop(name, 0) if body else 0
            )

    return HubRequestHandler


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def serve_hub(hub: FakeHub):
    server = ThreadingHTTPServer(("127.0.0.1", 0), build_handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
