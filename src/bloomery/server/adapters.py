"""The LoRA adapters of a server: which names requests may use, and loading and unloading them.

An adapter has a name because the operator gave it one at start, because a client with an API key
has loaded it, or because it is in an allowed folder or repository and a request has named it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bloomery.artifacts.locate_adapter import AdapterAllowList, locate_adapter
from bloomery.engine.adapter_catalog import (
    MAX_NAME_CHARACTERS,
    AdapterCatalog,
    NamedAdapter,
    adapter_name_of,
    check_adapter_name,
)
from bloomery.errors import BloomeryError, CheckpointError, InvalidRequest, ModelNotFound
from bloomery.messages import AdapterInfo
from bloomery.server.adapter_metrics import AdapterMetrics
from bloomery.server.backend import InferenceBackend
from bloomery.server.errors import HttpError

log = logging.getLogger("bloomery.server")

MAX_NAMES_IN_ERRORS = 10
LISTING_SECONDS = 2.0  # that a list of the adapters in allowed folders is used
READY_CHECK_SECONDS = 0.1  # between two looks at an engine that loads
LOAD_SECONDS = 300.0  # that a client waits for an adapter at most; a download does not count
LORA_REMEDY = "start the server with --enable-lora, --lora-modules NAME=PATH or --lora-allow FOLDER"
NAMES_BASE_MODEL = "{!r} stands for the base model in requests; give the adapter another name"
LORA_OFF = f"this server runs without LoRA adapters: {LORA_REMEDY}"


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """The operator's settings of LoRA adapters."""

    enabled: bool = False
    modules: tuple[NamedAdapter, ...] = ()  # named at start
    allow_list: AdapterAllowList = field(default_factory=AdapterAllowList)
    max_loras: int = 8
    max_cpu_loras: int = 64


