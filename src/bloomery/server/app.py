"""The ASGI application, and the uvicorn server that runs it.

LoadingApp answers from the first second on, also while a model is downloaded. InferenceApp takes
over as soon as the model is known.

The application routes by an exact table. Each request goes through these steps in this order: check
its headers, its Host and its API key, find its route, run the handler, format an error as the
route's API does, and log one line. The line has times and counts, never a prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import uvicorn
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bloomery.errors import RequestFailed
from bloomery.server.auth import AllowedHosts, ApiKeys
from bloomery.server.backend import InferenceBackend
from bloomery.server.errors import (
    ClientDisconnected,
    ClientStalled,
    DeadlineExceeded,
    ErrorFormatter,
    HttpError,
    describe_error,
    error_formatter_for_path,
    unavailable_error,
)
from bloomery.server.generation import EventStreamResponse
from bloomery.server.limits import ABORT_CONNECTION, check_headers
from bloomery.server.routes import build_routes
from bloomery.server.schema import encode_json
from bloomery.server.service import (
    HttpCall,
    InferenceService,
    Route,
    ServerSettings,
    choose_request_id,
)
from bloomery.server.tracing import TraceRecorder
from bloomery.text.tokenizer import Tokenizer

log = logging.getLogger("bloomery.server")

NUM_ACCEPTORS = 8  # connections accepted in one iteration of the event loop
MEMORY_CHECK_SECONDS = 1.0
DRAIN_REPORT_SECONDS = 5.0  # between two log lines about the requests that are waited for
LOADING_RETRY_SECONDS = 5
LOADING_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="2">
<title>Bloomery is starting</title>
<style>body{font:1.1rem system-ui,sans-serif;margin:20vh auto;max-width:34rem;padding:0 1rem;
color-scheme:light dark}</style>
<h1>Bloomery is starting</h1>
<p>The model is being located or downloaded. This page opens the chat when it is there.</p></html>
"""
LOADING_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def create_app(
    backend: InferenceBackend,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    traces: TraceRecorder | None = None,
) -> ASGIApp:
    """The application with all its routes, behind CORS if any origin is allowed."""
    service = InferenceService(backend, tokenizer, settings, build_routes(settings))
    app: ASGIApp = InferenceApp(service, traces)
    if settings.cors_origins:
        app = CORSMiddleware(app, settings.cors_origins, allow_methods=["*"], allow_headers=["*"])
    return app


