"""The web page in a real browser, against a real server with a slow scripted engine."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from bloomery.server.service import ServerSettings
from tests.server.conftest import start_server
from tests.server.playing_engine import start_playing_server
from tests.server.scripted_engine import InProcessEngine, load_test_tokenizer

NUM_CHECKS = 31
WEB_FOLDER = Path(__file__).parent.parent.parent / "web"


def answer_with_tools(prompt: str) -> str:
    """Think, call a tool, and answer when its result is there; or write JSON."""
    if "JSON, please." in prompt:
        return '<think>\nJSON then.\n</think>\n\n{"city": "Paris"}'
    if "<tool_response>" in prompt:
        return "<think>\nThe tool answered.\n</think>\n\nIt is sunny in Paris."
    call = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
    return f"<think>\nI should look.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


@pytest.mark.browser
@pytest.mark.timeout(900)
def test_the_page_passes_its_browser_script() -> None:
    node = shutil.which("node")
    chromium = shutil.which("chromium")
    packages = [WEB_FOLDER / "node_modules" / name for name in ("playwright-core", "axe-core")]
    has_packages = all(package.is_dir() for package in packages)
    if not node or not chromium or not has_packages:
        pytest.skip(
            "needs node, chromium and web/node_modules; `make test` installs them where it can"
        )
    tokenizer = load_test_tokenizer()
    with ExitStack() as cleanup:
        engine = InProcessEngine(tokenizer, step_seconds=0.05)
        server = start_server(engine, tokenizer, ServerSettings(model="speaker"), cleanup)
        url = f"http://127.0.0.1:{server.address[1]}"
        tool_server = start_playing_server(answer_with_tools, cleanup, step_seconds=0.01)
        tool_url = f"http://127.0.0.1:{tool_server.address[1]}"
        command = [node, "tests/page.mjs", url]
        environment = {**os.environ, "TOOL_SERVER": tool_url}
        done = subprocess.run(
            command,
            cwd=WEB_FOLDER,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("ok ") >= NUM_CHECKS
