"""The web page, served from the files in web/, and the API's documentation.

No page needs anything from another server, and a strict content security policy forbids it.
"""

from __future__ import annotations

import gzip
from functools import lru_cache
from mimetypes import guess_type
from pathlib import Path
from typing import Any, NamedTuple

from starlette.responses import Response
from starlette.types import ASGIApp

from bloomery import __version__
from bloomery.server.errors import HttpError, format_tgi_error
from bloomery.server.openapi import build_openapi_document
from bloomery.server.service import HttpCall, Route

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": PAGE_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
# An asset's file name holds a hash of its content, so it can be cached forever.
CACHE_FOREVER = "public, max-age=31536000, immutable"
WEB_FOLDER = Path(__file__).parent.parent / "web"


class WebFile(NamedTuple):
    data: bytes
    gzipped: bytes
    media_type: str


ROOT_TEXT = """\
Bloomery {version} serves {model} ({state}).

  chat and dashboard  {url}/  (in a browser)
  API reference       {url}/docs
  OpenAI's API        {url}/v1
  Anthropic's API     {url}  (POST /v1/messages)
  TGI's API           {url}  (POST /generate)
  Ollama's API        {url}  (POST /api/chat)

Try:

  curl {url}/v1/chat/completions{key} -d '{{
    "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
"""


async def root(call: HttpCall) -> ASGIApp:
    """The web page for a browser; a short text, with the status of /health, for other clients."""
    if "text/html" in call.headers.get("accept", ""):
        return _file_response(call, "index.html", "no-cache")
    settings = call.service.settings
    state = call.service.backend.status.state
    host = call.headers.get("host") or settings.host
    text = ROOT_TEXT.format(
        version=__version__,
        model=settings.model,
        state=state,
        url=f"{call.scope.get('scheme', 'http')}://{host}",
        key=" -H 'Authorization: Bearer KEY'" if settings.keys else "",
    )
    is_ready = state == "ready"
    headers = {} if is_ready else {"retry-after": "5"}
    return Response(text, 200 if is_ready else 503, headers, "text/plain")


async def asset(call: HttpCall) -> ASGIApp:
    """A file of the web page."""
    return _file_response(call, f"assets/{call.path_parameter}", CACHE_FOREVER)


def _file_response(call: HttpCall, name: str, cache_control: str) -> Response:
    file = load_web_files().get(name)
    if file is None:
        raise HttpError(404, "there is no such file", "not_found")
    headers = {**SECURITY_HEADERS, "cache-control": cache_control, "vary": "accept-encoding"}
    accepts_gzip = "gzip" in call.headers.get("accept-encoding", "")
    if accepts_gzip and len(file.gzipped) < len(file.data):
        headers["content-encoding"] = "gzip"
        return Response(file.gzipped, headers=headers, media_type=file.media_type)
    return Response(file.data, headers=headers, media_type=file.media_type)


@lru_cache(maxsize=1)
def load_web_files() -> dict[str, WebFile]:
    """The page's files by relative path, read once; no path from a client is ever opened."""
    files: dict[str, WebFile] = {}
    for path in WEB_FOLDER.rglob("*"):
        if not path.is_file():
            continue
        data = path.read_bytes()
        media_type = guess_type(path.name)[0] or "text/plain"
        name = path.relative_to(WEB_FOLDER).as_posix()
        files[name] = WebFile(data, gzip.compress(data, mtime=0), media_type)
    return files


def _openapi_document(call: HttpCall) -> dict[str, Any]:
    service = call.service
    return build_openapi_document(service.routes, needs_key=service.settings.keys != ())


async def openapi_document(call: HttpCall) -> ASGIApp:
    """This API, described in OpenAPI 3.1."""
    return call.json_response(_openapi_document(call))


async def docs(call: HttpCall) -> ASGIApp:
    """This API, described for people, who can try it there."""
    return _file_response(call, "docs.html", "no-cache")


ROUTES = (
    Route("/", root, format_tgi_error, public=True, quiet=True, media_types=()),
    Route("/assets/{file}", asset, format_tgi_error, public=True, quiet=True, media_types=("*/*",)),
    Route("/docs", docs, format_tgi_error, public=True, quiet=True, media_types=("text/html",)),
    Route("/openapi.json", openapi_document, format_tgi_error, quiet=True),
    Route("/api-doc/openapi.json", openapi_document, format_tgi_error, quiet=True),
)
