"""Latency metrics of a run, in real or virtual time: percentiles, perception bands, goodput.

TTFT (time to first token): from sending the request to the first piece of text. ITL (inter-token
latency): the gap between two consecutive pieces. TPOT (time per output token): from the first piece
to the last, divided by the tokens in between. End-to-end latency: to the last byte. Throughput: all
output tokens of answered requests over the time from the first request to the last byte.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

# Bands in which people perceive a delay: the name, and the upper limit in seconds.
BANDS: Sequence[tuple[str, float]] = (
    ("instant", 0.1),
    ("fast", 1.0),
    ("slow", 10.0),
    ("too long", float("inf")),
)
PERCENTS = (50, 90, 99)
MAX_ERROR_KINDS = 8
# The latency metrics of a summary: key, label.
LATENCY_METRICS = (
    ("ttft_ms", "first token (TTFT)"),
    ("itl_ms", "between tokens (ITL)"),
    ("tpot_ms", "per token (TPOT)"),
    ("e2e_latency_ms", "end to end"),
)
LABEL_WIDTH = 30  # columns


@dataclass(slots=True)
class RequestRecord:
    """One request and its answer. All times are seconds on one clock."""

    sent: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    # When each piece of text arrived.
    piece_times: array[float] = field(default_factory=lambda: array("d"))
    done: float = 0.0
    error: str | None = None

    @property
    def answered(self) -> bool:
        return self.error is None and len(self.piece_times) > 0

    @property
    def ttft(self) -> float:
        return self.piece_times[0] - self.sent

    @property
    def tpot(self) -> float:
        if self.output_tokens <= 1:
            return 0.0
        return (self.piece_times[-1] - self.piece_times[0]) / (self.output_tokens - 1)

    @property
    def e2e_latency(self) -> float:
        return self.done - self.sent

    def inter_token_latencies(self) -> list[float]:
        return [after - before for before, after in pairwise(self.piece_times)]


@dataclass(frozen=True)
class GoodputTargets:
    """The latencies, in seconds, within which a request counts towards goodput."""

    ttft: float = 1.0
    tpot: float = 0.1

    def are_met(self, record: RequestRecord) -> bool:
        return record.answered and record.ttft <= self.ttft and record.tpot <= self.tpot


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """A percentile of sorted values, interpolated linearly between the two nearest."""
    if not ordered:
        return None
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def latency_percentiles(seconds: Iterable[float]) -> dict[str, Any]:
    """Percentiles, mean and maximum in milliseconds, and the number of values."""
    ordered = sorted(seconds)
    mean = sum(ordered) / len(ordered) if ordered else None
    maximum = ordered[-1] if ordered else None
    result: dict[str, Any] = {f"p{p}": _to_ms(percentile(ordered, p)) for p in PERCENTS}
    result["mean"] = _to_ms(mean)
    result["max"] = _to_ms(maximum)
    result["n"] = len(ordered)
    return result


def _to_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def count_bands(seconds: Iterable[float]) -> dict[str, int]:
    """How many values fall into each perception band."""
    counts = Counter(_band_of(value) for value in seconds)
    return {name: counts[name] for name, _ in BANDS}


def _band_of(seconds: float) -> str:
    return next(name for name, limit in BANDS if seconds <= limit)


def summarize_records(records: Sequence[RequestRecord], targets: GoodputTargets) -> dict[str, Any]:
    """All metrics of a run, as `bloomery bench --json` writes them."""
    answered = [record for record in records if record.answered]
    failed = [record for record in records if not record.answered]
    errors = Counter(record.error or "the answer has no text" for record in failed)
    first_sent = min((record.sent for record in records), default=0.0)
    last_done = max((record.done for record in records), default=0.0)
    wall_seconds = last_done - first_sent
    num_tokens = sum(record.output_tokens for record in answered)
    num_pieces = sum(len(record.piece_times) for record in answered)
    num_good = sum(targets.are_met(record) for record in records)
    latencies = {
        "ttft_ms": [record.ttft for record in answered],
        "itl_ms": [gap for record in answered for gap in record.inter_token_latencies()],
        "tpot_ms": [record.tpot for record in answered if record.output_tokens > 1],
        "e2e_latency_ms": [record.e2e_latency for record in answered],
    }
    return {
        "requests": len(records),
        "answered": len(answered),
        "errors": dict(errors.most_common(MAX_ERROR_KINDS)),
        "seconds": round(wall_seconds, 4),
        "output_tokens": num_tokens,
        "tokens_per_second": _ratio(num_tokens, wall_seconds),
        "requests_per_second": _ratio(len(answered), wall_seconds),
        "tokens_per_piece": _ratio(num_tokens, num_pieces),
        **{key: latency_percentiles(seconds) for key, seconds in latencies.items()},
        "ttft_bands": count_bands(latencies["ttft_ms"]),
        "e2e_latency_bands": count_bands(latencies["e2e_latency_ms"]),
        "goodput": {
            "ttft_ms": targets.ttft * 1e3,
            "tpot_ms": targets.tpot * 1e3,
            "share": _ratio(num_good, len(records), digits=4),
            "requests_per_second": _ratio(num_good, wall_seconds),
        },
    }


def _ratio(count: float, total: float, digits: int = 3) -> float | None:
    return round(count / total, digits) if total else None


def format_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Summaries side by side, one column for each run."""
    rows: list[tuple[str, tuple[str, ...]]] = [
        ("requests", ("requests",)),
        ("answered", ("answered",)),
        ("tokens/s", ("tokens_per_second",)),
        ("requests/s", ("requests_per_second",)),
    ]
    for key, label in LATENCY_METRICS:
        rows += [(f"{label}, ms p{percent}", (key, f"p{percent}")) for percent in PERCENTS]
    rows += [(f"first token {name}", ("ttft_bands", name)) for name, _ in BANDS]
    rows.append(("goodput, requests/s", ("goodput", "requests_per_second")))
    width = max(14, *(len(name) + 2 for name in results))
    lines = [" " * LABEL_WIDTH + "".join(f"{name:>{width}}" for name in results)]
    for label, keys in rows:
        cells = [_format_cell(_look_up(result, keys)) for result in results.values()]
        lines.append(f"{label:{LABEL_WIDTH}}" + "".join(f"{cell:>{width}}" for cell in cells))
    return "\n".join(lines)


def _look_up(result: Mapping[str, Any], keys: Sequence[str]) -> Any:
    value: Any = result
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _format_cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
