"""The API process of `bloomery serve`: plans, starts the engine process and serves HTTP.

The server answers probes and shows its page while the model loads. This module only connects the
parts. It has no torch: the weights are in the engine process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
import uvloop
from starlette.types import ASGIApp

from bloomery.artifacts.locate import ModelArtifact
from bloomery.artifacts.locate_adapter import AdapterAllowList, locate_adapter
from bloomery.cache_groups import token_capacity
from bloomery.config import EngineConfig, EnginePlan, ServerConfig
from bloomery.describe import build_engine_plan
from bloomery.engine.adapter_catalog import NamedAdapter, parse_lora_modules
from bloomery.engine.client import EngineClient, EngineTimeouts
from bloomery.engine.replicas import ReplicaSet, plan_for_replica
from bloomery.errors import BloomeryError, ConfigError, ModelNotFound
from bloomery.hardware import has_ample_memory, has_spare_cores
from bloomery.ipc import ChildHandle, build_engine_command
from bloomery.logs import (
    configure_logging,
    process_age_seconds,
    resolve_log_format,
    show_load_progress,
)
from bloomery.recommend import recommend_model
from bloomery.server.adapters import NAMES_BASE_MODEL, AdapterSettings
from bloomery.server.app import InferenceServer, LoadingApp, create_app
from bloomery.server.limits import ServerLimits, bounded_protocol
from bloomery.server.service import PLACEHOLDER_MODELS, ServerSettings
from bloomery.server.tracing import create_trace_recorder
from bloomery.text.load import load_tokenizer
from bloomery.text.tokenizer import Tokenizer
from bloomery.text.tokenizer_pool import release_free_memory

log = logging.getLogger("bloomery")

# Seconds that uvicorn may take to close connections after the drain time is over.
SHUTDOWN_GRACE_SECONDS = 5
# Thresholds of the garbage collector, in objects of each generation. Disconnected clients leave
# reference cycles, so it must run; a collection is short because older objects are frozen. The
# measurements are in benchmarks/LOG.md.
GC_THRESHOLDS = (10_000, 4, 2)


AnyEngineClient = EngineClient | ReplicaSet
ResultT = TypeVar("ResultT")


def serve(
    config: EngineConfig,
    server_config: ServerConfig,
    listeners: Sequence[socket.socket],
    prestarted: ChildHandle | None = None,
) -> int:
    """Serve until a signal or until the engine fails for good; return the exit status.

    `listeners` are bound to the server's address. `prestarted` is an engine process that was
    started before this module was imported.
    """
    log_format = resolve_log_format(server_config.log_format)
    configure_logging(log_format, level=server_config.log_level)
    for noisy_logger in ("uvicorn", "uvicorn.error", "asyncio"):
        logging.getLogger(noisy_logger).setLevel(logging.WARNING)
    start = ServerStart(config, server_config, log_format, prestarted)
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    return runner.run(run_server(start.plan, start.build_app, server_config, listeners))


class ServerStart:
    """The two blocking parts of the start: locating the model, and loading its tokenizer."""

    def __init__(
        self,
        config: EngineConfig,
        server_config: ServerConfig,
        log_format: str,
        prestarted: ChildHandle | None,
    ):
        self.config = config
        if server_config.implies_lora:
            self.config = replace(config, enable_lora=True)
        self.server_config = server_config
        self.log_format = log_format
        self.prestarted = prestarted
        self.limits = ServerLimits.parse(server_config.limits)
        self.keys = server_config.api_keys
        self.artifact: ModelArtifact | None = None
        self.engine_plan: EnginePlan | None = None

    def plan(self) -> AnyEngineClient:
        """Locate the model, download it if need be, and create the client of its engine."""
        plan, artifact = build_engine_plan(self.config)
        # The engine looks for links out of these folders whenever it reads an adapter.
        folders = build_allow_list(self.server_config).folders
        plan = replace(plan, lora_folders=tuple(map(str, folders)))
        self.artifact = artifact
        self.engine_plan = plan
        log_plan(plan, artifact.origin)
        timeouts = replace(
            EngineTimeouts.for_device(plan.device, self.limits.step_seconds),
            queue_seconds=self.limits.queue_seconds,
            max_restarts=self.limits.restarts,
        )
        return create_engine_client(
            plan, self.server_config, timeouts, self.log_format, self.prestarted
        )

    def build_app(self, client: AnyEngineClient) -> Callable[[], ASGIApp]:
        """Load the tokenizer; the returned function creates the app in the event loop."""
        artifact = self.artifact
        plan = self.engine_plan
        assert artifact is not None and plan is not None, "plan() comes first"
        tokenizer = load_tokenizer(artifact, self.config.chat_template)
        release_free_memory()
        if self.config.response_format:
            check_response_format(self.config.response_format)
        log_sampling_defaults(tokenizer)
        settings = build_server_settings(self.config, self.server_config, artifact, plan)
        if settings.demo and settings.recommended_model:
            log_recommendation(settings.recommended_model)
        traces = None
        if self.server_config.otlp_endpoint:
            traces = create_trace_recorder(
                self.server_config.otlp_endpoint, self.server_config.otlp_service_name
            )
        return lambda: create_app(client, tokenizer, settings, traces)


def build_server_settings(
    config: EngineConfig,
    server_config: ServerConfig,
    artifact: ModelArtifact,
    plan: EnginePlan,
) -> ServerSettings:
    """Build the settings of the HTTP app. The first served model name is the main one."""
    model_names = server_config.split_list(server_config.served_model_name) or (artifact.name,)
    model = model_names[0]
    recommendation = recommend_model(config.device) if artifact.is_demo else None
    return ServerSettings(
        model=model,
        aliases=tuple(name for name in (*model_names[1:], artifact.name) if name != model),
        keys=server_config.api_keys,
        host=server_config.host,
        allowed_hosts=server_config.split_list(server_config.allowed_hosts),
        cors_origins=server_config.split_list(server_config.cors_origins),
        open_metrics=server_config.open_metrics,
        revision=artifact.revision,
        text_part_only=plan.text_part_only,
        limits=ServerLimits.parse(server_config.limits),
        warm=True,
        prepare_grammars=has_ample_memory(),
        has_spare_cores=has_spare_cores(),
        response_format=Path(config.response_format) if config.response_format else None,
        demo=artifact.is_demo,
        recommended_model=recommendation.to_dict() if recommendation else None,
        lora=build_adapter_settings(server_config, plan, (*model_names, artifact.name)),
    )


def build_adapter_settings(
    server_config: ServerConfig, plan: EnginePlan, model_names: Sequence[str]
) -> AdapterSettings:
    """Find the LoRA adapters that were named at start, and download them if need be."""
    modules = []
    for name, source in parse_lora_modules(server_config.lora_modules or ""):
        if name in (*model_names, *PLACEHOLDER_MODELS):
            raise ConfigError(f"lora_modules: {NAMES_BASE_MODEL.format(name)}")
        try:
            path = locate_adapter(source)
        except ModelNotFound as error:
            raise ConfigError(f"lora_modules: {name}: {error}") from None
        modules.append(NamedAdapter(name, name, str(path), source))
    return AdapterSettings(
        enabled=plan.enable_lora,
        modules=tuple(modules),
        allow_list=build_allow_list(server_config),
        max_loras=plan.max_loras,
        max_cpu_loras=plan.max_cpu_loras,
    )


def build_allow_list(server_config: ServerConfig) -> AdapterAllowList:
    return AdapterAllowList(server_config.split_list(server_config.lora_allow))


def check_response_format(path: str) -> None:
    """Report an error in the file now, not at the first request that needs it."""
    from bloomery.response_format import load_response_format

    load_response_format(Path(path))


def create_engine_client(
    plan: EnginePlan,
    server_config: ServerConfig,
    timeouts: EngineTimeouts,
    log_format: str,
    prestarted: ChildHandle | None,
) -> AnyEngineClient:
    """Create the client of one engine process, or of several replicas."""
    num_replicas = server_config.replicas
    log_level = server_config.log_level
    if num_replicas == 1:
        num_ranks = plan.tensor_parallel_size * plan.pipeline_parallel_size
        is_local = num_ranks == 1 and plan.executor == "auto"
        preload_device = plan.device if is_local and plan.device in ("cpu", "cuda") else None
        command = build_engine_command(log_format, preload_device, log_level)
        return EngineClient(plan, command, timeouts, prestarted=prestarted)
    replica_plans = [plan_for_replica(plan, i, num_replicas) for i in range(num_replicas)]
    command = build_engine_command(log_format, log_level=log_level)
    clients = [EngineClient(replica_plan, command, timeouts) for replica_plan in replica_plans]
    return ReplicaSet(clients)


# ---- serving -------------------------------------------------------------------------------------


async def run_server(
    plan: Callable[[], AnyEngineClient],
    build_app: Callable[[AnyEngineClient], Callable[[], ASGIApp]],
    server_config: ServerConfig,
    listeners: Sequence[socket.socket],
    limits: ServerLimits | None = None,
) -> int:
    """Serve until a signal or until the engine fails for good; return the exit status.

    The server answers 503 from the beginning. `plan` and `build_app` take long, so they run in a
    thread. The engine loads while the app is built.
    """
    limits = limits or ServerLimits.parse(server_config.limits)
    loading_app = LoadingApp()
    server = InferenceServer(build_uvicorn_config(loading_app, server_config, limits))
    serving = asyncio.create_task(server.serve(sockets=list(listeners)))
    client: AnyEngineClient | None = None

    def stop() -> None:
        server.stop(client, server_config.drain_seconds)

    event_loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        event_loop.add_signal_handler(signal_number, stop)
    try:
        planning = run_in_thread(plan)
        await asyncio.wait((planning, serving), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            return finish_serving(server, serving)
        client = planning.result()
        await client.start()
        building = run_in_thread(lambda: build_app(client))
        await asyncio.wait((building, serving), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            await loading_app.attach(building.result()())
            return await watch_engine(client, server, serving, server_config)
        return finish_serving(server, serving)
    finally:
        server.should_exit = True
        if client is not None:
            await client.close()
        await asyncio.wait([serving])


def finish_serving(server: InferenceServer, serving: asyncio.Task[None]) -> int:
    """The exit status of a server that has ended. Its own error, if there is one, is raised."""
    serving.result()
    return 0 if server.started else 1


async def watch_engine(
    client: AnyEngineClient,
    server: InferenceServer,
    serving: asyncio.Task[None],
    server_config: ServerConfig,
) -> int:
    """Wait until the server ends or the engine fails for good; return the exit status."""
    startup = asyncio.create_task(report_startup(client, base_url(server_config)))
    failure = asyncio.create_task(client.wait_failed())
    try:
        await asyncio.wait((serving, failure), return_when=asyncio.FIRST_COMPLETED)
        if failure.done() and not server.should_exit:
            log.error("%s", failure.result())
            server.should_exit = True
        await serving
        failed = failure.done()
    finally:
        startup.cancel()
        failure.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(startup, failure, return_exceptions=True)
    return 1 if failed else finish_serving(server, serving)


def build_uvicorn_config(
    app: ASGIApp, server_config: ServerConfig, limits: ServerLimits
) -> uvicorn.Config:
    """Build uvicorn's configuration. Errors in the certificate files are reported here."""
    if server_config.ssl_certfile and server_config.ssl_keyfile:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(server_config.ssl_certfile, server_config.ssl_keyfile)
        except OSError as error:
            raise ConfigError(
                f"ssl_certfile {server_config.ssl_certfile} and ssl_keyfile "
                f"{server_config.ssl_keyfile} cannot be used: {error.strerror or error}"
            ) from None
    return uvicorn.Config(
        app,
        server_config.host,
        server_config.port,
        http=bounded_protocol(limits),
        lifespan="on",
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(limits.idle_seconds),
        log_config=None,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_SECONDS,
        ssl_certfile=server_config.ssl_certfile,
        ssl_keyfile=server_config.ssl_keyfile,
    )


