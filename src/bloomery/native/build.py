"""Compiles the C kernels of this package once per machine and caches the library for the user.

The file name of the library is a hash of the sources, the compiler and the processor's features, so
a stale library is never loaded. The file is renamed into place, so no process sees half of it, and
it ends with its own digest, so a damaged file is not loaded.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

HEADERS = ("native.h", "vectors.h", "kv_cache.h")
SOURCES = (
    "thread_pool.c",
    "gemm.c",
    "pack.c",
    "row_ops.c",
    "attention.c",
    "sample.c",
    "collectives.c",
)
COMPILERS = ("gcc", "clang", "cc")
# The compiler may fuse a multiplication and an addition; it may not reorder float arithmetic.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-pthread", "-fPIC")
SANITIZER_FLAGS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
    "-g",
    "-O1",
)
COMPILE_TIMEOUT = 300  # seconds
DIGEST_BYTES = 32  # sha256


class NativeBuildError(Exception):
    """The native library cannot be built; the message says why."""


def build_library(extra_flags: tuple[str, ...] = (), folder: Path | None = None) -> Path:
    """Return the path of the library; compile it if it is not there yet."""
    compiler = find_compiler()
    target = (folder or cache_folder()) / f"native-{fingerprint(compiler, extra_flags)}.so"
    if target.exists() and is_intact(target):
        return target
    logging.getLogger(__name__).info(
        "compiling CPU kernels with %s: takes some seconds, once", compiler
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        compile_library([compiler, *FLAGS, *machine_flags(), *extra_flags], target)
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeBuildError(
            f"the kernels could not be compiled into {target.parent}: {error}"
        ) from error
    return target


def find_compiler() -> str:
    """Return the path of the first compiler of COMPILERS that is installed."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise NativeBuildError("no C compiler (gcc, clang or cc) on this machine")


def compile_library(compile_command: list[str], target: Path) -> None:
    """Compile all sources, link them, append the digest and move the library to `target`."""
    source_folder = Path(__file__).parent
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        library = Path(scratch) / target.name
        commands = []
        objects = []
        for name in SOURCES:
            objects.append(str(Path(scratch) / f"{name}.o"))
            source = str(source_folder / name)
            commands.append([*compile_command, "-c", source, "-o", objects[-1]])
        run_all(commands)
        run_all([[*compile_command, "-shared", *objects, "-o", str(library), "-lm"]])
        with library.open("ab") as file:  # the loader ignores bytes after the library
            file.write(hashlib.sha256(library.read_bytes()).digest())
        library.rename(target)


def is_intact(library: Path) -> bool:
    """Whether the file ends with the digest of the bytes before it."""
    content = library.read_bytes()
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def run_all(commands: list[list[str]]) -> None:
    """Run the commands in parallel; raise with the error output of the first that fails."""
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    outputs = [process.communicate(timeout=COMPILE_TIMEOUT)[1] for process in running]
    for command, process, output in zip(commands, running, outputs, strict=True):
        if process.returncode:
            raise NativeBuildError(f"{command[0]} failed: {output.strip()[-500:]}")


def cache_folder() -> Path:
    """Return the folder of the compiled library."""
    return Path.home() / ".cache" / "bloomery"


def machine_flags() -> tuple[str, ...]:
    """Flags for all features of this processor: the library never leaves the machine."""
    if platform.machine() in ("arm64", "aarch64"):
        return ("-mcpu=native",)
    return ("-march=native",)


def fingerprint(compiler: str, extra_flags: tuple[str, ...]) -> str:
    """Return a hash of the sources, the flags, the compiler and the processor."""
    compiler_file = Path(compiler).resolve().stat()
    parts = [
        compiler,
        str(compiler_file.st_size),
        str(compiler_file.st_mtime_ns),
        processor_features(),
        *FLAGS,
        *extra_flags,
    ]
    digest = hashlib.sha256("\n".join(parts).encode())
    for name in (*HEADERS, *SOURCES):
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:24]


def processor_features() -> str:
    """Text that differs between processors with different instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = {line.split(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    return "\n".join(fields.get(name, "") for name in ("model name", "flags", "Features"))
