"""An attention block equals its equations, for all features: in torch, native, traced and split.

The equations are computed in float64 from the tensors as a checkpoint stores them, for a whole
sequence at once, without a KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from bloomery.attention.base import AttentionBackend, AttentionMetadata, kv_cache_shape
from bloomery.attention.cpu_paged import CpuPagedAttention
from bloomery.attention.torch_paged import TorchPagedAttention
from bloomery.errors import UnsupportedModel
from bloomery.fusion import NormPrologue
from bloomery.kernels.rope_cache import rotate_pairs
from bloomery.layers.attention import ForwardContext
from bloomery.layers.linear import LinearLayer, materialize
from bloomery.layers.rope import build_query_scales, build_rope_table
from bloomery.layout import TensorParallelLayout, gate_size
from bloomery.models.decoder import AttentionBlock, load_attention_block
from bloomery.models.weights import ModelWeights
from bloomery.native.thread_pool import ThreadPool, TraceArena
from bloomery.native.trace import record_trace
from bloomery.spec import (
    AttentionGateSpec,
    AttentionSpec,
    FusedTensor,
    NormSpec,
    QueryScaling,
    RopeSpec,
    SplitTensors,
    TensorNames,
)
from tests.quant.formats import MemoryTensors

CPU = torch.device("cpu")
HIDDEN = 24
STEPS = (0, 9, 20, 21, 22)  # first tokens of two prefill chunks, then of two decodes
BLOCK_SIZE = 4
RMS = NormSpec("rms", 1e-5)
BARE = NormSpec("rms", 1e-5, weight=False)
ROPE = RopeSpec(16, 100.0)
SPECS = {
    "packed gate": AttentionSpec(4, 2, 16, ROPE, qk_norm=RMS, gate=AttentionGateSpec("packed")),
    "packed gate of heads": AttentionSpec(
        4, 2, 16, ROPE, bias=True, gate=AttentionGateSpec("packed", per_head=True)
    ),
    "separate gate": AttentionSpec(
        4, 2, 16, ROPE, bias=True, out_bias=True, window=6, gate=AttentionGateSpec()
    ),
    "softplus gate of heads, sinks": AttentionSpec(
        4,
        2,
        16,
        ROPE,
        sinks=True,
        window=7,
        qk_norm=RMS,
        gate=AttentionGateSpec(per_head=True, activation="softplus"),
    ),
    "shared keys": AttentionSpec(
        4, 2, 16, ROPE, qk_norm=RMS, v_norm=BARE, keys_as_values=True, scale=1.0
    ),
    "shared keys, bias and gate": AttentionSpec(
        4, 4, 16, ROPE, bias=True, keys_as_values=True, v_norm=RMS, gate=AttentionGateSpec()
    ),
    "shared keys, norm of all heads": AttentionSpec(
        4,
        2,
        16,
        ROPE,
        qk_norm=RMS,
        qk_norm_over="all",
        keys_as_values=True,
        gate=AttentionGateSpec(),
    ),
    "norm after rope, chunk": AttentionSpec(
        4, 2, 16, RopeSpec(8, 50.0, True), qk_norm=BARE, qk_norm_after_rope=True, chunk=6
    ),
    "norm of each head after rope": AttentionSpec(
        4, 2, 16, ROPE, qk_norm=RMS, qk_norm_over="each", qk_norm_after_rope=True
    ),
    "scaled queries without rope": AttentionSpec(
        4, 1, 16, query_scaling=QueryScaling(0.5, 4, offset=1)
    ),
    "scaled queries with rope": AttentionSpec(
        4, 2, 16, ROPE, query_scaling=QueryScaling(0.3, 3), sinks=True, clip=0.5
    ),
    "wide heads": AttentionSpec(
        2, 2, 320, ROPE, v_norm=RMS, sinks=True, gate=AttentionGateSpec(per_head=True)
    ),
}
NAMES = TensorNames(
    embed="",
    layer="",
    attn_qkv=SplitTensors(("q", "k", "v")),
    attn_out="o",
    mlp_up="",
    mlp_down="",
    extra={
        "q_norm": "q_norm",
        "k_norm": "k_norm",
        "v_norm": "v_norm",
        "sinks": "sinks",
        "attn_gate": "gate",
    },
)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    pool = ThreadPool(1)
    yield pool
    pool.close()


def make_tensors(spec: AttentionSpec) -> dict[str, torch.Tensor]:
    """Random tensors of a block, as a checkpoint stores them."""
    torch.manual_seed(0)
    dim = spec.head_dim
    q_size = spec.num_heads * dim
    kv_size = spec.num_kv_heads * dim
    stored_gate = None if spec.gate is None else spec.gate.stored
    sizes = {"q": q_size + (gate_size(spec) if stored_gate == "packed" else 0), "k": kv_size}
    if not spec.keys_as_values:
        sizes["v"] = kv_size
    tensors = {f"{name}.weight": torch.randn(size, HIDDEN) / 4 for name, size in sizes.items()}
    if spec.bias:
        tensors |= {f"{name}.bias": torch.randn(size) for name, size in sizes.items()}
    if stored_gate == "separate":
        tensors["gate.weight"] = torch.randn(gate_size(spec), HIDDEN) / 2
    tensors["o.weight"] = torch.randn(HIDDEN, q_size) / q_size**0.5
    if spec.out_bias:
        tensors["o.bias"] = torch.randn(HIDDEN)
    for name, heads in (("q_norm", spec.num_heads), ("k_norm", spec.num_kv_heads)):
        if spec.qk_norm is not None and spec.qk_norm.weight:
            shapes = {"head": (dim,), "each": (heads, dim), "all": (heads * dim,)}
            tensors[f"{name}.weight"] = torch.rand(shapes[spec.qk_norm_over]) + 0.5
    if spec.v_norm is not None and spec.v_norm.weight:
        tensors["v_norm.weight"] = torch.rand(dim) + 0.5
    if spec.sinks:
        tensors["sinks"] = torch.randn(spec.num_heads)
    return tensors


# ---- the equations -------------------------------------------------------------------------------


def attend_by_equations(
    spec: AttentionSpec, tensors: dict[str, torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """x [tokens, hidden] -> [tokens, hidden], in float64."""
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    dim = spec.head_dim
    q = project(x, "q", tensors)
    k = project(x, "k", tensors).unflatten(-1, (-1, dim))
    gate = None
    if spec.gate is not None and spec.gate.stored == "packed":
        q, gate = q.unflatten(-1, (spec.num_heads, -1)).tensor_split([dim], -1)
    elif spec.gate is not None:
        gate = project(x, "gate", tensors).unflatten(-1, (spec.num_heads, -1))
        q = q.unflatten(-1, (-1, dim))
    else:
        q = q.unflatten(-1, (-1, dim))
    v = k if spec.keys_as_values else project(x, "v", tensors).unflatten(-1, (-1, dim))
    if spec.clip is not None:
        q, k, v = (heads.clamp(-spec.clip, spec.clip) for heads in (q, k, v))
    if spec.v_norm is not None:
        v = normalize(v, tensors.get("v_norm.weight"))
    q = transform(q, "q_norm", spec, tensors)
    k = transform(k, "k_norm", spec, tensors)
    if spec.query_scaling is not None:
        scaling = spec.query_scaling
        positions = torch.arange(len(x), dtype=torch.float64)
        periods = ((positions + scaling.offset) / scaling.period).floor()
        q = q * (1 + scaling.beta * (1 + periods).log())[:, None, None]
    heads_per_kv_head = spec.num_heads // spec.num_kv_heads
    k = k.repeat_interleave(heads_per_kv_head, 1)
    v = v.repeat_interleave(heads_per_kv_head, 1)
    out = torch.empty_like(q)
    scale = dim**-0.5 if spec.scale is None else spec.scale
    for token in range(len(x)):
        first = 0 if spec.window is None else max(token - spec.window + 1, 0)
        if spec.chunk is not None:
            first = max(first, token - token % spec.chunk)
        visible = slice(first, token + 1)
        weights = (torch.einsum("hd,khd->hk", q[token], k[visible]) * scale).exp()
        total = weights.sum(1)
        if spec.sinks:
            total = total + tensors["sinks"].exp()
        out[token] = torch.einsum("hk,khd->hd", weights / total[:, None], v[visible])
    if spec.gate is not None and gate is not None:
        softplus = spec.gate.activation == "softplus"
        out = out * (F.softplus(gate) if softplus else gate.sigmoid())
    return project(out.flatten(1), "o", tensors)


def project(x: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.linear(x.double(), tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def normalize(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return normed if weight is None else normed * weight


def transform(
    x: torch.Tensor, norm: str, spec: AttentionSpec, tensors: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Norm and rotate x [tokens, heads, dim]."""
    weight = tensors.get(f"{norm}.weight")

    def norm_heads(x: torch.Tensor) -> torch.Tensor:
        if spec.qk_norm is None:
            return x
        if spec.qk_norm_over == "all":
            return normalize(x.flatten(1), weight).view_as(x)
        return normalize(x, weight)

    if not spec.qk_norm_after_rope:
        x = norm_heads(x)
    if isinstance(spec.position, RopeSpec):
        cos, sin = build_rope_table(spec.position, len(x))
        x = rotate_pairs(x.float(), cos, sin, spec.position.interleaved).double()
    return norm_heads(x) if spec.qk_norm_after_rope else x


