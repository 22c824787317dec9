"""The tokens that chats with the same system message share."""

from __future__ import annotations

from typing import Any

import pytest

from bloomery.text.chat import render_chat
from bloomery.text.system_message import common_length, count_system_tokens
from bloomery.text.tokenizer import Tokenizer, TokenizerConfig
from tests.server.scripted_engine import load_test_tokenizer
from tests.text.vocabularies import TOKENIZERS

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
    encoding = tokenizer.encode_text(text, add_special=False)
    return count_system_tokens(tokenizer, text, encoding, messages, **options), encoding.ids


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
    system = {"role": "system", "content": "Answer in iambs."}
    assert count(load_tokenizer(template), [system, USER])[0] == 0


def test_a_chat_without_system_message_and_tools_is_not_rendered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: Any, **options: Any) -> str:
        raise AssertionError("rendered again")

    monkeypatch.setattr("bloomery.text.system_message.render_chat", refuse)
    assert count(load_tokenizer(TEMPLATES["plain"]), OTHER)[0] == 0


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("end", ["", "\n", " ", "</s>"])
def test_the_tokens_are_shared_with_every_tokenizer(name: str, end: str) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "{% endfor %}"
    backend = TOKENIZERS[name]().backend
    tokenizer = Tokenizer(backend, TokenizerConfig(chat_templates={"default": template}))
    system = {"role": "system", "content": "The fox. Größe, 火🔥 e\u0301 ﬁ  and \n\n more. " * 3}
    lengths = set()
    all_ids = []
    for content in ("Iron", " Iron", "\n\nIron", "é", "🔥", "the"):
        length, ids = count(tokenizer, [system, {"role": "user", "content": content}])
        lengths.add(length)
        all_ids.append(ids)
    num_shared = min(common_length(all_ids[0], ids) for ids in all_ids)
    assert num_shared - 2 <= min(lengths) <= max(lengths) <= num_shared + 1


def test_a_tokenizer_without_offsets_gives_no_hint() -> None:
    class EncodingWithoutOffsets:
        ids = (1, 2, 3)

        def char_to_token(self, place: int) -> int | None:
            return None

    tokenizer = load_tokenizer(TEMPLATES["plain"])
    messages = [{"role": "system", "content": "Answer in iambs."}, USER]
    encoding: Any = EncodingWithoutOffsets()
    assert count_system_tokens(tokenizer, render_chat(tokenizer, messages), encoding, messages) == 0


@pytest.mark.parametrize("length", range(9))
def test_the_longest_common_beginning_is_found(length: int) -> None:
    text = "abcabcab"
    for other in (text[:length], text[:length] + "?", text[:length] + "?" * 20):
        assert common_length(text, other) == common_length(other, text) == length


def test_a_text_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(TEMPLATES["plain"])
    num_encodings = 0
    encode_text = Tokenizer.encode_text

    def count_encodings(self: Tokenizer, text: str, add_special: bool = True) -> Any:
        nonlocal num_encodings
        num_encodings += 1
        return encode_text(self, text, add_special)

    monkeypatch.setattr(Tokenizer, "encode_text", count_encodings)
    assert count(tokenizer, [{"role": "system", "content": "Answer in iambs."}, USER])[0] > 0
    assert num_encodings == 1
