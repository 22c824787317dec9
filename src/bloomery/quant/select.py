"""Selects the weight format: that of the checkpoint, the requested quantization, or dense."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from bloomery.quant.awq import AwqFormat
from bloomery.quant.base import WeightFormat
from bloomery.quant.bitsandbytes import BitsAndBytesFormat
from bloomery.quant.compressed_tensors import CompressedTensorsFormat
from bloomery.quant.dense import DenseFormat
from bloomery.quant.fp8 import Fp8Format, quantize_fp8
from bloomery.quant.gptq import GptqFormat
from bloomery.quant.int4 import quantize_int4
from bloomery.quant.int8 import quantize_int8
from bloomery.quant.mxfp4 import Mxfp4Format
from bloomery.quant.nf4 import FP4, NF4, quantize_codebook
from bloomery.quant.quantize_on_load import OnLoadFormat
from bloomery.spec import CheckpointQuantization

# Values of --quantization: first the quantizer of decoder layers, then that of the embedding and
# the LM head.
ON_LOAD_FORMATS: Mapping[str, OnLoadFormat] = {
    "int8": OnLoadFormat(quantize_int8, quantize_int8),
    "int4": OnLoadFormat(quantize_int4, quantize_int8),
    "int4-64": OnLoadFormat(partial(quantize_int4, group_size=64), quantize_int8),
    "int3": OnLoadFormat(partial(quantize_int4, bits=3, group_size=64), quantize_int8),
    "int2": OnLoadFormat(partial(quantize_int4, bits=2, group_size=64), quantize_int8),
    "nf4": OnLoadFormat(partial(quantize_codebook, codebook=NF4), quantize_int8),
    "fp4": OnLoadFormat(partial(quantize_codebook, codebook=FP4), quantize_int8),
    "fp8": OnLoadFormat(quantize_fp8, quantize_fp8),
    "w8a8": OnLoadFormat(partial(quantize_int8, quantize_input=True), quantize_int8),
}
QUALITY_WARNINGS: Mapping[str, str] = {
    "int3": (
        "int3: three bits cost small models much of their quality, and no fast kernel reads them; "
        "int4 is a fifth larger, better and faster"
    ),
    "int2": (
        "int2: two bits ruin any model that was not trained for them: use it for experiments only, "
        "and int4 to serve"
    ),
}


def select_format(
    stored: CheckpointQuantization | None, quantization: str = "auto"
) -> WeightFormat:
    """Select the format of a checkpoint.

    `stored` is the quantization of the checkpoint itself. `quantization` is a key of
    ON_LOAD_FORMATS, or "auto" to load the weights as they are stored.
    """
    if quantization != "auto":
        return ON_LOAD_FORMATS[quantization]
    if stored is None:
        return DenseFormat()
    match stored.method:
        case "gptq":
            return GptqFormat(stored.zero_point_offset, stored.required_tensors)
        case "compressed-tensors":
            return CompressedTensorsFormat(stored.required_tensors)
        case "bitsandbytes":
            return BitsAndBytesFormat()
        case "awq":
            return AwqFormat()
        case "fp8":
            return Fp8Format()
        case "mxfp4":
            return Mxfp4Format()
