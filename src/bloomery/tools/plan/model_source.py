"""The model that is planned: its shape and how its weights are stored.

Reads only descriptions: config.json, or the header of a .gguf file. No weights, no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from bloomery.artifacts.files import parse_config_json
from bloomery.artifacts.gguf import GgufTensor, read_gguf
from bloomery.artifacts.locate import locate_model
from bloomery.describe import checkpoint_dtype, describe_model
from bloomery.families import describe_config
from bloomery.roofline import (
    DOUBLE_QUANTIZED_BITS,
    LIBRARY_PRECISIONS,
    PRECISIONS,
    WeightPrecision,
)
from bloomery.spec import ModelSpec

# Bits per value, and the format whose measured rate applies.
FormatCost = tuple[float, str]


@dataclass(frozen=True)
class ModelSource:
    """A model's name, shape and stored precision."""

    name: str
    model: ModelSpec
    stored: WeightPrecision  # as the checkpoint stores weights; a GGUF's blocks as GPUs hold them
    stored_on_cpu: WeightPrecision | None = None  # a GGUF's blocks as our CPU kernels hold them
    text_part_only: bool = False  # a vision model, of which only the text part is served

    def loaded_precision(self, cpu: bool) -> WeightPrecision:
        """The precision in which the engine holds the weights."""
        if cpu and self.stored_on_cpu is not None:
            return self.stored_on_cpu
        return self.stored


def read_model_source(name: str | None, revision: str | None = None) -> ModelSource:
    """Read a folder, a Hub id (only its configuration is fetched), a .gguf file or a config.json.

    None is the embedded model.
    """
    if name is not None and name.endswith(".json") and Path(name).is_file():
        config = parse_config_json(Path(name).read_bytes(), name)
        dtype = str(config.get("torch_dtype"))
        description = describe_config(config)
        return ModelSource(
            Path(name).stem,
            description.model,
            _stated_precision(config, dtype),
            text_part_only=description.text_part_only,
        )
    artifact = locate_model(name, revision, weights=False)
    description = describe_model(artifact)
    model = description.model
    text_part_only = description.text_part_only
    if artifact.kind == "gguf":
        tensors = list(read_gguf(artifact.path).tensors.values())
        on_gpu = _gguf_precision(tensors, GPU_GGUF_FORMATS, cpu=False)
        on_cpu = _gguf_precision(tensors, CPU_GGUF_FORMATS, cpu=True)
        return ModelSource(artifact.name, model, on_gpu, on_cpu, text_part_only)
    path = artifact.path / "config.json"
    config = parse_config_json(path.read_bytes(), str(path))
    dtype = checkpoint_dtype(artifact, True)
    precision = _stated_precision(config, dtype)
    return ModelSource(artifact.name, model, precision, text_part_only=text_part_only)


def _stated_precision(config: dict[str, Any], dtype: str) -> WeightPrecision:
    """The precision that config.json states; of quantized checkpoints by their bits."""
    settings: dict[str, Any] = config.get("quantization_config") or {}
    method = str(settings.get("quant_method", ""))
    if method == "compressed-tensors":
        groups: list[dict[str, Any]] = list((settings.get("config_groups") or {}).values())
        settings = (groups[0].get("weights") or {}) if groups else {}
    if method == "mxfp4" and settings.get("modules_to_not_convert"):
        return WeightPrecision("mxfp4", 16, expert_bits=4 + 8 / 32)
    if method == "mxfp4":
        return WeightPrecision("mxfp4", 4 + 8 / 32, compute_format="nf4")
    if "fp8" in method or settings.get("type") == "float":
        return WeightPrecision("fp8", 8, compute_format="fp8")
    if settings.get("load_in_4bit"):
        if settings.get("bnb_4bit_use_double_quant"):
            return WeightPrecision("nf4", DOUBLE_QUANTIZED_BITS, compute_format="nf4")
        return LIBRARY_PRECISIONS["nf4"]
    bits = settings.get("bits") or settings.get("num_bits")
    if bits == 8 or settings.get("load_in_8bit"):
        return LIBRARY_PRECISIONS["int8"]
    if isinstance(bits, int):
        return _integer_precision(bits, settings.get("group_size") or 0)
    return PRECISIONS["fp32" if dtype.endswith("float32") else "bf16"]


