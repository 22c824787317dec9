"""Messages to the text a chat model was trained to read, by the Jinja template that comes with the model.

A template is a stranger's program: it runs in jinja2's immutable sandbox, sees plain values only, and its output and
the operations that could blow up are bounded. `render_template` is a pure function of plain data, so that a caller
can run it in a process it can kill: the sandbox does not bound time. Nothing here tokenizes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
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

from bloomery.errors import TemplateError
from bloomery.text.tokenizer import Tokenizer

LIMIT = 10_000_000  # characters of a rendered conversation
INT_BITS = 1 << 16  # of a number a template may compute

Message = Mapping[str, Any]


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> str:
    """By the model's template, or the one named or written in `chat_template`; encode it with add_special=False.

    Options are those of render_template. The prompt for an answer is added unless the last message is to be continued.
    """
    if options.get("add_generation_prompt") is None:
        options["add_generation_prompt"] = not options.get("continue_final_message")
    template = select(tokenizer.chat_templates, chat_template, bool(options.get("tools")))
    variables = {**tokenizer.special_tokens, **(chat_template_kwargs or {})}
    return render_template(template, messages, variables=variables, **options)


def select(templates: Mapping[str, str], wanted: str | None = None, tools: bool = False) -> str:
    if wanted is not None:
        return templates.get(wanted, wanted)
    for name in ("tool_use", "default") if tools else ("default",):
        if name in templates:
            return templates[name]
    if templates:
        raise TemplateError(
            f"the model has several chat templates and none by default: name one of {', '.join(sorted(templates))}",
            "chat_template",
        )
    raise TemplateError(
        "the model has no chat template, as base models do not: give one (chat_template), or send plain text "
        "as a prompt",
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
    limit: int = LIMIT,
) -> str:
    if not messages:
        raise TemplateError("a conversation needs at least one message", "messages")
    if add_generation_prompt and continue_final_message:
        raise TemplateError(
            "continue_final_message goes on with the last message and add_generation_prompt begins a new one: "
            "choose one",
            "continue_final_message",
        )
    chat = [_with_reasoning(message) for message in _plain(messages, "messages")]
    if any(isinstance(message.get("content"), list) for message in chat) and not reads_parts(
        template
    ):
        chat = [{**message, "content": _joined(message.get("content"))} for message in chat]
    final = _mark_final(chat, template) if continue_final_message else ""
    values = {
        "strftime_now": (now or datetime.now()).strftime,
        **_plain(variables or {}, "chat_template_kwargs"),
        "messages": chat,
        "tools": _plain(tools, "tools"),
        "documents": _plain(documents, "documents"),
        "add_generation_prompt": add_generation_prompt,
    }
    text = _run(template, values, limit)
    return _cut_at_mark(text, final) if continue_final_message else text


def _run(template: str, values: Mapping[str, Any], limit: int) -> str:
    parts: list[str] = []
    size = 0
    try:
        for part in compile_template(template, limit).generate(values):
            parts.append(part)
            size += len(part)
            if size > limit:
                raise TemplateError(
                    f"the chat template wrote more than {limit} characters", "messages"
                )
    except TemplateError:
        raise
    except JinjaError as error:  # what the template itself has to say, or a name it does not find
        raise TemplateError(str(error.message or error), "messages") from error
    except Exception as error:
        raise TemplateError(
            f"the chat template cannot handle these messages: {error}", "messages"
        ) from error
    return "".join(parts)


# ---- what a template is given ------------------------------------------------------------------


def _plain(value: Any, where: str) -> Any:
    """A copy of JSON's types alone, whose methods the sandbox knows."""
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
            return {_plain(name, where): _plain(item, where) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item, where) for item in value]
    raise TemplateError(f"{where} must be plain JSON values, not {type(value).__name__}", where)


