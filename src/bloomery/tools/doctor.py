"""`bloomery doctor`: checks what a server needs on this machine, and says how to get it.

Each check is independent: one that fails does not keep the others from running. The exit status is
1 if the server could not run. A warning means that it runs, but slower or with less.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Literal

from bloomery.artifacts.locate import locate_model
from bloomery.config import (
    cache_directory,
    config_file_variable,
    count_gpus,
    count_physical_cores,
    installed_torch_version,
    read_config_file,
    read_environment,
    resolve_device,
    use_cache_directory,
)
from bloomery.describe import describe_model
from bloomery.errors import BloomeryError
from bloomery.hardware import detect_hardware, usable_memory_bytes
from bloomery.roofline import count_parameters

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 13)
PACKAGES = ("tokenizers", "uvicorn", "uvloop", "httptools", "jinja2", "huggingface_hub")
MIN_FREE_DISK_BYTES = 5e9
MIN_MEMORY_BYTES = 1e9

CheckState = Literal["ok", "warning", "failed"]
MARKS = {"ok": "ok", "warning": "WARN", "failed": "FAIL"}


@dataclass(frozen=True)
class MachineCheck:
    """What one check found; `remedy` says what to do if it is not ok."""

    name: str
    state: CheckState
    text: str
    remedy: str = ""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="folder, .gguf file or Hub id to check; default: the embedded model",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port to listen on")
    parser.add_argument("--cache-dir", metavar="FOLDER", help="folder for caches")


def run_command(args: argparse.Namespace) -> int:
    checks: tuple[Callable[[], Iterator[MachineCheck]], ...] = (
        check_python,
        check_packages,
        check_torch,
        check_memory,
        lambda: check_cache(args.cache_dir),
        check_cpu_kernels,
        check_disk,
        lambda: check_port(args.host, args.port),
        check_settings,
        lambda: check_model(args.model),
    )
    num_failed = 0
    num_warnings = 0
    for check in checks:
        for result in run_check(check):
            num_failed += result.state == "failed"
            num_warnings += result.state == "warning"
            print(f"{MARKS[result.state]:>4}  {result.name}: {result.text}", flush=True)
            if result.remedy:
                print(f"      {result.remedy}")
    print()
    if num_failed:
        print(f"{num_failed} checks failed: a server cannot run until they are repaired.")
    elif num_warnings:
        print(f"A server can run; {num_warnings} warnings.")
    else:
        print("Everything a server needs is there: `bloomery serve` starts it.")
    return 1 if num_failed else 0


def run_check(check: Callable[[], Iterator[MachineCheck]]) -> Iterator[MachineCheck]:
    """Run one check. An error that it does not expect is a result too."""
    try:
        yield from check()
    except Exception as error:
        name = getattr(check, "__name__", "check").removeprefix("check_")
        yield MachineCheck(name, "failed", f"{type(error).__name__}: {error}")


def check_python() -> Iterator[MachineCheck]:
    version = sys.version_info
    text = f"{version.major}.{version.minor}.{version.micro} ({sys.executable})"
    if version[:2] < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        yield MachineCheck("Python", "failed", text, f"Install Python {wanted} or later.")
    else:
        yield MachineCheck("Python", "ok", text)


def check_packages() -> Iterator[MachineCheck]:
    missing = []
    for name in PACKAGES:
        try:
            import_module(name)
        except ImportError as error:
            missing.append(f"{name} ({error})")
    if missing:
        remedy = "Run `pip install bloomery` again in this environment."
        yield MachineCheck("packages", "failed", "cannot import " + ", ".join(missing), remedy)
    else:
        yield MachineCheck("packages", "ok", f"{len(PACKAGES)} import")


def check_torch() -> Iterator[MachineCheck]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield MachineCheck("torch", "failed", f"cannot be imported: {error}", "pip install torch")
        return
    version = installed_torch_version()
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    known_range = f"{OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} to {NEWEST_TORCH[0]}.{NEWEST_TORCH[1]}"
    if OLDEST_TORCH <= numbers <= NEWEST_TORCH:
        yield MachineCheck("torch", "ok", version)
    else:
        yield MachineCheck("torch", "warning", f"{version}; tested with {known_range}")
    num_gpus = count_gpus()
    if num_gpus == 0:
        yield MachineCheck("GPU", "ok", f"none; {count_physical_cores()} CPU cores compute")
    elif not torch.cuda.is_available():
        remedy = "Install a torch build with CUDA: see https://pytorch.org/get-started/locally"
        text = f"{num_gpus} by the driver, but torch {version} cannot use them"
        yield MachineCheck("GPU", "warning", text, remedy)
    else:
        title = torch.cuda.get_device_name(0)
        free_bytes, total_bytes = torch.cuda.mem_get_info(0)
        free = f"{free_bytes / 1e9:.0f} of {total_bytes / 1e9:.0f} GB free"
        text = f"{num_gpus} x {title}, {free}"
        if free_bytes < total_bytes / 2:
            remedy = "Another program uses this GPU: nvidia-smi names it."
            yield MachineCheck("GPU", "warning", text, remedy)
        else:
            yield MachineCheck("GPU", "ok", text)


def check_memory() -> Iterator[MachineCheck]:
    hardware = detect_hardware("cpu")
    limit_bytes = usable_memory_bytes(hardware)
    available_bytes = min(limit_bytes, read_available_memory() or limit_bytes)
    text = f"{available_bytes / 1e9:.1f} of {limit_bytes / 1e9:.1f} GB available"
    if available_bytes < MIN_MEMORY_BYTES:
        remedy = "Close other programs, or choose a smaller model or --quantization int4."
        yield MachineCheck("memory", "warning", text, remedy)
    else:
        yield MachineCheck("memory", "ok", text)


def read_available_memory() -> float | None:
    """Bytes that programs can still get, as Linux estimates them."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return float(fields["MemAvailable"].split()[0]) * 1024


