"""Server metrics: counted here, read by Prometheus and by the web page's dashboard.

Each value is counted once and as cheaply as possible, because thousands of tokens a second pass
here. Counts of the engine are read from its EngineStats and not counted again. The names under
which Prometheus reads the metrics are in metric_names.py.
"""

from __future__ import annotations

import math
import platform
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric

from bloomery import __version__
from bloomery.cache_groups import token_capacity
from bloomery.config import installed_torch_version
from bloomery.engine.adapter_catalog import adapter_name_of
from bloomery.engine.loop import break_down_time
from bloomery.messages import CacheGroup, EngineCapacity, EngineStats
from bloomery.server.adapter_metrics import AdapterMetrics
from bloomery.server.backend import InferenceBackend
from bloomery.server.history import HISTORY_FIELDS, INTERVAL_SECONDS, NUM_SAMPLES
from bloomery.server.metric_names import COUNTERS, GAUGES, HISTOGRAMS, PREFIXES

SECONDS_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600),
)
COUNT_BUCKETS = tuple(2**power for power in range(18))
# Bands in which people perceive a delay: the upper limit in seconds, and the label.
PERCEIVED_BANDS = (
    (0.1, "100ms"),
    (1.0, "1s"),
    (10.0, "10s"),
    (60.0, "1min"),
    (math.inf, "longer"),
)
RATE_WINDOW_SECONDS = 5
NUM_RECENT = 4096  # observations that percentiles are taken over

LabeledSamples = list[tuple[dict[str, str], float]]


