"""Estimates: expected times against measured ones, what fits, and the choice of a layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bloomery.hardware import HARDWARE_SPECS, find_hardware
from bloomery.roofline import PRECISIONS, kv_bytes_per_token, state_bytes
from bloomery.runtime.kv_cache import StageCache, single_table_cache
from bloomery.spec import (
    AttentionSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
)
from bloomery.tools.plan.estimate import (
    CUDA_GRAPH_BYTES,
    AdapterLimits,
    DeviceLayout,
    PlacedModel,
    PlanEstimate,
    PlanOptions,
    device_layouts,
)
from bloomery.tools.plan.model_source import read_model_source
from bloomery.tools.plan.report import give_advice
from tests.tools.plan.conftest import PlanRunner
from tests.tools.plan.measured_steps import compare_row, place_shape, read_log_rows, shape_path

BF16 = PRECISIONS["bf16"]

# Model, precision, batch, milliseconds per step over a whole run, from benchmarks/LOG.md.
MEASURED_MS = [
    ("llama-8b", "bf16", 1, 4.031),
    ("llama-8b", "bf16", 8, 4.791),
    ("llama-8b", "bf16", 64, 6.260),
    ("llama-8b", "int4", 1, 1.795),
    ("llama-1b", "bf16", 1, 0.849),
    ("llama-1b", "bf16", 64, 1.499),
    ("octocoder", "bf16", 1, 8.020),
    ("octocoder", "int8", 1, 4.476),
    ("octocoder", "int8", 8, 6.999),
    ("octocoder", "int8", 64, 8.597),
    ("octocoder", "int4", 1, 2.822),
    ("octocoder", "int4", 8, 6.029),
    ("octocoder", "int4", 64, 7.967),
]

# ---- times ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, precision, batch, ms", MEASURED_MS)
def test_expected_decode_times_are_near_measured_ones(
    name: str, precision: str, batch: int, ms: float
) -> None:
    placed = place_shape(name, "h200", precision)
    assert placed.decode_seconds(batch, 256) * 1e3 == pytest.approx(ms, rel=0.15)


def test_every_run_of_the_log_is_near_its_expected_time() -> None:
    rows = list(read_log_rows())
    assert len(rows) > 20
    assert {row.precision for row in rows} >= {"bf16", "int8", "int4"}
    for row in rows:
        assert abs(compare_row(row, "h200").relative_error) < 0.15, row


def test_tensor_parallelism_cuts_latency_and_pipelines_do_not() -> None:
    source = read_model_source(shape_path("bloom-176b"))
    hardware = find_hardware("a100-80")
    plan = PlanEstimate(source, PlanOptions(hardware, BF16, devices=8))
    seconds = {str(placed.layout): placed.decode_seconds(1, 1024) for placed in plan.fitting}
    assert seconds["PP 8"] > 2 * seconds["TP 4 x PP 2"] > 2 * seconds["TP 8"]
    pipeline = PlanEstimate(source, PlanOptions(hardware, BF16, layout=DeviceLayout(1, 8)))
    assert any("PP 8 is good for throughput" in sentence for sentence in give_advice(pipeline))


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-8b", "bloom-176b", "octocoder"])
@pytest.mark.parametrize("hardware_name", ["h200", "a100-40", "l4"])
def test_the_largest_batch_fits_and_a_larger_one_does_not(name: str, hardware_name: str) -> None:
    model = read_model_source(shape_path(name)).model
    hardware = HARDWARE_SPECS[hardware_name]
    for layout in device_layouts(model, 8):
        placed = PlacedModel(model, hardware, BF16, 16, layout)
        max_batch = placed.max_batch_size(1024)
        sequence_bytes = placed.kv_bytes_per_sequence(1024)
        if max_batch > 0:
            assert max_batch * sequence_bytes <= placed.free_kv_bytes
            assert placed.free_kv_bytes < (max_batch + 1) * sequence_bytes
        longest = placed.max_context()
        assert longest == model.context or placed.max_batch_size(longest + 1) == 0
        users = placed.max_users(1024) // layout.replicas
        assert users <= max_batch
        if users:
            assert placed.decode_seconds(users, 1024) <= 0.1


def test_a_sliding_window_frees_memory_as_in_the_engine(
    tmp_path: Path, plan_json: PlanRunner
) -> None:
    config = json.loads(Path(shape_path("llama-8b")).read_text())
    path = tmp_path / "windowed.json"
    path.write_text(json.dumps({**config, "model_type": "mistral"}))
    model = read_model_source(str(path)).model
    assert model.layers[0].attention.window == 4096
    placed = PlacedModel(model, find_hardware("h200"), BF16, 16, DeviceLayout())
    cache = single_table_cache(model, 64, torch.bfloat16)
    assert placed.kv_block_bytes == cache.block_bytes
    num_blocks = 4096 // 64 + 2
    assert placed.kv_bytes_per_sequence(32768) == num_blocks * cache.block_bytes
    # A step of 8,192 tokens needs room for them, too.
    assert placed.prefill_kv_bytes(32768) == 8192 // 64 * cache.block_bytes - cache.block_bytes
    flags = ("--gpu", "h200", "--context", "32768")
    windowed = plan_json(str(path), *flags)
    unlimited = plan_json(shape_path("llama-8b"), *flags)
    assert windowed["largest_batch"] > 7 * unlimited["largest_batch"]
    assert windowed["rows"][-1]["floor_ms"] != unlimited["rows"][-1]["floor_ms"]


def test_three_times_as_many_users_of_gemma_3_fit_a_long_context() -> None:
    """Five of six layers keep a window of 1,024 positions."""
    model = read_model_source(shape_path("gemma-3-27b")).model
    placed = PlacedModel(model, find_hardware("h200"), BF16, 16, DeviceLayout())
    all_positions = 32_000 * kv_bytes_per_token(model)
    num_before = int(placed.free_kv_bytes // all_positions)
    assert placed.max_batch_size(32_000) >= 3 * num_before > 0
    window_group = placed.cache_layout.groups[1]
    assert (window_group.window, window_group.num_layers) == (1024, 52)
    # The engine's memory: ten layers in a block.
    layout = placed.cache_layout
    cache = StageCache(model, layout, layout.place_layers(range(62)), 64, torch.bfloat16)
    assert placed.kv_block_bytes == cache.block_bytes


def test_adapters_take_memory_and_time() -> None:
    """Rank 16 on all layers of Llama 8B: 84 MB, and the biases of a slot."""
    model = read_model_source(shape_path("llama-8b")).model
    limits = AdapterLimits(max_loras=4, max_rank=16, max_cpu_loras=10)
    values_bytes = 2 * 41_943_040
    for layout in (DeviceLayout(), DeviceLayout(tp=2), DeviceLayout(pp=2)):
        h200 = find_hardware("h200")
        base = PlacedModel(model, h200, BF16, 16, layout)
        placed = PlacedModel(model, h200, BF16, 16, layout, limits)
        adapters = placed.adapters
        assert adapters is not None
        num_ranks = layout.devices
        # Each tensor parallel rank has the whole A of projections that split their outputs.
        most = 1.0 if layout.tp == 1 else 1.4
        share = adapters.adapter_bytes * num_ranks / values_bytes
        assert 1.0 < share < 1.05 * most
        assert adapters.slots_bytes == 4 * adapters.adapter_bytes
        assert adapters.host_bytes == 10 * adapters.adapter_bytes
        graphs = CUDA_GRAPH_BYTES
        taken = adapters.slots_bytes + adapters.step_bytes + graphs
        assert base.free_kv_bytes - placed.free_kv_bytes == taken
    # Two sequences read two adapters; any number of them read four at most.
    placed = PlacedModel(model, h200, BF16, 16, DeviceLayout(), limits)
    base = PlacedModel(model, h200, BF16, 16, DeviceLayout())
    for batch, num_adapters in ((1, 1), (2, 2), (8, 4)):
        floors = [p.estimate_batch(batch, 100).floor_ms for p in (base, placed)]
        added = num_adapters * values_bytes / h200.bandwidth * 1e3
        assert floors[1] - floors[0] == pytest.approx(added)


def test_the_host_memory_of_adapters_is_that_of_a_cpu() -> None:
    model = read_model_source(shape_path("llama-1b")).model
    cpu = find_hardware("zen3-2")
    limits = AdapterLimits(max_loras=2, max_rank=8, max_cpu_loras=6)
    base = PlacedModel(model, cpu, PRECISIONS["fp32"], 32, DeviceLayout())
    placed = PlacedModel(model, cpu, PRECISIONS["fp32"], 32, DeviceLayout(), limits)
    assert placed.adapters is not None
    taken = 8 * placed.adapters.adapter_bytes + placed.adapters.step_bytes
    assert base.free_kv_bytes - placed.free_kv_bytes == taken


# ---- layouts -------------------------------------------------------------------------------------


def test_goals_choose_different_layouts_where_links_are_slow() -> None:
    source = read_model_source(shape_path("llama-8b"))
    options = PlanOptions(find_hardware("l4"), BF16, goal="latency", devices=8)
    latency = PlanEstimate(source, options)
    options = PlanOptions(find_hardware("l4"), BF16, goal="throughput", devices=8)
    throughput = PlanEstimate(source, options)
    assert latency.chosen.layout.tp > throughput.chosen.layout.tp
    assert latency.chosen.layout.devices == throughput.chosen.layout.devices == 8
    best = throughput.throughput(throughput.chosen)
    assert best >= latency.throughput(latency.chosen)


def test_replicas_are_preferred_when_a_pipeline_is_hardly_faster() -> None:
    source = read_model_source(shape_path("llama-8b"))
    options = PlanOptions(find_hardware("h200"), BF16, goal="throughput", devices=4)
    plan = PlanEstimate(source, options)
    assert plan.chosen.layout == DeviceLayout(1, 1, 4)
    best = max(map(plan.throughput, plan.fitting))
    assert 0.95 * best <= plan.throughput(plan.chosen) < best
    assert not any("PP" in sentence for sentence in give_advice(plan))


def test_devices_beyond_one_copy_of_the_model_are_replicas(plan_json: PlanRunner) -> None:
    flags = ("--gpu", "h200", "--devices", "8", "--tp", "4")
    plan = plan_json(shape_path("llama-8b"), *flags)
    assert plan["layout"] == {"tp": 4, "pp": 1, "replicas": 2}


# ---- recurrent states ----------------------------------------------------------------------------


def place_hybrid(kv_bits: float = 16, tp: int = 1) -> PlacedModel:
    """A model with attention in every fourth layer and gated delta nets in the others."""
    attends = LayerSpec(AttentionSpec(16, 2, 256), MlpSpec(512))
    recurs = LayerSpec(None, MlpSpec(512), recurrent=GatedDeltaNetSpec(16, 32, 128, 128))
    layers = tuple(attends if index % 4 == 3 else recurs for index in range(40))
    model = ModelSpec(248_320, 2048, layers, NormSpec(), context=262_144)
    return PlacedModel(
        model, find_hardware("h200"), PRECISIONS["bf16"], kv_bits, DeviceLayout(tp=tp)
    )


def test_a_sequence_takes_its_state_and_its_positions() -> None:
    placed = place_hybrid()
    state = state_bytes(placed.model)
    assert state <= placed.state_bytes_per_sequence <= 1.03 * state
    position = kv_bytes_per_token(placed.model)
    for context in (64, 6400):
        expected = placed.state_bytes_per_sequence + context * position
        assert placed.kv_bytes_per_sequence(context) == expected
    # One sequence less leaves room for as many checkpoints as fit its memory.
    largest = placed.max_batch_size(6400)
    assert placed.count_checkpoints(largest, 6400) <= 1
    assert placed.count_checkpoints(largest // 2, 6400) > largest // 2


def test_states_are_divided_over_ranks_and_do_not_shrink_with_the_kv_cache() -> None:
    one_rank = place_hybrid().state_bytes_per_sequence
    assert place_hybrid(tp=2).state_bytes_per_sequence == one_rank / 2
    # 8-bit keys with scales: the scales of a block that holds a state lie idle.
    assert one_rank <= place_hybrid(kv_bits=8.125).state_bytes_per_sequence <= 1.03 * one_rank


def test_steps_read_and_write_states() -> None:
    placed = place_hybrid()
    alone = placed.roofline.step_floor(1, 1, 1)
    many = placed.roofline.step_floor(64, 64, 64)
    states = 2 * 63 * state_bytes(placed.model)
    positions = 63 * kv_bytes_per_token(placed.model)
    assert many.bytes - alone.bytes == pytest.approx(states + positions)
    assert many.seconds - alone.seconds >= states / placed.hardware.bandwidth
    assert placed.decode_seconds(64, 1) > states / placed.hardware.bandwidth
    assert placed.estimate_batch(256, 1024).bound == "cache"