class ServedAdapters:
    """All adapters that requests can name now."""

    def __init__(
        self,
        backend: InferenceBackend,
        settings: AdapterSettings,
        base_names: Sequence[str],
        has_keys: bool,
        metrics: AdapterMetrics,
    ):
        """`base_names` stand for the base model in requests, first the one it is known by."""
        self.backend = backend
        self.metrics = metrics
        self.settings = settings
        self.base_names = base_names
        self.has_keys = has_keys
        # Of an adapter, with the name of the base model and a colon before it.
        self.max_name_characters = max(map(len, base_names)) + 1 + MAX_NAME_CHARACTERS
        self.catalog = AdapterCatalog()
        self.infos: dict[str, AdapterInfo] = {}  # by name, of those that were loaded once
        self.loading: set[str] = set()  # names that clients are loading
        self.searches: dict[str, asyncio.Task[NamedAdapter | None]] = {}  # by name
        self.listing: asyncio.Task[list[str]] | None = None  # of the allowed folders
        self.listing_expiry = 0.0
        for module in settings.modules:
            self.catalog.put(self.catalog.create(module.name, module.path, module.source))
            metrics.add_loaded(module.name)

    @property
    def adapters(self) -> Sequence[NamedAdapter]:
        return list(self.catalog.adapters.values())

    async def list_names(self) -> list[str]:
        """The names of all adapters, those in allowed folders included."""
        names = list(self.catalog.adapters)
        if self.settings.allow_list:
            allowed_names = await self._list_allowed_names()
            names += [name for name in allowed_names if name not in self.catalog.adapters]
        return names

    async def _list_allowed_names(self) -> list[str]:
        """The names of the adapters in allowed folders, read from disk every few seconds at most.

        Requests with unknown names need them for their error message.
        """
        now = time.monotonic()
        if self.listing is None or (self.listing.done() and now >= self.listing_expiry):
            self.listing = asyncio.create_task(asyncio.to_thread(self._read_allowed_names))
            self.listing_expiry = now + LISTING_SECONDS
        return await asyncio.shield(self.listing)

    def _read_allowed_names(self) -> list[str]:
        try:
            names = self.settings.allow_list.list_names()
            return [name for name in names if self._may_name_adapter(name)]
        except OSError as error:
            log.warning("an allowed folder of adapters cannot be read: %s", error)
            return []

    def _may_name_adapter(self, name: str) -> bool:
        try:
            check_adapter_name(name)
        except InvalidRequest:
            return False
        return name not in self.base_names

    # ---- requests ------------------------------------------------------------------------------

    async def find(self, name: str) -> NamedAdapter | None:
        """Return the adapter that a request names, or None if there is none.

        `name` may be SGLang's form, model:adapter.
        """
        if not self.settings.enabled:
            return None
        if len(name) > self.max_name_characters:
            return None
        while name not in self.catalog.adapters:
            model, colon, adapter_name = name.partition(":")
            if not colon or model not in self.base_names:
                break
            name = adapter_name
        known = self.catalog.adapters.get(name)
        if known is not None:
            return known
        is_possible = name.isprintable() and len(name) <= MAX_NAME_CHARACTERS
        if not self.settings.allow_list or not is_possible or name in self.base_names:
            return None
        search = self.searches.get(name)
        if search is None:
            search = asyncio.create_task(self._search(name))
            self.searches[name] = search
            search.add_done_callback(lambda _: self.searches.pop(name, None))
        return await asyncio.shield(search)

    async def _search(self, name: str) -> NamedAdapter | None:
        """Look for an adapter in the allowed folders and repositories."""
        try:
            source = await asyncio.to_thread(self.settings.allow_list.find_source, name)
            if source is None:
                return None
            check_adapter_name(name, "model")
            path = await asyncio.to_thread(locate_adapter, source)
        except ModelNotFound as error:
            raise HttpError(404, str(error), "model_not_found") from None
        except (CheckpointError, OSError) as error:
            log.warning("the adapter %r cannot be looked for: %s", name, error)
            return None
        adapter = self.catalog.create(name, str(path), source)
        self.catalog.put(adapter)
        self.metrics.add_found(name)
        return adapter

    async def describe_unknown(self, name: str) -> str:
        """The message for a model name that is not served here."""
        names = [repr(known) for known in [*self.base_names[:1], *await self.list_names()]]
        more = len(names) - MAX_NAMES_IN_ERRORS
        listed = ", ".join(names[:MAX_NAMES_IN_ERRORS]) + (f" and {more} more" if more > 0 else "")
        message = (
            f"the model {name[:64]!r} is not served here: this server has {listed} "
            "(GET /v1/models). To serve it under another name, start the server with "
            "--served-model-name"
        )
        if not self.settings.enabled and name.partition(":")[0] in self.base_names:
            message += f". For LoRA adapters, {LORA_REMEDY}"
        return message

    async def select_by_scale(self, entries: Sequence[Mapping[str, Any]]) -> NamedAdapter | None:
        """Return the adapter of llama.cpp's `lora` field: [{"id": ..., "scale": ...}].

        Ids are those of /lora-adapters. One adapter may have scale 1; the others must have 0.
        """
        chosen: list[NamedAdapter] = []
        adapters = dict(enumerate(self.adapters))
        for index, entry in enumerate(entries):
            number, scale = entry.get("id"), entry.get("scale", 1.0)
            path = f"lora[{index}]"
            if not isinstance(number, int) or isinstance(number, bool) or number not in adapters:
                raise InvalidRequest(
                    f"{path}.id must be one of the {len(adapters)} ids that GET /lora-adapters "
                    "lists",
                    f"{path}.id",
                )
            if scale not in (0, 1) or isinstance(scale, bool):
                raise InvalidRequest(
                    f"{path}.scale must be 1, or 0 for none: adapters are applied as they were "
                    "trained; change lora_alpha in adapter_config.json for another strength",
                    f"{path}.scale",
                )
            if scale:
                chosen.append(adapters[number])
        if len(chosen) > 1:
            raise InvalidRequest("lora: one adapter at most may have scale 1", "lora")
        return chosen[0] if chosen else None

    # ---- loading -------------------------------------------------------------------------------

    async def preload(self) -> None:
        """Read the adapters that were named at start, as far as host memory holds them.

        The engine logs one that cannot be used. Its requests fail with the same message.
        """
        while self.backend.capacity is None:
            await asyncio.sleep(READY_CHECK_SECONDS)
        for adapter in self.adapters[: self.settings.max_cpu_loras]:
            with contextlib.suppress(BloomeryError):
                self.infos[adapter.name] = await self.backend.load_adapter(
                    adapter.engine_name, adapter.path
                )

    async def load(self, name: str, source: str, in_place: bool = False) -> NamedAdapter:
        """Load an adapter at the wish of a client. Raises if it cannot be used."""
        self._check_may_load()
        check_adapter_name(name)
        if name in self.base_names:
            raise InvalidRequest(NAMES_BASE_MODEL.format(name), "lora_name")
        if name in self.loading:
            message = f"the adapter {name!r} is being loaded; wait for the answer to that request"
            raise HttpError(409, message, "adapter_exists", param="lora_name")
        if name in self.catalog.adapters and not in_place:
            message = (
                f"the adapter {name!r} is loaded already: unload it first, or give load_inplace"
            )
            raise HttpError(400, message, "adapter_exists", param="lora_name")
        self.loading.add(name)
        try:
            path = await asyncio.to_thread(self._locate_allowed, source)
            adapter = self.catalog.create(name, str(path), source)
            loading = self.backend.load_adapter(adapter.engine_name, adapter.path)
            info = await asyncio.wait_for(loading, LOAD_SECONDS)
        except TimeoutError:
            message = (
                f"the adapter was not read within {LOAD_SECONDS:.0f} s: check its file system. If "
                "requests use all adapters in host memory, raise --max-cpu-loras"
            )
            raise HttpError(504, message, "adapter_timeout", "timeout") from None
        finally:
            self.loading.discard(name)
        before = self.catalog.put(adapter)
        self.infos[name] = info
        self.metrics.add_loaded(name)
        if before is not None:
            self.backend.unload_adapter(before.engine_name)
        return adapter

    def _locate_allowed(self, source: str) -> Path:
        """Find the files of an adapter that a client wants to load."""
        allow_list = self.settings.allow_list
        if not source.strip():
            raise InvalidRequest(
                "lora_path is empty; name a folder, a .gguf file or a Hub id", "lora_path"
            )
        try:
            if allow_list and not allow_list.allows(source):
                raise InvalidRequest(
                    "lora_path is outside of what --lora-allow permits on this server", "lora_path"
                )
            return locate_adapter(source)
        except ModelNotFound as error:
            raise HttpError(404, str(error), "adapter_not_found", param="lora_path") from None
        except CheckpointError as error:
            raise InvalidRequest(str(error), "lora_path") from None
        except OSError as error:
            raise InvalidRequest(
                f"lora_path cannot be used ({error.strerror}); check the path", "lora_path"
            ) from None

    def unload(self, name: str) -> NamedAdapter:
        """Forget an adapter. Requests that use it run to their end."""
        self._check_may_load()
        adapter = self.catalog.adapters.pop(name, None)
        if adapter is None:
            message = f"there is no adapter {name[:64]!r}; GET /lora-adapters lists them"
            raise HttpError(404, message, "adapter_not_found", param="lora_name")
        self.infos.pop(name, None)
        self.metrics.drop(name)
        self.backend.unload_adapter(adapter.engine_name)
        return adapter

    def _check_may_load(self) -> None:
        """Raise 403 if clients may not load and unload adapters here."""
        if not self.settings.enabled:
            raise HttpError(403, LORA_OFF, "lora_disabled")
        if not self.has_keys:
            message = (
                "adapters are loaded and unloaded only by clients with an API key, and this server "
                "has none: start it with --api-key"
            )
            raise HttpError(403, message, "api_key_required")

    def hide_paths(self, message: str) -> str:
        """Replace the paths of adapters in a message for a client."""
        for adapter in self.adapters:
            message = message.replace(adapter.path, adapter.name)
        return message

    # ---- figures -------------------------------------------------------------------------------

    def slots_of(self, adapter: NamedAdapter) -> list[int]:
        """The device slots that hold the adapter; one of each engine."""
        slots = self.backend.stats.adapter_slots
        return [
            index % self.settings.max_loras + 1
            for index, engine_name in enumerate(slots)
            if adapter_name_of(engine_name) == adapter.name
        ]
