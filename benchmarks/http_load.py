"""A server with random weights under streaming load: time to ready, throughput, TTFT, longest gap.

    PYTHONPATH=src:. python3 benchmarks/http_load.py llama-8b 256:128:256:768 32:128:256:128

A load is CLIENTS:IN:OUT:REQUESTS. Each client sends one request after another to /v1/completions,
with random token ids in and a fixed number of tokens out. Clients are spread over several
processes, so that they do not limit the server.

The server is started as `bloomery serve` with the cache directory --cache-dir; a new one is empty,
so that the first start compiles every kernel. With --starts N it starts N times, one after another
with the same caches, and the loads run on the last one. The server's log is printed with the
seconds since its start; a GPU worker says there how long each phase of the start took. `ready_s` is
the time from its start until /health answers 200. `first_s` is the first request after that and
`later_s` the fastest of five, for a short prompt and for one of LONG_PROMPT tokens: with "ready
means fast" they are nearly equal. `ttft` is the time to the first token, `gap` the longest pause
within an answer, both in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.offline import SHAPES

NUM_PROCESSES = 8
FIRST_TOKEN_ID = 100  # of prompts; lower ids may be special
MAX_READY_SECONDS = 180
LONG_PROMPT = 3000  # tokens, too many for a captured step


class HttpLoad(NamedTuple):
    """How many clients send how many requests, of how many tokens."""

    clients: int
    prompt_len: int
    output_len: int
    requests: int


class Answer(NamedTuple):
    """When the events of one answer came, in seconds since the request was sent."""

    status: int
    num_events: int
    ttft: float
    longest_gap: float


def write_model(shape: str, folder: Path) -> None:
    """Write the config of a shape, and a tokenizer that has a word for every token id."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = SHAPES[shape]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {f"w{token}": token for token in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + MAX_READY_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise SystemExit("the server did not become ready; its log is above")


def print_log(lines: IO[bytes], start: float) -> None:
    """Print the server's log as it comes, with the seconds since its start."""
    for line in lines:
        text = line.decode(errors="replace").rstrip()
        if "POST /v1" not in text:
            print(f"[{time.monotonic() - start:6.2f} s] {text}", flush=True)


def time_request(url: str, model: str, prompt_len: int, seed: int) -> float:
    """Seconds of one short answer to a prompt that no other request has."""
    rng = random.Random(seed)
    prompt = [rng.randrange(FIRST_TOKEN_ID, 40000) for _ in range(prompt_len)]
    body = {"model": model, "prompt": prompt, "max_tokens": 16, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=60) as response:
        response.read()
    return time.perf_counter() - start


async def stream_answer(port: int, body: bytes) -> Answer:
    """Send one request and count the events of its answer as they arrive."""
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    status = int((await reader.readline()).split()[1])
    times = [time.perf_counter() - start async for line in reader if line.startswith(b"data: {")]
    writer.close()
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return Answer(status, len(times), times[0] if times else 0.0, max(gaps, default=0.0))


def run_clients(port: int, model: str, load: HttpLoad, seed: int, start: float) -> list[Answer]:
    """Run this process's share of the clients, beginning at the wall-clock time `start`."""
    rng = random.Random(seed)
    bodies = []
    for _ in range(load.requests):
        prompt = [rng.randrange(FIRST_TOKEN_ID, 40000) for _ in range(load.prompt_len)]
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": load.output_len,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0.0,
        }
        bodies.append(json.dumps(body).encode())
    answers: list[Answer] = []

    async def run_client() -> None:
        while bodies:
            answers.append(await stream_answer(port, bodies.pop()))

    async def run_all() -> None:
        await asyncio.sleep(max(start - time.time(), 0.0))
        await asyncio.gather(*[run_client() for _ in range(load.clients)])

    asyncio.run(run_all())
    return answers


def run_load(port: int, model: str, load: HttpLoad, pool: ProcessPoolExecutor) -> dict[str, Any]:
    share = load._replace(
        clients=max(load.clients // NUM_PROCESSES, 1), requests=load.requests // NUM_PROCESSES
    )
    start = time.time() + 1.0 + load.requests * load.prompt_len * 1e-6  # prompts are made first
    futures = [
        pool.submit(run_clients, port, model, share, seed, start) for seed in range(NUM_PROCESSES)
    ]
    answers = [answer for future in futures for answer in future.result()]
    seconds = time.time() - start
    ttfts = sorted(answer.ttft for answer in answers)
    gaps = sorted(answer.longest_gap for answer in answers)
    return {
        "clients": load.clients,
        "in": load.prompt_len,
        "out": load.output_len,
        "requests": len(answers),
        "failed": sum(answer.status != 200 for answer in answers),
        "s": round(seconds, 2),
        "tok_s": round(sum(answer.num_events for answer in answers) / seconds),
        "ttft_p50": round(ttfts[len(ttfts) // 2], 4),
        "ttft_p99": round(ttfts[int(len(ttfts) * 0.99)], 4),
        "gap_p99": round(gaps[int(len(gaps) * 0.99)], 4),
    }


def parse_load(text: str) -> HttpLoad:
    return HttpLoad(*map(int, text.split(":")))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("loads", nargs="*", type=parse_load, metavar="CLIENTS:IN:OUT:REQUESTS")
    parser.add_argument("--cache-dir", type=Path, help="default: a new, empty folder")
    parser.add_argument("--starts", type=int, default=1, help="of the server, one after another")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    model = folder / args.shape
    write_model(args.shape, model)
    cache = args.cache_dir or folder / "cache"
    for number in range(args.starts):
        is_last = number == args.starts - 1
        measure_start(args.shape, model, cache, args.loads if is_last else [])


def measure_start(shape: str, model: Path, cache: Path, loads: Sequence[HttpLoad]) -> None:
    """Start the server, time it and its first requests, run the loads, stop it."""
    port = find_free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "bloomery", "serve", str(model), "--load-format", "dummy"]
    options = ["--port", str(port), "--cache-dir", str(cache), "--log-format", "human"]
    options += ["--log-level", "warning" if loads else "info"]  # a line per request costs time
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache / "triton")}
    start = time.monotonic()
    server = subprocess.Popen([*command, *options], env=environment, stderr=subprocess.PIPE)
    assert server.stderr is not None
    threading.Thread(target=print_log, args=(server.stderr, start), daemon=True).start()
    try:
        wait_until_ready(server, url)
        row: dict[str, Any] = {"shape": shape, "ready_s": round(time.monotonic() - start, 3)}
        for prompt_len in (3, LONG_PROMPT):
            first, *later = [time_request(url, shape, prompt_len, seed) for seed in range(6)]
            row[f"first_s_{prompt_len}"] = round(first, 4)
            row[f"later_s_{prompt_len}"] = round(min(later), 4)
        print(json.dumps(row), flush=True)
        if not loads:
            return
        with ProcessPoolExecutor(NUM_PROCESSES, get_context("spawn")) as pool:
            for load in loads:
                print(json.dumps({"shape": shape, **run_load(port, shape, load, pool)}), flush=True)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


if __name__ == "__main__":
    main()
