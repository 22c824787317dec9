"""Request bodies that are wrong in some way, at random: for the routes of both APIs, of JSON and of what is none."""

from __future__ import annotations

import json
from random import Random
from typing import Any

GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "The iron", "max_tokens": 2},
    "/generate": {"inputs": "The iron", "parameters": {"max_new_tokens": 2}},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/tokenize": {"inputs": "The iron"},
}
NAMES = (
    "model",
    "prompt",
    "inputs",
    "messages",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "n",
    "stop",
    "seed",
    "stream",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "presence_penalty",
    "parameters",
    "tools",
    "response_format",
    "user",
    "echo",
    "best_of",
    "min_tokens",
    "metadata",
    "stream_options",
    "chat_template",
    "priority",
    "suffix",
)
NUMBERS = (-1, 0, 0.5, 1e9, -(2**63), 2**63, 2**64, 1e308, 10**40)
TEXTS = (
    "",
    "x",
    "\x00",
    "\u202e",
    "x" * 3000,
    "../../etc/passwd",
    "<|im_end|>",
    "{{ 7 * 7 }}",
    "(a+)+b",
    "\U0001f525",
)


def value(chance: Random, depth: int = 0) -> Any:
    kind = chance.randrange(8 if depth < 4 else 5)
    if kind == 0:
        return None
    if kind == 1:
        return chance.choice((True, False))
    if kind == 2:
        return chance.choice(NUMBERS)
    if kind <= 4:
        return chance.choice(TEXTS)
    if kind <= 6:
        return [value(chance, depth + 1) for _ in range(chance.randrange(5))]
    return {
        chance.choice((*NAMES, *TEXTS)): value(chance, depth + 1)
        for _ in range(chance.randrange(4))
    }


def body(chance: Random) -> tuple[str, bytes]:
    """A route and a body. Now and then a change leaves it right."""
    path = chance.choice(list(GOOD))
    made = json.loads(json.dumps(GOOD[path]))
    for _ in range(chance.randrange(1, 8)):
        place = made
        while chance.random() < 0.4 and (
            inner := [one for one in place.values() if isinstance(one, dict)]
        ):
            place = chance.choice(inner)
        name = chance.choice((*NAMES, *place))
        if chance.random() < 0.2:
            place.pop(name, None)
        else:
            place[name] = value(chance)
    data = json.dumps(made).encode()
    how = chance.random()
    if how < 0.1:
        return path, data[: chance.randrange(len(data))]
    if how < 0.2:
        at = chance.randrange(len(data))
        return path, data[:at] + bytes((chance.randrange(256),)) + data[at + 1 :]
    if how < 0.25:
        return path, chance.choice(
            (b"NaN", b"[" * 5000, b"\x80\x04\x95", b"1e999", b'"\\ud800"')
        ) + data[:5]
    return path, data
