"""One page that shows runs side by side: a table and inline SVG plots, no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import inf
from typing import Any

from bloomery.tools.bench.summary import BANDS, PERCENTS
from bloomery.tools.plot import COLOURS, Series, chart

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 84rem; padding: 0 1rem; color: #1f2937 }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .25rem .8rem; text-align: right }
th:first-child, td:first-child { text-align: left } tr:nth-child(even) { background: #f3f4f6 }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(30rem, 1fr)); gap: 1rem }
.plots svg { width: 100%; border: 1px solid #e5e7eb } .note { color: #6b7280 }
"""
PLOTS = (
    ("first_token", "Time to first token", "ms", "% of requests"),
    ("between_tokens", "Between two tokens", "ms", "% of gaps"),
    ("end_to_end", "End to end", "ms", "% of requests"),
    ("tokens_by_second", "Throughput", "second of the run", "tokens/s"),
)


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    names = [str(run.get("label") or f"run {i}") for i, run in enumerate(runs, 1)]
    plots = "\n".join(_plot(*plot, names, runs) for plot in PLOTS)
    conditions = "".join(
        f"<li><b style='color:{COLOURS[i % len(COLOURS)]}'>{escape(name)}</b>: {escape(_conditions(run))}</li>"
        for i, (name, run) in enumerate(zip(names, runs))
    )
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>Load report</title><style>{STYLE}</style>"
        f"<h1>Load report</h1><ul>{conditions}</ul>{_table(names, runs)}<div class='plots'>{plots}</div>"
        "<p class='note'>Time to first token counts from sending the request on an open connection to the first piece "
        "of text. Between tokens is the gap of two pieces. Taken without a profiler on either side, as far as both "
        "tell.</p></html>\n"
    )


def _conditions(run: Mapping[str, Any]) -> str:
    parts = [
        f"{run.get('url')} ({run.get('api')}, {run.get('model')})",
        f"{run.get('pattern')}, {run.get('lengths')}",
    ]
    lasted = f"{run['requests']:,} requests in {run['seconds']:,.1f} s"
    return "; ".join([*parts, f"seed {run.get('seed')}", lasted, str(run.get("time"))])


def _plot(
    key: str, title: str, x: str, y: str, names: Sequence[str], runs: Sequence[Mapping[str, Any]]
) -> str:
    series = [
        Series(name, [(a, b) for a, b in run["curves"][key]], colour=COLOURS[i % len(COLOURS)])
        for i, (name, run) in enumerate(zip(names, runs))
        if run["curves"].get(key)
    ]
    return chart(title, x, y, series, log_x=key != "tokens_by_second") if series else ""


def _table(names: Sequence[str], runs: Sequence[Mapping[str, Any]]) -> str:
    rows: list[tuple[str, list[Any]]] = [
        ("requests answered", [f"{run['answered']} of {run['requests']}" for run in runs]),
        ("output tokens/s", [run["tokens_per_second"] for run in runs]),
        ("requests/s", [run["requests_per_second"] for run in runs]),
    ]
    for label, key in (
        ("first token", "first_token_ms"),
        ("between tokens", "between_tokens_ms"),
        ("end to end", "end_to_end_ms"),
    ):
        rows += [(f"{label} p{p}, ms", [run[key][f"p{p}"] for run in runs]) for p in PERCENTS]
    for label, key in (("first token", "first_token_bands"), ("answer", "end_to_end_bands")):
        rows += [
            (f"{label} {name}{_until(most)}", [run[key][name] for run in runs])
            for name, most in BANDS
        ]
    good = [run["goodput"] for run in runs]
    targets = [f"{found['first_token_ms']:g}, {found['per_token_ms']:g}" for found in good]
    rows.append(("targets: first token and per token, ms", targets))
    rows.append(("goodput, requests/s", [found["requests_per_second"] for found in good]))
    rows.append(("requests within both targets", [_percent(found["share"]) for found in good]))
    rows.append(
        (
            "errors",
            [
                "; ".join(f"{n} x {why}" for why, n in run["errors"].items()) or "none"
                for run in runs
            ],
        )
    )
    rows.append(
        ("client's share of a core", [_percent(run.get("client_cpu_share")) for run in runs])
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr><td>{escape(label)}</td>{''.join(f'<td>{escape(_cell(value))}</td>' for value in values)}</tr>"
        for label, values in rows
    )
    return f"<table><tr><th></th>{head}</tr>{body}</table>"


def _until(seconds: float) -> str:
    return f" (to {seconds:g} s)" if seconds < inf else ""


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


def _cell(value: Any) -> str:
    """Three figures say it all."""
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
