"""The commands as a person runs them: real processes, the embedded model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

GOLDEN = json.loads(
    (Path(__file__).parent / "golden" / "embedded.json").read_text(encoding="utf-8")
)
SMALL = ["--threads", "1", "--kv-cache-gib", "0.1", "--max-model-len", "1024", "-t", "0"]


def run(
    *arguments: str, stdin: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bloomery", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | environment,
    )


def test_help_is_quick_and_imports_no_torch() -> None:
    code = (
        "import sys\nfrom bloomery.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout and "chat" in done.stdout


def test_generate_from_a_flag_and_from_standard_input() -> None:
    prompt = GOLDEN[0]["prompt"]
    by_flag = run("generate", *SMALL, "-n", "8", "-p", prompt)
    by_pipe = run("generate", *SMALL, "-n", "8", stdin=prompt, BLOOMERY_MAX_SEQUENCES="2")
    assert by_flag.returncode == 0, by_flag.stderr
    assert by_flag.stdout.startswith(" Paris")
    assert by_pipe.stdout == by_flag.stdout
    assert "weights" in by_flag.stderr  # progress goes where it does not mix with the answer


def test_chat_keeps_the_conversation_and_its_commands() -> None:
    done = run(
        "chat",
        *SMALL,
        "--no-native",
        "-n",
        "24",
        stdin="What is the capital of France?\n/help\nAnd of Italy?\n/reset\n",
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout and "Rome" in done.stdout
    assert "/system TEXT" in done.stdout and "A new conversation." in done.stdout


def test_control_c_stops_the_answer_and_not_the_chat() -> None:
    command = [sys.executable, "-m", "bloomery", "chat", *SMALL]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()  # the greeting: loaded
        process.stdin.write("Write a very long story about a blacksmith.\n")
        process.stdin.flush()
        assert process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        process.stdin.write("What is the capital of France?\n")
        process.stdin.close()
        rest = process.stdout.read()
        assert process.wait(120) == 0
    assert rest.strip(), "no second answer"


def test_errors_say_what_to_do() -> None:
    for arguments, words in (
        (["generate", "no/such/folder/here", "-p", "x"], "no such folder or file"),
        (["generate", "--dtype", "int3", "-p", "x"], "dtype 'int3' is not one of"),
        (["generate", "--max-model-len", "99999", "-p", "x"], "ask for at most 8192"),
        (["generate", *SMALL, "--top-p", "7", "-p", "x"], "top_p must be above 0 and at most 1"),
        (["generate", *SMALL, "-p", ""], "the prompt has no tokens"),
    ):
        done = run(*arguments)
        assert done.returncode == 1
        assert words in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
