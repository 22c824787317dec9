"""Rows about what a server shows and accepts: secrecy, exposure.

One API key must not learn about the prompts of another. The server listens on one port, keeps
secrets out of its logs and runs nothing that it is sent.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import math
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.reliability_rows.report import print_row, show_progress, to_milliseconds
from benchmarks.reliability_rows.servers import ROOT, listening_addresses, run_fake_server
from bloomery.server.routes import build_routes
from bloomery.server.service import ServerSettings
from tests.chaos.http import (
    FAKE_SERVER,
    LONG_COMPLETION,
    RunningServer,
    encode_request,
    free_port,
    get_status,
    send_request,
    stream_events,
)

PUBLIC_PATHS = ["/", "/assets/{file}", "/health", "/live", "/ping", "/ready"]
SECRET_KEY = "a-key-that-no-process-list-shows"
SECRET_WORD = "a-word-that-no-log-shows"
# Ways to run code that comes as data.
CODE_EXECUTION = re.compile(
    r"\b(c?pickle|cloudpickle|marshal)\b|torch\.load\(|(?<![.\w])(eval|exec)\("
)
SERVES = "serves"
NOT_TRIED = "not tried: no unshare"
# Shell commands that change the file systems of a mount namespace.
MOUNT_READ_ONLY = (
    "mount -o remount,bind,ro / 2>/dev/null || mount --bind / / && mount -o remount,bind,ro /"
)
MOUNT_FULL = "; ".join(
    f"mount -t tmpfs -o size=64k none {folder} && head -c 64k /dev/zero > {folder}/full || true"
    for folder in ("/tmp", "/dev/shm", "/var/tmp")
)


def check_secrecy(args: argparse.Namespace) -> bool:
    """A prompt that one key has put into the prefix cache must look cold to another key.

    The TTFT of a 2,000-token prompt is compared. The owner of the prompt does see the difference,
    which shows that the test can find one.
    """
    prompt_random = random.Random(args.seed)
    ttft_seconds: dict[str, list[float]] = {"cold": [], "other": [], "owner": []}

    def random_prompt() -> list[int]:
        return [prompt_random.randrange(3, 400) for _ in range(2000)]

    async def measure_ttft(port: int, key: str, prompt: list[int]) -> float:
        body = LONG_COMPLETION | {"prompt": prompt, "max_tokens": 1}
        begin = time.monotonic()
        async for _ in stream_events(port, "/v1/completions", body, **{"x-api-key": key}):
            return time.monotonic() - begin
        raise RuntimeError("the stream has no event")

    async def measure_all(port: int) -> None:
        for _ in range(args.times):
            cached_prompt = random_prompt()
            await measure_ttft(port, "one-key", cached_prompt)
            prompts = [("cold", random_prompt()), ("other", cached_prompt)]
            prompt_random.shuffle(prompts)
            for kind, prompt in prompts:
                ttft_seconds[kind].append(await measure_ttft(port, "another-key", prompt))
            ttft_seconds["owner"].append(await measure_ttft(port, "one-key", cached_prompt))
            show_progress("secrecy", args.times)

    engine = "--scripted --delay 0.002 --blocks 100000"
    options = "--max-num-batched-tokens 64 --max-num-seqs 4 --api-key one-key,another-key"
    with run_fake_server(engine, options) as server:
        asyncio.run(measure_all(server.port))
    p_other = rank_sum_p_value(ttft_seconds["cold"], ttft_seconds["other"])
    p_owner = rank_sum_p_value(ttft_seconds["cold"], ttft_seconds["owner"])
    medians = {
        f"{kind}_ms": to_milliseconds(statistics.median(values))
        for kind, values in ttft_seconds.items()
    }
    print_row(
        row="secrecy",
        prompts=args.times,
        p_other=round(p_other, 3),
        p_owner=float(f"{p_owner:.1g}"),
        **medians,
    )
    return p_other > 0.01 and p_owner < 0.001


def rank_sum_p_value(first: list[float], second: list[float]) -> float:
    """Mann-Whitney test: the probability that equal distributions differ in rank this much.

    The values have no ties; the distribution of the statistic is approximated by a normal one.
    """
    ranks = {value: rank for rank, value in enumerate(sorted(first + second), 1)}
    n = len(first)
    m = len(second)
    rank_sum = sum(ranks[value] for value in first)
    u = rank_sum - n * (n + 1) / 2
    deviation = math.sqrt(n * m * (n + m + 1) / 12)
    z = (u - n * m / 2) / deviation
    return math.erfc(abs(z) / math.sqrt(2))


def check_exposure(args: argparse.Namespace) -> bool:
    """Look at sockets, public routes, package contents, pickles, logs and process lists.

    The server must also run as an unprivileged user on a read-only root, and on full file systems.
    """
    expected = {
        "listening": 1,
        "public_paths": PUBLIC_PATHS,
        "statuses_without_key": [401],
        "key_in_processes": 0,
        "pickles_accepted": 0,
        "secrets_in_log": 0,
        "code_execution": 0,
    }
    figures = inspect_server() | {"code_execution": count_code_execution()}
    places = {
        "on_read_only_root": serve_confined(MOUNT_READ_ONLY),
        "on_full_file_systems": serve_confined(MOUNT_FULL),
    }
    print_row(row="exposure", **figures, **places)
    return figures == expected and set(places.values()) <= {SERVES, NOT_TRIED}


def inspect_server() -> dict[str, Any]:
    """Start a server with an API key and return what it shows to others."""
    routes = build_routes(ServerSettings(model="speaker"))
    paths = [route.path for route in routes]
    private_routes = [(route.method, route.path) for route in routes if not route.public]
    with tempfile.NamedTemporaryFile("w", prefix="bloomery-key-") as key_file:
        key_file.write(SECRET_KEY)
        key_file.flush()
        with run_fake_server("--scripted", f"--api-key @{key_file.name}") as server:
            pids = [server.process.pid, *server.children("")]
            sockets = [address for pid in pids for address in listening_addresses(pid)]
            statuses = asyncio.run(statuses_without_key(server.port, private_routes))
            num_pickles = send_pickles(server.port, paths)
            asyncio.run(send_secret_word(server.port))
            return {
                "listening": len(sockets),
                "public_paths": sorted({route.path for route in routes if route.public}),
                "statuses_without_key": sorted(statuses),
                "key_in_processes": count_key_in_processes(pids),
                "pickles_accepted": num_pickles,
                "secrets_in_log": count_secrets_in_log(server),
            }


async def statuses_without_key(port: int, routes: list[tuple[str, str]]) -> set[int]:
    """Return all statuses of requests without an API key to (method, path) pairs."""
    statuses = set()
    for method, path in routes:
        body: dict[str, Any] | None = {} if method == "POST" else None
        response = await send_request(port, method, path, body)
        statuses.add(response.status)
    return statuses


def count_key_in_processes(pids: list[int]) -> int:
    """Return in how many environments and command lines the API key stands."""
    files = [Path(f"/proc/{pid}/{name}") for pid in pids for name in ("environ", "cmdline")]
    return sum(SECRET_KEY.encode() in file.read_bytes() for file in files)


def count_secrets_in_log(server: RunningServer) -> int:
    log = server.log.read_text()
    return log.count(SECRET_KEY) + log.count(SECRET_WORD)


def count_code_execution() -> int:
    """Count the places in the package's sources that could run code which comes as data."""
    sources = [path for suffix in ("py", "c", "h") for path in (ROOT / "src").rglob(f"*.{suffix}")]
    return sum(len(CODE_EXECUTION.findall(path.read_text("utf-8"))) for path in sources)


