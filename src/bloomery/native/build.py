"""The library made from the C files beside this one: compiled once a machine, kept in the user's cache.

The name of the result is a hash of the sources, the compiler and what the processor can do, so nothing stale is ever
loaded; it appears by a rename, so nobody sees half of it.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

HEADERS = ("native.h", "vectors.h")
SOURCES = ("team.c", "products.c", "pack.c", "rows.c", "attention.c", "pick.c")
# Multiplications may be fused with the additions behind them, and that is all the licence a compiler gets.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-pthread", "-fPIC", "-shared")
CHECKS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g", "-O1")
SECONDS = 300


class NoLibrary(Exception):
    """Why there is none."""


def build(extra: tuple[str, ...] = (), folder: Path | None = None) -> Path:
    """The library's path; compiles where it is not there yet."""
    compiler = next((found for name in ("gcc", "clang", "cc") if (found := shutil.which(name))), None)
    if compiler is None:
        raise NoLibrary("no C compiler (gcc, clang or cc) on this machine")
    target = (folder or cache()) / f"native-{fingerprint(compiler, extra)}.so"
    if target.exists():
        return target
    here = Path(__file__).parent
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / target.name
            command = [compiler, *FLAGS, *machine_flags(), *extra, *(str(here / name) for name in SOURCES)]
            done = subprocess.run([*command, "-o", str(made), "-lm"], capture_output=True, text=True, timeout=SECONDS)
            if done.returncode:
                raise NoLibrary(f"{compiler} failed: {done.stderr.strip()[-500:]}")
            made.rename(target)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoLibrary(f"the kernels could not be compiled into {target.parent}: {error}") from error
    return target


def cache() -> Path:
    return Path.home() / ".cache" / "bloomery"


def machine_flags() -> tuple[str, ...]:
    """All this processor can do: the result never leaves the machine."""
    return ("-mcpu=native",) if platform.machine() in ("arm64", "aarch64") else ("-march=native",)


def fingerprint(compiler: str, extra: tuple[str, ...]) -> str:
    made = Path(compiler).resolve().stat()
    parts = [compiler, str(made.st_size), str(made.st_mtime_ns), processor(), *FLAGS, *extra]
    digest = hashlib.sha256("\n".join(parts).encode())
    for name in (*HEADERS, *SOURCES):
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:24]


def processor() -> str:
    """What tells processors with different abilities apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = {line.split(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    return "\n".join(told.get(name, "") for name in ("model name", "flags", "Features"))
