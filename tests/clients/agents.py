"""Claude Code and Codex, installed from npm and run against a server.

    python -m tests.clients.agents URL MODEL [claude|codex]      prints what the agents did

The agents get a folder with a file and are asked what the file says. They read it with their own
tools, so a run exercises tool calls, their results and the prefix cache. `test_agents.py` runs them
against a model that plays given answers; this command is for real models.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("@anthropic-ai/claude-code@2", "@openai/codex@0.166")
FILE_NAME = "notes.txt"
FILE_TEXT = "The furnace gave nine bars of iron."
QUESTION = f"Read the file {FILE_NAME} and tell me what it says."
TIMEOUT_SECONDS = 1800
# Settings that keep Claude Code from contacting anything but the server.
CLAUDE_ENVIRON = {
    "ANTHROPIC_API_KEY": "x",
    "API_TIMEOUT_MS": str(1000 * TIMEOUT_SECONDS),
    "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(1000 * TIMEOUT_SECONDS),
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
}


def install_agents(folder: Path) -> Path:
    """Install both agents once, and return the folder of their commands."""
    commands = folder / "node_modules" / ".bin"
    if not (commands / "codex").exists() or not (commands / "claude").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", *PACKAGES]
        subprocess.run(command, cwd=folder, check=True)
    return commands


def run_claude(
    commands: Path, url: str, model: str, options: Sequence[str] = (), question: str = QUESTION
) -> list[Any]:
    """Run Claude Code on the question and return its messages; the last one is the result."""
    command = [
        str(commands / "claude"),
        "--print",
        question,
        "--model",
        model,
        "--output-format",
        "stream-json",
        "--verbose",
        *options,
    ]
    return run_agent(command, {**CLAUDE_ENVIRON, "ANTHROPIC_BASE_URL": url})


def run_codex(
    commands: Path, url: str, model: str, options: Sequence[str] = (), question: str = QUESTION
) -> list[Any]:
    """Run Codex on the question and return its events."""
    provider = {
        "model_provider": "bloomery",
        "model_providers.bloomery.name": "bloomery",
        "model_providers.bloomery.base_url": f"{url}/v1",
        "model_providers.bloomery.wire_api": "responses",
    }
    settings = [f"{name}={json.dumps(value)}" for name, value in provider.items()]
    command = [str(commands / "codex"), "exec", "--json", "--skip-git-repo-check", "-m", model]
    for setting in settings:
        command += ["-c", setting]
    return run_agent([*command, *options, question], {})


def run_agent(command: Sequence[str], environ: Mapping[str, str]) -> list[Any]:
    """Run a command in a folder of its own with the file, and return its lines of JSON."""
    with tempfile.TemporaryDirectory() as home:
        project = Path(home) / "project"
        project.mkdir()
        (project / FILE_NAME).write_text(FILE_TEXT + "\n")
        result = subprocess.run(
            command,
            cwd=project,
            env={**os.environ, "HOME": home, **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{result.stdout}\n{result.stderr}"[-4000:])
    return [json.loads(line) for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", metavar="URL")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("agent", nargs="?", choices=("claude", "codex"))
    parser.add_argument("--folder", type=Path, default=Path("build/clients/agents"))
    arguments = parser.parse_args()
    if shutil.which("npm") is None:
        raise SystemExit("npm is missing: install Node.js first")
    commands = install_agents(arguments.folder.resolve())
    runners = {"claude": run_claude, "codex": run_codex}
    for name, run in runners.items():
        if arguments.agent not in (None, name):
            continue
        for message in run(commands, arguments.url, arguments.model):
            print(json.dumps(message, ensure_ascii=False), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
