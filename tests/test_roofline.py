"""The roofline model: published figures, exact parameter counts, and laws for every shape."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.families import describe_config
from bloomery.hardware import HARDWARE_SPECS, find_hardware
from bloomery.messages import ScheduledRequest
from bloomery.roofline import (
    LIBRARY_PRECISIONS,
    PRECISIONS,
    Roofline,
    WeightPrecision,
    activation_bytes,
    count_parameters,
    count_step_work,
    kv_bytes,
    kv_bytes_per_token,
    peak_bytes,
    scores_bytes,
    weights_bytes,
)
from bloomery.spec import (
    AttentionGateSpec,
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
)
from tests.families.hub_configs import CONFIGS

SHAPES = Path(__file__).parent.parent / "benchmarks" / "shapes"
GIB = 2**30


def read_shape(name: str) -> ModelSpec:
    return describe_config(json.loads((SHAPES / f"{name}.json").read_text())).model


LLAMA = read_shape("llama-8b")
OCTOCODER = read_shape("octocoder")
BLOOM = read_shape("bloom-176b")
BF16 = PRECISIONS["bf16"]


# ---- published figures ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, billions", [("llama-8b", 8.030), ("octocoder", 15.517), ("bloom-176b", 176.247)]
)
def test_bf16_takes_two_bytes_per_parameter(name: str, billions: float) -> None:
    model = read_shape(name)
    assert count_parameters(model).total / 1e9 == pytest.approx(billions, abs=1e-3)
    assert weights_bytes(model, BF16) == 2 * count_parameters(model).total
    assert weights_bytes(model, PRECISIONS["fp32"]) == 4 * count_parameters(model).total


def test_bloom_needs_352_gigabytes() -> None:
    assert weights_bytes(BLOOM, BF16) / 1e9 == pytest.approx(352, rel=0.002)


@pytest.mark.parametrize(
    "precision, measured_gib", [("bf16", 29.03), ("int8", 15.22), ("nf4", 9.54)]
)
def test_octocoder_peak_memory_at_three_precisions(precision: str, measured_gib: float) -> None:
    """Peaks that a library reported: weights, and the largest matrix while it is dequantized."""
    assert peak_bytes(OCTOCODER, LIBRARY_PRECISIONS[precision]) / GIB == pytest.approx(
        measured_gib, rel=0.012
    )


def test_score_matrices_grow_quadratically_and_activations_linearly() -> None:
    assert scores_bytes(40, 16_000) / GIB == pytest.approx(19, abs=0.1)
    assert 0.7e12 < scores_bytes(40, 100_000) < 1e12  # "almost 1 TB"
    wide = replace(LLAMA, layers=(replace(LLAMA.layers[0], attention=AttentionSpec(40, 40, 128)),))
    once, twice = (
        activation_bytes(wide, tokens, 1) - activation_bytes(wide, 0, 1)
        for tokens in (50_000, 100_000)
    )
    assert twice == 2 * once < 0.02 * scores_bytes(40, 100_000)


def test_bloom_on_eight_a100_cannot_beat_21_6_ms() -> None:
    floor = Roofline(BLOOM, find_hardware("a100-80"), tp=8).step_floor(1, 1, 1)
    assert floor.ms == pytest.approx(21.6, abs=0.05)
    assert floor.messages == 2 * 70 + 2  # two per layer, embedding, logits
    # The expected time lies between the floor and the 45 ms that were once measured.
    expected = Roofline(BLOOM, find_hardware("a100-80"), tp=8).expected_seconds(1, 1, 1)
    assert 21.6 < expected * 1e3 < 45


# ---- counting ------------------------------------------------------------------------------------


def test_weights_that_layers_share_are_counted_once_and_read_every_time() -> None:
    model = describe_config(CONFIGS["Zamba2-7B"]).model
    counts = count_parameters(model)
    hidden, inner = 3584, 14336
    block = (3 + 0.5) * (2 * hidden) ** 2 + 3 * hidden * inner
    assert counts.total / 1e9 == pytest.approx(7.357, abs=1e-3)
    assert counts.reread == 11 * block  # two blocks and 13 uses
    read = Roofline(model, find_hardware("h200")).step_floor(1, 0, 0).bytes
    state_bytes = 2 * 4 * 81 * 7168 * 64
    assert read == pytest.approx(2 * (counts.matrices + counts.reread) + state_bytes, rel=0.002)
    # Each of two pipeline stages has both blocks.
    copies = weights_bytes(model, BF16, pp=2) - weights_bytes(model, BF16)
    assert copies == 2 * 2 * block
    assert weights_bytes(model, BF16) == 2 * counts.total


def test_every_parameter_is_counted() -> None:
    """Counted by hand, for a model with one dense and one MoE layer."""
    norm = NormSpec("layer", bias=True)
    dense = LayerSpec(
        AttentionSpec(4, 2, 8, bias=True, out_bias=True),
        MlpSpec(48, gated=False, bias=True),
        norm,
        None,
        norm,
    )
    sparse = LayerSpec(
        AttentionSpec(4, 4, 8, qk_norm=NormSpec()),
        MoeSpec(6, 2, MlpSpec(16), shared=MlpSpec(24), shared_gate=True),
        NormSpec(),
    )
    model = ModelSpec(100, 32, (dense, sparse), norm, 64, positions=10, tied=False)
    attention = 32 * (32 + 2 * 16) + 32 * 32
    first = attention + (32 + 32) + 32 + 2 * 32 * 48 + 48 + 32 + 2 * 64
    second = 32 * 96 + 32 * 32 + 2 * 8 + 32 * 6 + 32 + 6 * 3 * 32 * 16 + 3 * 32 * 24 + 32
    assert count_parameters(model).total == first + second + 64 + 100 * 32 + 10 * 32 + 100 * 32
    assert (
        count_parameters(replace(model, tied=True)).total
        == count_parameters(model).total - 100 * 32
    )


def test_the_parameters_of_attention_features_are_counted() -> None:
    mlp = MlpSpec(16)

    def count(**features: Any) -> int:
        attention = replace(AttentionSpec(4, 2, 8), **features)
        return count_parameters(ModelSpec(10, 32, (LayerSpec(attention, mlp),), None, 64)).total

    plain = count()
    assert count(sinks=True) - plain == 4
    assert count(gate=AttentionGateSpec("packed")) - plain == 32 * 4 * 8
    assert count(gate=AttentionGateSpec(per_head=True)) - plain == 32 * 4
    assert count(bias=True, gate=AttentionGateSpec("packed")) - plain == 32 * 32 + 64 + 32
    assert plain - count(keys_as_values=True) == 32 * 2 * 8
    assert count(v_norm=NormSpec()) - plain == 8
    assert count(v_norm=NormSpec(weight=False)) == plain


def with_attention(model: ModelSpec, **changes: Any) -> ModelSpec:
    """The same model with changes of the attention of every layer."""
    layers = tuple(
        replace(layer, attention=replace(layer.attention, **changes)) for layer in model.layers
    )
    return replace(model, layers=layers)


def with_window(model: ModelSpec, window: int) -> ModelSpec:
    """The same model with a sliding window in every layer."""
    return with_attention(model, window=window)


def test_kv_cache_bytes() -> None:
    assert kv_bytes_per_token(LLAMA) == 32 * 2 * 8 * 128 * 2
    assert kv_bytes_per_token(OCTOCODER) == 40 * 2 * 128 * 2  # multi-query attention: one KV head
    assert kv_bytes(with_window(LLAMA, 512), 4096) == kv_bytes(LLAMA, 512)
    assert kv_bytes(with_attention(LLAMA, chunk=512), 4096) == kv_bytes(LLAMA, 512)
    assert kv_bytes(with_attention(LLAMA, chunk=512), 513) == kv_bytes(LLAMA, 1)


def test_step_work_counts_chunks_and_decodes() -> None:
    chunk = ScheduledRequest(1, 10, 4, (), None, (), False)
    decode = ScheduledRequest(2, 99, 1, (), None, (), True)
    assert count_step_work([chunk, decode]) == (5, 114, 1, 11 + 12 + 13 + 14 + 100)


# ---- laws ----------------------------------------------------------------------------------------

steps = st.tuples(st.integers(1, 300), st.integers(1, 4000), st.booleans())


@pytest.mark.parametrize("model", [LLAMA, OCTOCODER, BLOOM], ids=["llama", "octocoder", "bloom"])
@given(step=steps, name=st.sampled_from(sorted(HARDWARE_SPECS)), tp=st.sampled_from([1, 2, 4, 8]))
def test_the_floor_is_a_lower_bound(
    model: ModelSpec, step: tuple[int, int, bool], name: str, tp: int
) -> None:
    """Not above the expected time, not below bytes over bandwidth, and monotonic in the work."""
    batch, context, sampled = step
    roofline = Roofline(model, find_hardware(name), tp=tp)
    count = batch if sampled else 0
    floor = roofline.step_floor(batch, batch * context, count)
    assert floor.seconds <= roofline.expected_seconds(batch, batch * context, count)
    read_seconds = floor.bytes / roofline.bandwidth
    compute_seconds = floor.operations / roofline.rate
    assert floor.seconds >= max(read_seconds, compute_seconds) * 0.999999
    smaller = roofline.floor_seconds(batch, batch * context, count)
    larger = roofline.floor_seconds(batch + 1, batch * context + 1, count)
    assert smaller <= larger


@given(st.integers(1, 64), st.integers(1, 2000))
def test_the_precomputed_floor_is_the_sum_over_kernels(batch: int, context: int) -> None:
    """Compared with the same floor computed layer by layer, matrix by matrix."""
    h200 = find_hardware("h200")
    total = 0.0
    for layer in LLAMA.layers:
        attention = layer.attention
        assert isinstance(layer.mlp, MlpSpec)
        q_size = attention.num_heads * attention.head_dim
        kv_size = attention.num_kv_heads * attention.head_dim
        values = LLAMA.hidden * (q_size + 2 * kv_size) + q_size * LLAMA.hidden
        values += 3 * LLAMA.hidden * layer.mlp.size
        norms = 2 * LLAMA.hidden
        read = 2 * (values + norms) / h200.bandwidth
        total += max(read, 2 * batch * values / h200.rates["bf16"])
        cache_read = batch * context * 2 * kv_size * 2 / h200.bandwidth
        total += max(cache_read, batch * context * 4 * q_size / h200.rates["bf16"])
    head = LLAMA.vocab * LLAMA.hidden
    total += max(2 * head / h200.bandwidth, 2 * batch * head / h200.rates["bf16"])
    floor = Roofline(LLAMA, h200).floor_seconds(batch, batch * context, batch)
    assert isclose(floor, total, rel_tol=1e-4)


def test_only_routed_experts_are_read() -> None:
    sparse = tuple(replace(layer, mlp=MoeSpec(8, 2, MlpSpec(14336))) for layer in LLAMA.layers)
    model = replace(LLAMA, layers=sparse)
    roofline = Roofline(model, find_hardware("h200"))
    read = [roofline.step_floor(tokens, tokens, tokens).bytes for tokens in (1, 2, 8, 512)]
    counts = count_parameters(model)
    expert_bytes = counts.experts / 8 * 2
    other_bytes = 2 * (counts.matrices + counts.head)
    cache_bytes = 512 * kv_bytes_per_token(model)
    assert read[0] == pytest.approx(other_bytes + 2 * expert_bytes, rel=1e-3)
    assert read == sorted(read)
    assert read[-1] == pytest.approx(other_bytes + 8 * expert_bytes + cache_bytes, rel=1e-3)


def test_kv_heads_that_cannot_be_split_are_read_by_every_rank() -> None:
    h200 = find_hardware("h200")
    one_rank = Roofline(OCTOCODER, h200)
    eight_ranks = Roofline(OCTOCODER, h200, tp=8)
    assert eight_ranks.kv_position_bytes[0] == 8 * one_rank.kv_position_bytes[0]
    llama_bytes = Roofline(LLAMA, h200).kv_position_bytes
    assert Roofline(LLAMA, h200, tp=8).kv_position_bytes == llama_bytes


def test_pipeline_stages_send_only_hidden_states() -> None:
    h200 = find_hardware("h200")
    pipeline = Roofline(LLAMA, h200, pp=4)
    assert pipeline.count_messages(3, 3) == (3, 3 * 3 * 4096 * 2)
    assert pipeline.floor_seconds(3, 30, 3) == Roofline(LLAMA, h200).floor_seconds(3, 30, 3)


def test_fewer_bits_lower_the_floor() -> None:
    h200 = find_hardware("h200")
    names = ("fp32", "bf16", "int8", "int4", "nf4")
    steps = [Roofline(LLAMA, h200, PRECISIONS[name]).floor_seconds(1, 100, 1) for name in names]
    assert steps == sorted(steps, reverse=True)


def test_windows_bound_the_operations_of_attention() -> None:
    h200 = find_hardware("h200")
    windowed = Roofline(with_window(LLAMA, 64), h200)
    unlimited = Roofline(LLAMA, h200)
    length = 4096
    pairs = length * (length + 1) // 2
    windowed_floor = windowed.step_floor(length, length, 1, pairs)
    unlimited_floor = unlimited.step_floor(length, length, 1, pairs)
    assert windowed_floor.operations < unlimited_floor.operations
    assert windowed.floor_seconds(1, length, 1) == pytest.approx(unlimited.floor_seconds(1, 64, 1))
    chunked = Roofline(with_attention(LLAMA, chunk=64), h200)
    assert chunked.step_floor(length, length, 1, pairs) == windowed_floor


def test_gates_take_time_and_memory() -> None:
    h200 = find_hardware("h200")
    gated = with_attention(LLAMA, gate=AttentionGateSpec())
    plain_floor = Roofline(LLAMA, h200).step_floor(64, 64, 64)
    gated_floor = Roofline(gated, h200).step_floor(64, 64, 64)
    gate_values = 32 * 4096 * 4096
    assert gated_floor.bytes - plain_floor.bytes == 2 * gate_values
    assert gated_floor.operations - plain_floor.operations == 2 * 64 * gate_values
    narrow = replace(LLAMA, layers=(replace(LLAMA.layers[0], mlp=MlpSpec(64)),))
    gated_narrow = with_attention(narrow, gate=AttentionGateSpec())
    growth = activation_bytes(gated_narrow, 100, 1) - activation_bytes(narrow, 100, 1)
    assert growth == 100 * 2 * 4096 * 2


@pytest.mark.parametrize("batch", [1, 8, 256])
def test_packed_weights_gain_most_at_small_batches(batch: int) -> None:
    """As measured on an H200: faster than bf16 at batch 1, slower at hundreds.

    Weights are unpacked first for prompts.
    """
    names = ("bf16", "int8", "int4")
    bf16, int8, int4 = (
        Roofline(OCTOCODER, find_hardware("h200"), PRECISIONS[name]) for name in names
    )
    step = batch, 256 * batch, batch
    assert int4.expected_seconds(*step) < int8.expected_seconds(*step)
    assert (int8.expected_seconds(*step) < bf16.expected_seconds(*step)) == (batch <= 8)
    prompt = 8192, 8192, 1, 8192 * 8193 // 2
    assert (
        bf16.expected_seconds(*prompt)
        < int8.expected_seconds(*prompt)
        < 1.2 * bf16.expected_seconds(*prompt)
    )


def test_a_cpu_mixes_the_rates_of_mixed_formats() -> None:
    cpu = find_hardware("zen3-2")
    assert cpu.mean_rate({"int4": 1.0}) == cpu.rate("int4")
    assert cpu.rate("Q6_K") < cpu.mean_rate({"int4": 0.5, "Q6_K": 0.5}) < cpu.rate("int4")
    single_format = WeightPrecision("Q4_K", 5, 8.5)
    two_formats = replace(single_format, format_shares={"Q4_K": 0.8, "Q6_K": 0.2})
    single_seconds = Roofline(LLAMA, cpu, single_format).expected_seconds(8, 800, 8)
    assert single_seconds < Roofline(LLAMA, cpu, two_formats).expected_seconds(8, 800, 8)
