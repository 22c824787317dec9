"""A Hub of one process: the few routes huggingface_hub asks for, over real HTTP on the loopback interface."""

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
class Hub:
    """Repositories by id, each a dict of commit -> files; `refs` are branches and tags."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    repository: str = "org/model"
    denied: tuple[int, str] | None = None  # answer everything with this status and X-Error-Code
    broken: set[str] = field(default_factory=set)  # files answered with a 404 as if they had gone
    cut: dict[str, int] = field(
        default_factory=dict
    )  # files whose first answer breaks off after so many bytes
    on_info: Any = None  # called after the answer about the repository
    log: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    url: str = ""

    def asked(self, method: str) -> list[str]:
        return [path for verb, path, _ in self.log if verb == method]

    def fetched(self) -> set[str]:
        return {
            path.split("/resolve/")[1].split("/", 1)[1]
            for path in self.asked("GET")
            if "/resolve/" in path
        }


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def reply(
            self, status: int, data: bytes, headers: dict[str, str], body: bool = True, cut: int = 0
        ) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data[:cut] if cut else data)
            if cut:
                self.close_connection = True

        def answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.log.append(
                (self.command, path, {name.lower(): value for name, value in self.headers.items()})
            )
            api = f"/api/models/{hub.repository}"
            if hub.denied:
                self.reply(hub.denied[0], b"{}", {"X-Error-Code": hub.denied[1]}, body)
            elif path == api or path.startswith(f"{api}/revision/"):
                self.about(path.removeprefix(api).removeprefix("/revision/") or "main")
            elif path.startswith(f"{api}/tree/"):
                self.tree(path.removeprefix(f"{api}/tree/"))
            elif path.startswith(f"/{hub.repository}/resolve/"):
                self.file(*path.removeprefix(f"/{hub.repository}/resolve/").split("/", 1), body)
            else:
                self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

        def about(self, revision: str) -> None:
            commit = hub.refs.get(revision, revision)
            if commit not in hub.commits:
                self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return
            files = [{"rfilename": name} for name in hub.commits[commit]]
            about = {
                "id": hub.repository,
                "modelId": hub.repository,
                "sha": commit,
                "siblings": files,
                "tags": [],
            }
            self.reply(200, json.dumps(about).encode(), {"Content-Type": "application/json"})
            if hub.on_info:
                hub.on_info()

        def tree(self, revision: str) -> None:
            files = hub.commits[hub.refs.get(revision, revision)]
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": etag(data)}
                for name, data in files.items()
            ]
            self.reply(200, json.dumps(rows).encode(), {"Content-Type": "application/json"})

        def file(self, revision: str, name: str, body: bool) -> None:
            commit = hub.refs.get(revision, revision)
            data = hub.commits[commit].get(name)
            if data is None or (body and name in hub.broken):
                self.reply(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
                return
            headers = {"ETag": f'"{etag(data)}"', "X-Repo-Commit": commit}
            asked = self.headers.get("Range")
            if body and asked:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                start = int(first)
                end = min(int(last or len(data)), len(data) - 1)
                headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
                self.reply(206, data[start : end + 1], headers)
                return
            self.reply(200, data, headers, body, cut=hub.cut.pop(name, 0) if body else 0)

    return Handler


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def serving(hub: Hub):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(hub))
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
