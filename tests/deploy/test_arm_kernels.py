"""The aarch64 kernels of the wheels, under qemu: the tests of tests/native on an Arm processor.

Needs qemu-user, a Debian mirror for an Arm Python, and PyPI for Arm wheels of torch and numpy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bloomery.native.build import KERNEL_VARIANTS
from tests.deploy.containers import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

# Debian packages of an Arm Python and what it and torch link to.
ARM_PACKAGES = (
    "libc6 libgcc-s1 libstdc++6 libgomp1 python3.11-minimal libpython3.11-minimal "
    "libpython3.11-stdlib python3.11 libssl3 zlib1g libexpat1 libffi8 libbz2-1.0 liblzma5 "
    "libsqlite3-0 libuuid1 libcrypt1"
)
# The last torch whose Arm wheels on PyPI do not need CUDA. It computes the references only.
ARM_WHEELS = (
    "torch==2.8.0 numpy pytest pytest-timeout iniconfig pluggy packaging hypothesis "
    "sortedcontainers gguf pyyaml tqdm sympy mpmath networkx jinja2 markupsafe fsspec filelock "
    "typing_extensions pygments msgspec requests safetensors"
)
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux2014_aarch64")
# Processors without features beyond those that a variant may use.
QEMU_PROCESSORS = {"dotprod": "neoverse-n1", "neon": "cortex-a72"}
TESTS = ("test_ops.py", "test_gguf_weights.py", "test_thread_pool.py", "test_trace.py")


@pytest.fixture(scope="module")
def arm_system(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an Arm Python, in `root`, and its packages, in `site`."""
    if shutil.which("qemu-aarch64") is None or shutil.which("apt-get") is None:
        pytest.skip("needs qemu-user and apt-get")
    folder = tmp_path_factory.mktemp("arm")
    archives = folder / "archives"
    archives.mkdir()
    names = [f"{name}:arm64" for name in ARM_PACKAGES.split()]
    options = ["-o", "APT::Architectures::=amd64", "-o", "APT::Architectures::=arm64"]
    lists = folder / "lists"
    (lists / "partial").mkdir(parents=True)
    options += ["-o", f"Dir::State::Lists={lists}"]
    subprocess.run(["apt-get", "-qq", *options, "update"], check=True)
    subprocess.run(["apt-get", "-qq", *options, "download", *names], check=True, cwd=archives)
    for archive in archives.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(archive), str(folder / "root")], check=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder / "site")]
    command += ["--no-deps", "--only-binary=:all:", "--python-version", "3.11"]
    for name in PLATFORMS:
        command += ["--platform", name]
    subprocess.run([*command, *ARM_WHEELS.split()], check=True)
    return folder


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The libraries that the Arm wheel contains."""
    folder = tmp_path_factory.mktemp("kernels")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "tools")], check=True)
    python = str(folder / "tools" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", "ziglang"], check=True)
    command = [python, str(ROOT / "release/kernels.py"), "aarch64", str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    return folder


@pytest.mark.parametrize("name", QEMU_PROCESSORS)
def test_native_operations_equal_their_references(
    name: str, arm_system: Path, libraries: Path
) -> None:
    (variant,) = [v for v in KERNEL_VARIANTS if (v.machine, v.name) == ("aarch64", name)]
    root = arm_system / "root"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{arm_system / 'site'}:{ROOT / 'src'}:{ROOT}",
        "PYTHONHOME": str(root / "usr"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NATIVE_LIBRARY": str(libraries / variant.file_name()),
        "QEMU_CPU": QEMU_PROCESSORS[name],
    }
    run_pytest = ["-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "timeout=0"]
    tests = [str(ROOT / "tests" / "native" / file) for file in TESTS]
    finished = subprocess.run(
        ["qemu-aarch64", "-L", str(root), str(root / "usr/bin/python3.11"), *run_pytest]
        + ["-W", "ignore", "-q", "-k", "not avx2 and not avxvnni", *tests],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-1000:]
    assert " passed" in finished.stdout and "skipped" not in finished.stdout
