"""Argument values: from how a model writes them to JSON, by the types that a schema allows."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bloomery.response_format.format import TaggedArguments

_READ_ERRORS = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)
# A key without quotes, after a brace or a comma.
_BARE_KEY = re.compile(r"([{,]\s*)([^\s:,{}\[\]\"]+)\s*:")

_TYPE_NAMES: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    str: "string",
    int: "integer",
    float: "number",
    list: "array",
    tuple: "array",
}


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def clean_text(text: str) -> str:
    """Replace half surrogate pairs, which JSON can express but UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def escape_string(text: str) -> str:
    """Return the text as it stands inside a JSON string."""
    return to_json(text)[1:-1]


def decode_json(text: str) -> Any:
    """Decode JSON; a text that is none stands for itself."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        value = text.strip('"')
    return clean_text(value) if isinstance(value, str) else value


def read_json(text: str) -> Any:
    """Decode JSON; raises one of _READ_ERRORS for NaN, infinity and half a surrogate pair."""
    return _check_value(json.loads(text))


def read_python(text: str) -> Any:
    """Read a value as Python writes it, if JSON can express it; raises one of _READ_ERRORS."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in what a model wrote
        return _check_value(ast.literal_eval(text))


def _check_value(value: Any) -> Any:
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def _read_first(text: str, *readers: Callable[[str], Any]) -> Any:
    """Read a text with the first reader that can; otherwise it stands for itself."""
    for read in readers:
        try:
            return read(text)
        except _READ_ERRORS:
            continue
    return text


def parameter_types(schema: Mapping[str, Any], name: str) -> set[str]:
    """Return the JSON types that a parameter may have; empty if its schema does not say."""
    properties = schema.get("properties")
    return _schema_types(properties.get(name)) if isinstance(properties, Mapping) else set()


def _schema_types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    types = schema.get("type")
    names = {types} if isinstance(types, str) else set(map(str, _read_list(schema, "type")))
    for option in (*_read_list(schema, "anyOf"), *_read_list(schema, "oneOf")):
        names |= _schema_types(option)
    names.update(type_name(value) for value in _read_list(schema, "enum"))
    return names


def _read_list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    """Return the value of a keyword; an empty list if a client's schema has no list there."""
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def type_name(value: Any) -> str:
    """Return the JSON type of a value."""
    return _TYPE_NAMES.get(type(value), "object")


def convert_value(text: str, allowed: set[str], style: TaggedArguments) -> str:
    """Return a raw value as JSON text, by the types that its schema allows."""
    may_be_string = not allowed or "string" in allowed
    if style.item and text.startswith(style.key_open) and (not allowed or not may_be_string):
        return to_json(_read_nested_tags(text, style))
    stripped = text.strip()
    for read in (read_json, _read_nested_python):
        value = _read_first(stripped, read)
        if value is not stripped and _fits(type_name(value), allowed):
            return stripped if read is read_json else to_json(value)
    return to_json(text)


def _read_nested_python(text: str) -> Any:
    """Some templates write nested values as Python does: True, None, {'a': 1}."""
    if not text.startswith(("[", "{", "True", "False", "None")):
        raise ValueError
    return read_python(text)


def _fits(type: str, allowed: set[str]) -> bool:
    if not allowed - {"json"} or type in allowed:
        return True
    return type == "integer" and "number" in allowed


def _read_nested_tags(text: str, style: TaggedArguments) -> Any:
    """Read <a><b>1</b></a> as {"b": 1} in a, and <a><item>1</item></a> as [1]."""
    open = re.escape(style.key_open)
    close = re.escape(style.key_open[:-1] + "</")
    pairs = re.findall(rf"{open}([^/<>]+)>(.*?){close}\1>", text, re.S)
    if not pairs:
        return decode_json(text) if text.strip() else ""
    if all(key == style.item for key, _ in pairs):
        return [_read_nested_tags(value, style) for _, value in pairs]
    return {key: _read_nested_tags(value, style) for key, value in pairs}


def read_literal(text: str, quotes: Sequence[str], allowed: set[str]) -> Any:
    """Read a value of a LiteralArguments call, by the types that its schema allows."""
    value = _read_any_literal(text.strip(), quotes)
    if not isinstance(value, str) or not allowed or "string" in allowed:
        return value
    # Some templates quote every value. The text of a string is then a literal itself.
    inner = _read_any_literal(value, ("'",))
    return inner if _fits(type_name(inner), allowed) else value


def _read_any_literal(text: str, quotes: Sequence[str]) -> Any:
    if len(quotes[0]) > 1:
        json_text = _quote_keys(text, quotes[0])
        return _read_first(json_text, read_json)
    text = text.replace("\n", "\\n")
    return _read_first(text, read_python, read_json)


def _quote_keys(text: str, quote: str) -> str:
    """Write a literal with a quote of its own and bare keys as JSON."""
    parts = text.split(quote)
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = to_json(part)
        else:
            with_keys = _BARE_KEY.sub(r'\1"\2":', part)
            parts[index] = re.sub(r"\bNone\b", "null", with_keys)
    return "".join(parts)
