"""Model families as data: config.json -> spec.Model, and where each tensor lives.

One file a family. A file states FAMILIES, a dict of model_type -> Family; it is found by being in this folder.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from bloomery.errors import UnsupportedModel
from bloomery.families.quantization import quantization
from bloomery.families.reader import Reader
from bloomery.spec import Dynamic, Model, Moe, Names, Quantization, Rope


@dataclass(frozen=True)
class Family:
    model: Callable[[Reader], Model]
    names: Names | Callable[[Reader], Names]
    defaults: Mapping[str, Any] = field(
        default_factory=dict
    )  # what keys that config.json leaves out mean


@dataclass(frozen=True)
class Description:
    model: Model
    names: Names
    unread: tuple[str, ...] = ()  # keys of config.json nobody asked for; logged, never obeyed
    quantization: Quantization | None = None


@cache
def families() -> Mapping[str, Family]:
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(__path__):
        found |= getattr(importlib.import_module(f"{__name__}.{module.name}"), "FAMILIES", {})
    return found


def describe(config: Mapping[str, Any]) -> Description:
    """What a config.json says, or an error that names the value we do not know."""
    kind = Reader(config).text("model_type")
    family = families().get(kind)
    if family is None:
        raise UnsupportedModel(
            f"config.json: model_type {kind!r} is not a family Bloomery knows. Known: {', '.join(sorted(families()))}"
        )
    reader = Reader(config, defaults=family.defaults)
    names = family.names(reader) if callable(family.names) else family.names
    model = stretched(family.model(reader))
    check(model)
    return Description(model, names, reader.unread(), quantization(reader))


def stretched(model: Model) -> Model:
    """A base that grows with the position is there to serve lengths beyond those the model was trained for."""
    scalings = (getattr(layer.attention.position, "scaling", None) for layer in model.layers)
    reach = [int(found.factor * found.original) for found in scalings if isinstance(found, Dynamic)]
    return replace(model, context=max([model.context, *reach]))


def check(model: Model) -> None:
    """What every decoder takes for granted, whoever described it."""
    for i, layer in enumerate(model.layers):
        attention = layer.attention
        mlp = layer.mlp
        position = attention.position
        window = attention.window
        if attention.num_heads % attention.num_kv_heads:
            wrong = (
                f"{attention.num_heads} heads cannot share {attention.num_kv_heads} key-value heads"
            )
        elif isinstance(position, Rope) and (
            position.dim % 2 or not 2 <= position.dim <= attention.head_dim
        ):
            wrong = f"{position.dim} of {attention.head_dim} dimensions cannot turn in pairs"
        elif window is not None and window < 1:
            wrong = f"a sliding window of {window} sees nothing"
        elif isinstance(mlp, Moe) and not 1 <= mlp.top_k <= mlp.experts:
            wrong = f"{mlp.top_k} of {mlp.experts} experts cannot be chosen"
        else:
            continue
        raise UnsupportedModel(f"config.json: layer {i}: {wrong}")


def as_stored(names: Names, stored: Container[str]) -> Names:
    """The names under which this checkpoint holds its tensors; unchanged where none of the known prefixes fits."""
    for prefix in names.prefixes:

        def moved(name: str, prefix: str = prefix) -> str:
            written = names.prefixes[0]
            return prefix + name.removeprefix(written) if name.startswith(written) else name

        if f"{moved(names.embed)}.weight" in stored:
            return replace(
                names,
                embed=moved(names.embed),
                layer=moved(names.layer),
                final_norm=moved(names.final_norm),
                extra={canonical: moved(name) for canonical, name in names.extra.items()},
            )
    return names
