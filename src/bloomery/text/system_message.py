"""Where the system message of a rendered chat ends, which other chats are likely to begin with.

An engine with recurrent states saves one there. This module knows templates and tokens, no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from bloomery.errors import TemplateError
from bloomery.text.chat import Message, render_chat
from bloomery.text.tokenizer import Tokenizer

SYSTEM_ROLES = ("system", "developer")
OTHER_MESSAGE: Message = {"role": "user", "content": "?"}


def count_system_tokens(
    tokenizer: Tokenizer,
    text: str,
    ids: Sequence[int],
    messages: Sequence[Message],
    **options: Any,
) -> int:
    """Count the tokens that chats with the same system message and tools share.

    `text` was rendered from `messages` with these options of render_chat, and `ids` are its tokens.
    To find out, the system message is rendered again, with another message of a user. 0 if the
    template refuses that.
    """
    system = takewhile(lambda message: message.get("role") in SYSTEM_ROLES, messages)
    options |= {"add_generation_prompt": None, "continue_final_message": False}
    try:
        other = render_chat(tokenizer, [*system, OTHER_MESSAGE], **options)
    except TemplateError:
        return 0
    shared = text[: common_length(text, other)]
    return common_length(tokenizer.encode(shared, add_special=False), ids)


def common_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """The length of the longest common prefix."""
    pairs = zip(left, right, strict=False)
    first = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    return min(len(left), len(right)) if first is None else first
