"""TGI's own API: /generate, /generate_stream, and / which is both; and the clouds' names for them.

Parameters, checks and their wording are TGI's. Two things differ and are meant to: log-probabilities are the model's
own, before temperature and penalties, and a stop sequence is found also where a token goes on after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from starlette.types import ASGIApp

from bloomery.errors import InvalidRequest
from bloomery.messages import TokenLogprob
from bloomery.sampling import SamplingParams
from bloomery.server.call import BOTH, EVENTS, Call, Route
from bloomery.server.errors import openai, tgi
from bloomery.server.generation import Ask, Job
from bloomery.server.limits import Limits, narrow
from bloomery.server.routes import chat, completions
from bloomery.server.schema import Body
from bloomery.server.service import Prompt
from bloomery.server.shapes import GENERATED, INVOCATION
from bloomery.server.streaming import event
from bloomery.text.answer import Answer, Delta
from bloomery.text.detokenizer import Detokenizer


class Parameters(msgspec.Struct, kw_only=True):
    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: int | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: int | None = None
    top_n_tokens: int | None = None
    grammar: Any = None
    adapter_id: str | None = None
    priority: int | None = None
    deadline_ms: int | None = None

    @property
    def samples(self) -> bool:
        return bool(self.do_sample) or any(
            wish is not None for wish in (self.temperature, self.top_k, self.top_p, self.typical_p)
        )


class GenerateBody(Body, kw_only=True):
    inputs: str
    parameters: Parameters | None = None
    stream: bool | None = None


class VertexBody(Body, kw_only=True):
    instances: list[dict[str, Any]]


class InvocationBody(Body, kw_only=True):
    """One of the bodies of /generate, /v1/chat/completions and /v1/completions."""

    inputs: str | None = None
    messages: list[chat.Message] | None = None
    prompt: str | list[Any] | None = None


# ---- the routes ------------------------------------------------------------------------------------


async def generate(call: Call) -> ASGIApp:
    """Complete a text."""
    return await whole(call, await call.read(GenerateBody))


async def generate_stream(call: Call) -> ASGIApp:
    """Complete a text, an event a token."""
    return await streamed(call, await call.read(GenerateBody))


async def compatible(call: Call) -> ASGIApp:
    """Complete a text; with stream: true as events, otherwise as a list of one."""
    body = await call.read(GenerateBody)
    return await (streamed(call, body) if body.stream else whole(call, body, as_list=True))


async def invocations(call: Call) -> ASGIApp:
    """SageMaker's route: what is in the body decides whether it is a text, a conversation or a completion."""
    raw = await call.object()
    if raw.get("inputs") is not None:
        return await compatible(call)
    call.dialect = openai
    if raw.get("messages") is not None:
        return await chat.chat_completions(call)
    if raw.get("prompt") is not None:
        return await completions.completions(call)
    call.dialect = tgi
    raise InvalidRequest("one of inputs, messages or prompt is needed", "inputs")


async def vertex(call: Call) -> ASGIApp:
    """Vertex AI's route: several texts or conversations at once."""
    body = await call.read(VertexBody)
    if not body.instances:
        raise InvalidRequest("`instances` cannot be empty", "instances")
    ticket = call.admit(len(body.instances))
    job = Job(call, ticket, [await instance(call, raw) for raw in body.instances])
    await job.run()
    return call.json({"predictions": [answer.text for answer in job.answers]})


async def instance(call: Call, raw: dict[str, Any]) -> Ask:
    if raw.get("messages") is not None:
        body = call.convert(raw, chat.ChatBody)
        params = chat.wishes(call, body)
        prompt = await chat.prompt(call, body)
    else:
        given = call.convert(raw, GenerateBody)
        if given.parameters is not None and given.parameters.do_sample is None:
            given.parameters.do_sample = True
        params = wishes(call, given, stream=False)
        prompt = await tokenized(call, given, params)
    if params.children > 1:
        raise InvalidRequest("an instance has one answer: leave out n and best_of")
    return Ask(prompt, params)


async def whole(call: Call, body: GenerateBody, as_list: bool = False) -> ASGIApp:
    job = await prepared(call, body, stream=False)
    await job.run()
    text = Text(job, body)
    headers = origin(job, body) | account(job, len(text.ranked()[0].token_ids))
    return call.json([text.whole()] if as_list else text.whole(), headers)


async def streamed(call: Call, body: GenerateBody) -> ASGIApp:
    job = await prepared(call, body, stream=True)
    return call.events(job.stream(Text(job, body)), origin(job, body))


async def prepared(call: Call, body: GenerateBody, stream: bool) -> Job:
    params = wishes(call, body, stream)
    ticket = call.admit(params.children)
    return Job(call, ticket, [Ask(await tokenized(call, body, params), params)])


def origin(job: Job, body: GenerateBody) -> dict[str, str]:
    device = job.call.service.capacity.device.partition(":")[0]
    return {"x-compute-type": device, "x-compute-characters": str(len(body.inputs))}


