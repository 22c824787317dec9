"""Checks the files of a LoRA adapter: adapter_config.json of PEFT, or a GGUF header.

Nothing here reads a tensor or knows a model. An adapter is untrusted: what this module does not
support is refused, with the file and the remedy, and never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bloomery.artifacts import gguf
from bloomery.artifacts.files import parse_strict_json
from bloomery.artifacts.locate_adapter import is_inside
from bloomery.artifacts.module_patterns import MAX_PATTERNS, PatternMatcher
from bloomery.errors import InvalidRequest

Number = TypeVar("Number", int, float)
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
MAX_CONFIG_BYTES = 16 << 20
MERGE = "merge it into the base model with PEFT's merge_and_unload() and serve the result"
# Settings that change the computation in ways that are not supported, and what to do.
UNSUPPORTED = {
    "use_dora": f"DoRA is not supported; {MERGE}",
    "layer_replication": "layer_replication makes another model; serve it as a model of its own",
    "trainable_token_indices": f"trainable_token_indices are not supported; {MERGE}",
    "alora_invocation_tokens": "activated LoRA (aLoRA) is not supported; train a plain LoRA",
    "use_bdlora": "block-diagonal LoRA is not supported; train a plain LoRA",
    "use_qalora": f"QA-LoRA is not supported; {MERGE}",
    "kasa_config": f"KaSA is not supported; {MERGE}",
    "velora_config": f"VeLoRA is not supported; {MERGE}",
    "monteclora_config": f"MonteCLoRA is not supported; {MERGE}",
    "arrow_config": "Arrow routing is not supported; load its adapters one by one",
    "megatron_config": "megatron_config is not supported; save the adapter without it",
}
# Methods that change the base weights before training, so that the adapter alone is not enough.
CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class AdapterConfig:
    """What a LoRA adapter states about itself."""

    origin: Path  # the file it comes from, for messages
    matcher: PatternMatcher  # of the patterns below
    rank: int
    alpha: float
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    # Names of modules, a regular expression of their paths, or None: any.
    target_modules: frozenset[str] | str | None = None
    target_parameters: frozenset[str] = frozenset()
    layers_to_transform: frozenset[int] | None = None
    base_model: str = ""
    ensure_weight_tying: bool = False  # a head with the embedding's weights is changed with it

    def scale(self, module: str, rank: int) -> float:
        """The factor of the adapter's product in a module whose matrices have this rank."""
        alpha = self._find_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def expected_rank(self, module: str) -> int:
        """The rank of a module's matrices."""
        return self._find_pattern(self.rank_pattern, module, self.rank)

    def _find_pattern(self, patterns: Mapping[str, Number], module: str, default: Number) -> Number:
        """Return the value of the first pattern that the end of a module's path matches."""
        for pattern, value in patterns.items():
            if self.matcher.is_end(pattern, module):
                return value
        return default

    def targets(self, module: str, layer: int | None) -> bool:
        """Whether the adapter is meant to change this module."""
        layers = self.layers_to_transform
        if layers is not None and layer is not None and layer not in layers:
            return False
        if self.target_modules is None or module_has_parameter(module, self.target_parameters):
            return True
        if isinstance(self.target_modules, str):
            if self.target_modules == "all-linear":
                return True
            return self.matcher.is_path(self.target_modules, module)
        parts = module.split(".")
        ends = (".".join(parts[index:]) for index in range(len(parts)))
        return any(end in self.target_modules for end in ends)


def module_has_parameter(module: str, parameters: frozenset[str]) -> bool:
    """Whether one of the parameters, such as `mlp.experts.down_proj`, belongs to the module."""
    owners = {parameter.rpartition(".")[0] for parameter in parameters}
    return any(not owner or f".{module}".endswith(f".{owner}") for owner in owners)


def check_adapter_files(path: str, allowed_folders: Sequence[str] = ()) -> Path:
    """Return the adapter's folder or GGUF file; pickle files and other folders are refused.

    artifacts/locate_adapter.py has found it. Its files may have changed since. So links out of the
    allowed folders are looked for again. Adapters that are in none of them are not checked: the
    operator has named them.
    """
    location = Path(path).expanduser()
    is_restricted = any(location.is_relative_to(folder) for folder in allowed_folders)
    folders = [Path(folder).resolve() for folder in allowed_folders]
    if is_restricted and not is_inside(location, folders):
        raise refuse(
            location,
            "a link there leads out of the folders of --lora-allow; replace it by the files",
        )
    if location.suffix == ".gguf" and location.is_file():
        return location
    if location.suffix in (".bin", ".pt", ".pth") or location.is_file():
        raise refuse(
            location,
            "an adapter is a folder with adapter_config.json and adapter_model.safetensors, or a "
            "GGUF file; pickle files are never read, because they can run any program: save the "
            "adapter again with safetensors",
        )
    if not location.is_dir():
        raise refuse(location, "there is no such adapter; check the path")
    if not (location / CONFIG_FILE).is_file():
        raise refuse(
            location, f"the folder has no {CONFIG_FILE}, so it is not an adapter; check the path"
        )
    if not (location / WEIGHTS_FILE).is_file():
        if (location / PICKLE_FILE).is_file():
            raise refuse(
                location / PICKLE_FILE,
                "pickle files are never read, because they can run any program; load the adapter "
                "with PEFT and save it again with safe_serialization=True",
            )
        raise refuse(location, f"the folder has no {WEIGHTS_FILE}; download or save it again")
    return location


