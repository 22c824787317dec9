"""A model that calls a Python function and uses its result.

It needs a model whose chat template knows tools, such as Qwen2.5, Qwen3, Llama 3 or Mistral.
"""

from __future__ import annotations

import json
import os

from openai import BadRequestError, OpenAI

URL = os.environ.get("URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("API_KEY", "none"))

STOCK = {"nails": 1200, "hammers": 14, "anvils": 0}


def count_stock(product: str) -> str:
    return json.dumps({"product": product, "in_stock": STOCK.get(product, 0)})


TOOL = {
    "type": "function",
    "function": {
        "name": "count_stock",
        "description": "How many pieces of a product are in stock",
        "parameters": {
            "type": "object",
            "properties": {"product": {"type": "string", "enum": list(STOCK)}},
            "required": ["product"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}

messages = [{"role": "user", "content": "How many hammers do we have?"}]
try:
    # The first answer has to be a call. With "auto" the model decides.
    completion = client.chat.completions.create(
        model="default",
        messages=messages,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        temperature=0,
    )
except BadRequestError as error:
    raise SystemExit(f"This model has no tools: {error.body['message']}") from None
message = completion.choices[0].message
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls:
    print(f"the model calls {call.function.name}({call.function.arguments})")
    result = count_stock(**json.loads(call.function.arguments))
    print(f"it gets {result}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
completion = client.chat.completions.create(
    model="default", messages=messages, tools=[TOOL], max_tokens=80, temperature=0
)
print("it answers:", completion.choices[0].message.content)
