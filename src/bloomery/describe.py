"""What a model is and where it would run, before any weight is read. No torch: the API process plans with it.

The engine process, which has torch, is handed the resulting plan and finds out if it was wrong.
"""

from __future__ import annotations

import struct
from collections import Counter
from math import prod

from bloomery import layout
from bloomery.artifacts import gguf, safetensors
from bloomery.artifacts.files import strict_json
from bloomery.artifacts.locate import Artifact, locate
from bloomery.config import Config, Plan, device, resolve
from bloomery.errors import ConfigError, UnsupportedModel
from bloomery.families import Description, describe
from bloomery.families.gguf import describe as describe_gguf

STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def description(artifact: Artifact) -> Description:
    if artifact.kind == "folder":
        path = artifact.path / "config.json"
        return describe(strict_json(path.read_bytes(), str(path)))
    return describe_file(gguf.read(artifact.path, words=False))


def describe_file(file: gguf.Gguf) -> Description:
    def vector(name: str) -> list[float]:
        """Divisors of rotary frequencies, which are part of the description and always F32."""
        tensor = file.tensors[name]
        if tensor.type != "F32":
            raise UnsupportedModel(f"{file.path}: tensor {name!r} is {tensor.type}, not F32")
        with file.path.open("rb") as stored:
            stored.seek(tensor.start)
            return list(struct.unpack(f"<{prod(tensor.shape)}f", stored.read(tensor.nbytes)))

    return describe_gguf(
        file.metadata, {name: tensor.shape for name, tensor in file.tensors.items()}, vector
    )


def native_dtype(artifact: Artifact, dummy: bool = False) -> str:
    """The precision the checkpoint was made for; quantised GGUF values fit in bfloat16."""
    if artifact.kind == "gguf":
        return "bfloat16"
    path = artifact.path / "config.json"
    config = strict_json(path.read_bytes(), str(path))
    config = {**(config.get("text_config") or {}), **config}
    packed = config.get("quantization_config") or {}
    words = (
        config.get("dtype"),
        config.get("torch_dtype"),
        packed.get("bnb_4bit_compute_dtype"),
        "auto",
    )
    stated = str(next(word for word in words if word)).removeprefix("torch.")
    if stated in STORED.values():
        return stated
    if stated != "auto":
        raise UnsupportedModel(
            f"config.json: dtype {stated!r} is not known. Known: {', '.join(STORED.values())}"
        )
    if dummy:
        return "bfloat16"
    count: Counter[str] = Counter()
    for _, entry in safetensors.index(artifact.path).values():
        if entry.dtype in STORED:
            count[STORED[entry.dtype]] += prod(entry.shape)
    return max(count, key=lambda name: count[name], default="float32")


def plan_for(config: Config) -> tuple[Plan, Artifact]:
    """Locate, describe, resolve."""
    dummy = config.load_format == "dummy"
    artifact = locate(config.model, config.revision, weights=not dummy)
    found = description(artifact)
    if found.quantization is not None and config.quantize != "auto" and not dummy:
        raise ConfigError(
            f"quantize {config.quantize!r}: {artifact.name} is packed by {found.quantization.method} already; leave "
            "quantize out, or take the checkpoint in full precision"
        )
    layout.check(found.model, config.tp, config.pp)
    plan = resolve(
        config,
        name=artifact.name,
        path=str(artifact.path),
        kind=artifact.kind,
        dtype=native_dtype(artifact, dummy),
        device=device(config.device),
        context=found.model.context,
    )
    return plan, artifact
