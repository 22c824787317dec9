"""What is counted: by Prometheus' own parser, under every name, and true."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from bloomery.messages import EngineStats
from bloomery.server.metrics import (
    COUNTERS,
    DISTRIBUTIONS,
    GAUGES,
    Distribution,
    Metrics,
    Rate,
    band,
    family,
)
from tests.server.conftest import Running
from tests.server.speaker import InProcess, words

HELLO = [{"role": "user", "content": "hi"}]


def samples(server: Running) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for metric in text_string_to_metric_families(server.get("/metrics").text):
        for sample in metric.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def value(
    found: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str
) -> float:
    common = {"model_name": "speaker", "engine": "0"} if name.startswith("vllm:") else {}
    return found.get((name, frozenset({**common, **labels}.items())), 0.0)


def test_figures_add_up(serve: Callable[..., Running]) -> None:
    server = serve()
    body = {"messages": HELLO, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    first = server.post("/v1/chat/completions", body).json()["usage"]
    server.post("/v1/chat/completions", {**body, "stream": True, "unheard_of": 1, "of": 2})
    server.post("/generate", {"inputs": "The iron", "parameters": {"max_new_tokens": 4, "typo": 1}})
    server.post("/generate", {"inputs": ""})
    server.post("/v1/chat/completions", {"messages": [{"role": "assistant", "content": "x"}]})
    found = samples(server)
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
        assert value(found, name) == expected, name
    assert value(found, "tgi_request_failure", err="validation") == 1
    assert value(found, "tgi_request_failure", err="template") == 1
    assert value(found, "bloomery_unknown_fields_total", route="/v1/chat/completions") == 2
    assert value(found, "bloomery_unknown_fields_total", route="/generate") == 1
    assert value(found, "vllm:request_success_total", finished_reason="length") == 3
    assert value(found, "bloomery_responses_total", route="/generate", status="422") == 1
    bands = [
        value(found, "bloomery_perceived_requests_total", measure="whole", band=name)
        for name in ("100ms", "1s", "10s", "1min", "longer")
    ]
    assert sum(bands) == 3


def test_every_name_is_there_from_the_start(serve: Callable[..., Running]) -> None:
    text = serve().get("/metrics").text
    for table in (DISTRIBUTIONS, GAUGES, COUNTERS):
        for _, *names in table.values():
            for prefix, name in zip(("bloomery_", "vllm:", "tgi_"), names, strict=True):
                assert all(f"\n{prefix}{one}" in text for one in name.split()), prefix + name


def test_labels_do_not_grow_with_what_clients_send(serve: Callable[..., Running]) -> None:
    server = serve()
    for i in range(20):
        server.get(f"/nowhere/{i}")
        server.get(f"/v1/models/m{i}")
        server.post(
            "/generate", {"inputs": "a", "parameters": {"max_new_tokens": 1}, f"field{i}": 1}
        )
    text = server.get("/metrics").text
    assert "nowhere" not in text and "m13" not in text and "field7" not in text
    assert value(samples(server), "bloomery_responses_total", route="unknown", status="404") == 20


def test_the_dashboards_sample(serve: Callable[..., Running]) -> None:
    server = serve()
    empty = server.get("/stats").json()
    assert empty["ttft"] == {"p50": None, "p90": None, "p99": None} and empty["kv_usage"] == 0
    server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 20, "ignore_eos": True})
    full: dict[str, Any] = server.get("/stats").json()
    assert full["tokens_per_second"] == 20 / 5 and full["requests"] == 1 and full["uptime"] > 0
    assert (
        0
        < full["inter_token"]["p50"]
        <= full["inter_token"]["p90"]
        <= full["inter_token"]["p99"]
        < 60
    )


def test_distributions_and_rates() -> None:
    one = Distribution((1, 2, 5))
    for number in (0.5, 1, 1.5, 4, 9):
        one.observe(number)
    buckets = {
        sample.labels["le"]: sample.value
        for sample in family("x", "", [], {(): one}).samples
        if "le" in sample.labels
    }
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


ROOT = Path(__file__).parent.parent.parent
# What stock dashboards and autoscalers of others read: their names, histograms without their suffix.
STOCK = """
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:gpu_cache_usage_perc
vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total vllm:prompt_tokens_total vllm:generation_tokens_total
vllm:num_preemptions_total vllm:time_to_first_token_seconds_bucket vllm:inter_token_latency_seconds_bucket
vllm:time_per_output_token_seconds_bucket vllm:request_time_per_output_token_seconds_bucket
vllm:e2e_request_latency_seconds_bucket vllm:request_queue_time_seconds_bucket vllm:request_prefill_time_seconds_bucket
vllm:request_decode_time_seconds_bucket vllm:request_inference_time_seconds_bucket vllm:request_success_total
vllm:iteration_tokens_total_bucket vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket
vllm:request_params_max_tokens_bucket vllm:request_params_n_bucket vllm:request_max_num_generation_tokens_bucket
vllm:cache_config_info
tgi_request_count tgi_request_success tgi_request_failure tgi_request_duration_bucket tgi_queue_size
tgi_request_validation_duration_bucket tgi_request_queue_duration_bucket tgi_request_inference_duration_bucket
tgi_request_mean_time_per_token_duration_bucket tgi_request_generated_tokens_bucket tgi_request_input_length_bucket
tgi_request_max_new_tokens_bucket tgi_request_skipped_tokens_bucket tgi_batch_current_size tgi_batch_current_max_tokens
tgi_batch_max_total_tokens tgi_batch_next_size_bucket tgi_batch_inference_count tgi_batch_inference_success
tgi_batch_inference_failure tgi_batch_concat tgi_batch_forward_duration_bucket tgi_batch_decode_duration_bucket
tgi_batch_filter_duration_bucket tgi_batch_inference_duration_bucket tgi_batch_concat_duration_bucket
"""


def test_what_dashboards_read_is_there(serve: Callable[..., Running]) -> None:
    """Our own dashboard's every name and label, and those of the dashboards that people bring along."""
    server = serve()
    server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, "ignore_eos": True})
    server.post("/generate", {"inputs": ""})
    text = server.get("/metrics").text
    names = {
        line.partition("{")[0].partition(" ")[0] for line in text.splitlines() if line[0] != "#"
    }
    assert set(STOCK.split()) <= names, set(STOCK.split()) - names
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    ours = {name for query in queries for name in re.findall(r"\bbloomery_\w+", query)}
    assert len(queries) > 20 and ours <= names, ours - names
    for query in queries:
        for label in re.findall(r"by \(([\w, ]+)\)", query):
            for one in label.split(", "):
                assert f'{one}="' in text, f"no metric has the label {one}"


def test_steps_are_told_apart() -> None:
    """As an engine tells of them: a prompt alone, a prompt beside others, two steps at once without any."""
    metrics = Metrics(InProcess(words()), "m")
    told = [
        EngineStats(),
        EngineStats(steps=1, step_seconds=0.3, sequences=1, positions=40, prompt_steps=1),
        EngineStats(steps=2, step_seconds=0.5, sequences=4, positions=60, prompt_steps=2),
        EngineStats(steps=4, step_seconds=0.53, sequences=10, positions=66, prompt_steps=2),
    ]
    for before, after in itertools.pairwise(told):
        metrics.step(before, after)
    text = metrics.text().decode()
    for line in (
        'tgi_batch_inference_count{method="prefill"} 2.0',
        'tgi_batch_inference_count{method="decode"} 2.0',
        'tgi_batch_forward_duration_bucket{le="0.02",method="decode"} 2.0',
        'tgi_batch_inference_duration_sum{method="prefill"} 0.5',
        'tgi_batch_concat{reason="chunking"} 1.0',
        "tgi_batch_next_size_sum 10.0",
        "bloomery_step_positions_sum 66.0",
    ):
        assert line in text, line