# ---- the block -----------------------------------------------------------------------------------


class BlockRun:
    """Runs a sequence through a block, step by step, over a KV cache."""

    def __init__(
        self,
        spec: AttentionSpec,
        tensors: dict[str, torch.Tensor],
        backend: AttentionBackend,
        pool: ThreadPool | None = None,
        layout: TensorParallelLayout = TensorParallelLayout(),  # noqa: B008 (it is frozen)
        names: TensorNames = NAMES,
    ):
        source = cast(Any, MemoryTensors(tensors))
        weights = ModelWeights(source, names, torch.float32, CPU, layout=layout, pool=pool)
        self.block = load_attention_block(spec, HIDDEN, weights, "", None)
        self.backend = backend
        self.pool = pool
        num_tokens = STEPS[-1]
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        self.block_table = torch.randperm(num_blocks).tolist()
        self.kv_cache = torch.zeros(kv_cache_shape(self.block.spec, num_blocks, BLOCK_SIZE))
        self.ropes: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]] = {}
        self.scales: dict[QueryScaling, torch.Tensor] = {}
        if isinstance(spec.position, RopeSpec):
            self.ropes[spec.position] = build_rope_table(spec.position, num_tokens)
        if spec.query_scaling is not None:
            self.scales[spec.query_scaling] = build_query_scales(spec.query_scaling, num_tokens)

    def step(self, x: torch.Tensor, start: int, end: int, traced: bool = False) -> torch.Tensor:
        metadata = AttentionMetadata.from_host(
            [end - start], [end], [self.block_table], BLOCK_SIZE, CPU
        )
        positions: torch.Tensor | None = metadata.positions
        ropes = self.ropes
        scales = self.scales
        if self.pool is None:  # tables of the step's tokens
            ropes = {rope: (cos[start:end], sin[start:end]) for rope, (cos, sin) in ropes.items()}
            scales = {scaling: table[start:end] for scaling, table in scales.items()}
            positions = None
        context = ForwardContext(
            self.backend,
            self.backend.prepare(metadata),
            metadata.slot_mapping,
            ropes,
            positions,
            query_scales=scales,
        )
        if not traced or self.pool is None:
            return materialize(self.block(x[start:end], self.kv_cache, context))
        out = torch.zeros(end - start, HIDDEN)

        def work() -> None:
            out.copy_(materialize(self.block(x[start:end], self.kv_cache, context)))

        trace = record_trace(self.pool, work, TraceArena(1 << 20))
        assert not out.any()  # recorded, not executed
        trace.replay()
        return out

    def run(self, x: torch.Tensor, trace_decodes: bool = False) -> torch.Tensor:
        steps = pairwise(STEPS)
        return torch.cat(
            [self.step(x, start, end, trace_decodes and end - start == 1) for start, end in steps]
        )


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_block_equals_its_equations(spec: AttentionSpec, pool: ThreadPool) -> None:
    tensors = make_tensors(spec)
    x = torch.randn(STEPS[-1], HIDDEN)
    expected = attend_by_equations(spec, tensors, x)
    native = CpuPagedAttention(pool)
    torch_backend = TorchPagedAttention()
    runs = {
        "torch": BlockRun(spec, tensors, torch_backend).run(x),
        "native": BlockRun(spec, tensors, native, pool).run(x),
        "traced": BlockRun(spec, tensors, native, pool).run(x, trace_decodes=True),
    }
    ranks = [TensorParallelLayout(rank, 2) for rank in range(2)]
    runs["split"] = sum(
        (BlockRun(spec, tensors, torch_backend, layout=rank).run(x) for rank in ranks),
        torch.zeros(()),
    )
    runs["split, native"] = sum(
        (BlockRun(spec, tensors, native, pool, rank).run(x) for rank in ranks),
        torch.zeros(()),
    )
    for name, actual in runs.items():
        error = (actual.double() - expected).abs().max() / expected.abs().max()
        assert error < 1e-5, name


def test_a_packed_gate_may_be_in_a_fused_matrix() -> None:
    spec = SPECS["packed gate"]
    tensors = make_tensors(spec)
    fused = {
        name: tensor for name, tensor in tensors.items() if name[0] not in "qkv" or "_" in name
    }
    fused["qkv.weight"] = torch.cat([tensors[f"{name}.weight"] for name in "qkv"])
    names = TensorNames("", "", FusedTensor("qkv"), "o", "", "", extra=NAMES.extra)
    x = torch.randn(STEPS[-1], HIDDEN)
    actual = BlockRun(spec, fused, TorchPagedAttention(), names=names).run(x)
    expected = BlockRun(spec, tensors, TorchPagedAttention()).run(x)
    assert torch.equal(actual, expected)


def test_a_norm_of_all_heads_after_rope_is_refused() -> None:
    spec = AttentionSpec(2, 2, 16, ROPE, qk_norm=RMS, qk_norm_over="all", qk_norm_after_rope=True)
    linear = LinearLayer(cast(Any, None))
    norm = NormPrologue("rms", torch.ones(32), None, 1e-5)
    with pytest.raises(UnsupportedModel, match="after rope must span one head"):
        AttentionBlock(spec, linear, linear, norm, norm)
