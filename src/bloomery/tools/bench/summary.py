"""What a run came to: percentiles, perception bands, goodput. The one definition of each, for real and virtual time.

Time to first token: from sending the request to the first piece of text. Between tokens: the gap of two consecutive
pieces. Per token: from the first piece to the last over the tokens in between. End to end: to the last byte.
Throughput: all output tokens of answered requests over the time from the first request to the last byte.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BANDS: Sequence[tuple[str, float]] = (
    ("instant", 0.1),
    ("fast", 1.0),
    ("slow", 10.0),
    ("too long", float("inf")),
)
PERCENTS = (50, 90, 99)


@dataclass(slots=True)
class Record:
    """One request, on whatever clock."""

    sent: float
    prompt: int = 0
    tokens: int = 0
    stamps: array[float] = field(default_factory=lambda: array("d"))  # when each piece of text came
    done: float = 0.0
    error: str | None = None

    @property
    def answered(self) -> bool:
        return self.error is None and len(self.stamps) > 0

    @property
    def first(self) -> float:
        return self.stamps[0] - self.sent

    @property
    def per_token(self) -> float:
        return (self.stamps[-1] - self.stamps[0]) / (self.tokens - 1) if self.tokens > 1 else 0.0

    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.stamps, self.stamps[1:])]


@dataclass(frozen=True)
class Targets:
    """What makes a request count as well served, in seconds."""

    first: float = 1.0
    per_token: float = 0.1

    def met(self, record: Record) -> bool:
        return record.answered and record.first <= self.first and record.per_token <= self.per_token


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Of sorted values, between the two nearest in proportion."""
    if not values:
        return None
    place = (len(values) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def spread(seconds: Iterable[float]) -> dict[str, Any]:
    """Milliseconds by percentile."""
    ordered = sorted(seconds)
    found: dict[str, Any] = {f"p{p}": _ms(percentile(ordered, p)) for p in PERCENTS}
    mean = sum(ordered) / len(ordered) if ordered else None
    return {
        **found,
        "mean": _ms(mean),
        "max": _ms(ordered[-1] if ordered else None),
        "n": len(ordered),
    }


def _ms(value: float | None) -> float | None:
    return None if value is None else round(value * 1e3, 3)


def bands(seconds: Iterable[float]) -> dict[str, int]:
    """How many felt instant, fast, slow, too long."""
    count = Counter(next(name for name, most in BANDS if value <= most) for value in seconds)
    return {name: count[name] for name, _ in BANDS}


def summarise(records: Sequence[Record], targets: Targets) -> dict[str, Any]:
    good = [record for record in records if record.answered]
    failed = Counter(record.error or "no text came" for record in records if not record.answered)
    wall = max((r.done for r in records), default=0.0) - min((r.sent for r in records), default=0.0)
    tokens = sum(record.tokens for record in good)
    met = sum(map(targets.met, records))
    pieces = sum(len(record.stamps) for record in good)
    return {
        "requests": len(records),
        "answered": len(good),
        "errors": dict(failed.most_common(8)),
        "seconds": round(wall, 4),
        "output_tokens": tokens,
        "tokens_per_second": round(tokens / wall, 3) if wall else None,
        "requests_per_second": round(len(good) / wall, 3) if wall else None,
        "tokens_per_piece": round(tokens / pieces, 3) if pieces else None,
        "first_token_ms": spread(record.first for record in good),
        "between_tokens_ms": spread(gap for record in good for gap in record.gaps()),
        "per_token_ms": spread(record.per_token for record in good if record.tokens > 1),
        "end_to_end_ms": spread(record.done - record.sent for record in good),
        "first_token_bands": bands(record.first for record in good),
        "end_to_end_bands": bands(record.done - record.sent for record in good),
        "goodput": {
            "first_token_ms": targets.first * 1e3,
            "per_token_ms": targets.per_token * 1e3,
            "share": round(met / len(records), 4) if records else None,
            "requests_per_second": round(met / wall, 3) if wall else None,
        },
    }


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Runs side by side, a column each."""

    def cell(value: Any) -> str:
        if value is None:
            return "-"
        return (
            f"{value:,.1f}"
            if isinstance(value, float)
            else f"{value:,}"
            if isinstance(value, int)
            else str(value)
        )

    rows: list[tuple[str, list[str]]] = []

    def add(label: str, *keys: str) -> None:
        found = []
        for result in results.values():
            value: Any = result
            for key in keys:
                value = value.get(key) if isinstance(value, Mapping) else None
            found.append(cell(value))
        rows.append((label, found))

    add("requests", "requests")
    add("answered", "answered")
    add("tokens/s", "tokens_per_second")
    add("requests/s", "requests_per_second")
    for label, key in (
        ("first token, ms", "first_token_ms"),
        ("between tokens, ms", "between_tokens_ms"),
        ("end to end, ms", "end_to_end_ms"),
    ):
        for percent in PERCENTS:
            add(f"{label} p{percent}", key, f"p{percent}")
    for name, _ in BANDS:
        add(f"first token {name}", "first_token_bands", name)
    add("goodput, requests/s", "goodput", "requests_per_second")
    width = max(14, *(len(name) + 2 for name in results))
    head = f"{'':26}" + "".join(f"{name:>{width}}" for name in results)
    return "\n".join(
        [head, *(f"{label:26}" + "".join(f"{c:>{width}}" for c in cells) for label, cells in rows)]
    )
