"""Conversations stored in memory, so that a request can continue one by its response id.

The store is bounded in entries and characters. It evicts the least recently used conversation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

StoredMessage = Mapping[str, str]
ConversationKey = tuple[str, str]  # (tenant, response id): no tenant can read another's


class ConversationStore:
    """Messages of past conversations by tenant and response id."""

    def __init__(self, max_conversations: int, max_characters: int):
        self.max_conversations = max_conversations
        self.max_characters = max_characters
        self.num_characters = 0
        self.conversations: OrderedDict[ConversationKey, tuple[StoredMessage, ...]] = OrderedDict()

    def get(self, key: ConversationKey) -> tuple[StoredMessage, ...] | None:
        """The messages of a conversation, which becomes the most recently used one."""
        if key in self.conversations:
            self.conversations.move_to_end(key)
        return self.conversations.get(key)

    def put(self, key: ConversationKey, messages: Sequence[StoredMessage]) -> None:
        """Store a conversation under a new key, and evict others if the store is full."""
        self.conversations[key] = tuple(messages)
        self.num_characters += _count_characters(messages)
        while (
            len(self.conversations) > self.max_conversations
            or self.num_characters > self.max_characters
        ):
            _, evicted = self.conversations.popitem(last=False)
            self.num_characters -= _count_characters(evicted)

    def clear(self) -> None:
        self.conversations.clear()
        self.num_characters = 0


def _count_characters(messages: Sequence[StoredMessage]) -> int:
    return sum(len(message["content"]) for message in messages)
