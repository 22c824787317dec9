"""A conversation with OpenAI's client: the second question refers to the first."""

from __future__ import annotations

import os

from openai import OpenAI

URL = os.environ.get("URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("API_KEY", "none"))

messages = [{"role": "system", "content": "Answer in one short sentence."}]
for question in ("What is the capital of France?", "Which river flows through it?"):
    messages.append({"role": "user", "content": question})
    completion = client.chat.completions.create(
        model="default", messages=messages, max_tokens=60, temperature=0
    )
    answer = completion.choices[0].message.content
    messages.append({"role": "assistant", "content": answer})
    print(f"> {question}\n{answer}\n")
print(f"{completion.usage.prompt_tokens} prompt tokens in the last turn,", end=" ")
print(f"{completion.usage.prompt_tokens_details.cached_tokens} of them from the prefix cache")
