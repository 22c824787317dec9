"""Planning answers: schemas are closed, ids fit the template, and efforts become budgets."""

from __future__ import annotations

from typing import Any

import pytest

from bloomery.errors import InvalidRequest
from bloomery.sampling import StructuredOutputs
from bloomery.server.response_plan import (
    close_outputs,
    close_schema,
    create_tool,
    shorten_call_ids,
    to_template_tool,
)


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


def test_ids_of_calls_are_shortened_alike() -> None:
    call = {"id": "call_0123456789abcdef", "function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0123456789abcdef", "content": "1"},
        {"role": "tool", "tool_call_id": "a-1", "content": "2"},
    ]
    first, second, third = shorten_call_ids(messages)
    assert first["tool_calls"][0]["id"] == second["tool_call_id"] == "789abcdef"
    assert len(third["tool_call_id"]) == 9 and third["tool_call_id"].isalnum()
    assert call["id"] == "call_0123456789abcdef"


def test_a_tool_goes_to_the_template_as_it_came() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    tool = create_tool("f", "Does it.", parameters, None, "tools[0].function")
    function = {"name": "f", "description": "Does it.", "parameters": parameters}
    assert to_template_tool(tool) == {"type": "function", "function": function}


def test_a_deep_schema_of_a_tool_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(500):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequest, match="deep") as caught:
        create_tool("f", None, schema, None, "tools[0].function")
    assert caught.value.field == "tools[0].function.parameters"
