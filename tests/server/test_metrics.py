"""What is counted: by Prometheus' own parser, under every name, and true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from bloomery.server.metrics import COUNTERS, DISTRIBUTIONS, GAUGES, Distribution, Rate, band
from tests.server.conftest import Running

HELLO = [{"role": "user", "content": "hi"}]


def samples(server: Running) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def value(server: Running, name: str, **labels: str) -> float:
    common = {"model_name": "speaker", "engine": "0"} if name.startswith("vllm:") else {}
    return samples(server).get((name, frozenset({**common, **labels}.items())), 0.0)


def test_figures_add_up(serve: Callable[..., Running]) -> None:
    server = serve()
    body = {"messages": HELLO, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    first = server.post("/v1/chat/completions", body).json()["usage"]
    server.post("/v1/chat/completions", {**body, "stream": True, "unheard_of": 1, "of": 2})
    server.post("/generate", {"inputs": "The iron", "parameters": {"max_new_tokens": 4, "typo": 1}})
    server.post("/generate", {"inputs": ""})
    server.post("/v1/chat/completions", {"messages": [{"role": "assistant", "content": "x"}]})
    prompt = 2 * first["prompt_tokens"] + 2
    for name, expected in {
        "bloomery_requests_total": 5,
        "tgi_request_count": 5,
        "bloomery_requests_succeeded_total": 3,
        "tgi_request_success": 3,
        "bloomery_prompt_tokens_total": prompt,
        "vllm:prompt_tokens_total": prompt,
        "bloomery_generated_tokens_total": 16,
        "vllm:generation_tokens_total": 16,
        "vllm:time_to_first_token_seconds_count": 3,
        "bloomery_time_to_first_token_seconds_count": 3,
        "bloomery_inter_token_seconds_count": 13,
        "vllm:inter_token_latency_seconds_count": 13,
        "tgi_request_duration_count": 3,
        "vllm:e2e_request_latency_seconds_count": 3,
        "tgi_request_generated_tokens_sum": 16,
        "tgi_request_input_length_sum": prompt,
        "tgi_request_max_new_tokens_sum": 16,
        "bloomery_running": 0,
        "tgi_queue_size": 0,
        "bloomery_ready": 1,
        "tgi_batch_max_total_tokens": 512 * 8,
    }.items():
        assert value(server, name) == expected, name
    assert value(server, "tgi_request_failure", err="validation") == 1
    assert value(server, "tgi_request_failure", err="template") == 1
    assert value(server, "bloomery_unknown_fields_total", route="/v1/chat/completions") == 2
    assert value(server, "bloomery_unknown_fields_total", route="/generate") == 1
    assert value(server, "vllm:request_success_total", finished_reason="length") == 3
    assert value(server, "bloomery_responses_total", route="/generate", status="422") == 1
    bands = [
        value(server, "bloomery_perceived_requests_total", measure="whole", band=name)
        for name in ("100ms", "1s", "10s")
    ]
    assert sum(bands) == 3


def test_every_name_is_there_from_the_start(serve: Callable[..., Running]) -> None:
    text = serve().get("/metrics").text
    for table in (DISTRIBUTIONS, GAUGES, COUNTERS):
        for _, *names in table.values():
            for prefix, name in zip(("bloomery_", "vllm:", "tgi_"), names, strict=True):
                assert not name or f"\n{prefix}{name}" in text, prefix + name


def test_labels_do_not_grow_with_what_clients_send(serve: Callable[..., Running]) -> None:
    server = serve()
    for i in range(20):
        server.get(f"/nowhere/{i}")
        server.get(f"/v1/models/m{i}")
        server.post("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 1}, f"field{i}": 1})
    text = server.get("/metrics").text
    assert "nowhere" not in text and "m13" not in text and "field7" not in text
    assert value(server, "bloomery_responses_total", route="unknown", status="404") == 20


def test_the_dashboards_sample(serve: Callable[..., Running]) -> None:
    server = serve()
    empty = server.get("/stats").json()
    assert empty["ttft"] == {"p50": None, "p90": None, "p99": None} and empty["kv_usage"] == 0
    server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 20, "ignore_eos": True})
    full: dict[str, Any] = server.get("/stats").json()
    assert full["tokens_per_second"] == 20 / 5 and full["requests"] == 1 and full["uptime"] > 0
    assert 0 < full["inter_token"]["p50"] <= full["inter_token"]["p90"] <= full["inter_token"]["p99"] < 1


def test_distributions_and_rates() -> None:
    one = Distribution((1, 2, 5))
    for number in (0.5, 1, 1.5, 4, 9):
        one.observe(number)
    buckets = {sample.labels["le"]: sample.value for sample in one.family("x", "", {}).samples if "le" in sample.labels}
    assert buckets == {"1.0": 2, "2.0": 3, "5.0": 4, "+Inf": 5}
    rate = Rate()
    for second in range(100):
        rate.add(10, second + 0.5)
    assert rate.value(100.4) == 10 and rate.value(200) == 0
    assert [band(seconds) for seconds in (0.05, 0.1, 0.5, 9, 59, 61)] == [
        "100ms",
        "100ms",
        "1s",
        "10s",
        "1min",
        "longer",
    ]
