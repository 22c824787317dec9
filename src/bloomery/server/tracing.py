"""OpenTelemetry traces, under the names of its GenAI conventions. Off unless configured.

A span is written when its request has ended, from times that were taken anyway, so tracing does
not slow a request down. Spans hold counts, times and settings, never text of a prompt or answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from bloomery import __version__
from bloomery.errors import ConfigError
from bloomery.server.service import HttpCall

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}
# Field of SamplingParams -> its name after "gen_ai.request." in the convention.
SAMPLING_ATTRIBUTES = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "n": "choice.count",
}


class TraceRecorder:
    """Writes the spans of finished requests."""

    def __init__(self, provider: Any):
        """`provider`: an opentelemetry.sdk.trace.TracerProvider."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.provider = provider
        self.tracer = provider.get_tracer("bloomery", __version__)
        self.propagator = TraceContextTextMapPropagator()

    def record(self, call: HttpCall, status: int) -> None:
        """Write one span for the request and one for each of its phases.

        The request's span is a child of the caller's span if there is a traceparent header.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        ended = time.monotonic()
        operation = OPERATIONS.get(call.route.path, "text_completion")
        # One offset for all times, so that they keep their order and distances.
        offset_ns = time.time_ns() - time.monotonic_ns()

        def wall_clock_ns(moment: float) -> int:
            return offset_ns + int(moment * 1e9)

        trace_headers = {name: call.headers.get(name, "") for name in ("traceparent", "tracestate")}
        span = self.tracer.start_span(
            f"{operation} {call.model_name}",
            self.propagator.extract(trace_headers),
            SpanKind.SERVER,
            {"gen_ai.operation.name": operation, **span_attributes(call, status)},
            start_time=wall_clock_ns(call.timings.arrived),
        )
        if status >= 400:
            span.set_attribute("error.type", str(call.log_fields.get("error", status)))
            span.set_status(Status(StatusCode.ERROR if status >= 500 else StatusCode.UNSET))
        context = set_span_in_context(span)
        for name, start, end in request_phases(call):
            phase = self.tracer.start_span(name, context, start_time=wall_clock_ns(start))
            phase.end(wall_clock_ns(end))
        span.end(wall_clock_ns(ended))

    def close(self) -> None:
        """Send the spans that are still buffered."""
        self.provider.shutdown()


def create_trace_recorder(endpoint: str, service_name: str) -> TraceRecorder:
    """Create a recorder that sends spans by OTLP over HTTP, from a thread of the library."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        message = "otlp_endpoint needs OpenTelemetry: pip install 'bloomery[otel]'"
        raise ConfigError(message) from None
    url = endpoint.rstrip("/")
    if not url.endswith("/v1/traces"):
        url = f"{url}/v1/traces"
    resource = Resource.create({"service.name": service_name, "service.version": __version__})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return TraceRecorder(provider)


def span_attributes(call: HttpCall, status: int) -> dict[str, Any]:
    """The attributes of a request's span. Unknown values are left out."""
    log_fields = call.log_fields
    settings = call.service.settings
    attributes: dict[str, Any] = {
        "gen_ai.provider.name": "bloomery",
        "gen_ai.request.model": call.model_name,
        "gen_ai.response.model": call.model_name,
        "gen_ai.usage.input_tokens": log_fields.get("prompt_tokens"),
        "gen_ai.usage.cache_read.input_tokens": log_fields.get("cached_tokens"),
        "gen_ai.usage.output_tokens": log_fields.get("tokens"),
        "gen_ai.server.time_to_first_token": log_fields.get("ttft"),
        "http.request.method": call.route.method,
        "http.route": call.route.path,
        "http.response.status_code": status,
        "server.address": settings.host,
        "bloomery.request.id": call.request_id,
    }
    if "finish" in log_fields:
        attributes["gen_ai.response.finish_reasons"] = [log_fields["finish"]]
    if call.sampling_params is not None:
        for field, name in SAMPLING_ATTRIBUTES.items():
            attributes[f"gen_ai.request.{name}"] = getattr(call.sampling_params, field)
    return {name: value for name, value in attributes.items() if value is not None}


def request_phases(call: HttpCall) -> Iterator[tuple[str, float, float]]:
    """Yield (name, start, end) of the phases of a request that was answered."""
    timings = call.timings
    if timings.first_token and timings.last_token:
        yield "queue", timings.submitted, timings.started
        yield "prefill", timings.started, timings.first_token
        yield "decode", timings.first_token, timings.last_token
