"""The arithmetic of a step: the founding documents' figures, exact parameter counts, and laws every shape must obey."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isclose
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.errors import ConfigError
from bloomery.families import describe
from bloomery.messages import ScheduledRequest
from bloomery.roofline import (
    LIBRARY,
    MACHINES,
    PRECISIONS,
    Precision,
    Roofline,
    activation_bytes,
    kv_bytes,
    kv_bytes_per_token,
    machine,
    parameters,
    peak_bytes,
    scores_bytes,
    weights_bytes,
    work,
)
from bloomery.spec import Attention, Layer, Mlp, Model, Moe, Norm

SHAPES = Path(__file__).parent.parent / "benchmarks" / "shapes"
GIB = 2**30


def shape(name: str) -> Model:
    return describe(json.loads((SHAPES / f"{name}.json").read_text())).model


LLAMA = shape("llama-8b")
OCTOCODER = shape("octocoder")
BLOOM = shape("bloom-176b")
BF16 = PRECISIONS["bf16"]


# ---- the founding documents ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, billions", [("llama-8b", 8.030), ("octocoder", 15.517), ("bloom-176b", 176.247)]
)
def test_two_bytes_a_parameter(name: str, billions: float) -> None:
    model = shape(name)
    assert parameters(model).total / 1e9 == pytest.approx(billions, abs=1e-3)
    assert weights_bytes(model, BF16) == 2 * parameters(model).total
    assert weights_bytes(model, PRECISIONS["fp32"]) == 4 * parameters(model).total


def test_bloom_needs_352_gigabytes() -> None:
    assert weights_bytes(BLOOM, BF16) / 1e9 == pytest.approx(352, rel=0.002)


@pytest.mark.parametrize("precision, seen", [("bf16", 29.03), ("int8", 15.22), ("nf4", 9.54)])
def test_octocoder_at_three_precisions(precision: str, seen: float) -> None:
    """Peaks a library reported: weights, and the largest matrix unpacked where the format has no kernel of its own."""
    assert peak_bytes(OCTOCODER, LIBRARY[precision]) / GIB == pytest.approx(seen, rel=0.012)


def test_scores_grow_with_the_square_and_activations_do_not() -> None:
    assert scores_bytes(40, 16_000) / GIB == pytest.approx(19, abs=0.1)
    assert 0.7e12 < scores_bytes(40, 100_000) < 1e12  # "almost 1 TB"
    wide = replace(LLAMA, layers=(replace(LLAMA.layers[0], attention=Attention(40, 40, 128)),))
    once, twice = (
        activation_bytes(wide, tokens, 1) - activation_bytes(wide, 0, 1)
        for tokens in (50_000, 100_000)
    )
    assert twice == 2 * once < 0.02 * scores_bytes(40, 100_000)


def test_bloom_on_eight_a100_cannot_beat_21_6_ms() -> None:
    floor = Roofline(BLOOM, machine("a100-80"), tp=8).floor(1, 1, 1)
    assert floor.ms == pytest.approx(21.6, abs=0.05)
    assert floor.messages == 2 * 70 + 2  # two a layer, embedding, logits
    # what our code should take stands between the floor and the 45 ms that were reached once
    expected = Roofline(BLOOM, machine("a100-80"), tp=8).expected(1, 1, 1)
    assert 21.6 < expected * 1e3 < 45


# ---- counting --------------------------------------------------------------------------------------


def test_every_parameter_is_counted() -> None:
    """By hand: a layer of each kind of block."""
    norm = Norm("layer", bias=True)
    dense = Layer(
        Attention(4, 2, 8, bias=True, out_bias=True),
        Mlp(48, gated=False, bias=True),
        norm,
        None,
        norm,
    )
    sparse = Layer(
        Attention(4, 4, 8, qk_norm=Norm()),
        Moe(6, 2, Mlp(16), shared=Mlp(24), shared_gate=True),
        Norm(),
    )
    model = Model(100, 32, (dense, sparse), norm, 64, positions=10, tied=False)
    attention = 32 * (32 + 2 * 16) + 32 * 32
    first = attention + (32 + 32) + 32 + 2 * 32 * 48 + 48 + 32 + 2 * 64
    second = 32 * 96 + 32 * 32 + 2 * 8 + 32 * 6 + 32 + 6 * 3 * 32 * 16 + 3 * 32 * 24 + 32
    assert parameters(model).total == first + second + 64 + 100 * 32 + 10 * 32 + 100 * 32
    assert parameters(replace(model, tied=True)).total == parameters(model).total - 100 * 32


def test_keys_and_values() -> None:
    assert kv_bytes_per_token(LLAMA) == 32 * 2 * 8 * 128 * 2
    assert kv_bytes_per_token(OCTOCODER) == 40 * 2 * 128 * 2  # one head for all
    windowed = replace(
        LLAMA,
        layers=tuple(replace(l, attention=replace(l.attention, window=512)) for l in LLAMA.layers),
    )
    assert kv_bytes(windowed, 4096) == kv_bytes(LLAMA, 512)


def test_work_of_a_step() -> None:
    chunk = ScheduledRequest(1, 10, 4, (), None, (), False)
    decode = ScheduledRequest(2, 99, 1, (), None, (), True)
    assert work([chunk, decode]) == (5, 114, 1, 11 + 12 + 13 + 14 + 100)


# ---- laws ------------------------------------------------------------------------------------------

steps = st.tuples(st.integers(1, 300), st.integers(1, 4000), st.booleans())


@pytest.mark.parametrize("model", [LLAMA, OCTOCODER, BLOOM], ids=["llama", "octocoder", "bloom"])
@given(step=steps, name=st.sampled_from(sorted(MACHINES)), tp=st.sampled_from([1, 2, 4, 8]))
def test_floors_are_floors(model: Model, step: tuple[int, int, bool], name: str, tp: int) -> None:
    """Never above what is expected, never below bytes over bandwidth, and more work is never less time."""
    batch, context, sampled = step
    roofline = Roofline(model, machine(name), tp=tp)
    count = batch if sampled else 0
    floor = roofline.floor(batch, batch * context, count)
    assert floor.seconds <= roofline.expected(batch, batch * context, count)
    assert (
        floor.seconds
        >= max(floor.bytes / roofline.bandwidth, floor.operations / roofline.rate) * 0.999999
    )
    assert roofline.step(batch, batch * context, count) <= roofline.step(
        batch + 1, batch * context + 1, count
    )


@given(st.integers(1, 64), st.integers(1, 2000))
def test_the_compiled_step_is_the_sum_of_its_kernels(batch: int, context: int) -> None:
    """Against the same floor worked out layer by layer, matrix by matrix."""
    here = machine("h200")
    total = 0.0
    for layer in LLAMA.layers:
        a = layer.attention
        hidden = LLAMA.hidden
        assert isinstance(layer.mlp, Mlp)
        values = (
            hidden * (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
            + a.num_heads * a.head_dim * hidden
        )
        values += 3 * hidden * layer.mlp.size
        vectors = 2 * hidden
        total += max(
            2 * (values + vectors) / here.bandwidth, 2 * batch * values / here.rates["bf16"]
        )
        cache = batch * context * 2 * a.num_kv_heads * a.head_dim * 2 / here.bandwidth
        total += max(cache, batch * context * 4 * a.num_heads * a.head_dim / here.rates["bf16"])
    head = LLAMA.vocab * LLAMA.hidden
    total += max(2 * head / here.bandwidth, 2 * batch * head / here.rates["bf16"])
    assert isclose(Roofline(LLAMA, here).step(batch, batch * context, batch), total, rel_tol=1e-4)


def test_experts_are_read_by_the_steps_that_choose_them() -> None:
    sparse = tuple(replace(layer, mlp=Moe(8, 2, Mlp(14336))) for layer in LLAMA.layers)
    model = replace(LLAMA, layers=sparse)
    roofline = Roofline(model, machine("h200"))
    read = [roofline.floor(tokens, tokens, tokens).bytes for tokens in (1, 2, 8, 512)]
    one = parameters(model).experts / 8 * 2
    rest = 2 * (parameters(model).matrices + parameters(model).head)
    assert read[0] == pytest.approx(rest + 2 * one, rel=1e-3)
    assert read == sorted(read)
    assert read[-1] == pytest.approx(rest + 8 * one + 512 * kv_bytes_per_token(model), rel=1e-3)


def test_heads_that_cannot_be_split_are_read_by_every_rank() -> None:
    alone, eight = (Roofline(OCTOCODER, machine("h200"), tp=tp) for tp in (1, 8))
    assert eight.cache[0] == 8 * alone.cache[0]
    assert Roofline(LLAMA, machine("h200"), tp=8).cache == Roofline(LLAMA, machine("h200")).cache


def test_stages_pass_hidden_states_and_nothing_else() -> None:
    piped = Roofline(LLAMA, machine("h200"), pp=4)
    assert piped.messages(3, 3) == (3, 3 * 3 * 4096 * 2)
    assert piped.step(3, 30, 3) == Roofline(LLAMA, machine("h200")).step(3, 30, 3)


def test_fewer_bits_are_less_to_read() -> None:
    here = machine("h200")
    names = ("fp32", "bf16", "int8", "int4", "nf4")
    steps = [Roofline(LLAMA, here, PRECISIONS[name]).step(1, 100, 1) for name in names]
    assert steps == sorted(steps, reverse=True)


def test_windows_bound_what_is_multiplied() -> None:
    narrow = tuple(
        replace(layer, attention=replace(layer.attention, window=64)) for layer in LLAMA.layers
    )
    windowed, whole = (
        Roofline(replace(LLAMA, layers=layers), machine("h200"))
        for layers in (narrow, LLAMA.layers)
    )
    long = 4096
    pairs = 4096 * 4097 // 2
    assert (
        windowed.floor(long, long, 1, pairs).operations
        < whole.floor(long, long, 1, pairs).operations
    )
    assert windowed.step(1, long, 1) == pytest.approx(whole.step(1, 64, 1))


@pytest.mark.parametrize("batch", [1, 8, 256])
def test_packed_weights_gain_most_where_reading_is_most(batch: int) -> None:
    """On the H200 as measured: faster than bf16 alone, slower in batches of hundreds; prompts are unpacked first."""
    names = ("bf16", "int8", "int4")
    bf16, int8, int4 = (Roofline(OCTOCODER, machine("h200"), PRECISIONS[name]) for name in names)
    step = batch, 256 * batch, batch
    assert int4.expected(*step) < int8.expected(*step)
    assert (int8.expected(*step) < bf16.expected(*step)) == (batch <= 8)
    prompt = 8192, 8192, 1, 8192 * 8193 // 2
    assert bf16.expected(*prompt) < int8.expected(*prompt) < 1.2 * bf16.expected(*prompt)


def test_a_processor_mixes_what_a_file_mixes() -> None:
    here = machine("zen3-2")
    assert here.mean_rate({"int4": 1.0}) == here.rate("int4")
    assert here.rate("Q6_K") < here.mean_rate({"int4": 0.5, "Q6_K": 0.5}) < here.rate("int4")
    plain = Precision("Q4_K", 5, 8.5)
    mixed = Roofline(LLAMA, here, replace(plain, kinds={"Q4_K": 0.8, "Q6_K": 0.2}))
    assert Roofline(LLAMA, here, plain).expected(8, 800, 8) < mixed.expected(8, 800, 8)


def test_unknown_machines_are_named() -> None:
    assert machine("A100").name == "a100-80"
    with pytest.raises(ConfigError, match="h200"):
        machine("abacus")
