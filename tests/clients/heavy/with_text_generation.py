"""text-generation 0.7.0, TGI's own client: sync and async, whole, streamed, with details, conversations, errors.

Its chat(stream=True) works with no server that sends [DONE]: it reads that as JSON.
"""

import asyncio
import sys

from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError

URL = sys.argv[1]
PROMPT = "The capital of France is"
ASKED = [{"role": "user", "content": "What is iron made from?"}]

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
whole = client.generate(PROMPT, max_new_tokens=6).generated_text
assert whole.startswith(" Paris"), whole
*_, last = events = list(client.generate_stream(PROMPT, max_new_tokens=6))
assert "".join(event.token.text for event in events) == whole == last.generated_text
assert last.details.generated_tokens == 6
assert (
    len(
        client.generate(
            PROMPT, max_new_tokens=2, best_of=2, do_sample=True
        ).details.best_of_sequences
    )
    == 1
)
chat = client.chat(
    messages=ASKED, max_tokens=6, temperature=0.5, logprobs=True, top_logprobs=1, seed=1
)
assert chat.choices[0].message.content and chat.usage["completion_tokens"] == 6, chat
try:
    client.generate("", max_new_tokens=2)
except ValidationError as error:
    assert "cannot be empty" in str(error)
else:
    raise AssertionError("an empty prompt was answered")


async def concurrently() -> None:
    other = AsyncClient(URL, timeout=60)
    one, two = await asyncio.gather(
        other.generate(PROMPT, max_new_tokens=6),
        other.chat(messages=ASKED, max_tokens=4, temperature=0.5),
    )
    assert one.generated_text == whole and two.choices[0].message.content
    said = [event.token.text async for event in other.generate_stream(PROMPT, max_new_tokens=6)]
    assert "".join(said) == whole


asyncio.run(concurrently())
print("text-generation: all as expected")
