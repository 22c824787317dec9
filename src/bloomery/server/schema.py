"""JSON in and out: request bodies are read strictly into msgspec Structs.

Nothing is coerced: "3" is not 3, true is not 1, 1.0 is not 1, and NaN is refused. An explicit
null is an absent field. A field that the Struct does not declare is accepted and counted, and the
client is warned if it looks misspelt. A field in UNSUPPORTED_FIELDS is known but has no
implementation, so it is refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, ClassVar, NamedTuple, Never, TypeVar

import msgspec

from bloomery.errors import InvalidRequest, NonTextInput
from bloomery.server.errors import MalformedBodyError

encode_json = msgspec.json.Encoder().encode

_TYPE_MISMATCH = re.compile(r"Expected `(.+)`, got `(.+)`")
_ERROR_PATH = re.compile(r" - at `\$\.?(.*)`$")
_MISSING_FIELD = re.compile(r"Object missing required field `(.+)`")
_TYPE_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "list": "a list",
    "object": "an object",
    "dict": "an object",
}
MISSPELT_SIMILARITY = 0.8  # of a name to a declared one, by difflib's measure. Chosen.
_LONG_INTEGER = re.compile(rb"\d{19}")  # 2**63 has 19 digits
MAX_INTEGER = 2**64 - 1
MIN_INTEGER = -(2**63)
# Values with which an unsupported field has no effect, so it is not refused.
EMPTY_VALUES: tuple[Any, ...] = (None, False, [], "")
# Fields that name a LoRA adapter, for routes that do not have them: the base model must not answer
# instead of the adapter.
NAMED_AS_MODEL = "name the LoRA adapter as the model"
ADAPTER_FIELDS = {"adapter_id": NAMED_AS_MODEL, "lora": NAMED_AS_MODEL}
IMAGE_FIELDS = ("images",)  # unsupported fields with which a client sends images


class RequestBody(msgspec.Struct, kw_only=True):
    """The body of a POST route.

    UNSUPPORTED_FIELDS maps known fields without an implementation to the reason or a workaround.
    IGNORED_FIELDS are known fields that change nothing here.
    """

    UNSUPPORTED_FIELDS: ClassVar[dict[str, str]] = {}
    IGNORED_FIELDS: ClassVar[frozenset[str]] = frozenset()


BodyType = TypeVar("BodyType", bound=RequestBody)


class UnknownField(NamedTuple):
    """A field that an object has and its Struct does not declare."""

    name: str
    known_names: tuple[str, ...]

    def nearest_name(self) -> str | None:
        """The declared field that was probably meant."""
        matches = get_close_matches(self.name[:64], self.known_names, 1, MISSPELT_SIMILARITY)
        return matches[0] if matches else None


def decode_json(body: bytes) -> dict[str, Any]:
    """The body's JSON object.

    Raises MalformedBodyError if it is not JSON and InvalidRequest if it is no object.
    """
    if not body.strip():
        raise MalformedBodyError("the body is empty: send a JSON object")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        _raise_decode_error(body, error)
    if _LONG_INTEGER.search(body):
        _check_integers(value)
    if not isinstance(value, dict):
        type_name = _describe_type(type(value).__name__)
        raise InvalidRequest(f"the body must be a JSON object, not {type_name}")
    return value


def parse_body(
    raw: dict[str, Any], body_type: type[BodyType]
) -> tuple[BodyType, list[UnknownField]]:
    """The object as a Struct, and the fields that the Struct does not declare."""
    for name, reason in body_type.UNSUPPORTED_FIELDS.items():
        if raw.get(name) not in EMPTY_VALUES:
            error_type = NonTextInput if name in IMAGE_FIELDS else InvalidRequest
            raise error_type(f"{name} is not supported: {reason}", field=name)
    try:
        body = msgspec.convert(raw, body_type)
    except msgspec.ValidationError as error:
        _raise_validation_error(str(error))
    return body, list(_find_unknown_fields(raw, body))


def _find_unknown_fields(raw: dict[str, Any], struct: msgspec.Struct) -> Iterator[UnknownField]:
    unsupported = getattr(struct, "UNSUPPORTED_FIELDS", ())
    ignored = getattr(struct, "IGNORED_FIELDS", ())
    known = struct.__struct_fields__
    for name, value in raw.items():
        if name not in known:
            if name not in unsupported and name not in ignored:
                yield UnknownField(name, known)
        elif isinstance(value, dict | list):
            for inner, parsed in _nested_structs(value, getattr(struct, name)):
                yield from _find_unknown_fields(inner, parsed)


def _nested_structs(raw: Any, parsed: Any) -> Iterator[tuple[dict[str, Any], msgspec.Struct]]:
    """Each JSON object below a field with the Struct it was parsed into."""
    if isinstance(raw, list) and isinstance(parsed, list):
        if parsed and isinstance(parsed[0], msgspec.Struct):
            for raw_entry, parsed_entry in zip(raw, parsed, strict=True):
                yield from _nested_structs(raw_entry, parsed_entry)
    elif isinstance(raw, dict) and isinstance(parsed, msgspec.Struct):
        yield raw, parsed


def _raise_validation_error(message: str) -> Never:
    """Reword a msgspec error, such as "Expected `int | null`, got `str` - at `$.messages[0].n`"."""
    path = _ERROR_PATH.search(message)
    field = path[1] if path else ""
    if path:
        message = message[: path.start()]
    if missing := _MISSING_FIELD.fullmatch(message):
        field = f"{field}.{missing[1]}" if field else missing[1]
        raise InvalidRequest(f"{field} is missing", field=field)
    if mismatch := _TYPE_MISMATCH.fullmatch(message):
        expected = [_describe_type(name) for name in mismatch[1].split(" | ") if name != "null"]
        actual = _describe_type(mismatch[2])
        raise InvalidRequest(f"{field} must be {' or '.join(expected)}, not {actual}", field=field)
    raise InvalidRequest(f"{field}: {message[:1].lower()}{message[1:][:200]}", field=field)


def _describe_type(name: str) -> str:
    """A JSON, msgspec or Python type in a client's words."""
    return _TYPE_NAMES.get(name, name.replace("NoneType", "null"))


def _raise_decode_error(body: bytes, error: Exception) -> Never:
    """Name the field if a number in it is not finite or too large, else call the JSON invalid."""
    try:
        value = json.loads(body, parse_constant=float, parse_int=_parse_int)
        field = next(_paths_of_infinite_numbers(value, ""))[:64]
    except (ValueError, RecursionError, StopIteration):
        message = f"the body is not valid JSON: {str(error)[:200]}"
        raise MalformedBodyError(message) from None
    message = f"{field} must be a finite number of a sensible size"
    raise InvalidRequest(message, field=field) from None


def _parse_int(digits: str) -> float:
    """Parse an integer. One of 20 digits or more does not fit 64 bits and counts as infinite."""
    return float(digits) if len(digits) < 20 else math.inf


def _check_integers(value: Any) -> None:
    """Refuse integers of more than 64 bits, which cannot be sent to other processes."""
    for path, number in _find_integers(value, ""):
        if not MIN_INTEGER <= number <= MAX_INTEGER:
            field = path[:64] or None
            name = field or "the body"
            raise InvalidRequest(
                f"{name} is a whole number beyond 64 bits: send it as a string", field
            )


def _find_integers(value: Any, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(value, int):
        yield path, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _find_integers(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _find_integers(inner, f"{path}[{index}]")


def _paths_of_infinite_numbers(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path or "the body"
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _paths_of_infinite_numbers(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _paths_of_infinite_numbers(inner, f"{path}[{index}]")