def account(job: Job, tokens: int) -> dict[str, str]:
    """What an answer of so many tokens took: seconds in all, milliseconds in part."""
    timings = job.timings
    total = timings.last - timings.arrived
    inference = timings.last - timings.begun
    parts = {
        "total-time": total,
        "validation-time": timings.submitted - timings.arrived,
        "queue-time": timings.queued,
        "inference-time": inference,
        "time-per-token": inference / max(tokens, 1),
    }
    return {
        "x-compute-time": f"{total:.6f}",
        **{f"x-{name}": str(int(max(seconds, 0.0) * 1000)) for name, seconds in parts.items()},
        "x-prompt-tokens": str(job.prompt_tokens),
        "x-generated-tokens": str(tokens),
    }


# ---- what may be asked -----------------------------------------------------------------------------


def wishes(call: Call, body: GenerateBody, stream: bool) -> SamplingParams:
    """TGI's parameters as ours; without any, TGI samples."""
    given = body.parameters or Parameters(do_sample=True)
    limits = call.service.limits
    for field, message in complaints(given, limits, stream, call.service.capacity.max_length):
        raise InvalidRequest(message, field)
    if not body.inputs:
        raise InvalidRequest("`inputs` cannot be empty", "inputs")
    said: dict[str, Any] = {
        name: found
        for name in (
            "top_k",
            "top_p",
            "typical_p",
            "repetition_penalty",
            "frequency_penalty",
            "seed",
            "priority",
            "deadline_ms",
        )
        if (found := getattr(given, name)) is not None
    }
    params = SamplingParams(
        n=given.best_of or 1,
        temperature=(1.0 if given.temperature is None else given.temperature)
        if given.samples
        else 0.0,
        stop=given.stop or None,
        include_stop_str_in_output=True,
        max_tokens=given.max_new_tokens,
        truncate_prompt_tokens=given.truncate,
        watermark=bool(given.watermark),
        logprobs=given.top_n_tokens or 0,
        prompt_logprobs=0 if given.decoder_input_details else None,
        **said,
    )
    return narrow(params, limits, hottest=math.inf)


def complaints(
    given: Parameters, limits: Limits, stream: bool, context: int
) -> Iterator[tuple[str, str]]:
    """What TGI would say, in the order it would say it: a field and the words."""
    best_of = 1 if given.best_of is None else given.best_of
    if stream and best_of != 1:
        yield "best_of", "`best_of` != 1 is not supported when streaming tokens"
    if stream and given.decoder_input_details:
        yield (
            "decoder_input_details",
            "`decoder_input_details` == true is not supported when streaming tokens",
        )
    if not 0 < best_of <= limits.best_of:
        yield "best_of", f"`best_of` must be > 0 and <= {limits.best_of}. Given: {best_of}"
    if best_of > 1 and not given.samples:
        yield "best_of", "you must use sampling when `best_of` is > 1"
    for name in ("temperature", "repetition_penalty"):
        if _at_most_0(getattr(given, name)):
            yield name, f"`{name}` must be strictly positive"
    if not -2 <= (given.frequency_penalty or 0) <= 2:
        yield "frequency_penalty", "`frequency_penalty` must be >= -2.0 and <= 2.0"
    for name in ("top_p", "typical_p"):
        if (share := getattr(given, name)) is not None and not 0.0 < share < 1.0:
            yield name, f"`{name}` must be > 0.0 and < 1.0"
    for name in ("top_k", "max_new_tokens"):
        if _at_most_0(getattr(given, name)):
            yield name, f"`{name}` must be strictly positive"
    if (stops := len(given.stop or ())) > limits.stop_strings:
        yield "stop", f"`stop` supports up to {limits.stop_strings} stop sequences. Given: {stops}"
    if best_of > 1 and given.seed is not None:
        yield "seed", "`seed` must not be set when `best_of` > 1"
    if not 0 <= (top := given.top_n_tokens or 0) <= limits.top_n_tokens:
        yield (
            "top_n_tokens",
            f"`top_n_tokens` must be >= 0 and <= {limits.top_n_tokens}. Given: {top}",
        )
    if given.truncate is not None and not 0 < given.truncate < context:
        yield (
            "truncate",
            f"`truncate` must be strictly positive and less than {context - 1}. Given: {given.truncate}",
        )
    if given.grammar is not None:
        yield "grammar", "grammar is not supported"
    if given.adapter_id is not None:
        yield "adapter_id", "`adapter_id` is not supported: this server has no adapters"


def _at_most_0(given: float | None) -> bool:
    return given is not None and given <= 0