def run_in_thread(function: Callable[[], ResultT]) -> asyncio.Future[ResultT]:
    """Run `function` in a thread that does not keep the process alive, unlike asyncio's own."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ResultT] = loop.create_future()

    def set_result(result: ResultT | None, error: BaseException | None) -> None:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: ResultT | None = None
        raised: BaseException | None = None
        try:
            result = function()
        except BaseException as error:
            raised = error
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            loop.call_soon_threadsafe(set_result, result, raised)

    threading.Thread(target=run, daemon=True).start()
    return future


# ---- start-up report -----------------------------------------------------------------------------


def base_url(server_config: ServerConfig) -> str:
    scheme = "https" if server_config.ssl_certfile else "http"
    host = server_config.host
    if ":" in host:
        host = f"[{host}]"
    return f"{scheme}://{host}:{server_config.port}"


async def report_startup(client: AnyEngineClient, url: str) -> None:
    """Show a bar while the model loads, then log what the engine can hold and where to connect."""
    ready = asyncio.create_task(client.ready())

    def read_progress() -> tuple[str, float]:
        return client.status.detail, client.status.progress or 0.0

    await show_load_progress(ready, read_progress)
    try:
        capacity = await ready
    except BloomeryError:
        return  # watch_engine logs the reason, which it gets from wait_failed
    freeze_garbage_collector()
    for note in capacity.notes:
        log.warning(note)
    log.info(
        "ready in %.1f s: KV cache for %d tokens, %d sequences at once, up to %d tokens each",
        process_age_seconds(),
        token_capacity(
            capacity.cache_groups, capacity.blocks, capacity.block_size, capacity.max_model_len
        ),
        capacity.max_num_seqs,
        capacity.max_model_len,
    )
    log.info(
        "open %s to chat; clients: OpenAI at %s/v1, TGI at %s; docs at %s/docs", url, url, url, url
    )


def log_sampling_defaults(tokenizer: Tokenizer) -> None:
    """Log how answers are sampled when a request does not say it."""
    values = [f"{name} {value:g}" for name, value in tokenizer.sampling_defaults.items()]
    defaults = ", ".join(values) or "temperature 1"
    log.info("sampling defaults (%s): %s", tokenizer.sampling_source, defaults)


def log_recommendation(recommended: Mapping[str, Any]) -> None:
    log.info(
        "this small model is for a first look; a better one for this machine: bloomery serve %s "
        "(%.1f GB, about %.0f tokens/s); `bloomery models` lists more",
        recommended["arguments"],
        recommended["gigabytes"],
        recommended["tokens_per_second"],
    )


def freeze_garbage_collector() -> None:
    """Exclude everything that exists by now from garbage collection.

    These objects live until the process ends. Scanning them would stall the event loop and all
    open streams.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def log_plan(plan: EnginePlan, origin: str) -> None:
    """Log the model, where it was found, and how it will run."""
    precision = [plan.dtype]
    if plan.quantization != "auto":
        precision.append(f"(weights in {plan.quantization})")
    if plan.kv_cache_dtype != "auto":
        precision.append(f"(KV cache in {plan.kv_cache_dtype})")
    if plan.tensor_parallel_size * plan.pipeline_parallel_size > 1:
        layout = f"tp {plan.tensor_parallel_size} x pp {plan.pipeline_parallel_size}"
    elif plan.device == "cpu":
        layout = f"{plan.threads} threads"
    else:
        layout = "GPU"
    log.info(
        "%s (%s): %s on %s, %s, max_model_len %d, max_num_seqs %d, max_num_batched_tokens %d, "
        "prefix cache %s",
        plan.name,
        origin,
        " ".join(precision),
        plan.device,
        layout,
        plan.max_model_len,
        plan.max_num_seqs,
        plan.max_num_batched_tokens,
        "on" if plan.prefix_cache else "off",
    )
    if plan.text_part_only:
        log.info(
            "%s is a vision model: only its text part is served, images are refused", plan.name
        )
