"""Model families as data: config.json becomes a ModelSpec and TensorNames.

There is one file per family, which defines FAMILIES: a dict of model_type -> ModelFamily. All
modules of this folder are imported, so a new family needs no registration.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

from bloomery.errors import UnsupportedModel
from bloomery.families.quantization import read_quantization
from bloomery.families.reader import ConfigReader
from bloomery.spec import (
    AttentionSpec,
    CheckpointQuantization,
    DynamicScaling,
    FusedTensor,
    GatedDeltaNetSpec,
    LayerSpec,
    Mamba2Spec,
    ModelSpec,
    MoeSpec,
    RecurrentSpec,
    RopeSpec,
    SplitTensors,
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
    # GGUF: the names of the checkpoint that the file was converted from, and whether the converter
    # has permuted the rows of q and k for interleaved rope.
    module_names: TensorNames | None = None
    permuted: bool = False

    @property
    def text_part_only(self) -> bool:
        """Whether this is a vision model, of which only the text part is served."""
        return bool(self.names.vision)


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
    for attention in model.attentions:
        position = attention.position
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
    if layer.attention is not None:
        problem = find_attention_problem(layer.attention)
        if problem is not None:
            return problem
    if layer.recurrent is not None:
        problem = find_recurrent_problem(layer.recurrent)
        if problem is not None:
            return problem
    mlp = layer.mlp
    if mlp is None:
        return None
    clamp = mlp.mlp.clamp if isinstance(mlp, MoeSpec) else mlp.clamp
    if clamp is not None and clamp.limit <= 0:
        return f"a clamped SwiGLU with a limit of {clamp.limit:g} lets nothing through"
    return find_moe_problem(mlp) if isinstance(mlp, MoeSpec) else None


def find_attention_problem(attention: AttentionSpec) -> str | None:
    """Return why an attention block cannot run, or None."""
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
    return None


def find_recurrent_problem(recurrent: RecurrentSpec) -> str | None:
    """Return why a recurrent mixer cannot run, or None."""
    if recurrent.conv_width < 2:
        return f"a convolution of width {recurrent.conv_width} has no past"
    match recurrent:
        case GatedDeltaNetSpec(num_key_heads=key_heads, num_value_heads=value_heads):
            if value_heads % key_heads:
                return f"{value_heads} value heads cannot share {key_heads} key heads"
        case Mamba2Spec(num_heads=num_heads, num_groups=num_groups):
            if num_heads % num_groups:
                return f"{num_heads} heads cannot share {num_groups} groups"
    return None


def find_moe_problem(moe: MoeSpec) -> str | None:
    """Return why experts cannot be chosen, or None."""
    if not 1 <= moe.top_k <= moe.num_experts:
        return f"{moe.top_k} experts per token cannot be chosen from {moe.num_experts} experts"
    num_groups = moe.router.num_groups
    top_groups = moe.router.top_groups
    if moe.num_experts % num_groups:
        return f"{moe.num_experts} experts do not divide into {num_groups} groups"
    if not 1 <= top_groups <= num_groups:
        return f"{top_groups} of {num_groups} groups of experts cannot be chosen"
    group_size = moe.num_experts // num_groups
    if moe.top_k > top_groups * group_size:
        return f"{moe.top_k} experts cannot be chosen from {top_groups} groups of {group_size}"
    return None


class StoredTensors(Protocol):
    """The tensors of a checkpoint, as far as their names are resolved by them."""

    def names(self) -> Collection[str]: ...
    def shape(self, name: str) -> Sequence[int]: ...


def resolve_tensor_names(description: ModelDescription, stored: StoredTensors) -> TensorNames:
    """Return the names and layouts that this checkpoint of a model uses."""
    tensor_names = stored.names()
    names = resolve_name_prefix(description.names, tensor_names)
    names = resolve_aliases(names, tensor_names)
    return resolve_expert_layout(names, description.model, tensor_names, stored.shape)


def resolve_name_prefix(names: TensorNames, stored: Container[str]) -> TensorNames:
    """Return `names` with the prefix and the head that this checkpoint uses.

    They are unchanged where none fits.

    `stored` has the names of all tensors of the checkpoint.
    """
    for head in (names.head, *names.other_heads):
        if f"{head}.weight" in stored:
            names = replace(names, head=head)
            break
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
                aliases={
                    with_prefix(begin): tuple(map(with_prefix, places))
                    for begin, places in names.aliases.items()
                },
            )
    return names


def resolve_aliases(names: TensorNames, stored: Collection[str]) -> TensorNames:
    """Return `names` with the one place of each alias where this checkpoint has tensors."""
    aliases = {}
    for begin, places in names.aliases.items():
        used = (place for place in places if any(name.startswith(place) for name in stored))
        aliases[begin] = (next(used, places[0]),)
    return replace(names, aliases=aliases)


def resolve_expert_layout(
    names: TensorNames,
    model: ModelSpec,
    stored: Container[str],
    shape_of: Callable[[str], Sequence[int]],
) -> TensorNames:
    """Return `names` with the layout in which this checkpoint stores experts.

    Published checkpoints of some families have one stacked tensor per layer, quantized ones of the
    same families a tensor per expert. Those that transformers 5 has saved anew may have the other
    layout, or another orientation.
    """
    sparse = [i for i, layer in enumerate(model.layers) if isinstance(layer.mlp, MoeSpec)]
    if not sparse:
        return names
    prefix = names.layer.format(i=sparse[0])
    if not names.stacked_experts:
        return find_stacked_experts(names, prefix, stored)
    if not isinstance(names.expert_up, FusedTensor):
        return names
    tensor = prefix + names.experts + names.expert_up.name
    if tensor in stored and names.transposed_experts:
        moe = model.layers[sparse[0]].mlp
        assert isinstance(moe, MoeSpec)
        rows = 2 * moe.mlp.size
        untransposed = (moe.num_experts, rows, model.hidden)
        is_transposed = rows == model.hidden or tuple(shape_of(tensor)) != untransposed
        return replace(names, transposed_experts=is_transposed)
    if is_stored(f"{prefix}{names.experts}0.gate_proj", stored):
        return separate_experts(names, names)
    return names


def separate_experts(names: TensorNames, family: TensorNames) -> TensorNames:
    """Return `names` with a tensor per expert, named as those of `family` if it has such names."""
    separate = family
    if family.stacked_experts:
        separate = replace(
            family,
            experts=f"{family.experts}{{e}}.",
            expert_up=SplitTensors(("gate_proj", "up_proj")),
        )
    return replace(
        names,
        experts=separate.experts,
        expert_up=separate.expert_up,
        expert_down=separate.expert_down,
        stacked_experts=False,
        transposed_experts=False,
    )


def find_stacked_experts(names: TensorNames, prefix: str, stored: Container[str]) -> TensorNames:
    """Return `names` with stacked experts if this checkpoint has them instead of separate ones."""
    folder = names.experts.removesuffix("{e}.")
    if f"{prefix}{folder}gate_up_proj" not in stored:
        return names
    return replace(
        names,
        experts=folder,
        expert_up=FusedTensor("gate_up_proj"),
        expert_down="down_proj",
        stacked_experts=True,
    )


def is_stored(matrix: str, stored: Container[str]) -> bool:
    """Return whether the checkpoint has this matrix, quantized or not."""
    return any(f"{matrix}.{part}" in stored for part in ("weight", "weight_packed", "qweight"))
