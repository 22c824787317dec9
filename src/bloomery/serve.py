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
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import uvicorn
import uvloop

from bloomery.artifacts.locate import ModelArtifact
from bloomery.config import EngineConfig, EnginePlan, ServerConfig
from bloomery.describe import build_engine_plan
from bloomery.engine.client import EngineClient, EngineTimeouts
from bloomery.engine.replicas import ReplicaSet, plan_for_replica
from bloomery.errors import BloomeryError
from bloomery.ipc import ChildHandle, build_engine_command
from bloomery.logs import configure_logging, resolve_log_format, show_load_progress
from bloomery.server.app import InferenceServer, create_app
from bloomery.server.limits import ServerLimits, bounded_protocol
from bloomery.server.service import ServerSettings
from bloomery.server.tracing import create_trace_recorder
from bloomery.text.load import load_tokenizer
from bloomery.text.tokenizer_pool import release_free_memory

log = logging.getLogger("bloomery")

# Seconds that uvicorn may take to close connections after the drain time is over.
SHUTDOWN_GRACE_SECONDS = 5
# Thresholds of the garbage collector, in objects of each generation. Disconnected clients leave
# reference cycles, so it must run; a collection is short because older objects are frozen. The
# measurements are in benchmarks/LOG.md.
GC_THRESHOLDS = (10_000, 4, 2)


def serve(
    config: EngineConfig, server_config: ServerConfig, prestarted: ChildHandle | None = None
) -> int:
    """Serve until a signal or until the engine fails for good; return the exit status.

    `prestarted` is an engine process that was started before this module was imported.
    """
    log_format = resolve_log_format(server_config.log_format)
    configure_logging(log_format)
    for noisy_logger in ("uvicorn", "uvicorn.error", "asyncio"):
        logging.getLogger(noisy_logger).setLevel(logging.WARNING)
    plan, artifact = build_engine_plan(config)
    settings = build_server_settings(server_config, artifact)
    log_plan(plan, artifact.origin)
    limits = settings.limits
    timeouts = replace(
        EngineTimeouts.for_device(plan.device, limits.step_seconds),
        queue_seconds=limits.queue_seconds,
        max_restarts=limits.restarts,
    )
    client = create_engine_client(plan, server_config.replicas, timeouts, log_format, prestarted)
    traces = None
    if server_config.otlp_endpoint:
        traces = create_trace_recorder(server_config.otlp_endpoint, server_config.otlp_service_name)

    def build_app() -> Any:
        tokenizer = load_tokenizer(artifact)
        release_free_memory()
        return create_app(client, tokenizer, settings, traces)

    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    return runner.run(run_server(client, build_app, server_config, limits))


def build_server_settings(server_config: ServerConfig, artifact: ModelArtifact) -> ServerSettings:
    """Build the settings of the HTTP app. The first served model name is the main one."""
    model_names = server_config.split_list(server_config.served_model_name) or (artifact.name,)
    model = model_names[0]
    return ServerSettings(
        model=model,
        aliases=tuple(name for name in (*model_names[1:], artifact.name) if name != model),
        keys=server_config.api_keys,
        host=server_config.host,
        allowed_hosts=server_config.split_list(server_config.allowed_hosts),
        cors_origins=server_config.split_list(server_config.cors_origins),
        open_metrics=server_config.open_metrics,
        revision=artifact.revision,
        limits=ServerLimits.parse(server_config.limits),
        warm=True,
    )


def create_engine_client(
    plan: EnginePlan,
    num_replicas: int,
    timeouts: EngineTimeouts,
    log_format: str,
    prestarted: ChildHandle | None,
) -> EngineClient | ReplicaSet:
    """Create the client of one engine process, or of several replicas."""
    if num_replicas == 1:
        num_ranks = plan.tensor_parallel_size * plan.pipeline_parallel_size
        is_local_cpu = plan.device == "cpu" and num_ranks == 1 and plan.executor == "auto"
        command = build_engine_command(log_format, preload_cpu=is_local_cpu)
        return EngineClient(plan, command, timeouts, prestarted=prestarted)
    replica_plans = [plan_for_replica(plan, i, num_replicas) for i in range(num_replicas)]
    command = build_engine_command(log_format)
    clients = [EngineClient(replica_plan, command, timeouts) for replica_plan in replica_plans]
    return ReplicaSet(clients)


async def run_server(
    client: EngineClient | ReplicaSet,
    build_app: Callable[[], Any],
    server_config: ServerConfig,
    limits: ServerLimits | None = None,
) -> int:
    """Serve until a signal or until the engine fails for good; return the exit status.

    The engine loads while the app is built.
    """
    limits = limits or ServerLimits()
    await client.start()
    try:
        app = build_app()
    except BaseException:
        await client.close()
        raise
    drain_seconds = server_config.drain_seconds
    server = InferenceServer(
        uvicorn.Config(
            app,
            server_config.host,
            server_config.port,
            http=bounded_protocol(limits),
            lifespan="on",
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(limits.idle_seconds),
            log_config=None,
            timeout_graceful_shutdown=int(drain_seconds) + SHUTDOWN_GRACE_SECONDS,
        )
    )
    event_loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        event_loop.add_signal_handler(signal_number, server.stop, client.close, drain_seconds)
    url = f"http://{server_config.host}:{server_config.port}"
    startup = asyncio.create_task(report_startup(client, url))
    failure = asyncio.create_task(client.wait_failed())
    serving = asyncio.create_task(server.serve())
    try:
        await asyncio.wait((serving, failure), return_when=asyncio.FIRST_COMPLETED)
        if failure.done() and not server.should_exit:
            log.error("%s", failure.result())
            server.should_exit = True
        await serving
    finally:
        startup.cancel()
        await client.close()
        failed = failure.done()
        failure.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(startup, failure, return_exceptions=True)
    return 1 if failed or not server.started else 0


async def report_startup(client: EngineClient | ReplicaSet, url: str) -> None:
    """Show a bar while the model loads, then log what the engine can hold and where to connect."""
    start_time = time.monotonic()
    ready = asyncio.create_task(client.ready())

    def read_progress() -> tuple[str, float]:
        return client.status.detail, client.status.progress or 0.0

    await show_load_progress(ready, read_progress)
    try:
        capacity = await ready
    except BloomeryError:
        return  # run_server logs the reason, which it gets from wait_failed
    freeze_garbage_collector()
    for note in capacity.notes:
        log.warning(note)
    log.info(
        "ready in %.1f s: KV cache for %d tokens, %d sequences at once, up to %d tokens each",
        time.monotonic() - start_time,
        capacity.blocks * capacity.block_size,
        capacity.max_num_seqs,
        capacity.max_model_len,
    )
    log.info(
        "open %s to chat; clients: OpenAI at %s/v1, TGI at %s; docs at %s/docs", url, url, url, url
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
