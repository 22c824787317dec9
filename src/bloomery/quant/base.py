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
        """Return these rows dequantized: [n] -> [n, in]. Embedding lookups use this."""
        ...

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply: x [tokens, in] -> [tokens, out]."""
        ...

    def fused_linear(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        prologue: NormPrologue | None,
        epilogue: Epilogue,
    ) -> torch.Tensor | None:
        """Compute norm, product and epilogue in one kernel.

        Returns None if there is no such kernel or separate kernels are faster.
        """
        ...


class WeightMatrix(Protocol):
    """A matrix [out, in] in a checkpoint, not read yet."""

    @property
    def shape(self) -> tuple[int, int]: ...
    def rows(self, ranges: Sequence[Range]) -> Self: ...
    def cols(self, start: int, end: int) -> Self: ...
    def cat(self, others: Sequence[Self]) -> Self: ...
    def prepare(
        self, dtype: torch.dtype, device: torch.device, pool: ThreadPool | None = None
    ) -> PreparedWeight:
        """Read the selected part onto the device, in the layout that the kernels need.

        `dtype` is the type of activations. With a `pool`, native CPU kernels do the products.
        """
        ...

    def load_dense(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Read the selected part and dequantize it: [out, in]. The reference for `prepare`."""
        ...


class CheckpointTensors(Protocol):
    """The tensors of a checkpoint, by name."""

    def tensor(
        self, name: str, shape: Sequence[int], transposed: bool = False, expert: int | None = None
    ) -> LazyTensor:
        """Find the vector [out] or matrix [out, in] of that name; it must have that shape.

        `transposed`: the file stores it as [in, out]. `expert`: the file stores a stack of expert
        matrices, and this is the index of the matrix in it.
        """
        ...

    def has(self, name: str) -> bool: ...
    def shape(self, name: str) -> tuple[int, ...]:
        """The stored shape. It tells how a packed tensor is packed."""
        ...


class LinearSpec(NamedTuple):
    """The matrix of a linear layer, as the model requests it."""

    name: str  # in the checkpoint, without `.weight`
    shape: tuple[int, int]  # [out, in]
    transposed: bool = False  # the checkpoint stores [in, out]
    expert: int | None = None  # index of the matrix in a stored stack of experts
    in_decoder_layer: bool = True  # False: an embedding, the LM head or a projection next to them
    unquantized: bool = False  # never quantized on load, such as the router of experts


class WeightFormat(Protocol):
    """How a checkpoint stores the weights of its linear layers."""

    def open_matrix(self, tensors: CheckpointTensors, linear: LinearSpec) -> WeightMatrix:
        """Find the tensors of a linear layer and check them, without reading the weights.

        Raises CheckpointError if a tensor is missing or has the wrong shape or dtype.
        """
        ...


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
            f"{name}: has dtype {tensor.dtype}, expected {expected}; the checkpoint is damaged, or "
            "its quantization_config does not describe how it is packed"
        )
    return tensor


def find_weight_name(tensors: CheckpointTensors, name: str) -> str:
    """Return the name of a layer's weights; stacked experts may have it without `.weight`."""
    full_name = f"{name}.weight"
    is_bare = not tensors.has(full_name) and tensors.has(name)
    return name if is_bare else full_name


def get_shape(tensors: CheckpointTensors, name: str, num_dims: int = 2) -> tuple[int, ...]:
    """Return the stored shape of a tensor after checking its number of dimensions."""
    shape = tensors.shape(name)
    if len(shape) != num_dims or 0 in shape:
        raise CheckpointError(
            f"{name}: has shape {list(shape)}, expected {num_dims} dimensions that are not empty; "
            "the checkpoint is damaged"
        )
    return shape


def mark_as_used(tensors: CheckpointTensors, name: str, *suffixes: str) -> None:
    """Look up tensors that are not needed, so that they are not reported as unused."""
    for suffix in suffixes:
        full_name = f"{name}.{suffix}"
        if tensors.has(full_name):
            tensors.tensor(full_name, tensors.shape(full_name))


def load_rows(tensor: LazyTensor, ranges: Sequence[Range], device: torch.device) -> torch.Tensor:
    """Load these rows of a stored tensor, in its stored dtype."""
    return tensor.rows(ranges).load(tensor.dtype, device)


def select_rows(tensor: torch.Tensor, ranges: Sequence[Range]) -> torch.Tensor:
    """Copy these rows of a tensor in memory, in this order."""
    selected = []
    for start, end in ranges:
        selected.append(tensor[start:end])
    return torch.cat(selected)
