"""What the server counts, and the names under which others read it: our own, vLLM's and TGI's.

Each figure is kept once, as plainly as can be, because tokens pass here thousands of times a second; the names are a
table that is read when somebody asks. What the engine counts is read from its Stats, not counted again.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric

from bloomery.server.backend import Backend

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
COUNTS = tuple(2**power for power in range(18))
BANDS = ((0.1, "100ms"), (1.0, "1s"), (10.0, "10s"), (60.0, "1min"), (math.inf, "longer"))  # as people feel it
WINDOW = 5  # seconds a rate is taken over
RECENT = 4096  # observations percentiles are taken over


class Distribution:
    def __init__(self, edges: Sequence[float] = SECONDS):
        self.edges, self.counts, self.sum = edges, [0] * (len(edges) + 1), 0.0
        self.recent: deque[float] = deque(maxlen=RECENT)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value
        self.recent.append(value)

    def percentiles(self) -> dict[str, float | None]:
        ordered = sorted(self.recent)
        return {f"p{p}": ordered[len(ordered) * p // 100] if ordered else None for p in (50, 90, 99)}

    def family(self, name: str, about: str, labels: Mapping[str, str]) -> Metric:
        family = HistogramMetricFamily(name, about, labels=list(labels))
        buckets: list[tuple[str, float]] = []
        total = 0
        for edge, count in zip((*self.edges, math.inf), self.counts, strict=True):
            total += count
            buckets.append((str(float(edge)) if edge < math.inf else "+Inf", total))
        family.add_metric(list(labels.values()), buckets, self.sum)
        return family


class Rate:
    """Events a second, over the last few seconds."""

    def __init__(self) -> None:
        self.seconds: deque[list[int]] = deque(maxlen=WINDOW + 1)  # [second, count]

    def add(self, count: int, now: float) -> None:
        if self.seconds and self.seconds[-1][0] == int(now):
            self.seconds[-1][1] += count
        else:
            self.seconds.append([int(now), count])

    def value(self, now: float) -> float:
        return sum(count for second, count in self.seconds if second > now - WINDOW - 1) / WINDOW


@dataclass(slots=True)
class Timings:
    """One request's moments, on the monotonic clock."""

    arrived: float
    submitted: float = 0.0
    first: float = 0.0  # token
    last: float = 0.0
    queued: float = 0.0  # seconds

    @property
    def begun(self) -> float:
        return self.submitted + self.queued


