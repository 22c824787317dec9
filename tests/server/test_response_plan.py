"""Planning answers: ids fit the template, and efforts become budgets."""

from __future__ import annotations

from typing import Any

import pytest

from bloomery.errors import InvalidRequest
from bloomery.server.response_plan import (
    create_tool,
    shorten_call_ids,
    to_template_tool,
)


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
