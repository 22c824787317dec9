"""Anthropic's client: a system prompt, a streamed answer and its usage."""

from __future__ import annotations

import os

from anthropic import Anthropic

URL = os.environ.get("URL", "http://127.0.0.1:8000")
client = Anthropic(base_url=URL, api_key=os.environ.get("API_KEY", "none"))

with client.messages.stream(
    model="default",
    system="You are a helpful assistant who answers in one sentence.",
    messages=[{"role": "user", "content": "What does a blacksmith do?"}],
    max_tokens=60,
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
    message = stream.get_final_message()
usage = message.usage
print(f"\n\n{message.stop_reason}: {usage.input_tokens} in, {usage.output_tokens} out")
