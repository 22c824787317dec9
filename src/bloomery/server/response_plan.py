"""How an answer with tools, reasoning or structured output is constrained and parsed.

`service.plan_response` is the entry. This module is loaded by the first request that needs it. It
knows tools and response formats, but no API: routes turn their bodies into ToolFunctions,
StructuredOutputs and a reasoning effort.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bloomery.errors import InvalidRequest
from bloomery.response_format import (
    FormatLookup,
    ResponseFormat,
    ToolFunction,
    build_response_grammar,
    template_reasoning_options,
)
from bloomery.sampling import StructuredOutputs
from bloomery.server.service import (
    HttpCall,
    InferenceService,
    PlannedResponse,
    ResponsePlan,
    has_regions,
)
from bloomery.structured.closed_schema import close_outputs, close_schema
from bloomery.structured.grammar import GRAMMAR_HEADER, read_json
from bloomery.text.tokenizer_pool import CompiledGrammar

log = logging.getLogger("bloomery.server")

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
# Tokens of reasoning for an effort, where the chat template has no levels of its own. Chosen.
EFFORT_BUDGETS = {"none": 0, "minimal": 256, "low": 1024, "medium": 4096}
# Levels that a chat template with levels may not know -> the nearest one that all of them know.
TEMPLATE_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high"}
MAX_TOOLS = 512
MAX_CACHED_GRAMMARS = 32  # each up to about a megabyte
SHORT_ID_LENGTH = 9  # of Mistral's calls
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
EMPTY_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


async def search_response_format(service: InferenceService) -> FormatLookup:
    """Find the model's response format, and log what was found.

    A chat template that breaks the search has no format: its tools are refused.
    """
    override = service.settings.response_format
    try:
        lookup: FormatLookup = await service.tokenizer_pool.find_response_format(override)
    except InvalidRequest as error:
        problem = "the model's chat template could not be read"
        lookup = FormatLookup(ResponseFormat(), "none", (str(error),), problem)
    if lookup.source == "none":
        log.info("response format: plain text, without tool calls and reasoning")
    else:
        log.info("response format: %s", lookup.describe())
    for warning in lookup.warnings:
        log.warning("response format: %s", warning)
    service.response_format = lookup
    return lookup


def create_tool(
    name: Any,
    description: Any,
    parameters: Any,
    strict: Any,
    field: str,
    schema_name: str = "parameters",
) -> ToolFunction:
    """A tool as the client described it; errors name `field`, the place of the description.

    `schema_name` is what the API calls the parameters.
    """
    schema_field = f"{field}.{schema_name}"
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        rule = "1 to 128 letters, digits, '_', '-', '.' or ':'"
        raise InvalidRequest(f"{field}.name must be {rule}", f"{field}.name")
    if not isinstance(description, str | None):
        raise InvalidRequest(f"{field}.description must be a string", f"{field}.description")
    if not isinstance(parameters, dict | None):
        message = f"{schema_field} must be a JSON schema, as an object"
        raise InvalidRequest(message, schema_field)
    try:
        read_json(parameters, "JSON schema")  # bounds its size and depth
    except InvalidRequest as error:
        raise InvalidRequest(f"{schema_field}: {error}", schema_field) from None
    if not isinstance(strict, bool | None):
        raise InvalidRequest(f"{field}.strict must be true or false", f"{field}.strict")
    schema = parameters or EMPTY_PARAMETERS
    return ToolFunction(name, description or "", schema, bool(strict), schema_field)


class ResponsePlanner:
    """Plans one answer. `set_tools` and `set_reasoning` come first, `plan` is called once."""

    def __init__(
        self,
        call: HttpCall,
        lookup: FormatLookup,
        messages: Sequence[Mapping[str, Any]],
        template_options: dict[str, Any],
    ):
        self.call = call
        self.service = call.service
        self.lookup = lookup
        self.messages = messages
        self.template_options = template_options
        self.tools: tuple[ToolFunction, ...] = ()  # those that may be called
        self.tool_choice = "none"
        self.parallel = True
        self.thinking_budget: int | None = None
        self.forbids_reasoning = False

    def set_tools(
        self,
        tools: Sequence[ToolFunction],
        choice: str,
        allowed: Sequence[str] | None,
        parallel: bool,
    ) -> None:
        """All tools go to the template. Only allowed ones may be called."""
        if not tools:
            return
        check_tools(tools, choice, allowed)
        self._check_tool_format()
        self.template_options["tools"] = [to_template_tool(tool) for tool in tools]
        if choice == "none":
            return
        self.tool_choice = choice
        self.parallel = parallel
        self.tools = tuple(tool for tool in tools if allowed is None or tool.name in allowed)

    def _check_tool_format(self) -> None:
        reason = self.lookup.tool_problem
        if not reason:
            return
        message = (
            f"this model cannot call tools: {reason}. Leave tools out, or serve a model with them"
        )
        raise InvalidRequest(message, "tools")

    def set_reasoning(self, effort: str | None, budget: int | None) -> None:
        """Pass the effort to a template that knows it, else bound the reasoning by tokens."""
        if self.lookup.format.reasoning is None:
            return
        self.thinking_budget = budget
        if effort is None and budget is None:
            return
        template = self.service.tokenizer.chat_templates.get("default", "")
        names = template_reasoning_options(template)
        variables = dict(self.template_options.get("chat_template_kwargs") or {})
        if budget is not None and "thinking_budget" in names:
            variables.setdefault("thinking_budget", budget)
        if effort is not None:
            self._set_effort(effort, names, variables)
        self.template_options["chat_template_kwargs"] = variables

    def _set_effort(self, effort: str, names: frozenset[str], variables: dict[str, Any]) -> None:
        """Set the template's variables for an effort, or a budget if it has none for it."""
        self.forbids_reasoning = effort == "none"
        has_levels = "reasoning_effort" in names
        switches = names.intersection(("enable_thinking", "thinking"))
        if has_levels:
            variables.setdefault("reasoning_effort", TEMPLATE_EFFORTS.get(effort, effort))
        for name in switches:
            variables.setdefault(name, effort != "none")
        is_known = bool(switches) if effort == "none" else has_levels
        if self.thinking_budget is None and not is_known:
            self.thinking_budget = EFFORT_BUDGETS.get(effort)

    async def plan(self, outputs: StructuredOutputs | None, output_field: str) -> PlannedResponse:
        service = self.service
        compiled = CompiledGrammar("")
        if outputs is not None:
            outputs = await asyncio.to_thread(close_outputs, outputs, output_field)
            compiled = await service.tokenizer_pool.compile_grammar(outputs, output_field)
        prompt = await service.apply_chat_template(self.messages, **self.template_options)
        response_format = self.lookup.format
        if not self.tools and not has_regions(response_format):
            return PlannedResponse(prompt, None, compiled.grammar, compiled.warnings)
        special_tokens = service.tokenizer.special_token_ids
        plan = ResponsePlan(response_format, self.tools, prompt.text or "", special_tokens)
        is_free = outputs is None and not self.tools and self.thinking_budget is None
        if is_free:
            return PlannedResponse(prompt, plan)
        if self.forbids_reasoning:
            # A small model may open the region again, although the prompt has closed it.
            self.thinking_budget = 0
        tools, warnings = await self._prepare_tools()
        # In a thread, because large schemas take a while.
        lark = await asyncio.to_thread(
            build_response_grammar,
            response_format,
            tools=tools,
            tool_choice=self.tool_choice,
            parallel=self.parallel,
            output=compiled.grammar.removeprefix(GRAMMAR_HEADER),
            prompt=prompt.text or "",
            thinking_budget=self.thinking_budget,
            special_tokens=special_tokens,
            added_tokens=service.tokenizer.added_token_ids,
        )
        grammar = ""
        if lark:
            field = "tools" if self.tools else output_field
            grammar = await self._compile_lark(lark, field)
        return PlannedResponse(prompt, plan, grammar, (*compiled.warnings, *warnings))

    async def _prepare_tools(self) -> tuple[list[ToolFunction], tuple[str, ...]]:
        """The tools with parameters that can be enforced, and warnings about the others.

        The results are kept: an agent sends its tools many times.
        """
        if not self.tools:
            return [], ()
        schemas = [
            (
                close_schema({"type": "object", **tool.parameters}),
                tool.strict,
                tool.input_grammar,
                tool.schema_field,
            )
            for tool in self.tools
        ]
        key = json.dumps(schemas)
        cache = self.service.prepared_tools
        if key not in cache:
            cache[key] = await self.service.tokenizer_pool.prepare_tools(schemas)
            if len(cache) > MAX_CACHED_GRAMMARS:
                cache.pop(next(iter(cache)))
        prepared, warnings = cache[key]
        tools = [
            tool._replace(parameters=schema)
            for tool, schema in zip(self.tools, prepared, strict=True)
        ]
        return tools, warnings

    async def _compile_lark(self, lark: str, field: str) -> str:
        """Compile a grammar, or take it from the cache: an agent sends its tools many times."""
        cache = self.service.compiled_grammars
        if lark not in cache:
            compiled = await self.service.tokenizer_pool.compile_grammar(lark, field)
            cache[lark] = compiled.grammar
            if len(cache) > MAX_CACHED_GRAMMARS:
                cache.pop(next(iter(cache)))
        return cache[lark]


