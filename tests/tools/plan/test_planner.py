"""`bloomery plan` as people and programs use it: flags, JSON, refusals, --measure."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

from bloomery.cli import main
from bloomery.hardware import detect_hardware
from bloomery.runtime import device_measurement
from bloomery.tools.plan.planner import measure_hardware
from tests.tools.plan.conftest import PlanRunner
from tests.tools.plan.measured_steps import shape_path


def test_json_has_what_programs_need(plan_json: PlanRunner) -> None:
    plan = plan_json(shape_path("llama-8b"), "--gpu", "h200", "--price", "4", "--context", "512")
    assert plan["weights_bytes"] == 2 * plan["parameters"] == 16_060_522_496
    assert plan["kv_bytes_per_token"] == 131_072
    assert {1, 8, 64} <= {row["batch"] for row in plan["rows"]}
    for row in plan["rows"]:
        assert 0 < row["floor_ms"] < row["expected_ms"]
        assert row["cost"] == pytest.approx(4 / 3600 / row["tokens_per_second"] * 1e6)
    assert 512 in {row["context"] for row in plan["rows"]}
    assert plan["largest_batch"] > 1000 and 0 < plan["users"] <= plan["largest_batch"]


def test_published_memory_figures(
    plan_json: PlanRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    """OctoCoder's peaks in a library, and score matrices of 40 heads: 19 GiB, almost 1 TB."""
    plan = plan_json(shape_path("octocoder"), "--gpu", "a100-40")
    assert plan["weights_bytes"] == pytest.approx(31e9, rel=0.01)
    assert plan["fits"]["a100-40"]["bf16"] == 1
    peaks = [plan["library_peak_bytes"][name] / 2**30 for name in ("bf16", "int8", "nf4")]
    assert peaks == pytest.approx([29.03, 15.22, 9.54], rel=0.012)
    prompt_memory = plan_json(shape_path("llama-13b"), "--gpu", "h200")["prompt_memory"]
    rows = {row["tokens"]: row for row in prompt_memory}
    assert rows[16_000]["scores_bytes"] / 2**30 == pytest.approx(19, abs=0.1)
    assert 0.7e12 < rows[100_000]["scores_bytes"] < 1e12
    ratio = rows[100_000]["tiled_bytes"] / rows[16_000]["tiled_bytes"]
    assert ratio == pytest.approx(100 / 16, rel=0.01), "tiled attention grows linearly"
    assert main(["plan", shape_path("llama-13b"), "--gpu", "h200"]) == 0
    assert "(19.07 GiB)" in capsys.readouterr().out


def test_published_figures_of_bloom(plan_json: PlanRunner) -> None:
    plan = plan_json(shape_path("bloom-176b"), "--gpu", "a100-80", "--context", "1")
    assert plan["devices"] == 8 and plan["layout"]["tp"] == 8
    assert plan["rows"][0]["floor_ms"] == pytest.approx(21.6, abs=0.05)
    assert plan["fits"]["a100-40"]["bf16"] == 16
    assert "good for latency" in plan["advice"][0]
    assert plan["fits"]["h200"]["int4"] == 1