def check_cache(cache_dir: str | None) -> Iterator[MachineCheck]:
    try:
        folder = use_cache_directory(cache_dir)
    except BloomeryError as error:
        yield MachineCheck("cache folder", "failed", str(error))
        return
    is_temporary = ".cache" not in folder.parts and cache_dir is None
    text = f"{folder} can be written"
    if is_temporary:
        remedy = "The home directory cannot be written; --cache-dir FOLDER keeps caches."
        yield MachineCheck("cache folder", "warning", f"{text}, but is temporary", remedy)
    else:
        yield MachineCheck("cache folder", "ok", text)


def check_cpu_kernels() -> Iterator[MachineCheck]:
    if resolve_device("auto") != "cpu":
        yield MachineCheck("CPU kernels", "ok", "not needed with a GPU")
        return
    from bloomery.native.build import NativeBuildError, build_library

    try:
        library = build_library()
    except NativeBuildError as error:
        remedy = (
            "Without them torch computes, several times slower. Install gcc (Debian: apt-get "
            "install gcc) or a wheel that has them prebuilt."
        )
        yield MachineCheck("CPU kernels", "warning", str(error), remedy)
    else:
        yield MachineCheck("CPU kernels", "ok", str(library))


def check_disk() -> Iterator[MachineCheck]:
    from huggingface_hub import constants

    folders = {"cache folder": cache_directory(), "downloads": Path(constants.HF_HUB_CACHE)}
    for name, folder in folders.items():
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free_bytes = shutil.disk_usage(existing).free
        text = f"{free_bytes / 1e9:.0f} GB free in {folder}"
        is_writable = existing.is_dir() and os.access(existing, os.W_OK)
        if not is_writable:
            remedy = "Models of the Hub cannot be downloaded; set HF_HUB_CACHE to another folder."
            yield MachineCheck(f"disk for {name}", "warning", f"{folder} is not writable", remedy)
        elif name == "downloads" and free_bytes < MIN_FREE_DISK_BYTES:
            remedy = "Free some space, or set HF_HUB_CACHE to another disk."
            yield MachineCheck(f"disk for {name}", "warning", text, remedy)
        else:
            yield MachineCheck(f"disk for {name}", "ok", text)


def check_port(host: str, port: int) -> Iterator[MachineCheck]:
    from bloomery.serve_main import open_listeners

    try:
        listeners = open_listeners(host, port)
    except (BloomeryError, OverflowError) as error:
        yield MachineCheck("port", "failed", str(error))
        return
    close_listeners(listeners)
    yield MachineCheck("port", "ok", f"{port} of {host} is free")


def close_listeners(listeners: list[socket.socket]) -> None:
    for listener in listeners:
        listener.close()


def check_settings() -> Iterator[MachineCheck]:
    """Variables and the configuration file."""
    try:
        _, warnings = read_environment()
        path = config_file_variable()
        if path:
            read_config_file(path)
    except BloomeryError as error:
        yield MachineCheck("settings", "failed", str(error))
        return
    for warning in warnings:
        yield MachineCheck("settings", "warning", warning)
    if not warnings:
        yield MachineCheck("settings", "ok", path or "no BLOOMERY_* variable is misspelt")


def check_model(name: str | None) -> Iterator[MachineCheck]:
    """Whether the model can be found and read; of a Hub id only its description is fetched."""
    try:
        artifact = locate_model(name, weights=False)
        model = describe_model(artifact).model
    except BloomeryError as error:
        yield MachineCheck("model", "failed", str(error))
        return
    except OSError as error:
        yield MachineCheck("model", "failed", f"{error.filename}: {error.strerror}")
        return
    num_parameters = count_parameters(model).total
    text = f"{artifact.name}, {num_parameters / 1e9:.2f} billion parameters ({artifact.origin})"
    try:
        version = metadata.version("bloomery")
    except metadata.PackageNotFoundError:
        version = "from a source folder"
    yield MachineCheck("model", "ok", text)
    yield MachineCheck("Bloomery", "ok", version)
