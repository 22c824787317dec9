"""Chat templates: the same text and refusals as transformers, and limits on templates."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from bloomery.errors import TemplateError
from bloomery.text.chat import accepts_content_parts, render_chat, render_template, select_template
from bloomery.text.tokenizer import Tokenizer, TokenizerConfig
from tests.text.vocabularies import embedded_tokenizer, transformers_tokenizer, word_level_tokenizer

USER = {"role": "user", "content": 'Is 2 < 3 & "4"? Größe 你好 😀\n  two  '}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": " Yes. "}
THOUGHT = {"role": "assistant", "reasoning": "Two is less.", "content": "Yes."}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CALL = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Zürich"}}}],
}
RESULT = {"role": "tool", "name": "weather", "content": "21 °C"}
DOCUMENT = {"title": "A <title>", "text": "text"}

CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "user": ([USER], {}),
    "system": ([SYSTEM, USER], {}),
    "turns": ([SYSTEM, USER, ANSWER, USER], {}),
    "no prompt": ([USER, ANSWER], {"add_generation_prompt": False}),
    "continue": ([USER, ANSWER], {"add_generation_prompt": False, "continue_final_message": True}),
    "tools": ([USER, CALL, RESULT], {"tools": [TOOL]}),
    "documents": ([USER], {"documents": [DOCUMENT]}),
    "thought": ([USER, THOUGHT, USER], {}),
}

TEMPLATES = {
    "blocks": """
    {%- for message in messages %}
        {% if message.role == 'system' %}
<<{{ message.content | trim }}>>
        {% else %}
