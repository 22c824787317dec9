"""The OpenAPI document, built from the route table, the body Structs and handler docstrings.

The page at /docs shows it to people and sends its examples. Its source is web/src/docs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bloomery import __version__
from bloomery.sampling import FLOAT_RANGES, INT_RANGES
from bloomery.server.errors import (
    ErrorFormatter,
    format_anthropic_error,
    format_ollama_error,
    format_openai_error,
    format_tgi_error,
)
from bloomery.server.limits import ServerLimits
from bloomery.server.service import EVENT_MEDIA, JSON_MEDIA, Route
from bloomery.server.shapes import to_json_schema

# Range of each number by field name, as JSON Schema keywords.
RANGES: dict[str, dict[str, float]] = {
    **{
        name: {"minimum": minimum, "maximum": maximum}
        for name, minimum, maximum, _ in (*FLOAT_RANGES, *INT_RANGES)
    },
    "temperature": {"minimum": 0, "maximum": ServerLimits().temperature},
    "logprobs": {"minimum": 0, "maximum": ServerLimits().logprobs},
    "prompt_logprobs": {"minimum": 0, "maximum": ServerLimits().logprobs},
    "top_logprobs": {"minimum": 0, "maximum": ServerLimits().logprobs},
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 0},
    "max_output_tokens": {"minimum": 0},
}
TGI_RANGES: dict[str, dict[str, float]] = {
    "temperature": {"exclusiveMinimum": 0},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "top_p": {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "typical_p": {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "top_k": {"minimum": 1},
    "max_new_tokens": {"minimum": 1},
    "truncate": {"minimum": 1},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "best_of": {"minimum": 1, "maximum": ServerLimits().best_of},
    "top_n_tokens": {"minimum": 0, "maximum": ServerLimits().top_n_tokens},
    "seed": {"minimum": 0, "maximum": 2**64 - 1},
}
ERROR_SHAPES: dict[str, dict[str, Any]] = {
    "OpenAiError": {
        "error": {"message": "string", "type": "string", "param": "string?", "code": "string?"}
    },
    "AnthropicError": {
        "type": "string",
        "error": {"type": "string", "message": "string"},
        "request_id": "string",
    },
    "TgiError": {"error": "string", "error_type": "string"},
    "OllamaError": {"error": "string"},
}
ERROR_NAMES: dict[ErrorFormatter, str] = {
    format_openai_error: "OpenAiError",
    format_anthropic_error: "AnthropicError",
    format_tgi_error: "TgiError",
    format_ollama_error: "OllamaError",
}
EVENT_SHAPE = {"event?": "string", "data": "string"}  # of a stream; data is JSON or [DONE]

# Struct -> its published schema name, where they differ. Clients generate code from these names.
PUBLISHED_NAMES = {
    "ChatMessage": "Message",
    "AnthropicMessage": "MessageIn",
    "TgiParameters": "Parameters",
}

# The parts of the API by the beginning of a path; the first that matches counts.
TAGS = (
    ("/v1/messages", "Anthropic"),
    ("/v1/", "OpenAI"),
    ("/api/", "Ollama"),
    ("/generate", "TGI"),
    ("/invocations", "Clouds"),
    ("/vertex", "Clouds"),
    ("/tokenize", "Tokens"),
    ("/chat_tokenize", "Tokens"),
    ("/detokenize", "Tokens"),
)
QUESTION = "What is the capital of France?"
CONVERSATION = [{"role": "user", "content": QUESTION}]
# A body for each route that takes one, small enough to try on any machine.
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CONVERSATION, "max_tokens": 64, "stream": True},
    "/v1/completions": {"prompt": "The capital of France is", "max_tokens": 16},
    "/v1/responses": {"input": QUESTION, "max_output_tokens": 64},
    "/v1/responses/input_tokens": {"input": QUESTION},
    "/v1/messages": {"model": "default", "messages": CONVERSATION, "max_tokens": 64},
    "/v1/messages/count_tokens": {"model": "default", "messages": CONVERSATION},
    "/v1/embeddings": {"input": ["A furnace of clay.", "A shaft of fire."]},
    "/": {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 16}},
    "/generate": {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 16}},
    "/generate_stream": {
        "inputs": "The capital of France is",
        "parameters": {"max_new_tokens": 16},
    },
    "/invocations": {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 16}},
    "/vertex": {"instances": [{"inputs": "The capital of France is"}]},
    "/tokenize": {"prompt": QUESTION},
    "/chat_tokenize": {"messages": CONVERSATION},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/api/chat": {"model": "default", "messages": CONVERSATION, "options": {"num_predict": 64}},
    "/api/generate": {
        "model": "default",
        "prompt": QUESTION,
        "options": {"num_predict": 64},
    },
    "/api/show": {"model": "default"},
}


def build_openapi_document(routes: Sequence[Route], needs_key: bool) -> dict[str, Any]:
    """The document of all routes; `needs_key`: the server has API keys."""
    body_types = list(
        dict.fromkeys(route.body_type for route in routes if route.body_type is not None)
    )
    references, schemas = msgspec.json.schema_components(
        body_types, ref_template="#/components/schemas/{name}"
    )
    body_references = dict(zip(body_types, references, strict=True))
    for name, body_schema in schemas.items():
        _add_ranges(body_schema, TGI_RANGES if name == "TgiParameters" else RANGES)
    schemas = _publish_names(schemas)
    schemas |= {name: to_json_schema(shape) for name, shape in ERROR_SHAPES.items()}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operations = paths.setdefault(route.path, {})
        operations[route.method.lower()] = _operation(route, body_references, needs_key)
    security = {"key": {"type": "http", "scheme": "bearer"}} if needs_key else {}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Bloomery",
            "version": __version__,
            "description": "An inference server for open large language models",
        },
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": security},
    }


def _publish_names(schemas: dict[str, Any]) -> dict[str, Any]:
    """Replace the Structs' names by the published ones in keys, titles and references."""
    text = json.dumps(schemas)
    for struct_name, published_name in PUBLISHED_NAMES.items():
        text = text.replace(f'"{struct_name}"', f'"{published_name}"')
        text = text.replace(f'schemas/{struct_name}"', f'schemas/{published_name}"')
    renamed: dict[str, Any] = json.loads(text)
    return renamed