async def tokenized(call: Call, body: GenerateBody, params: SamplingParams) -> Prompt:
    """The text's ids, if they and the answer fit; TGI refuses what does not, where OpenAI cuts the answer short."""
    prompt = await call.service.encode(body.inputs, field="inputs")
    context = call.service.capacity.max_length
    length = min(len(prompt.ids), params.truncate_prompt_tokens or len(prompt.ids))
    most = params.max_tokens or 0
    if length + most > context:
        message = f"`inputs` tokens + `max_new_tokens` must be <= {context}. "
        raise InvalidRequest(
            f"{message}Given: {length} `inputs` tokens and {most} `max_new_tokens`", "inputs"
        )
    if length > context - 1:
        raise InvalidRequest(
            f"`inputs` must have less than {context - 1} tokens. Given: {length}", "inputs"
        )
    return prompt


# ---- the answer ------------------------------------------------------------------------------------


UNFINISHED = {"generated_text": None, "details": None}


class Text:
    """The answer as TGI writes it: whole, with details on request, or an event a token numbered from 1."""

    def __init__(self, job: Job, body: GenerateBody):
        self.job = job
        self.inputs = body.inputs
        self.given = body.parameters or Parameters(do_sample=True)
        self.tokenizer = job.call.service.tokenizer
        self.index = 0
        self.spelling = self._spelling()

    def _spelling(self) -> Detokenizer:
        """Tokens read one by one; unlike the text, with special ones and nothing held back."""
        return Detokenizer(self.tokenizer, self.job.requests[0].prompt, skip_special=False)

    def ranked(self) -> list[Answer]:
        """By mean log-probability, the best first."""
        return sorted(
            self.job.answers,
            key=lambda answer: -answer.cumulative_logprob / max(len(answer.logprobs), 1),
        )

    def whole(self) -> dict[str, Any]:
        best, *others = self.ranked()
        said: dict[str, Any] = {"generated_text": self._text(best)}
        if self.given.details or self.given.decoder_input_details:
            said["details"] = self._details(best)
            if others:
                said["details"]["best_of_sequences"] = [
                    {"generated_text": self._text(answer), **self._details(answer)}
                    for answer in others
                ]
        return said

    def delta(self, index: int, delta: Delta) -> bytes:
        said = b""
        for entry in delta.logprobs:
            self.index += 1
            token = self._token(entry.token, self.spelling.push(entry.token), entry.logprob)
            one: dict[str, Any] = {"index": self.index, "token": token}
            if self.given.top_n_tokens:
                one["top_tokens"] = self._top(entry)
            said += event({**one, **(UNFINISHED if delta.finish_reason is None else self._last())})
        return said

    def end(self) -> bytes:
        return b""

    def _last(self) -> dict[str, Any]:
        answer = self.job.answers[0]
        details = (
            {**self._ending(answer), "input_length": self.job.prompt_tokens}
            if self.given.details
            else None
        )
        return {"generated_text": self._text(answer), "details": details}

    def _text(self, answer: Answer) -> str:
        return (self.inputs if self.given.return_full_text else "") + answer.text

    def _ending(self, answer: Answer) -> dict[str, Any]:
        reason = "eos_token" if answer.stop_reason is None else "stop_sequence"
        if answer.finish_reason == "length":
            reason = "length"
        seed = answer.request.sampling.seed if self.given.samples else None
        return {"finish_reason": reason, "generated_tokens": len(answer.token_ids), "seed": seed}

    def _details(self, answer: Answer) -> dict[str, Any]:
        spelling = self._spelling()
        tokens = [
            self._token(entry.token, spelling.push(entry.token), entry.logprob)
            for entry in answer.logprobs
        ]
        said = {**self._ending(answer), "prefill": self._prefill(), "tokens": tokens}
        if self.given.top_n_tokens:
            said["top_tokens"] = [self._top(entry) for entry in answer.logprobs]
        return said

    def _prefill(self) -> list[dict[str, Any]]:
        if not self.given.decoder_input_details:
            return []
        known: Sequence[float | None] = [
            None,
            *(entry.logprob for entry in self.job.generations[0].prompt_logprobs),
        ]
        prompt = self.job.requests[0].prompt
        return [
            {"id": id, "text": self.tokenizer.token_text(id), "logprob": logprob}
            for id, logprob in zip(prompt, known, strict=True)
        ]

    def _token(self, id: int, text: str, logprob: float) -> dict[str, Any]:
        return {
            "id": id,
            "text": text,
            "logprob": logprob,
            "special": id in self.tokenizer.special_ids,
        }

    def _top(self, entry: TokenLogprob) -> list[dict[str, Any]]:
        best = entry.top[: self.given.top_n_tokens]
        return [self._token(id, self.tokenizer.token_text(id), logprob) for id, logprob in best]


ROUTES = (
    Route("/", compatible, tgi, GenerateBody, generates=True, media=BOTH, answer=[GENERATED]),
    Route("/generate", generate, tgi, GenerateBody, generates=True, answer=GENERATED),
    Route("/generate_stream", generate_stream, tgi, GenerateBody, generates=True, media=EVENTS),
    Route(
        "/invocations",
        invocations,
        tgi,
        InvocationBody,
        generates=True,
        media=BOTH,
        answer=INVOCATION,
    ),
    Route("/vertex", vertex, tgi, VertexBody, generates=True, answer={"predictions": ["string"]}),
)
