"""The HTML report of `bloomery bench`: runs side by side, as a table and inline SVG plots.

The page has no script and fetches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import inf
from typing import Any

from bloomery.tools.bench.summary import BANDS, LATENCY_METRICS, PERCENTS
from bloomery.tools.plot import COLOURS, ChartSeries, draw_chart

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 84rem; padding: 0 1rem;
  color: #1f2937 }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .25rem .8rem; text-align: right }
th:first-child, td:first-child { text-align: left } tr:nth-child(even) { background: #f3f4f6 }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(30rem, 1fr)); gap: 1rem }
.plots svg { width: 100%; border: 1px solid #e5e7eb } .note { color: #6b7280 }
"""
NOTE = (
    "Time to first token (TTFT) counts from sending the request on an open connection to the first "
    "piece of text. Between tokens (ITL) is the gap between two pieces. No profiler was detected "
    "in the client or the server."
)
# Key of the curve, title, labels of the axes.
PLOTS = (
    ("ttft", "Time to first token (TTFT)", "ms", "% of requests"),
    ("itl", "Between two tokens (ITL)", "ms", "% of gaps"),
    ("e2e_latency", "End to end", "ms", "% of requests"),
    ("tokens_by_second", "Throughput", "second of the run", "tokens/s"),
)

BenchRun = Mapping[str, Any]  # what `bloomery bench --json` writes


def render_page(runs: Sequence[BenchRun]) -> str:
    names = [str(run.get("label") or f"run {i}") for i, run in enumerate(runs, 1)]
    plots = "\n".join(_render_plot(*plot, names, runs) for plot in PLOTS)
    conditions = "".join(
        f"<li><b style='color:{_run_colour(i)}'>{escape(name)}</b>: {escape(_conditions(run))}</li>"
        for i, (name, run) in enumerate(zip(names, runs))
    )
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Load report</title>"
        f"<style>{STYLE}</style><h1>Load report</h1><ul>{conditions}</ul>"
        f"{_render_table(names, runs)}<div class='plots'>{plots}</div>"
        f"<p class='note'>{NOTE}</p></html>\n"
    )


def _run_colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _conditions(run: BenchRun) -> str:
    """The settings of a run in one line."""
    return "; ".join(
        (
            f"{run.get('url')} ({run.get('api')}, {run.get('model')})",
            f"{run.get('pattern')}, {run.get('lengths')}",
            f"seed {run.get('seed')}",
            f"{run['requests']:,} requests in {run['seconds']:,.1f} s",
            str(run.get("time")),
        )
    )


def _render_plot(
    key: str,
    title: str,
    x_label: str,
    y_label: str,
    names: Sequence[str],
    runs: Sequence[BenchRun],
) -> str:
    series = [
        ChartSeries(name, [(x, y) for x, y in run["curves"][key]], colour=_run_colour(i))
        for i, (name, run) in enumerate(zip(names, runs))
        if run["curves"].get(key)
    ]
    if not series:
        return ""
    return draw_chart(title, x_label, y_label, series, log_x=key != "tokens_by_second")


def _render_table(names: Sequence[str], runs: Sequence[BenchRun]) -> str:
    header = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = ""
    for label, values in _table_rows(runs):
        cells = "".join(f"<td>{escape(_format_cell(value))}</td>" for value in values)
        body += f"<tr><td>{escape(label)}</td>{cells}</tr>"
    return f"<table><tr><th></th>{header}</tr>{body}</table>"


def _table_rows(runs: Sequence[BenchRun]) -> list[tuple[str, list[Any]]]:
    """Labels, and a value for each run."""
    rows: list[tuple[str, list[Any]]] = [
        ("requests answered", [f"{run['answered']} of {run['requests']}" for run in runs]),
        ("output tokens/s", [run["tokens_per_second"] for run in runs]),
        ("requests/s", [run["requests_per_second"] for run in runs]),
    ]
    for key, label in LATENCY_METRICS:
        for percent in PERCENTS:
            values = [run[key][f"p{percent}"] for run in runs]
            rows.append((f"{label} p{percent}, ms", values))
    for key, label in (("ttft_bands", "first token"), ("e2e_latency_bands", "answer")):
        for name, limit in BANDS:
            values = [run[key][name] for run in runs]
            rows.append((f"{label} {name}{_format_limit(limit)}", values))
    goodputs = [run["goodput"] for run in runs]
    targets = [f"{goodput['ttft_ms']:g}, {goodput['tpot_ms']:g}" for goodput in goodputs]
    shares = [_format_percent(goodput["share"]) for goodput in goodputs]
    cpu_shares = [_format_percent(run.get("client_cpu_share")) for run in runs]
    return [
        *rows,
        ("targets: TTFT and TPOT, ms", targets),
        ("goodput, requests/s", [goodput["requests_per_second"] for goodput in goodputs]),
        ("requests within both targets", shares),
        ("errors", [_format_errors(run["errors"]) for run in runs]),
        ("client's share of a core", cpu_shares),
    ]


def _format_errors(errors: Mapping[str, int]) -> str:
    return "; ".join(f"{count} x {reason}" for reason, count in errors.items()) or "none"


def _format_limit(seconds: float) -> str:
    return f" (to {seconds:g} s)" if seconds < inf else ""


def _format_percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


def _format_cell(value: Any) -> str:
    """Numbers with about three significant digits."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
