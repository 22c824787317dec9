"""The LoRA adapters that requests can name, on the client's side of an engine.

An engine takes a name for certain weights for ever: its prefix cache depends on that. So an adapter
that is loaded again under the same name gets another name for the engine: "sql", then "sql#2".
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bloomery.errors import ConfigError, InvalidRequest

VERSION_MARK = "#"
MAX_NAME_CHARACTERS = 256
MODULE_FORM = 'name=path or {"name": "...", "path": "..."}'


@dataclass(frozen=True)
class LoRARequest:
    """The adapter of an offline request, under the names known from vLLM."""

    lora_name: str
    lora_int_id: int
    lora_path: str  # a PEFT folder, a .gguf file or a Hub id

    def __post_init__(self) -> None:
        check_adapter_name(self.lora_name)
        if not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise InvalidRequest(
                f"lora_int_id must be a whole number, at least 1, not {self.lora_int_id!r}",
                "lora_int_id",
            )
        if not isinstance(self.lora_path, str) or not self.lora_path:
            raise InvalidRequest(
                "lora_path must be a string that names a folder, a .gguf file or a Hub id, not "
                f"{self.lora_path!r}",
                "lora_path",
            )

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter under the name that requests use."""

    name: str
    engine_name: str  # stands for these weights only
    path: str  # of its folder or file
    source: str  # what the operator or the client named: a path or a Hub id


class AdapterCatalog:
    """Adapters by name, and how many versions each name has had."""

    def __init__(self) -> None:
        self.adapters: dict[str, NamedAdapter] = {}
        self.num_versions: Counter[str] = Counter()

    def create(self, name: str, path: str, source: str) -> NamedAdapter:
        """Return a new version of an adapter. It is not in the catalog yet."""
        self.num_versions[name] += 1
        version = self.num_versions[name]
        engine_name = name if version == 1 else f"{name}{VERSION_MARK}{version}"
        return NamedAdapter(name, engine_name, path, source)

    def put(self, adapter: NamedAdapter) -> NamedAdapter | None:
        """Let requests that name the adapter get this version. Returns the version before."""
        before = self.adapters.get(adapter.name)
        self.adapters[adapter.name] = adapter
        return before


def adapter_name_of(engine_name: str) -> str:
    """The name that requests use for an adapter that an engine reports."""
    return engine_name.rpartition(VERSION_MARK)[0] or engine_name


def check_adapter_name(name: Any, field: str = "lora_name") -> None:
    """Raise InvalidRequest for what cannot be the name of an adapter."""
    is_valid = isinstance(name, str) and name.isprintable() and VERSION_MARK not in name
    if not is_valid or not 0 < len(name.strip()) == len(name) <= MAX_NAME_CHARACTERS:
        raise InvalidRequest(
            f"{field} must be a printable text of 1 to {MAX_NAME_CHARACTERS} characters without "
            f"{VERSION_MARK!r}, and without spaces at its ends",
            field,
        )


def parse_lora_modules(text: str, option: str = "lora_modules") -> list[tuple[str, str]]:
    """Parse adapters that are separated by commas or line breaks, to (name, source).

    An entry is name=source, vLLM's JSON object, or a Hub id that is also the name, as in TGI.
    """
    modules: dict[str, str] = {}
    for name, source in _iterate_modules(text, option):
        if not name or not source:
            raise ConfigError(f"{option}: an entry must be {MODULE_FORM}")
        if name in modules:
            raise ConfigError(f"{option}: {name!r} is there twice; give each adapter its own name")
        try:
            check_adapter_name(name, option)
        except InvalidRequest as error:
            raise ConfigError(str(error)) from None
        modules[name] = source
    return list(modules.items())


def _iterate_modules(text: str, option: str) -> Iterator[tuple[str, str]]:
    """Yield the entries as (name, source), unchecked."""
    decoder = json.JSONDecoder()
    position = 0
    while position < len(text):
        if text[position] in ", \n\t":
            position += 1
        elif text[position] in "{[":
            try:
                value, position = decoder.raw_decode(text, position)
            except ValueError as error:
                raise ConfigError(f"{option}: not valid JSON: {error}") from None
            for entry in value if isinstance(value, list) else [value]:
                yield _read_module(entry, option)
        else:
            ends = [end for mark in ",\n" if (end := text.find(mark, position)) >= 0]
            end = min(ends, default=len(text))
            name, equals, source = text[position:end].strip().partition("=")
            yield (name.strip(), source.strip()) if equals else (name, name)
            position = end


def _read_module(entry: Any, option: str) -> tuple[str, str]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{option}: an entry must be {MODULE_FORM}")
    name, source = entry.get("name"), entry.get("path")
    if not isinstance(name, str) or not isinstance(source, str):
        raise ConfigError(f"{option}: an entry must be {MODULE_FORM}")
    return name, source
