"""Requests of OpenAI's Responses API: bodies, and their items as chat templates take them.

An item is a message, a reasoning, a call of a tool or the output of one. The items that a model
generated in one turn become one message of the assistant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import uuid4

from bloomery.errors import InvalidRequest
from bloomery.response_format import ToolFunction
from bloomery.server.routes.chat import check_text_parts
from bloomery.server.schema import ADAPTER_FIELDS, RequestBody

TEXT_PART_TYPES = ("input_text", "output_text", "text")
INPUT_ROLES = ("system", "developer", "user", "assistant")
ITEM_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
# A custom tool takes free text. The model sees a function with this one parameter.
CUSTOM_PARAMETER = "input"
# Between the name of a namespace and the name of a function in it, for the model.
NAMESPACE_SEPARATOR = "__"

_INPUT_OPENING = re.compile(rf'\s*\{{\s*"{CUSTOM_PARAMETER}"\s*:\s*"')
# Characters of a JSON string up to its end. Both halves of a surrogate pair must be there.
_COMPLETE_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*"
)


class ResponseInputBody(RequestBody, kw_only=True):
    """The fields that decide what the model reads."""

    UNSUPPORTED_FIELDS: ClassVar[dict[str, str]] = {
        **ADAPTER_FIELDS,
        "prompt": "prompts that OpenAI stores are not known here; send instructions and input",
    }
    IGNORED_FIELDS: ClassVar[frozenset[str]] = frozenset(
        {
            "truncation",
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "stream_options",
            "max_tool_calls",
            "client_metadata",
            "context_management",
        }
    )
    input: str | list[Any] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None  # an id, or {"id": ...}
    text: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    thinking_token_budget: int | None = None


class ResponseBody(ResponseInputBody, kw_only=True):
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    priority: int | None = None
    deadline_ms: int | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[str] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None


def read_input_items(content: str | Sequence[Any], field: str = "input") -> list[dict[str, Any]]:
    """The items of a field of the request, each with an id and a type."""
    if isinstance(content, str):
        content = [{"role": "user", "content": [{"type": "input_text", "text": content}]}]
    items = []
    for index, entry in enumerate(content):
        path = f"{field}[{index}]"
        if not isinstance(entry, Mapping):
            raise InvalidRequest(f"{path} must be an object", path)
        item = {"type": "message", **entry}
        _check_item(item, path)
        prefix = ITEM_PREFIXES.get(item["type"], "item")
        if not isinstance(item.get("id"), str):
            item["id"] = f"{prefix}_{uuid4().hex}"
        if item["type"] == "message" and isinstance(item["content"], str):
            part_type = "output_text" if item["role"] == "assistant" else "input_text"
            item["content"] = [{"type": part_type, "text": item["content"]}]
        items.append(item)
    return items


def _check_item(item: Mapping[str, Any], path: str) -> None:
    match item["type"]:
        case "message":
            if item.get("role") not in INPUT_ROLES:
                message = f"{path}.role must be one of {', '.join(INPUT_ROLES)}"
                raise InvalidRequest(message, f"{path}.role")
            _text_of(item.get("content"), f"{path}.content")
        case "function_call":
            _check_strings(item, path, "name", "call_id", "arguments")
        case "custom_tool_call":
            _check_strings(item, path, "name", "call_id", "input")
        case "function_call_output" | "custom_tool_call_output":
            _check_strings(item, path, "call_id")
            _text_of(item.get("output"), f"{path}.output")
        case "reasoning":
            _reasoning_text(item, path)
        case "item_reference":
            message = f"{path} refers to a stored item: send the item, or previous_response_id"
            raise InvalidRequest(message, f"{path}.type")
        case str() as kind if _is_hosted(kind):
            pass
        case kind:
            message = f"{path}.type {str(kind)[:64]!r} is not known: use {', '.join(ITEM_PREFIXES)}"
            raise InvalidRequest(message, f"{path}.type")


def _is_hosted(item_type: str) -> bool:
    """Whether the item is a call of a tool that OpenAI runs itself, such as web_search_call."""
    return item_type.endswith(("_call", "_call_output", "_list_tools", "compaction"))


def _check_strings(item: Mapping[str, Any], path: str, *names: str) -> None:
    for name in names:
        if not isinstance(item.get(name), str):
            raise InvalidRequest(f"{path}.{name} must be a string", f"{path}.{name}")


def _text_of(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        parts = [part for part in content if part.get("type") != "refusal"]
        check_text_parts(parts, path, TEXT_PART_TYPES)
        return "\n".join(part["text"] for part in parts)
    raise InvalidRequest(f"{path} must be a string or a list of text parts", path)


def _reasoning_text(item: Mapping[str, Any], path: str) -> str:
    parts = item.get("content") or item.get("summary") or []
    is_list = isinstance(parts, list) and all(isinstance(part, dict) for part in parts)
    if not is_list or not all(isinstance(part.get("text"), str) for part in parts):
        message = f"{path}.content must be a list of parts with a text"
        raise InvalidRequest(message, f"{path}.content")
    return "".join(part["text"] for part in parts)


def to_messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked items as messages in the form of OpenAI's chat API."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item["type"]:
            case "message" if item["role"] == "assistant":
                turn = _assistant_turn(messages, "content", "tool_calls")
                turn["content"] = _text_of(item["content"], "content")
            case "message":
                text = _text_of(item["content"], "content")
                messages.append({"role": item["role"], "content": text})
            case "reasoning":
                text = _reasoning_text(item, "reasoning")
                if text:
                    keys = ("reasoning_content", "content", "tool_calls")
                    _assistant_turn(messages, *keys)["reasoning_content"] = text
            case "function_call" | "custom_tool_call":
                turn = _assistant_turn(messages)
                turn.setdefault("tool_calls", []).append(_chat_tool_call(item))
            case "function_call_output" | "custom_tool_call_output":
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": item["call_id"],
                        "content": _text_of(item["output"], "output"),
                    }
                )
    return messages


def _assistant_turn(messages: list[dict[str, Any]], *occupied: str) -> dict[str, Any]:
    """The assistant's last message, or a new one if it has one of the `occupied` fields."""
    last = messages[-1] if messages else {}
    is_taken = any(last.get(name) for name in occupied)
    if last.get("role") != "assistant" or is_taken:
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _chat_tool_call(item: Mapping[str, Any]) -> dict[str, Any]:
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({CUSTOM_PARAMETER: item["input"]}, ensure_ascii=False)
    else:
        arguments = item["arguments"]
    function = {"name": _full_name(item), "arguments": arguments}
    return {"id": item["call_id"], "type": "function", "function": function}


