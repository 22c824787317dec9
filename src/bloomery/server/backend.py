"""The interface between the HTTP server and an engine, in this process or in another."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from bloomery.messages import (
    AdapterInfo,
    EngineCapacity,
    EngineRequest,
    EngineStats,
    EngineStatus,
    TokenOutput,
)


class InferenceBackend(Protocol):
    """An engine as the server sees it. The server does not know how tokens are computed."""

    @property
    def status(self) -> EngineStatus: ...

    @property
    def capacity(self) -> EngineCapacity | None:
        """None until the engine has been ready once."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def num_restarts(self) -> int:
        """Engines that were started because an earlier one had died."""
        ...

    def add_step_observer(self, observer: Callable[[EngineStats, EngineStats], None]) -> None:
        """Call `observer` after every step with the stats before and after it."""
        ...

    def stream(self, requests: Sequence[EngineRequest]) -> AsyncGenerator[TokenOutput, None]:
        """Yield outputs until every request has finished; aclose() aborts unfinished ones."""
        ...

    def abort(self, id: str) -> bool:
        """End one request of a stream; the others continue."""
        ...

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Read a LoRA adapter into host memory; raises InvalidRequest if it cannot be used."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Drop an adapter when the requests that use it have ended."""
        ...
