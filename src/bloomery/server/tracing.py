"""OpenTelemetry traces, by the names of its GenAI conventions; only where they are asked for.

A span is written when its request has ended, from the times that were taken anyway: a request is none the slower for
being traced. Counts, times and settings go into it, never a word of prompt or answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from bloomery import __version__
from bloomery.errors import ConfigError
from bloomery.server.call import Call

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}
ASKED = {  # our name -> the convention's, after gen_ai.request.
    **{name: name for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")},
    **{name: name for name in ("frequency_penalty", "presence_penalty")},
    "n": "choice.count",
}


class Traces:
    def __init__(self, provider: Any):
        """`provider`: an opentelemetry.sdk.trace.TracerProvider."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.provider = provider
        self.tracer = provider.get_tracer("bloomery", __version__)
        self.context = TraceContextTextMapPropagator()

    def record(self, call: Call, status: int) -> None:
        """One span for the request, under its caller's if there is a traceparent, and one for each part of its life."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        operation = OPERATIONS.get(call.route.path, "text_completion")
        ended = time.monotonic()
        model = call.service.settings.model
        offset = (
            time.time_ns() - time.monotonic_ns()
        )  # one for all, so that moments keep their order and distances

        def wall(moment: float) -> int:
            """In nanoseconds since 1970."""
            return offset + int(moment * 1e9)

        parent = self.context.extract(
            {name: call.headers.get(name, "") for name in ("traceparent", "tracestate")}
        )
        span = self.tracer.start_span(
            f"{operation} {model}",
            parent,
            SpanKind.SERVER,
            {"gen_ai.operation.name": operation, **attributes(call, status)},
            start_time=wall(call.timings.arrived),
        )
        if status >= 400:
            span.set_attribute("error.type", str(call.facts.get("error", status)))
            span.set_status(Status(StatusCode.ERROR if status >= 500 else StatusCode.UNSET))
        inside = set_span_in_context(span)
        for name, begun, done in parts(call):
            self.tracer.start_span(name, inside, start_time=wall(begun)).end(wall(done))
        span.end(wall(ended))

    def close(self) -> None:
        """Send what is held back."""
        self.provider.shutdown()


def traces_to(endpoint: str, service: str) -> Traces:
    """By OTLP over HTTP; sending is the affair of a thread of the library's."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(
            "otlp_endpoint needs OpenTelemetry: pip install 'bloomery[otel]'"
        ) from None
    url = endpoint.rstrip("/")
    provider = TracerProvider(
        resource=Resource.create({"service.name": service, "service.version": __version__})
    )
    exporter = OTLPSpanExporter(endpoint=url if url.endswith("/v1/traces") else f"{url}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Traces(provider)


def attributes(call: Call, status: int) -> dict[str, Any]:
    facts = call.facts
    settings = call.service.settings
    found: dict[str, Any] = {
        "gen_ai.provider.name": "bloomery",
        "gen_ai.request.model": settings.model,
        "gen_ai.response.model": settings.model,
        "gen_ai.usage.input_tokens": facts.get("prompt_tokens"),
        "gen_ai.usage.cache_read.input_tokens": facts.get("cached_tokens"),
        "gen_ai.usage.output_tokens": facts.get("tokens"),
        "gen_ai.response.finish_reasons": [facts["finish"]] if "finish" in facts else None,
        "gen_ai.server.time_to_first_token": facts.get("first_token"),
        "http.request.method": call.route.method,
        "http.route": call.route.path,
        "http.response.status_code": status,
        "server.address": settings.host,
        "bloomery.request.id": call.id,
    }
    if call.params is not None:
        found |= {
            f"gen_ai.request.{name}": getattr(call.params, ours) for ours, name in ASKED.items()
        }
    return {name: value for name, value in found.items() if value is not None}


def parts(call: Call) -> Iterator[tuple[str, float, float]]:
    """Of a request that got as far as its first token."""
    times = call.timings
    if times.first and times.last:
        yield "queue", times.submitted, times.begun
        yield "prefill", times.begun, times.first
        yield "decode", times.first, times.last
