"""`bloomery doctor` finds what is missing, names the remedy and returns a status."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from bloomery.cli import main
from tests.chaos.http import free_port


def test_a_machine_that_runs_the_tests_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--port", str(free_port())]) == 0
    output = capsys.readouterr().out
    for name in ("Python", "torch", "memory", "CPU kernels", "cache folder", "port", "model"):
        assert f"  {name}: " in output, name
    assert "FAIL" not in output


def test_what_is_wrong_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    monkeypatch.setenv("BLOOMERY_PROT", "8000")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        cache_dir = str(occupied / "below")
        model = str(tmp_path / "absent.gguf")
        status = main(["doctor", model, "--port", str(port), "--cache-dir", cache_dir])
    output = capsys.readouterr().out
    assert status == 1
    assert "FAIL  cache folder: cache_dir:" in output
    assert f"FAIL  port: port {port} of 127.0.0.1 is in use" in output
    assert f"FAIL  model: {model}: no such folder or file" in output
    assert "WARN  settings: BLOOMERY_PROT has no meaning; did you mean BLOOMERY_PORT?" in output
    assert "3 checks failed" in output