def _operation(route: Route, body_references: Mapping[Any, Any], needs_key: bool) -> dict[str, Any]:
    error_schema = _error_schema(route)
    content = {media: {"schema": _response_schema(route, media)} for media in route.media_types}
    operation: dict[str, Any] = {
        "tags": [_tag(route)],
        "operationId": re.sub(r"\W+", "_", f"{route.method}{route.path}").strip("_").lower(),
        "summary": route.summary,
        "responses": {
            "200": {"description": "the answer", "content": content},
            "default": {
                "description": "what went wrong",
                "content": {"application/json": {"schema": error_schema}},
            },
        },
    }
    if route.body_type is not None:
        reference = body_references[route.body_type]
        media: dict[str, Any] = {"schema": reference}
        if route.path in EXAMPLES:
            media["example"] = EXAMPLES[route.path]
        operation["requestBody"] = {"required": True, "content": {"application/json": media}}
    if names := re.findall(r"\{(\w+)\}", route.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if needs_key and not route.public:
        operation["security"] = [{"key": []}]
    return operation


def _tag(route: Route) -> str:
    """The part of the API that a route belongs to."""
    if route.path == "/" and route.method == "POST":
        return "TGI"
    tags = (tag for beginning, tag in TAGS if route.path.startswith(beginning))
    return next(tags, "Server")


def _response_schema(route: Route, media_type: str) -> dict[str, Any]:
    if media_type in JSON_MEDIA:
        return to_json_schema(route.response_shape)
    if media_type in EVENT_MEDIA:
        return to_json_schema(EVENT_SHAPE)
    return {"type": "string"}


def _error_schema(route: Route) -> dict[str, Any]:
    """A route with a choice of responses serves several APIs, so its errors have two forms."""
    formatters: list[ErrorFormatter] = [route.error_formatter]
    if isinstance(route.response_shape, tuple):
        formatters = [format_tgi_error, format_openai_error]
    references = [
        {"$ref": f"#/components/schemas/{ERROR_NAMES[formatter]}"} for formatter in formatters
    ]
    return references[0] if len(references) == 1 else {"anyOf": references}


def _add_ranges(body_schema: dict[str, Any], ranges: Mapping[str, Mapping[str, float]]) -> None:
    """Add the range of each number; undeclared fields stay allowed."""
    for name, field in body_schema.get("properties", {}).items():
        for option in field.get("anyOf", [field]):
            if option.get("type") in ("integer", "number") and name in ranges:
                option.update(ranges[name])
