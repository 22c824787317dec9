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

from bloomery.server.errors import HttpError, format_tgi_error
from bloomery.server.openapi import build_openapi_document, render_docs_page
from bloomery.server.routes import status
from bloomery.server.service import HttpCall, Route

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
DOCS_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
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


async def root(call: HttpCall) -> ASGIApp:
    """The web page for a browser, TGI's health check for everybody else."""
    if "text/html" not in call.headers.get("accept", ""):
        return await status.health(call)
    return _file_response(call, "index.html", "no-cache")


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
    """This API, described for people."""
    headers = {**SECURITY_HEADERS, "content-security-policy": DOCS_POLICY}
    html = render_docs_page(_openapi_document(call))
    return Response(html, headers=headers, media_type="text/html")


ROUTES = (
    Route("/", root, format_tgi_error, public=True, quiet=True, media_types=()),
    Route("/assets/{file}", asset, format_tgi_error, public=True, quiet=True, media_types=("*/*",)),
    Route("/docs", docs, format_tgi_error, quiet=True, media_types=("text/html",)),
    Route("/openapi.json", openapi_document, format_tgi_error, quiet=True),
    Route("/api-doc/openapi.json", openapi_document, format_tgi_error, quiet=True),
)
