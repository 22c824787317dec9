"""OpenAI's /v1/completions: text or token ids, one prompt or many, with echo and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from starlette.types import ASGIApp

from bloomery.errors import InvalidRequest
from bloomery.messages import TokenLogprob
from bloomery.sampling import SamplingParams
from bloomery.server.call import BOTH, Call, Route
from bloomery.server.errors import openai
from bloomery.server.generation import Ask, Job
from bloomery.server.routes.openai import (
    Envelope,
    GenerationBody,
    finish_reason,
    prompt_logprobs,
    sampling,
    value,
)
from bloomery.server.service import Prompt, Service
from bloomery.server.shapes import COMPLETION
from bloomery.text.answer import Delta
from bloomery.text.tokenizer import Tokenizer

WORDS = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"


class CompletionBody(GenerationBody, kw_only=True):
    REFUSED: ClassVar[dict[str, str]] = {
        **GenerationBody.REFUSED,
        "suffix": "this server completes text, it does not fill gaps; leave it out",
    }
    prompt: str | list[Any]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


async def completions(call: Call) -> ASGIApp:
    """Complete a prompt, or several."""
    body = await call.read(CompletionBody)
    params = wishes(call, body)
    prompts = several(body.prompt)
    ticket = call.admit(len(prompts) * params.children)
    asks = [
        Ask(await ids_of(call.service, prompt, body.add_special_tokens), params)
        for prompt in prompts
    ]
    job = Job(call, ticket, asks)
    job.silent = body.max_tokens == 0
    return await job.answer(Completion(job, body), body.stream)


def wishes(call: Call, body: CompletionBody) -> SamplingParams:
    if body.stream and (body.best_of or 1) > (body.n or 1):
        raise InvalidRequest(
            "best_of is chosen from whole answers and cannot be streamed", "best_of"
        )
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens must be at least 1, or 0 with echo: true", "max_tokens")
    most = (
        16
        if body.max_tokens is None
        else max(body.max_tokens, 1)
        if body.max_tokens >= 0
        else body.max_tokens
    )
    prompt = [
        count
        for count in (body.logprobs if body.echo else None, body.prompt_logprobs)
        if count is not None
    ]
    return sampling(
        call,
        body,
        max_tokens=most,
        logprobs=body.logprobs,
        prompt_logprobs=max(prompt, default=None),
    )


def several(prompt: str | list[Any], field: str = "prompt") -> list[str | list[Any]]:
    if isinstance(prompt, str) or (prompt and not isinstance(prompt[0], str | list)):
        return [prompt]
    kind = type(prompt[0]) if prompt else None
    if kind is None or not all(isinstance(one, kind) for one in prompt):
        raise InvalidRequest(f"{field} {WORDS}", field)
    return prompt


async def ids_of(
    service: Service, prompt: str | list[Any], add_special: bool | None, field: str = "prompt"
) -> Prompt:
    if isinstance(prompt, str):
        return await service.encode(prompt, add_special is not False, field)
    service.check_size(len(prompt), field)
    return Prompt(prompt)


class Completion:
    """The answer as OpenAI writes it, with the prompt before it where echo asks for that."""

    def __init__(self, job: Job, body: CompletionBody):
        self.job = job
        self.body = body
        self.tokenizer = job.call.service.tokenizer
        self.envelope = Envelope(job, body, "cmpl", "text_completion")
        self.quiet = (
            body.logprobs is None and not body.return_token_ids and not self.envelope.always
        )
        self.offsets: dict[int, int] = {}  # characters so far, by choice; present once it has begun

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(self.job.answers):
            number = index // (self.body.n or 1)
            scores = self.body.prompt_logprobs
            gained = Delta(
                index,
                answer.text,
                tuple(answer.token_ids),
                tuple(answer.logprobs),
                answer.finish_reason,
            )
            choice = self._choice(number, index, gained)
            if scores is not None:
                known = self.job.generations[number].prompt_logprobs
                choice["prompt_logprobs"] = prompt_logprobs(self.tokenizer, known, scores)
            choices.append(choice)
        return self.envelope.whole(choices)

    def delta(self, index: int, delta: Delta) -> bytes:
        choice = index * (self.body.n or 1) + delta.index
        begins = self.body.echo and choice not in self.offsets
        if not delta.text and not begins and self.quiet and delta.finish_reason is None:
            return b""
        return self.envelope.chunk(self._choice(index, choice, delta))

    def end(self) -> bytes:
        return self.envelope.end()

    def _choice(self, number: int, index: int, gained: Delta) -> dict[str, Any]:
        """What a choice gains: all of it, or one chunk."""
        if self.job.silent:
            gained = Delta(gained.index, "", (), (), gained.finish_reason and "length")
        first = index not in self.offsets
        generation = self.job.generations[number]
        prompt = generation.prompt_ids
        echoed = prompt if first and self.body.echo else ()
        self.offsets.setdefault(index, 0)
        text = self._echo(number, prompt) + gained.text if echoed else gained.text
        logprobs = None
        ids = {}
        if self.body.logprobs is not None:
            before = generation.prompt_logprobs if echoed else ()
            logprobs = self._logprobs(index, echoed, [*before, *gained.logprobs])
        if self.body.return_token_ids:
            ids = {"token_ids": gained.token_ids, **({"prompt_token_ids": prompt} if first else {})}
        reason = finish_reason(gained.finish_reason)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, **ids}

    def _echo(self, number: int, prompt: Sequence[int]) -> str:
        text = self.job.asks[number].prompt.text
        whole = self.body.truncate_prompt_tokens is None
        return (
            text
            if text is not None and whole
            else self.tokenizer.decode(prompt, skip_special=False)
        )

    def _logprobs(
        self, index: int, echoed: Sequence[int], entries: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        top = self.body.logprobs or 0
        tokens = [
            spelled(self.tokenizer, id) for id in (*echoed[:1], *(entry.token for entry in entries))
        ]
        offsets = []
        for token in tokens:
            offsets.append(self.offsets[index])
            self.offsets[index] += len(token)
        nothing = [None] * len(echoed[:1])  # the first token of a prompt has no probability
        return {
            "tokens": tokens,
            "token_logprobs": [*nothing, *(value(entry.logprob) for entry in entries)],
            "top_logprobs": [*nothing, *(self._best(entry, top) for entry in entries)]
            if top
            else None,
            "text_offset": offsets,
        }

    def _best(self, entry: TokenLogprob, top: int) -> dict[str, float]:
        """The best ones, and the token's own; of two tokens that read alike the likelier one."""
        best: dict[str, float] = {}
        for token, logprob in (*entry.top[:top], (entry.token, entry.logprob)):
            best.setdefault(spelled(self.tokenizer, token), value(logprob))
        return best


def spelled(tokenizer: Tokenizer, token: int) -> str:
    """A token's text, or where it is part of a character its bytes, so that no two parts look alike."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


ROUTES = (
    Route(
        "/v1/completions",
        completions,
        openai,
        CompletionBody,
        generates=True,
        media=BOTH,
        answer=COMPLETION,
    ),
)