def send_pickles(port: int, paths: list[str]) -> int:
    """Send a 1 MB pickle that creates a file to every path, raw and in fields.

    Returns how many requests were not refused, plus one if the file exists.
    """
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "canary"
        raw = f"cposix\nsystem\n(S'touch {canary}'\ntR.".encode().ljust(1 << 20, b"0")
        text = base64.b64encode(raw).decode()
        bodies = [
            {"inputs": text},
            {"prompt": text},
            {"messages": [{"role": "user", "content": text}]},
            {"prompt_embeds": text},
        ]
        messages = [json.dumps(body).encode() for body in bodies]
        messages.append(raw)
        statuses = [post_status(port, path, data) for path in paths for data in messages]
        num_accepted = sum(not 400 <= status < 500 for status in statuses)
        return num_accepted + canary.exists()


def post_status(port: int, path: str, data: bytes) -> int:
    """Return the status of a response that may arrive before all of the body was sent."""
    message = encode_request("POST", path, data, **{"x-api-key": SECRET_KEY})
    with socket.create_connection(("127.0.0.1", port)) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(message)
        status_line = connection.recv(12)
        return int(status_line[9:])


async def send_secret_word(port: int) -> None:
    """Put the secret word into prompts, names and fields of valid and invalid requests."""
    word = SECRET_WORD
    few = {"max_tokens": 2}
    message = {"role": "user", "content": word}
    strange_message = {"role": word, "content": word}
    tool = {"type": "function", "function": {"name": word}}
    parameters = {"max_new_tokens": 2, "stop": [word]}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": word, **few}),
        ("/v1/completions", {"prompt": word, "n": -1, "user": word}),
        ("/v1/chat/completions", {"messages": [message], **few}),
        ("/v1/chat/completions", {"messages": [strange_message], "model": word, word: word}),
        ("/v1/chat/completions", {"messages": [], "tools": [tool]}),
        ("/generate", {"inputs": word, "parameters": parameters}),
        (f"/{word}", {}),
    ]
    headers = {"x-api-key": SECRET_KEY, "user-agent": word, "x-request-id": word + " \x7f"}
    for path, body in bodies:
        await send_request(port, "POST", path, body, **headers)


def serve_confined(mount_commands: str) -> str:
    """Run a server as an unprivileged user in a mount namespace, after shell commands in it.

    Returns SERVES, NOT_TRIED, or what is wrong.
    """
    port = free_port()
    server_command = f"{sys.executable} -B {FAKE_SERVER} {port}"
    as_user = "unshare --user --map-user=65534 --map-group=65534"
    script = f"{mount_commands}; exec {as_user} {server_command}"
    in_namespace = ["unshare", "--mount", "--propagation", "private"]
    try:
        process = subprocess.Popen(
            [*in_namespace, "sh", "-c", script],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HOME": "/nonexistent"},
        )
    except OSError:
        return NOT_TRIED
    end = time.monotonic() + 60
    try:
        while asyncio.run(get_status(port, "/ready")) != 200:
            if process.poll() is not None or time.monotonic() > end:
                assert process.stderr is not None
                return f"fails: {process.stderr.read()[-300:]}"
            time.sleep(0.2)
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        response = asyncio.run(send_request(port, "POST", "/v1/chat/completions", chat))
        return SERVES if response.status == 200 else f"answers {response.status}"
    finally:
        process.kill()
        process.wait()
