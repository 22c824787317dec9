"""The dashboard's recent past: samples of the last half hour, so that a page opened now shows it.

ServerMetrics takes the samples. Each number of a sample becomes a column here, which keeps the
answer small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HISTORY_SECONDS = 1800
INTERVAL_SECONDS = 2  # a pixel of the page's plots over half an hour
NUM_SAMPLES = HISTORY_SECONDS // INTERVAL_SECONDS
SIGNIFICANT_DIGITS = 4

# Numbers of a sample that the dashboard plots over time. The others matter only now.
PLOTTED = (
    "tokens_per_second",
    "prompt_tokens_per_second",
    "running",
    "waiting",
    "kv_usage",
    "prefix_hit_rate",
)
PLOTTED_LATENCIES = ("ttft", "inter_token")
HISTORY_FIELDS = ("time", *PLOTTED, *PLOTTED_LATENCIES)


def build_columns(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The samples, oldest first: a list for each number, latencies by percentile."""
    columns: dict[str, Any] = {"time": [round(sample["time"], 1) for sample in samples]}
    for name in PLOTTED:
        columns[name] = [shorten(sample[name]) for sample in samples]
    for name in PLOTTED_LATENCIES:
        columns[name] = {
            percentile: [shorten(sample[name][percentile]) for sample in samples]
            for percentile in ("p50", "p90", "p99")
        }
    return {"interval": INTERVAL_SECONDS, "columns": columns}


def shorten(value: float | None) -> float | None:
    """A number with as many digits as a plot can show."""
    return None if value is None else float(f"{value:.{SIGNIFICANT_DIGITS}g}")
