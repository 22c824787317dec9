"""Chats with a model that has recurrent layers, through `bloomery serve` in a real process.

Every turn resumes where the turn before it ended, and gives what it gives without a prefix cache.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import transformers as tf
from tokenizers import Tokenizer

from tests.chaos.http import free_port
from tests.e2e.test_serve import is_ready
from tests.parity.cases import DELTA_NET, make_checkpoint, parity_case
from tests.waiting import wait_until

TOKENIZER = Path(__file__).parent.parent / "server" / "tokenizer.json"
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
SYSTEM = "You are a careful assistant who answers in one short sentence and asks nothing back."
QUESTIONS = (
    "What is the capital of France, and why?",
    "How many people live there today?",
    "Which river flows through it, and where does it end?",
)
PAGE = 16
NUM_CHATS = 3
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    """A server with a tiny hybrid model of random weights."""
    folder = tmp_path_factory.mktemp("model")
    sizes = DELTA_NET | {"vocab_size": 406, "max_position_embeddings": 1024}
    make_checkpoint(parity_case("chats", tf.Qwen3_5TextConfig, **sizes), folder)
    shutil.copy(TOKENIZER, folder / "tokenizer.json")
    settings = {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    port = free_port()
    options = ("--threads", "1", "--kv-cache-gib", "0.05", "--block-size", str(PAGE))
    command = [sys.executable, "-m", "bloomery", "serve", str(folder), "--port", str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, *options, "--dtype", "float32"], stderr=log)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            is_up = wait_until(lambda: process.poll() is not None or is_ready(client), 240)
            assert is_up and process.poll() is None, (folder / "log").read_text()
            yield client
    finally:
        process.kill()
        process.wait(30)


def ask(client: httpx2.Client, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    response = client.post("/v1/chat/completions", json=body | more)
    assert response.status_code == 200, response.text
    return response.json()


def cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_turns_of_chats_resume_and_give_the_same_text(client: httpx2.Client) -> None:
    chats: list[list[dict[str, str]]] = [
        [{"role": "system", "content": SYSTEM}] for _ in range(NUM_CHATS)
    ]
    ends = [0] * NUM_CHATS  # of the last prompt, in tokens
    for turn, question in enumerate(QUESTIONS):
        for chat, messages in enumerate(chats):
            messages.append({"role": "user", "content": f"{question} ({chat})"})
            answer = ask(client, messages)
            # All positions are computed for the log-probabilities of a prompt.
            uncached = ask(client, messages, prompt_logprobs=0)
            assert cached_tokens(uncached) == 0
            text = answer["choices"][0]["message"]["content"]
            assert text == uncached["choices"][0]["message"]["content"]
            if turn:
                assert cached_tokens(answer) >= (ends[chat] - 1) // PAGE * PAGE > 0
            ends[chat] = answer["usage"]["prompt_tokens"]
            messages.append({"role": "assistant", "content": text})
    # A new chat resumes at the last page end of the system message, the first one too.
    system_tokens = Tokenizer.from_file(str(TOKENIZER)).encode(f"[system] {SYSTEM}\n").ids
    for question in ("Something else.", "And now this."):
        answer = ask(client, [*chats[0][:1], {"role": "user", "content": question}])
        assert cached_tokens(answer) == len(system_tokens) // PAGE * PAGE > 0


def test_token_ids_resume_at_the_very_end_of_an_answer(client: httpx2.Client) -> None:
    body = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    prompt = list(range(100, 170))

    def complete(prompt: list[int], **more: Any) -> tuple[list[int], int]:
        request = body | {"prompt": prompt, "return_token_ids": True} | more
        answer = client.post("/v1/completions", json=request).json()
        return answer["choices"][0]["token_ids"], cached_tokens(answer)

    tokens, cached = complete(prompt)
    assert cached == 0
    longer = [*prompt, *tokens, *range(200, 210)]
    expected, cached = complete(longer, prompt_logprobs=0)
    assert cached == 0
    assert complete(longer) == (expected, len(prompt) + len(tokens) - 1)
