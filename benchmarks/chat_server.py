"""How many tokens of chats a real server with a tiny hybrid model reuses, over HTTP.

`benchmarks/cache_groups.py --chats --http` prints the table. The trace is that of chat_trace.py,
sent to /v1/chat/completions of `bloomery serve` as fast as it answers, a few turns at a time. The
model has random weights, and a state as large as the keys and values of as many tokens as that of
Qwen3.6-35B-A3B. A pool has room for as many tokens as a pool of that model would have. Every turn
continues with what the server has answered. Reuse is read from /metrics.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.chat_trace import (
    MAX_LEN,
    PAGE_SIZE,
    SYSTEM_PROMPT_TOKENS,
    ChatTrace,
    ChatTurn,
    build_qwen_3_6_35b,
)
from benchmarks.http_load import find_free_port, wait_until_ready
from bloomery.families import describe_config
from bloomery.roofline import kv_bytes_per_token

VOCAB = 4096
NUM_CLIENTS = 4  # turns at a time; the simulated server has as many on average
# 128 bytes of keys and values for a token and a state of 51 blocks of 64 tokens; in Qwen3.6-35B-A3B
# these are 20,480 bytes and 51 blocks.
CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_LEN,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 60,
    "linear_value_head_dim": 46,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
    },
    "tie_word_embeddings": True,
}
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
HIT_TOKENS = "bloomery_prefix_hit_tokens_total"
PROMPT_TOKENS = "bloomery_prompt_tokens_total"
PREEMPTIONS = "bloomery_preemptions_total"


def write_tiny_model(folder: Path) -> None:
    """Write the config, and a tokenizer that has a word for every token id."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    (folder / "config.json").write_text(json.dumps(CONFIG))
    vocabulary = {f"w{token}": token for token in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def scale_pool(pool_bytes: float) -> float:
    """The bytes in which the tiny model caches as many tokens as Qwen3.6-35B-A3B in this pool."""
    tiny = kv_bytes_per_token(describe_config(CONFIG).model, 32)
    return pool_bytes * tiny / kv_bytes_per_token(build_qwen_3_6_35b(), 16)


def to_text(tokens: Sequence[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


class ChatClients:
    """Sends the turns of a trace and keeps what the server answers."""

    def __init__(self, url: str):
        self.url = url
        # The messages of each turn and its answer, divided at white space: a piece is a token.
        self.answers: dict[ChatTurn, Future[tuple[list[dict[str, str]], list[str]]]] = {}

    def send_all(self, trace: ChatTrace) -> None:
        """Send all turns in order; a turn waits for the one that it continues."""
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            for turn in trace.turns:
                self.answers[turn] = pool.submit(self.send, turn)
        for answer in self.answers.values():
            answer.result()

    def send(self, turn: ChatTurn) -> tuple[list[dict[str, str]], list[str]]:
        if turn.earlier is None:
            system = to_text(turn.prompt[:SYSTEM_PROMPT_TOKENS])
            messages = [{"role": "system", "content": system}]
        else:
            earlier_messages, earlier_answer = self.answers[turn.earlier].result()
            text = " ".join(earlier_answer[turn.earlier.num_removed :])
            messages = [*earlier_messages, {"role": "assistant", "content": text}]
        messages.append({"role": "user", "content": to_text(turn.message)})
        body = {"messages": messages, "max_tokens": len(turn.answer), "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            answer: dict[str, Any] = json.load(response)
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(turn.prompt), "the chat is not that of the trace"
        assert usage["completion_tokens"] == len(turn.answer)
        return messages, answer["choices"][0]["message"]["content"].split()


def read_counters(url: str) -> dict[str, float]:
    """Return the values of the metrics that have no label but the model's name."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        text = response.read().decode()
    return {name: float(value) for name, value in re.findall(r"^(\w+)\{\S*\} (\S+)$", text, re.M)}


def serve_over_http(trace: ChatTrace, pool_bytes: float) -> dict[str, float]:
    """Serve a trace with a pool of so many bytes; returns the counters at the end."""
    port = find_free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder)
        options = {
            "--port": port,
            "--load-format": "dummy",
            "--threads": 1,
            "--dtype": "float32",
            "--block-size": PAGE_SIZE,
            "--max-num-seqs": 64,
            "--max-num-batched-tokens": 2048,
            "--kv-cache-gib": f"{pool_bytes / 2**30:.6f}",
        }
        command = [sys.executable, "-m", "bloomery", "serve", str(folder)]
        command += [str(part) for option in options.items() for part in option]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(command, stderr=log)
        try:
            wait_until_ready(server, url)
            ChatClients(url).send_all(trace)
            return read_counters(url)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()


def report_http_reuse(
    num_seeds: int, pools: Sequence[float], num_chats: int, chats_per_prompt: int
) -> None:
    """Print the share of all prompt tokens that each pool reuses, beside the largest possible."""
    print(
        f"{num_chats} chats over HTTP, a tiny hybrid model: share of the prompt tokens reused. A\n"
        "cache of full attention without limits would reuse what is reusable.\n"
    )
    print(
        "| history | seed | turns | prompt tokens | reusable | pool as with | reused "
        "| of what is reusable | preemptions |"
    )
    print("|---" * 9 + "|")
    for removes_reasoning in (False, True):
        history = "reasoning removed" if removes_reasoning else "answers kept"
        for seed in range(1, num_seeds + 1):
            trace = ChatTrace(seed, num_chats, removes_reasoning, chats_per_prompt, VOCAB)
            num_tokens = sum(len(turn.prompt) for turn in trace.turns)
            for pool in pools:
                counters = serve_over_http(trace, scale_pool(pool))
                assert counters[PROMPT_TOKENS] == num_tokens
                reused = counters[HIT_TOKENS]
                print(
                    f"| {history} | {seed} | {len(trace.turns):,} | {num_tokens:,} "
                    f"| {trace.reusable / num_tokens:.1%} | {pool / 1e9:g} GB "
                    f"| {reused / num_tokens:.1%} | {reused / trace.reusable:.1%} "
                    f"| {counters[PREEMPTIONS]:.0f} |",
                    flush=True,
                )
