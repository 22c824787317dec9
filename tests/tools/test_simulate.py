"""The simulator: nothing lost, nobody forgotten, the same every time, and calibration that finds what it was given."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bloomery.tools.bench.load import Arrival, lengths, pattern, read
from bloomery.tools.bench.summary import Targets
from bloomery.cli import main
from bloomery.config import Config
from bloomery.errors import ConfigError
from bloomery.tools.plan.forecast import Layout, Placed
from bloomery.tools.plan.subject import subject
from bloomery.roofline import PRECISIONS, machine
from bloomery.tools.simulate import Fleet, Measured, calibrate, simulated

SHAPES = Path(__file__).parent.parent.parent / "benchmarks" / "shapes"
MODEL = subject(str(SHAPES / "llama-8b.json")).model
POLICIES = ("fair", "fcfs")


def placed(layout: Layout = Layout(), kind: str = "h200") -> Placed:
    return Placed(MODEL, machine(kind), PRECISIONS["bf16"], 16, layout)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("load", ["poisson:60", "burst:40:2", "closed:24", "chat:8:4"])
@pytest.mark.parametrize("layout", [Layout(), Layout(2, 1, 1), Layout(1, 2, 2)], ids=str)
def test_everybody_is_answered_in_full(policy: str, load: str, layout: Layout) -> None:
    arrivals = pattern(load, 60, lengths("20-400:8-40"), seed=3)
    fleet = Fleet(placed(layout), Config(policy=policy))
    records = fleet.run(arrivals)
    assert [record.tokens for record in records] == [arrival.output for arrival in arrivals]
    for record in records:
        assert record.error is None
        assert record.sent < record.stamps[0] <= record.stamps[-1] == record.done
        assert list(record.stamps) == sorted(record.stamps)
    for replica in fleet.replicas:
        assert (
            replica.blocks.available == replica.blocks.count
            and not replica.loop.busy
            and replica.load == 0
        )


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_starves_where_memory_is_short(policy: str) -> None:
    """Long requests among a stream of short ones on a card that holds few: preempted perhaps, never forgotten."""
    arrivals = [
        *pattern("poisson:30", 300, lengths("32:16"), 1),
        *pattern("poisson:1", 12, lengths("6000:200"), 2),
    ]
    fleet = Fleet(placed(kind="l4"), Config(policy=policy))
    records = fleet.run(arrivals)
    assert all(record.answered for record in records)
    ended = max(record.done for record in records[:300])
    alone = [Fleet(placed(kind="l4")).run([replace(arrivals[-1], arrival=0.0)])[0].done]
    assert max(record.done - record.sent for record in records[300:]) < 40 * alone[0] + ended


def test_the_same_every_time() -> None:
    arrivals = pattern("poisson:50", 50, lengths("sharegpt"), seed=5)
    first, second = (
        simulated(placed(Layout(1, 1, 3)), arrivals, Config(), Targets()) for _ in range(2)
    )
    assert first == second and first["steps"] > 100


def test_a_step_takes_what_is_expected() -> None:
    """One request alone: the prompt, then a step a token."""
    home = placed()
    record = Fleet(home).run([Arrival(2.0, 100, 5)])[0]
    prompt = home.roofline.expected(100, 100, 1, 5050)
    steps = [home.roofline.expected(1, 100 + i, 1) for i in range(1, 5)]
    assert record.sent == 2.0
    assert record.first == pytest.approx(prompt)
    assert record.gaps() == pytest.approx(steps)


def test_conversations_find_their_prefix_and_replicas_share_the_load() -> None:
    """A second turn is cheaper than its length where the first was served; four replicas outrun one."""
    turns = [Arrival(0.0, 4000, 10, "talk"), Arrival(None, 4100, 10, "talk", 4000, 1.0)]
    first, second = Fleet(placed(Layout(1, 1, 3))).run(turns)
    assert second.sent == pytest.approx(first.done + 1.0)
    assert second.first < 0.3 * first.first
    busy = pattern("burst:200:9", 200, lengths("500:50"))
    spans = [max(r.done for r in Fleet(placed(Layout(1, 1, n))).run(busy)) for n in (1, 4)]
    assert spans[1] < 0.5 * spans[0]


def test_what_can_never_fit_is_refused_alone() -> None:
    fleet = Fleet(placed(kind="l4"))
    longest = fleet.replicas[0].longest
    records = fleet.run(
        [Arrival(0.0, longest, 4), Arrival(0.0, 10, 4), Arrival(0.0, longest - 3, 10)]
    )
    assert records[0].error and "no room" in records[0].error
    assert records[1].answered
    assert records[2].tokens == 3, "an answer ends where the context does"
    assert fleet.replicas[0].load == 0


def test_the_first_of_a_session_waits_for_nobody() -> None:
    first, second = Fleet(placed()).run(
        [Arrival(None, 10, 4, "a", after=1.0), Arrival(None, 10, 4, "a", after=2.0)]
    )
    assert first.sent == 1.0 and second.sent == pytest.approx(first.done + 2.0)


def test_calibration_finds_the_constants_of_the_steps_it_is_given() -> None:
    home = placed()
    chance = random.Random(0)
    truth = replace(
        home.roofline.calibration,
        memory=0.6,
        compute=0.4,
        launch=0.0,
        step=2e-3,
        eager=0.0,
        sequence=1e-6,
    )
    shapes = [(n, n * chance.randint(50, 900), n, None) for n in (1, 2, 5, 9, 20, 40, 80, 160)]
    shapes += [(n, n, 1, n * (n + 1) // 2) for n in (8, 16, 64, 300, 1000, 4000)]
    home.roofline.calibration = truth
    steps = [Measured(t, a, s, home.roofline.expected(t, a, s, p), p) for t, a, s, p in shapes]
    home.roofline.calibration = machine("h200").calibration
    home.roofline.calibration = calibrate(home.roofline, steps)
    for step in steps:
        again = home.roofline.expected(step.tokens, step.attended, step.sampled, step.pairs)
        assert again == pytest.approx(step.seconds, rel=0.05)
    with pytest.raises(ConfigError, match="too few"):
        calibrate(home.roofline, steps[:2])


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    steps = tmp_path / "steps.jsonl"
    arrivals = pattern("chat:20:3", 60, lengths("50:10"))
    trace.write_text("".join(json.dumps(asdict(arrival)) + "\n" for arrival in arrivals))
    assert read(trace) == arrivals
    rows = [
        {"tokens": n, "attended": 100 * n, "sampled": n, "seconds": 0.02 + 0.001 * n}
        for n in (1, 2, 8, 32, 64)
    ]
    steps.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        "plan",
        str(SHAPES / "llama-8b.json"),
        "--gpu",
        "h200",
        "--simulate",
        str(trace),
        "--json",
    ]
    assert main(command) == 0
    quick = json.loads(capsys.readouterr().out)
    assert main([*command, "--calibration", str(steps)]) == 0
    slow = json.loads(capsys.readouterr().out)
    for policy in POLICIES:
        assert quick[policy]["answered"] == 60
        assert (
            slow[policy]["between_tokens_ms"]["p50"]
            > 20
            > quick[policy]["between_tokens_ms"]["p50"]
        )
    assert main([*command, "--calibration", str(tmp_path / "missing")]) == 1
    assert main(["plan", "--calibration", str(steps)]) == 1
    assert "--simulate" in capsys.readouterr().err
    trace.write_text('{"arrival": 0, "prompt": 500000, "output": 5}\n')
    assert main(command[:-1]) == 0
    assert "fair: 1 x a prompt of 500000 tokens" in capsys.readouterr().err
    trace.write_text('{"arrival": 0, "prompt": 5}\n')
    assert main(command) == 1
    assert "line 1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_million_steps_and_nobody_starves(policy: str) -> None:
    """Overload and calm in turn, short among long; everybody is answered within a bounded time."""
    home = placed(kind="l4")
    steps = 0
    chance = random.Random(7)
    while steps < 1_000_000:
        rate = chance.choice([0.3, 1, 2])
        arrivals = [
            *pattern(f"poisson:{3 * rate}", 300, lengths("8-64:4-32"), steps),
            *pattern(f"poisson:{rate / 4}", 40, lengths("100-3000:50-800"), steps + 1),
        ]
        fleet = Fleet(home, Config(policy=policy))
        records = fleet.run(arrivals)
        assert all(record.answered for record in records)
        steps += sum(replica.executor.steps for replica in fleet.replicas)
