"""Weights in full precision. Every other format is compared with this one.

Native CPU kernels multiply float32 activations with weights of 16 or 32 bits, as the checkpoint has
them. So 16-bit weights take half the memory of float32 and give the same products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
import torch.nn.functional as F

from bloomery.fusion import ActivationEpilogue, Epilogue, NormPrologue
from bloomery.kernels.gemv import (
    gemv_is_faster,
    gemv_triton,
    precompute_norm_shift,
    supports_gemv,
)
from bloomery.kernels.launch import use_triton
from bloomery.kernels.lora import FusedLora
from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool
from bloomery.quant.base import (
    CheckpointTensors,
    LinearSpec,
    PreparedWeight,
    find_weight_name,
    get_tensor,
)
from bloomery.quant.lazy_tensor import LazyTensor, Range
from bloomery.quant.native import NativeWeight

# The epilogue that cuBLASLt fuses with a product, and the number of tokens above which it is used.
CUBLAS_EPILOGUE = ActivationEpilogue("gelu_tanh", gated=False)
MIN_CUBLAS_EPILOGUE_TOKENS = 256
# Up to this many tokens a CPU's BLAS is a quarter faster with the weights as the left operand.
MAX_WEIGHTS_LEFT_TOKENS = 48


@dataclass(frozen=True)
class DenseMatrix:
    """A matrix [out, in] in full precision, not read yet."""

    weight: LazyTensor

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.weight.shape
        return rows, cols

    def rows(self, ranges: Sequence[Range]) -> Self:
        return replace(self, weight=self.weight.rows(ranges))

    def cols(self, start: int, end: int) -> Self:
        return replace(self, weight=self.weight.cols(start, end))

    def cat(self, others: Sequence[Self]) -> Self:
        other_weights = [other.weight for other in others]
        return replace(self, weight=self.weight.cat(other_weights))

    def prepare(
        self, dtype: torch.dtype, device: torch.device, pool: ThreadPool | None = None
    ) -> PreparedWeight:
        stored = self.weight.dtype
        if runs_natively(dtype, device, pool) and stored in ops.FLOAT_KINDS:
            return prepare_dense(self.weight.load(stored, device), dtype, pool)
        # The read may still be in progress. The owner of the source waits before the model runs.
        tensor = self.weight.start_load(dtype, device).tensor
        return DenseWeight(tensor)

    def load_dense(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.weight.load(dtype, device)


class DenseFormat:
    """One tensor per linear layer: `name.weight`, or `name` for stacked experts."""

    def open_matrix(self, tensors: CheckpointTensors, linear: LinearSpec) -> DenseMatrix:
        weight = get_tensor(
            tensors,
            find_weight_name(tensors, linear.name),
            linear.shape,
            transposed=linear.transposed,
            expert=linear.expert,
        )
        return DenseMatrix(weight)


def runs_natively(dtype: torch.dtype, device: torch.device, pool: ThreadPool | None) -> bool:
    """Whether native CPU kernels multiply weights with activations of this dtype."""
    return pool is not None and device.type == "cpu" and dtype == torch.float32


def prepare_dense(
    weight: torch.Tensor, dtype: torch.dtype, pool: ThreadPool | None
) -> DenseWeight | NativeWeight:
    """Prepare weights [out, in], of this dtype or a narrower one, for activations of the dtype."""
    if pool is None or not runs_natively(dtype, weight.device, pool):
        return DenseWeight(weight.to(dtype))
    return NativeWeight(ops.NativeMatrix.from_floats(pool, weight), pool)


@dataclass(frozen=True)
class DenseWeight:
    """Weights [out, in] in full precision on the device, multiplied by torch or Triton."""

    weight: torch.Tensor
    # What layer norms that are fused before the product add for every x, by id() of the norm.
    norm_shifts: dict[int, torch.Tensor] = field(default_factory=dict, compare=False)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weight[rows]

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.device.type == "cpu" and 1 < len(x) <= MAX_WEIGHTS_LEFT_TOKENS:
            y = (self.weight @ x.t()).t()
            if bias is not None:
                y = y + bias
            return y.contiguous()
        return F.linear(x, self.weight, bias)

    def fused_linear(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        prologue: NormPrologue | None,
        epilogue: Epilogue,
    ) -> torch.Tensor | None:
        num_tokens = len(x)
        if (
            x.is_cuda
            and num_tokens > MIN_CUBLAS_EPILOGUE_TOKENS
            and prologue is None
            and bias is not None
            and epilogue == CUBLAS_EPILOGUE
        ):
            return torch._addmm_activation(bias, x, self.weight.t(), use_gelu=True)
        if not gemv_is_faster(num_tokens, self.weight, prologue, epilogue):
            return None
        norm_shift = self.norm_shifts.get(id(prologue))
        return gemv_triton(x, self.weight, bias, prologue, epilogue, norm_shift=norm_shift)

    def fused_lora(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        prologue: NormPrologue | None,
        epilogue: Epilogue,
        lora: FusedLora,
    ) -> torch.Tensor | None:
        """Like `fused_linear`, with the adapter of the only row; None if there is no kernel.

        The prologue must not be a layer norm.
        """
        if not use_triton(x) or not supports_gemv(self.weight, epilogue):
            return None
        if lora.matrices.a.dtype != self.weight.dtype:
            return None  # the kernel multiplies rows of A as it does rows of the weight
        return gemv_triton(x, self.weight, bias, prologue, epilogue, lora=lora)

    def prepare_prologue(self, prologue: NormPrologue) -> None:
        """Precompute the part of a layer norm before the product that does not depend on x.

        It must be done before CUDA graphs are captured, because a capture runs nothing. Without
        it, every product computes that part again (see kernels/gemv.py).
        """
        if prologue.kind == "layer":
            self.norm_shifts[id(prologue)] = precompute_norm_shift(self.weight, prologue)
