"""Random invalid request bodies for the routes of all APIs.

Some bodies are JSON with wrong fields or values, others are not JSON.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

VALID_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "The iron", "max_tokens": 2},
    "/generate": {"inputs": "The iron", "parameters": {"max_new_tokens": 2}},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/tokenize": {"inputs": "The iron"},
}
FIELD_NAMES = (
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
NOT_JSON = (b"NaN", b"[" * 5000, b"\x80\x04\x95", b"1e999", b'"\\ud800"')
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


def random_value(random: Random, depth: int = 0) -> Any:
    """Return a random JSON value; at most four levels of lists and objects are nested."""
    num_kinds = 8 if depth < 4 else 5
    kind = random.randrange(num_kinds)
    if kind == 0:
        return None
    if kind == 1:
        return random.choice((True, False))
    if kind == 2:
        return random.choice(NUMBERS)
    if kind <= 4:
        return random.choice(TEXTS)
    if kind <= 6:
        return [random_value(random, depth + 1) for _ in range(random.randrange(5))]
    names = [random.choice((*FIELD_NAMES, *TEXTS)) for _ in range(random.randrange(4))]
    return {name: random_value(random, depth + 1) for name in names}


def random_invalid_body(random: Random) -> tuple[str, bytes]:
    """Return a route and a body for it. Sometimes the changes leave the body valid."""
    path = random.choice(list(VALID_BODIES))
    body = json.loads(json.dumps(VALID_BODIES[path]))
    for _ in range(random.randrange(1, 8)):
        change_field(body, random)
    data = json.dumps(body).encode()
    damage = random.random()
    if damage < 0.1:
        return path, data[: random.randrange(len(data))]
    if damage < 0.2:
        offset = random.randrange(len(data))
        random_byte = bytes((random.randrange(256),))
        return path, data[:offset] + random_byte + data[offset + 1 :]
    if damage < 0.25:
        return path, random.choice(NOT_JSON) + data[:5]
    return path, data


def change_field(body: dict[str, Any], random: Random) -> None:
    """Remove or set one field of the body or of an object within it."""
    target = body
    while random.random() < 0.4:
        nested = [value for value in target.values() if isinstance(value, dict)]
        if not nested:
            break
        target = random.choice(nested)
    name = random.choice((*FIELD_NAMES, *target))
    if random.random() < 0.2:
        target.pop(name, None)
    else:
        target[name] = random_value(random)
