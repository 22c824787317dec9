"""Clients too heavy for `make test`, each in its own environment, against a real server.

    python -m tests.clients.run_heavy [GROUP...]      all groups, or those named
    --folder F     where environments are kept between runs; default: build/clients

Prints a line for each group. The exit status is the number of groups that failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from tests.e2e.test_serve import free_port
from tests.server.playback import TOOL_TEMPLATE_PATH

SCRIPTS = Path(__file__).parent / "heavy"
MODEL = "smollm2"
# group -> (packages to install, script to run)
GROUPS: dict[str, tuple[tuple[str, ...], str]] = {
    "text-generation": (("text-generation==0.7.0",), "with_text_generation.py"),
    "litellm": (("litellm==1.106.2", "mcp"), "with_litellm.py"),
    "langchain": (("langchain-openai>=1.7",), "with_langchain.py"),
    "langchain-anthropic": (("langchain-anthropic>=1",), "with_langchain_anthropic.py"),
    "ollama": (("ollama>=0.6",), "with_ollama.py"),
    "llm": (("llm>=0.36",), "with_llm.sh"),
    "lm-eval": (("lm-eval[api]==0.4.13",), "with_lm_eval.sh"),
    "ai": (("ai@7", "@ai-sdk/openai-compatible@3"), "with_ai.mjs"),
}


@contextmanager
def running_server(*more_names: str, template: Path | None = None) -> Iterator[str]:
    """A server with the embedded model as MODEL and `more_names`; `template`: of its chats."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable,
        "-m",
        "bloomery",
        "serve",
        "--port",
        str(port),
        "--served-model-name",
        ",".join((MODEL, *more_names)),
    ]
    if template is not None:
        command += ["--chat-template", str(template)]
    process = subprocess.Popen([*command, "--kv-cache-gib", "0.3"], stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while not is_ready(url):
            if time.monotonic() > end or process.poll() is not None:
                raise SystemExit("the server does not get ready")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/ready").status_code == 200
    except httpx2.HTTPError:
        return False


def prepare_command(folder: Path, packages: tuple[str, ...], script: str) -> list[str]:
    """The command that runs the script; its environment is created if it is missing."""
    if script.endswith(".mjs"):
        if not (folder / "node_modules").exists():
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run(
                ["npm", "install", "--silent", "--no-audit", "--no-fund", *packages],
                cwd=folder,
                check=True,
            )
        # Node looks for packages beside the script.
        (folder / script).write_text((SCRIPTS / script).read_text())
        return ["node", str(folder / script)]
    if not (folder / "bin").exists():
        venv.create(folder, with_pip=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", *packages], check=True)
    interpreter = str(folder / "bin" / "python") if script.endswith(".py") else "sh"
    return [interpreter, str(SCRIPTS / script)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--folder", type=Path, default=Path("build/clients"))
    arguments = parser.parse_args()
    num_failed = 0
    # The embedded model's own template has no tools.
    with running_server(template=TOOL_TEMPLATE_PATH) as url:
        for name in arguments.groups or GROUPS:
            num_failed += not run_group(name, url, arguments.folder)
    return num_failed


def run_group(name: str, url: str, environments: Path) -> bool:
    """Run one group's script, print its result, and say whether it succeeded."""
    folder = (environments / name).resolve()
    command = prepare_command(folder, *GROUPS[name])
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        [*command, url, MODEL], env=environ, capture_output=True, text=True, timeout=600
    )
    lines = result.stdout.strip().splitlines()
    if result.returncode == 0 and lines:
        print(lines[-1], flush=True)
    else:
        error_lines = result.stderr[-4000:].strip().splitlines() if result.returncode else []
        print("\n".join([f"{name}: FAILED", *lines, *error_lines]), flush=True)
    return result.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
