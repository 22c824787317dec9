"""langchain-openai: chat, streams, batches, completions, embeddings."""

import sys

from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

URL, MODEL = sys.argv[1:3]
common = {"base_url": f"{URL}/v1", "api_key": "x", "model": MODEL}

chat = ChatOpenAI(**common, temperature=0, max_tokens=8)
answer = chat.invoke("What is iron made from?")
assert answer.content and answer.usage_metadata["output_tokens"] == 8, answer
assert "".join(chunk.content for chunk in chat.stream("What is iron made from?")) == answer.content
assert len(chat.batch(["One?", "Two?", "Three?"])) == 3
text = OpenAI(**common, temperature=0, max_tokens=4)
assert "Paris" in text.invoke("The capital of France is")
assert len(text.generate(["One", "Two"]).generations) == 2
embeddings = OpenAIEmbeddings(**common, check_embedding_ctx_length=False)
first, second = embeddings.embed_documents(["a cat", "a dog"])
assert len(first) == len(second) == len(embeddings.embed_query("a cow"))
print("langchain-openai: all as expected")
