"""Search by meaning: the texts whose vectors are nearest to that of the question.

Any chat model gives vectors. One trained for embeddings gives better ones.
"""

from __future__ import annotations

import os

from openai import OpenAI

URL = os.environ.get("URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("API_KEY", "none"))

TEXTS = [
    "Charcoal and ore are heated in the furnace until iron forms.",
    "The violin was built in Cremona in the eighteenth century.",
    "A bloomery smelts iron without melting it.",
    "Bees find their way home by the position of the sun.",
]
QUESTION = "How was iron smelted?"


def embed(texts: list[str]) -> list[list[float]]:
    response = client.embeddings.create(model="default", input=texts)
    return [entry.embedding for entry in response.data]


question, *vectors = embed([QUESTION, *TEXTS])
# The vectors have length 1, so their products are cosines.
similarities = [sum(a * b for a, b in zip(question, vector)) for vector in vectors]
print(QUESTION)
for similarity, text in sorted(zip(similarities, TEXTS), reverse=True):
    print(f"{similarity:.3f}  {text}")
