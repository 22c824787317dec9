"""The programs of examples/, as a reader would run them, against a real server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.clients.conftest import KEY
from tests.server.playing_engine import start_playing_server

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
# What each program prints, as a regular expression.
EXPECTED_OUTPUT = {
    "openai_chat.py": r"> What is the capital of France\?\n.*Paris.*\n(.*\n)*"
    r"\d+ prompt tokens in the last turn, [1-9]\d* of them from the prefix cache\n",
    "openai_stream.py": r"(.*\n)+\nTTFT \d+ ms, \d+ tokens/s\n",
    "structured_output.py": r".{1,40}: \d+ minutes, (no|with) meat\n(- .*\n){2,4}",
    "anthropic_messages.py": r"(.*\n)+\n(end_turn|max_tokens): \d+ in, \d+ out\n",
    "tgi_client.py": r"The three primary colours are.*red(.*\n)+\(24 tokens, ended by length\)\n\n"
    r"The three primary colours are(.*\n)+",
    "ollama_chat.py": r"(.*\n)+\n.+: \d+ tokens, \d+ tokens/s\n",
    "raw_stream.py": r"request \S+\nIron is made from \w+(.*\n)+",
    "many_requests.py": r"one request: [\d.]+ s, \d+ tokens/s\n"
    r"16 at once: [\d.]+ s, \d+ tokens/s\n",
    "embeddings_search.py": r"How was iron smelted\?\n(\d\.\d{3}  .*\n){4}",
    "compare_texts.py": r"perplexity +[\d.]+  .*Paris\.\n(.*\n){1}perplexity +[\d.]+  .*banana\.\n",
}
NEED_OTHERS = {"tool_calls.py", "offline_batch.py"}  # a model with tools; no server
SLOW = ("openai_stream.py", "anthropic_messages.py", "many_requests.py", "embeddings_search.py")


def run_example(name: str, url: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "URL": url, "API_KEY": KEY}
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in EXPECTED_OUTPUT
    ],
)
def test_an_example(name: str, url: str) -> None:
    result = run_example(name, url)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(EXPECTED_OUTPUT[name], result.stdout), result.stdout


@pytest.mark.slow
def test_the_offline_example() -> None:
    result = run_example("offline_batch.py")
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    answers = {line["prompt"]: line["answer"] for line in lines}
    assert len(answers) == 3
    assert "Paris" in answers["The capital of France is"]


TOOL_CALL = (
    '<tool_call>\n{"name": "count_stock", "arguments": {"product": "hammers"}}\n</tool_call>'
)


def answer_stock(prompt: str) -> str:
    """What the model plays: a call, then an answer with what the tool returned."""
    _, _, result = prompt.partition("<tool_response>")
    return f"We have {re.findall(r'[0-9]+', result)[0]} hammers." if result else TOOL_CALL


def test_the_tool_example() -> None:
    """The whole loop, with a server whose model plays its part."""
    with ExitStack() as exit_stack:
        server = start_playing_server(answer_stock, exit_stack)
        result = run_example("tool_calls.py", f"http://127.0.0.1:{server.address[1]}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        'the model calls count_stock({"product": "hammers"})',
        'it gets {"product": "hammers", "in_stock": 14}',
        "it answers: We have 14 hammers.",
    ]


def test_a_model_without_tools_says_so(url: str) -> None:
    """The embedded model's chat template has no tools."""
    result = run_example("tool_calls.py", url)
    assert result.returncode == 1
    assert re.match("This model has no tools: .*template", result.stderr), result.stderr


def test_every_example_is_listed_and_tested() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == EXPECTED_OUTPUT.keys() | NEED_OTHERS
    listed = re.findall(r"^\| \[(\w+\.py)\]\(", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert names == set(listed)
