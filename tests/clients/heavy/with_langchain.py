"""langchain-openai: chat, streams, batches, tools, schemas, completions, embeddings."""

import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]
common = {"base_url": f"{URL}/v1", "api_key": "x", "model": MODEL}

chat = ChatOpenAI(**common, temperature=0, max_tokens=8)
answer = chat.invoke("What is iron made from?")
assert answer.content and answer.usage_metadata["output_tokens"] == 8, answer
assert "".join(chunk.content for chunk in chat.stream("What is iron made from?")) == answer.content
assert len(chat.batch(["One?", "Two?", "Three?"])) == 3


class LangchainFurnace(BaseModel):
    """A furnace."""

    kind: Literal["bloomery", "cupola"]
    hot: bool


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return city


# No reasoning: a small model would not end it.
caller = ChatOpenAI(**common, temperature=0, max_tokens=80, extra_body={"thinking_budget": 0})
for method in ("json_schema", "function_calling"):
    structured = caller.with_structured_output(LangchainFurnace, method=method)
    assert isinstance(structured.invoke("Describe a furnace."), LangchainFurnace), method
bound = caller.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False)
(call,) = bound.invoke("How warm is it in Paris?").tool_calls
assert call["name"] == "get_weather" and call["args"]["city"] in ("Paris", "Rome"), call
first, *others = bound.stream("How warm is it in Paris?")
for chunk in others:
    first += chunk
assert first.tool_calls[0]["args"] == call["args"], first
text = OpenAI(**common, temperature=0, max_tokens=4)
assert "Paris" in text.invoke("The capital of France is")
assert len(text.generate(["One", "Two"]).generations) == 2
embeddings = OpenAIEmbeddings(**common, check_embedding_ctx_length=False)
first, second = embeddings.embed_documents(["a cat", "a dog"])
assert len(first) == len(second) == len(embeddings.embed_query("a cow"))
print("langchain-openai: all as expected")
