"""Finds the modules of an adapter by the names of the model's layers.

The tensors of a PEFT or GGUF file are grouped by module. adapter_files.py asks for the modules of
each layer and reads their matrices. What it has not asked for belongs to no layer, and is an error
that names it.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from bloomery.artifacts.lora import AdapterConfig, refuse
from bloomery.spec import FusedTensor, SplitTensors, TensorNames

Stored = str | SplitTensors | FusedTensor

# What PEFT and the GGUF converter append to the path of a module.
PEFT_MATRIX = re.compile(
    r"(.+)\.lora_(embedding_)?(A|B)(\.(?!weight$|bias$)\w+)?(\.weight|\.bias)?"
)
GGUF_MATRIX = re.compile(r"(.+)\.weight\.lora_(a|b)")
SAVED_TENSOR = re.compile(r"(.+?)(\.base_layer|\.modules_to_save(\.\w+)?)?\.(weight|bias)")
EXPERT_MODULE = re.compile(r"(.*\bexperts)\.(\d+)\.(\w+)")


@dataclass
class AdapterModule:
    """The tensors that an adapter has for one module of the model."""

    path: str
    layer: int | None  # of the decoder layer, None outside of them
    name: str  # within the layer, or the last part of the path
    tensors: dict[str, str] = field(default_factory=dict)  # role -> name in the file


class AdapterModules:
    """The modules of one adapter, by their names in the model.

    names: what the model's modules are called in such files.
    exact_names: the layers and names of all modules that these names stand for.
    """

    def __init__(
        self,
        tensors: Iterable[str],
        names: TensorNames,
        exact_names: Container[tuple[int | None, str]],
        config: AdapterConfig,
        path: Path,
        is_gguf: bool,
    ):
        self.names = names
        self.exact_names = exact_names
        self.config = config
        self.path = path
        self.is_gguf = is_gguf
        self.by_path = self._index(tensors)
        self.by_name = {(module.layer, module.name): module for module in self.by_path.values()}
        self.used: set[str] = set()  # paths

    def in_layer(self, layer: int | None) -> list[AdapterModule]:
        """Return the modules of a decoder layer."""
        return [module for module in self.by_path.values() if module.layer == layer]

    def _index(self, tensors: Iterable[str]) -> dict[str, AdapterModule]:
        """Group the tensors of the file by module."""
        modules: dict[str, AdapterModule] = {}
        for tensor in tensors:
            path, role = self._parse_tensor_name(tensor)
            module = modules.get(path)
            if module is None:
                module = modules[path] = AdapterModule(path, *self._locate_module(path))
            module.tensors[role] = tensor
        for module in modules.values():
            if {"a", "b"} & module.tensors.keys() and not self._is_targeted(module):
                raise refuse(
                    self.path,
                    f"it has matrices of {module.path}, which its adapter_config.json does not "
                    "target; the two files belong to different adapters",
                )
        return modules

    def _is_targeted(self, module: AdapterModule) -> bool:
        """Whether adapter_config.json says that the adapter has matrices of this module."""
        is_head = module.layer is None and module.name == self.names.head.rpartition(".")[2]
        if is_head and self.config.ensure_weight_tying:
            return True
        return self.config.targets(module.path.removesuffix(".base_layer"), module.layer)

    def _parse_tensor_name(self, tensor: str) -> tuple[str, str]:
        """Return the path of the module and the role of a tensor in it."""
        if "lora_magnitude_vector" in tensor:
            raise refuse(self.path, f"{tensor}: DoRA is not supported; merge the adapter")
        match = GGUF_MATRIX.fullmatch(tensor) if self.is_gguf else None
        if match:
            return match[1], match[2]
        path = tensor
        while path.startswith(("base_model.model.", "base_model.")):
            path = path.removeprefix("base_model.").removeprefix("model.")
        match = PEFT_MATRIX.fullmatch(path)
        if match:
            role = match[3].lower()
            is_bias = match[5] == ".bias"
            return match[1], f"{role}_bias" if is_bias else role
        match = SAVED_TENSOR.fullmatch(path)
        if match:
            return match[1], match[4]
        raise refuse(
            self.path,
            f"tensor {tensor!r} is none that an adapter has; save the adapter again with PEFT",
        )

    def _locate_module(self, path: str) -> tuple[int | None, str]:
        """Return the decoder layer of a module, and its name there."""
        folder = self.names.layer.partition("{i}")[0].rstrip(".").rpartition(".")[2]
        match = re.search(rf"(?:^|\.){folder}\.(\d+)\.(.+)$", path)
        if match:
            return int(match[1]), match[2]
        return None, path.rpartition(".")[2]

    def find(self, layer: int | None, name: str) -> AdapterModule | None:
        """Return the module of that name in a decoder layer, or outside of the layers."""
        if layer is None:
            name = name.rpartition(".")[2]
        module = self.by_name.get((layer, name)) or self._find_shared(layer, name)
        if module is not None:
            self.used.add(module.path)
        return module

    def _find_shared(self, layer: int | None, name: str) -> AdapterModule | None:
        """Return the module of another layer that shares its weights, if it stands for this one.

        Where training has run shared layers as one module, the file has it once. Otherwise each of
        the layers that the adapter targets has a module of its own.
        """
        names = self.names
        if layer is None or not names.aliases:
            return None

        def locate(number: int) -> str:
            return names.locate(names.layer.format(i=number) + name)

        sharing = [
            module
            for module in self.by_path.values()
            if module.name == name
            and module.layer is not None
            and locate(module.layer) == locate(layer)
        ]
        if len(sharing) != 1:
            return None
        path = re.sub(rf"\b{sharing[0].layer}\b", str(layer), sharing[0].path, count=1)
        return sharing[0] if self.config.targets(path, layer) else None

    def find_in_other_folder(self, layer: int | None, name: str) -> AdapterModule | None:
        """Return the only module of a layer with that last part, where folders have other names.

        Some models have been renamed since their checkpoints were published.
        """
        last = name.rpartition(".")[2]
        candidates = [
            module
            for module in self.by_path.values()
            if module.layer == layer
            and module.name.rpartition(".")[2] == last
            and (layer, module.name) not in self.exact_names
            and not EXPERT_MODULE.fullmatch(module.name)
        ]
        if layer is None or len(candidates) != 1 or candidates[0].path in self.used:
            return None
        self.used.add(candidates[0].path)
        return candidates[0]

    def check_all_used(self, own_layers: Container[int | None], num_layers: int) -> None:
        """Refuse modules that the model has no place for.

        own_layers: the decoder layers of this pipeline stage, of `num_layers` in all.
        """
        for module in self.by_path.values():
            if module.path in self.used or self._belongs_elsewhere(module, own_layers, num_layers):
                continue
            kinds = set(module.tensors)
            if kinds <= {"weight", "bias"}:
                reason = (
                    f"it replaces {module.path}; of the modules outside of LoRA only the "
                    "embedding, the head and biases of linear layers can be replaced. Train "
                    "without it in modules_to_save, and with bias 'none'"
                )
            elif self._is_low_rank_part(module):
                reason = (
                    f"it changes {module.path}, a low-rank part of the base model, which adapters "
                    "cannot change here; train without it in target_modules"
                )
            else:
                reason = (
                    f"it changes {module.path}, which this model does not have"
                    f"{self.describe_base()}; load it into a server of its base model"
                )
            raise refuse(self.path, reason)

    def _is_low_rank_part(self, module: AdapterModule) -> bool:
        """Whether the base model adds this module to another one (see TensorNames)."""
        places = [
            place
            for begin, places in self.names.aliases.items()
            if begin.endswith((".low_rank_down", ".low_rank_up"))
            for place in places
        ]
        return any(place.endswith(module.name) for place in places)

    def _belongs_elsewhere(
        self, module: AdapterModule, own_layers: Container[int | None], num_layers: int
    ) -> bool:
        """Whether another pipeline stage has the module, or the part that is not served."""
        if module.layer is not None:
            return module.layer < num_layers and module.layer not in own_layers
        names = self.names
        outer = (names.embed, names.head, *names.extra.values())
        if module.name in {name.rpartition(".")[2] for name in outer}:
            return True
        tensor = f"{module.path}.weight"
        return any(fnmatch(tensor, f"*{pattern}") for pattern in names.vision)

    def describe_base(self) -> str:
        """Name the base model of the adapter, if it states one."""
        base = self.config.base_model
        return f" (the adapter is of {base})" if base else ""


def layer_of(prefix: str) -> int | None:
    """Return the number of a decoder layer from the prefix of its names."""
    match = re.search(r"(\d+)\.$", prefix)
    return int(match[1]) if match else None


def translate_names(stored: Stored, names: TensorNames, module_names: TensorNames) -> Stored:
    """Return what `module_names` calls something that `names` calls `stored`."""
    if names is module_names:
        return stored
    for role in (
        "embed",
        "head",
        "attn_qkv",
        "attn_out",
        "mlp_up",
        "mlp_down",
        "expert_up",
        "expert_down",
        "shared_up",
        "shared_down",
        "recurrent_in",
        "recurrent_out",
    ):
        if getattr(names, role) == stored and getattr(module_names, role):
            return getattr(module_names, role)
    for role, name in names.extra.items():
        if name == stored and role in module_names.extra:
            return module_names.extra[role]
    return stored
