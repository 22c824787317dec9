"""The API described from what it is made of: the table of routes, the Structs they read, what handlers say they do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import msgspec

from bloomery import __version__
from bloomery.sampling import NUMBERS, WHOLES
from bloomery.server.call import EVENTS, JSON, Route
from bloomery.server.errors import Dialect, anthropic, openai, tgi
from bloomery.server.limits import Limits
from bloomery.server.shapes import schema

RANGES: dict[str, dict[str, float]] = {
    name: {"minimum": least, "maximum": most} for name, least, most, _ in (*NUMBERS, *WHOLES)
} | {
    "temperature": {"minimum": 0, "maximum": Limits().temperature},
    **{
        name: {"minimum": 0, "maximum": Limits().logprobs}
        for name in ("logprobs", "prompt_logprobs", "top_logprobs")
    },
    **{
        name: {"minimum": 0}
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")
    },
}
TGI_RANGES: dict[str, dict[str, float]] = {
    **{name: {"exclusiveMinimum": 0} for name in ("temperature", "repetition_penalty")},
    **{name: {"exclusiveMinimum": 0, "exclusiveMaximum": 1} for name in ("top_p", "typical_p")},
    **{name: {"minimum": 1} for name in ("top_k", "max_new_tokens", "truncate")},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "best_of": {"minimum": 1, "maximum": Limits().best_of},
    "top_n_tokens": {"minimum": 0, "maximum": Limits().top_n_tokens},
    "seed": {"minimum": 0, "maximum": 2**64 - 1},
}
ERRORS: dict[str, dict[str, Any]] = {
    "OpenAiError": {
        "error": {"message": "string", "type": "string", "param": "string?", "code": "string?"}
    },
    "AnthropicError": {
        "type": "string",
        "error": {"type": "string", "message": "string"},
        "request_id": "string",
    },
    "TgiError": {"error": "string", "error_type": "string"},
}

EVENT = {"event?": "string", "data": "string"}  # of a stream: JSON, or [DONE]
NAMES: dict[Dialect, str] = {openai: "OpenAiError", anthropic: "AnthropicError", tgi: "TgiError"}


def document(routes: Sequence[Route], keyed: bool) -> dict[str, Any]:
    bodies = list(dict.fromkeys(route.body for route in routes if route.body is not None))
    references, schemas = msgspec.json.schema_components(
        bodies, ref_template="#/components/schemas/{name}"
    )
    reference = dict(zip(bodies, references, strict=True))
    for name, found in schemas.items():
        _narrow(found, TGI_RANGES if name == "Parameters" else RANGES)
    schemas |= {name: schema(shape) for name, shape in ERRORS.items()}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, reference, keyed)
    schemes = {"key": {"type": "http", "scheme": "bearer"}} if keyed else {}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Bloomery",
            "version": __version__,
            "description": "An inference server for open large language models",
        },
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": schemes},
    }


def _operation(route: Route, reference: Mapping[Any, Any], keyed: bool) -> dict[str, Any]:
    dialects = (
        [tgi, openai] if isinstance(route.answer, tuple) else [route.dialect]
    )  # several APIs share such a route
    errors = [{"$ref": f"#/components/schemas/{NAMES[dialect]}"} for dialect in dialects]
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method}{route.path}").strip("_").lower(),
        "summary": route.about,
        "responses": {
            "200": {
                "description": "the answer",
                "content": {
                    media: {
                        "schema": schema(
                            route.answer
                            if media in JSON
                            else EVENT
                            if media in EVENTS
                            else "string"
                        )
                    }
                    for media in route.media
                },
            },
            "default": {
                "description": "what went wrong",
                "content": {
                    "application/json": {
                        "schema": errors[0] if len(errors) == 1 else {"anyOf": errors}
                    }
                },
            },
        },
    }
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": reference[route.body]}},
        }
    if named := re.search(r"\{(\w+)\}", route.path):
        operation["parameters"] = [
            {"name": named[1], "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if keyed and not route.open:
        operation["security"] = [{"key": []}]
    return operation


def _narrow(struct: dict[str, Any], ranges: Mapping[str, Mapping[str, float]]) -> None:
    """The range of each number that has one, and no more than that: fields nobody declared are welcome."""
    for name, field in struct.get("properties", {}).items():
        for option in field.get("anyOf", [field]):
            if option.get("type") in ("integer", "number") and name in ranges:
                option.update(ranges[name])


# ---- for people --------------------------------------------------------------------------------------

STYLE = """
:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
summary{cursor:pointer;padding:.4rem 0}code{font-family:ui-monospace,monospace}b{display:inline-block;min-width:4rem}
table{border-collapse:collapse;margin:.3rem 0 1rem 1rem}td{padding:.1rem 1rem .1rem 0;vertical-align:top}
"""


def page(document: Mapping[str, Any]) -> str:
    """The document as one page that needs nothing else: each route unfolds to the fields it reads."""
    schemas = document["components"]["schemas"]
    entries = [
        _entry(path, method, operation, schemas)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    title = f"{document['info']['title']} {document['info']['version']}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1><p>{escape(document['info']['description'])}. "
        f'For programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"{''.join(entries)}</body></html>"
    )


def _entry(path: str, method: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    head = f"<b>{method.upper()}</b> <code>{escape(path)}</code> {escape(operation['summary'])}"
    body = operation.get("requestBody")
    if body is None:
        return f"<p>{head}</p>"
    schema = schemas[body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]]
    return f"<details><summary>{head}</summary>{_fields(schema, schemas)}</details>"


def _fields(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    rows = []
    for name, field in schema.get("properties", {}).items():
        needed = "required" if name in schema.get("required", ()) else ""
        nested = [schemas[name] for name in _references(field)]
        rows.append(f"<tr><td><code>{escape(name)}</code><td>{escape(_kind(field))}<td>{needed}")
        rows += [f"<tr><td><td colspan=2>{_fields(inner, schemas)}" for inner in nested]
    return f"<table>{''.join(rows)}</table>"


def _references(field: Mapping[str, Any]) -> list[str]:
    options = field.get("anyOf", [field])
    found = (option.get("$ref") or option.get("items", {}).get("$ref") for option in options)
    return [reference.rpartition("/")[2] for reference in found if reference]


def _kind(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(kind for option in field["anyOf"] if (kind := _kind(option)) != "null")
    if "enum" in field:
        return " or ".join(map(str, field["enum"]))
    if field.get("type") == "array":
        return f"list of {_kind(field['items'])}" if field.get("items") else "list"
    return str(field.get("type") or ("object" if "$ref" in field else "anything"))
