"""Conversations kept so that a next request may go on with one by its id; in memory, bounded, the oldest go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

Message = Mapping[str, str]
Key = tuple[str, str]  # whose it is, and its id: no key can read another's


class Conversations:
    def __init__(self, count: int, characters: int):
        self.count = count
        self.characters = characters
        self.held = 0
        self.kept: OrderedDict[Key, tuple[Message, ...]] = OrderedDict()

    def get(self, key: Key) -> tuple[Message, ...] | None:
        if key in self.kept:
            self.kept.move_to_end(key)
        return self.kept.get(key)

    def put(self, key: Key, messages: Sequence[Message]) -> None:
        self.kept[key] = tuple(messages)
        self.held += _size(messages)
        while len(self.kept) > self.count or self.held > self.characters:
            self.held -= _size(self.kept.popitem(last=False)[1])

    def clear(self) -> None:
        self.kept.clear()
        self.held = 0


def _size(messages: Sequence[Message]) -> int:
    return sum(len(message["content"]) for message in messages)
