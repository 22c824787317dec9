"""The ASGI application: an exact table of routes, and what happens to every request before and after its handler.

In this order: headers are counted, the Host is looked at, the key is checked, the route is found, the handler runs, an
error becomes the API's own words, and one line is logged. The line has times and counts, never a prompt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bloomery.server.auth import Hosts, Keys
from bloomery.server.backend import Backend
from bloomery.server.call import Call, Route, request_id
from bloomery.server.errors import ClientGone, Dialect, Late, Refusal, Stalled, dialect_of, problem
from bloomery.server.limits import check_headers
from bloomery.server.routes import table
from bloomery.server.service import Service, Settings
from bloomery.server.streaming import HANG_UP, EventStream, encode
from bloomery.server.tracing import Traces
from bloomery.text.tokenizer import Tokenizer

log = logging.getLogger("bloomery.server")


def create_app(
    backend: Backend, tokenizer: Tokenizer, settings: Settings, traces: Traces | None = None
) -> ASGIApp:
    app: ASGIApp = Application(Service(backend, tokenizer, settings, table(settings)), traces)
    if settings.cors_origins:
        app = CORSMiddleware(app, settings.cors_origins, allow_methods=["*"], allow_headers=["*"])
    return app


class Application:
    def __init__(self, service: Service, traces: Traces | None = None):
        self.service = service
        self.traces = traces
        settings = service.settings
        self.keys = Keys(settings.keys)
        self.hosts = Hosts(settings.host, settings.allowed_hosts)
        self.exact: dict[str, dict[str, Route]] = {}
        self.open_ended: dict[str, dict[str, Route]] = {}  # by what stands before the {parameter}
        for route in service.routes:
            fixed, brace, _ = route.path.partition("{")
            (self.open_ended if brace else self.exact).setdefault(fixed, {})[route.method] = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        watch = asyncio.create_task(self._watch_memory())
        if self.service.settings.warm:
            self.service.apart.warm()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        watch.cancel()
        self.service.apart.close()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)
        await send({"type": "lifespan.shutdown.complete"})

    async def _watch_memory(self) -> None:
        while True:
            self.service.relieve()
            await asyncio.sleep(1.0)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        headers = Headers(scope=scope)
        id = request_id(headers)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        methods, parameter = self._find(path)
        method = "GET" if scope["method"] == "HEAD" and "GET" in methods else scope["method"]
        route = methods.get(method)
        try:
            salt = self._enter(scope, headers, route)
            if route is None:
                raise self._nothing(methods)
        except Refusal as error:
            dialect = route.dialect if route else dialect_of(path)
            response = self._refuse(error, dialect, id)
            await response(scope, receive, send)
            self._log(route, scope, id, response.status_code, began, {})
            return
        call = Call(self.service, route, scope, receive, headers, id, salt, parameter)
        with call.cleanup:
            status = await self._answer(call, send)
        if self.traces is not None and route.generates:
            self.traces.record(call, status)
        self._log(route, scope, id, status, began, call.facts)

    def _find(self, path: str) -> tuple[Mapping[str, Route], str]:
        """The routes of a path by method, and what stands for its {parameter}."""
        if found := self.exact.get(path):
            return found, ""
        for fixed, methods in self.open_ended.items():
            if path.startswith(fixed) and len(path) > len(fixed):
                return methods, path[len(fixed) :]
        return {}, ""

    def _enter(self, scope: Scope, headers: Headers, route: Route | None) -> str:
        """The salt of the caller's key. What no open route claims needs a key, also what does not exist."""
        check_headers(scope["headers"], self.service.limits)
        self.hosts.check(headers)
        return "" if route and route.open else self.keys.check(headers)

    def _nothing(self, methods: Mapping[str, Route]) -> Refusal:
        if not methods:
            return Refusal(
                404, "there is no such route; GET /docs lists them", "not_found", "not_found"
            )
        allowed = ", ".join(sorted(methods))
        return Refusal(
            405, f"this route takes {allowed}", "method_not_allowed", "not_allowed", allow=allowed
        )

    async def _answer(self, call: Call, send: Send) -> int:
        if call.route.generates:
            self.service.metrics.requests += 1
        response: Any = None
        try:
            if call.route.generates:
                self.service.knock(call.salt)
            response = await self._handle(call)
            response.headers["x-request-id"] = call.id
            if isinstance(
                response, EventStream
            ):  # whose errors before the first event are answered here
                await response(call.scope, call.receive, send)
                return response.status_code
        except ClientGone as error:
            call.fail(error)
            if isinstance(error, Stalled) and (
                line := call.scope.get("extensions", {}).get(HANG_UP)
            ):
                line["now"]()
            return 499
        except Exception as error:
            call.fail(error)
            response = self._refuse(error, call.dialect, call.id)
        await response(call.scope, call.receive, send)
        return int(response.status_code)

    async def _handle(self, call: Call) -> Any:
        """Whatever a handler does before it has an answer or a stream of one, it has the request's time for it."""
        try:
            async with asyncio.timeout(self.service.limits.deadline_seconds):
                return await call.route.handler(call)
        except TimeoutError:
            raise Late from None

    def _refuse(self, error: Exception, dialect: Dialect, id: str) -> Response:
        found = problem(error)
        status, body = dialect(found, id)
        return Response(
            encode(body), status, {**found.headers, "x-request-id": id}, "application/json"
        )

    def _log(
        self,
        route: Route | None,
        scope: Scope,
        id: str,
        status: int,
        began: float,
        facts: dict[str, Any],
    ) -> None:
        """One line a request. The path is the table's own, never what a client wrote: that may not be a line."""
        path = route.path if route else "unknown"
        seconds = round(time.monotonic() - began, 4)
        self.service.metrics.responses[path, str(status)] += 1
        level = logging.DEBUG if route and route.quiet and status < 400 else logging.INFO
        if log.isEnabledFor(level):
            head = {"method": scope["method"], "path": path, "status": status, "seconds": seconds}
            said = " ".join(
                [*map(str, head.values()), *(f"{name}={value}" for name, value in facts.items())]
            )
            log.log(level, said, extra={"fields": {"request": id, **head, **facts}})