def test_narrower_formats_are_faster(
    plan_json: PlanRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags of `serve` work here too. A CPU holds formats without a kernel in 8 bits."""
    flags = ["--gpu", "h200", "--quantization", "int4-64", "--kv-cache-dtype", "fp8"]
    assert main(["plan", shape_path("llama-8b"), *flags]) == 0
    table = capsys.readouterr().out.partition("  precision")[2].splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in table[1:7]}
    assert table[0].endswith("ms a token (TPOT), alone")
    assert float(rows["int4-64"][-1]) < float(rows["int8"][-1]) < float(rows["bf16"][-1])
    cpu = plan_json(shape_path("llama-8b"), "--gpu", "zen3-2", "--quantization", "fp8")
    assert cpu["weights_bytes"] == pytest.approx(8.5 / 8 * cpu["parameters"], rel=0.01)
    cpu = plan_json(shape_path("llama-8b"), "--gpu", "zen3-2", "--quantization", "nf4")
    outer = 2 * 128256 * 4096  # embedding and head, in eight bits
    layers = cpu["parameters"] - outer
    assert cpu["weights_bytes"] == pytest.approx(4.5 / 8 * layers + outer, rel=0.01)


def test_torch_is_not_imported() -> None:
    code = (
        "import sys\nfrom bloomery.cli import main\n"
        f"assert main(['plan', {shape_path('llama-8b')!r}, '--gpu', 'h200']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "expected ms" in done.stdout and "16.06 GB" in done.stdout


def test_options_are_adapted_to_model_and_hardware(
    plan_json: PlanRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    """A price of 0, bf16 on a CPU, steps of a CPU's size, a context beyond the model's."""
    assert main(["plan", shape_path("llama-1b"), "--gpu", "h200", "--price", "0"]) == 0
    assert "cost             0.00 a million tokens" in capsys.readouterr().out
    cpu = plan_json(
        shape_path("llama-1b"),
        "--gpu",
        "zen3-2",
        "--precision",
        "bf16",
        "--context",
        "500000",
    )
    assert cpu["precision"] == "bf16" and cpu["weights_bytes"] == 2 * cpu["parameters"]
    gpu = plan_json(shape_path("llama-1b"), "--gpu", "h200")
    assert cpu["activation_bytes"] < 150e6 < gpu["activation_bytes"]
    assert cpu["advice"][0] == (
        "The model supports a context of at most 131,072: this plan uses it instead of 500,000."
    )


def test_impossible_layouts_are_refused_with_possible_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", shape_path("bloom-176b"), "--gpu", "h200", "--tp", "3"]) == 1
    assert "PP 3" in capsys.readouterr().err
    flags = ["--gpu", "h200", "--devices", "8", "--tp", "4", "--pp", "3"]
    assert main(["plan", shape_path("llama-8b"), *flags]) == 1
    assert "takes 12 devices, and --devices says 8" in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", shape_path("bloom-176b"), "--gpu", "t4", "--devices", "1"]) == 0
    assert "does not fit 1 x NVIDIA T4" in capsys.readouterr().out


def test_adapters_are_counted_if_they_are_enabled(
    plan_json: PlanRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (shape_path("llama-8b"), "--gpu", "h200")
    assert plan_json(*flags)["adapters"] is None
    plan = plan_json(*flags, "--enable-lora", "--max-loras", "80")
    memory = plan["adapters"]
    assert memory["slots_bytes"] == 80 * memory["adapter_bytes"]
    assert memory["host_bytes"] == 80 * memory["adapter_bytes"], "at least as many as slots"
    assert main(["plan", *flags, "--enable-lora", "--max-lora-rank", "32"]) == 0
    report = capsys.readouterr().out
    assert "8 slots of rank 32" in report and "for 64 adapters" in report
    assert main(["plan", *flags, "--max-lora-rank", "32"]) == 1
    assert "give --enable-lora too" in capsys.readouterr().err
    assert main(["plan", *flags, "--enable-lora", "--max-cpu-loras", "4"]) == 1
    assert "max_cpu_loras 4 is less than max_loras 8" in capsys.readouterr().err


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", shape_path("llama-8b"), "--gpu", "nothing"]) == 1
    assert main(["plan", shape_path("llama-8b"), "--gpu", "h200", "--plot", "plan.gif"]) == 1
    if importlib.util.find_spec("matplotlib") is None:
        assert main(["plan", shape_path("llama-8b"), "--gpu", "h200", "--plot", "plan.png"]) == 1
        assert "matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        "--price -1",
        "--price nan",
        "--context 0",
        "--devices 1.5",
        "--tp 0",
        "--plot nowhere/plan.svg",
        "--plot .",
    ],
)
def test_flags_without_meaning_are_refused(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    flag = flags.split()[0]
    with pytest.raises(SystemExit):
        main(["plan", shape_path("llama-1b"), "--gpu", "h200", *flags.split()])
    assert re.search(rf"argument {flag}(/--[a-z-]+)?: ", capsys.readouterr().err)


def test_a_doubtful_measurement_does_not_replace_a_good_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for bandwidth, doubt, saved_bandwidth in (
        (9e9, "busy", 9e9),
        (12e9, None, 12e9),
        (3e9, "busy", 12e9),
        (11e9, None, 11e9),
    ):
        measurement = device_measurement.DeviceMeasurement(bandwidth, {"fp32": 1e11}, doubt)
        monkeypatch.setattr(
            device_measurement, "measure_device", lambda device, cores, result=measurement: result
        )
        measure_hardware()
        assert detect_hardware("cpu").bandwidth == saved_bandwidth
        assert ("Is the machine in use?" in capsys.readouterr().err) == bool(doubt)
