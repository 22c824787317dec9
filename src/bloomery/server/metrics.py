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
from dataclasses import asdict, dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric

from bloomery.engine.gauge import parts
from bloomery.messages import EngineStats
from bloomery.server.backend import Backend

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
COUNTS = tuple(2**power for power in range(18))
BANDS = (
    (0.1, "100ms"),
    (1.0, "1s"),
    (10.0, "10s"),
    (60.0, "1min"),
    (math.inf, "longer"),
)  # as people feel it
WINDOW = 5  # seconds a rate is taken over
RECENT = 4096  # observations percentiles are taken over

# what we call it -> what it is, and its names after bloomery_, vllm: and tgi_, old ones too
DISTRIBUTIONS = {
    "first_token": (
        "time to first token",
        "time_to_first_token_seconds",
        "time_to_first_token_seconds",
        "",
    ),
    "between": (
        "time between tokens",
        "inter_token_seconds",
        "inter_token_latency_seconds time_per_output_token_seconds",
        "",
    ),
    "per_token": (
        "time a token",
        "",
        "request_time_per_output_token_seconds",
        "request_mean_time_per_token_duration",
    ),
    "whole": (
        "arrival to last token",
        "request_seconds",
        "e2e_request_latency_seconds",
        "request_duration",
    ),
    "queue": (
        "time in the queue",
        "queue_seconds",
        "request_queue_time_seconds",
        "request_queue_duration",
    ),
    "inference": (
        "first step to last token",
        "",
        "request_inference_time_seconds",
        "request_inference_duration",
    ),
    "prefill": ("first step to first token", "", "request_prefill_time_seconds", ""),
    "decode": ("first token to last", "", "request_decode_time_seconds", ""),
    "validation": ("parsing, checking and tokenizing", "", "", "request_validation_duration"),
    "input_length": ("prompt tokens", "", "request_prompt_tokens", "request_input_length"),
    "output_length": (
        "generated tokens",
        "",
        "request_generation_tokens",
        "request_generated_tokens",
    ),
    "longest_length": (
        "tokens of a request's longest answer",
        "",
        "request_max_num_generation_tokens",
        "",
    ),
    "answers_length": ("answers to a prompt", "", "request_params_n", ""),
    "cached_length": ("prompt tokens found in the prefix cache", "", "", "request_skipped_tokens"),
    "step_length": ("positions computed in a step", "step_positions", "iteration_tokens_total", ""),
    "batch_length": ("sequences in a step", "step_sequences", "", "batch_next_size"),
    "asked_length": ("tokens asked for", "", "request_params_max_tokens", "request_max_new_tokens"),
}
GAUGES = {
    "running": (
        "requests in the running batch",
        "running",
        "num_requests_running",
        "batch_current_size",
    ),
    "waiting": ("requests in the queue", "waiting", "num_requests_waiting", "queue_size"),
    "usage": (
        "share of the KV cache in use",
        "kv_usage_ratio",
        "kv_cache_usage_perc gpu_cache_usage_perc",
        "",
    ),
    "held": ("tokens held by the running batch", "", "", "batch_current_max_tokens"),
    "room": ("tokens that fit the KV cache", "", "", "batch_max_total_tokens"),
    "ready": ("whether requests are answered", "ready", "", ""),
    "limit": ("share of the hardware's limit reached in the last seconds", "limit_ratio", "", ""),
}
COUNTERS = {
    "prefix_queried": (
        "tokens looked up in the prefix cache",
        "prefix_queried_tokens",
        "prefix_cache_queries",
        "",
    ),
    "prefix_hit": (
        "tokens found in the prefix cache",
        "prefix_hit_tokens",
        "prefix_cache_hits",
        "",
    ),
    "preemptions": ("preemptions", "preemptions", "num_preemptions", ""),
    "steps": ("steps of the engine", "steps", "", ""),
    "step_seconds": ("seconds the steps took", "step_seconds", "", ""),
    "tax_seconds": ("seconds long requests gave for short ones", "tax_seconds", "", ""),
    "floor": ("seconds the steps take at the least", "floor_seconds", "", ""),
    "expected": ("seconds the steps were planned to take", "expected_seconds", "", ""),
    "device": ("seconds the device worked on steps", "device_seconds", "", ""),
    "idle": ("seconds the device waited for the host", "device_idle_seconds", "", ""),
    "host": ("seconds the host took to queue steps", "host_seconds", "", ""),
    "sampling": ("seconds of choosing tokens outside captured steps", "sampling_seconds", "", ""),
    "padding": ("seconds lost on lines that pad captured steps", "padding_seconds", "", ""),
    "communication": ("seconds of messages between ranks", "communication_seconds", "", ""),
    "prompt_tokens": ("prompt tokens", "prompt_tokens", "prompt_tokens", ""),
    "generated_tokens": ("generated tokens", "generated_tokens", "generation_tokens", ""),
    "requests": ("requests to generate", "requests", "", "request_count"),
    "success": ("requests answered in full", "requests_succeeded", "", "request_success"),
}


