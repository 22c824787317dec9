"""`bloomery profile` on a small random model: a table, a trace, and steps measured without a profiler."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.cli import main
from bloomery.tools.plan.forecast import Layout, Placed
from bloomery.tools.plan.subject import subject
from bloomery.roofline import PRECISIONS, machine
from bloomery.tools.simulate import calibrate, read_steps

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "torch_dtype": "float32",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


FLAGS = [
    "--load-format",
    "dummy",
    "--threads",
    "1",
    "--kv-cache-gib",
    "0.05",
    "--no-native",
    "--device",
    "cpu",
]


def test_a_table_and_a_trace(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    command = [
        "profile",
        model,
        *FLAGS,
        "--steps",
        "3",
        "--batch",
        "2",
        "--prompt-tokens",
        "8",
        "--trace",
        str(trace),
    ]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "aten::" in out and "never publish" in out
    assert any(
        event.get("name", "").startswith("aten::")
        for event in json.loads(trace.read_text())["traceEvents"]
    )
    assert main([*command, "--batch", "10000"]) == 1
    for flags in (
        "--steps 0",
        "--batch -1",
        "--trace nowhere/trace.json",
        "--record nowhere/steps.jsonl",
    ):
        with pytest.raises(SystemExit):
            main([*command, *flags.split()])


def test_native_kernels_are_seen_by_name(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recorded step is one call: the profile does its operations one by one."""
    from bloomery.native.team import team

    flags = [flag for flag in FLAGS if flag != "--no-native"]
    command = ["profile", model, *flags, "--steps", "2", "--batch", "2", "--prompt-tokens", "8"]
    assert main([*command, "--trace", str(tmp_path / "trace.json")]) == 0
    if team().active:
        assert "native_linear" in capsys.readouterr().out
        team().stop()


def test_recorded_steps_calibrate_the_simulator(model: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert main(["profile", model, *FLAGS, "--max-sequences", "16", "--record", str(path)]) == 0
    steps = read_steps(path)
    assert {step.sampled for step in steps} == {1, 2, 4, 8, 16}
    for step in steps:
        assert step.seconds > 0 and step.tokens in (step.sampled, 16, 64, 256, 512)
        assert step.pairs is not None and step.pairs >= step.attended
    placed = Placed(subject(model).model, machine("zen3-2"), PRECISIONS["fp32"], 32, Layout())
    # Their times are those of a machine that may be busy; what they must do is grow with the work.
    known = [
        replace(step, seconds=0.001 + 3 * placed.roofline.expected(*step.work)) for step in steps
    ]
    found = calibrate(placed.roofline, known)
    assert 0.001 <= found.step < 0.01 and found.memory > 0 and found.compute > 0
