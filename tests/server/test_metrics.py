"""Metrics: parsed by Prometheus' own parser, under every name, with the right values."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from bloomery import __version__
from bloomery.engine.block_pool import BlockPool
from bloomery.engine.sequence import Sequence
from bloomery.messages import CacheGroup, EngineRequest, EngineStats, ResolvedSampling
from bloomery.server.metric_names import COUNTERS, GAUGES, HISTOGRAMS, PREFIXES
from bloomery.server.metrics import (
    MetricHistogram,
    ServerMetrics,
    TokenRate,
    histogram_family,
    perceived_band,
)
from tests.server.conftest import HttpTestServer
from tests.server.scripted_engine import InProcessEngine, load_test_tokenizer

HELLO = [{"role": "user", "content": "hi"}]


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]  # (name, labels) -> value


def read_samples(server: HttpTestServer) -> Samples:
    samples: Samples = {}
    for metric in text_string_to_metric_families(server.get("/metrics").text):
        for sample in metric.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in samples, f"{key} is there twice"
            samples[key] = sample.value
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    common = {}
    if name.startswith("vllm:"):
        common = {"model_name": "speaker", "engine": "0"}
    elif name.startswith("bloomery_"):
        common = {"model_name": "speaker"}
    return samples.get((name, frozenset({**common, **labels}.items())), 0.0)


def test_metrics_count_requests_and_tokens(serve: Callable[..., HttpTestServer]) -> None:
    server = serve()
    body = {"messages": HELLO, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    first = server.post("/v1/chat/completions", body).json()["usage"]
    server.post("/v1/chat/completions", {**body, "stream": True, "unheard_of": 1, "of": 2})
    server.post("/generate", {"inputs": "The iron", "parameters": {"max_new_tokens": 4, "typo": 1}})
    server.post("/generate", {"inputs": ""})
    server.post("/v1/chat/completions", {"messages": [{"role": "assistant", "content": "x"}]})
    samples = read_samples(server)
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
        assert value(samples, name) == expected, name
    assert value(samples, "tgi_request_failure", err="validation") == 1
    assert value(samples, "tgi_request_failure", err="template") == 1
    assert value(samples, "bloomery_unknown_fields_total", route="/v1/chat/completions") == 2
    assert value(samples, "bloomery_unknown_fields_total", route="/generate") == 1
    assert value(samples, "vllm:request_success_total", finished_reason="length") == 3
    assert value(samples, "bloomery_responses_total", route="/generate", status="422") == 1
    bands = [
        value(samples, "bloomery_perceived_requests_total", measure="end_to_end", band=name)
        for name in ("100ms", "1s", "10s", "1min", "longer")
    ]
    assert sum(bands) == 3


def test_every_metric_exists_from_the_start(serve: Callable[..., HttpTestServer]) -> None:
    text = serve().get("/metrics").text
    for table in (HISTOGRAMS, GAUGES, COUNTERS):
        for _, *names in table.values():
            for prefix, prefix_names in zip(PREFIXES, names, strict=True):
                for name in prefix_names.split():
                    assert f"\n{prefix}{name}" in text, prefix + name


def test_labels_do_not_grow_with_what_clients_send(serve: Callable[..., HttpTestServer]) -> None:
    server = serve()
    for i in range(20):
        server.get(f"/nowhere/{i}")
        server.get(f"/v1/models/m{i}")
        server.post(
            "/generate", {"inputs": "a", "parameters": {"max_new_tokens": 1}, f"field{i}": 1}
        )
    text = server.get("/metrics").text
    assert "nowhere" not in text and "m13" not in text and "field7" not in text
    assert (
        value(read_samples(server), "bloomery_responses_total", route="unknown", status="404") == 20
    )


def test_cache_groups_report_their_usage() -> None:
    engine = InProcessEngine(load_test_tokenizer())
    groups = (CacheGroup(), CacheGroup(4, num_tables=3))
    assert engine.capacity is not None
    engine.capacity = replace(engine.capacity, cache_groups=groups, blocks=512)
    page_size = engine.capacity.block_size
    engine.block_pool = BlockPool(512, page_size, groups=groups)
    length = 7 * page_size - 4
    request = EngineRequest("a", (1,) * length, ResolvedSampling(), 4)
    sequence = Sequence.from_request(0, request)
    assert engine.block_pool.extend(sequence, length) is not None
    engine.block_pool.free_passed_pages(sequence, length)
    samples: dict[tuple[str, str], float] = {}
    text = ServerMetrics(engine, "m").prometheus_text().decode()
    for metric in text_string_to_metric_families(text):
        for sample in metric.samples:
            samples[sample.name, sample.labels.get("group", "")] = sample.value
            if sample.name == "vllm:cache_config_info":
                cache_config = sample.labels
    assert samples["bloomery_kv_group_usage_ratio", "full"] == 7 / 512
    assert samples["bloomery_kv_group_usage_ratio", "window-4"] == 3 / 512
    assert samples["bloomery_kv_usage_ratio", ""] == 10 / 512
    # The longest sequence holds all its pages once, and three of them in each window table.
    longest = engine.capacity.max_model_len
    held_blocks = longest // page_size + 3 * 3
    num_tokens = 512 * longest // held_blocks
    assert samples["tgi_batch_max_total_tokens", ""] == num_tokens
    assert int(cache_config["num_gpu_blocks"]) == num_tokens // page_size
    assert int(cache_config["block_size"]) == page_size


def test_the_dashboard_sample(serve: Callable[..., HttpTestServer]) -> None:
    server = serve()
    empty = server.get("/stats").json()
    assert empty["ttft"] == {"p50": None, "p90": None, "p99": None} and empty["kv_usage"] == 0
    server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 20, "ignore_eos": True})
    full: dict[str, Any] = server.get("/stats").json()
    assert full["tokens_per_second"] == 20 / 5 and full["requests"] == 1 and full["uptime"] > 0
    itl = full["inter_token"]
    assert 0 < itl["p50"] <= itl["p90"] <= itl["p99"] < 60


def test_histograms_rates_and_bands() -> None:
    histogram = MetricHistogram((1, 2, 5))
    for number in (0.5, 1, 1.5, 4, 9):
        histogram.observe(number)
    buckets = {
        sample.labels["le"]: sample.value
        for sample in histogram_family("x", "", [], {(): histogram}).samples
        if "le" in sample.labels
    }
    assert buckets == {"1.0": 2, "2.0": 3, "5.0": 4, "+Inf": 5}
    rate = TokenRate()
    for second in range(100):
        rate.add(10, second + 0.5)
    assert rate.value(100.4) == 10 and rate.value(200) == 0
    assert [perceived_band(seconds) for seconds in (0.05, 0.1, 0.5, 9, 59, 61)] == [
        "100ms",
        "100ms",
        "1s",
        "10s",
        "1min",
        "longer",
    ]


ROOT = Path(__file__).parent.parent.parent
# What common dashboards and autoscalers for vLLM and TGI read.
EXTERNAL_NAMES = """
vllm:num_requests_running
vllm:num_requests_waiting
vllm:kv_cache_usage_perc
vllm:gpu_cache_usage_perc
vllm:prefix_cache_queries_total
vllm:prefix_cache_hits_total
vllm:prompt_tokens_total
vllm:generation_tokens_total
vllm:num_preemptions_total
vllm:time_to_first_token_seconds_bucket
vllm:inter_token_latency_seconds_bucket
vllm:time_per_output_token_seconds_bucket
vllm:request_time_per_output_token_seconds_bucket
vllm:e2e_request_latency_seconds_bucket
vllm:request_queue_time_seconds_bucket
vllm:request_prefill_time_seconds_bucket
vllm:request_decode_time_seconds_bucket
vllm:request_inference_time_seconds_bucket
vllm:request_success_total
vllm:iteration_tokens_total_bucket
vllm:request_prompt_tokens_bucket
vllm:request_generation_tokens_bucket
vllm:request_params_max_tokens_bucket
vllm:request_params_n_bucket
vllm:request_max_num_generation_tokens_bucket
vllm:cache_config_info
tgi_request_count
tgi_request_success
tgi_request_failure
tgi_request_duration_bucket
tgi_queue_size
tgi_request_validation_duration_bucket
tgi_request_queue_duration_bucket
tgi_request_inference_duration_bucket
tgi_request_mean_time_per_token_duration_bucket
tgi_request_generated_tokens_bucket
tgi_request_input_length_bucket
tgi_request_max_new_tokens_bucket
tgi_request_skipped_tokens_bucket
tgi_batch_current_size
tgi_batch_current_max_tokens
tgi_batch_max_total_tokens
tgi_batch_next_size_bucket
tgi_batch_inference_count
tgi_batch_inference_success
tgi_batch_inference_failure
tgi_batch_concat
tgi_batch_forward_duration_bucket
tgi_batch_decode_duration_bucket
tgi_batch_filter_duration_bucket
tgi_batch_inference_duration_bucket
tgi_batch_concat_duration_bucket
"""


def test_the_metrics_that_dashboards_read_exist(serve: Callable[..., HttpTestServer]) -> None:
    """Every name and label of our Grafana dashboard, and the names that others read."""
    server = serve()
    server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, "ignore_eos": True})
    server.post("/generate", {"inputs": ""})
    text = server.get("/metrics").text
    names = {
        line.partition("{")[0].partition(" ")[0] for line in text.splitlines() if line[0] != "#"
    }
    assert set(EXTERNAL_NAMES.split()) <= names, set(EXTERNAL_NAMES.split()) - names
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    own_names = {
        name for query in queries for name in re.findall(r"\b(?:bloomery|process)_\w+", query)
    }
    assert len(queries) > 20 and own_names <= names, own_names - names
    for query in queries:
        assert 'instance=~"$instance"' in query
        assert "process_" in query or 'model_name=~"$model"' in query
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    for name, label in (("model", "model_name"), ("instance", "instance")):
        assert variables[name]["query"]["query"].endswith(f", {label})")
    for query in queries:
        for labels in re.findall(r"by \(([\w, ]+)\)", query):
            for label in labels.split(", "):
                # Prometheus itself adds the label "instance".
                assert label == "instance" or f'{label}="' in text, (
                    f"no metric has the label {label}"
                )


def test_prefill_and_decode_steps_are_counted_apart() -> None:
    """A prefill alone, a prefill beside decodes, and two decode steps in one report."""
    metrics = ServerMetrics(InProcessEngine(load_test_tokenizer()), "m")
    stats = [
        EngineStats(),
        EngineStats(steps=1, step_seconds=0.3, sequences=1, positions=40, prefill_steps=1),
        EngineStats(steps=2, step_seconds=0.5, sequences=4, positions=60, prefill_steps=2),
        EngineStats(steps=4, step_seconds=0.53, sequences=10, positions=66, prefill_steps=2),
    ]
    for before, after in itertools.pairwise(stats):
        metrics.observe_step(before, after)
    text = metrics.prometheus_text().decode()
    for line in (
        'tgi_batch_inference_count{method="prefill"} 2.0',
        'tgi_batch_inference_count{method="decode"} 2.0',
        'tgi_batch_forward_duration_bucket{le="0.02",method="decode"} 2.0',
        'tgi_batch_inference_duration_sum{method="prefill"} 0.5',
        'tgi_batch_concat{reason="chunking"} 1.0',
        "tgi_batch_next_size_sum 10.0",
        'bloomery_step_tokens_sum{model_name="m"} 66.0',
        'bloomery_step_duration_seconds_count{method="decode",model_name="m"} 2.0',
    ):
        assert line in text, line


def test_build_and_process_metrics(serve: Callable[..., HttpTestServer]) -> None:
    server = serve()
    text = server.get("/metrics").text
    build_lines = [line for line in text.splitlines() if line.startswith("bloomery_build_info{")]
    assert len(build_lines) == 1
    for label in (f'version="{__version__}"', "python_version=", "torch_version="):
        assert label in build_lines[0]
    samples = read_samples(server)
    assert value(samples, "process_resident_memory_bytes") > 1e6
    assert value(samples, "process_cpu_seconds_total") > 0
    assert 0 < value(samples, "process_open_fds") < value(samples, "process_max_fds")
    assert "python_gc_collections_total" in text


def test_restarts_of_the_engine_are_counted() -> None:
    engine = RestartedEngine(load_test_tokenizer())
    text = ServerMetrics(engine, "m").prometheus_text().decode()
    assert 'bloomery_engine_restarts_total{model_name="m"} 3.0' in text


class RestartedEngine(InProcessEngine):
    """An engine whose client has restarted it three times."""

    @property
    def num_restarts(self) -> int:
        return 3
