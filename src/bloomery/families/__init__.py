"""Model families as data: config.json becomes a ModelSpec and TensorNames.

There is one file per family, which defines FAMILIES: a dict of model_type -> ModelFamily. All
modules of this folder are imported, so a new family needs no registration.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from bloomery.errors import UnsupportedModel
from bloomery.families.quantization import read_quantization
from bloomery.families.reader import ConfigReader
from bloomery.spec import (
    CheckpointQuantization,
    DynamicScaling,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    RopeSpec,
    TensorNames,
)


@dataclass(frozen=True)
class ModelFamily:
    """How the config.json of one model_type becomes a ModelSpec and TensorNames."""

    read_model: Callable[[ConfigReader], ModelSpec]
    names: TensorNames | Callable[[ConfigReader], TensorNames]
    # Values of keys that config.json leaves out.
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelDescription:
    """A model's architecture, its tensor names and its quantization."""

    model: ModelSpec
    names: TensorNames
    unread: tuple[str, ...] = ()  # keys of config.json that had no effect; they are logged
    quantization: CheckpointQuantization | None = None


@cache
def load_families() -> Mapping[str, ModelFamily]:
    """Import all modules of this folder and return their families by model_type."""
    families: dict[str, ModelFamily] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        families |= getattr(module, "FAMILIES", {})
    return families


def describe_config(config: Mapping[str, Any]) -> ModelDescription:
    """Describe the model of a config.json; an unknown value raises an error that names it."""
    model_type = ConfigReader(config).text("model_type")
    families = load_families()
    family = families.get(model_type)
    if family is None:
        raise UnsupportedModel(
            f"config.json: model_type {model_type!r} is not a family Bloomery knows. "
            f"Known: {', '.join(sorted(families))}"
        )
    reader = ConfigReader(config, defaults=family.defaults)
    names = family.names(reader) if callable(family.names) else family.names
    model = extend_dynamic_context(family.read_model(reader))
    check_spec(model)
    quantization = read_quantization(reader)
    return ModelDescription(model, names, reader.unread(), quantization)


def extend_dynamic_context(model: ModelSpec) -> ModelSpec:
    """Extend the context of dynamic rope scaling to the length it can serve."""
    context = model.context
    for layer in model.layers:
        position = layer.attention.position
        if isinstance(position, RopeSpec) and isinstance(position.scaling, DynamicScaling):
            scaling = position.scaling
            context = max(context, int(scaling.factor * scaling.original_context))
    return replace(model, context=context)


def check_spec(model: ModelSpec) -> None:
    """Refuse a spec that no decoder can run."""
    for i, layer in enumerate(model.layers):
        problem = find_problem(layer)
        if problem is not None:
            raise UnsupportedModel(f"config.json: layer {i}: {problem}")


def find_problem(layer: LayerSpec) -> str | None:
    """Return why a layer cannot run, or None."""
    attention = layer.attention
    mlp = layer.mlp
    position = attention.position
    window = attention.window
    if attention.num_heads % attention.num_kv_heads:
        return f"{attention.num_heads} heads cannot share {attention.num_kv_heads} key-value heads"
    if isinstance(position, RopeSpec) and (
        position.dim % 2 or not 2 <= position.dim <= attention.head_dim
    ):
        return f"{position.dim} of {attention.head_dim} dimensions cannot rotate in pairs"
    if window is not None and window < 1:
        return f"a sliding window of {window} positions is empty"
    if isinstance(mlp, MoeSpec) and not 1 <= mlp.top_k <= mlp.num_experts:
        return f"{mlp.top_k} of {mlp.num_experts} experts cannot be chosen"
    return None


def resolve_name_prefix(names: TensorNames, stored: Container[str]) -> TensorNames:
    """Return `names` with the prefix that this checkpoint uses, or unchanged if none fits.

    `stored` has the names of all tensors of the checkpoint.
    """
    for prefix in names.prefixes:

        def with_prefix(name: str, prefix: str = prefix) -> str:
            default = names.prefixes[0]
            if not name.startswith(default):
                return name
            return prefix + name.removeprefix(default)

        if f"{with_prefix(names.embed)}.weight" in stored:
            return replace(
                names,
                embed=with_prefix(names.embed),
                layer=with_prefix(names.layer),
                final_norm=with_prefix(names.final_norm),
                extra={canonical: with_prefix(name) for canonical, name in names.extra.items()},
            )
    return names