@dataclass
class ResponseTools:
    """The tools of a request: functions for the model, and how to name their calls."""

    functions: list[ToolFunction] = field(default_factory=list)
    custom_names: set[str] = field(default_factory=set)
    namespaces: dict[str, tuple[str, str]] = field(
        default_factory=dict
    )  # name for the model -> ...
    ignored_types: list[str] = field(default_factory=list)


def read_tools(tools: Sequence[Any]) -> ResponseTools:
    """Functions, custom tools and namespaces. Tools that OpenAI runs itself are left out."""
    result = ResponseTools()
    for index, tool in enumerate(tools):
        _read_tool(tool, f"tools[{index}]", result, "")
    return result


def _read_tool(tool: Any, path: str, result: ResponseTools, namespace: str) -> None:
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise InvalidRequest(f"{path} must be an object with a type", path)
    kind = tool["type"]
    if kind not in ("function", "custom", "namespace"):
        result.ignored_types.append(kind[:64])
        return
    # Loaded by the first request with tools.
    from bloomery.server.response_plan import create_tool

    _check_strings(tool, path, "name")
    name = tool["name"]
    if kind == "namespace":
        for index, inner in enumerate(tool.get("tools") or []):
            _read_tool(inner, f"{path}.tools[{index}]", result, name)
        return
    full_name = _full_name({"name": name, "namespace": namespace})
    if namespace:
        result.namespaces[full_name] = namespace, name
    description = tool.get("description")
    parameters = tool.get("parameters")
    lark = ""
    if kind == "custom":
        result.custom_names.add(full_name)
        parameters, lark = _read_custom_tool(tool)
        if lark:
            description = f"{description or ''}\nThe input must match this Lark grammar:\n{lark}"
    strict = tool.get("strict")
    function = create_tool(full_name, description, parameters, strict, path)
    result.functions.append(function._replace(input_grammar=lark))