class MetricHistogram:
    """Counts by bucket, and the most recent observations for percentiles."""

    def __init__(self, upper_bounds: Sequence[float] = SECONDS_BUCKETS):
        self.upper_bounds = upper_bounds
        self.counts = [0] * (len(upper_bounds) + 1)
        self.sum = 0.0
        self.recent: deque[float] = deque(maxlen=NUM_RECENT)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.upper_bounds, value)] += 1
        self.sum += value
        self.recent.append(value)

    def percentiles(self) -> dict[str, float | None]:
        ordered = sorted(self.recent)
        if not ordered:
            return {"p50": None, "p90": None, "p99": None}
        return {f"p{p}": ordered[len(ordered) * p // 100] for p in (50, 90, 99)}

    def cumulative_buckets(self) -> list[tuple[str, float]]:
        buckets: list[tuple[str, float]] = []
        total = 0
        bounds = (*map(float, self.upper_bounds), math.inf)
        for bound, count in zip(bounds, self.counts, strict=True):
            total += count
            buckets.append((str(bound).replace("inf", "+Inf"), total))
        return buckets


def histogram_family(
    name: str,
    help_text: str,
    labels: Sequence[str],
    histograms: Mapping[tuple[str, ...], MetricHistogram],
) -> Metric:
    """Histograms by the values of their labels, as one metric."""
    metric = HistogramMetricFamily(name, help_text, labels=labels)
    for values, histogram in histograms.items():
        metric.add_metric(values, histogram.cumulative_buckets(), histogram.sum)
    return metric


class TokenRate:
    """Tokens per second over the last RATE_WINDOW_SECONDS."""

    def __init__(self) -> None:
        self.seconds: deque[list[int]] = deque(maxlen=RATE_WINDOW_SECONDS + 1)  # [second, count]

    def add(self, count: int, now: float) -> None:
        if self.seconds and self.seconds[-1][0] == int(now):
            self.seconds[-1][1] += count
        else:
            self.seconds.append([int(now), count])

    def value(self, now: float) -> float:
        oldest = now - RATE_WINDOW_SECONDS - 1
        total = sum(count for second, count in self.seconds if second > oldest)
        return total / RATE_WINDOW_SECONDS


@dataclass(slots=True)
class RequestTimings:
    """Times of one request on the monotonic clock; 0 for events that have not happened yet."""

    arrived: float
    submitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    queue_seconds: float = 0.0

    @property
    def started(self) -> float:
        """When its first step began."""
        return self.submitted + self.queue_seconds


class ServerMetrics:
    """All metrics of one server; a collector of its own Prometheus registry."""

    def __init__(self, backend: InferenceBackend, model: str):
        self.backend = backend
        self.model = model
        self.started = time.monotonic()
        self.histograms = {
            key: MetricHistogram(COUNT_BUCKETS if key.endswith("length") else SECONDS_BUCKETS)
            for key in HISTOGRAMS
        }
        self.requests = 0
        self.success = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.finish_reasons: Counter[tuple[str, ...]] = Counter()  # of sequences
        self.failures: Counter[tuple[str, ...]] = Counter()  # by TGI's error type
        self.responses: Counter[tuple[str, ...]] = Counter()  # by route and status
        self.unknown_fields: Counter[tuple[str, ...]] = Counter()  # by route
        self.perceived: Counter[tuple[str, ...]] = Counter()  # by measure and band
        self.adapters = AdapterMetrics()
        self.prompt_token_rate = TokenRate()
        self.output_token_rate = TokenRate()
        methods: tuple[tuple[str, ...], ...] = (("prefill",), ("decode",))  # TGI's label
        self.step_seconds = {method: MetricHistogram() for method in methods}
        self.mixed_steps = 0  # steps with a prefill beside running sequences
        backend.add_step_observer(self.observe_step)
        self.build_info = {
            "version": __version__,
            "python_version": platform.python_version(),
            "torch_version": installed_torch_version(),
        }
        self.samples: deque[dict[str, object]] = deque(maxlen=NUM_SAMPLES)  # for the dashboard
        self.next_sample = 0.0  # on the monotonic clock
        self.registry = CollectorRegistry()
        self.registry.register(self)
        # Of the API process: processor time, memory, file descriptors, garbage collections.
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    # ---- observations ------------------------------------------------------------------------

    def observe_step(self, before: EngineStats, after: EngineStats) -> None:
        """Count the steps between two reports of the engine, which is one step in most cases.

        They count as prefill steps if any of them has a prefill.
        """
        if after.adapter_slots != before.adapter_slots:
            self.adapters.observe_slots(before.adapter_slots, after.adapter_slots)
        num_steps = after.steps - before.steps
        num_prompts = after.prefill_steps - before.prefill_steps
        num_sequences = after.sequences - before.sequences
        method = "prefill" if num_prompts else "decode"
        self.mixed_steps += bool(num_prompts) and num_sequences > num_prompts
        for _ in range(num_steps):
            seconds = (after.step_seconds - before.step_seconds) / num_steps
            num_tokens = (after.positions - before.positions) / num_steps
            self.step_seconds[method,].observe(seconds)
            self.histograms["step_sequences_length"].observe(num_sequences / num_steps)
            self.histograms["step_tokens_length"].observe(num_tokens)

    def observe_submit(
        self, timings: RequestTimings, lengths: Iterable[tuple[int, int]], num_answers: int
    ) -> None:
        """`lengths`: (prompt tokens, max_tokens) of each sequence; `num_answers` of a prompt."""
        self.histograms["validation"].observe(timings.submitted - timings.arrived)
        self.histograms["answers_length"].observe(num_answers)
        for prompt_length, max_tokens in lengths:
            self.histograms["prompt_length"].observe(prompt_length)
            self.histograms["max_tokens_length"].observe(max_tokens)

    def observe_first_token(
        self, timings: RequestTimings, num_prompt_tokens: int, num_cached: int
    ) -> None:
        ttft = timings.first_token - timings.arrived
        self.prompt_tokens += num_prompt_tokens
        self.prompt_token_rate.add(num_prompt_tokens, timings.first_token)
        self.histograms["ttft"].observe(ttft)
        self.histograms["queue"].observe(timings.queue_seconds)
        self.histograms["cached_length"].observe(num_cached)
        self.histograms["prefill"].observe(max(timings.first_token - timings.started, 0.0))
        self.perceived["first_token", perceived_band(ttft)] += 1

    def observe_tokens(self, count: int, gap_seconds: float | None, now: float) -> None:
        """Count tokens of one sequence that arrived together.

        `gap_seconds`: since the sequence's last token; None for its first.
        """
        self.generated_tokens += count
        self.output_token_rate.add(count, now)
        latencies = self.histograms["itl"]
        if gap_seconds is not None and count:
            latencies.observe(gap_seconds)
        for _ in range(count - 1):
            latencies.observe(0.0)

    def observe_finish(
        self, timings: RequestTimings, reasons: Iterable[str], lengths: Sequence[int]
    ) -> None:
        """Count an answered request with the finish reasons and output tokens of its sequences."""
        inference_seconds = max(timings.last_token - timings.started, 0.0)
        decode_seconds = max(timings.last_token - timings.first_token, 0.0)
        self.finish_reasons.update((reason,) for reason in reasons)
        self.histograms["inference"].observe(inference_seconds)
        self.histograms["decode"].observe(decode_seconds)
        self.histograms["tpot"].observe(inference_seconds / max(sum(lengths), 1))
        self.histograms["longest_output_length"].observe(max(lengths, default=0))
        for length in lengths:
            self.histograms["output_length"].observe(length)
        self._observe_success(timings)

    def observe_embedding(self, timings: RequestTimings, num_prompt_tokens: int) -> None:
        """Count a request that was answered without generating a token."""
        self.prompt_tokens += num_prompt_tokens
        self.prompt_token_rate.add(num_prompt_tokens, timings.last_token)
        self._observe_success(timings)

    def _observe_success(self, timings: RequestTimings) -> None:
        seconds = timings.last_token - timings.arrived
        self.success += 1
        self.histograms["end_to_end"].observe(seconds)
        self.perceived["end_to_end", perceived_band(seconds)] += 1

    # ---- reading -----------------------------------------------------------------------------

    def record_sample(self) -> None:
        """Keep a sample for the dashboard's history if one is due; called once a second."""
        now = time.monotonic()
        if now < self.next_sample:
            return
        self.next_sample = now + INTERVAL_SECONDS - 0.5  # calls are not exactly a second apart
        sample = self.dashboard_sample()
        self.samples.append({name: sample[name] for name in HISTORY_FIELDS})

    def dashboard_sample(self) -> dict[str, object]:
        """One sample for the web page's dashboard."""
        stats = self.backend.stats
        now = time.monotonic()
        kv_usage = stats.kv_used / stats.kv_blocks if stats.kv_blocks else None
        hit_rate = stats.prefix_hit / stats.prefix_queried if stats.prefix_queried else None
        return {
            "time": time.time(),
            "tokens_per_second": self.output_token_rate.value(now),
            "prompt_tokens_per_second": self.prompt_token_rate.value(now),
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_usage": kv_usage,
            "prefix_hit_rate": hit_rate,
            "ttft": self.histograms["ttft"].percentiles(),
            "inter_token": self.histograms["itl"].percentiles(),
            "share_of_limit": stats.roofline_share,
            "seconds_by_part": {"floor": stats.timing.floor, **break_down_time(stats.timing)},
            "preemptions": stats.preemptions,
            "requests": self.requests,
            "model": self.model,
            "uptime": now - self.started,
        }

    def prometheus_text(self) -> bytes:
        return generate_latest(self.registry)

    def describe(self) -> list[Metric]:
        """Return nothing: the registry calls this before there is anything to collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics under all their names."""
        for key, (help_text, *names) in HISTOGRAMS.items():
            for name in _full_names(names):
                labels = self._common_labels(name)
                samples = {tuple(labels.values()): self.histograms[key]}
                yield histogram_family(name, help_text, list(labels), samples)
        yield from self._step_metrics()
        values = self._current_values()
        for kind, table in (("gauge", GAUGES), ("counter", COUNTERS)):
            for key, (help_text, *names) in table.items():
                for name in _full_names(names):
                    yield self._metric(name, help_text, kind, [({}, values[key])])
        yield from self._labeled_counters()
        slots: LabeledSamples = [
            (
                {
                    "slot": str(number),
                    "adapter": self.adapters.label_of(adapter_name_of(engine_name)),
                },
                1,
            )
            for number, engine_name in enumerate(self.backend.stats.adapter_slots, 1)
            if engine_name
        ]
        help_text = "1 for the LoRA adapter in a device slot; slots are counted over all engines"
        yield self._metric("bloomery_adapter_in_slot", help_text, "gauge", slots)
        if self.backend.stats.adapter_slots:
            yield self._open_adapters_metric()
        build: LabeledSamples = [(self.build_info, 1)]
        yield self._metric("bloomery_build_info", "versions of this server", "gauge", build)
        if capacity := self.backend.capacity:
            # Readers multiply both for the tokens that fit; groups may share the real blocks.
            num_blocks = count_tokens(capacity, capacity.blocks) // capacity.block_size
            sizes = {"block_size": str(capacity.block_size), "num_gpu_blocks": str(num_blocks)}
            yield self._metric("vllm:cache_config_info", "the KV cache", "gauge", [(sizes, 1)])
            yield self._cache_group_metric(capacity)

    def _current_values(self) -> dict[str, float]:
        """Values of GAUGES and COUNTERS by their keys."""
        stats = self.backend.stats
        capacity = self.backend.capacity
        kv_usage = stats.kv_used / max(stats.kv_blocks, 1)
        kv_capacity = 0
        if capacity:
            kv_capacity = count_tokens(capacity, stats.kv_blocks)
        return {
            **asdict(stats.timing),
            **asdict(stats),
            "kv_tokens": round(kv_usage * kv_capacity),
            "kv_capacity": kv_capacity,
            "kv_usage": kv_usage,
            "checkpoint_usage": stats.checkpoint_blocks / max(stats.kv_blocks, 1),
            "limit": stats.roofline_share or 0.0,
            "ready": self.backend.status.state == "ready",
            "restarts": self.backend.num_restarts,
            "requests": self.requests,
            "success": self.success,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
        }

    def _cache_group_metric(self, capacity: EngineCapacity) -> Metric:
        """The share of the KV cache that each cache group uses."""
        stats = self.backend.stats
        groups = zip(capacity.cache_groups, stats.kv_used_by_group, strict=False)
        samples: LabeledSamples = [
            ({"group": describe_group(group)}, used / max(stats.kv_blocks, 1))
            for group, used in groups
        ]
        return self._metric(
            "bloomery_kv_group_usage_ratio",
            "share of the KV cache in use, by cache group",
            "gauge",
            samples,
        )

    def _step_metrics(self) -> Iterator[Metric]:
        """Yield step metrics under TGI's names. TGI phases that do not exist here stay empty."""
        seconds = self.step_seconds
        for name in (
            "bloomery_step_duration_seconds",
            "tgi_batch_inference_duration",
            "tgi_batch_forward_duration",
        ):
            common = self._common_labels(name)
            labels = [*common, "method"]
            samples = {(*common.values(), *method): seconds[method] for method in seconds}
            yield histogram_family(name, "seconds of a step", labels, samples)
        for phase in ("decode", "filter", "concat"):
            empty = dict.fromkeys(seconds, MetricHistogram())
            name = f"tgi_batch_{phase}_duration"
            yield histogram_family(name, "empty: there is no such phase", ["method"], empty)
        counts: LabeledSamples = [
            ({"method": method}, sum(histogram.counts)) for (method,), histogram in seconds.items()
        ]
        failures: LabeledSamples = [({"method": method}, 0) for (method,) in seconds]
        mixed: LabeledSamples = [({"reason": "chunking"}, self.mixed_steps)]
        for name, help_text, counter_samples in (
            ("tgi_batch_inference_count", "steps of the engine", counts),
            ("tgi_batch_inference_success", "steps of the engine", counts),
            ("tgi_batch_inference_failure", "none: a failed step is run again", failures),
            ("tgi_batch_concat", "steps with a prefill beside decodes", mixed),
        ):
            yield self._metric(name, help_text, "counter", counter_samples)

    def _labeled_counters(self) -> Iterator[Metric]:
        failures = _label_samples(self.failures, "err")
        finished = _label_samples(self.finish_reasons, "finished_reason")
        responses = _label_samples(self.responses, "route", "status")
        unknown = _label_samples(self.unknown_fields, "route")
        perceived = _label_samples(self.perceived, "measure", "band")
        for name, help_text, samples in (
            ("bloomery_requests_failed", "requests that failed", failures),
            ("tgi_request_failure", "requests that failed", failures),
            ("vllm:request_success", "sequences by finish reason", finished),
            ("bloomery_responses", "HTTP responses", responses),
            ("bloomery_unknown_fields", "request fields that no body type declares", unknown),
            *self.adapters.collect(),
            (
                "bloomery_perceived_requests",
                "requests by the band of their perceived delay",
                perceived,
            ),
        ):
            yield self._metric(name, help_text, "counter", samples)

    def _open_adapters_metric(self) -> Metric:
        """vLLM's metric, by which gateways send a request where its adapter already is."""
        slots = self.backend.stats.adapter_slots
        in_slots = {adapter_name_of(engine_name) for engine_name in slots}
        names = list(self.adapters.open_requests)
        labels = {
            "max_lora": str(len(slots)),
            "running_lora_adapters": ",".join(name for name in names if name in in_slots),
            "waiting_lora_adapters": ",".join(name for name in names if name not in in_slots),
        }
        help_text = "LoRA adapters of open requests; the value is the time"
        return self._metric("vllm:lora_requests_info", help_text, "gauge", [(labels, time.time())])

    def _common_labels(self, name: str) -> dict[str, str]:
        """The labels of every sample of a metric. TGI's metrics have none."""
        if name.startswith("vllm:"):
            return {"model_name": self.model, "engine": "0"}
        if name.startswith("bloomery_"):
            return {"model_name": self.model}
        return {}

    def _metric(
        self, name: str, help_text: str, kind: str, samples: Sequence[tuple[dict[str, str], float]]
    ) -> Metric:
        """Build one metric. TGI's counters have no _total suffix, so they must be untyped."""
        is_untyped = kind == "counter" and name.startswith("tgi_")
        suffix = "_total" if kind == "counter" and not is_untyped else ""
        metric = Metric(name, help_text, "unknown" if is_untyped else kind)
        for labels, value in samples:
            metric.add_sample(name + suffix, {**self._common_labels(name), **labels}, float(value))
        return metric


def perceived_band(seconds: float) -> str:
    return next(label for limit, label in PERCEIVED_BANDS if seconds <= limit)


def count_tokens(capacity: EngineCapacity, num_blocks: int) -> int:
    """Tokens that so many blocks of the KV cache hold."""
    return token_capacity(
        capacity.cache_groups, num_blocks, capacity.block_size, capacity.max_model_len
    )


def describe_group(group: CacheGroup) -> str:
    """The label of a cache group: what its layers keep."""
    if group.state_blocks:
        return "recurrent"
    return "full" if group.window is None else f"window-{group.window}"


def _label_samples(counter: Mapping[tuple[str, ...], int], *labels: str) -> LabeledSamples:
    return [(dict(zip(labels, values, strict=True)), count) for values, count in counter.items()]


def _full_names(names: Iterable[str]) -> Iterator[str]:
    for prefix, prefix_names in zip(PREFIXES, names, strict=True):
        for name in prefix_names.split():
            yield prefix + name
