"""What the server needs of an engine, wherever it runs. The server never asks how the tokens come about."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from bloomery.messages import EngineCapacity, EngineRequest, EngineStats, EngineStatus, TokenOutput


class Backend(Protocol):
    @property
    def status(self) -> EngineStatus: ...

    @property
    def capacity(self) -> EngineCapacity | None:
        """None until it has been ready once."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    def observe(self, watcher: Callable[[EngineStats, EngineStats], None]) -> None:
        """Have it told of every step: the figures before and after."""
        ...

    def stream(self, requests: Sequence[EngineRequest]) -> AsyncGenerator[TokenOutput, None]:
        """News until every request has finished; aclose() aborts what is still open."""
        ...

    def abort(self, id: str) -> bool:
        """End one request of a stream; the others go on."""
        ...
