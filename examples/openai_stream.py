"""An answer as it is generated, with the time to first token (TTFT) and the speed after it."""

from __future__ import annotations

import os
import time

from openai import OpenAI

URL = os.environ.get("URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("API_KEY", "none"))

start = time.perf_counter()
first = 0.0
stream = client.chat.completions.create(
    model="default",
    messages=[{"role": "user", "content": "Tell me a story about a blacksmith."}],
    max_tokens=80,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        if choice.delta.content:
            first = first or time.perf_counter()
            print(choice.delta.content, end="", flush=True)
    if chunk.usage:
        num_tokens = chunk.usage.completion_tokens
seconds = time.perf_counter() - first
print(f"\n\nTTFT {1000 * (first - start):.0f} ms, {(num_tokens - 1) / seconds:.0f} tokens/s")
