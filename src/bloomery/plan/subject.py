"""What is planned: a model's shape and how its weights are stored, from its description alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from bloomery.artifacts.files import strict_json
from bloomery.artifacts.gguf import read
from bloomery.artifacts.locate import locate
from bloomery.describe import description, native_dtype
from bloomery.families import describe
from bloomery.roofline import PRECISIONS, Precision
from bloomery.spec import Model


@dataclass(frozen=True)
class Subject:
    name: str
    model: Model
    stored: Precision  # as the checkpoint keeps its weights


def subject(name: str | None, revision: str | None = None) -> Subject:
    """A folder, a Hub id (only its configuration is fetched), a .gguf file's header, or a config.json by itself."""
    if name is not None and name.endswith(".json") and Path(name).is_file():
        config = strict_json(Path(name).read_bytes(), name)
        return Subject(Path(name).stem, describe(config).model, _stated(config, str(config.get("torch_dtype"))))
    artifact = locate(name, revision, weights=False)
    model = description(artifact).model
    if artifact.kind == "gguf":
        return Subject(artifact.name, model, _gguf(artifact.path))
    path = artifact.path / "config.json"
    return Subject(
        artifact.name, model, _stated(strict_json(path.read_bytes(), str(path)), native_dtype(artifact, True))
    )


def _stated(config: dict[str, Any], dtype: str) -> Precision:
    """What config.json says of its weights; the quantised formats by the width they state."""
    packed: dict[str, Any] = config.get("quantization_config") or {}
    method = str(packed.get("quant_method", ""))
    if method == "compressed-tensors":
        groups: list[dict[str, Any]] = list((packed.get("config_groups") or {}).values())
        packed = (groups[0].get("weights") or {}) if groups else {}
    bits, group = packed.get("bits") or packed.get("num_bits"), packed.get("group_size") or 0
    if method == "mxfp4":
        return Precision("mxfp4", 4 + 8 / 32, compute="int8")
    if "fp8" in method or packed.get("type") == "float":
        return PRECISIONS["fp8"]
    if packed.get("load_in_4bit"):
        return PRECISIONS["nf4-double" if packed.get("bnb_4bit_use_double_quant") else "nf4"]
    if bits == 8 or packed.get("load_in_8bit"):
        return PRECISIONS["int8"]
    if isinstance(bits, int):
        return Precision(f"int{bits}", bits + (16 + bits) / group if group > 0 else bits, compute="int8")
    return PRECISIONS["fp32" if dtype.endswith("float32") else "bf16"]


def _gguf(path: Path) -> Precision:
    """Bits a value as the file's blocks really take them, layers and the rest apart."""
    size, count, kinds = Counter[bool](), Counter[bool](), Counter[str]()
    for tensor in read(path).tensors.values():
        inside = tensor.name.startswith("blk.") and len(tensor.shape) > 1
        size[inside] += tensor.nbytes
        count[inside] += prod(tensor.shape)
        kinds[tensor.type] += tensor.nbytes
    bits = {part: 8 * size[part] / max(count[part], 1) for part in (True, False)}
    return Precision(kinds.most_common(1)[0][0], bits[True], bits[False], "int8" if bits[True] < 16 else "bf16")
