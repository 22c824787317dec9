"""`bloomery serve`: the API process. Plans, starts the engine process, listens; usable while the model loads.

A composition root without torch: the weights are the engine's affair.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import uvicorn
import uvloop

from bloomery.config import Config, Plan, ServerConfig
from bloomery.describe import plan_for
from bloomery.engine.birth import Born, command
from bloomery.engine.client import EngineClient, Patience
from bloomery.engine.replicas import Replicas, share
from bloomery.errors import BloomeryError
from bloomery.logs import resolved, write
from bloomery.server.app import create_app
from bloomery.server.limits import Limits
from bloomery.server.protocol import bounded
from bloomery.server.service import Settings
from bloomery.server.tracing import traces_to
from bloomery.text.apart import trim
from bloomery.text.load import load_tokenizer

log = logging.getLogger("bloomery")

DOORS = 8  # connections taken in at a time


def serve(config: Config, wishes: ServerConfig, engine: Born | None = None) -> int:
    """`engine`: one that was started before this file was imported."""
    style = resolved(wishes.log_format)
    write(style)
    for noisy in ("uvicorn", "uvicorn.error", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    plan, artifact = plan_for(config)
    names = wishes.items(wishes.served_model_name) or (artifact.name,)
    settings = Settings(
        model=names[0],
        aliases=tuple(name for name in (*names[1:], artifact.name) if name != names[0]),
        keys=wishes.keys,
        host=wishes.host,
        allowed_hosts=wishes.items(wishes.allowed_hosts),
        cors_origins=wishes.items(wishes.cors_origins),
        open_metrics=wishes.open_metrics,
        revision=artifact.revision,
        limits=Limits.of(wishes.limits),
        warm=True,
    )
    tell(plan, artifact.found)
    limits = settings.limits
    patience = replace(
        Patience.for_device(plan.device, limits.step_seconds),
        queue=limits.queue_seconds,
        restarts=limits.restarts,
    )
    client = engines(plan, wishes.replicas, patience, style, engine)
    traces = (
        traces_to(wishes.otlp_endpoint, wishes.otlp_service_name) if wishes.otlp_endpoint else None
    )

    def make_app() -> Any:
        tokenizer = load_tokenizer(artifact)
        trim()
        return create_app(client, tokenizer, settings, traces)

    return asyncio.Runner(loop_factory=uvloop.new_event_loop).run(
        run(client, make_app, wishes, limits)
    )


def engines(
    plan: Plan, count: int, patience: Patience, style: str, born: Born | None
) -> EngineClient | Replicas:
    if count == 1:
        alone = plan.tp * plan.pp == 1 and plan.executor == "auto"
        return EngineClient(
            plan, command(style, plan.device == "cpu" and alone), patience, born=born
        )
    return Replicas(
        [
            EngineClient(share(plan, number, count), command(style), patience)
            for number in range(count)
        ]
    )


class Server(uvicorn.Server):
    """uvicorn's, leaving signals to us: it would raise them again in the end, and a wanted stop is no failure."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """libuv takes in one connection in a turn of its loop, so while streams keep it busy newcomers would queue
        outside for seconds, even those that are only to be refused: each further descriptor of the socket takes one."""
        await super().startup(sockets)
        for descriptor in [
            listener.fileno() for server in self.servers for listener in server.sockets
        ]:
            for _ in range(DOORS - 1):
                same = socket.socket(fileno=os.dup(descriptor))
                self.servers.append(
                    await asyncio.get_running_loop().create_server(self._connection, sock=same)
                )

    def _connection(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        made: asyncio.Protocol = kind(self.config, self.server_state, self.lifespan.state)
        return made

    def stop(self, close: Callable[[float], Coroutine[Any, Any, None]], seconds: float) -> None:
        """First nothing new, and answers may end within so many seconds; asked again, at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self.closing = asyncio.create_task(close(0 if self.force_exit else seconds))


async def run(
    client: EngineClient | Replicas,
    make_app: Callable[[], Any],
    wishes: ServerConfig,
    limits: Limits | None = None,
) -> int:
    """Until a signal, or until there will be no engine any more. The engine loads while the app is made."""
    limits = limits or Limits()
    await client.start()
    try:
        app = make_app()
    except BaseException:
        await client.close()
        raise
    server = Server(
        uvicorn.Config(
            app,
            wishes.host,
            wishes.port,
            http=bounded(limits),
            lifespan="on",
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(limits.idle_seconds),
            log_config=None,
            timeout_graceful_shutdown=int(wishes.drain_seconds) + 5,
        )
    )
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(
            name, server.stop, client.close, wishes.drain_seconds
        )
    url = f"http://{wishes.host}:{wishes.port}"
    watch = asyncio.create_task(loading(client, url))
    failure = asyncio.create_task(client.wait_failed())
    serving = asyncio.create_task(server.serve())
    try:
        await asyncio.wait((serving, failure), return_when=asyncio.FIRST_COMPLETED)
        if failure.done() and not server.should_exit:
            log.error("%s", failure.result())
            server.should_exit = True
        await serving
    finally:
        watch.cancel()
        await client.close()
        failed = failure.done()
        failure.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(watch, failure, return_exceptions=True)
    return 1 if failed or not server.started else 0


async def loading(client: EngineClient | Replicas, url: str) -> None:
    """A bar while weights are read, then where to go."""
    begun = time.monotonic()
    ready = asyncio.create_task(client.ready())
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("loading", total=1.0)
            while not ready.done():
                bar.update(
                    task,
                    completed=client.status.progress or 0.0,
                    description=client.status.detail or "loading",
                )
                await asyncio.wait((ready,), timeout=0.1)
    try:
        capacity = await ready
    except BloomeryError:
        return  # the owner is told by wait_failed
    gc.collect()
    gc.freeze()  # what is there by now stays, and would be looked through in the middle of a thousand streams
    gc.set_threshold(
        10_000, 4, 2
    )  # the rest is soon looked through, and a disconnect leaves rings behind
    for note in capacity.notes:
        log.warning(note)
    log.info(
        "ready in %.1f s: cache for %d tokens, %d sequences at once, up to %d tokens each",
        time.monotonic() - begun,
        capacity.blocks * capacity.block_size,
        capacity.max_num_seqs,
        capacity.max_length,
    )
    log.info(
        "open %s to chat; clients: OpenAI at %s/v1, TGI at %s; docs at %s/docs", url, url, url, url
    )


def tell(plan: Plan, found: str) -> None:
    rounded = {"weights": plan.quantize, "keys and values": plan.kv_cache_dtype}
    narrow = [f"({what} in {form})" for what, form in rounded.items() if form != "auto"]
    log.info(
        "%s (%s): %s on %s, %s, at most %d tokens, %d sequences and %d positions a step, prefix cache %s",
        plan.name,
        found,
        " ".join([plan.dtype, *narrow]),
        plan.device,
        f"tp {plan.tp} x pp {plan.pp}"
        if plan.tp * plan.pp > 1
        else f"{plan.threads} threads"
        if plan.device == "cpu"
        else "GPU",
        plan.max_length,
        plan.max_num_seqs,
        plan.max_num_batched_tokens,
        "on" if plan.prefix_cache else "off",
    )
