"""TGI's own API: /generate, /generate_stream, and / for both.

Parameters, checks and their wording are TGI's. Two differences are intended: log-probabilities are
the model's own, before temperature and penalties, and a stop sequence is also found if it ends in
the middle of a token.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import msgspec
from starlette.types import ASGIApp

from bloomery.errors import InvalidRequest, NonTextInput
from bloomery.messages import TokenLogprob
from bloomery.sampling import SamplingParams
from bloomery.server.errors import format_tgi_error
from bloomery.server.generation import GenerationInput, GenerationJob, format_event
from bloomery.server.limits import ServerLimits, check_sampling_limits
from bloomery.server.schema import ADAPTER_FIELDS, RequestBody
from bloomery.server.service import (
    EVENT_MEDIA,
    JSON_OR_EVENTS,
    HttpCall,
    Route,
    TokenizedPrompt,
    compile_outputs,
)
from bloomery.server.shapes import TGI_GENERATION
from bloomery.text.outputs import CompletionDelta, CompletionState, Detokenizer

# Parameters that have the same name and meaning in SamplingParams.
# How TGI's clients put an image into a prompt.
INLINE_IMAGE = re.compile(r"!\[\]\([^)]*\)")
COMMON_FIELDS = (
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "seed",
    "priority",
    "deadline_ms",
)


class TgiParameters(msgspec.Struct, kw_only=True):
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
        """Whether TGI samples instead of decoding greedily."""
        options = (self.temperature, self.top_k, self.top_p, self.typical_p)
        return bool(self.do_sample) or any(option is not None for option in options)


class GenerateBody(RequestBody, kw_only=True):
    UNSUPPORTED_FIELDS: ClassVar[dict[str, str]] = dict.fromkeys(
        ADAPTER_FIELDS, "name the LoRA adapter in parameters.adapter_id"
    )

    inputs: str
    parameters: TgiParameters | None = None
    stream: bool | None = None


# ---- handlers ------------------------------------------------------------------------------


async def generate(call: HttpCall) -> ASGIApp:
    """Complete a text."""
    return await _full_response(call, await call.read_body(GenerateBody))


async def generate_stream(call: HttpCall) -> ASGIApp:
    """Complete a text, an event a token."""
    return await _stream_response(call, await call.read_body(GenerateBody))


async def generate_or_stream(call: HttpCall) -> ASGIApp:
    """Complete a text; with stream: true as events, otherwise as a list of one."""
    body = await call.read_body(GenerateBody)
    if body.stream:
        return await _stream_response(call, body)
    return await _full_response(call, body, as_list=True)


async def _full_response(call: HttpCall, body: GenerateBody, as_list: bool = False) -> ASGIApp:
    job = await _create_job(call, body, stream=False)
    await job.run()
    formatter = TgiFormatter(job, body)
    best = formatter.ranked_answers()[0]
    headers = _compute_headers(job, body) | _timing_headers(job, len(best.token_ids))
    response = formatter.full_response()
    return call.json_response([response] if as_list else response, headers)


async def _stream_response(call: HttpCall, body: GenerateBody) -> ASGIApp:
    job = await _create_job(call, body, stream=True)
    return job.event_response(TgiFormatter(job, body), _compute_headers(job, body))


async def _create_job(call: HttpCall, body: GenerateBody, stream: bool) -> GenerationJob:
    check_inline_images(call, body.inputs)
    await call.select_adapter(body.parameters.adapter_id if body.parameters else None)
    params = tgi_sampling_params(call, body, stream)
    permit = call.admit(params.num_sequences)
    prompt = await tokenize_inputs(call, body, params)
    grammar = await compile_grammar(call, body)
    return GenerationJob(call, permit, [GenerationInput(prompt, params, grammar=grammar)])


async def compile_grammar(call: HttpCall, body: GenerateBody) -> str:
    """The grammar that `parameters.grammar` asks for, as the engine takes it."""
    value = body.parameters and body.parameters.grammar
    if value is None:
        return ""
    from bloomery.server.routes.constraints import parse_tgi_grammar

    return await compile_outputs(call, parse_tgi_grammar(value, "grammar"), "grammar")


def _compute_headers(job: GenerationJob, body: GenerateBody) -> dict[str, str]:
    device = job.call.service.capacity.device.partition(":")[0]
    return {"x-compute-type": device, "x-compute-characters": str(len(body.inputs))}


def _timing_headers(job: GenerationJob, num_tokens: int) -> dict[str, str]:
    """TGI's timing headers: x-compute-time in seconds, the others in milliseconds."""
    timings = job.timings
    total = timings.last_token - timings.arrived
    inference = timings.last_token - timings.started
    seconds = {
        "total-time": total,
        "validation-time": timings.submitted - timings.arrived,
        "queue-time": timings.queue_seconds,
        "inference-time": inference,
        "time-per-token": inference / max(num_tokens, 1),
    }
    headers = {"x-compute-time": f"{total:.6f}"}
    for name, value in seconds.items():
        headers[f"x-{name}"] = str(int(max(value, 0.0) * 1000))
    headers["x-prompt-tokens"] = str(job.num_prompt_tokens)
    headers["x-generated-tokens"] = str(num_tokens)
    return headers


