"""Checks published encodings of real vocabularies, and real chat templates against transformers.

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36  # a source archive, 77 MB
    tar xzf llama_cpp_python-0.3.36.tar.gz
    python benchmarks/golden_text.py llama_cpp_python-0.3.36/vendor/llama.cpp/models

The folder holds vocabularies (ggml-vocab-NAME.gguf), texts (.inp), the token ids that the original
tokenizers give them without special tokens (.out), and chat templates (templates/*.jinja). The
program prints a table and exits with 1 on any difference.

`--extract FILE` also writes the cases with the part of each vocabulary that they use, small enough
for the tests: the tokens of the encodings, and those they are merged from. The same merges apply in
the same order, so the encodings are the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from bloomery.artifacts import gguf
from bloomery.errors import TemplateError
from bloomery.text.chat import accepts_content_parts, render_template
from bloomery.text.gguf_tokenizer import build_gguf_tokenizer
from bloomery.text.tokenizer import byte_alphabet

SEPARATOR = "\n__ggml_vocab_test__\n"
OUT_OF_SCOPE = ("bert", "t5")  # encoder models
SPECIAL_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}


# ---- vocabularies ------------------------------------------------------------------------------


def golden_cases(vocabulary: Path) -> list[tuple[str, list[int]]]:
    texts = Path(f"{vocabulary}.inp").read_bytes().decode().split(SEPARATOR)
    lines = Path(f"{vocabulary}.out").read_text().splitlines()
    return [(text, [int(id) for id in line.split()]) for text, line in zip(texts, lines)]


def find_published(path: Path, tokens: list[str]) -> Path | None:
    """The vocabulary with published encodings: this one, or another with the same tokens."""
    if Path(f"{path}.out").exists():
        return path
    for encodings in sorted(path.parent.glob("*.out")):
        candidate = Path(str(encodings).removesuffix(".out"))
        if gguf.read_gguf(candidate).metadata["tokenizer.ggml.tokens"] == tokens:
            return candidate
    return None


def check_vocabulary(path: Path) -> bool:
    name = path.stem.removeprefix("ggml-vocab-")
    metadata = gguf.read_gguf(path).metadata
    kind = metadata["tokenizer.ggml.model"]
    pre_tokenizer = metadata.get("tokenizer.ggml.pre", "-")
    source = find_published(path, metadata["tokenizer.ggml.tokens"])
    if kind in OUT_OF_SCOPE or source is None:
        reason = "no published encodings"
        if kind in OUT_OF_SCOPE:
            reason = f"kind {kind} is not supported"
        print(f"{name:16} {kind:8} {pre_tokenizer:16} {reason}")
        return True
    start = time.perf_counter()
    tokenizer = build_gguf_tokenizer(metadata)
    seconds = time.perf_counter() - start
    cases = golden_cases(source)
    wrong = [(text, ids) for text, ids in cases if tokenizer.encode(text, add_special=False) != ids]
    note = ""
    if source != path:
        note = f"   (encodings of {source.stem.removeprefix('ggml-vocab-')}, the same tokens)"
    count = f"{len(cases) - len(wrong):3} of {len(cases):3} exact"
    print(f"{name:16} {kind:8} {pre_tokenizer:16} {count}   built in {seconds:.2f} s{note}")
    for text, ids in wrong:
        actual = tokenizer.encode(text, add_special=False)
        print(f"    {text[:60]!r}: {ids[:12]} expected, {actual[:12]} encoded")
    return not wrong


def extract_cases(path: Path) -> dict[str, Any]:
    """The cases of a vocabulary, and the part of it that they use."""
    metadata = gguf.read_gguf(path).metadata
    tokenizer = build_gguf_tokenizer(metadata)
    cases = golden_cases(path)
    names = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    merges = [(merge[:at], merge[at + 1 :]) for merge, at in split_merges(metadata)]
    scores = metadata.get("tokenizer.ggml.scores") or [0.0] * len(names)
    known = set(names)
    ranks: dict[tuple[str, str], float] = {merge: rank for rank, merge in enumerate(merges)}

    def rank(left: str, right: str) -> float | None:
        if merges:
            return ranks.get((left, right))
        return -scores[tokenizer.token_to_id(left + right) or 0] if left + right in known else None

    characters = {"▁", *"".join(text for text, _ in cases)} | byte_alphabet().keys()
    used_ids = {id for _, ids in cases for id in ids} | {
        id for id, name in enumerate(names) if name in characters
    }
    used_ids |= {id for id, kind in enumerate(types) if kind in (2, 6) and "PAD" not in names[id]}
    used_merges = [pair for id in sorted(used_ids) for pair in find_merges(names[id], rank)]
    used_ids |= {
        tokenizer.token_to_id(part)
        for left, right in used_merges
        for part in (left, right, left + right)
    } - {None}
    order = sorted(used_ids)
    small = {
        key: metadata[key]
        for key in metadata
        if key.startswith("tokenizer.ggml.") and key in SCALARS
    }
    small["general.architecture"] = metadata["general.architecture"]
    small["tokenizer.ggml.tokens"] = [names[id] for id in order]
    small["tokenizer.ggml.token_type"] = [types[id] for id in order]
    if merges:
        merges_to_write = set(used_merges)
        small["tokenizer.ggml.merges"] = [
            " ".join(merge) for merge in merges if merge in merges_to_write
        ]
    else:
        small["tokenizer.ggml.scores"] = [scores[id] for id in order]
    new_ids = {id: position for position, id in enumerate(order)}
    return {
        "metadata": small,
        "cases": [[text, [new_ids[id] for id in ids]] for text, ids in cases],
    }


SCALARS = tuple(f"tokenizer.ggml.{key}" for key in ("model", "pre", "add_space_prefix"))


def split_merges(metadata: Any) -> list[tuple[str, int]]:
    return [(merge, merge.find(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]


def find_merges(name: str, rank: Any) -> list[tuple[str, str]]:
    """The merges that build a token from its characters, best rank first, as in BPE."""
    parts = list(name)
    used = []
    while True:
        candidates = [
            (value, at)
            for at, pair in enumerate(pairwise(parts))
            if (value := rank(*pair)) is not None
        ]
        if not candidates:
            return used
        _, at = min(candidates)
        used.append((parts[at], parts[at + 1]))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


# ---- chat templates ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TemplateCase:
    """One conversation to render with every chat template."""

    name: str
    messages: list[dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)


USER = {"role": "user", "content": 'What is 2 < 3 & "4"? Ünïcode 你好 😀\n  indented  '}
SYSTEM = {"role": "system", "content": "You are brief."}
ANSWER = {"role": "assistant", "content": "True."}
THOUGHT = {"role": "assistant", "reasoning_content": "Two is less.", "content": "True."}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "First. "}, {"type": "text", "text": "Second."}],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a <city>",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "its name, e.g. Zürich"}},
            "required": ["city"],
        },
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Zürich"}},
        }
    ],
}
RESULT = {
    "role": "tool",
    "tool_call_id": "call00001",
    "name": "weather",
    "content": '{"degrees": 21}',
}
DOCUMENT = {"title": "A title", "text": "A text."}

CASES = (
    TemplateCase("user", [USER]),
    TemplateCase("system", [SYSTEM, USER]),
    TemplateCase("turns", [SYSTEM, USER, ANSWER, USER]),
    TemplateCase("no prompt", [USER, ANSWER], {"add_generation_prompt": False}),
    TemplateCase(
        "continue", [USER, ANSWER], {"add_generation_prompt": False, "continue_final_message": True}
    ),
    TemplateCase("thought", [USER, THOUGHT, USER]),
    TemplateCase(
        "thinking off", [SYSTEM, USER], variables={"enable_thinking": False, "thinking": False}
    ),
    TemplateCase("tools", [USER], {"tools": [TOOL]}),
    TemplateCase("tool call", [SYSTEM, USER, CALL, RESULT], {"tools": [TOOL, TOOL]}),
    TemplateCase("documents", [USER], {"documents": [DOCUMENT, DOCUMENT]}),
    TemplateCase("parts", [PARTS, ANSWER, PARTS]),
    TemplateCase("wrong roles", [ANSWER, ANSWER, {"role": "unknown", "content": "x"}]),
)


def render_or_refuse(render: Any) -> tuple[str, str]:
    try:
        return "text", render()
    except Exception as error:  # where the reference raises anything, Bloomery must refuse
        if isinstance(error, TemplateError) or not isinstance(error, AssertionError):
            return "refused", str(error)
        raise


def compare_template(template: str, case: TemplateCase) -> tuple[str, str]:
    """("same" | "both refuse" | "not comparable" | "different", detail)"""
    if case.name == "parts" and not accepts_content_parts(template):
        return "not comparable", ""  # the reference prints the list, Bloomery joins the texts
    variables = {**SPECIAL_TOKENS, **case.variables}
    options = {"add_generation_prompt": True, **case.options}
    expected = render_or_refuse(
        lambda: render_jinja_template(
            [case.messages], chat_template=template, **options, **variables
        )[0][0]
    )
    actual = render_or_refuse(
        lambda: render_template(template, case.messages, variables=variables, **options)
    )
    if expected[0] == actual[0] == "refused":
        return "both refuse", ""
    if expected == actual:
        return "same", ""
    return "different", f"expected {expected}\n      actual {actual}"


def check_template(path: Path) -> bool:
    template = path.read_text(encoding="utf-8")
    results = {case.name: compare_template(template, case) for case in CASES}
    counts = Counter(kind for kind, _ in results.values())
    shown = ", ".join(
        f"{counts[kind]} {kind}" for kind in ("same", "both refuse", "not comparable", "different")
    )
    print(f"{path.name:60.60} {shown}")
    for name, (kind, detail) in results.items():
        if kind == "different":
            print(f"   {name}: {detail}")
    return counts["different"] == 0


def run_checks(folder: Path) -> Iterator[bool]:
    vocabularies = sorted(folder.rglob("ggml-vocab-*.gguf"))
    templates = sorted(folder.rglob("*.jinja"))
    if not vocabularies or not templates:
        sys.exit(
            f"{folder} has no ggml-vocab-*.gguf or no *.jinja files; how to get them:\n{__doc__}"
        )
    yield from map(check_vocabulary, vocabularies)
    yield from map(check_template, templates)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--extract",
        type=Path,
        metavar="FILE",
        help="write the cases and their part of the vocabularies as JSON",
    )
    args = parser.parse_args()
    results = list(run_checks(args.folder))
    print(f"{sum(results)} of {len(results)} without a difference")
    if args.extract:
        paths = [
            Path(str(out).removesuffix(".out"))
            for out in sorted(args.folder.rglob("ggml-vocab-*.out"))
        ]
        supported = [
            path
            for path in paths
            if gguf.read_gguf(path).metadata["tokenizer.ggml.model"] not in OUT_OF_SCOPE
        ]
        extracted = {
            path.stem.removeprefix("ggml-vocab-"): extract_cases(path) for path in supported
        }
        args.extract.write_text(
            json.dumps(extracted, ensure_ascii=False, separators=(",", ":")), encoding="utf-8"
        )
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
