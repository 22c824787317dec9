"""The server's state, for probes, dashboards and the web page.

Probes report whether a request would be answered: it would if the state is "ready".
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.types import ASGIApp

from bloomery import __version__
from bloomery.config import active_profiler
from bloomery.sampling import SamplingParams
from bloomery.server.errors import format_tgi_error
from bloomery.server.history import build_columns
from bloomery.server.service import HttpCall, Route
from bloomery.server.shapes import READINESS, SERVER_INFO


async def health(call: HttpCall) -> ASGIApp:
    """TGI's health check: 200 and nothing else if requests would be answered, else 503."""
    if call.service.backend.status.state == "ready":
        return Response(b"")
    content = {"error": "unhealthy", "error_type": "healthcheck"}
    return call.json_response(content, {"retry-after": "5"}, 503)


async def ready(call: HttpCall) -> ASGIApp:
    """What the server is doing: loading (and how far), ready, restarting, draining, failed."""
    settings = call.service.settings
    status = call.service.backend.status
    is_ready = status.state == "ready"
    detail = status.detail
    if settings.keys and status.state not in ("loading", "ready"):
        detail = ""  # an engine error may name files, and this route needs no key
    content = {
        "state": status.state,
        "model": settings.model,
        "progress": 1.0 if is_ready else status.progress,
        "detail": detail,
    }
    return call.json_response(content, status=200 if is_ready else 503)


async def live(call: HttpCall) -> ASGIApp:
    """That the server's own process is up and takes requests."""
    return call.json_response({"live": True})


async def info(call: HttpCall) -> ASGIApp:
    """The model and the limits of this server."""
    settings = call.service.settings
    capacity = call.service.backend.capacity
    limits = call.service.limits
    lookup = call.service.response_format
    content = {
        "model_id": settings.model,
        "model_sha": settings.revision,
        "model_pipeline_tag": "text-generation",
        "text_part_only": settings.text_part_only,
        "max_concurrent_requests": limits.requests,
        "max_best_of": limits.best_of,
        "max_stop_sequences": limits.stop_strings,
        "max_input_tokens": capacity and capacity.max_model_len - 1,
        "max_total_tokens": capacity and capacity.max_model_len,
        "validation_workers": 2,
        "max_client_batch_size": limits.fan_out,
        "router": "bloomery",
        "version": __version__,
        "sha": None,
        "docker_label": None,
        "limits": asdict(limits),
        "has_chat_template": bool(call.service.tokenizer.chat_templates),
        "sampling_defaults": describe_sampling_defaults(call),
        "response_format": lookup and lookup.to_dict(),  # null until it has been found
        "demo": settings.demo,
        "recommended_model": settings.recommended_model,
    }
    profiler = active_profiler()
    if profiler:
        content["profiling"] = profiler  # a warning: timings under a profiler are not valid
    return call.json_response(content)


def describe_sampling_defaults(call: HttpCall) -> dict[str, Any]:
    """What is used where a request states nothing, under generation_config.json's names."""
    params = SamplingParams(**call.service.sampling_defaults)
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "typical_p": params.typical_p,
        "repetition_penalty": params.repetition_penalty,
        "frequency_penalty": params.frequency_penalty,
        "source": call.service.tokenizer.sampling_source,
    }


async def version(call: HttpCall) -> ASGIApp:
    """This server's version."""
    return call.json_response({"version": __version__})


async def stats(call: HttpCall) -> ASGIApp:
    """A sample for the web page's dashboard."""
    return call.json_response(call.service.metrics.dashboard_sample())


async def stats_history(call: HttpCall) -> ASGIApp:
    """Samples of the last half hour for the web page's dashboard, in columns."""
    return call.json_response(build_columns(call.service.metrics.samples))


async def metrics(call: HttpCall) -> ASGIApp:
    """All figures, for Prometheus."""
    return Response(call.service.metrics.prometheus_text(), media_type=CONTENT_TYPE_LATEST)


def build_status_routes(open_metrics: bool) -> tuple[Route, ...]:
    """`open_metrics`: /metrics needs no API key."""
    tgi = format_tgi_error
    return (
        Route("/health", health, tgi, public=True, quiet=True, media_types=()),
        Route("/ping", health, tgi, public=True, quiet=True, media_types=()),
        Route("/ready", ready, tgi, public=True, quiet=True, response_shape=READINESS),
        Route("/live", live, tgi, public=True, quiet=True, response_shape={"live": "boolean"}),
        Route("/info", info, tgi, response_shape=SERVER_INFO),
        Route("/version", version, tgi, response_shape={"version": "string"}),
        Route("/stats", stats, tgi, quiet=True),
        Route("/stats/history", stats_history, tgi, quiet=True),
        Route(
            "/metrics", metrics, tgi, public=open_metrics, quiet=True, media_types=("text/plain",)
        ),
    )
