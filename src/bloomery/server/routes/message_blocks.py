"""Content blocks and tools of Anthropic's API as messages and tools that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bloomery.errors import InvalidRequest
from bloomery.response_format import ToolFunction
from bloomery.server.routes.chat import check_text_parts
from bloomery.server.service import HttpCall

MessageContent = str | list[dict[str, Any]]

# Claude Code begins its system prompt with this line. It differs from request to request, so with
# it no request would find the tokens of an earlier one in the prefix cache.
BILLING_HEADER = "x-anthropic-billing-header:"


def read_system(system: MessageContent | None) -> str | None:
    """The system prompt without the billing header; None if there is none."""
    if system is None:
        return None
    if isinstance(system, str):
        return _strip_billing_header(system)
    check_text_parts(system, "system")
    texts = [part["text"] for part in system]
    has_header = bool(texts) and texts[0].startswith(BILLING_HEADER)
    if has_header:
        texts[0] = _strip_billing_header(texts[0])
    return "\n".join(text for text in texts if text or not has_header)


def _strip_billing_header(text: str) -> str:
    if not text.startswith(BILLING_HEADER):
        return text
    return text.partition("\n")[2].lstrip("\n")


def read_message(role: str, content: MessageContent, path: str) -> list[dict[str, Any]]:
    """A message with blocks as one or more messages of the chat form.

    Results of tools become messages of their own, before the text that follows them.
    """
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        block_path = f"{path}.content[{index}]"
        match block.get("type"), role:
            case "tool_use", "assistant":
                calls.append(_read_tool_use(block, block_path))
            case "thinking", "assistant":
                reasoning.append(_read_text(block, "thinking", block_path))
            case "redacted_thinking", "assistant":
                pass  # encrypted by Anthropic, so there is nothing to read
            case "tool_result", "user":
                messages.append(_read_tool_result(block, block_path))
            case _:
                check_text_parts([block], block_path.removesuffix(f"[{index}]"))
                texts.append(block["text"])
    if role == "assistant":
        turn: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
        if any(reasoning):
            turn["reasoning_content"] = "\n".join(reasoning)
        if calls:
            turn["tool_calls"] = calls
        messages.append(turn)
    elif texts or not messages:
        messages.append({"role": role, "content": "\n".join(texts)})
    return messages


def _read_text(block: Mapping[str, Any], name: str, path: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.{name} must be a string", f"{path}.{name}")
    return text


def _read_tool_use(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{path}.input must be an object", f"{path}.input")
    function = {
        "name": _read_text(block, "name", path),
        "arguments": json.dumps(arguments, ensure_ascii=False),
    }
    return {"id": _read_text(block, "id", path), "type": "function", "function": function}


def _read_tool_result(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        check_text_parts(content, f"{path}.content")
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        message = f"{path}.content must be a string or a list of text blocks"
        raise InvalidRequest(message, f"{path}.content")
    call_id = _read_text(block, "tool_use_id", path)
    return {"role": "tool", "tool_call_id": call_id, "content": content or ""}


def fold_system_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put system messages that are not the first one into the user's message before them."""
    folded: list[dict[str, Any]] = []
    for message in messages:
        is_late_system = message["role"] == "system" and folded
        if is_late_system and folded[-1]["role"] == "user":
            text = f"{folded[-1]['content']}\n\n{message['content']}"
            folded[-1] = {**folded[-1], "content": text}
        elif is_late_system:
            folded.append({**message, "role": "user"})
        else:
            folded.append(message)
    return folded


def read_message_tools(call: HttpCall, tools: Sequence[Mapping[str, Any]]) -> list[ToolFunction]:
    """The tools that the client runs. Those that Anthropic defines or runs are left out."""
    if not tools:
        return []
    from bloomery.server.response_plan import create_tool

    functions = []
    for index, tool in enumerate(tools):
        kind = tool.get("type") or "custom"
        if kind != "custom":
            name = str(kind)[:64]
            call.warn(f"tools of type {name!r} are defined by Anthropic and are ignored here")
            continue
        parameters = tool.get("input_schema")
        path = f"tools[{index}]"
        if not isinstance(parameters, dict):
            message = f"{path}.input_schema must be a JSON schema"
            raise InvalidRequest(message, f"{path}.input_schema")
        function = create_tool(
            tool.get("name"),
            tool.get("description"),
            parameters,
            tool.get("strict"),
            path,
            "input_schema",
        )
        functions.append(function)
    return functions


def read_tool_choice(choice: Mapping[str, Any] | None, has_tools: bool) -> tuple[str, bool]:
    """The choice (none, auto, required or a name), and whether calls may be parallel."""
    choice = choice or {"type": "auto"}
    parallel = choice.get("disable_parallel_tool_use") is not True
    kind = choice.get("type")
    if kind in ("any", "tool") and not has_tools:
        message = "tool_choice demands a call, but there are no tools: add one to tools"
        raise InvalidRequest(message, "tool_choice")
    match kind:
        case "auto" | "none":
            return str(kind), parallel
        case "any":
            return "required", parallel
        case "tool" if isinstance(choice.get("name"), str):
            return choice["name"], False
    message = 'tool_choice.type must be auto, any, none, or tool with the "name" of one'
    raise InvalidRequest(message, "tool_choice")


def has_cache_control(*parts: Any) -> bool:
    """Whether any block or tool of the request asks for caching."""
    for part in parts:
        inner: Any = ()
        if isinstance(part, list):
            inner = part
        elif isinstance(part, msgspec.Struct):
            inner = [getattr(part, "content", None)]
        elif isinstance(part, dict):
            if part.get("cache_control"):
                return True
            inner = [part.get("content")]
        if has_cache_control(*inner):
            return True
    return False
