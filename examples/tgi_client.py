"""text-generation-inference's own API with huggingface_hub's InferenceClient."""

from __future__ import annotations

import os

from huggingface_hub import InferenceClient

URL = os.environ.get("URL", "http://127.0.0.1:8000")
client = InferenceClient(URL, token=os.environ.get("API_KEY", "none"))

prompt = "The three primary colours are"
output = client.text_generation(prompt, max_new_tokens=24, details=True)
print(prompt + output.generated_text)
print(f"({output.details.generated_tokens} tokens, ended by {output.details.finish_reason})\n")

print(prompt, end="")
for token in client.text_generation(
    prompt, max_new_tokens=24, seed=7, temperature=0.8, stream=True
):
    print(token, end="", flush=True)
print()
