"""`bloomery plan` as a person and as a program use it, and what it promises about memory and layouts."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import xml.etree.ElementTree as xml
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.plan_check import of_log, table
from bloomery.cli import main
from bloomery.config import Config, sizes
from bloomery.describe import plan_for
from bloomery.machines import here, named, recall, remember
from bloomery.tools.plan.forecast import Forecast, Layout, Placed, Wish, layouts
from bloomery.tools.plan.subject import subject
from bloomery.tools.plan.words import advice
from bloomery.roofline import MACHINES, PRECISIONS, machine
from bloomery.runtime.cache import block_bytes, fit

SHAPES = Path(__file__).parent.parent.parent / "benchmarks" / "shapes"
BF16 = PRECISIONS["bf16"]


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing remembered on this machine may change a figure, and no test may leave anything behind."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def shape(name: str) -> str:
    return str(SHAPES / f"{name}.json")


# ---- figures ---------------------------------------------------------------------------------------


def test_json_has_what_programs_ask_for(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, shape("llama-8b"), "--gpu", "h200", "--price", "4", "--context", "512")
    assert plan["weights_bytes"] == 2 * plan["parameters"] == 16_060_522_496
    assert plan["kv_bytes_per_token"] == 131_072
    assert {1, 8, 64} <= {row["batch"] for row in plan["rows"]}
    for row in plan["rows"]:
        assert 0 < row["floor_ms"] < row["expected_ms"]
        assert row["cost"] == pytest.approx(4 / 3600 / row["tokens_per_second"] * 1e6)
    assert 512 in {row["context"] for row in plan["rows"]}
    assert plan["largest_batch"] > 1000 and 0 < plan["users"] <= plan["largest_batch"]


# milliseconds a step over a whole run, as benchmarks/LOG.md has them
MEASURED = [
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


@pytest.mark.parametrize("name, precision, batch, ms", MEASURED)
def test_expectations_are_near_what_was_measured(
    name: str, precision: str, batch: int, ms: float
) -> None:
    placed = Placed(
        subject(shape(name)).model, machine("h200"), PRECISIONS[precision], 16, Layout()
    )
    assert placed.expected(batch, 256) * 1e3 == pytest.approx(ms, rel=0.15)


def test_every_row_of_the_log_is_near_what_is_expected(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(of_log(SHAPES.parent / "LOG.md"))
    assert len(rows) > 20 and {row[3] for row in rows} >= {"bf16", "int8", "int4"}
    table(rows, "h200")
    worst = capsys.readouterr().out.splitlines()[-1]
    assert float(worst.removeprefix("worst: ").removesuffix("%")) < 15


def test_what_the_founding_documents_have(capsys: pytest.CaptureFixture[str]) -> None:
    """Peaks of OctoCoder in a library, and scores of 40 heads: nearly nothing, 19 GB, almost 1 TB; ours grow evenly."""
    plan = planned(capsys, shape("octocoder"), "--gpu", "a100-40")
    assert (
        plan["weights_bytes"] == pytest.approx(31e9, rel=0.01)
        and plan["fits"]["a100-40"]["bf16"] == 1
    )
    peaks = [plan["library_peak_bytes"][name] / 2**30 for name in ("bf16", "int8", "nf4")]
    assert peaks == pytest.approx([29.03, 15.22, 9.54], rel=0.012)
    rows = {
        row["tokens"]: row
        for row in planned(capsys, shape("llama-13b"), "--gpu", "h200")["prompt_memory"]
    }
    assert rows[16_000]["scores_bytes"] / 2**30 == pytest.approx(19, abs=0.1)
    assert 0.7e12 < rows[100_000]["scores_bytes"] < 1e12
    ratio = rows[100_000]["tiled_bytes"] / rows[16_000]["tiled_bytes"]
    assert ratio == pytest.approx(100 / 16, rel=0.01)
    assert main(["plan", shape("llama-13b"), "--gpu", "h200"]) == 0
    assert "(19.07 GiB)" in capsys.readouterr().out


def test_bloom_as_the_talk_had_it(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, shape("bloom-176b"), "--gpu", "a100-80", "--context", "1")
    assert plan["devices"] == 8 and plan["layout"]["tp"] == 8
    assert plan["rows"][0]["floor_ms"] == pytest.approx(21.6, abs=0.05)
    assert plan["fits"]["a100-40"]["bf16"] == 16
    assert "good for latency" in plan["advice"][0]
    assert plan["fits"]["h200"]["int4"] == 1


def test_a_gguf_counts_its_real_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """The embedded model: bytes of the plan are the bytes of its tensors."""
    from bloomery.artifacts.gguf import read
    from bloomery.artifacts.locate import locate

    plan = planned(capsys, "--gpu", "zen3-2")
    stored = sum(tensor.nbytes for tensor in read(locate(None).path).tensors.values())
    assert plan["weights_bytes"] == pytest.approx(stored, rel=0.01)
    gpu = planned(capsys, "--gpu", "l4")
    assert (
        gpu["weights_bytes"] == pytest.approx(stored, rel=0.01)
        and gpu["precision"] == plan["precision"]
    )


def test_a_gguf_takes_what_the_engine_says_it_takes() -> None:
    """Every type's bits, counted where they lie."""
    from bloomery.tools.plan.subject import GRIDS
    from bloomery.quant.gguf_blocks import STEPS
    from tests.quant.test_law import CPU, kept

    assert GRIDS.keys() == STEPS.keys()
    for kind, (bits, _) in GRIDS.items():
        matrix = kept(kind)(torch.randn(64, 1024))
        assert matrix.prepare(torch.bfloat16, CPU).nbytes * 8 / (64 * 1024) == pytest.approx(
            bits, rel=0.005
        ), kind


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "a": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32, "type": "int"}}
    },
}


