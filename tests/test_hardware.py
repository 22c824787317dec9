"""The hardware table, the detection of this machine, and saved measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from bloomery.errors import ConfigError
from bloomery.hardware import (
    detect_hardware,
    find_hardware,
    hardware_by_title,
    load_measured_rates,
    save_measured_rates,
)


def test_hardware_is_found_by_the_start_of_its_name() -> None:
    assert find_hardware("A100").name == "a100-80"
    with pytest.raises(ConfigError, match="h200"):
        find_hardware("abacus")


def test_devices_are_known_by_the_drivers_names() -> None:
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
    assert {title: hardware_by_title(title).name for title in names} == names


def test_measured_rates_override_the_table(tmp_path: Path) -> None:
    path = tmp_path / "machines.json"
    assert load_measured_rates(path) == {}
    assert not detect_hardware("cpu", path).measured
    save_measured_rates(detect_hardware("cpu", path).title, 12e9, {"fp32": 3e11}, path)
    hardware = detect_hardware("cpu", path)
    assert hardware.measured
    assert hardware.bandwidth == 12e9 and hardware.rates["fp32"] == 3e11
    path.write_text("not JSON")
    assert not detect_hardware("cpu", path).measured
