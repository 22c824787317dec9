"""Reads `response_template` of tokenizer_config.json, the format that transformers defines.

A response_template has fields with opening and closing texts or patterns, and says how the content
of each field is parsed. The parts of it that a ResponseFormat can express are converted; anything
else is refused with a reason, and the format is then derived from the chat template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bloomery.errors import ConfigError
from bloomery.response_format.format import (
    ArgumentStyle,
    CallFormat,
    JsonArguments,
    LiteralArguments,
    ObjectCall,
    RegionMarkers,
    ResponseFormat,
    TaggedArguments,
)

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
# A named group of a pattern, one level of brackets deep.
_NAMED_GROUP = re.compile(r"\(\?P<(\w+)>(?:[^()\\]|\\.|\[[^\]]*\])*\)")
_BLANK_PATTERN = re.compile(r"\\s[*+?]|\\n\*?")
_ESCAPED_SIGN = re.compile(r"\\([^\w\s])")
_PATTERN_SIGN = re.compile(r"[*+?()\[\]{}^$|.]|\\")


def convert_response_template(template: Any) -> ResponseFormat:
    """Return the format that a response_template describes; ConfigError if it cannot."""
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping) or template.get("version", 1) != 1:
        raise ConfigError("it is not a response_template of version 1")
    reasoning: RegionMarkers | None = None
    content = RegionMarkers()
    end: tuple[str, ...] = ()
    calls: CallFormat | None = None
    for name, field in fields.items():
        if not isinstance(field, Mapping):
            raise ConfigError(f"the field {name!r} is not an object")
        if name in REASONING_FIELDS:
            opening = _first_marker(field, "open", name)
            reasoning = RegionMarkers(opening, _first_marker(field, "close", name))
        elif name == "tool_calls":
            calls = _convert_calls(field)
        elif name == "content":
            end = tuple(_read_marker(field, "close", name))
            opening = _first_marker(field, "open", name)
            if opening:
                content = RegionMarkers(opening, *end[:1])
                end = end[1:]
    return ResponseFormat(
        reasoning=reasoning,
        content=content,
        calls=calls,
        end=end,
        turn_start=_first_marker(template, "start_anchor", "response_template").strip(),
        starts_in="reasoning" if reasoning and not reasoning.open else "content",
    )


def _read_marker(field: Mapping[str, Any], key: str, name: str) -> list[str]:
    """Return the literal texts of a marker, of which any may stand there."""
    value = field.get(key)
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for text in value if isinstance(text, str)]
    pattern = field.get(f"{key}_pattern")
    if not isinstance(pattern, str):
        return []
    group = re.fullmatch(r"\(\?:(.*)\)", _BLANK_PATTERN.sub("", pattern), re.S)
    options = re.split(r"(?<!\\)\|", group[1]) if group else [pattern]
    return [_read_pattern(option, name) for option in options]


def _first_marker(field: Mapping[str, Any], key: str, name: str) -> str:
    return next(iter(_read_marker(field, key, name)), "")


def _read_pattern(pattern: str, name: str = "tool_calls") -> str:
    """Return the only text that a pattern matches, apart from whitespace."""
    pattern = _BLANK_PATTERN.sub("", pattern)
    if _PATTERN_SIGN.search(_ESCAPED_SIGN.sub("", pattern)):
        raise ConfigError(f"the pattern {pattern!r} of the field {name!r} is no fixed text")
    return _ESCAPED_SIGN.sub(r"\1", pattern)


def _convert_calls(field: Mapping[str, Any]) -> CallFormat:
    arguments = field.get("content_args") or {}
    close = _first_marker(field, "close", "tool_calls")
    opening, head = _read_call_opening(field)
    parallel = bool(field.get("repeats")) or bool(field.get("transform_each"))
    match field.get("content", "text"):
        case "json" if head and arguments.get("string_delims"):
            quote = arguments["string_delims"][0][0]
            style: ArgumentStyle = LiteralArguments(":", (quote,), "}", ",")
            head += "{"
        case "json" if head:
            style = JsonArguments()
        case "json":
            style = _convert_object(field)
        case "xml-inline" if head:
            style = _convert_tags(arguments.get("tag_pattern"))
        case other:
            raise ConfigError(f"tool_calls have content of the kind {other!r}, which is not read")
    if field.get("transform_each"):
        section = RegionMarkers(f"{opening}[", f"]{close}")
        return CallFormat(style, section, head=head, separator=", ", parallel=True)
    markers = RegionMarkers(opening, close)
    return CallFormat(style, call=markers, head=head, parallel=parallel)


def _read_call_opening(field: Mapping[str, Any]) -> tuple[str, str]:
    """Return the marker of a call, and the head if the opening pattern captures the name."""
    pattern = field.get("open_pattern")
    group = _NAMED_GROUP.search(pattern) if isinstance(pattern, str) else None
    if group is None or not isinstance(pattern, str):
        return _first_marker(field, "open", "tool_calls"), ""
    if group[1] != "name" or _NAMED_GROUP.search(pattern, group.end()):
        raise ConfigError("the opening of tool_calls captures something other than the name")
    opening = _read_pattern(pattern[: group.start()])
    return opening, f"$name{_read_pattern(pattern[group.end() :])}"


def _convert_object(field: Mapping[str, Any]) -> ObjectCall:
    """Find out which keys of the JSON object are the name and the arguments."""
    transform = field.get("transform")
    function = transform.get("function") if isinstance(transform, Mapping) else None
    if function is None or function == "{content}":
        return ObjectCall()
    if not isinstance(function, Mapping):
        raise ConfigError("the transform of tool_calls has no function")
    keys: dict[str, str] = {}
    for name in ("name", "arguments"):
        match = re.fullmatch(r"\{(?:content\.)?(\w+)\}", str(function.get(name)))
        if match is None:
            raise ConfigError(f"the transform of tool_calls does not say where the {name} is")
        keys[name] = match[1]
    written = f'{{"{keys["name"]}": "$name", "{keys["arguments"]}": $arguments}}'
    return ObjectCall((keys["name"],), (keys["arguments"],), (), written)


def _convert_tags(pattern: Any) -> TaggedArguments:
    groups = list(_NAMED_GROUP.finditer(pattern)) if isinstance(pattern, str) else []
    if [group[1] for group in groups] != ["key", "value"]:
        raise ConfigError("the tag_pattern of tool_calls must capture key and value, in this order")
    key, value = groups
    texts = (pattern[: key.start()], pattern[key.end() : value.start()], pattern[value.end() :])
    opening, between, close = map(_read_pattern, texts)
    if _BLANK_PATTERN.search(texts[1]):  # a line break before and after a value is not part of it
        between += "\n"
        close = "\n" + close
    return TaggedArguments(opening, between, close)