class LoadingApp:
    """Answers 503 "loading" until the app of the model is attached, then hands requests to it."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None
        self.lifespan: asyncio.Future[None] | None = None
        self.lifespan_messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._handle_lifespan(receive, send)
        elif self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._loading_response(scope)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1013})

    async def attach(self, app: ASGIApp) -> None:
        """Start `app` and hand all further requests to it."""
        started = asyncio.Event()

        async def on_lifespan_message(message: Any) -> None:
            started.set()

        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        receive = self.lifespan_messages.get
        self.lifespan = asyncio.ensure_future(app(scope, receive, on_lifespan_message))
        self.lifespan_messages.put_nowait({"type": "lifespan.startup"})
        await started.wait()
        self.app = app

    async def _handle_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self.lifespan is not None:
            self.lifespan_messages.put_nowait({"type": "lifespan.shutdown"})
            await self.lifespan
        await send({"type": "lifespan.shutdown.complete"})

    def _loading_response(self, scope: Scope) -> Response:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        headers = {"retry-after": str(LOADING_RETRY_SECONDS)}
        accept = Headers(scope=scope).get("accept", "")
        if path == "/" and "text/html" in accept:
            headers["content-security-policy"] = LOADING_PAGE_POLICY
            return Response(LOADING_PAGE, 503, headers, "text/html")
        content: Any
        if path == "/live":
            return Response(encode_json({"live": True}), media_type="application/json")
        if path == "/ready":
            detail = "the model is being located or downloaded"
            content = {"state": "loading", "model": "", "progress": 0.0, "detail": detail}
        else:
            error = unavailable_error("the model is being loaded", LOADING_RETRY_SECONDS)
            _, content = error_formatter_for_path(path)(error.info, "")
        return Response(encode_json(content), 503, headers, "application/json")


class InferenceApp:
    """The ASGI application: authentication, routing, error responses and the access log."""

    def __init__(self, service: InferenceService, traces: TraceRecorder | None = None):
        settings = service.settings
        self.service = service
        self.traces = traces
        self.api_keys = ApiKeys(settings.keys)
        self.allowed_hosts = AllowedHosts(settings.host, settings.allowed_hosts)
        self.exact_routes: dict[str, dict[str, Route]] = {}  # path -> method -> route
        self.parameter_routes: dict[str, dict[str, Route]] = {}  # pattern -> method -> route
        for route in service.routes:
            if "{" in route.path:
                pattern = path_pattern(route.path)
                self.parameter_routes.setdefault(pattern, {})[route.method] = route
            else:
                self.exact_routes.setdefault(route.path, {})[route.method] = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._handle_http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._handle_lifespan(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _handle_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        memory_watch = asyncio.create_task(self._watch_memory())
        if self.service.settings.warm:
            self.service.warm_up()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        memory_watch.cancel()
        self.service.tokenizer_pool.close()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)
        await send({"type": "lifespan.shutdown.complete"})

    async def _watch_memory(self) -> None:
        while True:
            self.service.relieve_memory_pressure()
            self.service.metrics.record_sample()
            await asyncio.sleep(MEMORY_CHECK_SECONDS)

    async def _handle_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.monotonic()
        headers = Headers(scope=scope)
        request_id = choose_request_id(headers)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        methods, path_parameters = self._find_routes(path)
        method = scope["method"]
        if method == "HEAD" and "GET" in methods:
            method = "GET"
        route = methods.get(method)
        try:
            tenant = self._authenticate(scope, headers, route)
            if route is None:
                raise self._no_route_error(methods)
        except HttpError as error:
            formatter = route.error_formatter if route else error_formatter_for_path(path)
            response = self._error_response(error, formatter, request_id)
            await response(scope, receive, send)
            self._log_request(route, scope, request_id, response.status_code, arrived, {})
            return
        call = HttpCall(
            self.service, route, scope, receive, headers, request_id, tenant, path_parameters
        )
        with call.cleanup:
            status = await self._respond(call, send)
        if self.traces is not None and route.generates:
            self.traces.record(call, status)
        self._log_request(route, scope, request_id, status, arrived, call.log_fields)

    def _find_routes(self, path: str) -> tuple[Mapping[str, Route], tuple[str, ...]]:
        """The routes of a path by method, and the values of its {parameters}.

        The pattern with the shortest values matches best.
        """
        if methods := self.exact_routes.get(path):
            return methods, ()
        matching: list[tuple[Mapping[str, Route], tuple[str, ...]]] = []
        for pattern, methods in self.parameter_routes.items():
            if match := re.fullmatch(pattern, path, re.DOTALL):
                matching.append((methods, match.groups()))
        return min(matching, key=lambda entry: len("".join(entry[1])), default=({}, ()))

    def _authenticate(self, scope: Scope, headers: Headers, route: Route | None) -> str:
        """Check headers, Host and API key, and return the tenant.

        A path that does not exist needs a key too, so that no caller without one can probe paths.
        """
        check_headers(scope["headers"], self.service.limits)
        self.allowed_hosts.check(headers)
        if route is not None and route.public:
            return ""
        return self.api_keys.authenticate(headers)

    def _no_route_error(self, methods: Mapping[str, Route]) -> HttpError:
        if not methods:
            message = "there is no such route; GET /docs lists them"
            return HttpError(404, message, "not_found", "not_found")
        allowed = ", ".join(sorted(methods))
        message = f"this route takes {allowed}"
        return HttpError(405, message, "method_not_allowed", "not_allowed", allow=allowed)

    async def _respond(self, call: HttpCall, send: Send) -> int:
        """Run the handler, send its response or its error, and return the status."""
        if call.route.generates:
            self.service.metrics.requests += 1
        response: Any = None
        try:
            if call.route.generates:
                await self.service.wait_for_turn(call.tenant)
            response = await self._run_handler(call)
            response.headers["x-request-id"] = call.request_id
            if isinstance(response, EventStreamResponse):
                # Sent in here, because an error before its first event becomes a response below.
                await response(call.scope, call.receive, send)
                return response.status_code
        except ClientDisconnected as error:
            call.record_failure(error)
            if isinstance(error, ClientStalled):
                self._abort_connection(call.scope)
            return 499
        except Exception as error:
            if isinstance(error, RequestFailed):
                # The engine was told to stop after the request had been admitted.
                error = self.service.engine_error() or error
            error = self.service.explain_media_error(error)
            call.record_failure(error)
            response = self._error_response(error, call.error_formatter, call.request_id)
        await response(call.scope, call.receive, send)
        return int(response.status_code)

    async def _run_handler(self, call: HttpCall) -> Any:
        """Run the handler within the request's deadline and return its response."""
        try:
            async with asyncio.timeout(self.service.limits.deadline_seconds):
                return await call.route.handler(call)
        except TimeoutError:
            raise DeadlineExceeded from None

    def _abort_connection(self, scope: Scope) -> None:
        extension = scope.get("extensions", {}).get(ABORT_CONNECTION)
        if extension:
            extension["abort"]()

    def _error_response(
        self, error: Exception, formatter: ErrorFormatter, request_id: str
    ) -> Response:
        info = describe_error(error)
        status, body = formatter(info, request_id)
        headers = {**info.headers, "x-request-id": request_id}
        return Response(encode_json(body), status, headers, "application/json")

    def _log_request(
        self,
        route: Route | None,
        scope: Scope,
        request_id: str,
        status: int,
        arrived: float,
        log_fields: dict[str, Any],
    ) -> None:
        """Count the response and log one line.

        The path is the one in the route table, because a client's path may hold anything.
        """
        path = route.path if route else "unknown"
        seconds = round(time.monotonic() - arrived, 4)
        self.service.metrics.responses[path, str(status)] += 1
        # A probe of a server that is not ready is no error.
        is_quiet = route is not None and route.quiet and (status < 400 or status == 503)
        level = logging.DEBUG if is_quiet else logging.INFO
        if not log.isEnabledFor(level):
            return
        head = {"method": scope["method"], "path": path, "status": status, "seconds": seconds}
        details = [f"{name}={value}" for name, value in log_fields.items()]
        message = " ".join([*map(str, head.values()), *details])
        log.log(level, message, extra={"fields": {"request": request_id, **head, **log_fields}})