# ---- parameters ----------------------------------------------------------------------------


def tgi_sampling_params(call: HttpCall, body: GenerateBody, stream: bool) -> SamplingParams:
    """TGI's parameters as SamplingParams. Without any parameters, TGI samples."""
    parameters = body.parameters or TgiParameters(do_sample=True)
    limits = call.service.limits
    context_len = call.service.capacity.max_model_len
    for field, message in _parameter_errors(parameters, limits, stream, context_len):
        raise InvalidRequest(message, field)
    if not body.inputs:
        raise InvalidRequest("`inputs` cannot be empty", "inputs")
    temperature = 0.0
    if parameters.samples:
        temperature = 1.0 if parameters.temperature is None else parameters.temperature
    values: dict[str, Any] = {}
    for name in COMMON_FIELDS:
        value = getattr(parameters, name)
        if value is not None:
            values[name] = value
    params = SamplingParams(
        n=parameters.best_of or 1,
        temperature=temperature,
        stop=parameters.stop or None,
        include_stop_str_in_output=True,
        max_tokens=parameters.max_new_tokens,
        truncate_prompt_tokens=parameters.truncate,
        watermark=bool(parameters.watermark),
        logprobs=parameters.top_n_tokens or 0,
        prompt_logprobs=0 if parameters.decoder_input_details else None,
        **values,
    )
    return check_sampling_limits(params, limits, max_temperature=math.inf)


