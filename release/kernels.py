"""Compiles the CPU kernels that wheels contain: `python release/kernels.py x86_64 FOLDER`.

The compiler is `zig cc` (the ziglang package), because it compiles for any processor on any machine
and links against an old glibc, so that the libraries load on every Linux since GLIBC. The sources
and flags are those with which Bloomery compiles its kernels on a user's machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bloomery.native.build import FLAGS, KERNEL_VARIANTS, KernelVariant, compile_library

GLIBC = "2.28"  # of 2018: Debian 10, Ubuntu 20.04, RHEL 8
LINK_FLAGS = ("-Wl,-s",)  # no symbol table: four fifths of the file


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("machine", choices=sorted({v.machine for v in KERNEL_VARIANTS}))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    for library in compile_kernels(options.machine, options.folder):
        print(f"{library} ({library.stat().st_size / 1024:.0f} KiB)")


def compile_kernels(machine: str, folder: Path) -> list[Path]:
    """Compile all variants of one machine into the folder; returns the libraries."""
    folder.mkdir(parents=True, exist_ok=True)
    libraries = []
    for variant in KERNEL_VARIANTS:
        if variant.machine == machine:
            library = folder / variant.file_name()
            compile_library(compile_command(variant), library)
            libraries.append(library)
    return libraries


def compile_command(variant: KernelVariant) -> list[str]:
    target = f"{variant.machine}-linux-gnu.{GLIBC}"
    compiler = (sys.executable, "-m", "ziglang", "cc", "-target", target)
    return [*compiler, f"-mcpu={variant.compile_target}", *FLAGS, *LINK_FLAGS]


if __name__ == "__main__":
    main()
