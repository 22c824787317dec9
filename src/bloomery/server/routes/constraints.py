"""Structured output as clients ask for it: the fields of OpenAI, TGI, vLLM, SGLang and llama.cpp.

Each becomes StructuredOutputs. A JSON schema is strict, so a keyword that cannot be enforced is an
error. The exception is OpenAI's response_format, which is strict only if it says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bloomery.errors import InvalidRequest
from bloomery.sampling import StructuredOutputs

VLLM_FIELDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
VLLM_OPTIONS = ("disable_any_whitespace", "whitespace_pattern")
RESPONSE_FORMAT_TYPES = "text, json_object, json_schema, regex or structural_tag"


def parse_constraints(
    fields: Mapping[str, Any], whitespace_pattern: str | None = None
) -> tuple[StructuredOutputs, str] | None:
    """The one constraint among `fields`, and its field; None if there is none."""
    constraints: list[tuple[StructuredOutputs, str]] = []
    for name, value in fields.items():
        outputs = None if value is None else parse_constraint(name, value, whitespace_pattern)
        if outputs is not None:
            constraints.append((outputs, name))
    if len(constraints) > 1:
        names = " and ".join(name for _, name in constraints)
        raise InvalidRequest(f"{names} constrain the same answer: give only one", constraints[1][1])
    return constraints[0] if constraints else None


def parse_constraint(
    name: str, value: Any, whitespace_pattern: str | None
) -> StructuredOutputs | None:
    """The constraint of one field."""
    match name:
        case "response_format":
            return parse_response_format(value)
        case "structured_outputs":
            return parse_vllm_outputs(value)
        case "guided_json" | "json_schema":
            return StructuredOutputs(json=value, whitespace_pattern=whitespace_pattern)
        case "guided_regex" | "regex":
            return StructuredOutputs(regex=value)
        case "guided_choice":
            return StructuredOutputs(choice=check_choices(value, name))
        case "grammar" if isinstance(value, dict):
            return parse_tgi_grammar(value, name)
        case "structural_tag":
            return StructuredOutputs(structural_tag=value)
    return StructuredOutputs(grammar=value)


def check_choices(choices: Any, field: str) -> list[str]:
    texts = choices if isinstance(choices, list) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidRequest(f"{field} must be a list of texts, none of them empty", field)
    return texts


def parse_response_format(value: dict[str, Any]) -> StructuredOutputs | None:
    """OpenAI's response_format; its other types and `value` are TGI's, `schema` is llama.cpp's."""
    field = "response_format"
    match value.get("type"):
        case None | "text":
            return None
        case "json_object" | "json":
            schema = value.get("value", value.get("schema"))
            if schema is None:
                return StructuredOutputs(json_object=True)
            return StructuredOutputs(json=check_schema(schema, field))
        case "json_schema" if "value" in value:
            return parse_tgi_grammar(value, field)
        case "json_schema":
            return parse_openai_schema(value, field)
        case "regex":
            return parse_tgi_grammar(value, field)
        case "structural_tag":
            return StructuredOutputs(structural_tag=value)
    message = f"{field}.type must be {RESPONSE_FORMAT_TYPES}, not {str(value['type'])[:64]!r}"
    raise InvalidRequest(message, f"{field}.type")


def parse_openai_schema(value: dict[str, Any], field: str) -> StructuredOutputs:
    """{"json_schema": {"name": ..., "schema": {...}, "strict": true}}, or the schema beside it."""
    wrapper = value.get("json_schema", value)
    if not isinstance(wrapper, dict) or "schema" not in wrapper:
        message = f"{field} of type json_schema needs json_schema.schema, a JSON schema"
        raise InvalidRequest(message, f"{field}.json_schema")
    schema = check_schema(wrapper["schema"], f"{field}.json_schema.schema")
    return StructuredOutputs(json=schema, strict=bool(wrapper.get("strict")))


def parse_tgi_grammar(value: Any, field: str) -> StructuredOutputs:
    """TGI's {"type": "json" | "json_schema" | "regex", "value": ...}."""
    if not isinstance(value, dict) or "value" not in value:
        raise InvalidRequest(f"{field} must be an object with type and value", field)
    inner = value["value"]
    match value.get("type"):
        case "json" | "json_object":
            return StructuredOutputs(json=check_schema(inner, f"{field}.value"))
        case "json_schema":
            schema = inner.get("schema", inner) if isinstance(inner, dict) else inner
            return StructuredOutputs(json=check_schema(schema, f"{field}.value"))
        case "regex":
            if not isinstance(inner, str):
                raise InvalidRequest(f"{field}.value must be a pattern, as a string", field)
            return StructuredOutputs(regex=inner)
    message = f"{field}.type must be json, json_schema or regex"
    raise InvalidRequest(message, f"{field}.type")


def parse_vllm_outputs(value: dict[str, Any]) -> StructuredOutputs | None:
    """vLLM's structured_outputs."""
    field = "structured_outputs"
    unknown = next((name for name in value if name not in (*VLLM_FIELDS, *VLLM_OPTIONS)), None)
    if unknown is not None:
        allowed = ", ".join((*VLLM_FIELDS, *VLLM_OPTIONS))
        message = f"{field} has {unknown[:64]!r}, and may have only {allowed}"
        raise InvalidRequest(message, field)
    given = {name: value[name] for name in VLLM_FIELDS if value.get(name) not in (None, False)}
    if len(given) > 1:
        raise InvalidRequest(f"{field} has {' and '.join(given)}: give only one", field)
    if not given:
        return None
    if "json" in given:
        check_schema(given["json"], f"{field}.json")
    if "choice" in given:
        check_choices(given["choice"], f"{field}.choice")
    options = {name: value[name] for name in VLLM_OPTIONS if value.get(name) is not None}
    return StructuredOutputs(**given, **options)


def check_schema(schema: Any, field: str) -> Any:
    if not isinstance(schema, dict | str | bool):
        raise InvalidRequest(f"{field} must be a JSON schema, as an object", field)
    return schema
