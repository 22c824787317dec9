"""Claude Code and Codex: each reads a file with its own tool and then answers.

The model plays given answers, so that the whole loop runs in seconds: the agent's long prompt, a
tool call, its result, and the answer. Real models: see agents.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.clients.agents import FILE_NAME, FILE_TEXT, install_agents, run_claude, run_codex
from tests.server.conftest import HttpTestServer
from tests.server.playing_engine import start_playing_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is missing"),
]
THOUGHT = "<think>\nThe file says it.\n</think>\n\n"


def play_agent(prompt: str) -> str:
    """Read the file with the agent's own tool, then repeat what it says."""
    if "<tool_response>" in prompt:
        result = prompt.rsplit("<tool_response>", 1)[1]
        return f"It says: {FILE_TEXT}" if FILE_TEXT in result else "I could not read it."
    if '"name": "exec_command"' in prompt:
        call = {"name": "exec_command", "arguments": {"cmd": f"cat {FILE_NAME}"}}
    elif '"name": "Bash"' in prompt:
        arguments = {"command": f"cat {FILE_NAME}", "description": "Read the file"}
        call = {"name": "Bash", "arguments": arguments}
    else:
        return "Notes"  # the title of the conversation
    return f"{THOUGHT}I read the file.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.fixture(scope="module")
def commands() -> Path:
    root = Path(__file__).parent.parent.parent
    return install_agents(root / "build" / "clients" / "agents")


@pytest.fixture(scope="module")
def agent_server() -> Iterator[HttpTestServer]:
    with ExitStack() as exit_stack:
        # The test tokenizer has few tokens, so the agents' prompts have many.
        options = {"num_blocks": 40_000, "max_model_len": 150_000}
        yield start_playing_server(play_agent, exit_stack, **options)


def server_url(server: HttpTestServer) -> str:
    return f"http://127.0.0.1:{server.address[1]}"


def test_claude_code_reads_a_file(commands: Path, agent_server: HttpTestServer) -> None:
    url = server_url(agent_server)
    messages = run_claude(commands, url, "player", ["--allowedTools", "Bash"])
    result = messages[-1]
    assert result["subtype"] == "success" and result["num_turns"] == 2
    assert result["result"] == f"It says: {FILE_TEXT}"
    blocks = [
        block
        for message in messages
        if message["type"] == "assistant"
        for block in message["message"]["content"]
    ]
    types = [block["type"] for block in blocks]
    assert types == ["thinking", "text", "tool_use", "text"]
    prompts = agent_server.backend.executor.prompts
    assert not any("x-anthropic-billing-header" in prompt for prompt in prompts)
    usage = result["usage"]
    assert usage["cache_read_input_tokens"] > 0.45 * (
        usage["input_tokens"]
        + usage["cache_creation_input_tokens"]
        + usage["cache_read_input_tokens"]
    ), "the second prompt is read from the prefix cache"


def test_codex_reads_a_file(commands: Path, agent_server: HttpTestServer) -> None:
    events = run_codex(commands, server_url(agent_server), "player")
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    (command,) = [item for item in items if item["type"] == "command_execution"]
    assert command["exit_code"] == 0 and FILE_TEXT in command["aggregated_output"]
    texts = [item["text"] for item in items if item["type"] == "agent_message"]
    assert texts == ["I read the file.", f"It says: {FILE_TEXT}"]
    usage = events[-1]["usage"]
    assert usage["cached_input_tokens"] > 0.45 * usage["input_tokens"]
    assert usage["reasoning_output_tokens"] > 0
