"""Where the system message of a rendered chat ends, which other chats are likely to begin with.

An engine with recurrent states saves one there. This module knows templates and tokens, no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from tokenizers import Encoding

from bloomery.errors import TemplateError
from bloomery.text.chat import Message, render_chat
from bloomery.text.tokenizer import Tokenizer

MAX_TRIMMED = 16  # characters in a row that belong to no token
SYSTEM_ROLES = ("system", "developer")
OTHER_MESSAGE: Message = {"role": "user", "content": "?"}


def count_system_tokens(
    tokenizer: Tokenizer,
    text: str,
    encoding: Encoding,
    messages: Sequence[Message],
    **options: Any,
) -> int:
    """Count the tokens that chats with the same system message and tools share.

    `text` was rendered from `messages` with these options of render_chat, and `encoding` has its
    tokens. To find out, the system message is rendered again, with another message of a user. The
    result is a hint: the last token may depend on what follows. It is 0 without a system message
    and tools, if the template refuses the other message, and if the tokenizer does not tell which
    characters its tokens stand for.
    """
    system = list(takewhile(lambda message: message.get("role") in SYSTEM_ROLES, messages))
    if not system and not options.get("tools"):
        return 0
    options |= {"add_generation_prompt": None, "continue_final_message": False}
    try:
        other = render_chat(tokenizer, [*system, OTHER_MESSAGE], **options)
    except TemplateError:
        return 0
    num_shared = common_length(text, other)
    if num_shared == len(text):
        return len(encoding.ids)
    # White space may belong to no token: some tokenizers trim it from the place of the next one.
    places = range(num_shared, min(num_shared + MAX_TRIMMED, len(text)))
    tokens = (encoding.char_to_token(place) for place in places)
    return next((token for token in tokens if token is not None), 0)


def common_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """The length of the longest common prefix.

    Slices are compared, not items: a long text takes a thousandth of the time.
    """
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
