"""What stands between the two halves of an MLP, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from bloomery.kernels.launch import begin, fused, jit, overlap, tl, wait
from bloomery.native import ops
from bloomery.native.team import team

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
BLOCK = 1024


def gate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """[tokens, gate | up] -> activation(gate) * up."""
    if team().takes(x):
        return ops.elements(ops.GATED, x, activation=activation)
    return activate_rows(x, activation, gated=True) if fused(x) else gate_reference(x, activation)


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    if team().takes(x):
        return ops.elements(ops.ACTIVATED, x, activation=activation)
    return activate_rows(x, activation, gated=False) if fused(x) else ACTIVATIONS[activation](x)


def gate_reference(x: torch.Tensor, activation: str) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return ACTIVATIONS[activation](left) * right


def activate_rows(x: torch.Tensor, activation: str, gated: bool) -> torch.Tensor:
    """The kernel, over contiguous rows."""
    x = x.contiguous()
    width = x.shape[-1] // 2 if gated else x.shape[-1]
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    grid = (out.numel() // width, -(-width // BLOCK))
    activate_kernel[grid](
        x,
        out,
        WIDTH=width,
        BLOCK=BLOCK,
        KIND=activation,
        GATED=gated,
        num_warps=4,
        **overlap(x.device),
    )
    return out


@jit
def activate_kernel(
    x,
    out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = i < WIDTH
    source = x + row * (2 * WIDTH if GATED else WIDTH) + i
    wait(PDL)
    y = activated(tl.load(source, mask=here, other=0.0).to(tl.float32), KIND)
    if GATED:
        y = y * tl.load(source + WIDTH, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + i, y.to(out.dtype.element_ty), mask=here)


@jit
def activated(x, KIND: tl.constexpr):
    """x in float32. tanh(y) is 2 sigmoid(2 y) - 1."""
    if KIND == "silu":
        return x * tl.sigmoid(x)
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        return x * tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    else:
        tl.static_assert(KIND == "relu")
        return tl.maximum(x, 0.0)
