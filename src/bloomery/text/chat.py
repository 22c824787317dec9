"""Renders chat messages into a prompt, with the Jinja chat template of the model.

A template is untrusted code. It runs in jinja2's immutable sandbox, sees plain JSON values only,
and the size of its output and of intermediate values is bounded. The sandbox does not bound time:
`render_template` is a pure function of plain data, so that a caller can run it in a process that it
can kill. Nothing here tokenizes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_center, do_indent
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from bloomery.errors import RenderedChatTooLong, TemplateError
from bloomery.text.tokenizer import Tokenizer

MAX_CHARACTERS = 10_000_000  # of a rendered conversation
MAX_INT_BITS = 1 << 16  # of an integer that a template computes
UNBOUNDED = 1 << MAX_INT_BITS  # a size above any limit

# Names that rendering itself sets, here or in transformers. A client cannot set them.
RESERVED_VARIABLES = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "raise_exception",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "strftime_now",
        "tokenize",
        "tokenizer",
        "tools",
        "truncation",
    )
)
# Mistral's templates refuse the ids of other servers.
_NINE_CHARACTER_IDS = re.compile(r"length\s*!=\s*9")

Message = Mapping[str, Any]


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> str:
    """Render with the model's template, or with `chat_template`: a template's name or its source.

    Options are those of render_template. A generation prompt is added unless the last message is to
    be continued. Encode the result with add_special=False.
    """
    if options.get("add_generation_prompt") is None:
        options["add_generation_prompt"] = not options.get("continue_final_message")
    check_template_variables(chat_template_kwargs or {})
    template = select_template(tokenizer.chat_templates, chat_template, bool(options.get("tools")))
    variables = {**tokenizer.special_tokens, **(chat_template_kwargs or {})}
    return render_template(template, messages, variables=variables, **options)


def check_template_variables(variables: Mapping[str, Any]) -> None:
    """Refuse variables of a client that rendering itself sets."""
    for name in variables:
        if name in RESERVED_VARIABLES:
            raise TemplateError(
                f"chat_template_kwargs cannot set {name!r}, which the server sets: remove it, or "
                "use the request field of that name if there is one",
                "chat_template_kwargs",
            )


def select_template(
    templates: Mapping[str, str], requested: str | None = None, has_tools: bool = False
) -> str:
    """Return the source of the requested template, of "tool_use" if there are tools, or "default".

    `requested` may also be the source of a template itself.
    """
    if requested is not None:
        return templates.get(requested, requested)
    if has_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    if templates:
        names = ", ".join(sorted(templates))
        raise TemplateError(
            f"the model has several chat templates and none by default: name one of {names}",
            "chat_template",
        )
    raise TemplateError(
        "the model has no chat template (base models have none): give one (chat_template), or send "
        "plain text as a prompt",
        "chat_template",
    )


def render_template(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    now: datetime | None = None,
    limit: int = MAX_CHARACTERS,
) -> str:
    """Render messages with a template; `limit` is the largest output, in characters."""
    if not messages:
        raise TemplateError("a conversation needs at least one message", "messages")
    if add_generation_prompt and continue_final_message:
        raise TemplateError(
            "continue_final_message continues the last message and add_generation_prompt begins a "
            "new one: choose one",
            "continue_final_message",
        )
    chat = [_with_reasoning(message, template) for message in _copy_json(messages, "messages")]
    has_parts = any(isinstance(message.get("content"), list) for message in chat)
    if has_parts and not accepts_content_parts(template):
        chat = [{**message, "content": _join_parts(message.get("content"))} for message in chat]
    if any("tool_calls" in message or message.get("role") == "tool" for message in chat):
        chat = _with_tool_calls(chat, template)
    final_text = _mark_final_message(chat, template) if continue_final_message else ""
    values = {
        "strftime_now": (now or datetime.now()).strftime,
        **_copy_json(variables or {}, "chat_template_kwargs"),
        "messages": chat,
        "tools": _copy_json(tools, "tools"),
        "documents": _copy_json(documents, "documents"),
        "add_generation_prompt": add_generation_prompt,
    }
    text = _run_with_calls(template, values, limit)
    if continue_final_message:
        return _cut_at_mark(text, final_text)
    return text


def _run_with_calls(template: str, values: dict[str, Any], limit: int) -> str:
    """Render; if that fails, render with an empty text where a message has calls but no content."""
    try:
        return _run_template(template, values, limit)
    except RenderedChatTooLong:
        raise
    except TemplateError:
        chat = values["messages"]
        is_empty = [_has_calls_only(message) for message in chat]
        if not any(is_empty):
            raise
        filled = [
            {**message, "content": ""} if empty else message
            for message, empty in zip(chat, is_empty, strict=True)
        ]
        return _run_template(template, {**values, "messages": filled}, limit)


def _has_calls_only(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls")) and message.get("content") is None


def _run_template(template: str, values: Mapping[str, Any], limit: int) -> str:
    parts: list[str] = []
    size = 0
    try:
        for part in compile_template(template, limit).generate(values):
            parts.append(part)
            size += len(part)
            if size > limit:
                raise RenderedChatTooLong(
                    f"the conversation has more than {limit} characters, which the context cannot "
                    "hold: shorten it",
                    "messages",
                )
    except TemplateError:
        raise
    except JinjaError as error:  # raised by the template itself, or an undefined name
        raise TemplateError(str(error.message or error), "messages") from error
    except Exception as error:
        raise TemplateError(
            f"the chat template cannot handle these messages: {error}", "messages"
        ) from error
    return "".join(parts)


# ---- template inputs ---------------------------------------------------------------------------


def _copy_json(value: Any, where: str) -> Any:
    """Copy a JSON value and refuse other types: the sandbox guards only the methods of these."""
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case Mapping():
            return {_copy_json(k, where): _copy_json(v, where) for k, v in value.items()}
        case list() | tuple():
            return [_copy_json(item, where) for item in value]
    raise TemplateError(f"{where} must be plain JSON values, not {type(value).__name__}", where)


def _with_reasoning(message: Any, template: str) -> dict[str, Any]:
    """Copy a message's reasoning to the names under which templates look for it."""
    if not isinstance(message, dict):
        raise TemplateError(
            f"a message must be an object with role and content, not {type(message).__name__}",
            "messages",
        )
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    if reasoning is None:
        return message
    named: dict[str, Any] = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    if re.search(r"\breasoning\b", template):
        named["reasoning"] = reasoning
    return named