@pytest.mark.parametrize(
    "packed, bits",
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 3, "group_size": -1}, 4),  # as kernels read them
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "mxfp4"}, 4.25),
        (COMPRESSED, 4.625),
        (None, 16),
    ],
)
def test_quantised_checkpoints_say_so(
    packed: dict[str, Any] | None, bits: float, tmp_path: Path
) -> None:
    config = json.loads((SHAPES / "llama-8b.json").read_text())
    path = tmp_path / "packed.json"
    path.write_text(json.dumps({**config, "quantization_config": packed} if packed else config))
    assert subject(str(path)).stored.bits == bits
    assert main(["plan", str(path), "--gpu", "zen3-2"]) == 0


def test_formats_are_told_by_what_they_save(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag of `serve` is one here; a CPU keeps in eight bits what it has no kernel for."""
    assert (
        main(
            [
                "plan",
                shape("llama-8b"),
                "--gpu",
                "h200",
                "--quantize",
                "int4-64",
                "--kv-dtype",
                "fp8",
            ]
        )
        == 0
    )
    table = capsys.readouterr().out.partition("  precision")[2].splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in table[1:7]}
    assert table[0].endswith("ms a token, alone")
    assert float(rows["int4-64"][-1]) < float(rows["int8"][-1]) < float(rows["bf16"][-1])
    cpu = planned(capsys, shape("llama-8b"), "--gpu", "zen3-2", "--quantize", "nf4")
    assert cpu["weights_bytes"] == pytest.approx(8.5 / 8 * cpu["parameters"], rel=0.01)


def test_no_torch_and_quick() -> None:
    code = (
        "import sys\nfrom bloomery.cli import main\n"
        f"assert main(['plan', {shape('llama-8b')!r}, '--gpu', 'h200']) == 0\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "expected ms" in done.stdout and "16.06 GB" in done.stdout


# ---- memory and layouts ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-8b", "bloom-176b", "octocoder"])
@pytest.mark.parametrize("kind", ["h200", "a100-40", "l4"])
def test_what_fits_fits(name: str, kind: str) -> None:
    model = subject(shape(name)).model
    device = MACHINES[kind]
    for layout in layouts(model, 8):
        placed = Placed(model, device, BF16, 16, layout)
        most = placed.largest(1024)
        assert most == 0 or most * placed.sequence_bytes(1024) <= placed.room < (
            most + 1
        ) * placed.sequence_bytes(1024)
        longest = placed.longest()
        assert longest == model.context or placed.largest(longest + 1) == 0
        users = placed.users(1024) // layout.replicas
        assert users <= most
        if users:
            assert placed.expected(users, 1024) <= 0.1


def test_a_window_frees_no_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many sequences as the engine's blocks hold: every layer keeps every position."""
    path = tmp_path / "windowed.json"
    path.write_text(
        json.dumps({**json.loads(Path(shape("llama-8b")).read_text()), "model_type": "mistral"})
    )
    model = subject(str(path)).model
    assert model.layers[0].attention.window == 4096
    each = block_bytes(model, 64, torch.bfloat16)
    assert (
        Placed(model, machine("h200"), BF16, 16, Layout()).sequence_bytes(32768)
        == 32768 // 64 * each
    )
    command = ("--gpu", "h200", "--context", "32768")
    windowed = planned(capsys, str(path), *command)
    plain = planned(capsys, shape("llama-8b"), *command)
    assert windowed["largest_batch"] == plain["largest_batch"]
    assert windowed["rows"][-1]["floor_ms"] < plain["rows"][-1]["floor_ms"], (
        "but it is quicker: less is read"
    )


def test_users_beyond_the_defaults_are_told_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", shape("llama-8b"), "--gpu", "h200"]) == 0
    out = capsys.readouterr().out
    users = int(out.partition("  users            ")[2].split()[0])
    assert users > sizes(cpu=False)[1] and f"bloomery serve --max-sequences {users}\n" in out
    assert main(["plan", "--gpu", "zen3-2"]) == 0
    out = capsys.readouterr().out
    users = int(out.partition("  users            ")[2].split()[0])
    gib = float(out.partition("--kv-cache-gib ")[2].split()[0])
    plan = replace(plan_for(Config(kv_cache_gib=gib, device="cpu"))[0], max_num_seqs=users)
    size = fit(plan, subject(None).model, torch.float16, torch.device("cpu"))
    assert 8 < users <= 64 and size.blocks * plan.block_size >= 1024 * users
    assert main(["plan", shape("octocoder"), "--gpu", "t4", "--precision", "int4"]) == 0
    assert "bloomery serve" not in capsys.readouterr().out


def test_goals_choose_differently_where_links_are_slow() -> None:
    about = subject(shape("llama-8b"))
    plans = {
        goal: Forecast(about, Wish(machine("l4"), BF16, goal=goal, devices=8))
        for goal in ("latency", "throughput")
    }
    assert plans["latency"].chosen.layout.tp > plans["throughput"].chosen.layout.tp
    for plan in plans.values():
        assert plan.chosen.layout.devices == 8
    assert plans["throughput"].throughput(plans["throughput"].chosen) >= plans[
        "latency"
    ].throughput(plans["latency"].chosen)


def test_what_is_no_faster_is_not_worth_a_message() -> None:
    about = subject(shape("llama-8b"))
    plan = Forecast(about, Wish(machine("h200"), BF16, goal="throughput", devices=4))
    assert plan.chosen.layout == Layout(1, 1, 4)
    most = max(map(plan.throughput, plan.fitting))
    assert 0.95 * most <= plan.throughput(plan.chosen) < most, (
        "a pipeline's small lead is not taken"
    )
    assert not any("PP" in line for line in advice(plan))


def test_tensor_parallelism_cuts_latency_and_stages_do_not() -> None:
    about = subject(shape("bloom-176b"))
    plan = Forecast(about, Wish(machine("a100-80"), BF16, devices=8))
    alone = {str(option.layout): option.expected(1, 1024) for option in plan.fitting}
    assert alone["PP 8"] > 2 * alone["TP 4 x PP 2"] > 2 * alone["TP 8"]
    assert any(
        "PP 8 is good for throughput" in line
        for line in advice(Forecast(about, Wish(machine("a100-80"), BF16, layout=Layout(1, 8))))
    )


def test_impossible_wishes_are_refused_with_what_is_possible(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", shape("bloom-176b"), "--gpu", "h200", "--tp", "3"]) == 1
    assert "PP 3" in capsys.readouterr().err
    assert main(["plan", shape("bloom-176b"), "--gpu", "t4", "--devices", "1"]) == 0
    assert "does not fit 1 x NVIDIA T4" in capsys.readouterr().out
    assert main(["plan", shape("llama-8b"), "--gpu", "nothing"]) == 1
    assert main(["plan", shape("llama-8b"), "--gpu", "h200", "--plot", "plan.gif"]) == 1
    if importlib.util.find_spec("matplotlib") is None:
        assert main(["plan", shape("llama-8b"), "--gpu", "h200", "--plot", "plan.png"]) == 1
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
def test_flags_that_mean_nothing_are_refused(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", shape("llama-1b"), "--gpu", "h200", *flags.split()])
    assert f"argument {flags.split()[0]}: " in capsys.readouterr().err


def test_devices_beyond_one_copy_of_the_model_are_replicas(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [shape("llama-8b"), "--gpu", "h200", "--devices", "8", "--tp", "4"]
    assert planned(capsys, *command)["layout"] == {"tp": 4, "pp": 1, "replicas": 2}
    assert main(["plan", *command, "--pp", "3"]) == 1
    assert "takes 12 devices, and --devices says 8" in capsys.readouterr().err


def test_what_is_planned_is_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A device for nothing, a precision that a CPU has not, steps of a CPU's size, a context beyond the model's."""
    assert main(["plan", shape("llama-1b"), "--gpu", "h200", "--price", "0"]) == 0
    assert "cost             0.00 a million tokens" in capsys.readouterr().out
    cpu = planned(
        capsys, shape("llama-1b"), "--gpu", "zen3-2", "--precision", "bf16", "--context", "500000"
    )
    assert cpu["precision"] == "fp32" and cpu["weights_bytes"] == 4 * cpu["parameters"]
    assert (
        cpu["activation_bytes"]
        < 150e6
        < planned(capsys, shape("llama-1b"), "--gpu", "h200")["activation_bytes"]
    )
    assert (
        cpu["advice"][0]
        == "A context of 500,000 is beyond what it was made for: planned for 131,072."
    )


# ---- pictures and machines -------------------------------------------------------------------------


def test_the_plot_is_svg(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.svg"
    assert main(["plan", shape("llama-1b"), "--gpu", "h200", "--plot", str(path)]) == 0
    root = xml.fromstring(path.read_text())
    assert root.tag.endswith("svg")
    assert len([node for node in root.iter() if node.tag.endswith("circle")]) > 10


def test_devices_are_known_by_the_driver_s_names() -> None:
    names = {
        "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA A100-SXM4-80GB": "a100-80",
        "NVIDIA A100-SXM4-40GB": "a100-40",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "NVIDIA L40S": "l40s",
        "NVIDIA L4": "l4",
        "NVIDIA A10": "a10",
        "Tesla T4": "t4",
        "Something else": "unknown",
    }
    assert {title: named(title).name for title in names} == names


def test_a_measurement_in_doubt_replaces_none(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.tools.plan.answer import measure
    from bloomery.runtime import measure as probes

    for bandwidth, doubt, kept in (
        (9e9, "busy", 9e9),
        (12e9, None, 12e9),
        (3e9, "busy", 12e9),
        (11e9, None, 11e9),
    ):
        seen = probes.Seen(bandwidth, {"fp32": 1e11}, doubt)
        monkeypatch.setattr(probes, "measured", lambda where, cores, seen=seen: seen)
        measure()
        assert here("cpu").bandwidth == kept
        assert ("Is the machine in use?" in capsys.readouterr().err) == bool(doubt)


def test_what_was_measured_overrides_the_table(tmp_path: Path) -> None:
    path = tmp_path / "machines.json"
    assert recall(path) == {} and not here("cpu", path).measured
    remember(here("cpu", path).title, 12e9, {"fp32": 3e11}, path)
    found = here("cpu", path)
    assert found.measured and found.bandwidth == 12e9 and found.rates["fp32"] == 3e11
    path.write_text("not JSON")
    assert not here("cpu", path).measured
