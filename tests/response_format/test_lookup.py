"""Where a format comes from: a file, response_template, the chat template, or nowhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer as Backend
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing import parse_response

from bloomery.errors import ConfigError
from bloomery.response_format import (
    FormatLookup,
    ResponseFormat,
    ResponseParser,
    find_response_format,
    load_response_format,
    parse_response_format,
    template_reasoning_options,
)
from bloomery.response_format.check import merge_events
from bloomery.response_format.response_template import convert_response_template
from bloomery.text.chat import render_template
from bloomery.text.tokenizer import Tokenizer, TokenizerConfig
from bloomery.text.tokenizer_pool import TokenizerPool
from tests.response_format.conversations import FUNCTIONS, look_up, read_templates

QWEN = next(entry.source for entry in read_templates() if entry.name == "Qwen-Qwen3-0.6B")
EXAMPLES = {
    "qwen2": (
        "<|im_start|>assistant\n",
        '<think>\nhm\n</think>\n\nHi.\n<tool_call>\n{"name": "search", "arguments": '
        '{"query": "a"}}\n</tool_call>\n<tool_call>\n{"name": "ping", "arguments": {}}\n'
        "</tool_call><|im_end|>",
    ),
    "qwen3_5": (
        "<|im_start|>assistant\n<think>\n",
        "hm\n</think>\n\nHi.\n<tool_call>\n<function=search>\n<parameter=query>\na b\n"
        "</parameter>\n<parameter=limit>\n3\n</parameter>\n</function>\n</tool_call><|im_end|>",
    ),
    "gemma4": (
        "<|turn>model\n",
        '<|channel>thought\nhm<channel|>Hi.<|tool_call>call:search{query:<|"|>a<|"|>,limit:3}'
        "<tool_call|><turn|>",
    ),
}


def fallback_template(model_type: str) -> dict[str, Any]:
    return next(
        template for types, template in _RESPONSE_TEMPLATE_FALLBACKS.items() if model_type in types
    )


@pytest.mark.parametrize("model_type", EXAMPLES)
def test_response_templates_read_as_in_transformers(model_type: str) -> None:
    template = fallback_template(model_type)
    prompt, text = EXAMPLES[model_type]
    tools = [
        {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}}
        for tool in FUNCTIONS
    ]
    theirs = parse_response(text, template, prefix=prompt, tools=tools)
    parser = ResponseParser(convert_response_template(template), FUNCTIONS, prompt)
    ours = merge_events([*parser.feed(text), *parser.close()])
    assert ours.reasoning == theirs["reasoning_content"].strip()
    assert ours.content == theirs["content"].strip()
    functions = [call["function"] for call in theirs["tool_calls"]]
    assert ours.read_calls() == [(call["name"], call["arguments"]) for call in functions]


def test_a_response_template_takes_precedence_over_the_chat_template() -> None:
    config = {"response_template": fallback_template("qwen2")}
    lookup = find_response_format(config, QWEN, (), None, render=render_template)
    assert lookup.source == "response_template"
    assert not lookup.warnings


@pytest.mark.parametrize(
    "template",
    [
        3,
        {"version": 2, "fields": {}},
        {"fields": {"tool_calls": {"open": "<c>", "close": "</c>", "content": "kv-lines"}}},
        {"fields": {"reasoning_content": {"open_pattern": "<(a|b)>", "close": "</a>"}}},
    ],
)
def test_a_response_template_that_cannot_be_used_is_reported(template: Any) -> None:
    config = {"response_template": template}
    lookup = find_response_format(config, QWEN, (), None, render=render_template)
    assert lookup.source == "derived"
    assert "response_template" in lookup.warnings[0]


def test_a_file_overrides_the_model(tmp_path: Path) -> None:
    path = tmp_path / "format.json"
    path.write_bytes(msgspec.json.encode(look_up(QWEN).format))
    lookup = find_response_format({}, "broken {{", (), path, render=render_template)
    assert lookup == FormatLookup(look_up(QWEN).format, "file")
    assert "tool calls <tool_call>" in lookup.describe()
    assert "the given file" in lookup.describe()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "format.json"),
        ('{"reasonin": {}}', "reasonin"),
        ('{"calls": {"arguments": {"style": "prose"}}}', "prose"),
        ('{"end": "x"}', r"\$\.end"),
    ],
)
def test_errors_of_a_file_name_the_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "format.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_response_format(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_response_format(tmp_path / "nothing.json")


def test_formats_survive_json() -> None:
    for entry in read_templates():
        format = look_up(entry.source).format
        assert parse_response_format(msgspec.json.encode(format)) == format


def test_a_template_that_loses_arguments_is_refused_for_tools() -> None:
    """The derived format is right, but a call of the sample conversations is not."""
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}<sep>"
        "{{ {'query': c.function.arguments.query} | tojson if c.function.name == 'search' else "
        "c.function.arguments | tojson }}</call>{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    lookup = find_response_format({}, source, (), None, render=render_template)
    assert lookup.format.calls is not None
    assert "cannot be read reliably" in lookup.tool_problem
    assert "disagree on a call" in lookup.warnings[0]


def test_models_without_templates_or_calls() -> None:
    lookup = find_response_format({}, None, (), None, render=render_template)
    assert lookup.source == "none"
    assert "no chat template" in lookup.tool_problem
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    lookup = find_response_format({}, plain, (), None, render=render_template)
    assert lookup.source == "none"
    assert lookup.format.calls is None
    broken = find_response_format({}, "{{ nothing.at.all }}", (), None, render=render_template)
    assert broken.tool_problem


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Qwen-Qwen3-0.6B", {"enable_thinking"}),
        ("openai-gpt-oss-120b", {"reasoning_effort"}),
        ("deepseek-ai-DeepSeek-V3.1", {"enable_thinking", "thinking"}),
        ("Qwen-Qwen2.5-7B-Instruct", set()),
    ],
)
def test_templates_tell_which_reasoning_options_they_read(name: str, options: set[str]) -> None:
    source = next(entry.source for entry in read_templates() if entry.name == name)
    assert template_reasoning_options(source) == options


def test_the_pool_finds_the_format_in_a_worker(tmp_path: Path) -> None:
    async def find() -> tuple[FormatLookup, FormatLookup]:
        backend = Backend.from_file(str(Path(__file__).parent.parent / "server" / "tokenizer.json"))
        config = TokenizerConfig(chat_templates={"default": QWEN})
        pool = TokenizerPool(Tokenizer(backend, config), processes=1)
        path = tmp_path / "format.json"
        path.write_text("{}")
        try:
            return await pool.find_response_format(), await pool.find_response_format(path)
        finally:
            pool.close()

    lookup, overridden = asyncio.run(find())
    assert lookup == look_up(QWEN)
    assert overridden == FormatLookup(ResponseFormat(), "file")