def _read_custom_tool(tool: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The parameters of a custom tool, a function of one string, and the string's grammar."""
    text: dict[str, Any] = {"type": "string"}
    lark = ""
    text_format = tool.get("format") or {}
    if text_format.get("type") == "grammar":
        definition = str(text_format.get("definition") or "")
        if text_format.get("syntax") == "regex":
            text["pattern"] = f"^(?:{definition})$"
        else:
            lark = definition
    parameters = {
        "type": "object",
        "properties": {CUSTOM_PARAMETER: text},
        "required": [CUSTOM_PARAMETER],
        "additionalProperties": False,
    }
    return parameters, lark


def read_tool_choice(choice: Any, tools: ResponseTools) -> tuple[str, list[str] | None]:
    """The choice (none, auto, required or a function's name), and the names that are allowed."""
    result: tuple[str, list[str] | None] | None = None
    if choice is None:
        result = "auto", None
    elif isinstance(choice, str) and choice in ("none", "auto", "required"):
        result = choice, None
    elif isinstance(choice, dict):
        result = _read_choice_object(choice, tools)
    if result is None:
        example = '{"type": "function", "name": ...}'
        message = f"tool_choice must be none, auto, required, or an object such as {example}"
        raise InvalidRequest(message, "tool_choice")
    if result[0] not in ("none", "auto") and not tools.functions:
        message = "tool_choice demands a call, but tools has no function: add one to tools"
        raise InvalidRequest(message, "tool_choice")
    return result


def _read_choice_object(
    choice: Mapping[str, Any], tools: ResponseTools
) -> tuple[str, list[str] | None] | None:
    kind = choice.get("type")
    if kind in ("function", "custom") and isinstance(choice.get("name"), str):
        return _full_name(choice), None
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        entries = [entry for entry in choice["tools"] if isinstance(entry, dict)]
        callable_entries = [entry for entry in entries if isinstance(entry.get("name"), str)]
        mode = "required" if choice.get("mode") == "required" else "auto"
        return mode, [_full_name(entry) for entry in callable_entries]
    if kind in tools.ignored_types:
        return "auto", None
    return None


def _full_name(entry: Mapping[str, Any]) -> str:
    """The name of a function for the model, with its namespace before it."""
    if entry.get("namespace"):
        return f"{entry['namespace']}{NAMESPACE_SEPARATOR}{entry['name']}"
    return str(entry["name"])


class CustomInputStream:
    """Reads the text of a custom tool's input out of its JSON arguments as they arrive."""

    def __init__(self) -> None:
        self._rest = ""  # JSON that has not been decoded yet
        self._is_inside = False  # the string

    def feed(self, json_text: str) -> str:
        """The part of the input that is certain now and was not before."""
        self._rest += json_text
        if not self._is_inside:
            opening = _INPUT_OPENING.match(self._rest)
            if opening is None:
                return ""
            self._is_inside = True
            self._rest = self._rest[opening.end() :]
        end = _COMPLETE_CHARACTERS.match(self._rest).end()  # type: ignore[union-attr]
        text = self._rest[:end]
        self._rest = self._rest[end:]
        return str(json.loads(f'"{text}"', strict=False))