def read_adapter_config(folder: Path, matcher: PatternMatcher) -> AdapterConfig:
    """Read and check the adapter_config.json of a PEFT adapter."""
    path = folder / CONFIG_FILE
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise refuse(path, f"larger than {MAX_CONFIG_BYTES >> 20} MiB; save the adapter again")
    return parse_adapter_config(parse_strict_json(path.read_bytes(), str(path)), path, matcher)


def parse_adapter_config(
    values: Mapping[str, Any], path: Path, matcher: PatternMatcher
) -> AdapterConfig:
    """Check the values of an adapter_config.json."""
    kind = values.get("peft_type", "LORA")
    if kind != "LORA":
        raise refuse(path, f"peft_type {kind!r} is not supported; only LORA is")
    for key, reason in UNSUPPORTED.items():
        if values.get(key):
            raise refuse(path, reason)
    initialization = str(values.get("init_lora_weights", True)).lower()
    if initialization.startswith(CHANGED_BASE):
        raise refuse(
            path,
            f"init_lora_weights {initialization!r} has changed the base model; save the adapter "
            "with path_initial_model_for_weight_conversion, which makes it a plain LoRA",
        )
    bias = values.get("bias", "none")
    if bias not in ("none", "all", "lora_only"):
        raise refuse(path, f"bias {bias!r} is not known; it is none, all or lora_only")
    targets = values.get("target_modules")
    if isinstance(targets, list):
        targets = frozenset(map(str, targets))
    elif targets is not None and not isinstance(targets, str):
        raise refuse(path, "target_modules must be a list of names or a regular expression")
    if isinstance(targets, str):
        matcher.check("target_modules", targets, is_end=False)
    parameters = values.get("target_parameters") or []
    if not isinstance(parameters, list):
        raise refuse(path, "target_parameters must be a list of names")
    if len(parameters) > MAX_PATTERNS:
        raise refuse(path, f"target_parameters has more than {MAX_PATTERNS} names; list fewer")
    layers = values.get("layers_to_transform")
    if isinstance(layers, int):
        layers = [layers]
    if layers is not None and not is_list_of_numbers(layers):
        raise refuse(path, "layers_to_transform must be a list of layer numbers")
    rank_pattern = read_patterns(path, values, "rank_pattern", matcher, read_whole)
    alpha_pattern = read_patterns(path, values, "alpha_pattern", matcher, read_positive)
    return AdapterConfig(
        path,
        matcher,
        read_whole(path, values, "r"),
        read_positive(path, values, "lora_alpha"),
        bool(values.get("use_rslora", False)),
        rank_pattern,
        alpha_pattern,
        targets,
        frozenset(map(str, parameters)),
        None if layers is None else frozenset(layers),
        str(values.get("base_model_name_or_path") or ""),
        bool(values.get("ensure_weight_tying", False)),
    )


def read_gguf_adapter(path: Path) -> tuple[gguf.GgufFile, AdapterConfig]:
    """Read the header of a GGUF adapter. The rank of each matrix is in its shape."""
    file = gguf.read_gguf(path, read_string_arrays=False)
    metadata = file.metadata
    if metadata.get("general.type") != "adapter" or metadata.get("adapter.type") != "lora":
        raise refuse(
            path,
            "the file is not a LoRA adapter: general.type must be 'adapter' and adapter.type "
            "'lora'; convert the adapter with convert_lora_to_gguf.py",
        )
    alpha = read_positive(path, metadata, "adapter.lora.alpha")
    return file, AdapterConfig(path, PatternMatcher(path), 0, alpha)


def read_positive(path: Path, values: Mapping[str, Any], key: str) -> float:
    """Return a positive number."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise refuse(path, f"{key} must be a positive number, not {value!r}")
    return float(value)


def read_whole(path: Path, values: Mapping[str, Any], key: str) -> int:
    """Return a positive whole number."""
    value = read_positive(path, values, key)
    if not value.is_integer():
        raise refuse(path, f"{key} must be a whole number, not {value!r}")
    return int(value)


def is_list_of_numbers(value: Any) -> bool:
    """Whether a value is a list of whole numbers."""
    return isinstance(value, list) and all(type(number) is int for number in value)


def read_patterns(
    path: Path,
    values: Mapping[str, Any],
    key: str,
    matcher: PatternMatcher,
    read: Callable[[Path, Mapping[str, Any], str], Number],
) -> dict[str, Number]:
    """Return numbers by pattern of a module's path."""
    patterns = values.get(key) or {}
    if not isinstance(patterns, dict):
        raise refuse(path, f"{key} must map patterns to numbers")
    for pattern in patterns:
        matcher.check(key, pattern, is_end=True)
    named = {f"{key} {pattern!r}": value for pattern, value in patterns.items()}
    return {pattern: read(path, named, f"{key} {pattern!r}") for pattern in patterns}


def refuse(path: Path, reason: str) -> InvalidRequest:
    """The error for an adapter that cannot be used."""
    return InvalidRequest(f"{path}: {reason}", "model")
