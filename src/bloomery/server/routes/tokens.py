"""Text to tokens and back: TGI's, vLLM's and llama.cpp's /tokenize, distinguished by the body."""

from __future__ import annotations

import asyncio

from msgspec import Raw
from starlette.types import ASGIApp

from bloomery.errors import InvalidRequest, PromptTooLong
from bloomery.server.errors import HttpError, format_openai_error, format_tgi_error
from bloomery.server.routes.chat import ChatBody, ChatMessage, tokenize_chat
from bloomery.server.routes.generate import TgiParameters
from bloomery.server.schema import RequestBody
from bloomery.server.service import HttpCall, Route
from bloomery.server.shapes import CHAT_TOKEN_OFFSETS, TOKEN_LIST, TOKEN_OFFSETS

NAMES_PER_BATCH = 4096  # tokens named before other requests get the event loop


class TokenizeBody(RequestBody, kw_only=True):
    """TGI's inputs, vLLM's prompt or messages, or llama.cpp's content."""

    inputs: str | None = None
    parameters: TgiParameters | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    content: str | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(RequestBody, kw_only=True):
    tokens: list[int]
    model: str | None = None


async def tokenize(call: HttpCall) -> ASGIApp:
    """The tokens of a text."""
    raw = await call.read_json()
    call.admit(1)
    service = call.service
    if raw.get("inputs") is not None:
        body = call.parse_body(raw, TokenizeBody)
        last = body.parameters.truncate if body.parameters else None
        return call.json_response(
            Raw(await service.tokenize_with_offsets(body.inputs or "", True, last))
        )
    call.error_formatter = format_openai_error
    if raw.get("messages") is not None:
        chat_body = call.parse_body(raw, ChatBody)
        await call.select_model(chat_body.model)
        prompt = await tokenize_chat(call, chat_body)
        return await _token_list(call, list(prompt.ids), bool(raw.get("return_token_strs")))
    body = call.parse_body(raw, TokenizeBody)
    await call.select_model(body.model)
    if body.prompt is not None:
        prompt = await service.tokenize(body.prompt, body.add_special_tokens is not False)
        return await _token_list(call, list(prompt.ids), bool(body.return_token_strs))
    if body.content is not None:
        prompt = await service.tokenize(body.content, bool(body.add_special), "content")
        return call.json_response({"tokens": list(prompt.ids)})
    call.error_formatter = format_tgi_error
    raise InvalidRequest("one of inputs, prompt, messages or content is needed", "inputs")


async def _token_list(call: HttpCall, ids: list[int], with_names: bool) -> ASGIApp:
    """vLLM's answer: token ids, and their names on request."""
    names: list[str] | None = None
    if with_names:
        names = []
        for start in range(0, len(ids), NAMES_PER_BATCH):
            batch = ids[start : start + NAMES_PER_BATCH]
            names += [call.service.tokenizer.token_name(token_id) for token_id in batch]
            await asyncio.sleep(0)
    return call.json_response(
        {
            "count": len(ids),
            "max_model_len": call.service.capacity.max_model_len,
            "tokens": ids,
            "token_strs": names,
        }
    )


async def chat_tokenize(call: HttpCall) -> ASGIApp:
    """A conversation as the model reads it, and its tokens."""
    body = await call.read_body(ChatBody)
    call.admit(1)
    prompt = await tokenize_chat(call, body)
    text = prompt.text or ""
    offsets = await call.service.tokenize_with_offsets(text, add_special=False)
    return call.json_response({"tokenize_response": Raw(offsets), "templated_text": text})


async def detokenize(call: HttpCall) -> ASGIApp:
    """The text of tokens."""
    body = await call.read_body(DetokenizeBody)
    await call.select_model(body.model)
    call.admit(1)
    max_tokens = call.service.capacity.max_model_len
    if len(body.tokens) > max_tokens:
        message = f"tokens may have at most {max_tokens} entries, as many as the context holds"
        raise PromptTooLong(message, "tokens")
    vocab_size = call.service.tokenizer.vocab_size
    for index, token_id in enumerate(body.tokens):
        if not 0 <= token_id < vocab_size:
            message = f"tokens[{index}] must be a token id, from 0 to {vocab_size - 1}"
            raise InvalidRequest(message, "tokens")
    return call.json_response({"prompt": await call.service.detokenize(body.tokens)})


async def tokenizer_info(call: HttpCall) -> ASGIApp:
    """What a client needs to know of the tokenizer: its special tokens and chat template."""
    tokenizer = call.service.tokenizer
    if tokenizer.special_tokens.get("eos_token") is None:
        raise HttpError(404, "the model names no end-of-sequence token", "not_found")
    return call.json_response(
        {
            **dict.fromkeys(("bos_token", "pad_token", "unk_token")),
            **tokenizer.special_tokens,
            "chat_template": tokenizer.chat_templates.get("default"),
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": call.service.capacity.max_model_len,
        }
    )


ROUTES = (
    Route(
        "/tokenize",
        tokenize,
        format_tgi_error,
        TokenizeBody,
        response_shape=(TOKEN_OFFSETS, TOKEN_LIST, {"tokens": ["integer"]}),
    ),
    Route(
        "/chat_tokenize",
        chat_tokenize,
        format_tgi_error,
        ChatBody,
        response_shape=CHAT_TOKEN_OFFSETS,
    ),
    Route(
        "/detokenize",
        detokenize,
        format_openai_error,
        DetokenizeBody,
        response_shape={"prompt": "string"},
    ),
    Route("/tokenizer_info", tokenizer_info, format_openai_error),
)
