"""Closing schemas: objects get only the properties that are named, unless the schema says more."""

from __future__ import annotations

from typing import Any

import pytest

from bloomery.errors import InvalidRequest
from bloomery.sampling import StructuredOutputs
from bloomery.structured.closed_schema import close_outputs, close_schema


def test_objects_have_only_their_properties() -> None:
    inner = {"type": "object", "properties": {"a": {"type": "string"}}}
    schema = {
        "type": "object",
        "properties": {"list": {"type": "array", "items": inner}, "ref": {"$ref": "#/$defs/d"}},
        "$defs": {"d": inner},
    }
    closed = close_schema(schema)
    assert closed["additionalProperties"] is False
    assert closed["properties"]["list"]["items"]["additionalProperties"] is False
    assert closed["$defs"]["d"]["additionalProperties"] is False
    assert "additionalProperties" not in schema, "the client's schema is not changed"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": {"a": {}}, "additionalProperties": {"type": "string"}},
        {"properties": {"a": {}}, "patternProperties": {"^x": {}}},
        {"properties": {"a": {}}, "allOf": [{"required": ["b"]}]},
        {"const": {"properties": {"a": 1}}},
        {"enum": [{"properties": {}}]},
        True,
    ],
)
def test_other_schemas_stay_open(schema: Any) -> None:
    assert close_schema(schema) == schema


def test_a_property_may_be_called_properties() -> None:
    schema = {"type": "object", "properties": {"properties": {"type": "string"}}}
    assert close_schema(schema) == {**schema, "additionalProperties": False}


def test_a_schema_may_be_a_text() -> None:
    outputs = close_outputs(StructuredOutputs(json='{"properties": {"a": {}}}'), "guided_json")
    assert outputs.json == {"properties": {"a": {}}, "additionalProperties": False}
    with pytest.raises(InvalidRequest) as caught:
        close_outputs(StructuredOutputs(json="{"), "guided_json")
    assert caught.value.field == "guided_json"