def _with_tool_calls(chat: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Write tool calls and their results as the template wants them.

    Arguments become an object or JSON text. A result gets the name of its function. Ids become nine
    characters where the template insists on that.
    """
    as_text = wants_argument_text(template)
    has_short_ids = _NINE_CHARACTER_IDS.search(template) is not None
    names: dict[Any, Any] = {}  # id -> name of the function
    messages: list[dict[str, Any]] = []
    for message in chat:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            calls = [_with_arguments(call, as_text) for call in calls]
            names |= {call.get("id"): _function_name(call) for call in calls}
            if has_short_ids:
                calls = [{**call, "id": _short_id(call.get("id"))} for call in calls]
            message = {**message, "tool_calls": calls}
        elif message.get("role") == "tool":
            id = message.get("tool_call_id")
            name = message.get("name") or names.get(id if isinstance(id, str) else None)
            message = {**message, "name": name} if name else message
            if has_short_ids:
                message = {**message, "tool_call_id": _short_id(id)}
        messages.append(message)
    return messages


def _function_name(call: Mapping[str, Any]) -> Any:
    function = call.get("function")
    return function.get("name") if isinstance(function, dict) else None


def _short_id(id: Any) -> str:
    """Return nine characters for an id, the same ones for the same id."""
    text = str(id)
    if re.fullmatch(r"[A-Za-z0-9]{9}", text):
        return text
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _with_arguments(call: Any, as_text: bool) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise TemplateError("a tool call must be an object with id and function", "messages")
    function = call.get("function")
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if isinstance(arguments, str) and not as_text:
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return call  # a model's mistake in history; the template shows it as it is
    elif not isinstance(arguments, str) and as_text:
        arguments = _to_json(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


@lru_cache(maxsize=64)
def wants_argument_text(template: str) -> bool:
    """Return whether a template needs the arguments of a tool call as JSON text.

    The function renders probes. Most templates take an object. Some join the arguments to a text
    and fail, or would print an object as Python does.
    """
    probe = {"a4f1c9": "b7d2"}
    as_object = _render_call_probe(template, probe)
    if '"b7d2"' in as_object or ("b7d2" in as_object and "{'a4f1c9" not in as_object):
        return False
    return "b7d2" in _render_call_probe(template, _to_json(probe))


def _render_call_probe(template: str, arguments: Any) -> str:
    """Render a tool call; an empty text if the template refuses it."""
    function = {"name": "f", "arguments": arguments}
    for id in ("a4f1c9b7d", "functions.f:0"):
        for content in ("", None):
            call = {"id": id, "type": "function", "function": function}
            assistant = {"role": "assistant", "content": content, "tool_calls": [call]}
            text = _render_probe(template, [{"role": "user", "content": "q"}, assistant])
            if "b7d2" in text:
                return text
    return ""


def _join_parts(content: Any) -> Any:
    """Return the text of content given as a list of parts: each begins a line, as in vLLM."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise TemplateError(
                f"the model reads text only, and a message has a part of type {kind!r}", "messages"
            )
    return "\n".join(part["text"] for part in content)


@lru_cache(maxsize=64)
def accepts_content_parts(template: str) -> bool:
    """Return whether a template renders content given as a list of parts.

    The function renders a probe, because many templates print the list itself.
    """
    probe = "a4f1c9"
    message = {"role": "user", "content": [{"type": "text", "text": probe}]}
    text = _render_probe(template, [message])
    return probe in text and f"'{probe}'" not in text and f'"{probe}"' not in text


