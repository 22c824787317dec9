"""litellm by each of the providers a user would name for this server."""

import sys

import litellm

URL, MODEL = sys.argv[1:3]
ASKED = [{"role": "user", "content": "What is iron made from?"}]
litellm.drop_params = True

for provider, base in (("openai", f"{URL}/v1"), ("hosted_vllm", f"{URL}/v1"), ("anthropic", URL)):
    wishes = {
        "model": f"{provider}/{MODEL}",
        "api_base": base,
        "api_key": "x",
        "messages": ASKED,
        "max_tokens": 8,
    }
    whole = litellm.completion(**wishes, temperature=0)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens == 8, (provider, whole)
    chunks = litellm.completion(**wishes, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text, provider

done = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}",
    api_base=f"{URL}/v1",
    api_key="x",
    prompt="The capital of France is",
    max_tokens=4,
    temperature=0,
)
assert "Paris" in done.choices[0].text
vectors = litellm.embedding(
    model=f"openai/{MODEL}", api_base=f"{URL}/v1", api_key="x", input=["a", "b"]
)
assert len(vectors.data) == 2
try:
    litellm.completion(model="openai/nobody", api_base=f"{URL}/v1", api_key="x", messages=ASKED)
except litellm.NotFoundError:
    print("litellm: all as expected")
