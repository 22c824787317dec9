"""Spans of real requests as a collector gets them: by the convention's names, under the caller's, without a word."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bloomery.server.service import Settings
from bloomery.server.tracing import Traces, traces_to
from bloomery.text.tokenizer import Tokenizer
from tests.server.conftest import Running, run
from tests.server.speaker import InProcess
from tests.waiting import until

memory = pytest.importorskip(
    "opentelemetry.sdk.trace.export.in_memory_span_exporter",
    reason="the extra otel is not installed",
)
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
SECRET = "Xanadu"


class Traced(Running):
    exporter: Any

    def spans(self) -> dict[str, Any]:
        """By name, of the one request since it was last asked; they are written after its client has its answer."""
        done = lambda: any(
            span.name.endswith(" speaker") for span in self.exporter.get_finished_spans()
        )  # noqa: E731
        assert until(done), "no span was written"
        found = {span.name: span for span in self.exporter.get_finished_spans()}
        self.exporter.clear()
        return found


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[Traced]:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    exporter = memory.InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with ExitStack() as exit:
        made = run(
            InProcess(tokenizer),
            tokenizer,
            Settings(model="speaker"),
            exit,
            traces=Traces(provider),
        )
        traced = Traced(made.client, made.backend, made.address)
        traced.exporter = exporter
        yield traced


def test_a_conversation_under_its_callers_span(server: Traced) -> None:
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
        headers={"traceparent": f"00-{TRACE}-{CALLER}-01", "x-request-id": "mine"},
    ).json()
    spans = server.spans()
    assert set(spans) == {"chat speaker", "queue", "prefill", "decode"}
    whole = spans["chat speaker"]
    assert (
        format(whole.context.trace_id, "032x") == TRACE
        and format(whole.parent.span_id, "016x") == CALLER
    )
    known = dict(whole.attributes)
    assert known.pop("gen_ai.server.time_to_first_token") > 0
    assert known == {
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
        assert spans[name].parent.span_id == whole.context.span_id
        assert whole.start_time <= spans[name].start_time <= spans[name].end_time <= whole.end_time
    said = "".join(span.to_json() for span in spans.values())
    assert SECRET not in said and answer["choices"][0]["message"]["content"] not in said


def test_other_requests(server: Traced) -> None:
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
        "only what generates is traced"
    )


def test_a_collector_gets_them_by_http(tokenizer: Tokenizer) -> None:
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        traces = traces_to(f"http://127.0.0.1:{collector.server_address[1]}", "forge")
        with ExitStack() as exit:
            server = run(
                InProcess(tokenizer), tokenizer, Settings(model="speaker"), exit, traces=traces
            )
            server.post("/generate", {"inputs": SECRET, "parameters": {"max_new_tokens": 2}})
        traces.close()
        collector.shutdown()
    assert {path for path, _ in got} == {"/v1/traces"}
    whole = b"".join(data for _, data in got)
    for word in (b"forge", b"text_completion speaker", b"gen_ai.usage.output_tokens"):
        assert word in whole
    assert json.dumps(SECRET).strip('"').encode() not in whole
