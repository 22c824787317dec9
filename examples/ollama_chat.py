"""Ollama's API: a line of JSON for each piece of the answer."""

from __future__ import annotations

import json
import os
from urllib.request import Request, urlopen

URL = os.environ.get("URL", "http://127.0.0.1:8000")
HEADERS = {
    "Content-Type": "application/json",
    "Authorization": f"Bearer {os.environ.get('API_KEY', 'none')}",
}


def call(path: str, body: dict | None = None):
    data = json.dumps(body).encode() if body else None
    return urlopen(Request(URL + path, data, HEADERS))


with call("/api/tags") as response:
    model = json.load(response)["models"][0]["name"]
body = {
    "model": model,
    "messages": [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}],
    "options": {"num_predict": 60, "temperature": 0},
}
with call("/api/chat", body) as response:
    for line in response:
        piece = json.loads(line)
        print(piece["message"]["content"], end="", flush=True)
speed = piece["eval_count"] / piece["eval_duration"] * 1e9
print(f"\n\n{model}: {piece['eval_count']} tokens, {speed:.0f} tokens/s")
