"""The law of native kernels: each gives what its torch reference gives, for shapes nobody chose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.artifacts.gguf import BLOCKS
from bloomery.attention.base import AttentionMetadata
from bloomery.attention.native_paged import NativePaged
from bloomery.attention.torch_paged import TorchPaged
from bloomery.kernels.activation import ACTIVATIONS, gate_reference
from bloomery.kernels.noise import words
from bloomery.kernels.norm import add_scaled, layer_norm_reference, rms_norm_reference
from bloomery.kernels.pick import Wishes, pick_reference
from bloomery.kernels.rounded_cache import cache_bytes, of_memory, read
from bloomery.kernels.rows import advance_reference, fetch_reference
from bloomery.kernels.store import Turn, store, turn_and_store, turn_and_store_reference
from bloomery.native import ops
from bloomery.spec import Alibi, Attention

QUICK = settings(max_examples=15, deadline=None)
SIZES = st.integers(1, 40)
KEPT = tuple(ops.KEPT)
SHARES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.int8: 2e-2}  # one unit of what is kept


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def blocks(kind: str, rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks of a type and the values that the gguf package says they stand for."""
    number = GGMLQuantizationType[kind]
    values, size = BLOCKS[kind]
    if kind.endswith(
        "_K"
    ):  # the package cannot make these: any bits will do, but for scales of a sane size
        raw = np.random.default_rng(seed).integers(
            0, 256, (rows, columns // values, size), dtype=np.uint8
        )
        for at in (208,) if kind == "Q6_K" else (0, 2):
            raw[..., at : at + 2] = (
                np.random.default_rng(seed)
                .uniform(0.001, 0.1, (rows, columns // values, 1))
                .astype(np.float16)
                .view(np.uint8)
            )
        raw = raw.reshape(rows, -1)
    else:
        raw = quantize(random(seed, rows, columns).numpy(), number)
    return torch.from_numpy(raw), torch.from_numpy(dequantize(raw, number))


def cache_of(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """values [2, slots, kv heads, dim] as a cache keeps them."""
    shape = tuple(values.shape)
    made = of_memory(torch.zeros(cache_bytes(shape, dtype), dtype=torch.uint8), shape, dtype)
    store(values[0], values[1], made, torch.arange(shape[1]))
    return made


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Activations as eight bits leave them."""
    grouped = x.unflatten(-1, (-1, 32))
    scale = grouped.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (grouped / scale).round() * scale, 0).flatten(-2)


@pytest.mark.parametrize("kind", ops.PACKED)
@QUICK
@given(rows=SIZES, width=st.integers(1, 3), tokens=st.integers(1, 9), seed=st.integers(0, 99))
def test_blocks(kind: str, rows: int, width: int, tokens: int, seed: int) -> None:
    columns = 256 * width if kind.endswith("_K") else 32 * width
    raw, values = blocks(kind, rows, columns, seed)
    matrix = ops.Matrix(columns, [(ops.pack(kind, raw, columns), rows, ops.PACKED[kind][1])])
    assert torch.equal(ops.gather(matrix, torch.arange(rows)), values)
    x = random(seed + 1, tokens, columns)
    exact = F.linear(rounded(x).double(), values.double())
    assert torch.allclose(
        ops.linear(matrix, x).double(),
        exact,
        rtol=1e-4,
        atol=1e-4 * float(values.abs().max()) * columns**0.5,
    )
    alone = torch.cat([ops.linear(matrix, row[None]) for row in x])
    assert torch.equal(ops.linear(matrix, x), alone)  # neighbours do not matter


@QUICK
@given(rows=SIZES, columns=st.integers(1, 90), tokens=st.integers(1, 9), seed=st.integers(0, 99))
def test_dense(rows: int, columns: int, tokens: int, seed: int) -> None:
    weight = random(seed, rows, columns)
    x = random(seed + 1, tokens, columns)
    close(ops.linear(ops.Matrix.dense(weight), x), F.linear(x, weight))


@QUICK
@given(
    half=st.integers(1, 20),
    tokens=st.sampled_from([1, 2, 7, 70]),
    columns=st.sampled_from([32, 160]),
    kind=st.sampled_from(["rms", "layer"]),
    name=st.sampled_from(list(ACTIVATIONS)),
    seed=st.integers(0, 99),
)
def test_phrases(half: int, tokens: int, columns: int, kind: str, name: str, seed: int) -> None:
    """norm -> product -> bias -> residual or activation, over a matrix of several types and ragged segments."""
    parts = [blocks("Q4_1", 8 * half, columns, seed), blocks("Q8_0", 8 * half, columns, seed + 1)]
    values = torch.cat([part[1] for part in parts])
    segments = [
        (ops.pack(name, raw, columns), len(raw), ops.PACKED[name][1])
        for name, (raw, _) in zip(("Q4_1", "Q8_0"), parts)
    ]
    matrix = ops.Matrix(columns, segments)
    x = random(seed + 2, tokens, columns)
    bias = random(seed + 3, 16 * half)
    weight = random(seed + 4, columns)
    shift = random(seed + 5, columns) if kind == "layer" else None
    plain = (
        rms_norm_reference(x, weight, 1e-5)
        if kind == "rms"
        else layer_norm_reference(x, weight, shift, 1e-5)
    )
    y = F.linear(rounded(plain), values, bias)
    norm = (kind, weight, shift, 1e-5)
    assert matrix.halves
    close(ops.linear(matrix, x, bias, norm), y)
    close(ops.linear(matrix, x, bias, norm, activation=(name, False)), ACTIVATIONS[name](y))
    close(ops.linear(matrix, x, bias, norm, activation=(name, True)), gate_reference(y, name))
    residual = random(seed + 6, tokens, 16 * half)
    close(ops.linear(matrix, x, bias, norm, residual=(residual, 0.5)), residual + 0.5 * y)


def close(found: torch.Tensor, wanted: torch.Tensor, share: float = 2e-3) -> None:
    """Within a share of what the values are like: a number that rounds the other way moves a sum by that much."""
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= share * wanted.abs().max() + 1e-5


@QUICK
@given(rows=SIZES, columns=st.integers(1, 70), heads=st.integers(1, 3), seed=st.integers(0, 99))
def test_norms(rows: int, columns: int, heads: int, seed: int) -> None:
    x = random(seed, rows, columns)
    weight = random(seed + 1, columns)
    bias = random(seed + 2, columns)
    close(ops.norm(x, "rms", weight, None, 1e-5), rms_norm_reference(x, weight, 1e-5), 1e-5)
    close(
        ops.norm(x, "layer", weight, bias, 1e-5), layer_norm_reference(x, weight, bias, 1e-5), 1e-5
    )
    each = random(seed, heads, columns)
    x = random(seed, rows, heads, columns)
    close(ops.norm(x, "rms", each, None, 1e-5), rms_norm_reference(x, each, 1e-5), 1e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 2), (3, 70), (5, 4098)])
def test_elements(name: str, shape: tuple[int, int]) -> None:
    x = 4 * random(0, *shape)
    y = random(1, *shape)
    close(ops.elements(ops.ACTIVATED, x, activation=name), ACTIVATIONS[name](x), 1e-6)
    close(ops.elements(ops.GATED, x, activation=name), gate_reference(x, name), 1e-6)
    close(ops.elements(ops.ADD_SCALED, x, y, 0.5), x + 0.5 * y, 1e-6)
    close(add_scaled(x, y, 0.5), torch.add(x, y, alpha=0.5), 1e-6)
    close(ops.elements(ops.MULTIPLY, x, y), x * y, 1e-6)
    close(ops.elements(ops.TIMES, x, number=3.0), x * 3, 1e-6)
    close(ops.elements(ops.PLUS, x, number=3.0), x + 3, 1e-6)
    close(ops.elements(ops.TANH, x), x.tanh(), 1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [None, "rms", "layer"])
@pytest.mark.parametrize("turned", [0, 4, 16])
def test_turn(interleaved: bool, norm: str | None, turned: int) -> None:
    heads = 5
    kv_heads = 2
    dim = 16
    tokens = 9
    qkv = random(0, tokens, (heads + 2 * kv_heads) * dim)
    angles = (random(1, 64, turned // 2), random(2, 64, turned // 2)) if turned else None
    positions = torch.randint(64, (tokens,))
    slots = torch.randperm(40)[:tokens]
    for weights in (
        (random(3, dim), random(4, dim)),
        (random(3, heads, dim), random(4, kv_heads, dim)),
        None,
    ):
        turn = Turn(angles, positions, interleaved, norm, weights if norm else None, 1e-5, 1.5)
        for dtype in KEPT:
            ours, theirs = (cache_of(torch.zeros(2, 40, kv_heads, dim), dtype) for _ in range(2))
            q = turn_and_store(qkv, ours, slots, turn)
            close(q, turn_and_store_reference(qkv, theirs, slots, turn), 1e-5)
            close(
                read(ours, slots, torch.float32)[0],
                read(theirs, slots, torch.float32)[0],
                SHARES[dtype],
            )
            close(
                read(ours, slots, torch.float32)[1],
                read(theirs, slots, torch.float32)[1],
                SHARES[dtype],
            )


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_what_is_no_number_harms_its_head_alone(dtype: torch.dtype) -> None:
    """Nor is anything written beside it; the largest halves do not overflow."""
    qkv = random(0, 3, 4 * 16)
    slots = torch.tensor([5, 0, 2])
    qkv[0, 32], qkv[1, 36], qkv[2, 32:48] = float("nan"), float("inf"), 1e30
    cache = cache_of(torch.zeros(2, 8, 1, 16), dtype)
    turn_and_store(qkv, cache, slots, Turn())
    keys, values = read(cache, torch.arange(8), torch.float32)
    close(values[slots], qkv[:, 48:].view(3, 1, 16), SHARES[dtype])
    assert not keys[[1, 3, 4, 6, 7]].any() and not values[[1, 3, 4, 6, 7]].any()
    assert dtype == torch.int8 or keys[2].eq(65504).all()


@given(st.floats(width=32))
@settings(max_examples=200, deadline=None)
def test_half_floats_round_as_torch_does(x: float) -> None:
    cache = cache_of(torch.zeros(2, 1, 1, 8), torch.float16)
    turn_and_store(torch.full((1, 24), x), cache, torch.tensor([0]), Turn())
    wanted = torch.full((8,), x).clamp(-65504, 65504).half()
    assert torch.equal(cache[0, 0, 0].view(torch.int16), wanted.view(torch.int16)) or x != x


SPECS = {
    "plain": Attention(4, 2, 64),
    "one key head": Attention(6, 1, 128),
    "narrow": Attention(3, 3, 40),
    "alibi": Attention(6, 3, 16, position=Alibi()),
    "window": Attention(4, 4, 32, window=20),
    "capped": Attention(2, 1, 256, softcap=3.0, scale=0.2),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", KEPT)
@settings(max_examples=8, deadline=None)
@given(
    shares=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 150)), min_size=1, max_size=5),
    seed=st.integers(0, 9),
)
def test_attention(name: str, dtype: torch.dtype, shares: list[tuple[int, int]], seed: int) -> None:
    """shares: (new positions, positions already there) of each sequence."""
    spec = SPECS[name]
    size = 16
    shares = sorted(shares, key=lambda share: share[0] > 1)
    counts = tuple(count for count, _ in shares)
    lengths = tuple(sum(share) for share in shares)
    widest = max(-(-length // size) for length in lengths)
    order = torch.randperm(widest * len(shares), generator=torch.Generator().manual_seed(seed))
    cache = cache_of(
        random(seed, 2, (widest * len(shares)) * size, spec.num_kv_heads, spec.head_dim), dtype
    )
    numbers = torch.tensor(
        [length - count + i for count, length in zip(counts, lengths) for i in range(count)]
    )
    ragged = AttentionMetadata(
        counts,
        lengths,
        counts.count(1),
        torch.tensor([0, *np.cumsum(counts)]),
        torch.tensor(lengths),
        numbers,
        numbers,
        order.view(len(shares), widest),
        size,
    )
    q = random(seed + 1, sum(counts), spec.num_heads, spec.head_dim)
    native = NativePaged()
    oracle = TorchPaged(fused=False)
    wanted = oracle.attend(q, cache, spec, oracle.plan(ragged))
    close(native.attend(q, cache, spec, native.plan(ragged)), wanted, 1e-5)


def test_rows() -> None:
    lines = torch.tensor([2, 0, 3], dtype=torch.int32)
    last = torch.tensor([5, 6, 7, 8])
    positions = torch.tensor([17, 3, 40, 0])
    tables = torch.arange(12).view(4, 3)
    found = ops.fetch(lines, last, positions, tables, 16)
    wanted = fetch_reference(lines, last, positions, tables, 16)
    for ours, theirs in zip(found[:4], wanted[:4]):
        assert torch.equal(ours, theirs)
    for line, at in enumerate(wanted.positions.tolist()):
        assert torch.equal(found[4][line, : at // 16 + 1], wanted.tables[line, : at // 16 + 1])
    tokens = torch.tensor([1, 2, 3])
    other_last = last.clone()
    other_positions = positions.clone()
    ops.advance(lines, tokens, last, positions)
    advance_reference(lines, tokens, wanted.ends, other_last, other_positions)
    assert torch.equal(last, other_last) and torch.equal(positions, other_positions)


@settings(max_examples=40, deadline=None)
@given(
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05]),
    top_k=st.sampled_from([0, 1, 5, 400]),
    seed=st.integers(0, 2**40),
    spread=st.sampled_from([0.0, 1.0, 8.0]),
)
def test_pick(
    temperature: float, top_p: float, min_p: float, top_k: int, seed: int, spread: float
) -> None:
    lines = 6
    vocab = 1003
    logits = (random(seed % 1000, lines, vocab) * spread * 4).round() / 4  # ties abound
    rows = torch.arange(lines, dtype=torch.int32)
    positions = torch.arange(lines) * 7
    numbers = torch.tensor([[temperature, top_p, min_p, 1.0]] * lines, dtype=torch.float64)
    top = torch.full((lines,), top_k)
    seeds = torch.tensor([words(seed + line) for line in range(lines)], dtype=torch.int32)
    wanted = pick_reference(
        logits, rows, positions, Wishes(*numbers.unbind(1)[:3], top, seeds)
    ).tokens
    found = ops.pick(logits, rows, positions, numbers, 4, top, seeds)
    # Float32 against float64: a line may tip where masses or noisy scores agree to six digits, hardly more than one.
    assert int((found != wanted).sum()) <= (1 if temperature else 0)
