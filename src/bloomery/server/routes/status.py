"""How the server is, for probes, dashboards and the web page. What a route says is so: ready means it would answer."""

from __future__ import annotations

from dataclasses import asdict

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.types import ASGIApp

from bloomery import __version__
from bloomery.config import profiler
from bloomery.server.call import Call, Route
from bloomery.server.errors import tgi
from bloomery.server.shapes import INFO, READY


async def health(call: Call) -> ASGIApp:
    """TGI's health check: 200 and nothing else if requests would be answered, else 503."""
    if call.service.backend.status.state == "ready":
        return Response(b"")
    return call.json({"error": "unhealthy", "error_type": "healthcheck"}, {"retry-after": "5"}, 503)


async def ready(call: Call) -> ASGIApp:
    """What the server is doing: loading (and how far), ready, restarting, draining, failed."""
    status = call.service.backend.status
    left = call.service.backend.stats.unprepared
    detail = status.detail or (
        f"{left} captures to go; until then some steps are slower" if left else ""
    )
    if call.service.settings.keys and status.state not in ("loading", "ready"):
        detail = ""  # what went wrong may name files, and who asks has shown no key
    about = {
        "state": status.state,
        "model": call.service.settings.model,
        "progress": 1.0 if status.state == "ready" else status.progress,
        "detail": detail,
    }
    return call.json(about, status=200 if status.state == "ready" else 503)


async def live(call: Call) -> ASGIApp:
    """That the server's own process is up and takes requests."""
    return call.json({"live": True})


async def info(call: Call) -> ASGIApp:
    """The model and the limits of this server."""
    service = call.service
    capacity = call.service.backend.capacity
    limits = service.limits
    return call.json(
        {
            "model_id": service.settings.model,
            "model_sha": service.settings.revision,
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": limits.requests,
            "max_best_of": limits.best_of,
            "max_stop_sequences": limits.stop_strings,
            "max_input_tokens": capacity and capacity.max_length - 1,
            "max_total_tokens": capacity and capacity.max_length,
            "validation_workers": 2,
            "max_client_batch_size": limits.fan_out,
            "router": "bloomery",
            "version": __version__,
            "sha": None,
            "docker_label": None,
            "limits": asdict(limits),
            **(
                {"profiling": under} if (under := profiler()) else {}
            ),  # so that nobody publishes its figures
        }
    )


async def version(call: Call) -> ASGIApp:
    """This server's version."""
    return call.json({"version": __version__})


async def stats(call: Call) -> ASGIApp:
    """A sample for the web page's dashboard."""
    return call.json(call.service.metrics.page())


async def metrics(call: Call) -> ASGIApp:
    """All figures, for Prometheus."""
    return Response(call.service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def routes(open_metrics: bool) -> tuple[Route, ...]:
    return (
        Route("/health", health, tgi, open=True, quiet=True, media=()),
        Route("/ping", health, tgi, open=True, quiet=True, media=()),
        Route("/ready", ready, tgi, open=True, quiet=True, answer=READY),
        Route("/live", live, tgi, open=True, quiet=True, answer={"live": "boolean"}),
        Route("/info", info, tgi, answer=INFO),
        Route("/version", version, tgi, answer={"version": "string"}),
        Route("/stats", stats, tgi, quiet=True),
        Route("/metrics", metrics, tgi, open=open_metrics, quiet=True, media=("text/plain",)),
    )
