"""Finds the compiled C kernels of this package: those in the wheel, or compiled on this machine.

A wheel has one library per kind of processor (KERNEL_VARIANTS). Its file name ends with a hash of
the sources, so a library of other sources is never loaded. Without a fitting one the kernels are
compiled once per machine and kept in the cache folder; there the file name is a hash of the
sources, the compiler and the processor's features. Every library ends with its own digest, so a
damaged file is not loaded.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from bloomery.config import cache_directory

HEADERS = (
    "native.h",
    "vectors.h",
    "levels.h",
    "panel_dots.h",
    "kv_cache.h",
    "gguf_blocks.h",
)
SOURCES = (
    "thread_pool.c",
    "gemm.c",
    "pack.c",
    "row_ops.c",
    "experts.c",
    "lora.c",
    "attention.c",
    "recurrent.c",
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
CPUINFO = Path("/proc/cpuinfo")
PREBUILT_FOLDER = Path(__file__).with_name("prebuilt")  # only in wheels

# What torch alone costs: 9 instead of 50 tokens/s for one reader of the embedded model on two cores
# of a server processor.
COST_WITHOUT_KERNELS = "CPU serving will be about 5 times slower"
REMEDY_WITHOUT_KERNELS = (
    "install gcc, or a Bloomery wheel for this platform, which has compiled kernels"
)


class NativeBuildError(Exception):
    """The native library cannot be had; the message says why, what it costs and what helps."""

    def __init__(self, reason: str):
        super().__init__(f"{reason}. {COST_WITHOUT_KERNELS}; {REMEDY_WITHOUT_KERNELS}")


def find_library() -> Path:
    """Return the library for this machine; compile it if the package has none that fits."""
    prebuilt = find_prebuilt(PREBUILT_FOLDER, platform.machine(), processor_flags())
    return build_library() if prebuilt is None else prebuilt


# ---- libraries in the wheel ----------------------------------------------------------------------


@dataclass(frozen=True)
class KernelVariant:
    """A kind of processor for which wheels have a compiled library."""

    name: str
    machine: str  # as platform.machine() says
    flags: tuple[str, ...]  # of /proc/cpuinfo, that the processor must have
    compile_target: str  # the processor in the words of `zig cc -mcpu`

    def file_name(self) -> str:
        return f"{self.machine}-{self.name}-{hash_sources()}.so"


# Of one machine, the fastest first.
KERNEL_VARIANTS = (
    KernelVariant(
        "avx512",
        "x86_64",
        (
            "avx2",
            "bmi2",
            "f16c",
            "fma",
            "avx512f",
            "avx512bw",
            "avx512cd",
            "avx512dq",
            "avx512vl",
            "avx512_vnni",
        ),
        "x86_64_v4+avx512vnni",
    ),
    KernelVariant(  # processors of laptops without AVX-512
        "avxvnni",
        "x86_64",
        ("avx2", "bmi2", "f16c", "fma", "movbe", "avx_vnni"),
        "x86_64_v3+avxvnni",
    ),
    KernelVariant("avx2", "x86_64", ("avx2", "bmi2", "f16c", "fma", "movbe"), "x86_64_v3"),
    KernelVariant("dotprod", "aarch64", ("asimd", "asimddp", "atomics"), "generic+dotprod+lse"),
    KernelVariant("neon", "aarch64", ("asimd",), "generic"),
)


def find_prebuilt(folder: Path, machine: str, flags: Collection[str]) -> Path | None:
    """Return the fastest library of the folder that this processor can run; None without one."""
    if not folder.is_dir():
        return None
    for variant in KERNEL_VARIANTS:
        library = folder / variant.file_name()
        fits = variant.machine == machine and set(variant.flags) <= set(flags)
        if fits and library.exists() and is_intact(library):
            return library
    return None


def hash_sources() -> str:
    """Return a hash of the sources and of the flags with which all libraries are compiled."""
    digest = hashlib.sha256("\n".join(FLAGS).encode())
    for name in (*HEADERS, *SOURCES):
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:16]


# ---- libraries compiled on this machine ----------------------------------------------------------


def build_library(extra_flags: tuple[str, ...] = (), folder: Path | None = None) -> Path:
    """Return the path of the library in the cache folder; compile it if it is not there yet."""
    compiler = find_compiler()
    target = (folder or cache_directory()) / f"native-{fingerprint(compiler, extra_flags)}.so"
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
    raise NativeBuildError("there is no C compiler (gcc, clang or cc)")


def compile_library(compile_command: Sequence[str], target: Path) -> None:
    """Compile all sources, link them, append the digest and move the library to `target`.

    It is renamed into place, so no process sees half of it.
    """
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
        processor_description(),
        hash_sources(),
        *extra_flags,
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


# ---- the processor -------------------------------------------------------------------------------


def processor_description() -> str:
    """Text that differs between processors with different instruction sets."""
    fields = read_cpuinfo()
    if not fields:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(fields.get(name, "") for name in ("model name", "flags", "Features"))


def processor_flags() -> list[str]:
    """The features of the processor in the words of Linux; empty on other systems."""
    fields = read_cpuinfo()
    return fields.get("flags", fields.get("Features", "")).split()


def read_cpuinfo() -> dict[str, str]:
    """The fields of the first processor of this machine; empty where the system has no list."""
    try:
        text = CPUINFO.read_text()
    except OSError:
        return {}
    first_processor = text.split("\n\n")[0]
    pairs = [line.split(":", 1) for line in first_processor.splitlines() if ":" in line]
    return {name.strip(): value.strip() for name, value in pairs}


if __name__ == "__main__":  # `make` compiles them while it installs the package
    try:
        find_library()
    except NativeBuildError as error:
        print(f"warning: {error}.")
