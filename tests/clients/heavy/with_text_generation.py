"""text-generation 0.7.0, TGI's own client: sync and async, streamed, details, chat, errors.

Its chat(stream=True) fails with any server that sends [DONE], because it reads that as JSON.
"""

import asyncio
import sys

from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError

URL = sys.argv[1]
PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "What is iron made from?"}]

client = Client(URL, timeout=60)
answer = client.generate(
    PROMPT,
    max_new_tokens=4,
    do_sample=True,
    temperature=0.5,
    top_k=10,
    top_p=0.9,
    typical_p=0.95,
    seed=1,
    decoder_input_details=True,
    top_n_tokens=2,
    repetition_penalty=1.1,
    watermark=True,
    stop_sequences=["zzz"],
)
assert answer.details.generated_tokens == 4 and answer.details.seed == 1, answer
assert answer.details.prefill[0].logprob is None and len(answer.details.top_tokens[0]) == 2
full = client.generate(PROMPT, max_new_tokens=6).generated_text
assert full.startswith(" Paris"), full
events = list(client.generate_stream(PROMPT, max_new_tokens=6))
last = events[-1]
assert "".join(event.token.text for event in events) == full == last.generated_text
assert last.details.generated_tokens == 6
best = client.generate(PROMPT, max_new_tokens=2, best_of=2, do_sample=True)
assert len(best.details.best_of_sequences) == 1
chat = client.chat(
    messages=MESSAGES, max_tokens=6, temperature=0.5, logprobs=True, top_logprobs=1, seed=1
)
assert chat.choices[0].message.content and chat.usage["completion_tokens"] == 6, chat
try:
    client.generate("", max_new_tokens=2)
except ValidationError as error:
    assert "cannot be empty" in str(error)
else:
    raise AssertionError("an empty prompt was answered")


async def check_async_client() -> None:
    async_client = AsyncClient(URL, timeout=60)
    generated, chat = await asyncio.gather(
        async_client.generate(PROMPT, max_new_tokens=6),
        async_client.chat(messages=MESSAGES, max_tokens=4, temperature=0.5),
    )
    assert generated.generated_text == full and chat.choices[0].message.content
    tokens = [
        event.token.text async for event in async_client.generate_stream(PROMPT, max_new_tokens=6)
    ]
    assert "".join(tokens) == full


asyncio.run(check_async_client())
print("text-generation: all as expected")
