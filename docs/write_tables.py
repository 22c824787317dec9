"""Writes the tables of the documentation from what the code declares.

    python docs/write_tables.py

A table stands between `<!-- table NAME -->` and `<!-- end -->`. A test fails when one is not
current.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from bloomery.config import EngineConfig, ServerConfig, flag_name, option_fields
from bloomery.launcher import LIMIT_PREFIX, TGI_FLAGS, TGI_QUANTIZATIONS
from bloomery.server.limits import ServerLimits
from bloomery.server.metric_names import COUNTERS, GAUGES, HISTOGRAMS
from bloomery.server.routes.chat import ChatBody
from bloomery.server.routes.completions import CompletionBody
from bloomery.server.routes.embeddings import EmbeddingBody
from bloomery.server.routes.generate import TgiParameters
from bloomery.server.routes.messages import MessagesBody
from bloomery.server.routes.ollama import SAMPLING_OPTIONS, OllamaChatBody, OllamaGenerateBody
from bloomery.server.routes.responses import ResponseBody

DOCS = Path(__file__).parent
BLOCK = re.compile(r"(<!-- table (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
COLUMNS = 100

# What each limit counts. A test compares the names with those of ServerLimits.
LIMIT_MEANINGS = {
    "header_bytes": "bytes of a request's head",
    "headers": "headers of a request",
    "body_bytes": "bytes of a body",
    "tgi_body_bytes": "bytes of a body on TGI's routes",
    "body_seconds": "seconds for the body to arrive; the head has as long before it",
    "fields": "fields of a body",
    "entries": "entries of one field, such as messages",
    "characters_per_token": "characters of a prompt for each token of the context",
    "requests": "unfinished answers of all clients together; more get 429",
    "greed": "with several keys, how many times the places still free one key may hold",
    "waiting_tokens": "prompt tokens in the queue; default 8 x context x max_num_seqs",
    "fan_out": "answers of one request: n x prompts",
    "temperature": "highest temperature",
    "stop_strings": "stop strings",
    "stop_bytes": "bytes of a stop string",
    "logprobs": "alternatives per token",
    "logit_bias": "entries of logit_bias",
    "bad_words": "entries of bad_words",
    "token_ids": "entries of stop_token_ids and of allowed_token_ids",
    "label_characters": "characters of user and of a metadata value",
    "best_of": "best_of on TGI's routes",
    "top_n_tokens": "top_n_tokens on TGI's routes",
    "queue_seconds": "seconds a request may wait for its first step; then 504",
    "deadline_seconds": "seconds of a request in all; then 504",
    "stall_seconds": "seconds a client may stop reading its stream",
    "keepalive_seconds": "seconds between two comments on a silent event stream",
    "idle_seconds": "seconds of a connection without a request",
    "text_processes": "tokenizer workers, for chat templates and long texts",
    "template_seconds": "processor time of one chat template",
    "text_seconds": "processor time of one text to tokenize",
    "text_bytes": "memory of a tokenizer worker, beyond the tokenizer itself",
    "memory_bytes": "memory of the API process; requests are refused when it comes near",
    "step_seconds": "a step that is longer, and 20 times longer than others, has hung",
    "restarts": "engine restarts within a minute; then the server ends",
    "stored_responses": "stored responses; as many conversations and chat completions",
    "stored_characters": "characters of each of these",
}


def format_default(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"


def describe_option(field: dataclasses.Field[Any]) -> str:
    """One row of a table: flag, variable, default, meaning."""
    flags = f"`{flag_name(field)}`"
    if field.metadata["alias"]:
        flags += f" `{field.metadata['alias']}`"
    meaning = field.metadata["help"].replace("|", "\\|")
    choices = field.metadata["choices"]
    if choices:
        meaning += ". One of " + ", ".join(f"`{choice}`" for choice in choices)
    variable = f"`BLOOMERY_{field.name.upper()}`"
    return f"| {flags} | {variable} | {format_default(field.default)} | {meaning} |"


def write_options() -> list[str]:
    """The tables of all options, by group."""
    lines: list[str] = []
    fields = [*option_fields(EngineConfig), *option_fields(ServerConfig)]
    groups: dict[str, list[dataclasses.Field[Any]]] = {}
    for field in fields:
        groups.setdefault(field.metadata["group"], []).append(field)
    for title, group in groups.items():
        lines += [
            f"### {title}",
            "",
            "| flag | variable | default | meaning |",
            "|---|---|---|---|",
        ]
        lines += [describe_option(field) for field in group]
        lines.append("")
    return lines[:-1]


def format_limit(name: str, value: Any) -> str:
    """A default, in binary units where the name counts bytes."""
    if value is None:
        return "computed"
    if name.endswith("bytes") and value % 1024 == 0:
        for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if value % size == 0:
                return f"{value} ({value // size} {unit})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def write_limits() -> list[str]:
    lines = ["| name | default | what it bounds |", "|---|---|---|"]
    for field in dataclasses.fields(ServerLimits):
        default = format_limit(field.name, field.default)
        lines.append(f"| `{field.name}` | {default} | {LIMIT_MEANINGS.get(field.name, '')} |")
    return lines


def write_tgi_flags() -> list[str]:
    lines = ["| TGI | variable | here |", "|---|---|---|"]
    for flag in TGI_FLAGS:
        target = f"nothing: {flag.why}"
        if flag.option.startswith(LIMIT_PREFIX):
            target = f"`--limits {flag.option.removeprefix(LIMIT_PREFIX)}=N`"
        elif flag.option:
            name = flag.option.replace("_", "-")
            target = "the model" if name == "model" else f"`--{name}`"
            target += f" ({flag.why})" if flag.why else ""
        variable = f"`{flag.field.upper()}`" if flag.variable else ""
        lines.append(f"| `--{flag.name}` | {variable} | {target} |")
    return lines


def write_tgi_quantizations() -> list[str]:
    lines = ["| TGI's `--quantize` | `--quantization` |", "|---|---|"]
    lines += [f"| `{theirs}` | `{ours}` |" for theirs, ours in TGI_QUANTIZATIONS.items()]
    return lines


def write_metrics() -> list[str]:
    lines = ["| name | kind | meaning | vLLM | TGI |", "|---|---|---|---|---|"]
    for kind, table in (("gauge", GAUGES), ("counter", COUNTERS), ("histogram", HISTOGRAMS)):
        suffix = "_total" if kind == "counter" else ""
        for names in table.values():
            own = f"`bloomery_{names.own}{suffix}`" if names.own else ""
            vllm = list_names(f"vllm:{name}{suffix}" for name in names.vllm.split())
            tgi = list_names(f"tgi_{name}" for name in names.tgi.split())
            lines.append(f"| {own} | {kind} | {names.help_text} | {vllm} | {tgi} |")
    return lines


def list_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def wrap_text(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, break_long_words=False, break_on_hyphens=False)


def describe_fields(body: type[msgspec.Struct]) -> list[str]:
    """The fields of a body: those with a meaning, those refused by name, those without effect."""
    lines = wrap_text(f"Fields: {list_names(body.__struct_fields__)}.")
    refused = getattr(body, "UNSUPPORTED_FIELDS", {})
    ignored = getattr(body, "IGNORED_FIELDS", ())
    if refused:
        lines += ["", "| refused | message |", "|---|---|"]
        lines += [f"| `{name}` | {reason} |" for name, reason in sorted(refused.items())]
    if ignored:
        lines += ["", *wrap_text(f"Accepted, without effect: {list_names(sorted(ignored))}.")]
    return lines


def body_writer(body: type[msgspec.Struct]) -> Callable[[], list[str]]:
    return lambda: describe_fields(body)


TABLES: dict[str, Callable[[], list[str]]] = {
    "options": write_options,
    "limits": write_limits,
    "metrics": write_metrics,
    "tgi-flags": write_tgi_flags,
    "tgi-quantizations": write_tgi_quantizations,
    "chat": body_writer(ChatBody),
    "completions": body_writer(CompletionBody),
    "responses": body_writer(ResponseBody),
    "embeddings": body_writer(EmbeddingBody),
    "messages": body_writer(MessagesBody),
    "generate": body_writer(TgiParameters),
    "ollama-chat": body_writer(OllamaChatBody),
    "ollama-generate": body_writer(OllamaGenerateBody),
    "ollama-options": lambda: wrap_text(f"`options`: {list_names(SAMPLING_OPTIONS)}."),
}


def fill_tables(page: str) -> str:
    """The page with its tables as the code has them now."""

    def fill(match: re.Match[str]) -> str:
        begin, name, _, end = match.groups()
        lines = ["", *TABLES[name](), "", ""]
        return begin + "\n".join(lines) + end

    return BLOCK.sub(fill, page)


def list_pages() -> list[Path]:
    """The pages that have a table."""
    return [path for path in sorted(DOCS.rglob("*.md")) if BLOCK.search(path.read_text())]


if __name__ == "__main__":
    for path in list_pages():
        path.write_text(fill_tables(path.read_text()))