[{{ message['role'] }}]{{ message.content }}
        {%- endif %}
    {% endfor %}
    {% if add_generation_prompt %}[assistant]{% endif %}""",
    "tokens": "{{ bos_token }}{% for m in messages %}{{ m.role ~ ':' ~ m.content ~ eos_token }}"
    "{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}"
    "{{ {'b': '<é>', 'a': 1} | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}",
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}"
    "{% for d in documents or [] %}{{ d.title }}{% endfor %}{{ tools is none }}"
    "{{ tools is defined }}"
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}",
    "loops": "{% for m in messages %}{% if loop.index0 > 2 %}{% break %}{% endif %}"
    "{% if m.role == 'system' %}"
    "{% continue %}{% endif %}{{ loop.index }}{{ m.content }}{% endfor %}",
    "names": "{% set ns = namespace(found=false, self=1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}"
    "{% set ns.found = true %}{% endif %}{% endfor %}{{ ns.found }}{{ ns.self }}{{ dict(a=1).a }}"
    "{{ dict.fromkeys(['x'], 2).x }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}"
    "{% set x = 1 %}{% endgeneration %}{{ x is defined }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}",
    "macros": "{% macro turn(m, mark='#') %}{{ mark }}{{ m.role | upper }}: {{ m.content }}"
    "{{ caller() if caller }}"
    "{% endmacro %}{% for m in messages %}{% call turn(m) %}!{% endcall %}"
    "{{ turn(m, mark='%') }}{% endfor %}",
    "strings": "{% for m in messages %}{{ m.content.split(' ')[-1].strip() }}{{ m.content[:3] }}"
    "{{ m.content | length }}{{ '%s-%03d' % (m.role, 7) }}{{ '{:>5}'.format(m.role) }}"
    "{{ m.role.center(12, '*') }}{{ m.role | center(12) }}"
    "{{ m.content | indent(3, true) }}{{ '=' * 8 }}{{ 2 ** 10 }}{{ [1] + [2] }}"
    "{{ range(3) | list }}{% endfor %}",
    "thoughts": "{% for m in messages %}{{ m.reasoning_content or '' }}{{ m.thinking or '' }}"
    "{{ m.content }}"
    "{% endfor %}",
    "parts": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}"
    "{{ p.text | trim }}{% endfor %}{% endif %}{% endfor %}",
    "trimming": "{% for m in messages %}{{ m.content | trim }}|{% endfor %}",
    "undefined": "{{ nothing }}{{ messages[0].nothing }}{% for m in messages %}{{ m.content }}"
    "{% endfor %}",
    "raising": "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no ' + m.role + ' here') }}{% endif %}{{ m.content }}{% endfor %}",
    "failing": "{{ messages[0].content + 1 }}",
    "deep undefined": "{{ messages[0].nothing.deeper }}",
    "own": "",  # the template of the embedded model, filled in by the test
}


def run_or_refuse(make: Any) -> tuple[str, str]:
    try:
        return "text", make()
    except Exception as error:
        return "refused", str(error)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_template_renders_as_in_transformers(name: str, conversation: str) -> None:
    template = TEMPLATES[name] or embedded_tokenizer().chat_templates["default"]
    messages, options = CONVERSATIONS[conversation]
    options = {"add_generation_prompt": True, **options}
    variables = {"bos_token": "<s>", "eos_token": "</s>", "custom": [1]}
    theirs = run_or_refuse(
        lambda: render_jinja_template([messages], chat_template=template, **options, **variables)[
            0
        ][0]
    )
    ours = run_or_refuse(
        lambda: render_template(template, messages, variables=variables, **options)
    )
    if conversation == "tools" and theirs[0] == "refused":
        return  # calls without content, which OpenAI's clients send, are rendered here
    assert ours == theirs or ours[0] == theirs[0] == "refused"


def test_template_of_the_embedded_model_renders_as_in_transformers() -> None:
    for conversation, (messages, options) in CONVERSATIONS.items():
        options = {"add_generation_prompt": True, **options}
        theirs = run_or_refuse(
            lambda: transformers_tokenizer().apply_chat_template(
                messages, tokenize=False, **options
            )
        )
        ours = run_or_refuse(lambda: render_chat(embedded_tokenizer(), messages, **options))
        if conversation == "tools" and theirs[0] == "refused":
            continue
        assert ours == theirs or ours[0] == theirs[0] == "refused"
        if ours[0] == "text":  # the rendered text has its own BOS
            ids = transformers_tokenizer().apply_chat_template(
                messages, return_dict=False, **options
            )
            assert embedded_tokenizer().encode(ours[1], add_special=False) == ids


def test_messages_are_not_modified() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}], "reasoning": "r"}]
    render_template(
        TEMPLATES["parts"], messages, add_generation_prompt=False, continue_final_message=True
    )
    assert messages == [
        {"role": "user", "content": [{"type": "text", "text": "x"}], "reasoning": "r"}
    ]


# ---- content in parts --------------------------------------------------------------------------

PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "One. "}, {"type": "text", "text": "Two."}],
}


def test_template_that_accepts_content_parts_gets_them() -> None:
    assert accepts_content_parts(TEMPLATES["parts"])
    assert render_template(TEMPLATES["parts"], [PARTS]) == "One.Two."  # it trims each


@pytest.mark.parametrize("name", ["tokens", "trimming", "failing", "undefined"])
def test_other_templates_get_the_joined_text_of_parts(name: str) -> None:
    assert not accepts_content_parts(TEMPLATES[name])
    joined = {"role": "user", "content": "One. \nTwo."}
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    ours = run_or_refuse(
        lambda: render_template(TEMPLATES[name], [PARTS, ANSWER], variables=variables)
    )
    assert ours == run_or_refuse(
        lambda: render_template(TEMPLATES[name], [joined, ANSWER], variables=variables)
    )
    with pytest.raises(TemplateError, match="text only.*'image_url'"):
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        render_template(TEMPLATES[name], [image], variables=variables)


# ---- choosing a template -----------------------------------------------------------------------


def test_template_is_selected_by_name_by_tools_or_by_default() -> None:
    several = {"default": "d", "tool_use": "t", "rag": "r"}
    assert select_template(several) == "d"
    assert select_template(several, has_tools=True) == "t"
    assert select_template(several, "rag", has_tools=True) == "r"
    assert select_template(several, "{{ written out }}") == "{{ written out }}"
    assert select_template({"default": "d"}, has_tools=True) == "d"
    with pytest.raises(TemplateError, match="name one of rag, tool_use"):
        select_template({"tool_use": "t", "rag": "r"})


def test_error_without_a_template_names_the_remedy() -> None:
    with pytest.raises(TemplateError, match="no chat template.*give one"):
        render_chat(word_level_tokenizer(), [USER])
    assert (
        render_chat(word_level_tokenizer(), [USER], chat_template="{{ messages[0].role }}")
        == "user"
    )


def test_options_reach_the_template() -> None:
    template = (
        "{{ thinking }}{{ bos_token }}{{ eos_token }}{{ strftime_now('%d %b %Y') }}"
        "{{ add_generation_prompt }}"
    )
    tokenizer = Tokenizer(
        word_level_tokenizer().backend,
        TokenizerConfig(special_tokens={"bos_token": "<s>", "eos_token": "</s>"}),
    )
    text = render_chat(
        tokenizer,
        [USER],
        chat_template=template,
        chat_template_kwargs={"thinking": 1, "eos_token": "E"},
    )
    assert text == f"1<s>E{datetime.now():%d %b %Y}True"
    assert render_template("{{ strftime_now('%Y') }}", [USER], now=datetime(1999, 1, 1)) == "1999"


# ---- refusals ----------------------------------------------------------------------------------


def test_error_raised_by_a_template_is_reported() -> None:
    with pytest.raises(TemplateError, match=r"^no system here$"):
        render_template(TEMPLATES["raising"], [SYSTEM])
    with pytest.raises(TemplateError, match="cannot handle these messages"):
        render_template(TEMPLATES["failing"], [USER])
    with pytest.raises(TemplateError, match="not valid Jinja in line 2"):
        render_template("\n{% if %}", [USER])


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "at least one message"),
        (["text"], {}, "must be an object"),
        ([{"role": "user", "content": object()}], {}, "plain JSON values, not object"),
        ([USER], {"variables": {"f": len}}, "chat_template_kwargs must be plain"),
        ([USER], {"continue_final_message": True}, "choose one"),
        (
            [CALL],
            {"continue_final_message": True, "add_generation_prompt": False},
            "no text to continue",
        ),
    ],
)
def test_invalid_arguments_are_refused(
    messages: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TemplateError, match=message):
        render_template(TEMPLATES["blocks"], messages, **options)


def test_message_that_the_template_drops_cannot_be_continued() -> None:
    with pytest.raises(TemplateError, match="cannot be continued"):
        render_template(
            "{{ messages[0].content }}",
            [USER, ANSWER],
            add_generation_prompt=False,
            continue_final_message=True,
        )


HOSTILE = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ namespace.__init__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ self.__init__ }}",
    "{{ strftime_now.__self__.__class__ }}",
    "{{ dict.__call__.__globals__ }}",
    "{{ joiner.__init__.__globals__['os'] }}",
    "{{ (messages | map(attribute='__class__') | list)[0] }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ ''|attr('__class__') }}",
    "{% set ns = namespace(__class__=1) %}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{% set _ = messages.append(1) %}",
    "{% set _ = messages[0].update({'role': 'x'}) %}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{{ lipsum(9) }}",
]


@pytest.mark.parametrize("template", HOSTILE)
def test_template_cannot_leave_the_sandbox(template: str) -> None:
    kind, text = run_or_refuse(lambda: render_template(template, [USER]))
    # An unsafe attribute is undefined and renders as an empty string.
    assert (kind, text) == ("text", "") or kind == "refused"


OVERSIZED = [
    "{{ 'a' * 100000000000 }}",
    "{{ 100000000000 * 'a' }}",
    "{{ [0] * 100000000000 }}",
    "{{ 9 ** 99999999 }}",
    "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
    "{% endfor %}",
    "{{ '%100000000000d' % 1 }}",
    "{{ '%(a)100000000000d' % {'a': 1} }}",
    "{{ '%*d' % (100000000000, 1) }}",
    "{{ '{:100000000000}'.format(1) }}",
    "{{ 'a'.center(100000000000) }}",
    "{{ 'a'.ljust(width=100000000000) }}",
    "{{ 'a' | center(100000000000) }}",
    "{{ 'a\nb' | indent(100000000000) }}",
    "{% for i in range(100000000000) %}{% endfor %}",
    "{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
]


@pytest.mark.parametrize("template", OVERSIZED)
def test_template_cannot_build_huge_values(template: str) -> None:
    with pytest.raises(TemplateError):
        render_template(template, [USER], limit=1_000_000)


# ---- tool calls --------------------------------------------------------------------------------


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CALL_HISTORY = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "42"},
]
CALL_LOOP = "{% for m in messages %}{% for c in m.tool_calls or [] %}"


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
@pytest.mark.parametrize(
    "show", ["{{ c.function.arguments | tojson }}", "{{ c.function.arguments + '' }}"]
)
def test_arguments_are_what_the_template_wants(show: str, arguments: Any) -> None:
    template = CALL_LOOP + show + "{% endfor %}{% endfor %}"
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert render_template(template, messages) == '{"a": 1}'


def test_broken_arguments_in_history_are_shown_as_they_are() -> None:
    template = CALL_LOOP + "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    call = {**CALL, "function": {"name": "f", "arguments": '{"a": '}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert render_template(template, messages) == '"{\\"a\\": "'


def test_a_result_has_the_name_of_its_function() -> None:
    template = "{% for m in messages %}{{ m.name if m.role == 'tool' }}{% endfor %}"
    assert render_template(template, CALL_HISTORY) == "f"


def test_calls_without_content_render_where_the_template_needs_a_text() -> None:
    template = "{% for m in messages %}{{ m.content + '|' }}{% endfor %}"
    assert render_template(template, CALL_HISTORY) == "q||42|"


def test_ids_have_nine_characters_where_the_template_insists() -> None:
    template = (
        CALL_LOOP + "{% if c.id|length != 9 %}{{ raise_exception('nine!') }}{% endif %}{{ c.id }}"
        "{% endfor %}{% if m.role == 'tool' %}={{ m.tool_call_id }}{% endif %}{% endfor %}"
    )
    call_id, result_id = render_template(template, CALL_HISTORY).split("=")
    assert len(call_id) == 9
    assert call_id == result_id


def test_a_template_may_append_to_its_own_lists() -> None:
    template = "{% set seen = [] %}{% for m in messages %}{% set _ = seen.append(m.content) %}"
    template += "{% endfor %}{{ seen | join(',') }}"
    messages = [{"role": "user", "content": text} for text in ("a", "b")]
    assert render_template(template, messages) == "a,b"
    with pytest.raises(TemplateError, match="insecure|unsafe|not safe"):
        render_template("{% set x = [1] %}{{ x.clear() }}", messages)


@pytest.mark.parametrize("name", ["messages", "tools", "tokenize", "chat_template"])
def test_variables_that_rendering_sets_are_refused_by_name(name: str) -> None:
    messages = [{"role": "user", "content": "q"}]
    with pytest.raises(TemplateError, match=f"cannot set '{name}'") as error:
        render_chat(embedded_tokenizer(), messages, chat_template_kwargs={name: "x"})
    assert error.value.field == "chat_template_kwargs"
