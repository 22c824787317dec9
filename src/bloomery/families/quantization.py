"""quantization_config of a config.json: who packed the products, and whether it is a kind that can be read.

Bits, groups and exceptions are not repeated here: the tensors say them. What cannot be read is refused by name, before
any tensor is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bloomery.families.reader import Reader
from bloomery.spec import Quantization

REMEDY = "; take the checkpoint in full precision and round it with --quantize"
COMPRESSED = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
)


def quantization(config: Reader) -> Quantization | None:
    stated = config.get("quantization_config")
    if stated is None:
        return None
    if not isinstance(stated, Mapping):
        raise config.wrong("quantization_config", f"must be an object, not {stated!r}")
    c = Reader(
        stated, "quantization_config."
    )  # of its own: keys that only steer quantisers are no news
    if c.get("quant_method") is None and (c.get("load_in_8bit") or c.get("load_in_4bit")):
        return bitsandbytes(c)
    method = c.text("quant_method")
    if method not in METHODS:
        raise c.wrong(
            "quant_method", f"{method!r} is not known. Known: {', '.join(METHODS)}{REMEDY}"
        )
    return METHODS[method](c)


def one_of(c: Reader, name: str, known: tuple[object, ...], default: object) -> object:
    value = c.get(name, default)
    if value not in known:
        raise c.wrong(
            name, f"{value!r} is not supported. Supported: {', '.join(map(str, known))}{REMEDY}"
        )
    return value


def group(c: Reader, name: str = "group_size") -> None:
    """-1 is a whole row."""
    value = c.get(name, -1)
    if not isinstance(value, int) or isinstance(value, bool) or (value != -1 and value < 1):
        raise c.wrong(name, f"must be -1 or a positive whole number, not {value!r}{REMEDY}")


def bitsandbytes(c: Reader) -> Quantization:
    eight = c.flag("load_in_8bit", False)
    four = c.flag("load_in_4bit", False)
    if eight == four:
        raise c.wrong(
            "load_in_8bit and load_in_4bit", f"are {eight} and {four}; exactly one must be true"
        )
    if four:
        one_of(c, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    return Quantization("bitsandbytes")


def gptq(c: Reader) -> Quantization:
    one_of(c, "bits", (2, 3, 4, 8), None)
    group(c)
    layout = one_of(c, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    needed = ("g_idx",) if c.flag("desc_act", False) and c.get("group_size", -1) != -1 else ()
    return Quantization("gptq", 1 if layout == "gptq" else 0, needed)


def awq(c: Reader) -> Quantization:
    one_of(c, "bits", (4,), c.get("w_bit"))
    one_of(c, "version", ("gemm", "GEMM"), "gemm")
    group(c, "group_size" if c.get("q_group_size") is None else "q_group_size")
    return Quantization("awq")


def compressed(c: Reader) -> Quantization:
    one_of(c, "format", (*COMPRESSED, "mixed-precision"), None)
    one_of(c, "quantization_status", ("compressed",), "compressed")
    if c.get("transform_config"):
        raise c.wrong("transform_config", f"asks for rotations, which are not supported{REMEDY}")
    one_of(c.under("sparsity_config"), "format", ("dense",), "dense")
    groups = c.under("config_groups")
    even = []
    ordered = []
    for name in groups.values:
        scheme = groups.under(name)
        one_of(scheme, "format", COMPRESSED, COMPRESSED[0])
        weights = scheme.under("weights")
        kind = one_of(weights, "type", ("int", "float"), "int")
        one_of(weights, "num_bits", (4, 8), None)
        one_of(weights, "strategy", ("tensor", "channel", "group", "block"), "tensor")
        if kind == "float" and weights.get("strategy") == "block":
            one_of(weights, "block_structure", ([128, 128],), [128, 128])
        even.append(kind == "float" or weights.flag("symmetric", True))
        ordered.append(weights.get("actorder") == "group")
    # Of several schemes a product does not say which is its own.
    parts = {
        "weight_zero_point": groups.values and not any(even),
        "weight_g_idx": groups.values and all(ordered),
    }
    return Quantization(
        "compressed-tensors", needed=tuple(part for part, always in parts.items() if always)
    )


def fp8(c: Reader) -> Quantization:
    one_of(c, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    one_of(c, "activation_scheme", ("dynamic", "static"), "dynamic")
    one_of(c, "weight_block_size", (None, [128, 128]), None)
    return Quantization("fp8")


METHODS: Mapping[str, Callable[[Reader], Quantization]] = {
    "bitsandbytes": bitsandbytes,
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed,
    "fp8": fp8,
    "fbgemm_fp8": fp8,
    "mxfp4": lambda c: Quantization("mxfp4"),
}
