"""The wheel in a fresh environment: as fast without compiler and home as an install from source."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.containers import ROOT

sys.path.insert(0, str(ROOT / "release"))
import try_wheel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this machine, built as `make dist` does."""
    folder = tmp_path_factory.mktemp("dist")
    tools = folder / "tools"
    subprocess.run([sys.executable, "-m", "venv", str(tools)], check=True)
    python = str(tools / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", "hatchling", "ziglang"], check=True)
    command = [python, str(ROOT / "release/dist.py"), "--machine", platform.machine(), str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_serves_at_full_speed_without_compiler_and_home(
    wheel: Path, tmp_path: Path
) -> None:
    python = try_wheel.install_wheel(wheel, tmp_path, with_dependencies=False)
    bare = try_wheel.measure_speed(python, try_wheel.bare_environment(tmp_path), tmp_path)
    normal = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    log = tmp_path / "normal.log"
    with try_wheel.serve_embedded(Path(sys.executable), normal, tmp_path, log) as url:
        expected = max(try_wheel.time_answer(url) for _ in range(try_wheel.ANSWERS))
    print(f"{bare:.0f} tokens/s bare, {expected:.0f} tokens/s with compiler and home")
    assert bare > 0.8 * expected


def test_without_kernels_and_compiler_the_server_serves_and_says_what_it_costs(
    wheel: Path, tmp_path: Path
) -> None:
    python = try_wheel.install_wheel(wheel, tmp_path, with_dependencies=False)
    for library in tmp_path.glob("venv/lib/*/site-packages/bloomery/native/prebuilt/*.so"):
        library.unlink()
    log = tmp_path / "log"
    with try_wheel.serve_embedded(
        python, try_wheel.bare_environment(tmp_path), tmp_path, log
    ) as url:
        print(f"{try_wheel.time_answer(url, 16):.1f} tokens/s by torch alone")
    assert "times slower" in log.read_text() and "install gcc" in log.read_text()
