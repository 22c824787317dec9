"""Comparisons of fused linear kernels with their references, for tests and benchmarks.

Tests run the kernels under Triton's interpreter, benchmarks/products.py runs them on a GPU. Text
describes a case: the prologue is "", "rms", "layer" or "layer bare" (no weight), and the epilogue
is one of

    ""                               nothing
    "residual"                       residual + 0.7 * y
    "gate NAME", "activate NAME"     an activation, gated or not
    "qkv HEADS KV_HEADS HEAD_DIM ROPE_DIM [interleaved] [tables] [scaled]"
                                     rope and KV cache; tables: cos and sin of all positions
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bloomery.fusion import (
    ActivationEpilogue,
    Epilogue,
    NormPrologue,
    QkTransform,
    QkvEpilogue,
    ResidualEpilogue,
)
from bloomery.kernels import gemv
from tests.kernels.oracles import relative_error, run_in_poisoned_memory

# The largest relative error a linear kernel may have, by the type of its inputs.
LINEAR_ERROR_LIMITS = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}
NUM_CACHE_SLOTS = 40
MAX_POSITION = 50

LinearShape = tuple[int, int, str, str]  # rows, columns, prologue, epilogue


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model's linear layers."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm: str = "rms"
    activation: str = "silu"
    gated: bool = True
    rope: bool = True
    bias: bool = False

    def linear_shapes(self) -> dict[str, LinearShape]:
        """Rows, columns, prologue and epilogue of every linear layer, by name."""
        hidden = self.hidden_size
        attention = self.num_heads * self.head_dim
        qkv = attention + 2 * self.num_kv_heads * self.head_dim
        up = self.intermediate_size * (2 if self.gated else 1)
        rope_dim = self.head_dim if self.rope else 0
        qkv_epilogue = f"qkv {self.num_heads} {self.num_kv_heads} {self.head_dim} {rope_dim}"
        up_epilogue = f"{'gate' if self.gated else 'activate'} {self.activation}"
        return {
            "qkv": (qkv, hidden, self.norm, qkv_epilogue),
            "o": (hidden, attention, "", "residual"),
            "up": (up, hidden, self.norm, up_epilogue),
            "down": (hidden, self.intermediate_size, "", "residual"),
            "head": (self.vocab_size, hidden, self.norm, ""),
        }


MODEL_SHAPES = {
    "8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128256),
    "1b": ModelShape(16, 2048, 32, 8, 64, 8192, 128256),
    "octocoder": ModelShape(
        40, 6144, 48, 1, 128, 24576, 49152, "layer", "gelu_tanh", False, False, True
    ),
    "bloom-7b": ModelShape(
        30, 4096, 32, 32, 128, 16384, 250880, "layer", "gelu_tanh", False, False, True
    ),
}


@dataclass
class LinearCase:
    """A dense linear layer with prologue and epilogue, with random weights."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    prologue: NormPrologue | None
    epilogue_text: str
    kv_cache: torch.Tensor | None = None
    norm_shift: torch.Tensor | None = None

    @classmethod
    def make(
        cls,
        rows: int,
        columns: int,
        prologue: str,
        epilogue: str,
        bias: bool,
        dtype: torch.dtype,
        device: str,
    ) -> LinearCase:
        """Make a case from its sizes and descriptions."""
        weight = torch.empty(rows, columns, device=device).normal_(0, columns**-0.5).to(dtype)
        norm_weight, norm_bias = torch.rand(2, columns, device=device) + 0.5
        norm = None
        if prologue == "rms":
            norm = NormPrologue("rms", norm_weight, None, 1e-5)
        elif prologue == "layer":
            norm = NormPrologue("layer", norm_weight, norm_bias, 1e-5)
        elif prologue == "layer bare":
            norm = NormPrologue("layer", None, None, 1e-5)
        bias_vector = torch.randn(rows, device=device).to(dtype) if bias else None
        case = cls(weight, bias_vector, norm, epilogue)
        if norm is not None and norm.kind == "layer":
            case.norm_shift = gemv.precompute_norm_shift(weight, norm)
        if epilogue.startswith("qkv"):
            _, num_kv_heads, head_dim, _ = map(int, epilogue.split()[1:5])
            case.kv_cache = torch.zeros(
                2, NUM_CACHE_SLOTS, num_kv_heads, head_dim, dtype=dtype, device=device
            )
        return case

    def make_epilogue(
        self, tokens: int, dtype: torch.dtype, residual: torch.Tensor | None = None
    ) -> Epilogue:
        """Make the epilogue with random inputs. Without `residual` a random one is scaled by 0.7.

        All epilogues of a case write to its KV cache.
        """
        device = self.weight.device
        kind, *options = self.epilogue_text.split() or [""]
        match kind:
            case "residual" if residual is not None:
                return ResidualEpilogue(residual, 1.0)
            case "residual":
                residual = torch.randn(tokens, len(self.weight), device=device).to(dtype)
                return ResidualEpilogue(residual, 0.7)
            case "gate" | "activate":
                return ActivationEpilogue(options[0], kind == "gate")
            case "qkv":
                return self._make_qkv_epilogue(tokens, options)
        return None

    def _make_qkv_epilogue(self, tokens: int, options: list[str]) -> QkvEpilogue:
        device = self.weight.device
        rope_dim = int(options[3])
        has_tables = "tables" in options
        num_angles = MAX_POSITION if has_tables else tokens
        angles = torch.rand(num_angles, rope_dim // 2, device=device) * 6
        positions = None
        if has_tables:
            positions = torch.randint(MAX_POSITION, (tokens,), device=device, dtype=torch.int32)
        cos_sin = None
        if rope_dim:
            cos_sin = (angles.cos(), angles.sin())
        query_scales = None
        if "scaled" in options:
            query_scales = torch.rand(num_angles, device=device) + 1
        transform = QkTransform(
            cos_sin, positions, "interleaved" in options, query_scales=query_scales
        )
        slot_mapping = torch.randperm(NUM_CACHE_SLOTS, device=device)[:tokens].int()
        assert self.kv_cache is not None
        return QkvEpilogue(self.kv_cache, slot_mapping, transform)


def to_float64(value: object) -> object:
    """Return a copy of the value in float64, with a KV cache of its own.

    Norms and rope tables stay as they are, because they are float32 everywhere.
    """
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    is_named_tuple = isinstance(value, tuple) and hasattr(value, "_fields")
    if is_named_tuple and not isinstance(value, NormPrologue):
        return type(value)(*map(to_float64, value))
    return value


@contextmanager
def without_pdl(disabled: bool) -> Iterator[None]:
    """Launch GEMV kernels without programmatic dependent launch, if `disabled`."""
    pdl_options = gemv.pdl_options
    if disabled:
        gemv.pdl_options = lambda device: {"PDL": False}
    try:
        yield
    finally:
        gemv.pdl_options = pdl_options


def compare_with_reference(
    actual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    case: LinearCase,
    epilogue: Epilogue,
) -> float:
    """Relative error of a fused linear and of the KV cache it has written, against float64.

    `weight` is in float64 and replaces the weight of the case.
    """
    epilogue64 = to_float64(epilogue)
    if isinstance(epilogue64, QkvEpilogue):
        epilogue64.kv_cache.zero_()
    expected = gemv.fused_linear_reference(
        x.double(), weight, to_float64(case.bias), case.prologue, epilogue64
    )
    error = relative_error(actual, expected)
    if isinstance(epilogue64, QkvEpilogue):
        for written, reference in zip(epilogue.kv_cache, epilogue64.kv_cache, strict=True):
            error = max(error, relative_error(written, reference))
    return error


def check_gemv(
    tokens: int,
    rows: int,
    columns: int,
    prologue: str,
    epilogue: str,
    bias: bool,
    dtype: torch.dtype,
    device: str,
    tiling: gemv.GemvTiling | None = None,
    disable_pdl: bool = False,
) -> float:
    """Relative error of the dense GEMV kernel."""
    case = LinearCase.make(rows, columns, prologue, epilogue, bias, dtype, device)
    x = (torch.randn(tokens, columns, device=device) + 0.3).to(dtype)
    call_epilogue = case.make_epilogue(tokens, dtype)
    with without_pdl(disable_pdl):
        actual = run_in_poisoned_memory(
            lambda: gemv.gemv_triton(
                x, case.weight, case.bias, case.prologue, call_epilogue, tiling=tiling
            )
        )
    return compare_with_reference(actual, x, case.weight.double(), case, call_epilogue)
