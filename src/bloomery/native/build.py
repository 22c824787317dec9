"""The library made from the C files beside this one: compiled once a machine, kept in the user's cache.

The name of the result is a hash of the sources, the compiler and what the processor can do, so nothing stale is ever
loaded; it appears by a rename, so nobody sees half of it, and ends with its own digest, so nothing damaged is loaded.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

HEADERS = ("native.h", "vectors.h", "cache.h")
SOURCES = ("team.c", "products.c", "pack.c", "rows.c", "attention.c", "pick.c", "ranks.c")
# Multiplications may be fused with the additions behind them, and that is all the licence a compiler gets.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-pthread", "-fPIC")
CHECKS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
    "-g",
    "-O1",
)
SECONDS = 300


class NoLibrary(Exception):
    """Why there is none."""


def build(extra: tuple[str, ...] = (), folder: Path | None = None) -> Path:
    """The library's path; compiles where it is not there yet."""
    compiler = next(
        (found for name in ("gcc", "clang", "cc") if (found := shutil.which(name))), None
    )
    if compiler is None:
        raise NoLibrary("no C compiler (gcc, clang or cc) on this machine")
    target = (folder or cache()) / f"native-{fingerprint(compiler, extra)}.so"
    if target.exists() and whole(target):
        return target
    here = Path(__file__).parent
    logging.getLogger(__name__).info("compiling CPU kernels with %s: once, some seconds", compiler)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / target.name
            command = [compiler, *FLAGS, *machine_flags(), *extra]
            objects = [str(Path(scratch) / f"{name}.o") for name in SOURCES]
            run(
                *(
                    [*command, "-c", str(here / name), "-o", to]
                    for name, to in zip(SOURCES, objects, strict=True)
                )
            )
            run([*command, "-shared", *objects, "-o", str(made), "-lm"])
            with made.open("ab") as file:  # loaders do not mind what follows
                file.write(hashlib.sha256(made.read_bytes()).digest())
            made.rename(target)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoLibrary(
            f"the kernels could not be compiled into {target.parent}: {error}"
        ) from error
    return target


def whole(library: Path) -> bool:
    data = library.read_bytes()
    return hashlib.sha256(data[:-32]).digest() == data[-32:]


def run(*commands: list[str]) -> None:
    """All at once; the first that fails says why."""
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    said = [process.communicate(timeout=SECONDS)[1] for process in running]
    for command, process, text in zip(commands, running, said, strict=True):
        if process.returncode:
            raise NoLibrary(f"{command[0]} failed: {text.strip()[-500:]}")


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
