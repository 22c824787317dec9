"""Every native operation gives the result of its torch reference, for random shapes."""

from __future__ import annotations

from itertools import product
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from gguf.constants import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.artifacts.gguf import GGML_BLOCKS
from bloomery.attention.base import AttentionMetadata
from bloomery.attention.cpu_paged import CpuPagedAttention
from bloomery.attention.torch_paged import TorchPagedAttention
from bloomery.fusion import (
    ActivationEpilogue,
    NormPrologue,
    QkTransform,
    QkvEpilogue,
    ResidualEpilogue,
)
from bloomery.kernels.activation import activation_reference
from bloomery.kernels.norm import layer_norm_reference, rms_norm_reference
from bloomery.kernels.quantized_kv_cache import kv_cache_nbytes, read_kv_cache, view_kv_cache
from bloomery.kernels.rope_cache import (
    apply_rope_and_cache_reference,
    write_kv_cache,
)
from bloomery.kernels.rows import advance_reference, gather_decode_reference
from bloomery.kernels.sampling_rows import MAX_TOP_LOGPROBS
from bloomery.kernels.select_rows import select_rows
from bloomery.layers.linear import add_scaled, concatenate, split_qkv
from bloomery.layout import gate_size
from bloomery.messages import NewRequestData, ResolvedSampling
from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool
from bloomery.quant.gguf_grids import GRID_DECODERS, load_grid
from bloomery.runtime.sampler import Sampler
from bloomery.spec import AlibiSpec, AttentionGateSpec, AttentionSpec
from tests.kernels.oracles import ALL_ACTIVATIONS, first_visible_position
from tests.parity import gguf_writer

FEW_EXAMPLES = settings(max_examples=15, deadline=None)
SIZES = st.integers(1, 40)
SEEDS = st.integers(0, 99)
KV_CACHE_DTYPES = tuple(ops.KV_CACHE_KINDS)
GGUF_TYPES = tuple(kind for kind in ops.PACKED_TYPES if kind in GGML_BLOCKS)
# The rounding unit of each KV cache dtype, relative to the largest value.
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.int8: 2e-2}