def _render_probe(template: str, messages: list[dict[str, Any]]) -> str:
    """Render messages with a template; an empty text if it refuses them."""
    values = {
        "messages": messages,
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        "strftime_now": datetime(2000, 1, 1).strftime,
        **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), ""),
    }
    try:
        return _run_template(template, values, MAX_CHARACTERS)
    except TemplateError:
        return ""


# ---- continuing the last message ---------------------------------------------------------------

# The trailing space shows whether the template trimmed the message.
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


def _mark_final_message(chat: list[dict[str, Any]], template: str) -> str:
    """Append the mark to the last message's text, and return that text without it."""
    content = chat[-1].get("content") if "content" in template else None
    if isinstance(content, str):
        chat[-1] = {**chat[-1], "content": content + _MARK}
        return content
    parts = content if isinstance(content, list) else []
    for part in reversed(parts):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] += _MARK
            return text
    raise TemplateError(
        "continue_final_message is set, but the last message has no text to continue", "messages"
    )


def _cut_at_mark(text: str, final_text: str) -> str:
    end = text.rfind(_MARK.strip())
    if end < 0 or final_text.strip() not in text:
        raise TemplateError(
            "the chat template changes or drops the last message, so it cannot be continued",
            "messages",
        )
    if text.startswith(_MARK, end):
        return text[:end]
    return text[:end].rstrip()


# ---- the sandbox -------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def compile_template(template: str, limit: int = MAX_CHARACTERS) -> Template:
    """Compile a template for the sandbox; a syntax error becomes a TemplateError."""
    environment = _TemplateSandbox(limit)
    try:
        return environment.from_string(template)
    except (TemplateSyntaxError, RecursionError) as error:
        line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise TemplateError(
            f"the chat template is not valid Jinja{line}: {error}", "chat_template"
        ) from error


class _TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it. Operators that could build huge values are bounded."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, limit: int):
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        self.limit = limit
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "dict": _TemplateDict(),
            "namespace": _TemplateNamespace,
        }
        self.filters |= {
            "tojson": _to_json,
            "center": self._bound_filter(do_center),
            "indent": self._bound_filter(do_indent),
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow list.append beside what the sandbox allows: some templates sort messages by it.

        All lists are copies that live as long as one rendering.
        """
        if isinstance(obj, list) and attr == "append":
            return True
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _result_size(operator, left, right) > self.limit:
            raise SecurityError(
                f"the chat template's {operator!r} would make a value of more than {self.limit}"
            )
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        text = getattr(obj, "__self__", None)
        if isinstance(text, str):  # center, ljust, rjust, zfill, expandtabs, format
            if obj.__name__.startswith("format") and re.search(r"\d{6}", text):
                raise self._too_long()
            self._check_widths(*args, *kwargs.values())
        return super().call(context, obj, *args, **kwargs)

    def _check_widths(self, *values: Any) -> None:
        if any(isinstance(value, int) and value > self.limit for value in values):
            raise self._too_long()

    def _too_long(self) -> SecurityError:
        return SecurityError(
            f"the chat template asks for a text of more than {self.limit} characters"
        )

    def _bound_filter(self, filter: Callable[..., str]) -> Callable[..., str]:
        def bounded(*args: Any, **kwargs: Any) -> str:
            self._check_widths(*args, *kwargs.values())
            return filter(*args, **kwargs)

        return bounded


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Estimate the size of a result that could be much larger than its operands; otherwise 0."""
    sized = (str, list, tuple)
    match operator:
        case "+" if isinstance(left, sized) and isinstance(right, sized):
            return len(left) + len(right)
        case "*" if isinstance(left, sized) and isinstance(right, int):
            return len(left) * right
        case "*" if isinstance(left, int) and isinstance(right, sized):
            return left * len(right)
        case "*" if isinstance(left, int) and isinstance(right, int):
            num_bits = left.bit_length() + right.bit_length()
            return UNBOUNDED if num_bits > MAX_INT_BITS else 0
        case "**" if isinstance(left, int) and isinstance(right, int):
            num_bits = left.bit_length() * right
            return UNBOUNDED if num_bits > MAX_INT_BITS else 0
        case "%" if isinstance(left, str):
            return UNBOUNDED if _WIDE_FORMAT.search(left) else 0
    return 0


# A width of six digits or more, or one taken from an argument.
_WIDE_FORMAT = re.compile(r"%(\([^)]*\))?[-#0 +]*(\d{6}|\*|\d*\.(\d{6}|\*))")


def _raise_exception(message: object) -> None:
    raise JinjaError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_list_items,
    )


def _list_items(value: Any) -> list[Any]:
    """Return the items of what filters such as `map` yield, which are generators."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


class _GenerationBlock(Extension):
    """{% generation %} marks the assistant's text for training; here it renders its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateDict:
    """`dict` for templates, without access to the type itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """Jinja's namespace without names that begin with an underscore, which lead into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`: a template may use that name
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a chat template may not set {name!r}: names in a namespace cannot begin with '_'"
        )
