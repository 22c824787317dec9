"""Which format keeps a checkpoint's products: its own, the one that was asked for, or full precision."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from bloomery.quant.awq import Awq
from bloomery.quant.base import Format
from bloomery.quant.bitsandbytes import BitsAndBytes
from bloomery.quant.compressed import Compressed
from bloomery.quant.dense import DenseFormat
from bloomery.quant.fp8 import Fp8Format, fp8
from bloomery.quant.gptq import Gptq
from bloomery.quant.int4 import int4
from bloomery.quant.int8 import int8
from bloomery.quant.mxfp4 import Mxfp4
from bloomery.quant.nf4 import FP4, NF4, codebook
from bloomery.quant.onload import OnLoad
from bloomery.spec import Quantization

ON_LOAD: Mapping[str, OnLoad] = {
    "int8": OnLoad(int8, int8),
    "int4": OnLoad(int4, int8),
    "int4-64": OnLoad(partial(int4, group=64), int8),
    "int3": OnLoad(partial(int4, bits=3, group=64), int8),
    "int2": OnLoad(partial(int4, bits=2, group=64), int8),
    "nf4": OnLoad(partial(codebook, values=NF4), int8),
    "fp4": OnLoad(partial(codebook, values=FP4), int8),
    "fp8": OnLoad(fp8, fp8),
    "w8a8": OnLoad(partial(int8, both=True), int8),
}
READY_MADE: Mapping[str, Format] = {
    "bitsandbytes": BitsAndBytes(),
    "awq": Awq(),
    "fp8": Fp8Format(),
    "mxfp4": Mxfp4(),
}
WARNINGS: Mapping[str, str] = {
    "int3": "int3: three bits cost small models much of what they know, and no fast kernel reads them; int4 is a fifth "
    "larger, better and faster",
    "int2": "int2: two bits ruin any model that was not trained for them: an experiment, not a way to serve; use int4",
}


def choose(stored: Quantization | None, wish: str = "auto") -> Format:
    """`wish` is a name of ON_LOAD, or "auto"."""
    if wish != "auto":
        return ON_LOAD[wish]
    if stored is None:
        return DenseFormat()
    if stored.method == "gptq":
        return Gptq(stored.first_zero, stored.needed)
    return (
        Compressed(stored.needed)
        if stored.method == "compressed-tensors"
        else READY_MADE[stored.method]
    )
