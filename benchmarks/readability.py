"""Measures how readable the source is: density of lines, long lines, class names, request path.

    python benchmarks/readability.py                  # lines and class names
    python benchmarks/readability.py --request-path   # source files that one chat request executes

Tokens per line counts Python tokens (without comments and line ends) over lines that are not blank.
For comparison: nano-vllm 8.0, starlette 6.9, mini-sglang 6.5.

--request-path starts a server with the embedded model on the CPU, sends one chat request to warm it
up and one that is traced, and lists every file of src/bloomery that the second one executed in the
server and engine processes.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import tokenize
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "tests", "benchmarks")
MAX_COLUMNS = 100
START_SECONDS = 240.0  # limit for the server's start
UNCOUNTED_TOKENS = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.COMMENT,
    tokenize.ENDMARKER,
}


@dataclass
class LineCounts:
    """Sums over files."""

    num_tokens: int = 0
    num_lines: int = 0  # not blank
    num_long_lines: int = 0

    def add(self, other: LineCounts) -> None:
        self.num_tokens += other.num_tokens
        self.num_lines += other.num_lines
        self.num_long_lines += other.num_long_lines

    @property
    def tokens_per_line(self) -> float:
        return self.num_tokens / max(self.num_lines, 1)


def python_files(*folders: str) -> list[Path]:
    """All Python files of these folders that git knows or would add."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "--", *folders]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = {ROOT / name for name in output.splitlines() if name.endswith(".py")}
    return sorted(path for path in paths if path.exists())


# ---- lines and names -----------------------------------------------------------------------------


def count_lines(path: Path) -> LineCounts:
    text = path.read_text()
    lines = [line for line in text.splitlines() if line.strip()]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return LineCounts(
        num_tokens=sum(token.type not in UNCOUNTED_TOKENS for token in tokens),
        num_lines=len(lines),
        num_long_lines=sum(len(line) > MAX_COLUMNS for line in lines),
    )


def package_of(path: Path) -> str:
    """The first three parts of the path: src/bloomery/engine, tests/engine/test_x.py, ..."""
    return "/".join(path.relative_to(ROOT).parts[:3])


def find_duplicate_classes(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Class names that are defined more than once, and where."""
    places = defaultdict[str, list[str]](list)
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return {name: lines for name, lines in sorted(places.items()) if len(lines) > 1}


def print_density(folder: str) -> None:
    packages = defaultdict[str, LineCounts](LineCounts)
    total = LineCounts()
    for path in python_files(folder):
        counts = count_lines(path)
        packages[package_of(path)].add(counts)
        total.add(counts)
    print(f"{folder}: tokens per line, lines, lines over {MAX_COLUMNS} columns")
    rows = sorted(packages.items(), key=lambda row: -row[1].num_lines)
    for name, counts in [*rows, ("total", total)]:
        density = f"{counts.tokens_per_line:6.2f}"
        print(f"{density}{counts.num_lines:8d}{counts.num_long_lines:6d}  {name}")
    print()


def print_duplicate_classes() -> None:
    duplicates = find_duplicate_classes(python_files(*FOLDERS))
    print(f"{len(duplicates)} class names are not unique")
    for name, places in duplicates.items():
        print(f"  {name}: {', '.join(places)}")


# ---- request path --------------------------------------------------------------------------------


def trace_chat_request() -> dict[str, set[str]]:
    """Files executed by one chat request, by process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port = find_free_port()
        url = f"http://127.0.0.1:{port}"
        process = start_traced_server(port, folder)
        try:
            wait_until(lambda: is_ready(url), "the server does not get ready")
            send_chat_request(url)
            (folder / "start").touch()
            wait_until(lambda: len(list(folder.glob("started.*"))) >= 2, "the tracers do not start")
            send_chat_request(url)
            (folder / "stop").touch()
            num_processes = len(list(folder.glob("started.*")))
            wait_until(
                lambda: len(list(folder.glob("files.*"))) >= num_processes,
                "the tracers do not stop",
            )
            return {path.name: set(path.read_text().split()) for path in folder.glob("files.*")}
        finally:
            process.terminate()
            process.wait()


def start_traced_server(port: int, folder: Path) -> subprocess.Popen[bytes]:
    tracer = ROOT / "benchmarks" / "request_tracer"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(tracer), str(ROOT / "src"))),
        "REQUEST_TRACE_FOLDER": str(folder),
    }
    command = [sys.executable, "-m", "bloomery", "serve", "--port", str(port)]
    command += ["--device", "cpu", "--kv-cache-gib", "0.2"]
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=10) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], message: str) -> None:
    end = time.monotonic() + START_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(message)
        time.sleep(0.05)


def send_chat_request(url: str) -> None:
    """One streamed chat completion, read to its end."""
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 16,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=START_SECONDS) as response:
        response.read()


def print_request_path() -> None:
    processes = trace_chat_request()
    files = sorted(set().union(*processes.values()))
    for name in files:
        print(f"  {name}")
    print(f"{len(files)} source files are executed by one chat request")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--request-path", action="store_true")
    args = parser.parse_args()
    if args.request_path:
        print_request_path()
        return
    for folder in FOLDERS:
        print_density(folder)
    print_duplicate_classes()


if __name__ == "__main__":
    main()
