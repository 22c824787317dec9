"""Text to tokens and back: TGI's, vLLM's and llama.cpp's /tokenize, told apart by what is in the body."""

from __future__ import annotations

import asyncio

from msgspec import Raw
from starlette.types import ASGIApp

from bloomery.errors import InvalidRequest, PromptTooLong
from bloomery.server.call import Call, Route
from bloomery.server.errors import Refusal, openai, tgi
from bloomery.server.routes.chat import ChatBody, Message, prompt
from bloomery.server.routes.generate import Parameters
from bloomery.server.schema import Body
from bloomery.server.shapes import CHAT_PIECES, PIECES, TOKENS

TOGETHER = 4096  # tokens named in one go


class TokenizeBody(Body, kw_only=True):
    """TGI's inputs, vLLM's prompt or messages, or llama.cpp's content."""

    inputs: str | None = None
    parameters: Parameters | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    content: str | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body, kw_only=True):
    tokens: list[int]
    model: str | None = None


async def tokenize(call: Call) -> ASGIApp:
    """The tokens of a text."""
    raw = await call.object()
    call.admit(1)
    if raw.get("inputs") is not None:
        body = call.convert(raw, TokenizeBody)
        cut = body.parameters.truncate if body.parameters else None
        return call.json(Raw(await call.service.pieces(body.inputs or "", True, cut)))
    call.dialect = openai
    if raw.get("messages") is not None:
        chat = call.convert(raw, ChatBody)
        call.service.check_model(chat.model)
        return await counted(
            call, list((await prompt(call, chat)).ids), bool(raw.get("return_token_strs"))
        )
    body = call.convert(raw, TokenizeBody)
    call.service.check_model(body.model)
    if body.prompt is not None:
        ids = (await call.service.encode(body.prompt, body.add_special_tokens is not False)).ids
        return await counted(call, list(ids), bool(body.return_token_strs))
    if body.content is not None:
        ids = (await call.service.encode(body.content, bool(body.add_special), "content")).ids
        return call.json({"tokens": list(ids)})
    call.dialect = tgi
    raise InvalidRequest("one of inputs, prompt, messages or content is needed", "inputs")


async def counted(call: Call, ids: list[int], strings: bool) -> ASGIApp:
    names = list[str]()
    for first in range(0, len(ids) if strings else 0, TOGETHER):
        names += [call.service.tokenizer.token_name(id) for id in ids[first : first + TOGETHER]]
        await asyncio.sleep(0)  # others have their turn
    return call.json(
        {
            "count": len(ids),
            "max_model_len": call.service.capacity.max_length,
            "tokens": ids,
            "token_strs": names if strings else None,
        }
    )


async def chat_tokenize(call: Call) -> ASGIApp:
    """A conversation as the model reads it, and its tokens."""
    body = await call.read(ChatBody)
    call.admit(1)
    text = (await prompt(call, body)).text or ""
    found = await call.service.pieces(text, add_special=False)
    return call.json({"tokenize_response": Raw(found), "templated_text": text})


async def detokenize(call: Call) -> ASGIApp:
    """The text of tokens."""
    body = await call.read(DetokenizeBody)
    call.service.check_model(body.model)
    call.admit(1)
    if len(body.tokens) > (most := call.service.capacity.max_length):
        raise PromptTooLong(
            f"tokens may have at most {most} entries, as many as the context holds", "tokens"
        )
    size = call.service.tokenizer.vocab_size
    for index, id in enumerate(body.tokens):
        if not 0 <= id < size:
            raise InvalidRequest(
                f"tokens[{index}] must be a token id, from 0 to {size - 1}", "tokens"
            )
    return call.json({"prompt": await call.service.decode(body.tokens)})


async def tokenizer_info(call: Call) -> ASGIApp:
    """What a client needs to know of the tokenizer: its special tokens and chat template."""
    tokenizer = call.service.tokenizer
    templates = tokenizer.chat_templates
    if tokenizer.special_tokens.get("eos_token") is None:
        raise Refusal(404, "the model names no end-of-sequence token", "not_found")
    return call.json(
        {
            **dict.fromkeys(("bos_token", "pad_token", "unk_token")),
            **tokenizer.special_tokens,
            "chat_template": templates.get("default"),
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": call.service.capacity.max_length,
        }
    )


ROUTES = (
    Route(
        "/tokenize", tokenize, tgi, TokenizeBody, answer=(PIECES, TOKENS, {"tokens": ["integer"]})
    ),
    Route("/chat_tokenize", chat_tokenize, tgi, ChatBody, answer=CHAT_PIECES),
    Route("/detokenize", detokenize, openai, DetokenizeBody, answer={"prompt": "string"}),
    Route("/tokenizer_info", tokenizer_info, openai),
)
