"""langchain-anthropic: chat, streams, tools, schemas and token counts."""

import sys
from typing import Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]
common = {"base_url": URL, "api_key": "x", "model": MODEL, "temperature": 0}
chat = ChatAnthropic(**common, max_tokens=8)
question = HumanMessage("What is iron made from?")
answer = chat.invoke([question])
assert answer.text and answer.usage_metadata["output_tokens"] == 8, answer
assert "".join(chunk.text for chunk in chat.stream([question])) == answer.text
assert chat.get_num_tokens_from_messages([question]) == answer.usage_metadata["input_tokens"]


class AnthropicFurnace(BaseModel):
    """A furnace."""

    kind: Literal["bloomery", "cupola"]
    hot: bool


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return city


caller = ChatAnthropic(**common, max_tokens=80)
for method in ("json_schema", "function_calling"):
    structured = caller.with_structured_output(AnthropicFurnace, method=method)
    assert isinstance(structured.invoke("Describe a furnace."), AnthropicFurnace), method
bound = caller.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
asked = HumanMessage("How warm is it in Paris?")
called = bound.invoke([asked])
(call,) = called.tool_calls
assert call["name"] == "get_weather" and call["args"]["city"] in ("Paris", "Rome"), call
first, *others = bound.stream([asked])
for chunk in others:
    first += chunk
assert first.tool_calls[0]["args"] == call["args"], first
history = [asked, called, ToolMessage("20 degrees", tool_call_id=call["id"])]
final = caller.bind_tools([get_weather]).invoke(history)
assert final.text or final.tool_calls, final
print(f"langchain-anthropic {answer.text!r}: ok")