def random_normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_blocks(
    kind: str, rows: int, columns: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks of a GGUF type, and their values according to the gguf package."""
    type_number = GGMLQuantizationType[kind]
    weight = random_normal(seed, rows, columns).numpy()
    raw = gguf_writer.quantize_blocks(weight, type_number)
    values = gguf_writer.dequantize_blocks(raw, type_number)
    return torch.from_numpy(raw), torch.from_numpy(values)


def block_columns(kind: str) -> int:
    """The columns of a block of a GGUF type."""
    return GGML_BLOCKS[kind][0]


def pack_matrix(
    pool: ThreadPool, kind: str, raw: torch.Tensor, columns: int
) -> tuple[ops.NativeMatrix, torch.Tensor]:
    """A native matrix of these blocks, and its values."""
    grid = load_grid(kind) if kind in GRID_DECODERS else None
    segment = ops.pack_segment(pool, kind, raw, columns, grid)
    matrix = ops.NativeMatrix(pool, columns, [segment])
    return matrix, ops.gather_rows(pool, matrix, torch.arange(len(raw)))


def build_kv_cache(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A KV cache of a dtype that holds values [2, slots, kv heads, head dim]."""
    shape = tuple(values.shape)
    memory = torch.zeros(kv_cache_nbytes(shape, dtype), dtype=torch.uint8)
    kv_cache = view_kv_cache(memory, shape, dtype)
    write_kv_cache(values[0], values[1], kv_cache, torch.arange(shape[1]))
    return kv_cache


def round_activations(x: torch.Tensor, pool: ThreadPool) -> torch.Tensor:
    """Activations rounded as the kernels of the pool round them."""
    blocks = x.unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / pool.largest_activation
    return torch.where(scale > 0, (blocks / scale).round() * scale, 0).flatten(-2)


def avoid_rounding_ties(x: torch.Tensor, pool: ThreadPool) -> torch.Tensor:
    """Move values that lie between two codes: compilers differ in how such a value is rounded."""
    blocks = x.unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / pool.largest_activation
    codes = blocks / scale
    is_tie = (codes - codes.floor() - 0.5).abs() < 1e-3
    return torch.where(is_tie, blocks + 0.01 * scale, blocks).flatten(-2)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-3) -> None:
    """Compare relative to the largest value: one activation rounded the other way changes a sum."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max() + 1e-5


# ---- linear layers -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GGUF_TYPES)
@FEW_EXAMPLES
@given(rows=SIZES, width=st.integers(1, 3), tokens=st.integers(1, 9), seed=SEEDS)
def test_products_of_packed_blocks(
    any_pool: ThreadPool, kind: str, rows: int, width: int, tokens: int, seed: int
) -> None:
    pool = any_pool
    columns = block_columns(kind) * width
    raw, values = random_blocks(kind, rows, columns, seed)
    matrix, packed_values = pack_matrix(pool, kind, raw, columns)
    if kind in ops.ROUNDED_TYPES:
        error = (packed_values - values).view(-1, 32)
        step = values.view(-1, 32).abs().amax(1, keepdim=True) / 127
        assert bool((error.abs() <= 0.51 * step).all())
        values = packed_values
    else:
        assert torch.equal(packed_values, values)
    x = avoid_rounding_ties(random_normal(seed + 1, tokens, columns), pool)
    y = ops.linear(pool, matrix, x)
    exact = F.linear(round_activations(x, pool).double(), values.double())
    tolerance = 1e-4 * float(values.abs().max()) * columns**0.5
    assert torch.allclose(y.double(), exact, rtol=1e-4, atol=tolerance)
    one_by_one = torch.cat([ops.linear(pool, matrix, row[None]) for row in x])
    assert torch.equal(y, one_by_one)  # a row does not depend on the other rows


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q6_K"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e-38])
def test_extreme_activations_change_only_their_own_row(
    any_pool: ThreadPool, kind: str, value: float
) -> None:
    raw, values = random_blocks(kind, 24, 512)
    matrix, _ = pack_matrix(any_pool, kind, raw, 512)
    x = random_normal(1, 3, 512)
    expected = ops.linear(any_pool, matrix, x)
    x[1] = value if value == 1e-38 else x[1]
    x[1, 5] = value
    y = ops.linear(any_pool, matrix, x)
    assert torch.equal(y[[0, 2]], expected[[0, 2]])
    assert bool(y[1].abs().max() < 1e-30 if value == 1e-38 else y[1].isnan().all())


@pytest.mark.parametrize("dtype", ops.FLOAT_KINDS)
@FEW_EXAMPLES
@given(rows=SIZES, columns=st.integers(1, 2100), tokens=st.integers(1, 15), seed=SEEDS)
def test_products_of_floats(
    any_pool: ThreadPool, dtype: torch.dtype, rows: int, columns: int, tokens: int, seed: int
) -> None:
    pool = any_pool
    weight = random_normal(seed, rows, columns).to(dtype)
    x = random_normal(seed + 1, tokens, columns)
    matrix = ops.NativeMatrix.from_floats(pool, weight)
    assert torch.equal(ops.gather_rows(pool, matrix, torch.arange(rows)), weight.float())
    y = ops.linear(pool, matrix, x)
    exact = F.linear(x.double(), weight.double())
    assert torch.allclose(y.double(), exact, rtol=1e-5, atol=2e-6 * columns**0.5)
    one_by_one = torch.cat([ops.linear(pool, matrix, row[None]) for row in x])
    assert torch.equal(y, one_by_one)  # a row does not depend on the other rows


@FEW_EXAMPLES
@given(
    half=st.integers(1, 20),
    tokens=st.sampled_from([1, 2, 7, 70]),
    columns=st.sampled_from([32, 160]),
    kind=st.sampled_from(["rms", "layer"]),
    activation=st.sampled_from(ALL_ACTIVATIONS),
    seed=SEEDS,
)
def test_linear_with_prologue_and_epilogue(
    pool: ThreadPool,
    half: int,
    tokens: int,
    columns: int,
    kind: Literal["rms", "layer"],
    activation: ActivationEpilogue,
    seed: int,
) -> None:
    """The matrix has two types, with a segment for each."""
    rows = pool.panel_rows * half
    first_raw, first_values = random_blocks("Q4_1", rows, columns, seed)
    second_raw, second_values = random_blocks("Q8_0", rows, columns, seed + 1)
    first = ops.pack_segment(pool, "Q4_1", first_raw, columns)
    second = ops.pack_segment(pool, "Q8_0", second_raw, columns)
    matrix = ops.NativeMatrix(pool, columns, [first, second])
    x = random_normal(seed + 2, tokens, columns)
    bias = random_normal(seed + 3, 2 * rows)
    norm_weight = random_normal(seed + 4, columns)
    norm_bias = random_normal(seed + 5, columns) if kind == "layer" else None
    if kind == "rms":
        normed = rms_norm_reference(x, norm_weight, 1e-5)
    else:
        normed = layer_norm_reference(x, norm_weight, norm_bias, 1e-5)
    y = F.linear(round_activations(normed, pool), torch.cat([first_values, second_values]), bias)
    norm = NormPrologue(kind, norm_weight, norm_bias, 1e-5)
    assert matrix.halves_align
    assert_close(ops.linear(pool, matrix, x, bias, norm), y)
    activated = ops.linear(pool, matrix, x, bias, norm, activation)
    assert_close(activated, activation_reference(y, activation))
    residual = random_normal(seed + 6, tokens, 2 * rows)
    added = ops.linear(pool, matrix, x, bias, norm, ResidualEpilogue(residual, 0.5))
    assert_close(added, residual + 0.5 * y)


# ---- rows of activations -------------------------------------------------------------------------


@FEW_EXAMPLES
@given(rows=SIZES, columns=st.integers(1, 70), heads=st.integers(1, 3), seed=SEEDS)
def test_norms(pool: ThreadPool, rows: int, columns: int, heads: int, seed: int) -> None:
    x = random_normal(seed, rows, columns)
    weight = random_normal(seed + 1, columns)
    bias = random_normal(seed + 2, columns)
    rms = ops.normalize(pool, x, "rms", weight, None, 1e-5)
    assert_close(rms, rms_norm_reference(x, weight, 1e-5), 1e-5)
    layer = ops.normalize(pool, x, "layer", weight, bias, 1e-5)
    assert_close(layer, layer_norm_reference(x, weight, bias, 1e-5), 1e-5)
    weight_per_head = random_normal(seed, heads, columns)
    x = random_normal(seed, rows, heads, columns)
    per_head = ops.normalize(pool, x, "rms", weight_per_head, None, 1e-5)
    assert_close(per_head, rms_norm_reference(x, weight_per_head, 1e-5), 1e-5)


@FEW_EXAMPLES
@given(rows=SIZES, columns=st.integers(1, 70), heads=st.integers(1, 3), seed=SEEDS)
def test_norms_of_columns(pool: ThreadPool, rows: int, columns: int, heads: int, seed: int) -> None:
    width = 2 * heads * columns + 3
    x = random_normal(seed, rows, width)
    weight, bias = random_normal(seed + 1, 2, columns)
    own = slice(columns // 3, columns - columns // 4)
    layer = NormPrologue("layer", weight, bias, 1e-5)
    per_head = NormPrologue("rms", random_normal(seed, heads, columns), None, 1e-5)
    second = heads * columns
    parts = [
        ops.NormedColumns(0, heads, columns, layer, own),
        ops.NormedColumns(second, heads, columns, per_head, slice(None)),
        ops.NormedColumns(width - 3, 1, 3, None, slice(None)),
    ]
    left, right = x[:, : 2 * second].unflatten(1, (2, heads, columns)).unbind(1)
    expected = (
        layer_norm_reference(left, weight, bias, 1e-5)[..., own].flatten(1),
        rms_norm_reference(right, per_head.weight, 1e-5).flatten(1),
        x[:, -3:],
    )
    assert_close(ops.norm_columns(pool, x, parts), torch.cat(expected, 1), 1e-5)


def test_selected_rows(pool: ThreadPool) -> None:
    x = random_normal(5, 40, 33)
    rows = torch.tensor([39, 0, 7, 7])
    assert torch.equal(select_rows(x, rows, pool), x[rows])
    assert ops.select_rows(pool, x, rows) is not None
    assert torch.equal(select_rows(x, rows[:0], pool), x[:0])
    assert torch.equal(select_rows(x, slice(3, 5), pool), x[3:5])
    # What the kernel does not take is left to torch.
    others = ((x.T, rows[1:]), (x, rows.int()), (x, rows[::2]), (x.double(), rows))
    for other, indices in others:
        assert ops.select_rows(pool, other, indices) is None
        assert torch.equal(select_rows(other, indices, pool), other[indices])


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("widths", [(3, 3), (70, 9), (2050, 4098)])
def test_concatenate(pool: ThreadPool, rows: int, widths: tuple[int, int]) -> None:
    x, y = (random_normal(seed, rows, width) for seed, width in enumerate(widths))
    assert torch.equal(ops.concatenate(pool, (x, y)), torch.cat((x, y), 1))
    assert torch.equal(concatenate(x, y, pool), concatenate(x, y, None))


@pytest.mark.parametrize("activation", ALL_ACTIVATIONS, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (3, 70), (5, 4098)])
def test_elementwise_operations(
    pool: ThreadPool, activation: ActivationEpilogue, shape: tuple[int, int]
) -> None:
    x = 4 * random_normal(0, *shape)
    y = random_normal(1, *shape)
    activated = ops.activate(pool, x, activation)
    assert_close(activated, activation_reference(x, activation), 1e-6)
    assert_close(ops.elementwise(pool, ops.ADD_SCALED, x, y, 0.5), x + 0.5 * y, 1e-6)
    assert_close(add_scaled(x, y, 0.5, pool), torch.add(x, y, alpha=0.5), 1e-6)
    assert_close(ops.elementwise(pool, ops.MULTIPLY, x, y), x * y, 1e-6)
    assert_close(ops.elementwise(pool, ops.MULTIPLY_NUMBER, x, number=3.0), x * 3, 1e-6)
    assert_close(ops.elementwise(pool, ops.ADD_NUMBER, x, number=3.0), x + 3, 1e-6)
    assert_close(ops.elementwise(pool, ops.TANH, x), x.tanh(), 1e-6)


# ---- rope and KV cache ---------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [None, "rms", "layer"])
@pytest.mark.parametrize("rope_dim", [0, 4, 16])
def test_rope_and_kv_cache(
    pool: ThreadPool,
    interleaved: bool,
    norm: Literal["rms", "layer"] | None,
    rope_dim: int,
) -> None:
    heads = 5
    kv_heads = 2
    dim = 16
    tokens = 9
    qkv = random_normal(0, tokens, (heads + 2 * kv_heads) * dim)
    angles = None
    if rope_dim:
        angles = (random_normal(1, 64, rope_dim // 2), random_normal(2, 64, rope_dim // 2))
    positions = torch.randint(64, (tokens,))
    slot_mapping = torch.randperm(40)[:tokens]
    for weights in (
        (random_normal(3, dim), random_normal(4, dim)),
        (random_normal(3, heads, dim), random_normal(4, kv_heads, dim)),
        None,
    ):
        norm_weights = weights if norm else None
        transform = QkTransform(angles, positions, interleaved, norm, norm_weights, 1e-5, 1.5)
        for dtype in KV_CACHE_DTYPES:
            kv_cache = build_kv_cache(torch.zeros(2, 40, kv_heads, dim), dtype)
            expected_cache = build_kv_cache(torch.zeros(2, 40, kv_heads, dim), dtype)
            q = split_qkv(qkv, QkvEpilogue(kv_cache, slot_mapping, transform), pool)
            expected_q = apply_rope_and_cache_reference(
                qkv, expected_cache, slot_mapping, transform
            )
            assert_close(q, expected_q, 1e-5)
            keys, values = read_kv_cache(kv_cache, slot_mapping, torch.float32)
            expected_keys, expected_values = read_kv_cache(
                expected_cache, slot_mapping, torch.float32
            )
            assert_close(keys, expected_keys, ROUNDING[dtype])
            assert_close(values, expected_values, ROUNDING[dtype])


def test_rope_and_kv_cache_with_every_option(pool: ThreadPool) -> None:
    """Norm after rope, value norm, shared keys, scaled queries and a gate, in all combinations."""
    heads = 4
    kv_heads = 2
    dim = 16
    tokens = 5
    angles = (random_normal(1, 64, dim // 2), random_normal(2, 64, dim // 2))
    slot_mapping = torch.randperm(40)[:tokens]
    weights = (random_normal(3, dim), random_normal(4, dim))
    v_norms = (
        None,
        NormPrologue("rms", None, None, 1e-3),
        NormPrologue("layer", random_normal(5, dim), None, 1e-3),
    )
    options = product([False, True], v_norms, [False, True], [False, True], [0, heads, heads * dim])
    for after_rope, v_norm, shared, by_position, gate_width in options:
        query_scales = random_normal(6, 64 if by_position else tokens)
        transform = QkTransform(
            angles if by_position else (angles[0][:tokens], angles[1][:tokens]),
            torch.randint(64, (tokens,)) if by_position else None,
            norm="rms",
            weights=weights,
            eps=1e-5,
            norm_after_rope=after_rope,
            v_norm=v_norm,
            keys_as_values=shared,
            query_scales=query_scales if shared != after_rope else None,
        )
        width = (heads + (1 if shared else 2) * kv_heads) * dim + gate_width
        qkv = random_normal(0, tokens, width)
        gate = torch.zeros(tokens, gate_width) if gate_width else None
        expected_gate = None if gate is None else gate.clone()
        kv_cache = torch.zeros(2, 40, kv_heads, dim)
        expected_cache = kv_cache.clone()
        q = split_qkv(qkv, QkvEpilogue(kv_cache, slot_mapping, transform, gate), pool)
        expected_q = apply_rope_and_cache_reference(
            qkv, expected_cache, slot_mapping, transform, expected_gate
        )
        assert_close(q, expected_q, 1e-5)
        assert_close(kv_cache, expected_cache, 1e-5)
        if gate is not None and expected_gate is not None:
            assert torch.equal(gate, expected_gate)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_nan_and_infinity_change_only_their_own_head(pool: ThreadPool, dtype: torch.dtype) -> None:
    """Other slots stay untouched, and the largest float16 values do not overflow."""
    qkv = random_normal(0, 3, 4 * 16)
    slot_mapping = torch.tensor([5, 0, 2])
    qkv[0, 32] = float("nan")
    qkv[1, 36] = float("inf")
    qkv[2, 32:48] = 1e30
    kv_cache = build_kv_cache(torch.zeros(2, 8, 1, 16), dtype)
    split_qkv(qkv, QkvEpilogue(kv_cache, slot_mapping, QkTransform()), pool)
    keys, values = read_kv_cache(kv_cache, torch.arange(8), torch.float32)
    assert_close(values[slot_mapping], qkv[:, 48:].view(3, 1, 16), ROUNDING[dtype])
    assert not keys[[1, 3, 4, 6, 7]].any() and not values[[1, 3, 4, 6, 7]].any()
    assert dtype == torch.int8 or keys[2].eq(65504).all()


@given(st.floats(width=32))
@settings(max_examples=200, deadline=None)
def test_float16_rounds_as_torch_does(pool: ThreadPool, x: float) -> None:
    kv_cache = build_kv_cache(torch.zeros(2, 1, 1, 8), torch.float16)
    qkv = torch.full((1, 24), x)
    split_qkv(qkv, QkvEpilogue(kv_cache, torch.tensor([0]), QkTransform()), pool)
    expected = torch.full((8,), x).clamp(-65504, 65504).half()
    stored = kv_cache[0, 0, 0]
    assert torch.equal(stored.view(torch.int16), expected.view(torch.int16)) or x != x


# ---- attention -----------------------------------------------------------------------------------

ATTENTION_SPECS = {
    "plain": AttentionSpec(4, 2, 64),
    "one kv head": AttentionSpec(6, 1, 128),
    "seven heads share a key": AttentionSpec(7, 1, 64),
    "groups of four": AttentionSpec(8, 2, 80),
    "groups of three": AttentionSpec(12, 4, 96),
    "narrow": AttentionSpec(3, 3, 40),
    "alibi": AttentionSpec(6, 3, 16, position=AlibiSpec()),
    "window": AttentionSpec(4, 4, 32, window=20),
    "softcap": AttentionSpec(2, 1, 256, softcap=3.0, scale=0.2),
    "chunk": AttentionSpec(4, 2, 32, chunk=50),
    "sinks": AttentionSpec(6, 2, 64, sinks=True),
    "sinks chunk window": AttentionSpec(4, 2, 32, sinks=True, chunk=70, window=33),
    "gate": AttentionSpec(4, 2, 32, gate=AttentionGateSpec()),
    "gate per head": AttentionSpec(4, 2, 24, window=20, gate=AttentionGateSpec(per_head=True)),
    "softplus": AttentionSpec(4, 1, 40, sinks=True, gate=AttentionGateSpec(activation="softplus")),
    "wide": AttentionSpec(2, 1, 320),
    "widest": AttentionSpec(2, 1, 512, sinks=True, gate=AttentionGateSpec()),
}


@pytest.mark.parametrize("name", ATTENTION_SPECS)
@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
@settings(max_examples=8, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 150)), min_size=1, max_size=5),
    seed=st.integers(0, 9),
)
def test_paged_attention(
    any_pool: ThreadPool, name: str, dtype: torch.dtype, sequences: list[tuple[int, int]], seed: int
) -> None:
    """Each sequence has (new positions, cached positions); decodes come first."""
    spec = ATTENTION_SPECS[name]
    block_size = 16
    sequences = sorted(sequences, key=lambda sequence: sequence[0] > 1)
    query_lens = tuple(new for new, _ in sequences)
    seq_lens = tuple(new + cached for new, cached in sequences)
    max_blocks = max(-(-seq_len // block_size) for seq_len in seq_lens)
    num_blocks = max_blocks * len(sequences)
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    values = random_normal(seed, 2, num_blocks * block_size, spec.num_kv_heads, spec.head_dim)
    kv_cache = build_kv_cache(values, dtype)
    metadata = AttentionMetadata.from_host(
        query_lens,
        seq_lens,
        blocks.view(len(sequences), max_blocks).tolist(),
        block_size,
        torch.device("cpu"),
    )
    q = random_normal(seed + 1, sum(query_lens), spec.num_heads, spec.head_dim)
    native = CpuPagedAttention(any_pool)
    reference = TorchPagedAttention(fused=False)
    sinks = 2 * random_normal(seed + 2, spec.num_heads) if spec.sinks else None
    gate = None
    if spec.gate is not None:
        gate = 3 * random_normal(seed + 3, sum(query_lens), gate_size(spec))
    expected = reference.attend(q, kv_cache, spec, reference.prepare(metadata), sinks, gate)
    if dtype != torch.int8:
        poison_invisible_positions(kv_cache, metadata, spec)
    actual = native.attend(q, kv_cache, spec, native.prepare(metadata), sinks, gate)
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("name", ["plain", "groups of four", "groups of three", "widest"])
@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize("seq_len", [1, 100])
def test_decode_attention_does_not_depend_on_batch_or_threads(
    any_pool: ThreadPool, name: str, dtype: torch.dtype, seq_len: int
) -> None:
    """Few requests and many threads let fewer heads share their keys."""
    spec = ATTENTION_SPECS[name]
    num_seqs = 5
    blocks = torch.arange(num_seqs * 7).view(num_seqs, 7)
    values = random_normal(0, 2, num_seqs * 112, spec.num_kv_heads, spec.head_dim)
    kv_cache = build_kv_cache(values, dtype)
    q = random_normal(1, num_seqs, spec.num_heads, spec.head_dim)
    sinks = random_normal(2, spec.num_heads) if spec.sinks else None
    gate = random_normal(3, num_seqs, gate_size(spec)) if spec.gate else None

    def attend(pool: ThreadPool, rows: slice) -> torch.Tensor:
        tables = blocks[rows].tolist()
        ones = (1,) * len(tables)
        lengths = (seq_len,) * len(tables)
        metadata = AttentionMetadata.from_host(ones, lengths, tables, 16, torch.device("cpu"))
        native = CpuPagedAttention(pool)
        own_gate = None if gate is None else gate[rows].contiguous()
        return native.attend(
            q[rows].contiguous(), kv_cache, spec, native.prepare(metadata), sinks, own_gate
        )

    together = attend(any_pool, slice(None))
    many_threads = ThreadPool(8, any_pool.library)
    for pool in (any_pool, many_threads):
        alone = torch.cat([attend(pool, slice(row, row + 1)) for row in range(num_seqs)])
        assert torch.equal(alone, together)
        assert torch.equal(attend(pool, slice(None)), together)
    many_threads.close()


def poison_invisible_positions(
    kv_cache: torch.Tensor, metadata: AttentionMetadata, spec: AttentionSpec
) -> None:
    """Fill positions that no query of the step sees with NaN: their blocks may be freed."""
    lengths = zip(metadata.host_query_lens, metadata.host_seq_lens)
    for i, (query_len, seq_len) in enumerate(lengths):
        positions = torch.arange(first_visible_position(spec, seq_len - query_len))
        blocks = metadata.block_tables[i, positions // metadata.block_size]
        slots = blocks * metadata.block_size + positions % metadata.block_size
        kv_cache[:, slots] = torch.nan


# ---- decode steps --------------------------------------------------------------------------------


def test_decode_inputs_and_advanced_rows(pool: ThreadPool) -> None:
    rows = torch.tensor([2, 0, 3], dtype=torch.int32)  # row 3 is the padding row
    last_tokens = torch.tensor([5, 6, 7, 8])
    positions = torch.tensor([17, 3, 40, 0])
    block_tables = torch.arange(24).view(2, 4, 3)
    actual = ops.gather_decode_inputs(pool, rows, last_tokens, positions, block_tables, 16)
    expected = gather_decode_reference(rows, last_tokens, positions, block_tables, 16)
    for actual_vector, expected_vector in zip(actual[:4], expected[:4]):
        assert torch.equal(actual_vector, expected_vector)
    for slot, position in enumerate(expected.positions.tolist()):
        num_blocks = position // 16 + 1
        actual_blocks = actual[4][:, slot, :num_blocks]
        assert torch.equal(actual_blocks, expected.block_tables[:, slot, :num_blocks])
    tokens = torch.tensor([1, 2, 3])
    expected_tokens = last_tokens.clone()
    expected_positions = positions.clone()
    ops.advance_rows(pool, rows, tokens, last_tokens, positions)
    advance_reference(rows, tokens, expected.seq_lens, expected_tokens, expected_positions)
    assert torch.equal(last_tokens, expected_tokens)
    assert torch.equal(positions, expected_positions)


@settings(max_examples=40, deadline=None)
@given(
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05]),
    top_k=st.sampled_from([0, 1, 5, 400]),
    typical_p=st.sampled_from([1.0, 1.0, 0.7]),
    logprobs=st.sampled_from([None, 0, 7]),
    seed=st.integers(0, 2**40),
    spread=st.sampled_from([0.0, 1.0, 8.0]),
)
def test_sampled_tokens(
    pool: ThreadPool,
    temperature: float,
    top_p: float,
    min_p: float,
    top_k: int,
    typical_p: float,
    logprobs: int | None,
    seed: int,
    spread: float,
) -> None:
    """Penalties, masks and the other parameters are compared in tests/runtime/test_sampler.py."""
    num_rows = 6
    vocab = 1003
    logits = random_normal(seed % 1000, num_rows, vocab) * spread
    logits = (logits * 4).round() / 4  # many ties
    rows = torch.arange(num_rows, dtype=torch.int32)
    positions = torch.arange(num_rows) * 7
    samplers = [Sampler(num_rows, vocab), Sampler(num_rows, vocab, pool=pool)]
    for row in range(num_rows):
        sampling = ResolvedSampling(
            temperature, top_k, top_p, min_p, typical_p, seed=seed + row, logprobs=logprobs
        )
        for sampler in samplers:
            sampler.admit(row, NewRequestData((1,), 1, sampling, ()))
            sampler.upload_new_requests()
    expected, actual = [sampler(logits, rows, positions) for sampler in samplers]
    # float32 against float64: a row may differ where masses or noisy logits agree to six digits.
    same = actual.tokens == expected.tokens
    assert int((~same).sum()) <= (1 if temperature else 0)
    if logprobs is not None:
        left = actual.reports[same]
        right = expected.reports[same]
        first_logprob = 2 + MAX_TOP_LOGPROBS
        assert torch.equal(left[:, 0], right[:, 0])
        assert torch.equal(left[:, 2 : 2 + logprobs], right[:, 2 : 2 + logprobs])
        for columns in (slice(1, 2), slice(first_logprob, first_logprob + logprobs)):
            torch.testing.assert_close(
                left[:, columns].contiguous().view(torch.float32),
                right[:, columns].contiguous().view(torch.float32),
            )


def test_reports_of_logits_that_are_no_numbers_show_nothing_of_other_rows(
    pool: ThreadPool,
) -> None:
    logits = torch.full((2, 50), float("nan"))
    logits[1, 7] = 2.0
    stale = -1  # what another row left there
    reports = torch.full((2, 2 + 2 * MAX_TOP_LOGPROBS), stale, dtype=torch.int32)
    ops.score_tokens(pool, logits, torch.tensor([3, 7]), 5, reports)
    for report in reports:
        top = report[2:7].tolist()
        assert len(set(top)) == 5 and min(top) >= 0
        logprobs = report[2 + MAX_TOP_LOGPROBS : 7 + MAX_TOP_LOGPROBS]
        assert bool((logprobs != stale).all())
