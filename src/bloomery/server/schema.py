"""A request's JSON, read strictly: what a Struct declares and nothing that merely looks like it.

No NaN, no "3" for 3, no true for 1, no 1.0 for 1. An explicit null is an absent field. A field nobody declared is
accepted and counted; one in a Struct's REFUSED is known, means something, and is not served: it is refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, ClassVar, Never, TypeVar

import msgspec

from bloomery.errors import InvalidRequest
from bloomery.server.errors import Malformed

_MISMATCH = re.compile(r"Expected `(.+)`, got `(.+)`")
_AT = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"Object missing required field `(.+)`")
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
NOTHING: tuple[Any, ...] = (
    None,
    False,
    [],
    {},
    "",
)  # values of a refused field that ask for nothing


class Body(msgspec.Struct, kw_only=True):
    """What a route reads. REFUSED: known fields that are not served, each with the reason or the way out."""

    REFUSED: ClassVar[dict[str, str]] = {}


T = TypeVar("T", bound=Body)


def decode(body: bytes) -> dict[str, Any]:
    """The body's JSON object; Malformed if it is no JSON, InvalidRequest if it is another kind of value."""
    if not body.strip():
        raise Malformed("the body is empty: send a JSON object")
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        _explain(body, error)
    if not isinstance(raw, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_worded(type(raw).__name__)}")
    return raw


def read(raw: dict[str, Any], kind: type[T]) -> tuple[T, int]:
    """The object as a Struct, and how many of its fields nobody knows."""
    for name, why in kind.REFUSED.items():
        if raw.get(name) not in NOTHING:
            raise InvalidRequest(f"{name} is not supported: {why}", field=name)
    try:
        made = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        _refuse(str(error))
    return made, _unknown(raw, made)


def _unknown(raw: dict[str, Any], made: msgspec.Struct) -> int:
    refused = getattr(made, "REFUSED", ())
    count = 0
    for name, value in raw.items():
        if name not in made.__struct_fields__:
            count += name not in refused
        elif isinstance(value, dict | list):
            count += sum(
                _unknown(inner, struct) for inner, struct in _pairs(value, getattr(made, name))
            )
    return count


def _pairs(raw: Any, made: Any) -> Iterator[tuple[dict[str, Any], msgspec.Struct]]:
    if isinstance(raw, list) and isinstance(made, list):
        if made and isinstance(made[0], msgspec.Struct):
            for one, two in zip(raw, made, strict=True):
                yield from _pairs(one, two)
    elif isinstance(raw, dict) and isinstance(made, msgspec.Struct):
        yield raw, made


def _refuse(said: str) -> Never:
    """msgspec's complaint in our words: `Expected `int | null`, got `str` - at `$.messages[0].n``."""
    found = _AT.search(said)
    field = found[1] if found else ""
    said = said[: found.start()] if found else said
    if missing := _MISSING.fullmatch(said):
        field = f"{field}.{missing[1]}" if field else missing[1]
        raise InvalidRequest(f"{field} is missing", field=field)
    if mismatch := _MISMATCH.fullmatch(said):
        expected = [_worded(name) for name in mismatch[1].split(" | ") if name != "null"]
        raise InvalidRequest(
            f"{field} must be {' or '.join(expected)}, not {_worded(mismatch[2])}", field=field
        )
    raise InvalidRequest(f"{field}: {said[:1].lower()}{said[1:][:200]}", field=field)


def _worded(name: str) -> str:
    return _WORDS.get(
        {"list": "array", "NoneType": "null", "dict": "object"}.get(name, name),
        name.replace("NoneType", "null"),
    )


def _explain(body: bytes, error: Exception) -> Never:
    """Numbers that JSON cannot write, or that are too large, are the field's fault; the rest is bad JSON."""
    try:
        raw = json.loads(body, parse_constant=float, parse_int=_whole)
        field = next(_not_finite(raw, ""))[:64]
    except (ValueError, RecursionError, StopIteration):
        raise Malformed(f"the body is not valid JSON: {str(error)[:200]}") from None
    raise InvalidRequest(
        f"{field} must be a finite number of a sensible size", field=field
    ) from None


def _whole(digits: str) -> float:
    return float(digits) if len(digits) < 20 else math.inf


def _not_finite(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path or "the body"
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield from _not_finite(inner, f"{path}.{name}" if path else name)
    for index, inner in enumerate(value) if isinstance(value, list) else ():
        yield from _not_finite(inner, f"{path}[{index}]")