def path_pattern(path: str) -> str:
    """The regular expression of a path. The only parameter of a path may contain slashes."""
    literals = map(re.escape, re.split(r"\{\w+\}", path))
    return ("(.+)" if path.count("{") == 1 else "([^/]+)").join(literals)


class DrainableEngine(Protocol):
    """An engine, or several, that can finish its open requests before it ends."""

    @property
    def num_open_requests(self) -> int: ...

    async def close(self, drain_seconds: float = 0.0) -> None: ...


class InferenceServer(uvicorn.Server):
    """uvicorn's server without signal handling, which is left to the caller.

    uvicorn would raise a caught signal again at the end, but a requested stop is not a failure.
    """

    draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on several descriptors of each socket.

        In one iteration of its loop, libuv accepts one connection per descriptor. While streams
        keep the loop busy, new connections would otherwise wait for seconds to be accepted, even
        to be refused. All descriptors share one queue of connections, which has the length that was
        set last. A client that finds it full tries again after a second.
        """
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        listeners = [listener for server in self.servers for listener in server.sockets]
        for descriptor in [listener.fileno() for listener in listeners]:
            for _ in range(NUM_ACCEPTORS - 1):
                duplicate = socket.socket(fileno=os.dup(descriptor))
                server = await loop.create_server(
                    self._create_protocol,
                    sock=duplicate,
                    ssl=self.config.ssl,
                    backlog=self.config.backlog,
                )
                self.servers.append(server)

    def _create_protocol(self) -> asyncio.Protocol:
        protocol_class: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = protocol_class(
            self.config, self.server_state, self.lifespan.state
        )
        return protocol

    def stop(self, engine: DrainableEngine | None, drain_seconds: float) -> None:
        """Refuse new requests and give running ones `drain_seconds`; a second call ends at once.

        The server listens until the engine has drained, so that new requests get a 503.
        """
        if engine is None:  # the model is still being located
            self.should_exit = True
        elif self.draining is None:
            self.draining = asyncio.create_task(self._drain(engine, drain_seconds))
        else:
            log.info("stopping at once; cut off: %s", count_open_requests(engine) or "nothing")
            self.force_exit = True
            self.should_exit = True
            self.closing = asyncio.create_task(engine.close(0.0))

    async def _drain(self, engine: DrainableEngine, drain_seconds: float) -> None:
        """Close the engine, report what is waited for, then let the server exit."""
        closing = asyncio.create_task(engine.close(drain_seconds))
        await asyncio.sleep(0)  # the engine is draining from here on
        if engine.num_open_requests:
            log.info(
                "stopping: waiting up to %.0f s for %s; a second signal (Ctrl-C) stops at once",
                drain_seconds,
                count_open_requests(engine),
            )
        else:
            log.info("stopping")
        while not (await asyncio.wait([closing], timeout=DRAIN_REPORT_SECONDS))[0]:
            log.info("stopping: waiting for %s", count_open_requests(engine) or "the engine")
        self.should_exit = True


def count_open_requests(engine: DrainableEngine) -> str:
    """The number of open requests in words; empty if there are none."""
    number = engine.num_open_requests
    return f"{number} open request{'s' if number > 1 else ''}" if number else ""
