"""Spans of real requests as a collector receives them: names, parents, and no text."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bloomery.server.service import ServerSettings
from bloomery.server.tracing import TraceRecorder, create_trace_recorder
from bloomery.text.tokenizer import Tokenizer
from tests.server.conftest import HttpTestServer, start_server
from tests.server.scripted_engine import InProcessEngine
from tests.waiting import wait_until

memory_exporter = pytest.importorskip(
    "opentelemetry.sdk.trace.export.in_memory_span_exporter",
    reason="the extra otel is not installed",
)
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER_SPAN_ID = "00f067aa0ba902b7"
SECRET = "Xanadu"


class TracedServer(HttpTestServer):
    exporter: Any

    def spans(self) -> dict[str, Any]:
        """Spans by name of the one request since the last call.

        They are written after the client has its answer.
        """

        def is_written() -> bool:
            spans = self.exporter.get_finished_spans()
            return any(span.name.endswith(" speaker") for span in spans)

        assert wait_until(is_written), "no span was written"
        spans = {span.name: span for span in self.exporter.get_finished_spans()}
        self.exporter.clear()
        return spans


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[TracedServer]:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    exporter = memory_exporter.InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with ExitStack() as exit_stack:
        server = start_server(
            InProcessEngine(tokenizer),
            tokenizer,
            ServerSettings(model="speaker"),
            exit_stack,
            traces=TraceRecorder(provider),
        )
        traced = TracedServer(server.client, server.backend, server.address)
        traced.exporter = exporter
        yield traced


def test_a_chat_request_has_a_span_below_its_callers(server: TracedServer) -> None:
    body = {
        "messages": [{"role": "user", "content": SECRET}],
        "max_tokens": 4,
        "temperature": 0.5,
        "ignore_eos": True,
        "seed": 5,
    }
    answer = server.post(
        "/v1/chat/completions",
        body,
        headers={"traceparent": f"00-{TRACE_ID}-{CALLER_SPAN_ID}-01", "x-request-id": "mine"},
    ).json()
    spans = server.spans()
    assert set(spans) == {"chat speaker", "queue", "prefill", "decode"}
    span = spans["chat speaker"]
    assert format(span.context.trace_id, "032x") == TRACE_ID
    assert format(span.parent.span_id, "016x") == CALLER_SPAN_ID
    attributes = dict(span.attributes)
    assert attributes.pop("gen_ai.server.time_to_first_token") > 0
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "bloomery",
        "gen_ai.request.model": "speaker",
        "gen_ai.response.model": "speaker",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.seed": 5,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.choice.count": 1,
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("length",),
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "server.address": "127.0.0.1",
        "bloomery.request.id": "mine",
    }
    for name in ("queue", "prefill", "decode"):
        assert spans[name].parent.span_id == span.context.span_id
        assert span.start_time <= spans[name].start_time <= spans[name].end_time <= span.end_time
    text = "".join(span.to_json() for span in spans.values())
    assert SECRET not in text and answer["choices"][0]["message"]["content"] not in text


def test_completions_embeddings_and_refusals_have_spans(server: TracedServer) -> None:
    server.post("/generate", {"inputs": SECRET, "parameters": {"max_new_tokens": 2}})
    assert "text_completion speaker" in server.spans()
    server.post("/v1/embeddings", {"input": SECRET})
    assert server.spans()["embeddings speaker"].attributes["gen_ai.usage.input_tokens"] > 0
    server.post("/generate", {"inputs": ""})
    refused = server.spans()["text_completion speaker"]
    assert refused.attributes["error.type"] == "validation" and refused.parent is None
    server.get("/health")
    server.get("/metrics")
    server.post("/v1/embeddings", {"input": SECRET})
    assert set(server.spans()) <= {"embeddings speaker", "queue", "prefill", "decode"}, (
        "only routes that generate are traced"
    )


def test_spans_are_sent_to_a_collector_by_http(tokenizer: Tokenizer) -> None:
    received: list[tuple[str, bytes]] = []

    class TraceCollector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            received.append((self.path, self.rfile.read(length)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), TraceCollector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        traces = create_trace_recorder(f"http://127.0.0.1:{collector.server_address[1]}", "forge")
        with ExitStack() as exit_stack:
            server = start_server(
                InProcessEngine(tokenizer),
                tokenizer,
                ServerSettings(model="speaker"),
                exit_stack,
                traces=traces,
            )
            server.post("/generate", {"inputs": SECRET, "parameters": {"max_new_tokens": 2}})
        traces.close()
        collector.shutdown()
    assert {path for path, _ in received} == {"/v1/traces"}
    sent = b"".join(data for _, data in received)
    for word in (b"forge", b"text_completion speaker", b"gen_ai.usage.output_tokens"):
        assert word in sent
    assert json.dumps(SECRET).strip('"').encode() not in sent
