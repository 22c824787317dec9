"""Reads quantization_config of a config.json: the method, and whether it is supported.

The tensors themselves show bits, groups and exceptions. An unsupported setting is refused by name
before any tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bloomery.families.reader import ConfigReader
from bloomery.spec import CheckpointQuantization

REMEDY = "; use the checkpoint in full precision, with --quantization"
COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
)


def read_quantization(model_config: ConfigReader) -> CheckpointQuantization | None:
    """Return the quantization of a checkpoint, or None if it is not quantized."""
    values = model_config.get("quantization_config")
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise model_config.error("quantization_config", f"must be an object, not {values!r}")
    # This reader is separate, so that unread keys are not logged: most concern only the quantizer.
    config = ConfigReader(values, "quantization_config.")
    is_bitsandbytes = config.get("load_in_8bit") or config.get("load_in_4bit")
    if config.get("quant_method") is None and is_bitsandbytes:
        return read_bitsandbytes(config)
    method = config.text("quant_method")
    if method not in METHODS:
        raise config.error(
            "quant_method", f"{method!r} is not known. Known: {', '.join(METHODS)}{REMEDY}"
        )
    return METHODS[method](config)


def read_one_of(
    config: ConfigReader, name: str, known: tuple[object, ...], default: object
) -> object:
    """Return the value of a key; a value that is not in `known` is refused."""
    value = config.get(name, default)
    if value not in known:
        supported = ", ".join(map(str, known))
        raise config.error(name, f"{value!r} is not supported. Supported: {supported}{REMEDY}")
    return value


def check_group_size(config: ConfigReader, name: str = "group_size") -> None:
    """Check a group size; -1 means the whole row."""
    value = config.get(name, -1)
    if not isinstance(value, int) or isinstance(value, bool) or (value != -1 and value < 1):
        raise config.error(name, f"must be -1 or a positive whole number, not {value!r}{REMEDY}")


def read_bitsandbytes(config: ConfigReader) -> CheckpointQuantization:
    load_in_8bit = config.flag("load_in_8bit", False)
    load_in_4bit = config.flag("load_in_4bit", False)
    if load_in_8bit == load_in_4bit:
        raise config.error(
            "load_in_8bit and load_in_4bit",
            f"are {load_in_8bit} and {load_in_4bit}; exactly one must be true",
        )
    if load_in_4bit:
        read_one_of(config, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    return CheckpointQuantization("bitsandbytes")


def read_gptq(config: ConfigReader) -> CheckpointQuantization:
    read_one_of(config, "bits", (2, 3, 4, 8), None)
    check_group_size(config)
    layout = read_one_of(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    act_order = config.flag("desc_act", False) and config.get("group_size", -1) != -1
    return CheckpointQuantization(
        "gptq",
        zero_point_offset=1 if layout == "gptq" else 0,
        required_tensors=("g_idx",) if act_order else (),
    )


def read_awq(config: ConfigReader) -> CheckpointQuantization:
    read_one_of(config, "bits", (4,), config.get("w_bit"))
    read_one_of(config, "version", ("gemm", "GEMM"), "gemm")
    has_q_group_size = config.get("q_group_size") is not None
    check_group_size(config, "q_group_size" if has_q_group_size else "group_size")
    return CheckpointQuantization("awq")


def read_compressed_tensors(config: ConfigReader) -> CheckpointQuantization:
    read_one_of(config, "format", (*COMPRESSED_FORMATS, "mixed-precision"), None)
    read_one_of(config, "quantization_status", ("compressed",), "compressed")
    if config.get("transform_config"):
        raise config.error(
            "transform_config", f"asks for rotations, which are not supported{REMEDY}"
        )
    read_one_of(config.section("sparsity_config"), "format", ("dense",), "dense")
    groups = config.section("config_groups")
    symmetric = []
    act_order = []
    for name in groups.values:
        group = groups.section(name)
        read_one_of(group, "format", COMPRESSED_FORMATS, COMPRESSED_FORMATS[0])
        weights = group.section("weights")
        kind = read_one_of(weights, "type", ("int", "float"), "int")
        read_one_of(weights, "num_bits", (4, 8), None)
        read_one_of(weights, "strategy", ("tensor", "channel", "group", "block"), "tensor")
        if kind == "float" and weights.get("strategy") == "block":
            read_one_of(weights, "block_structure", ([128, 128],), [128, 128])
        symmetric.append(kind == "float" or weights.flag("symmetric", True))
        act_order.append(weights.get("actorder") == "group")
    # It is unknown to which group a weight belongs, so a tensor is required only if all groups
    # have it.
    required = []
    if groups.values and not any(symmetric):
        required.append("weight_zero_point")
    if groups.values and all(act_order):
        required.append("weight_g_idx")
    return CheckpointQuantization("compressed-tensors", required_tensors=tuple(required))


def read_fp8(config: ConfigReader) -> CheckpointQuantization:
    read_one_of(config, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    read_one_of(config, "activation_scheme", ("dynamic", "static"), "dynamic")
    read_one_of(config, "weight_block_size", (None, [128, 128]), None)
    return CheckpointQuantization("fp8")


METHODS: Mapping[str, Callable[[ConfigReader], CheckpointQuantization]] = {
    "bitsandbytes": read_bitsandbytes,
    "gptq": read_gptq,
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "fbgemm_fp8": read_fp8,
    "mxfp4": lambda config: CheckpointQuantization("mxfp4"),
}
