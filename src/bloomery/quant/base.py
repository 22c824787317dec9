"""The interfaces of a weight format.

A format describes how a checkpoint stores the weights of a linear layer. It has three parts:

    WeightFormat     finds the matrix of a linear layer in a checkpoint
    WeightMatrix     that matrix [out, in], not read yet; it can be sliced and concatenated
    PreparedWeight   the matrix on its device, ready to multiply

Every weight layout and every tensor parallel shard is built of three operations on a WeightMatrix:

    rows(ranges)   select output rows, in this order    (column parallel, ungrouping q, k and v)
    cols(a, b)     select input columns                 (row parallel)
    cat(others)    stack on the output axis             (q|k|v, gate|up)

They move ranges, not data, so a rank reads only its own slices. A format is one file of this
package; quant/select.py lists them. Nothing outside of this package depends on a certain format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self

import torch

from bloomery.errors import CheckpointError
from bloomery.fusion import Epilogue, NormPrologue
from bloomery.native.thread_pool import ThreadPool
from bloomery.quant.lazy_tensor import LazyTensor, Range

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class PreparedWeight(Protocol):
    """A matrix [out, in] on its device, ready to multiply."""

    @property
    def nbytes(self) -> int: ...
    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return these rows dequantized: [n] -> [n, in]. This is how embeddings are looked up."""
        ...

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [tokens, in] -> [tokens, out]."""
        ...

    def fused_linear(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        prologue: NormPrologue | None,
        epilogue: Epilogue,
    ) -> torch.Tensor | None:
        """Compute norm, product and epilogue in one kernel; None if no such kernel pays here."""
        ...


class WeightMatrix(Protocol):
    """A matrix [out, in] of some format, not read yet."""

    @property
    def shape(self) -> tuple[int, int]: ...
    def rows(self, ranges: Sequence[Range]) -> Self: ...
    def cols(self, start: int, end: int) -> Self: ...
    def cat(self, others: Sequence[Self]) -> Self: ...
    def prepare(
        self, dtype: torch.dtype, device: torch.device, pool: ThreadPool | None = None
    ) -> PreparedWeight:
        """Read the selected part onto the device, in the layout that the kernels need.

        `dtype` is the type of activations. `pool`: native CPU kernels will multiply.
        """
        ...

    def load_dense(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Read the selected part and dequantize it: [out, in]. The reference for `prepare`."""
        ...


class CheckpointTensors(Protocol):
    """What a format sees of a checkpoint."""

    def tensor(
        self, name: str, shape: Sequence[int], transposed: bool = False, expert: int | None = None
    ) -> LazyTensor:
        """Find the vector [out] or matrix [out, in] of that name; it must have that shape.

        `transposed`: the file stores it as [in, out]. `expert`: the file stores a stack of
        matrices, and this one is meant.
        """
        ...

    def has(self, name: str) -> bool: ...
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape as stored. The shape of a packed tensor tells how it is packed."""
        ...


class LinearSpec(NamedTuple):
    """A matrix that the model asks for."""

    name: str  # in the checkpoint, without `.weight`
    shape: tuple[int, int]  # [out, in]
    transposed: bool = False  # the checkpoint stores [in, out]
    expert: int | None = None  # the checkpoint stores a stack of experts, and this one is meant
    in_decoder_layer: bool = True  # False: an embedding, the LM head or a projection next to them
    unquantized: bool = False  # a router: never quantized on load


class WeightFormat(Protocol):
    """How a checkpoint stores the weights of its linear layers."""

    def open_matrix(self, tensors: CheckpointTensors, linear: LinearSpec) -> WeightMatrix: ...


def get_tensor(
    tensors: CheckpointTensors,
    name: str,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype] = FLOAT_DTYPES,
    transposed: bool = False,
    expert: int | None = None,
) -> LazyTensor:
    """Find a tensor and check its dtype.

    Without the check, bits of another type would be read as plausible but wrong numbers.
    """
    tensor = tensors.tensor(name, shape, transposed, expert)
    if tensor.dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise CheckpointError(
            f"{name}: is {tensor.dtype}, where {expected} belongs; the checkpoint is damaged, or "
            "packed in a way that its quantization_config does not describe"
        )
    return tensor


def get_shape(tensors: CheckpointTensors, name: str, num_dims: int = 2) -> tuple[int, ...]:
    """Find the stored shape of a tensor and check its number of dimensions."""
    shape = tensors.shape(name)
    if len(shape) != num_dims or 0 in shape:
        raise CheckpointError(
            f"{name}: {list(shape)} is not of {num_dims} dimensions; the checkpoint is damaged"
        )
    return shape


def mark_as_used(tensors: CheckpointTensors, name: str, *suffixes: str) -> None:
    """Ask for tensors of a linear layer that need not be read, so that none is reported unused."""
    for suffix in suffixes:
        full_name = f"{name}.{suffix}"
        if tensors.has(full_name):
            tensors.tensor(full_name, tensors.shape(full_name))


def load_rows(tensor: LazyTensor, ranges: Sequence[Range], device: torch.device) -> torch.Tensor:
    """Load these rows of a stored tensor, in its stored dtype."""
    return tensor.rows(ranges).load(tensor.dtype, device)
