"""Describes a model and resolves the engine plan, before any weight is read.

No torch, because the API server runs this. The engine process receives the plan and reports an
error if it cannot run it.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import replace
from math import prod

from bloomery import layout
from bloomery.artifacts import gguf, safetensors
from bloomery.artifacts.files import parse_config_json
from bloomery.artifacts.locate import ModelArtifact, locate_model
from bloomery.config import (
    EngineConfig,
    EnginePlan,
    resolve_device,
    resolve_plan,
    use_cache_directory,
)
from bloomery.errors import ConfigError, UnsupportedModel
from bloomery.families import ModelDescription, describe_config
from bloomery.families.gguf import describe_gguf

DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def describe_model(artifact: ModelArtifact) -> ModelDescription:
    """Describe a model from its config.json or its GGUF metadata."""
    if artifact.kind == "folder":
        path = artifact.path / "config.json"
        return describe_config(parse_config_json(path.read_bytes(), str(path)))
    return describe_gguf_file(gguf.read_gguf(artifact.path, read_string_arrays=False))


def describe_gguf_file(file: gguf.GgufFile) -> ModelDescription:
    """Describe the model of a GGUF file whose header has been read."""

    def read_vector(name: str) -> list[float]:
        """Read the divisors of rope frequencies, which are always F32."""
        tensor = file.tensors[name]
        if tensor.type != "F32":
            raise UnsupportedModel(f"{file.path}: tensor {name!r} is {tensor.type}, not F32")
        with file.path.open("rb") as stream:
            stream.seek(tensor.start)
            data = stream.read(tensor.nbytes)
        return list(struct.unpack(f"<{prod(tensor.shape)}f", data))

    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    return describe_gguf(file.metadata, shapes, read_vector)


def checkpoint_dtype(artifact: ModelArtifact, dummy: bool = False) -> str:
    """Return the dtype that the checkpoint was made for.

    Without a stated dtype, it is the dtype of most weights; with `dummy` there are none to count.
    """
    if artifact.kind == "gguf":
        return "bfloat16"  # quantized values fit into it
    path = artifact.path / "config.json"
    config = parse_config_json(path.read_bytes(), str(path))
    config = {**(config.get("text_config") or {}), **config}
    quantization = config.get("quantization_config") or {}
    stated = (
        config.get("dtype")
        or config.get("torch_dtype")
        or quantization.get("bnb_4bit_compute_dtype")
        or "auto"
    )
    stated = str(stated).removeprefix("torch.")
    if stated in DTYPE_NAMES.values():
        return stated
    if stated != "auto":
        known = ", ".join(DTYPE_NAMES.values())
        raise UnsupportedModel(f"config.json: dtype {stated!r} is not known. Known: {known}")
    if dummy:
        return "bfloat16"
    num_values: Counter[str] = Counter()
    for _, entry in safetensors.index_checkpoint(artifact.path).values():
        if entry.dtype in DTYPE_NAMES:
            num_values[DTYPE_NAMES[entry.dtype]] += prod(entry.shape)
    return max(num_values, key=lambda name: num_values[name], default="float32")


def build_engine_plan(config: EngineConfig) -> tuple[EnginePlan, ModelArtifact]:
    """Locate and describe the model, and resolve the plan of the engine that will run it."""
    use_cache_directory(config.cache_dir)
    dummy = config.load_format == "dummy"
    artifact = locate_model(config.model, config.revision, weights=not dummy)
    description = describe_model(artifact)
    model = description.model
    quantization = description.quantization
    if quantization is not None and config.quantization != "auto" and not dummy:
        raise ConfigError(
            f"quantization {config.quantization!r}: {artifact.name} is packed by "
            f"{quantization.method} already; leave quantization out, or use the checkpoint in "
            "full precision"
        )
    layout.check_parallel_sizes(model, config.tensor_parallel_size, config.pipeline_parallel_size)
    plan = resolve_plan(
        config,
        name=artifact.name,
        path=str(artifact.path),
        kind=artifact.kind,
        dtype=checkpoint_dtype(artifact, dummy),
        device=resolve_device(config.device),
        context=model.context,
    )
    return replace(plan, text_part_only=description.text_part_only), artifact