class Distribution:
    def __init__(self, edges: Sequence[float] = SECONDS):
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0
        self.recent: deque[float] = deque(maxlen=RECENT)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value
        self.recent.append(value)

    def percentiles(self) -> dict[str, float | None]:
        ordered = sorted(self.recent)
        return {
            f"p{p}": ordered[len(ordered) * p // 100] if ordered else None for p in (50, 90, 99)
        }

    def buckets(self) -> list[tuple[str, float]]:
        buckets: list[tuple[str, float]] = []
        total = 0
        for edge, count in zip((*map(float, self.edges), math.inf), self.counts, strict=True):
            total += count
            buckets.append((str(edge).replace("inf", "+Inf"), total))
        return buckets


def family(
    name: str, about: str, labels: Sequence[str], of: Mapping[tuple[str, ...], Distribution]
) -> Metric:
    """Distributions by the values of their labels, as one metric."""
    made = HistogramMetricFamily(name, about, labels=labels)
    for values, distribution in of.items():
        made.add_metric(values, distribution.buckets(), distribution.sum)
    return made


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
        self.backend = backend
        self.model = model
        self.started = time.monotonic()
        self.seen = {
            name: Distribution(COUNTS if name.endswith("length") else SECONDS)
            for name in DISTRIBUTIONS
        }
        self.requests = self.success = self.prompt_tokens = self.generated_tokens = 0
        self.finished: Counter[tuple[str, ...]] = Counter()  # sequences, by reason
        self.failures: Counter[tuple[str, ...]] = Counter()  # by TGI's kind
        self.responses: Counter[tuple[str, ...]] = Counter()  # by route and status
        self.unknown: Counter[tuple[str, ...]] = Counter()  # fields nobody knows, by route
        self.bands: Counter[tuple[str, ...]] = Counter()  # by measure and band
        self.tokens_in = Rate()
        self.tokens_out = Rate()
        kinds: tuple[tuple[str, ...], ...] = (("prefill",), ("decode",))  # as TGI names its methods
        self.steps = {kind: Distribution() for kind in kinds}  # seconds
        self.joined = 0  # steps in which a prompt was computed beside running sequences
        backend.observe(self.step)
        self.registry = CollectorRegistry()
        self.registry.register(self)

    # ---- a step ----------------------------------------------------------------------------------

    def step(self, before: EngineStats, after: EngineStats) -> None:
        """One step, or a few if their news came together; those with a prompt in them are TGI's prefill."""
        steps = after.steps - before.steps
        prompts = after.prompt_steps - before.prompt_steps
        sequences = after.sequences - before.sequences
        kind = "prefill" if prompts else "decode"
        self.joined += bool(prompts) and sequences > prompts
        for _ in range(steps):
            self.steps[kind,].observe((after.step_seconds - before.step_seconds) / steps)
            self.seen["batch_length"].observe(sequences / steps)
            self.seen["step_length"].observe((after.positions - before.positions) / steps)

    # ---- a request's life ------------------------------------------------------------------------

    def submit(self, timings: Timings, lengths: Iterable[tuple[int, int]], answers: int) -> None:
        """`lengths`: prompt tokens and longest answer, by sequence; `answers` to each prompt."""
        self.seen["validation"].observe(timings.submitted - timings.arrived)
        self.seen["answers_length"].observe(answers)
        for prompt, answer in lengths:
            self.seen["input_length"].observe(prompt)
            self.seen["asked_length"].observe(answer)

    def first(self, timings: Timings, prompt_tokens: int, cached: int) -> None:
        self.prompt_tokens += prompt_tokens
        self.tokens_in.add(prompt_tokens, timings.first)
        self.seen["first_token"].observe(timings.first - timings.arrived)
        self.seen["queue"].observe(timings.queued)
        self.seen["cached_length"].observe(cached)
        self.seen["prefill"].observe(max(timings.first - timings.begun, 0.0))
        self.bands["first_token", band(timings.first - timings.arrived)] += 1

    def token(self, gap: float | None, now: float) -> None:
        self.generated_tokens += 1
        self.tokens_out.add(1, now)
        if gap is not None:
            self.seen["between"].observe(gap)

    def finish(self, timings: Timings, reasons: Iterable[str], lengths: Sequence[int]) -> None:
        inference = max(timings.last - timings.begun, 0.0)
        self.success += 1
        self.finished.update((reason,) for reason in reasons)
        self.seen["whole"].observe(timings.last - timings.arrived)
        self.seen["inference"].observe(inference)
        self.seen["decode"].observe(max(timings.last - timings.first, 0.0))
        self.seen["per_token"].observe(inference / max(sum(lengths), 1))
        self.seen["longest_length"].observe(max(lengths, default=0))
        for length in lengths:
            self.seen["output_length"].observe(length)
        self.bands["whole", band(timings.last - timings.arrived)] += 1

    def embed(self, timings: Timings, prompt_tokens: int) -> None:
        """A request that was answered without a token."""
        self.success += 1
        self.prompt_tokens += prompt_tokens
        self.tokens_in.add(prompt_tokens, timings.last)
        self.seen["whole"].observe(timings.last - timings.arrived)
        self.bands["whole", band(timings.last - timings.arrived)] += 1

    # ---- read by others --------------------------------------------------------------------------

    def page(self) -> dict[str, object]:
        """One sample of the web page's dashboard."""
        stats = self.backend.stats
        now = time.monotonic()
        return {
            "time": time.time(),
            "tokens_per_second": self.tokens_out.value(now),
            "prompt_tokens_per_second": self.tokens_in.value(now),
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_usage": stats.kv_used / stats.kv_blocks if stats.kv_blocks else None,
            "prefix_hit_rate": stats.prefix_hit / stats.prefix_queried
            if stats.prefix_queried
            else None,
            "ttft": self.seen["first_token"].percentiles(),
            "inter_token": self.seen["between"].percentiles(),
            "share_of_limit": stats.share,
            "seconds_by_part": {"floor": stats.timing.floor, **parts(stats.timing)},
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
        values = self._values()
        for key, (about, *names) in DISTRIBUTIONS.items():
            for name in _full(names):
                labels = self._labels(name)
                yield family(name, about, list(labels), {tuple(labels.values()): self.seen[key]})
        yield from self._batches()
        for kind, table in (("gauge", GAUGES), ("counter", COUNTERS)):
            for key, (about, *names) in table.items():
                yield from (
                    self._metric(name, about, kind, [({}, values[key])]) for name in _full(names)
                )
        for name, about, samples in self._labelled():
            yield self._metric(name, about, "counter", samples)
        if capacity := self.backend.capacity:
            sizes = {"block_size": str(capacity.block_size), "num_gpu_blocks": str(capacity.blocks)}
            yield self._metric("vllm:cache_config_info", "the KV cache", "gauge", [(sizes, 1)])

    def _values(self) -> dict[str, float]:
        stats = self.backend.stats
        capacity = self.backend.capacity
        block = capacity.block_size if capacity else 0
        return {
            **asdict(stats.timing),
            **asdict(stats),
            "held": stats.kv_used * block,
            "room": stats.kv_blocks * block,
            "usage": stats.kv_used / max(stats.kv_blocks, 1),
            "limit": stats.share or 0.0,
            "ready": self.backend.status.state == "ready",
            "requests": self.requests,
            "success": self.success,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
        }

    def _batches(self) -> Iterator[Metric]:
        """Steps by TGI's names. What it does between two of them is no work of its own here: nothing is observed."""
        yield family("bloomery_step_duration_seconds", "seconds of a step", ["method"], self.steps)
        for name in ("inference", "forward"):
            yield family(f"tgi_batch_{name}_duration", "seconds of a step", ["method"], self.steps)
        for name in ("decode", "filter", "concat"):
            nothing = dict.fromkeys(self.steps, Distribution())
            yield family(
                f"tgi_batch_{name}_duration", "nothing: there is no such phase", ["method"], nothing
            )
        counts = [({"method": method}, sum(seen.counts)) for (method,), seen in self.steps.items()]
        for name in ("count", "success"):
            yield self._metric(
                f"tgi_batch_inference_{name}", "steps of the engine", "counter", counts
            )
        failed = [({"method": method}, 0) for (method,) in self.steps]
        yield self._metric(
            "tgi_batch_inference_failure", "none: a failed step is run again", "counter", failed
        )
        yield self._metric(
            "tgi_batch_concat",
            "steps with a prompt beside others",
            "counter",
            [({"reason": "chunking"}, self.joined)],
        )

    def _labelled(self) -> Iterator[tuple[str, str, list[tuple[dict[str, str], float]]]]:
        def samples(
            counter: Mapping[tuple[str, ...], int], *labels: str
        ) -> list[tuple[dict[str, str], float]]:
            return [(dict(zip(labels, key, strict=True)), count) for key, count in counter.items()]

        yield "bloomery_requests_failed", "requests that failed", samples(self.failures, "err")
        yield "tgi_request_failure", "requests that failed", samples(self.failures, "err")
        yield (
            "vllm:request_success",
            "sequences by why they ended",
            samples(self.finished, "finished_reason"),
        )
        yield "bloomery_responses", "HTTP responses", samples(self.responses, "route", "status")
        yield (
            "bloomery_unknown_fields",
            "request fields nobody knows",
            samples(self.unknown, "route"),
        )
        yield (
            "bloomery_perceived_requests",
            "requests by how long they felt",
            samples(self.bands, "measure", "band"),
        )

    def _labels(self, name: str) -> dict[str, str]:
        return {"model_name": self.model, "engine": "0"} if name.startswith("vllm:") else {}

    def _metric(
        self, name: str, about: str, kind: str, samples: Sequence[tuple[dict[str, str], float]]
    ) -> Metric:
        """TGI's counters have no _total; the format then wants them untyped."""
        untyped = kind == "counter" and name.startswith("tgi_")
        metric = Metric(name, about, "unknown" if untyped else kind)
        for labels, value in samples:
            suffix = "_total" if kind == "counter" and not untyped else ""
            metric.add_sample(name + suffix, {**self._labels(name), **labels}, float(value))
        return metric


def band(seconds: float) -> str:
    return next(name for edge, name in BANDS if seconds <= edge)


def _full(names: Iterable[str]) -> Iterator[str]:
    return (
        prefix + one
        for prefix, name in zip(("bloomery_", "vllm:", "tgi_"), names, strict=True)
        for one in name.split()
    )