def _with_reasoning(message: Any) -> dict[str, Any]:
    """Templates read a message's reasoning under one of three names: whichever is given, all find it."""
    if not isinstance(message, dict):
        raise TemplateError(
            f"a message must be an object with role and content, not {type(message).__name__}",
            "messages",
        )
    names = ("reasoning_content", "thinking", "reasoning")
    found = next((message[name] for name in names if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _joined(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise TemplateError(
                f"the model reads text only, and a message has a part of type {kind!r}", "messages"
            )
    return "".join(part["text"] for part in content)


@lru_cache(maxsize=64)
def reads_parts(template: str) -> bool:
    """Whether a template takes content given as a list of parts. Asked by trying: many print the list as it is."""
    probe = "a4f1c9"
    message = {"role": "user", "content": [{"type": "text", "text": probe}]}
    values = {
        "messages": [message],
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
    }
    tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
    try:
        text = _run(
            template, {**values, **tokens, "strftime_now": datetime(2000, 1, 1).strftime}, LIMIT
        )
    except TemplateError:
        return False
    return probe in text and f"'{probe}'" not in text and f'"{probe}"' not in text


# ---- continuing the last message ---------------------------------------------------------------

_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # its space shows whether the template trimmed the message


def _mark_final(chat: list[dict[str, Any]], template: str) -> str:
    """Mark the end of the last message's text, and say what that text is."""
    content = chat[-1].get("content") if "content" in template else None
    if isinstance(content, str):
        chat[-1] = {**chat[-1], "content": content + _MARK}
        return content
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] += _MARK
            return text
    raise TemplateError(
        "continue_final_message is set, but the last message has no text to continue", "messages"
    )


def _cut_at_mark(text: str, final: str) -> str:
    at = text.rfind(_MARK.strip())
    if at < 0 or final.strip() not in text:
        raise TemplateError(
            "the chat template does not show the last message whole: it cannot be continued",
            "messages",
        )
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()


# ---- the sandbox -------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def compile_template(template: str, limit: int = LIMIT) -> Template:
    environment = _Sandbox(limit)
    try:
        return environment.from_string(template)
    except (TemplateSyntaxError, RecursionError) as error:
        line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise TemplateError(
            f"the chat template is not valid Jinja{line}: {error}", "chat_template"
        ) from error


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, with the operators that make large values of small ones looked after."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, limit: int):
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        self.limit = limit
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        self.filters |= {
            "tojson": _to_json,
            "center": self._bounded(do_center),
            "indent": self._bounded(do_indent),
        }

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _size_after(operator, left, right) > self.limit:
            raise SecurityError(
                f"the chat template's {operator!r} would make a value of more than {self.limit}"
            )
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        text = getattr(obj, "__self__", None)
        if isinstance(text, str):  # center, ljust, rjust, zfill, expandtabs, format
            width = (
                self.limit + 1
                if obj.__name__.startswith("format") and re.search(r"\d{6}", text)
                else 0
            )
            self._check_widths(width, *args, *kwargs.values())
        return super().call(context, obj, *args, **kwargs)

    def _check_widths(self, *values: Any) -> None:
        if any(isinstance(value, int) and value > self.limit for value in values):
            raise SecurityError(
                f"the chat template asks for a text of more than {self.limit} characters"
            )

    def _bounded(self, filter: Callable[..., str]) -> Callable[..., str]:
        def bounded(*args: Any, **kwargs: Any) -> str:
            self._check_widths(*args, *kwargs.values())
            return filter(*args, **kwargs)

        return bounded


def _size_after(operator: str, left: Any, right: Any) -> int:
    """About how large the result is, where it could be far larger than its operands."""
    sized = (str, list, tuple)
    match operator:
        case "+" if isinstance(left, sized) and isinstance(right, sized):
            return len(left) + len(right)
        case "*" if isinstance(left, sized) and isinstance(right, int):
            return len(left) * right
        case "*" if isinstance(left, int) and isinstance(right, sized):
            return left * len(right)
        case "*" if isinstance(left, int) and isinstance(right, int):
            return 0 if left.bit_length() + right.bit_length() <= INT_BITS else 1 << INT_BITS
        case "**" if isinstance(left, int) and isinstance(right, int):
            return 0 if left.bit_length() * right <= INT_BITS else 1 << INT_BITS
        case "%" if isinstance(left, str):
            return (
                1 << INT_BITS
                if re.search(r"%(\([^)]*\))?[-#0 +]*(\d{6}|\*|\d*\.(\d{6}|\*))", left)
                else 0
            )
    return 0


def _raise_exception(message: object) -> None:
    raise JinjaError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, without escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _GenerationBlock(Extension):
    """{% generation %} marks what the assistant wrote, for training; here it is its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` as a template may use it, without the type behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's namespace, closed to the underscored names that lead into Python."""

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
