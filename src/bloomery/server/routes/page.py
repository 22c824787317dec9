"""The web page and the API's description: files that lie in web/, and what openapi.py writes.

No page here needs anything from elsewhere, and a strict policy forbids it to try.
"""

from __future__ import annotations

import gzip
from functools import lru_cache
from mimetypes import guess_type
from pathlib import Path

from starlette.responses import Response
from starlette.types import ASGIApp

from bloomery.server import openapi
from bloomery.server.call import Call, Route
from bloomery.server.errors import Refusal, tgi
from bloomery.server.routes import status

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
GUARDS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
FOREVER = "public, max-age=31536000, immutable"  # an asset's name holds a hash of what is in it
WEB = Path(__file__).parent.parent / "web"


async def root(call: Call) -> ASGIApp:
    """The web page for a browser, TGI's health check for everybody else."""
    if "text/html" not in call.headers.get("accept", ""):
        return await status.health(call)
    return served(call, "index.html", "no-cache")


async def asset(call: Call) -> ASGIApp:
    """A file of the web page."""
    return served(call, f"assets/{call.parameter}", FOREVER)


def served(call: Call, name: str, caching: str) -> Response:
    found = contents().get(name)
    if found is None:
        raise Refusal(404, "there is no such file", "not_found")
    plain, packed, media = found
    headers = {**GUARDS, "cache-control": caching, "vary": "accept-encoding"}
    if "gzip" in call.headers.get("accept-encoding", "") and len(packed) < len(plain):
        return Response(packed, headers={**headers, "content-encoding": "gzip"}, media_type=media)
    return Response(plain, headers=headers, media_type=media)


@lru_cache(maxsize=1)
def contents() -> dict[str, tuple[bytes, bytes, str]]:
    """The page's files by path: as they are, compressed, their type. Read once; no path of a client's is opened."""
    found: dict[str, tuple[bytes, bytes, str]] = {}
    for path in (path for path in WEB.rglob("*") if path.is_file()):
        data = path.read_bytes()
        media = guess_type(path.name)[0] or "text/plain"
        found[path.relative_to(WEB).as_posix()] = data, gzip.compress(data, mtime=0), media
    return found


async def document(call: Call) -> ASGIApp:
    """This API, described in OpenAPI 3.1."""
    return call.json(openapi.document(call.service.routes, call.service.settings.keys != ()))


async def docs(call: Call) -> ASGIApp:
    """This API, described for people."""
    text = openapi.page(openapi.document(call.service.routes, call.service.settings.keys != ()))
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
    )
    return Response(
        text, headers={**GUARDS, "content-security-policy": policy}, media_type="text/html"
    )


ROUTES = (
    Route("/", root, tgi, open=True, quiet=True, media=()),
    Route("/assets/{file}", asset, tgi, open=True, quiet=True, media=("*/*",)),
    Route("/docs", docs, tgi, quiet=True, media=("text/html",)),
    Route("/openapi.json", document, tgi, quiet=True),
    Route("/api-doc/openapi.json", document, tgi, quiet=True),
)