def _integer_precision(bits: int, group_size: int) -> WeightPrecision:
    """Integers of 2 to 7 bits. Kernels read no fewer than 4 bits per value."""
    held_bits = max(bits, 4)
    group_bits = (16 + bits) / group_size if group_size > 0 else 0
    return WeightPrecision(f"int{bits}", held_bits + group_bits, compute_format=f"int{held_bits}")


# How our CPU kernels hold GGUF types; those not listed take 8.5 bits.
CPU_GGUF_FORMATS: Mapping[str, FormatCost] = {
    "F64": (32, "fp32"),
    "F32": (32, "fp32"),
    "F16": (16, "bf16"),
    "BF16": (16, "bf16"),
    "Q4_0": (4.5, "int4"),
    "Q4_1": (5, "int4"),
    "Q4_K": (4.625, "Q4_K"),
    "IQ4_NL": (4.5, "int4"),
    "IQ4_XS": (4.3125, "int4"),
    "MXFP4": (4.5, "int4"),
    "Q8_0": (8.5, "int8"),
    "Q5_0": (8.5, "int8"),
    "Q5_1": (9, "int8"),
    "Q5_K": (8.625, "Q6_K"),
    "Q6_K": (8.5625, "Q6_K"),
    **dict.fromkeys(
        (
            "Q3_K",
            "IQ2_XXS",
            "IQ2_XS",
            "IQ2_S",
            "IQ3_XXS",
            "IQ3_S",
            "IQ1_S",
            "IQ1_M",
        ),
        (8.5625, "Q6_K"),
    ),
}
# The same for GPU kernels: codes of 4 or 8 bits, and a scale (and a zero, if any) of 16 bits each
# for 16 or 32 values.
GPU_GGUF_FORMATS: Mapping[str, FormatCost] = {
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
    "IQ2_XXS": (8.5, "int8"),
    "IQ2_XS": (9, "int8"),
    "IQ2_S": (9, "int8"),
    "IQ3_XXS": (8.5, "int8"),
    "IQ3_S": (8.5, "int8"),
    "IQ1_S": (8.5, "int8"),
    "IQ1_M": (9, "int8"),
    "TQ1_0": (4.125, "int4"),
    "TQ2_0": (4.125, "int4"),
    "Q1_0": (4.125, "int4"),
    "MXFP4": (4.25, "int4"),
    "NVFP4": (9, "int8"),
}


def _gguf_precision(
    tensors: Sequence[GgufTensor], formats: Mapping[str, FormatCost], cpu: bool
) -> WeightPrecision:
    """The mean bits per value of the layers' matrices, and of embedding and head."""
    total_bits = {"layers": 0.0, "outer": 0.0}
    num_values = Counter[str]()
    bytes_by_type = Counter[str]()
    values_by_format = Counter[str]()
    for tensor in tensors:
        if len(tensor.shape) < 2:
            continue
        part = "layers" if tensor.name.startswith("blk.") else "outer"
        values = prod(tensor.shape)
        bits, compute_format = formats.get(tensor.type, _other_format(tensor.type, cpu))
        total_bits[part] += values * bits
        num_values[part] += values
        bytes_by_type[tensor.type] += tensor.nbytes
        if part == "layers":
            values_by_format[compute_format] += values
    bits, outer_bits = (total_bits[part] / max(num_values[part], 1) for part in ("layers", "outer"))
    most_common_type = bytes_by_type.most_common(1)[0][0]
    shares = {name: values / num_values["layers"] for name, values in values_by_format.items()}
    compute_format = "int4" if bits < 6 else "int8"
    return WeightPrecision(most_common_type, bits, outer_bits, compute_format, shares)


def _other_format(tensor_type: str, cpu: bool) -> FormatCost:
    """How tensors are held for which there is no packed format."""
    return (8.5, "int8") if cpu else (16, "bf16")
