"""The simulator: complete answers, no starvation, the same result each time, and calibration."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bloomery.cli import main
from bloomery.config import EngineConfig
from bloomery.errors import ConfigError
from bloomery.hardware import find_hardware
from bloomery.roofline import PRECISIONS
from bloomery.tools.bench.summary import GoodputTargets
from bloomery.tools.bench.workload import (
    RequestArrival,
    generate_arrivals,
    parse_lengths,
    read_trace,
)
from bloomery.tools.plan.estimate import DeviceLayout, PlacedModel
from bloomery.tools.plan.model_source import read_model_source
from bloomery.tools.simulate import MeasuredStep, SimulatedFleet, calibrate, simulate_trace

SHAPES = Path(__file__).parent.parent.parent / "benchmarks" / "shapes"
MODEL = read_model_source(str(SHAPES / "llama-8b.json")).model
POLICIES = ("fair", "fcfs")
LAYOUTS = [DeviceLayout(), DeviceLayout(2, 1, 1), DeviceLayout(1, 2, 2)]


def place_model(layout: DeviceLayout = DeviceLayout(), gpu: str = "h200") -> PlacedModel:
    return PlacedModel(MODEL, find_hardware(gpu), PRECISIONS["bf16"], 16, layout)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pattern", ["poisson:60", "burst:40:2", "closed:24", "chat:8:4"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_request_is_answered_completely(
    policy: str, pattern: str, layout: DeviceLayout
) -> None:
    arrivals = generate_arrivals(pattern, 60, parse_lengths("20-400:8-40"), seed=3)
    fleet = SimulatedFleet(place_model(layout), EngineConfig(policy=policy))
    records = fleet.run(arrivals)
    assert [record.output_tokens for record in records] == [arrival.output for arrival in arrivals]
    for record in records:
        assert record.error is None
        assert record.sent < record.piece_times[0] <= record.piece_times[-1] == record.done
        assert list(record.piece_times) == sorted(record.piece_times)
    for replica in fleet.replicas:
        assert replica.block_pool.num_free_blocks == replica.block_pool.num_blocks
        assert not replica.loop.busy
        assert replica.num_open == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_no_request_starves_where_memory_is_short(policy: str) -> None:
    """Long requests among many short ones, on a card that holds few of them."""
    short = generate_arrivals("poisson:30", 300, parse_lengths("32:16"), 1)
    long = generate_arrivals("poisson:1", 12, parse_lengths("6000:200"), 2)
    placed = place_model(gpu="l4")
    records = SimulatedFleet(placed, EngineConfig(policy=policy)).run([*short, *long])
    assert all(record.answered for record in records)
    last_short_end = max(record.done for record in records[:300])
    solo_record = SimulatedFleet(placed).run([replace(long[-1], arrival=0.0)])[0]
    slowest_long = max(record.done - record.sent for record in records[300:])
    assert slowest_long < 40 * solo_record.done + last_short_end


def test_a_simulation_gives_the_same_result_each_time() -> None:
    arrivals = generate_arrivals("poisson:50", 50, parse_lengths("sharegpt"), seed=5)
    layout = DeviceLayout(1, 1, 3)
    first, second = [
        simulate_trace(place_model(layout), arrivals, EngineConfig(), GoodputTargets())
        for _ in range(2)
    ]
    assert first == second
    assert first["steps"] > 100


def test_a_step_takes_the_expected_time() -> None:
    """A single request takes its prefill and one decode step per further token."""
    placed = place_model()
    record = SimulatedFleet(placed).run([RequestArrival(2.0, 100, 5)])[0]
    prefill_seconds = placed.roofline.expected_seconds(100, 100, 1, 5050)
    decode_seconds = [placed.roofline.expected_seconds(1, 100 + i, 1) for i in range(1, 5)]
    assert record.sent == 2.0
    assert record.ttft == pytest.approx(prefill_seconds)
    assert record.inter_token_latencies() == pytest.approx(decode_seconds)


def test_the_second_turn_of_a_chat_is_a_prefix_hit() -> None:
    turns = [
        RequestArrival(0.0, 4000, 10, "talk"),
        RequestArrival(None, 4100, 10, "talk", 4000, 1.0),
    ]
    first, second = SimulatedFleet(place_model(DeviceLayout(1, 1, 3))).run(turns)
    assert second.sent == pytest.approx(first.done + 1.0)
    assert second.ttft < 0.3 * first.ttft


def test_four_replicas_are_faster_than_one() -> None:
    arrivals = generate_arrivals("burst:200:9", 200, parse_lengths("500:50"))
    spans = []
    for num_replicas in (1, 4):
        fleet = SimulatedFleet(place_model(DeviceLayout(1, 1, num_replicas)))
        spans.append(max(record.done for record in fleet.run(arrivals)))
    assert spans[1] < 0.5 * spans[0]


def test_only_a_request_that_can_never_fit_is_refused() -> None:
    fleet = SimulatedFleet(place_model(gpu="l4"))
    max_len = fleet.replicas[0].max_len
    too_long, short, almost_too_long = fleet.run(
        [
            RequestArrival(0.0, max_len, 4),
            RequestArrival(0.0, 10, 4),
            RequestArrival(0.0, max_len - 3, 10),
        ]
    )
    assert too_long.error and "no room" in too_long.error
    assert short.answered
    assert almost_too_long.output_tokens == 3, "the output ends where the context ends"
    assert fleet.replicas[0].num_open == 0


def test_the_first_request_of_a_session_waits_for_no_other() -> None:
    first, second = SimulatedFleet(place_model()).run(
        [RequestArrival(None, 10, 4, "a", after=1.0), RequestArrival(None, 10, 4, "a", after=2.0)]
    )
    assert first.sent == 1.0
    assert second.sent == pytest.approx(first.done + 2.0)


def test_calibration_finds_the_constants_behind_the_steps() -> None:
    placed = place_model()
    roofline = placed.roofline
    rng = random.Random(0)
    original = roofline.calibration
    true_calibration = replace(
        original,
        memory_efficiency=0.6,
        compute_efficiency=0.4,
        kernel_gap_seconds=0.0,
        step_overhead_seconds=2e-3,
        eager_launch_seconds=0.0,
        sequence_seconds_per_layer=1e-6,
    )
    # (tokens, attended keys, sampled, pairs)
    decodes = [(n, n * rng.randint(50, 900), n, None) for n in (1, 2, 5, 9, 20, 40, 80, 160)]
    prefills = [(n, n, 1, n * (n + 1) // 2) for n in (8, 16, 64, 300, 1000, 4000)]
    roofline.calibration = true_calibration
    steps = []
    for tokens, attended, sampled, pairs in [*decodes, *prefills]:
        seconds = roofline.expected_seconds(tokens, attended, sampled, pairs)
        steps.append(MeasuredStep(tokens, attended, sampled, seconds, pairs))
    roofline.calibration = original
    roofline.calibration = calibrate(roofline, steps)
    for step in steps:
        assert roofline.expected_seconds(*step.work) == pytest.approx(step.seconds, rel=0.05)
    with pytest.raises(ConfigError, match="too few"):
        calibrate(roofline, steps[:2])


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    steps = tmp_path / "steps.jsonl"
    arrivals = generate_arrivals("chat:20:3", 60, parse_lengths("50:10"))
    trace.write_text("".join(json.dumps(asdict(arrival)) + "\n" for arrival in arrivals))
    assert read_trace(trace) == arrivals
    rows = [
        {"tokens": n, "attended": 100 * n, "sampled": n, "seconds": 0.02 + 0.001 * n}
        for n in (1, 2, 8, 32, 64)
    ]
    steps.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = str(SHAPES / "llama-8b.json")
    command = ["plan", model, "--gpu", "h200", "--simulate", str(trace)]
    json_command = [*command, "--json"]
    assert main(json_command) == 0
    uncalibrated = json.loads(capsys.readouterr().out)
    assert main([*json_command, "--calibration", str(steps)]) == 0
    calibrated = json.loads(capsys.readouterr().out)
    for policy in POLICIES:
        assert uncalibrated[policy]["answered"] == 60
        assert calibrated[policy]["itl_ms"]["p50"] > 20 > uncalibrated[policy]["itl_ms"]["p50"]
    assert main([*json_command, "--calibration", str(tmp_path / "missing")]) == 1
    assert main(["plan", "--calibration", str(steps)]) == 1
    assert "--simulate" in capsys.readouterr().err
    trace.write_text('{"arrival": 0, "prompt": 500000, "output": 5}\n')
    assert main(command) == 0
    assert "fair: 1 x a prompt of 500000 tokens" in capsys.readouterr().err
    trace.write_text('{"arrival": 0, "prompt": 5}\n')
    assert main(json_command) == 1
    assert "line 1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_no_request_starves_in_a_million_steps(policy: str) -> None:
    """Overload and calm periods in turn, short requests among long ones."""
    placed = place_model(gpu="l4")
    num_steps = 0
    rng = random.Random(7)
    while num_steps < 1_000_000:
        rate = rng.choice([0.3, 1, 2])
        short_pattern = f"poisson:{3 * rate}"
        long_pattern = f"poisson:{rate / 4}"
        short = generate_arrivals(short_pattern, 300, parse_lengths("8-64:4-32"), num_steps)
        long = generate_arrivals(long_pattern, 40, parse_lengths("100-3000:50-800"), num_steps + 1)
        fleet = SimulatedFleet(placed, EngineConfig(policy=policy))
        records = fleet.run([*short, *long])
        assert all(record.answered for record in records)
        num_steps += sum(replica.executor.num_steps for replica in fleet.replicas)
