"""Builds what a release uploads: `python release/dist.py [FOLDER]`.

That is an sdist, and a wheel for each machine of KERNEL_VARIANTS. Every wheel is checked: it has
the kernels of its machine, and they need no newer glibc than its tag says.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from kernels import GLIBC, compile_kernels

from bloomery.native.build import KERNEL_VARIANTS

ROOT = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    machines = sorted({variant.machine for variant in KERNEL_VARIANTS})
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "dist")
    parser.add_argument("--machine", choices=machines, help="only the wheel of this machine")
    options = parser.parse_args(arguments)
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if options.machine is not None:
        machines = [options.machine]
    else:
        run_build("sdist", folder)
    for machine in machines:
        wheel = build_wheel(machine, folder)
        check_wheel(wheel, machine)
    for file in sorted(folder.iterdir()):
        print(f"{file} ({file.stat().st_size / 2**20:.1f} MiB)")


def build_wheel(machine: str, folder: Path) -> Path:
    """Compile the kernels of one machine and build its wheel."""
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    with tempfile.TemporaryDirectory() as kernels:
        compile_kernels(machine, Path(kernels))
        environment = {"BLOOMERY_WHEEL_KERNELS": kernels, "BLOOMERY_WHEEL_PLATFORM": tag}
        run_build("wheel", folder, environment)
    (wheel,) = folder.glob(f"*-py3-none-{tag}.whl")
    return wheel


def run_build(target: str, folder: Path, environment: dict[str, str] | None = None) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, **(environment or {})})


def check_wheel(wheel: Path, machine: str) -> None:
    """Raise unless the wheel has all kernels of its machine and they load where its tag says."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as scratch:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        expected = {v.file_name() for v in KERNEL_VARIANTS if v.machine == machine}
        if {Path(name).name for name in names} != expected:
            raise ValueError(f"{wheel.name} has {names}, not {sorted(expected)}")
        for name in names:
            check_glibc(Path(archive.extract(name, scratch)))


def check_glibc(library: Path) -> None:
    """Raise if a library needs a symbol of a newer glibc than GLIBC."""
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())
    newest = max((int(major), int(minor)) for major, minor in versions)
    allowed = tuple(map(int, GLIBC.split(".")))
    if newest > allowed:
        raise ValueError(f"{library.name} needs glibc {newest[0]}.{newest[1]}, not {GLIBC}")


if __name__ == "__main__":
    main()
