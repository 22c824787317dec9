"""Servers for the rows, the processes and sockets of a server, and loads in other processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.chaos.http import RunningServer, encode_request, get_status, run_server

ROOT = Path(__file__).parents[2]
# A real server gives up after far fewer crashes a minute. Queued requests get more time, because
# engines restart slowly on a busy machine.
TOLERANT_LIMITS = "--limits restarts=1000,queue_seconds=600,deadline_seconds=3600"
THREE_RANKS = "--tp 3 --threads 1"
LISTEN_STATE = "0A"  # of a socket in /proc/PID/net/tcp


@contextlib.contextmanager
def run_fake_server(
    engine: str,
    options: str = "",
    port: int | None = None,
    python: tuple[str, ...] = (),
) -> Iterator[RunningServer]:
    """Run tests/chaos/fake_server.py.

    `engine` holds the options of the fake engine, `options` those of the server, `python` those of
    the interpreter.
    """
    arguments = (f"--engine={engine}", *options.split())
    with (
        tempfile.TemporaryDirectory(prefix="bloomery-") as folder,
        run_server(Path(folder), *arguments, port=port, python=python) as server,
    ):
        yield server


@contextlib.contextmanager
def run_server_command(*command: str) -> Iterator[RunningServer]:
    """Run a server by its command; the port is appended as the last argument."""
    with (
        tempfile.TemporaryDirectory(prefix="bloomery-") as folder,
        run_server(Path(folder), command=command) as server,
    ):
        yield server


@contextlib.contextmanager
def run_embedded_model(options: str) -> Iterator[RunningServer]:
    """Run `bloomery serve` with the embedded model in deterministic mode."""
    serve = (sys.executable, "-m", "bloomery", "serve", "--deterministic")
    with run_server_command(*serve, *options.split(), "--port") as server:
        yield server


async def wait_for_readiness(port: int, is_ready: bool) -> None:
    """Wait until the server is ready, or until it is not."""
    while (await get_status(port, "/ready") == 200) != is_ready:
        await asyncio.sleep(0.1)


def rank_pids(server: RunningServer) -> list[int]:
    """Return the process ids of the engine's ranks, or none while the ranks restart."""
    pids = []
    try:
        for engine in server.children("engine_main"):
            pids += Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
        commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in pids}
    except FileNotFoundError:  # a process has just ended
        return []
    return [pid for pid, command in commands.items() if "rank_worker" in command]


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used, in user and in system mode."""
    _, after_name = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)
    fields = after_name.split()
    num_ticks = int(fields[11]) + int(fields[12])
    return num_ticks / os.sysconf("SC_CLK_TCK")


def listening_addresses(pid: int) -> list[tuple[str, int]]:
    """Return the addresses and ports where a process listens; each socket counts once."""
    links = [link for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    targets = {os.readlink(link) for link in links}
    addresses = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for row in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = row.split()
            inode = rest[5]
            if state == LISTEN_STATE and f"socket:[{inode}]" in targets:
                address, port = local.split(":")
                addresses.append((decode_address(address, family), int(port, 16)))
    return addresses


def decode_address(address: str, family: socket.AddressFamily) -> str:
    """Decode an address of /proc/PID/net: hexadecimal 32-bit words with the low byte first."""
    offsets = range(0, len(address), 8)
    parts = [bytes.fromhex(address[offset : offset + 8])[::-1] for offset in offsets]
    return socket.inet_ntop(family, b"".join(parts))


def open_silent_connection(port: int, body: dict[str, Any] | None = None) -> socket.socket:
    """Open a connection that never reads, and send a completion request if there is a body."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    if body is not None:
        data = json.dumps(body).encode()
        connection.sendall(encode_request("POST", "/v1/completions", data))
    return connection


async def start_load(module: str, *arguments: float) -> asyncio.subprocess.Process:
    """Start a load generator of tests/chaos in a process of lower priority.

    The process stands for clients on other machines, so it must not delay server or measurement.
    """
    command = (sys.executable, "-m", f"tests.chaos.{module}", *map(str, arguments))
    return await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        limit=1 << 22,
        preexec_fn=lambda: os.nice(10),
    )


async def start_stream_crowd(
    port: int, num_streams: int, num_tokens: int, ramp_seconds: float
) -> asyncio.subprocess.Process:
    """Start streams in another process (tests/chaos/stream_load.py); return when all have started.

    The process ends when all streams have ended.
    """
    process = await start_load("stream_load", port, num_streams, num_tokens, ramp_seconds)
    assert process.stdout is not None
    await process.stdout.readline()
    return process


async def read_result(load: asyncio.subprocess.Process) -> dict[str, Any]:
    """Wait until a load generator has ended; return the figures that it prints."""
    output, _ = await load.communicate()
    figures: dict[str, Any] = json.loads(output)
    return figures


def events_per_second(event_counts: list[tuple[float, int]], begin: float, end: float) -> float:
    """Return the rate of events between two times.

    `event_counts` are pairs of a time in seconds and the number of events so far.
    """
    samples = [(seconds, count) for seconds, count in event_counts if begin <= seconds <= end]
    first_seconds, first_count = samples[0]
    last_seconds, last_count = samples[-1]
    return (last_count - first_count) / (last_seconds - first_seconds)
