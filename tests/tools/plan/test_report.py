"""The report: flags for more users, and the plot."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bloomery.cli import main
from bloomery.config import EngineConfig, default_batch_limits
from bloomery.describe import build_engine_plan
from bloomery.runtime.kv_cache import fit_kv_cache, single_table_cache
from bloomery.tools.plan.model_source import read_model_source
from tests.tools.plan.measured_steps import shape_path


def read_users(report: str) -> int:
    return int(report.partition("  users            ")[2].split()[0])


def test_flags_for_more_users_than_the_gpu_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", shape_path("llama-8b"), "--gpu", "h200"]) == 0
    report = capsys.readouterr().out
    users = read_users(report)
    _, default_num_seqs = default_batch_limits(cpu=False)
    assert users > default_num_seqs
    assert f"bloomery serve --max-num-seqs {users}\n" in report


def test_flags_for_more_users_than_the_cpu_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu", "zen3-2"]) == 0
    report = capsys.readouterr().out
    users = read_users(report)
    kv_cache_gib = float(report.partition("--kv-cache-gib ")[2].split()[0])
    plan, _ = build_engine_plan(EngineConfig(kv_cache_gib=kv_cache_gib, device="cpu"))
    plan = replace(plan, max_num_seqs=users)
    model = read_model_source(None).model
    cache = single_table_cache(model, plan.block_size, torch.float16)
    size = fit_kv_cache(plan, cache, torch.device("cpu"))
    assert 8 < users <= 64
    assert size.num_blocks * plan.block_size >= 1024 * users


def test_no_flags_where_the_defaults_suffice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", shape_path("octocoder"), "--gpu", "t4", "--precision", "int4"]) == 0
    assert "bloomery serve" not in capsys.readouterr().out


def test_the_plot_is_svg(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    assert main(["plan", shape_path("llama-1b"), "--gpu", "h200", "--plot", str(path)]) == 0
    root = ElementTree.fromstring(path.read_text())
    assert root.tag.endswith("svg")
    assert len([node for node in root.iter() if node.tag.endswith("circle")]) > 10
