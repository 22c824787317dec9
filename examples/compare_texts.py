"""Which text does the model find likelier? The log-probabilities of a prompt say so.

With `echo` and `max_tokens=0` nothing is generated: the prompt is scored.
"""

from __future__ import annotations

import math
import os

from openai import OpenAI

URL = os.environ.get("URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("API_KEY", "none"))

TEXTS = [
    "The capital of France is Paris.",
    "The capital of France is Madrid.",
    "The capital of France is banana.",
]
completion = client.completions.create(
    model="default", prompt=TEXTS, max_tokens=0, echo=True, logprobs=0
)
scores = {}
for text, choice in zip(TEXTS, completion.choices):
    logprobs = [value for value in choice.logprobs.token_logprobs if value is not None]
    scores[text] = math.exp(-sum(logprobs) / len(logprobs))
for text, perplexity in sorted(scores.items(), key=lambda item: item[1]):
    print(f"perplexity {perplexity:8.1f}  {text}")
