"""The embedded model on this machine beside llama.cpp, in one run: `bloomery serve` against its server, over HTTP.

    python benchmarks/laptop.py                     # every row
    python benchmarks/laptop.py --rows decode,start # some: decode, prefill, server, start
    python benchmarks/laptop.py agreement           # native kernels against the float32 reference: top-1 and KL

llama.cpp comes as a ready-made wheel (xllamacpp) into an environment of its own in the user's cache; it serves the
embedded file as it is (Q4_1), and the same weights rounded again to Q4_0 and Q8_0, for it is fastest with those. Rounds
of all servers alternate, so that what else the machine does hits all alike: the ratios are what counts.

Definitions. decode: 32 tokens in, 128 out, one stream, tokens between the first and the last chunk over the time
between them. prefill: tokens of a prompt over the time to its first token. server: a burst of N streaming chats of
about 128 tokens in and 64 out; sum of output tokens over the time from the first request to the last byte; first
token is the median over requests. start: from starting the process to the first byte of an answer to a chat, with
bytecode and kernels compiled by a start before, as everywhere but at the very first. memory: of all of a server's
processes after 16 chats ("16 chats"), and at the end ("all rows"); what they share is counted once (PSS). cpu: seconds
that the server's threads ran for the row, or until the first byte, which says more than the clock where the machine is
shared; with `--threads 1` nobody's waiting is in it.
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
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bloomery.artifacts.locate import locate

HOME = Path.home() / ".cache" / "bloomery" / "llama.cpp"
WHEEL = "xllamacpp==2026.10.11549"
TARGETS = {  # what to reach, what to aim at, and the share of llama.cpp's best that counts where one is named
    "decode": (120, 180, 0.8),
    "prefill 512": (560, 800, None),
    "prefill 2048": (440, 650, None),
    "server 1": (90, 120, None),
    "server 4": (125, 180, None),
    "server 16": (170, 260, 1.2),
    "server 32": (180, 300, 1.2),
    "first token at 1, s": (0.182, 0.12, None),
    "start, s": (4, 2, None),
    "memory after 16 chats, MB": (900, 600, None),
    "memory after all rows, MB": (900, 600, None),
}
FASTER = ("decode", "prefill", "server")  # rows where more is better
WORDS = "time year people way day man thing woman life child world school state family student group".split()
SERVE = """
import sys, time, xllamacpp as x
p = x.CommonParams()
p.model.path, p.hostnames, p.port, p.kv_unified = sys.argv[1], ["127.0.0.1"], int(sys.argv[2]), True
p.n_parallel, p.n_ctx, p.cpuparams.n_threads, p.cpuparams_batch.n_threads = 32, 32 * 256 + 4096, *[int(sys.argv[3])] * 2
server = x.Server(p)
while True:
    time.sleep(1)