def _parameter_errors(
    parameters: TgiParameters, limits: ServerLimits, stream: bool, context_len: int
) -> Iterator[tuple[str, str]]:
    """Yield (field, message) of each invalid parameter, in TGI's order and wording."""
    best_of = 1 if parameters.best_of is None else parameters.best_of
    if stream and best_of != 1:
        yield "best_of", "`best_of` != 1 is not supported when streaming tokens"
    if stream and parameters.decoder_input_details:
        message = "`decoder_input_details` == true is not supported when streaming tokens"
        yield "decoder_input_details", message
    if not 0 < best_of <= limits.best_of:
        yield "best_of", f"`best_of` must be > 0 and <= {limits.best_of}. Given: {best_of}"
    if best_of > 1 and not parameters.samples:
        yield "best_of", "you must use sampling when `best_of` is > 1"
    for name in ("temperature", "repetition_penalty"):
        if _is_not_positive(getattr(parameters, name)):
            yield name, f"`{name}` must be strictly positive"
    if not -2 <= (parameters.frequency_penalty or 0) <= 2:
        yield "frequency_penalty", "`frequency_penalty` must be >= -2.0 and <= 2.0"
    for name in ("top_p", "typical_p"):
        value = getattr(parameters, name)
        if value is not None and not 0.0 < value < 1.0:
            yield name, f"`{name}` must be > 0.0 and < 1.0"
    for name in ("top_k", "max_new_tokens"):
        if _is_not_positive(getattr(parameters, name)):
            yield name, f"`{name}` must be strictly positive"
    num_stops = len(parameters.stop or ())
    if num_stops > limits.stop_strings:
        supported = f"`stop` supports up to {limits.stop_strings} stop sequences"
        yield "stop", f"{supported}. Given: {num_stops}"
    if best_of > 1 and parameters.seed is not None:
        yield "seed", "`seed` must not be set when `best_of` > 1"
    num_top = parameters.top_n_tokens or 0
    if not 0 <= num_top <= limits.top_n_tokens:
        message = f"`top_n_tokens` must be >= 0 and <= {limits.top_n_tokens}. Given: {num_top}"
        yield "top_n_tokens", message
    if parameters.truncate is not None and not 0 < parameters.truncate < context_len:
        message = f"`truncate` must be strictly positive and less than {context_len - 1}"
        yield "truncate", f"{message}. Given: {parameters.truncate}"


def _is_not_positive(value: float | None) -> bool:
    return value is not None and value <= 0


def check_inline_images(call: HttpCall, inputs: str) -> None:
    """Refuse TGI's images in a prompt for a vision model. For a text model they are plain text."""
    if call.service.settings.text_part_only and INLINE_IMAGE.search(inputs):
        raise NonTextInput("`inputs` has an image, ![](...): the model reads text only", "inputs")


async def tokenize_inputs(
    call: HttpCall, body: GenerateBody, params: SamplingParams
) -> TokenizedPrompt:
    """The prompt, if it and the answer fit the context.

    TGI refuses a request that does not fit, where OpenAI cuts the answer short.
    """
    prompt = await call.service.tokenize(body.inputs, field="inputs")
    context_len = call.service.capacity.max_model_len
    length = len(prompt.ids)
    if params.truncate_prompt_tokens:
        length = min(length, params.truncate_prompt_tokens)
    max_tokens = params.max_tokens or 0
    if length + max_tokens > context_len:
        rule = f"`inputs` tokens + `max_new_tokens` must be <= {context_len}"
        counts = f"{length} `inputs` tokens and {max_tokens} `max_new_tokens`"
        raise InvalidRequest(f"{rule}. Given: {counts}", "inputs")
    if length > context_len - 1:
        message = f"`inputs` must have less than {context_len - 1} tokens. Given: {length}"
        raise InvalidRequest(message, "inputs")
    return prompt


# ---- the answer ----------------------------------------------------------------------------


