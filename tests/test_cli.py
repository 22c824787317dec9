"""The commands as people run them, with the embedded model. All but errors are real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bloomery.cli import main
from tests.chaos.http import free_port

GOLDEN = json.loads(
    (Path(__file__).parent / "golden" / "embedded.json").read_text(encoding="utf-8")
)
SMALL_ENGINE = ["--threads", "1", "--kv-cache-gib", "0.1", "--max-model-len", "1024", "-t", "0"]


def run_command(
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
        "import sys\nfrom bloomery.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout and "chat" in done.stdout


def test_generate_from_a_flag_and_from_standard_input() -> None:
    prompt = GOLDEN[0]["prompt"]
    from_flag = run_command("generate", *SMALL_ENGINE, "-n", "8", "-p", prompt)
    from_pipe = run_command(
        "generate", *SMALL_ENGINE, "-n", "8", stdin=prompt, BLOOMERY_MAX_NUM_SEQS="2"
    )
    assert from_flag.returncode == 0, from_flag.stderr
    assert from_flag.stdout.startswith(" Paris")
    assert from_pipe.stdout == from_flag.stdout
    assert "weights" in from_flag.stderr  # progress does not mix with the answer


def test_chat_keeps_the_conversation_and_has_commands() -> None:
    done = run_command(
        "chat",
        *SMALL_ENGINE,
        "--no-cpu-kernels",
        "-n",
        "24",
        stdin="What is the capital of France?\n/help\nAnd of Italy?\n/reset\n",
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout and "Rome" in done.stdout
    assert "/system TEXT" in done.stdout and "A new conversation." in done.stdout


def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    command = [sys.executable, "-m", "bloomery", "chat", *SMALL_ENGINE]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()  # the greeting, printed when the model is loaded
        process.stdin.write("Write a very long story about a blacksmith.\n")
        process.stdin.flush()
        assert process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        process.stdin.write("What is the capital of France?\n")
        process.stdin.close()
        rest = process.stdout.read()
        assert process.wait(120) == 0
    assert rest.strip(), "no second answer"


@pytest.mark.parametrize("module", ["argparse", "bloomery.config", "starlette.types"])
def test_ctrl_c_during_imports_ends_silently(module: str) -> None:
    """Python lists every module that has been imported; then comes the interrupt."""
    serve = ["-m", "bloomery", "serve", "--port", str(free_port())]
    command = [sys.executable, "-X", "importtime", *serve]
    lines = []
    # A shell that runs the tests in the background lets its children ignore interrupts.
    with subprocess.Popen(
        command,
        text=True,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.rpartition("|")[2].strip() == module:
                process.send_signal(signal.SIGINT)
                break
        lines = [line for line in process.stderr if not line.startswith("import time:")]
        assert process.wait(60) == -signal.SIGINT
    assert lines == []


def test_an_error_is_one_line_and_an_exit_status() -> None:
    done = run_command("generate", "no/such/folder/here", "-p", "x")
    assert done.returncode == 1
    assert "no such folder or file" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/folder/here", "-p", "x"], "no such folder or file"),
        (["--dtype", "int3", "-p", "x"], "dtype 'int3' is not one of"),
        (["--max-model-len", "99999", "-p", "x"], "ask for at most 8192"),
        ([*SMALL_ENGINE, "--top-p", "7", "-p", "x"], "top_p must be above 0 and at most 1"),
        ([*SMALL_ENGINE, "-p", ""], "the prompt has no tokens"),
    ],
    ids=["no model", "dtype", "max model len", "top p", "empty prompt"],
)
def test_errors_say_what_to_do(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported torch: an exception that is not caught fails the test."""
    assert main(["generate", *arguments]) == 1
    errors = capsys.readouterr().err
    assert "bloomery: " in errors
    assert message in errors
    assert "Traceback" not in errors


def test_warm_fills_the_cache_directory_without_weights(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }
    (model / "config.json").write_text(json.dumps(config))
    cache = tmp_path / "cache"
    result = run_command("warm", str(model), "--load-format", "dummy", "--cache-dir", str(cache))
    assert result.returncode == 0, result.stderr
    assert str(cache) in result.stdout
    assert any(cache.iterdir())
