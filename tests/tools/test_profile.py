"""`bloomery profile` on a small random model: a table, a trace, and measured steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.cli import main
from bloomery.hardware import find_hardware
from bloomery.roofline import PRECISIONS
from bloomery.tools.plan.estimate import DeviceLayout, PlacedModel
from bloomery.tools.plan.model_source import read_model_source
from bloomery.tools.simulate import calibrate, read_steps

TINY_CONFIG = {
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
def tiny_model(tmp_path: Path) -> str:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    return str(folder)


FLAGS = [
    "--load-format",
    "dummy",
    "--threads",
    "1",
    "--kv-cache-gib",
    "0.05",
    "--no-cpu-kernels",
    "--device",
    "cpu",
]


def test_a_profile_is_a_table_and_a_trace(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    command = [
        "profile",
        tiny_model,
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


def test_cpu_kernels_are_profiled_by_name(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A traced CPU step is one call, so the profile runs its operations one by one."""
    from bloomery.native.build import NativeBuildError, build_library

    flags = [flag for flag in FLAGS if flag != "--no-cpu-kernels"]
    command = [
        "profile",
        tiny_model,
        *flags,
        "--steps",
        "2",
        "--batch",
        "2",
        "--prompt-tokens",
        "8",
    ]
    assert main([*command, "--trace", str(tmp_path / "trace.json")]) == 0
    try:
        build_library()
    except NativeBuildError as reason:
        pytest.skip(str(reason))
    assert "native_linear" in capsys.readouterr().out


def test_recorded_steps_calibrate_the_simulator(tiny_model: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert main(["profile", tiny_model, *FLAGS, "--max-num-seqs", "16", "--record", str(path)]) == 0
    steps = read_steps(path)
    assert {step.sampled for step in steps} == {1, 2, 4, 8, 16}
    for step in steps:
        assert step.seconds > 0 and step.tokens in (step.sampled, 16, 64, 256, 512)
        assert step.pairs is not None and step.pairs >= step.attended
    model = read_model_source(tiny_model).model
    cpu = find_hardware("zen3-2")
    placed = PlacedModel(model, cpu, PRECISIONS["fp32"], 32, DeviceLayout())
    # The measured times may be those of a busy machine, so the fit gets times that are known.
    known_steps = [
        replace(step, seconds=0.001 + 3 * placed.roofline.expected_seconds(*step.work))
        for step in steps
    ]
    calibration = calibrate(placed.roofline, known_steps)
    assert 0.001 <= calibration.step_overhead_seconds < 0.01
    assert calibration.memory_efficiency > 0
    assert calibration.compute_efficiency > 0