def check_tools(tools: Sequence[ToolFunction], choice: str, allowed: Sequence[str] | None) -> None:
    """Check the tools' names, and that the choice is one of them."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools may have at most {MAX_TOOLS} entries", "tools")
    names = [tool.name for tool in tools]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise InvalidRequest(f"tools has two functions with the name {repeated!r}", "tools")
    is_name = choice not in ("none", "auto", "required")
    wanted = [*(allowed or ()), *([choice] if is_name else [])]
    for name in wanted:
        if name not in names:
            message = f"tool_choice names {name[:64]!r}, which is not in tools"
            raise InvalidRequest(message, "tool_choice")


def shorten_call_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose ids of tool calls have nine characters, the last ones of each id.

    A call and its result keep the same id.
    """
    shortened = []
    for message in messages:
        changed = dict(message)
        if isinstance(message.get("tool_call_id"), str):
            changed["tool_call_id"] = shorten_call_id(message["tool_call_id"])
        if message.get("tool_calls"):
            changed["tool_calls"] = [
                {**call, "id": shorten_call_id(str(call.get("id", "")))}
                for call in message["tool_calls"]
            ]
        shortened.append(changed)
    return shortened


def shorten_call_id(call_id: str) -> str:
    characters = "".join(filter(str.isalnum, call_id))
    return characters[-SHORT_ID_LENGTH:].rjust(SHORT_ID_LENGTH, "0")


def to_template_tool(tool: ToolFunction) -> dict[str, Any]:
    """A tool as chat templates take it."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": tool.parameters}}
