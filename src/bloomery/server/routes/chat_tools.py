"""Tools and reasoning in OpenAI's chat API: what a client asks for, and how an answer shows them.

The legacy fields `functions` and `function_call` are read as tools. An answer to them has a
`function_call` instead of `tool_calls`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from bloomery.errors import InvalidRequest
from bloomery.response_format import ToolFunction
from bloomery.server.response_plan import EFFORTS, create_tool
from bloomery.server.routes.chat import ChatBody, ChatMessage
from bloomery.text.outputs import ParsedAnswer, ParsedCall


class ToolRequest(NamedTuple):
    """The tools of a request, and which of them may or must be called."""

    tools: tuple[ToolFunction, ...] = ()
    choice: str = "auto"  # "none", "auto", "required", or the name of a tool
    allowed: tuple[str, ...] | None = None  # None: all
    parallel: bool = True


# ---- requests ------------------------------------------------------------------------------


def parse_tool_request(body: ChatBody) -> ToolRequest:
    """The tools that a body offers, under their present names or the legacy ones."""
    if body.functions is not None and body.tools is not None:
        message = "functions is the old name of tools: give only one of them"
        raise InvalidRequest(message, "functions")
    if body.functions is not None:
        return _parse_legacy_request(body)
    tools = tuple(
        _parse_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())
    )
    if not tools:
        if body.tool_choice not in (None, "none"):
            message = "tool_choice may be other than none only with tools: give tools"
            raise InvalidRequest(message, "tool_choice")
        return ToolRequest()
    choice, allowed = _parse_choice(body.tool_choice)
    return ToolRequest(tools, choice, allowed, body.parallel_tool_calls is not False)


def _parse_tool(tool: dict[str, Any], path: str) -> ToolFunction:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        message = f'{path} must be of type "function", with a function'
        raise InvalidRequest(message, f"{path}.type")
    # TGI and some clients call the schema `arguments`.
    parameters = function.get("parameters", function.get("arguments"))
    return create_tool(
        function.get("name"),
        function.get("description"),
        parameters,
        function.get("strict"),
        f"{path}.function",
    )


def _parse_choice(choice: Any) -> tuple[str, tuple[str, ...] | None]:
    """OpenAI's tool_choice as (choice, allowed tools). TGI also takes the bare name of a tool."""
    match choice:
        case None:
            return "auto", None
        case str():
            return choice, None
        case {"type": "allowed_tools"}:
            inner = choice.get("allowed_tools", choice)
            return _parse_allowed_tools(inner)
        case {"function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name, None
    message = (
        "tool_choice must be none, auto, required, "
        'or {"type": "function", "function": {"name": ...}}'
    )
    raise InvalidRequest(message, "tool_choice")


def _parse_allowed_tools(allowed: Any) -> tuple[str, tuple[str, ...]]:
    match allowed:
        case {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools}:
            names = [
                _parse_choice(tool)[0] if isinstance(tool, dict) else str(tool) for tool in tools
            ]
            return mode, tuple(names)
    message = "tool_choice.allowed_tools needs mode (auto or required) and a list of tools"
    raise InvalidRequest(message, "tool_choice")


def _parse_legacy_request(body: ChatBody) -> ToolRequest:
    tools = tuple(
        create_tool(
            function.get("name"),
            function.get("description"),
            function.get("parameters"),
            False,
            f"functions[{index}]",
        )
        for index, function in enumerate(body.functions or ())
    )
    match body.function_call:
        case None:
            choice = "auto"
        case "none" | "auto" as choice:
            pass
        case {"name": str(choice)}:
            pass
        case _:
            message = 'function_call must be none, auto, or {"name": ...}'
            raise InvalidRequest(message, "function_call")
    return ToolRequest(tools, choice, None, parallel=False)


def reasoning_request(body: ChatBody) -> tuple[str | None, int | None]:
    """The reasoning effort and the budget of reasoning tokens, under any of their names."""
    options = body.reasoning or {}
    effort = body.reasoning_effort or options.get("effort")
    if options.get("enabled") is False:
        effort = "none"
    if effort is not None and effort not in EFFORTS:
        field = "reasoning_effort" if body.reasoning_effort else "reasoning.effort"
        raise InvalidRequest(f"{field} must be {', '.join(EFFORTS[:-1])} or {EFFORTS[-1]}", field)
    budgets = {
        "thinking_token_budget": body.thinking_token_budget,
        "thinking_budget": body.thinking_budget,
        "reasoning.max_tokens": options.get("max_tokens"),
    }
    given = [(field, budget) for field, budget in budgets.items() if budget is not None]
    for field, budget in given:
        if not isinstance(budget, int) or isinstance(budget, bool) or budget < 0:
            raise InvalidRequest(f"{field} must be a whole number of tokens, at least 0", field)
    return effort, given[0][1] if given else None


def to_tool_message(message: ChatMessage, path: str) -> dict[str, Any]:
    """A message with tool calls or a tool's result, as chat templates take it."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        fields["name"] = message.name
    if message.role in ("tool", "function"):
        if message.content is None:
            raise InvalidRequest(f"{path}.content is missing", f"{path}.content")
        fields["role"] = "tool"
        if message.tool_call_id is not None:
            fields["tool_call_id"] = message.tool_call_id
        return fields
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        fields["reasoning_content"] = reasoning
    calls = message.tool_calls
    if not calls and message.function_call is not None:
        calls = [{"function": message.function_call}]
    fields["tool_calls"] = [
        _parse_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls or ())
    ]
    return fields


def _parse_call(call: Any, path: str) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name)} as function}:
            arguments = function.get("arguments")
        case _:
            raise InvalidRequest(f"{path} needs function.name and function.arguments", path)
    if not isinstance(arguments, str | dict | None):
        message = f"{path}.function.arguments must be JSON, as a string"
        raise InvalidRequest(message, f"{path}.function.arguments")
    parsed: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": _read_arguments(arguments)},
    }
    if isinstance(call.get("id"), str):
        parsed["id"] = call["id"]
    return parsed


def _read_arguments(arguments: str | dict[str, Any] | None) -> Any:
    """Arguments as an object. A text that is no JSON object, as a cut answer has, stays a text."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


# ---- answers -------------------------------------------------------------------------------


def format_parsed_message(
    answer: ParsedAnswer, *, has_tools: bool, is_legacy: bool, shows_reasoning: bool
) -> dict[str, Any]:
    """The message of a full response. Content is null if there is none beside the calls."""
    content = answer.content or (None if has_tools else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning and shows_reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls and is_legacy:
        call = answer.calls[0]
        message["function_call"] = {"name": call.name, "arguments": call.arguments}
    elif answer.calls:
        message["tool_calls"] = [_format_call(call) for call in answer.calls]
    return message


def _format_call(call: ParsedCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def format_parsed_deltas(
    events: Sequence[Any], *, is_legacy: bool, shows_reasoning: bool
) -> list[dict[str, Any]]:
    """The deltas of the chunks for some events; neighbours of the same kind share one."""
    deltas: list[dict[str, Any]] = []
    for event in _merge_events(events):
        match event.kind:
            case "content":
                deltas.append({"content": event.text})
            case "reasoning" if shows_reasoning:
                deltas.append({"reasoning_content": event.text})
            case "call" if is_legacy:
                deltas.append({"function_call": {"name": event.name, "arguments": ""}})
            case "arguments" if is_legacy:
                deltas.append({"function_call": {"arguments": event.text}})
            case "call":
                function = {"name": event.name, "arguments": ""}
                call = {"index": event.index, "id": event.id, "type": "function"}
                deltas.append({"tool_calls": [{**call, "function": function}]})
            case "arguments":
                call = {"index": event.index, "function": {"arguments": event.text}}
                deltas.append({"tool_calls": [call]})
    return deltas


def _merge_events(events: Iterable[Any]) -> list[Any]:
    """Join the texts of neighbouring events of one kind and one call."""
    merged: list[Any] = []
    for event in events:
        joins = merged and merged[-1].kind == event.kind and merged[-1].index == event.index
        if joins and event.kind in ("content", "reasoning", "arguments"):
            merged[-1] = merged[-1]._replace(text=merged[-1].text + event.text)
        elif event.kind == "call" or event.text:
            merged.append(event)
    return merged
