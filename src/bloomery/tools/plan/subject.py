"""What is planned: a model's shape and how its weights are stored, from its description alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from bloomery.artifacts.files import strict_json
from bloomery.artifacts.gguf import GgufTensor, read
from bloomery.artifacts.locate import locate
from bloomery.describe import description, native_dtype
from bloomery.families import describe
from bloomery.roofline import DOUBLE, LIBRARY, PRECISIONS, Precision
from bloomery.spec import Model


@dataclass(frozen=True)
class Subject:
    name: str
    model: Model
    stored: Precision  # as the checkpoint keeps its weights; a GGUF's blocks as a GPU's kernels read them
    panels: Precision | None = None  # those blocks as a CPU's own kernels read them

    def kept(self, cpu: bool) -> Precision:
        """As the engine holds the weights: a CPU has no arithmetic of 16 bits."""
        if cpu and self.panels is not None:
            return self.panels
        if not cpu or self.stored.outer != 16:
            return self.stored
        return PRECISIONS["fp32"] if self.stored.bits == 16 else replace(self.stored, outer=32)


def subject(name: str | None, revision: str | None = None) -> Subject:
    """A folder, a Hub id (only its configuration is fetched), a .gguf file's header, or a config.json by itself."""
    if name is not None and name.endswith(".json") and Path(name).is_file():
        config = strict_json(Path(name).read_bytes(), name)
        return Subject(
            Path(name).stem, describe(config).model, _stated(config, str(config.get("torch_dtype")))
        )
    artifact = locate(name, revision, weights=False)
    model = description(artifact).model
    if artifact.kind == "gguf":
        tensors = list(read(artifact.path).tensors.values())
        return Subject(
            artifact.name, model, _gguf(tensors, GRIDS, False), _gguf(tensors, PANELS, True)
        )
    path = artifact.path / "config.json"
    return Subject(
        artifact.name,
        model,
        _stated(strict_json(path.read_bytes(), str(path)), native_dtype(artifact, True)),
    )


def _stated(config: dict[str, Any], dtype: str) -> Precision:
    """What config.json says of its weights; the quantised formats by the width they state."""
    packed: dict[str, Any] = config.get("quantization_config") or {}
    method = str(packed.get("quant_method", ""))
    if method == "compressed-tensors":
        groups: list[dict[str, Any]] = list((packed.get("config_groups") or {}).values())
        packed = (groups[0].get("weights") or {}) if groups else {}
    bits = packed.get("bits") or packed.get("num_bits")
    group = packed.get("group_size") or 0
    if method == "mxfp4":
        return Precision("mxfp4", 4 + 8 / 32, compute="nf4")
    if "fp8" in method or packed.get("type") == "float":
        return Precision("fp8", 8, compute="fp8")
    if packed.get("load_in_4bit"):
        return (
            Precision("nf4", DOUBLE, compute="nf4")
            if packed.get("bnb_4bit_use_double_quant")
            else LIBRARY["nf4"]
        )
    if bits == 8 or packed.get("load_in_8bit"):
        return LIBRARY["int8"]
    if isinstance(bits, int):
        held = max(bits, 4)  # no kernel reads fewer
        return Precision(
            f"int{bits}", held + (16 + bits) / group if group > 0 else held, compute=f"int{held}"
        )
    return PRECISIONS["fp32" if dtype.endswith("float32") else "bf16"]


FULL = ("F64", "F32", "F16", "BF16")
# GGUF's types as native kernels keep them: bits a value, and which of the measured ways of computing it is. Others are
# rounded to eight bits, or expanded if they are no blocks.
PANELS: Mapping[str, tuple[float, str]] = {
    "Q4_0": (4.5, "int4"),
    "Q4_1": (5, "int4"),
    "Q4_K": (4.625, "Q4_K"),
    "Q8_0": (8.5, "int8"),
    "Q5_0": (8.5, "int8"),
    "Q5_1": (9, "int8"),
    "Q5_K": (8.625, "Q6_K"),
    "Q6_K": (8.5625, "Q6_K"),
}
# The same for a GPU's kernels: codes of 4 or 8 bits, and 16 each for scale and zero, if any, of 16 or 32 values.
GRIDS: Mapping[str, tuple[float, str]] = {
    "Q4_0": (4.5, "int4"),
    "Q4_1": (5, "int4"),
    "Q4_K": (5, "int4"),
    "IQ4_NL": (4.5, "int4"),
    "IQ4_XS": (4.5, "int4"),
    "Q8_0": (8.5, "int8"),
    "Q5_0": (8.5, "int8"),
    "Q5_1": (9, "int8"),
    "Q5_K": (9, "int8"),
    "Q6_K": (9, "int8"),
    "Q3_K": (9, "int8"),
    "Q2_K": (10, "int8"),
}


def _gguf(
    tensors: Sequence[GgufTensor], ways: Mapping[str, tuple[float, str]], cpu: bool
) -> Precision:
    """Bits a value, layers and the rest apart."""
    size: dict[bool, float] = {True: 0.0, False: 0.0}
    count = Counter[bool]()
    types = Counter[str]()
    kinds = Counter[str]()
    for tensor in (tensor for tensor in tensors if len(tensor.shape) > 1):
        inside = tensor.name.startswith("blk.")
        values = prod(tensor.shape)
        other = (
            (8.5, "int8")
            if cpu and tensor.type not in FULL
            else (32, "fp32")
            if cpu
            else (16, "bf16")
        )
        bits, kind = ways.get(tensor.type, other)
        size[inside] += values * bits
        count[inside] += values
        types[tensor.type] += tensor.nbytes
        kinds[kind] += values * inside
    bits, outer = (size[part] / max(count[part], 1) for part in (True, False))
    shares = {kind: values / count[True] for kind, values in kinds.items() if values}
    return Precision(
        types.most_common(1)[0][0], bits, outer, "int4" if bits < 6 else "int8", shares
    )