class Metrics:
    def __init__(self, backend: Backend, model: str):
        self.backend, self.model, self.started = backend, model, time.monotonic()
        self.requests = self.prompt_tokens = self.generated_tokens = 0
        self.finished: Counter[str] = Counter()  # sequences, by reason
        self.success = 0
        self.failures: Counter[str] = Counter()  # by TGI's kind
        self.responses: Counter[tuple[str, str]] = Counter()  # route, status
        self.unknown: Counter[str] = Counter()  # fields nobody knows, by route
        self.bands: Counter[tuple[str, str]] = Counter()
        self.first_token, self.between, self.per_token = Distribution(), Distribution(), Distribution()
        self.validation, self.queue, self.inference = Distribution(), Distribution(), Distribution()
        self.prefill, self.decode, self.whole = Distribution(), Distribution(), Distribution()
        self.input_length, self.output_length, self.asked_length = (Distribution(COUNTS) for _ in range(3))
        self.tokens_in, self.tokens_out = Rate(), Rate()
        self.registry = CollectorRegistry()
        self.registry.register(self)

    # ---- a request's life ------------------------------------------------------------------------

    def submit(self, timings: Timings, lengths: Iterable[tuple[int, int]]) -> None:
        """`lengths`: prompt tokens and longest answer, by sequence."""
        self.validation.observe(timings.submitted - timings.arrived)
        for prompt, answer in lengths:
            self.input_length.observe(prompt)
            self.asked_length.observe(answer)

    def first(self, timings: Timings, prompt_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens
        self.tokens_in.add(prompt_tokens, timings.first)
        self.first_token.observe(timings.first - timings.arrived)
        self.queue.observe(timings.queued)
        self.prefill.observe(max(timings.first - timings.begun, 0.0))
        self.bands["first_token", band(timings.first - timings.arrived)] += 1

    def token(self, gap: float | None, now: float) -> None:
        self.generated_tokens += 1
        self.tokens_out.add(1, now)
        if gap is not None:
            self.between.observe(gap)

    def finish(self, timings: Timings, reasons: Iterable[str], lengths: Sequence[int]) -> None:
        inference = max(timings.last - timings.begun, 0.0)
        self.success += 1
        self.finished.update(reasons)
        self.whole.observe(timings.last - timings.arrived)
        self.inference.observe(inference)
        self.decode.observe(max(timings.last - timings.first, 0.0))
        self.per_token.observe(inference / max(sum(lengths), 1))
        for length in lengths:
            self.output_length.observe(length)
        self.bands["whole", band(timings.last - timings.arrived)] += 1

    # ---- read by others --------------------------------------------------------------------------

    def page(self) -> dict[str, object]:
        """One sample of the web page's dashboard."""
        stats, now = self.backend.stats, time.monotonic()
        return {
            "time": time.time(),
            "tokens_per_second": self.tokens_out.value(now),
            "prompt_tokens_per_second": self.tokens_in.value(now),
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_usage": stats.kv_used / stats.kv_blocks if stats.kv_blocks else None,
            "prefix_hit_rate": stats.prefix_hit / stats.prefix_queried if stats.prefix_queried else None,
            "ttft": self.first_token.percentiles(),
            "inter_token": self.between.percentiles(),
            "share_of_limit": None,
            "preemptions": stats.preemptions,
            "requests": self.requests,
            "model": self.model,
            "uptime": now - self.started,
        }

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def describe(self) -> list[Metric]:
        return []  # the registry asks before anything has happened

    def collect(self) -> Iterator[Metric]:
        vllm = {"model_name": self.model, "engine": "0"}
        for about, source, names in self._distributions():
            for name in names:
                yield source.family(name, about, vllm if name.startswith("vllm:") else {})
        for about, kind, value, names in self._numbers():
            for name in names:
                yield _metric(name, about, kind, [({}, value)], vllm)
        for about, name, samples in self._labelled():
            yield _metric(name, about, "counter", samples, vllm)
        if capacity := self.backend.capacity:
            labels = {"block_size": str(capacity.block_size), "num_gpu_blocks": str(capacity.blocks)}
            yield _metric("vllm:cache_config_info", "the KV cache", "gauge", [(labels, 1)], vllm)

    def _distributions(self) -> Iterator[tuple[str, Distribution, tuple[str, ...]]]:
        own, vllm, tgi = "bloomery_", "vllm:", "tgi_request_"
        yield (
            "time to first token",
            self.first_token,
            (own + "time_to_first_token_seconds", vllm + "time_to_first_token_seconds"),
        )
        yield "time between tokens", self.between, (own + "inter_token_seconds", vllm + "inter_token_latency_seconds")
        yield (
            "inference time over tokens",
            self.per_token,
            (vllm + "request_time_per_output_token_seconds", tgi + "mean_time_per_token_duration"),
        )
        yield (
            "arrival to last token",
            self.whole,
            (own + "request_seconds", vllm + "e2e_request_latency_seconds", tgi + "duration"),
        )
        yield (
            "time in the queue",
            self.queue,
            (own + "queue_seconds", vllm + "request_queue_time_seconds", tgi + "queue_duration"),
        )
        yield (
            "first step to last token",
            self.inference,
            (vllm + "request_inference_time_seconds", tgi + "inference_duration"),
        )
        yield "first step to first token", self.prefill, (vllm + "request_prefill_time_seconds",)
        yield "first token to last", self.decode, (vllm + "request_decode_time_seconds",)
        yield "parsing, checking and tokenizing", self.validation, (tgi + "validation_duration",)
        yield "prompt tokens", self.input_length, (vllm + "request_prompt_tokens", tgi + "input_length")
        yield "generated tokens", self.output_length, (vllm + "request_generation_tokens", tgi + "generated_tokens")
        yield "tokens asked for", self.asked_length, (vllm + "request_params_max_tokens", tgi + "max_new_tokens")

    def _numbers(self) -> Iterator[tuple[str, str, float, tuple[str, ...]]]:
        stats, capacity = self.backend.stats, self.backend.capacity
        own, vllm, tgi = "bloomery_", "vllm:", "tgi_"
        block = capacity.block_size if capacity else 0
        usage = stats.kv_used / stats.kv_blocks if stats.kv_blocks else 0.0
        yield (
            "requests in the running batch",
            "gauge",
            stats.running,
            (own + "running", vllm + "num_requests_running", tgi + "batch_current_size"),
        )
        yield (
            "requests in the queue",
            "gauge",
            stats.waiting,
            (own + "waiting", vllm + "num_requests_waiting", tgi + "queue_size"),
        )
        yield "share of the KV cache in use", "gauge", usage, (own + "kv_usage_ratio", vllm + "kv_cache_usage_perc")
        yield "tokens held by the running batch", "gauge", stats.kv_used * block, (tgi + "batch_current_max_tokens",)
        yield "tokens that fit the KV cache", "gauge", stats.kv_blocks * block, (tgi + "batch_max_total_tokens",)
        yield (
            "tokens looked up in the prefix cache",
            "counter",
            stats.prefix_queried,
            (own + "prefix_queried_tokens", vllm + "prefix_cache_queries"),
        )
        yield (
            "tokens found in the prefix cache",
            "counter",
            stats.prefix_hit,
            (own + "prefix_hit_tokens", vllm + "prefix_cache_hits"),
        )
        yield "preemptions", "counter", stats.preemptions, (own + "preemptions", vllm + "num_preemptions")
        yield "steps of the engine", "counter", stats.steps, (own + "steps",)
        yield "seconds the steps took", "counter", stats.step_seconds, (own + "step_seconds",)
        yield "prompt tokens", "counter", self.prompt_tokens, (own + "prompt_tokens", vllm + "prompt_tokens")
        yield (
            "generated tokens",
            "counter",
            self.generated_tokens,
            (own + "generated_tokens", vllm + "generation_tokens"),
        )
        yield "requests to generate", "counter", self.requests, (own + "requests", tgi + "request_count")
        yield (
            "requests answered in full",
            "counter",
            self.success,
            (own + "requests_succeeded", tgi + "request_success"),
        )
        yield "engine up and ready", "gauge", self.backend.status.state == "ready", (own + "ready",)

    def _labelled(self) -> Iterator[tuple[str, str, list[tuple[dict[str, str], float]]]]:
        failed: list[tuple[dict[str, str], float]] = [({"err": kind}, count) for kind, count in self.failures.items()]
        yield "requests that failed", "bloomery_requests_failed", failed
        yield "requests that failed", "tgi_request_failure", failed
        yield (
            "sequences by why they ended",
            "vllm:request_success",
            [({"finished_reason": reason}, n) for reason, n in self.finished.items()],
        )
        yield (
            "HTTP responses",
            "bloomery_responses",
            [({"route": route, "status": status}, n) for (route, status), n in self.responses.items()],
        )
        yield (
            "request fields nobody knows",
            "bloomery_unknown_fields",
            [({"route": route}, n) for route, n in self.unknown.items()],
        )
        bands: list[tuple[dict[str, str], float]] = [
            ({"measure": measure, "band": name}, n) for (measure, name), n in self.bands.items()
        ]
        yield "requests by how long they felt", "bloomery_perceived_requests", bands


def band(seconds: float) -> str:
    return next(name for edge, name in BANDS if seconds <= edge)


def _metric(
    name: str, about: str, kind: str, samples: list[tuple[dict[str, str], float]], vllm: dict[str, str]
) -> Metric:
    """TGI's counters have no _total; the format then wants them untyped."""
    plain = kind == "counter" and name.startswith("tgi_")
    metric = Metric(name, about, "unknown" if plain else kind)
    for labels, value in samples:
        common = vllm if name.startswith("vllm:") else {}
        metric.add_sample(
            name + ("_total" if kind == "counter" and not plain else ""), {**common, **labels}, float(value)
        )
    return metric
