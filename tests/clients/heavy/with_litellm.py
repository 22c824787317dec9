"""litellm with each provider that a user would name for this server."""

import json
import sys

import litellm

URL, MODEL = sys.argv[1:3]
MESSAGES = [{"role": "user", "content": "What is iron made from?"}]
litellm.drop_params = True

for provider, base in (("openai", f"{URL}/v1"), ("hosted_vllm", f"{URL}/v1"), ("anthropic", URL)):
    options = {
        "model": f"{provider}/{MODEL}",
        "api_base": base,
        "api_key": "x",
        "messages": MESSAGES,
        "max_tokens": 8,
    }
    full = litellm.completion(**options, temperature=0)
    text = full.choices[0].message.content
    assert text and full.usage.completion_tokens == 8, (provider, full)
    chunks = litellm.completion(**options, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text, provider

CITIES = ["Paris", "Rome"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather of a city", "parameters": SCHEMA}
for provider in ("openai", "hosted_vllm"):
    options = {
        "model": f"{provider}/{MODEL}",
        "api_base": f"{URL}/v1",
        "api_key": "x",
        "messages": MESSAGES,
        "max_tokens": 80,
        "temperature": 0,
        "extra_body": {"thinking_budget": 0},
    }
    tools = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
    (call,) = litellm.completion(**options, **tools).choices[0].message.tool_calls[:1]
    assert json.loads(call.function.arguments)["city"] in CITIES, (provider, call)
    chunks = list(litellm.completion(**options, **tools, stream=True))
    built = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0]
    assert built.function.arguments == call.function.arguments, (provider, built)
    json_schema = {"name": "answer", "schema": SCHEMA, "strict": True}
    answer = litellm.completion(
        **options, response_format={"type": "json_schema", "json_schema": json_schema}
    )
    assert json.loads(answer.choices[0].message.content)["city"] in CITIES, (provider, answer)

completion = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}",
    api_base=f"{URL}/v1",
    api_key="x",
    prompt="The capital of France is",
    max_tokens=4,
    temperature=0,
)
assert "Paris" in completion.choices[0].text
vectors = litellm.embedding(
    model=f"openai/{MODEL}", api_base=f"{URL}/v1", api_key="x", input=["a", "b"]
)
assert len(vectors.data) == 2
try:
    litellm.completion(model="openai/unknown", api_base=f"{URL}/v1", api_key="x", messages=MESSAGES)
except litellm.NotFoundError:
    print("litellm: all as expected")
