"""Finds the ResponseFormat of a model: a file, the checkpoint, its chat template, or the table."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec
from jinja2 import Environment, TemplateError, meta

from bloomery.errors import ConfigError
from bloomery.response_format.check import find_disagreements
from bloomery.response_format.derive import ChatTemplate, RenderFunction, derive_format
from bloomery.response_format.format import ResponseFormat, load_response_format
from bloomery.response_format.response_template import convert_response_template
from bloomery.response_format.table import find_entry

# Variables by which templates turn reasoning on and off, or measure it out.
REASONING_VARIABLES = frozenset(
    ("enable_thinking", "thinking", "reasoning_effort", "thinking_budget", "reasoning_mode")
)
# Tags that Jinja does not know by itself. What they contain is read as it stands.
_UNKNOWN_TAG = re.compile(r"\{%-?\s*(?:generation|endgeneration|break|continue)\s*-?%\}")

FormatSource = Literal["file", "response_template", "derived", "table", "none"]


class FormatLookup(msgspec.Struct, frozen=True):
    """A format, where it comes from, and what is wrong with it."""

    format: ResponseFormat
    source: FormatSource
    warnings: tuple[str, ...] = ()
    tool_problem: str = ""  # why tool calls cannot be served

    def describe(self) -> str:
        """Return one line for the start-up log."""
        return f"{self.format.describe()} (from {SOURCE_NAMES[self.source]})"

    def to_dict(self) -> dict[str, Any]:
        return msgspec.json.decode(msgspec.json.encode(self))


SOURCE_NAMES: dict[FormatSource, str] = {
    "file": "the given file",
    "response_template": "tokenizer_config.json",
    "derived": "the chat template",
    "table": "the chat template and the built-in table",
    "none": "nothing: no format is known",
}


def find_response_format(
    tokenizer_config: Mapping[str, Any],
    chat_template: str | None,
    special_tokens: Collection[str],
    override: Path | None,
    *,
    render: RenderFunction,
    variables: Mapping[str, Any] | None = None,
) -> FormatLookup:
    """Find the format, then check it by rendering and parsing sample conversations.

    This renders the chat template, so it must run where templates may run. `render` is
    text.chat.render_template, `variables` are the special tokens that the template may print.
    """
    if override is not None:
        return FormatLookup(load_response_format(override), "file")
    if chat_template is None:
        return FormatLookup(ResponseFormat(), "none", tool_problem="the model has no chat template")
    template = ChatTemplate(chat_template, render, variables or {})
    warnings: list[str] = []
    format, source = _find_unchecked(tokenizer_config, template, special_tokens, warnings)
    tool_problem = ""
    if format.calls is None:
        tool_problem = "the model's chat template shows no tool calls"
    for name, problem in find_disagreements(template, format).items():
        warnings.append(
            f"the chat template and the response format disagree on a {name}: {problem}"
        )
        if "call" in name:
            tool_problem = "the model's tool calls cannot be read reliably (see the server's log)"
    return FormatLookup(format, source, tuple(warnings), tool_problem)


def _find_unchecked(
    tokenizer_config: Mapping[str, Any],
    template: ChatTemplate,
    special_tokens: Collection[str],
    warnings: list[str],
) -> tuple[ResponseFormat, FormatSource]:
    response_template = tokenizer_config.get("response_template")
    if response_template is not None:
        try:
            return convert_response_template(response_template), "response_template"
        except ConfigError as error:
            warnings.append(f"response_template in tokenizer_config.json is not used: {error}")
    try:
        derived = derive_format(template, special_tokens)
    except Exception as error:  # a template that renders nothing can still be in the table
        warnings.append(f"nothing can be derived from the chat template: {error}")
        derived = ResponseFormat()
    entry = find_entry(template.source, derived)
    if entry is not None:
        return entry.complete(derived), "table"
    is_known = derived.calls is not None or derived.reasoning is not None
    return derived, "derived" if is_known else "none"


@lru_cache(maxsize=16)
def template_reasoning_options(template: str) -> frozenset[str]:
    """Return which variables about reasoning a chat template reads."""
    try:
        syntax_tree = Environment().parse(_UNKNOWN_TAG.sub("", template))
        names = meta.find_undeclared_variables(syntax_tree)
    except (TemplateError, RecursionError):
        return frozenset()
    return REASONING_VARIABLES & names