"""


# ---- the servers ---------------------------------------------------------------------------------------------------


@dataclass
class Server:
    name: str
    command: list[str]
    port: int
    process: subprocess.Popen | None = None
    figures: dict[str, list[float]] = field(default_factory=dict)

    def start(self) -> float:
        """Seconds to the first byte of the first answer."""
        begun = time.perf_counter()
        silent = subprocess.DEVNULL
        self.process = subprocess.Popen(
            self.command, stdout=silent, stderr=silent, env=with_bytecode()
        )
        while time.perf_counter() - begun < 300 and self.process.poll() is None:
            try:
                return asyncio.run(chat(self.port, "Hello", 1)).first_byte - begun
            except (OSError, Unready):
                time.sleep(0.05)
        raise TimeoutError(
            f"{self.name} ended, or did not answer within 300 s; is port {self.port} taken?"
        )

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)

    def processes(self) -> Iterator[Path]:
        assert self.process is not None
        todo = [self.process.pid]
        while todo:
            here = Path(f"/proc/{todo.pop()}")
            yield here
            for task in (here / "task").iterdir():
                todo += map(int, (task / "children").read_text().split())

    def memory(self) -> float:
        """MB in its processes; a page that several of them share counts once."""
        told = (here.joinpath("smaps_rollup").read_text() for here in self.processes())
        return sum(int(status.split("\nPss:")[1].split()[0]) for status in told) / 1000

    def spent(self) -> float:
        """Seconds its threads have been running."""
        tasks = (task for here in self.processes() for task in (here / "task").iterdir())
        return sum(int(task.joinpath("schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def note(self, row: str, value: float) -> None:
        print(f"{self.name}: {row} {value:.3f}", file=sys.stderr, flush=True)
        self.figures.setdefault(row, []).append(value)


def with_bytecode() -> dict[str, str]:
    """Compiled modules are kept, as they are for everybody who has started the program before."""
    rest = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**rest, "PYTHONPYCACHEPREFIX": str(HOME.parent / "bytecode")}


def opponents(threads: int, kinds: Sequence[str]) -> list[Server]:
    if not kinds:
        return []
    python = HOME / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
    if subprocess.run([python, "-c", "import xllamacpp"], capture_output=True).returncode:
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", WHEEL], check=True
        )
    path = locate(None).path
    files = {kind: path if kind == "Q4_1" else requantised(path, kind) for kind in kinds}
    return [
        Server(
            f"llama.cpp {kind}",
            [str(python), "-c", SERVE, str(file), str(8701 + i), str(threads)],
            8701 + i,
        )
        for i, (kind, file) in enumerate(files.items())
    ]


def requantised(path: Path, kind: str) -> Path:
    """The same model with its 4-bit products rounded again to another type."""
    import gguf

    target = HOME / f"{path.stem}.{kind}.gguf"
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


# ---- one request over a plain socket -------------------------------------------------------------------------------


class Unready(Exception):
    pass


@dataclass(frozen=True)
class Answer:
    sent: float
    first_byte: float  # of text
    last_byte: float
    tokens: int


async def ask(port: int, path: str, body: dict) -> Answer:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = json.dumps({"stream": True, "temperature": 0, **body}).encode()
    sent = time.perf_counter()
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\nConnection: close\r\n\r\n".encode()
        + raw
    )
    if b" 200 " not in await reader.readline():
        raise Unready
    first = last = chunks = tokens = 0.0
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if any(
            choice.get("text") or choice.get("delta", {}).get("content")
            for choice in event.get("choices") or ()
        ):
            last = time.perf_counter()
            chunks = chunks + 1
            first = first or last
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    writer.close()
    return Answer(sent, first or time.perf_counter(), last, int(tokens or chunks))


def chat(port: int, text: str, count: int):
    messages = [{"role": "user", "content": text}]
    options = {"max_tokens": count, "ignore_eos": True, "stream_options": {"include_usage": True}}
    return ask(port, "/v1/chat/completions", {"messages": messages, **options})


def complete(port: int, ids: list[int], count: int):
    return ask(
        port,
        "/v1/completions",
        {"prompt": ids, "max_tokens": count, "ignore_eos": True, "cache_prompt": False},
    )


# ---- rows ----------------------------------------------------------------------------------------------------------


def prompt(length: int, draw: random.Random) -> list[int]:
    return [draw.randrange(1000, 40000) for _ in range(length)]


def run(server: Server, row: str, requests: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    async def together() -> list[Answer]:
        return await asyncio.gather(*requests)

    before = server.spent()
    found = asyncio.run(together())
    server.note(f"cpu {row}", server.spent() - before)
    return found


def decode(server: Server, draw: random.Random) -> None:
    (found,) = run(server, "decode", [complete(server.port, prompt(32, draw), 128)])
    server.note("decode", 127 / (found.last_byte - found.first_byte))


def prefill(server: Server, draw: random.Random) -> None:
    for length in (512, 2048):
        (found,) = run(
            server, f"prefill {length}", [complete(server.port, prompt(length, draw), 1)]
        )
        server.note(f"prefill {length}", length / (found.first_byte - found.sent))


def burst(server: Server, draw: random.Random) -> None:
    for streams in (1, 4, 16, 32):
        texts = [" ".join(draw.choice(WORDS) for _ in range(100)) for _ in range(streams)]

        found = run(server, f"server {streams}", [chat(server.port, text, 64) for text in texts])
        spent = max(one.last_byte for one in found) - min(one.sent for one in found)
        server.note(f"server {streams}", sum(one.tokens for one in found) / spent)
        server.note(
            f"first token at {streams}, s",
            statistics.median(one.first_byte - one.sent for one in found),
        )
        if streams == 16:
            server.note("memory after 16 chats, MB", server.memory())


ROWS = {"decode": decode, "prefill": prefill, "server": burst}


def show(ours: Server, others: list[Server]) -> None:
    names = "".join(f"{server.name:>16}" for server in (ours, *others))
    print(f"\n{'':26}{names}{'of best':>9}{'reach':>16}{'aim':>7}")
    for row in sorted(ours.figures, key=lambda row: row.startswith("cpu")):
        middle = [statistics.median(server.figures[row]) for server in (ours, *others)]
        faster = row.startswith(FASTER)
        share = (
            middle[0] / (max(middle[1:]) if faster else min(middle[1:])) if others else float("nan")
        )
        digits = 1 if faster or max(middle) > 100 else 2
        print(
            f"{row:26}"
            + "".join(f"{x:16.{digits}f}" for x in middle)
            + f"{share:9.2f}"
            + wanted(row, middle[0], share)
        )
    print(
        f"\nmedians of {max(map(len, ours.figures.values()))} rounds; load of the machine {os.getloadavg()[0]:.1f}"
    )


def wanted(row: str, ours: float, share: float) -> str:
    """What a row is to reach and to aim at, and whether it does."""
    if row not in TARGETS:
        return ""
    reach, aim, least = TARGETS[row]
    met = [ours >= goal if row.startswith(FASTER) else ours <= goal for goal in (reach, aim)]
    said = f"{reach}" + (f" or {least} x" if least else "")
    verdict = (
        "aim met" if met[1] else "reached" if met[0] or (least and share >= least) else "short"
    )
    return f"{said:>16}{aim:>7}  {verdict}"


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
    ours = Server("bloomery", command, 8700)
    others = opponents(threads, kinds)
    try:
        for server in (ours, *others):
            if "start" in rows:
                server.start()  # compiles what is missing
            for _ in range(rounds if "start" in rows else 1):
                server.stop()
                spent = server.start()
                if "start" in rows:
                    server.note("start, s", spent)
                    server.note("cpu start", server.spent())
        draw = random.Random(7)
        for number in range(rounds + 1):
            for row in (row for row in rows if row in ROWS):
                for server in (ours, *others):
                    ROWS[row](server, draw)
            if number == 0:  # the first round warms up
                for server in (ours, *others):
                    server.figures = {
                        row: values for row, values in server.figures.items() if "start" in row
                    }
        for server in (ours, *others):
            server.note("memory after all rows, MB", server.memory())
    finally:
        for server in (ours, *others):
            server.stop()
    show(ours, others)


# ---- agreement -----------------------------------------------------------------------------------------------------


def overheard(lines: list, logits: object, *_: object) -> list:
    lines.append(logits.log_softmax(-1))
    return []


def agreement(texts: int) -> None:
    """Every position of some texts, teacher-forced: the blocks with rounded activations, and keys and values in float16
    (as served), in float32 and in 8 bits, against float32 throughout."""
    import torch

    from bloomery import LLM, SamplingParams

    golden = json.loads(
        (Path(__file__).parent.parent / "tests" / "golden" / "embedded.json").read_text()
    )[:texts]
    found = {}
    for kept, native in (
        ("auto", True),
        ("model", True),
        ("int8", True),
        ("float32 reference", False),
    ):
        kv = kept if native else "model"
        llm = LLM(
            None,
            native=native,
            kv_cache_dtype=kv,
            kv_cache_gib=0.3,
            max_model_len=2048,
            enable_prefix_caching=False,
        )
        worker = llm.loop.executor.worker
        lines: list[torch.Tensor] = []
        worker.sampler.prompt_logprobs = partial(overheard, lines)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        prompts = [{"prompt_token_ids": entry["prompt_ids"] + entry["ids"]} for entry in golden]
        llm.generate(prompts, params, use_tqdm=False)
        found[kept] = torch.cat(lines)
        llm.close()
    *_, theirs = found.values()
    print(f"{len(theirs)} positions of {len(golden)} texts, against the float32 reference")
    for kept, ours in list(found.items())[:-1]:
        divergence = (theirs.exp() * (theirs - ours)).sum(-1)
        same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
        print(
            f"keys and values {kept:6} top-1 agreement {same:.2%}; KL mean {divergence.mean():.5f}, "
            f"99th percentile {divergence.quantile(0.99):.5f}, largest {divergence.max():.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", nargs="?", choices=("compare", "agreement"), default="compare")
    parser.add_argument("--rows", default="decode,prefill,server,start")
    parser.add_argument(
        "--types", default="Q4_1,Q4_0,Q8_0", help="of llama.cpp's files; none: ours alone"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=int, default=20)
    args = parser.parse_args()
    if args.work == "agreement":
        agreement(args.texts)
    else:
        compare(
            args.rows.split(","),
            args.rounds,
            args.threads,
            [kind for kind in args.types.split(",") if kind != "none"],
        )


if __name__ == "__main__":
    main()
