"""The tokens that chats with the same system message share."""

from __future__ import annotations

from typing import Any

import pytest

from bloomery.text.chat import render_chat
from bloomery.text.system_message import common_length, count_system_tokens
from bloomery.text.tokenizer import Tokenizer, TokenizerConfig
from tests.server.scripted_engine import load_test_tokenizer

USER = {"role": "user", "content": "Iron, fire and 火🔥"}
OTHER = [{"role": "user", "content": "Water"}, {"role": "assistant", "content": "Cold"}, USER]
TEMPLATES = {
    "plain": "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}",
    "tools": "{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    # As Mistral's: before the last message of the user.
    "behind": "{% for m in messages[1:] %}{{ m.content }}{% endfor %}{{ messages[0].content }}",
}


def load_tokenizer(template: str) -> Tokenizer:
    base = load_test_tokenizer()
    config = TokenizerConfig(base.bos_id, base.eos_ids, base.special_tokens, {"default": template})
    return Tokenizer(base.backend, config)


def count(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any
) -> tuple[int, list[int]]:
    text = render_chat(tokenizer, messages, **options)
    ids = tokenizer.encode(text, add_special=False)
    return count_system_tokens(tokenizer, text, ids, messages, **options), ids


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("role", ["system", "developer", ""])
def test_two_chats_share_the_tokens_of_their_system_message(name: str, role: str) -> None:
    tokenizer = load_tokenizer(TEMPLATES[name])
    system = [{"role": role, "content": "Answer in iambs. " * 5}] if role else []
    tools = [{"type": "function", "function": {"name": "forge"}}]
    first, ids = count(tokenizer, [*system, USER], tools=tools)
    second, other_ids = count(tokenizer, [*system, *OTHER], tools=tools)
    assert first == second
    num_shared = common_length(ids, other_ids)
    assert num_shared - 1 <= first <= num_shared  # the last one may belong to both messages
    assert (first > 20) == (name == "tools" or (name == "plain" and bool(role)))


def test_a_message_that_is_continued_does_not_matter() -> None:
    tokenizer = load_tokenizer(TEMPLATES["plain"])
    system = {"role": "system", "content": "Answer in iambs."}
    begun = {"role": "assistant", "content": "Whose"}
    expected, _ = count(tokenizer, [system, USER])
    assert count(tokenizer, [system, USER, begun], continue_final_message=True)[0] == expected > 0


def test_a_template_that_refuses_the_other_message_gives_no_hint() -> None:
    template = "{% if messages[-1].content == '?' %}{{ raise_exception('no') }}{% endif %}iron"
    assert count(load_tokenizer(template), [USER])[0] == 0
