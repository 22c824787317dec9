"""Closes JSON schemas: objects have only the properties that their schema names.

JSON Schema allows any further property, and small models go on to invent them. Other servers close
objects too. This is done to what clients ask for, in every API; a grammar itself is exact.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

from bloomery.errors import InvalidRequest
from bloomery.sampling import StructuredOutputs
from bloomery.structured.grammar import iterate_schemas, parse_schema

# Keywords that allow properties besides those of `properties`.
OPENING_KEYWORDS = frozenset(
    {
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "dependentSchemas",
        "$ref",
    }
)


def close_outputs(outputs: StructuredOutputs, field: str) -> StructuredOutputs:
    """The outputs with a closed JSON schema; other kinds as they are."""
    if outputs.json is None:
        return outputs
    try:
        schema = parse_schema(outputs.json)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), field) from None
    return replace(outputs, json=close_schema(schema))


def close_schema(schema: Any) -> Any:
    """The schema with objects that have only the properties it names, unless it says otherwise.

    A schema that combines others is not closed, because they add properties.
    """
    closed = deepcopy(schema)
    for _, part in list(iterate_schemas(closed, "#")):
        if "properties" in part and not OPENING_KEYWORDS.intersection(part):
            part["additionalProperties"] = False
    return closed
