"""Every weight format as a function from a weight [out, in] to its WeightMatrix.

A format joins the shared tests by an entry in FORMATS. Checkpoint formats join by PACKED_CASES,
formats that quantize on load and GGUF types join by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import gguf
import torch

from bloomery.families.quantization import read_quantization
from bloomery.families.reader import ConfigReader
from bloomery.native.thread_pool import ThreadPool
from bloomery.quant.base import LinearSpec, PreparedWeight, WeightFormat, WeightMatrix
from bloomery.quant.dense import DenseFormat
from bloomery.quant.gguf import GgufMatrix
from bloomery.quant.gguf_blocks import BLOCK_DECODERS
from bloomery.quant.lazy_tensor import LazyTensor, QuantizedBlocks, TensorPiece
from bloomery.quant.loaded_weight import dequantize
from bloomery.quant.quantized_weight import prepare_weight
from bloomery.quant.select import ON_LOAD_FORMATS, select_format
from tests.parity import gguf_writer
from tests.quant.packers import PACKED_CASES

CPU = torch.device("cpu")
QuantizeMatrix = Callable[[torch.Tensor], WeightMatrix]


class MemoryTensors:
    """The tensors of a checkpoint, in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self.tensors = {
            name: tensor.reshape(1) if tensor.dim() == 0 else tensor
            for name, tensor in tensors.items()
        }

    def tensor(
        self, name: str, shape: Sequence[int], transposed: bool = False, expert: int | None = None
    ) -> LazyTensor:
        tensor = self.tensors[name].T if transposed else self.tensors[name]
        assert tuple(tensor.shape) == tuple(shape), name
        return LazyTensor.from_tensor(tensor)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)


def open_matrix(
    weight_format: WeightFormat, tensors: Mapping[str, torch.Tensor], shape: Sequence[int]
) -> WeightMatrix:
    """The matrix [out, in] of a linear layer whose tensors are given by suffix."""
    rows, columns = shape
    checkpoint = MemoryTensors({f"m.{suffix}": tensor for suffix, tensor in tensors.items()})
    return weight_format.open_matrix(checkpoint, LinearSpec("m", (rows, columns)))


def select_packed_format(name: str) -> WeightFormat:
    """The format that the quantization_config of a packed case selects."""
    config = ConfigReader({"quantization_config": PACKED_CASES[name].config})
    return select_format(read_quantization(config))


def dense(weight: torch.Tensor) -> WeightMatrix:
    return open_matrix(DenseFormat(), {"weight": weight}, weight.shape)


def quantized_on_load(name: str) -> QuantizeMatrix:
    return lambda weight: open_matrix(ON_LOAD_FORMATS[name], {"weight": weight}, weight.shape)


def packed_checkpoint(name: str) -> QuantizeMatrix:
    weight_format = select_packed_format(name)
    pack = PACKED_CASES[name].pack
    return lambda weight: open_matrix(weight_format, pack(weight).tensors, weight.shape)


class PackedGgufMatrix(GgufMatrix):
    """GGUF blocks for packed kernels, even in float32 on a CPU."""

    def prepare(
        self, dtype: torch.dtype, device: torch.device, pool: ThreadPool | None = None
    ) -> PreparedWeight:
        return prepare_weight(self.load_packed(dtype, device), dtype, pool)

    def load_dense(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        weights = self.load_packed(dtype, device)
        return torch.cat([dequantize(weight, dtype) for weight in weights])


def store_gguf_blocks(kind: str, weight: torch.Tensor) -> LazyTensor:
    """A weight stored as GGUF blocks. Its columns need not fill the last block of a row."""
    number = gguf.GGMLQuantizationType[kind]
    rows, columns = weight.shape
    values_per_block, bytes_per_block = gguf.GGML_QUANT_SIZES[number]
    padded = torch.nn.functional.pad(weight, (0, -columns % values_per_block))
    raw = gguf_writer.quantize_blocks(padded.contiguous().numpy(), number)
    values = torch.from_numpy(gguf_writer.dequantize_blocks(raw, number))
    blocks = QuantizedBlocks(
        kind, values_per_block, bytes_per_block, LazyTensor.from_tensor(torch.from_numpy(raw))
    )
    piece = TensorPiece(
        lambda r, c: values[slice(*r), slice(*(c or (0, columns)))],
        (0, rows),
        (0, columns),
        None,
        blocks,
    )
    return LazyTensor((piece,), torch.float32)


def packed_gguf(kind: str) -> QuantizeMatrix:
    return lambda weight: PackedGgufMatrix(store_gguf_blocks(kind, weight))


FORMATS: dict[str, QuantizeMatrix] = {
    "dense": dense,
    **{name: quantized_on_load(name) for name in ON_LOAD_FORMATS},
    **{name: packed_checkpoint(name) for name in PACKED_CASES},
    **{kind: packed_gguf(kind) for kind in BLOCK_DECODERS},
}
