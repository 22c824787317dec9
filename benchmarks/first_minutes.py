"""The first minutes of a new user: start the server, ask twenty everyday questions, read along.

    python benchmarks/first_minutes.py [--questions N] [--output docs/first-minutes.md]

The server is started as `make serve` starts it, on a port of its own, and every setting is the
default: the client sends a message and the bound on the answer that the web page and `bloomery run`
send, nothing else. No answer may repeat itself and none may exceed the bound. The transcript is
written as a page of the docs. The exit status is 1 if an answer is bad.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.tools.chat import MAX_ANSWER_TOKENS, find_loop

QUESTIONS = (
    "What is the capital of France?",
    "How do I boil an egg?",
    "Why is the sky blue?",
    "Give me three ideas for a birthday present for my mother.",
    "What is the difference between a virus and a bacterium?",
    "Write a short email asking my boss for a day off.",
    "Who wrote Romeo and Juliet?",
    "How does a bicycle stay upright?",
    "What should I cook with rice and tomatoes?",
    "Summarize the story of Cinderella in three sentences.",
    "Write a Python function that reverses a string.",
    "What is the largest planet?",
    "How can I sleep better?",
    "Explain what a database index is.",
    "What is photosynthesis?",
    "Give me a recipe for pancakes.",
    "How do airplanes fly?",
    "Give me tips for a job interview.",
    "Write a poem about autumn.",
    "Plan a weekend in Rome.",
)
START_SECONDS = 300
ANSWER_SECONDS = 600
POLL_SECONDS = 0.2
LOOP_CHECK_CHARACTERS = 64  # between two searches for a loop
COLUMNS = 97  # of a line of the transcript, without the mark of a quotation


@dataclass
class AskedQuestion:
    """A question, its answer and what is wrong with it."""

    question: str
    answer: str
    finish_reason: str
    num_tokens: int
    seconds: float

    @property
    def problems(self) -> list[str]:
        problems = []
        loop = find_shown_loop(self.answer)
        if loop is not None:
            start = " ".join(loop.split())[:40]
            problems.append(f"repeats `{start}`")
        if self.num_tokens > MAX_ANSWER_TOKENS:
            problems.append(f"{self.num_tokens} tokens, more than {MAX_ANSWER_TOKENS}")
        if not self.answer.strip():
            problems.append("is empty")
        return problems


def find_shown_loop(answer: str) -> str | None:
    """Return the part that a reader sees repeated, also if the answer ends with something else."""
    step = LOOP_CHECK_CHARACTERS
    for end in range(step, len(answer) + step, step):
        loop = find_loop(answer[:end])
        if loop is not None:
            return loop
    return None


def request_json(url: str, body: Any = None, timeout: float = ANSWER_SECONDS) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.load(response)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"the server has ended with status {process.returncode}")
        try:
            request_json(f"{url}/ready", timeout=5)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_SECONDS)
    raise SystemExit("the server did not become ready")


def ask(url: str, question: str) -> AskedQuestion:
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MAX_ANSWER_TOKENS,
    }
    start = time.monotonic()
    answer = request_json(f"{url}/v1/chat/completions", body)
    seconds = time.monotonic() - start
    choice = answer["choices"][0]
    num_tokens = answer["usage"]["completion_tokens"]
    text = choice["message"]["content"]
    return AskedQuestion(question, text, choice["finish_reason"], num_tokens, seconds)


def wrap_lines(text: str) -> Iterator[str]:
    """Yield the lines of an answer, wrapped unless they are code."""
    in_code = False
    for line in text.strip().splitlines():
        in_code ^= line.startswith("```")
        if not in_code:
            line = line.replace("](", "]\\(")  # not a link of this page
        if in_code or len(line) <= COLUMNS:
            yield line
        else:
            yield from textwrap.wrap(line, COLUMNS, break_long_words=False)


def format_transcript(asked: list[AskedQuestion], info: Any) -> str:
    """The page: what was done, then every question with its answer as a quotation."""
    defaults = info["sampling_defaults"]
    names = ("temperature", "top_p", "repetition_penalty", "frequency_penalty")
    sampling = ", ".join(f"{name} {defaults[name]:g}" for name in names)
    lines = [
        "# The first minutes",
        "",
        "This page is for newcomers: what to expect before a larger model is chosen. It is the",
        "transcript of a fresh server with the embedded model and default settings, written by",
        "`benchmarks/first_minutes.py`. The model has 135 million parameters. It answers in",
        "sentences, and many of them are wrong. The web page and `bloomery run` stop an answer",
        "that repeats itself; this transcript shows it whole.",
        "",
        f"- Model: {info['model_id']}",
        f"- Sampling: {sampling}",
        f"- Answers are bounded to {MAX_ANSWER_TOKENS} tokens, as in `bloomery run`",
        f"- {len(asked)} questions, {sum(entry.num_tokens for entry in asked)} tokens",
        "- Answers that repeat themselves, exceed the bound or are empty: "
        f"{sum(bool(entry.problems) for entry in asked)}",
    ]
    for entry in asked:
        details = f"{entry.num_tokens} tokens, ended by {entry.finish_reason}"
        quoted = [f"> {line}".rstrip() for line in wrap_lines(entry.answer)]
        problems = [f"**Problem:** the answer {problem}." for problem in entry.problems]
        if problems:
            problems.append("")
        lines += ["", f"## {entry.question}", "", *quoted, "", *problems, f"({details})"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), metavar="N")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--port", type=int, default=8765)
    arguments = parser.parse_args()
    url = f"http://127.0.0.1:{arguments.port}"
    command = [sys.executable, "-m", "bloomery", "serve", "--port", str(arguments.port)]
    start = time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until_ready(url, process)
            print(f"ready after {time.monotonic() - start:.1f} s")
            info = request_json(f"{url}/info")
            asked = []
            for question in QUESTIONS[: arguments.questions]:
                asked.append(ask(url, question))
                rate = asked[-1].num_tokens / asked[-1].seconds
                state = ", ".join(asked[-1].problems) or "ok"
                count = f"{asked[-1].num_tokens:5} tokens, {rate:3.0f} tokens/s"
                print(f"{count}  {question}  {state}", flush=True)
        finally:
            process.terminate()
    if arguments.output:
        arguments.output.write_text(format_transcript(asked, info))
    num_bad = sum(bool(entry.problems) for entry in asked)
    print(f"{len(asked)} answers, {num_bad} bad")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
