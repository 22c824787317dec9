"""Ollama's own client: chat, streams, tools, formats, generate, embeddings and models."""

import json
import sys
from typing import Literal

import ollama
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]
client = ollama.Client(host=URL)
question = [{"role": "user", "content": "What is iron made from?"}]
greedy = {"temperature": 0, "num_predict": 8}

answer = client.chat(model=MODEL, messages=question, options=greedy)
assert answer.message.content and answer.eval_count == 8 and answer.done_reason == "length", answer
parts = list(client.chat(model=MODEL, messages=question, options=greedy, stream=True))
assert "".join(part.message.content for part in parts) == answer.message.content
assert parts[-1].done and parts[-1].total_duration > 0
text = client.generate(model=MODEL, prompt="The capital of France is", raw=True, options=greedy)
assert "Paris" in text.response and len(text.context) > 8, text


class Furnace(BaseModel):
    kind: Literal["bloomery", "cupola"]
    hot: bool


options = {"temperature": 0, "num_predict": 80}
schema = Furnace.model_json_schema()
described = client.chat(model=MODEL, messages=question, format=schema, options=options, think=False)
Furnace.model_validate_json(described.message.content)


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"20 degrees in {city}"


asked = [{"role": "user", "content": "How warm is it in Paris?"}]
called = client.chat(model=MODEL, messages=asked, tools=[get_weather], options=options, think=False)
history = [
    *asked,
    {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}],
    },
    {"role": "tool", "tool_name": "get_weather", "content": get_weather("Paris")},
]
final = client.chat(
    model=MODEL, messages=history, tools=[get_weather], options=options, think=False
)
assert final.message.content or final.message.tool_calls, final

embedded = client.embed(model=MODEL, input=["iron", "slag"], dimensions=16)
assert [len(vector) for vector in embedded.embeddings] == [16, 16]
names = [model.model for model in client.list().models]
assert f"{MODEL}:latest" in names, names
shown = client.show(MODEL)
assert "completion" in shown.capabilities and "tools" in shown.capabilities, shown
assert client.ps().models[0].context_length > 0
try:
    client.chat(model="no-such-model", messages=question)
except ollama.ResponseError as error:
    assert error.status_code == 404, error
else:
    raise AssertionError("an unknown model was served")
print(f"ollama {json.dumps(answer.message.content)}: ok")
