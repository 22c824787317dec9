"""Answers stored in memory, so that a request can read, continue, cancel or delete one by its id.

The store is bounded in entries and characters. It evicts the least recently used answer.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from bloomery.server.schema import encode_json

StoreKey = tuple[str, str]  # (tenant, id): no tenant can read another's


class StoredEntry(Protocol):
    """What a ConversationStore holds."""

    @property
    def num_characters(self) -> int: ...

    def discard(self) -> None:
        """Called when the entry is evicted, deleted or replaced."""
        ...


Entry = TypeVar("Entry", bound=StoredEntry)


class ConversationStore(Generic[Entry]):
    """Stored answers by tenant and id, the most recently used last."""

    def __init__(self, max_conversations: int, max_characters: int):
        self.max_conversations = max_conversations
        self.max_characters = max_characters
        self.num_characters = 0
        self.entries: OrderedDict[StoreKey, tuple[Entry, int]] = OrderedDict()

    def get(self, key: StoreKey) -> Entry | None:
        """A stored answer, which becomes the most recently used one."""
        if key not in self.entries:
            return None
        self.entries.move_to_end(key)
        return self.entries[key][0]

    def put(self, key: StoreKey, entry: Entry) -> None:
        """Store an answer, or count it again after a change; evict others if the store is full."""
        replaced = self.entries.pop(key, None)
        if replaced is not None:
            self.num_characters -= replaced[1]
            if replaced[0] is not entry:
                replaced[0].discard()
        size = entry.num_characters
        self.entries[key] = entry, size
        self.num_characters += size
        while (
            len(self.entries) > self.max_conversations or self.num_characters > self.max_characters
        ):
            _, (evicted, size) = self.entries.popitem(last=False)
            self.num_characters -= size
            evicted.discard()

    def delete(self, key: StoreKey) -> bool:
        """Forget an answer; False if it is not stored."""
        if key not in self.entries:
            return False
        entry, size = self.entries.pop(key)
        self.num_characters -= size
        entry.discard()
        return True

    def entries_of(self, tenant: str) -> Iterator[Entry]:
        """All answers of one tenant, the least recently used first."""
        for (owner, _), (entry, _) in self.entries.items():
            if owner == tenant:
                yield entry

    def clear(self) -> None:
        entries = [entry for entry, _ in self.entries.values()]
        self.entries.clear()
        self.num_characters = 0
        for entry in entries:
            entry.discard()


class StoredResponse:
    """A response of /v1/responses: the object that clients read, and the items that led to it."""

    def __init__(
        self,
        response: dict[str, Any],
        input_items: Sequence[dict[str, Any]],
        previous_items: Sequence[dict[str, Any]] = (),
        conversation_object: StoredConversation | None = None,
    ):
        self.response = response
        self.input_items = input_items  # of its own request
        self.previous_items = previous_items  # of the conversation before it
        self.conversation_object = conversation_object  # to which its items are added
        self.background: BackgroundResponse | None = None

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """All items of the conversation, the answer included."""
        return [*self.previous_items, *self.input_items, *self.response["output"]]

    @property
    def num_characters(self) -> int:
        num_characters = len(encode_json(self.conversation))
        if self.background is not None:
            num_characters += sum(map(len, self.background.events))
        return num_characters

    def discard(self) -> None:
        if self.background is not None:
            self.background.cancel()


class StoredConversation:
    """A conversation object: what clients read of it, and the items that responses add to."""

    def __init__(self, conversation: dict[str, Any], items: list[dict[str, Any]]):
        self.conversation = conversation
        self.items = items

    @property
    def num_characters(self) -> int:
        return len(encode_json([self.conversation, self.items]))

    def discard(self) -> None:
        """Nothing runs on behalf of a conversation."""


class BackgroundResponse:
    """A generation that runs without its HTTP request, with all its events so far."""

    def __init__(self) -> None:
        self.events: list[bytes] = []  # event i has the sequence number i
        self.finished = False
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def start(self, events: AsyncGenerator[bytes, None]) -> None:
        self.task = asyncio.create_task(self._run(events))

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    async def _run(self, events: AsyncGenerator[bytes, None]) -> None:
        try:
            async for event in events:
                self.events.append(event)
                self._notify()
        finally:
            self.finished = True
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, start: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield the events from number `start` on, those to come included."""
        while True:
            changed = self._changed
            if start < len(self.events):
                yield b"".join(self.events[start:])
                start = len(self.events)
            elif self.finished:
                return
            else:
                await changed.wait()