class TgiFormatter:
    """Writes an answer as TGI does: with details on request, or as an event a token."""

    def __init__(self, job: GenerationJob, body: GenerateBody):
        self.job = job
        self.inputs = body.inputs
        self.parameters = body.parameters or TgiParameters(do_sample=True)
        self.tokenizer = job.call.service.tokenizer
        self.num_events = 0
        self.detokenizer = self._create_detokenizer()

    def _create_detokenizer(self) -> Detokenizer:
        """A detokenizer for the text of single tokens, special tokens included."""
        return Detokenizer(self.tokenizer, self.job.requests[0].prompt, skip_special=False)

    def ranked_answers(self) -> list[CompletionState]:
        """The answers by mean log-probability, the best first."""

        def mean_logprob(answer: CompletionState) -> float:
            return answer.cumulative_logprob / max(len(answer.logprobs), 1)

        return sorted(self.job.best_answers, key=lambda answer: -mean_logprob(answer))

    def full_response(self) -> dict[str, Any]:
        best, *others = self.ranked_answers()
        response: dict[str, Any] = {"generated_text": self._text(best)}
        if self.parameters.details or self.parameters.decoder_input_details:
            details = self._details(best)
            response["details"] = details
            if others:
                details["best_of_sequences"] = [
                    {"generated_text": self._text(answer), **self._details(answer)}
                    for answer in others
                ]
        return response

    def delta_events(self, prompt_index: int, delta: CompletionDelta) -> bytes:
        events = b""
        for entry in delta.logprobs:
            self.num_events += 1
            text = self.detokenizer.push(entry.token)
            content: dict[str, Any] = {
                "index": self.num_events,
                "token": self._token(entry.token, text, entry.logprob),
            }
            if self.parameters.top_n_tokens:
                content["top_tokens"] = self._top_tokens(entry)
            content |= self._final_fields(is_last=delta.finish_reason is not None)
            events += format_event(content)
        return events

    def final_events(self) -> bytes:
        return b""

    def _final_fields(self, is_last: bool) -> dict[str, Any]:
        """The text and its details in the last event; null in the others."""
        if not is_last:
            return {"generated_text": None, "details": None}
        answer = self.job.best_answers[0]
        details = None
        if self.parameters.details:
            details = self._finish_fields(answer) | {"input_length": self.job.num_prompt_tokens}
        return {"generated_text": self._text(answer), "details": details}

    def _text(self, answer: CompletionState) -> str:
        return self.inputs + answer.text if self.parameters.return_full_text else answer.text

    def _finish_fields(self, answer: CompletionState) -> dict[str, Any]:
        if answer.finish_reason == "length":
            reason = "length"
        elif answer.stop_reason is None:
            reason = "eos_token"
        else:
            reason = "stop_sequence"
        seed = answer.request.sampling.seed if self.parameters.samples else None
        return {"finish_reason": reason, "generated_tokens": len(answer.token_ids), "seed": seed}

    def _details(self, answer: CompletionState) -> dict[str, Any]:
        detokenizer = self._create_detokenizer()
        tokens = [
            self._token(entry.token, detokenizer.push(entry.token), entry.logprob)
            for entry in answer.logprobs
        ]
        details = self._finish_fields(answer)
        details |= {"prefill": self._prefill_tokens(), "tokens": tokens}
        if self.parameters.top_n_tokens:
            details["top_tokens"] = [self._top_tokens(entry) for entry in answer.logprobs]
        return details

    def _prefill_tokens(self) -> list[dict[str, Any]]:
        """The prompt's tokens; its first has no log-probability."""
        if not self.parameters.decoder_input_details:
            return []
        entries = self.job.generations[0].prompt_logprobs
        logprobs: Sequence[float | None] = [None, *(entry.logprob for entry in entries)]
        prompt = self.job.requests[0].prompt
        return [
            {"id": token_id, "text": self.tokenizer.token_text(token_id), "logprob": logprob}
            for token_id, logprob in zip(prompt, logprobs, strict=True)
        ]

    def _token(self, token_id: int, text: str, logprob: float) -> dict[str, Any]:
        return {
            "id": token_id,
            "text": text,
            "logprob": logprob,
            "special": token_id in self.tokenizer.special_ids,
        }

    def _top_tokens(self, entry: TokenLogprob) -> list[dict[str, Any]]:
        return [
            self._token(token_id, self.tokenizer.token_text(token_id), logprob)
            for token_id, logprob in entry.top[: self.parameters.top_n_tokens]
        ]


ROUTES = (
    Route(
        "/",
        generate_or_stream,
        format_tgi_error,
        GenerateBody,
        generates=True,
        media_types=JSON_OR_EVENTS,
        response_shape=[TGI_GENERATION],
    ),
    Route(
        "/generate",
        generate,
        format_tgi_error,
        GenerateBody,
        generates=True,
        response_shape=TGI_GENERATION,
    ),
    Route(
        "/generate_stream",
        generate_stream,
        format_tgi_error,
        GenerateBody,
        generates=True,
        media_types=EVENT_MEDIA,
    ),
)
