"""What the server needs of an engine, wherever it runs. The server never asks how the tokens come about."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from bloomery.messages import Capacity, Request, Stats, Status, Tokens


class Backend(Protocol):
    @property
    def status(self) -> Status: ...

    @property
    def capacity(self) -> Capacity | None:
        """None until it has been ready once."""
        ...

    @property
    def stats(self) -> Stats: ...

    def observe(self, watcher: Callable[[Stats, Stats], None]) -> None:
        """Have it told of every step: the figures before and after."""
        ...

    def stream(self, requests: Sequence[Request]) -> AsyncGenerator[Tokens, None]:
        """News until every request has finished; aclose() aborts what is still open."""
        ...

    def abort(self, id: str) -> bool:
        """End one request of a stream; the others go on."""
        ...
