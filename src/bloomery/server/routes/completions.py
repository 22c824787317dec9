"""OpenAI's /v1/completions: text or token ids, one prompt or many, with echo and logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from starlette.types import ASGIApp

from bloomery.errors import InvalidRequest
from bloomery.messages import TokenLogprob
from bloomery.sampling import SamplingParams
from bloomery.server.errors import format_openai_error
from bloomery.server.generation import GenerationInput, GenerationJob
from bloomery.server.routes.openai import (
    CompletionEnvelope,
    GenerationBody,
    clamp_logprob,
    format_prompt_logprobs,
    openai_finish_reason,
    openai_sampling_params,
    read_structured_outputs,
    select_openai_model,
)
from bloomery.server.service import (
    JSON_OR_EVENTS,
    HttpCall,
    InferenceService,
    Route,
    TokenizedPrompt,
    compile_outputs,
)
from bloomery.server.shapes import TEXT_COMPLETION
from bloomery.text.outputs import CompletionDelta
from bloomery.text.tokenizer import GapTokens, Tokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's
CHAT_ONLY = "a completion has no conversation; use /v1/chat/completions"
PROMPT_TYPES = (
    "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
)


class CompletionBody(GenerationBody, kw_only=True):
    UNSUPPORTED_FIELDS: ClassVar[dict[str, str]] = {
        **GenerationBody.UNSUPPORTED_FIELDS,
        "tools": CHAT_ONLY,
        "functions": CHAT_ONLY,
        "reasoning_effort": CHAT_ONLY,
    }
    prompt: str | list[Any] | None
    suffix: str | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


async def completions(call: HttpCall) -> ASGIApp:
    """Complete a prompt, or several."""
    body = await call.read_body(CompletionBody)
    await select_openai_model(call, body)
    params = completion_sampling_params(call, body)
    prompts = split_prompts(default_prompt(call) if body.prompt is None else body.prompt)
    permit = call.admit(len(prompts) * params.num_sequences)
    constraint = read_structured_outputs(body)
    grammar = "" if constraint is None else await compile_outputs(call, *constraint)
    gap_tokens = find_gap_tokens(call.service) if body.suffix else None
    if gap_tokens is not None:
        stop_ids = [*(params.stop_token_ids or ()), *gap_tokens.end_ids]
        params = replace(params, stop_token_ids=stop_ids)
    inputs = []
    for prompt in prompts:
        if gap_tokens is not None:
            tokenized = await tokenize_gap(call.service, gap_tokens, prompt, body.suffix or "")
        else:
            tokenized = await tokenize_prompt(call.service, prompt, body.add_special_tokens)
        inputs.append(GenerationInput(tokenized, params, grammar=grammar))
    job = GenerationJob(call, permit, inputs)
    job.hides_output = body.max_tokens == 0
    return await job.respond(CompletionFormatter(job, body), body.stream)


def completion_sampling_params(call: HttpCall, body: CompletionBody) -> SamplingParams:
    if body.stream and (body.best_of or 1) > (body.n or 1):
        message = "best_of is chosen from whole answers and cannot be streamed"
        raise InvalidRequest(message, "best_of")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens must be at least 1, or 0 with echo: true", "max_tokens")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0:
        max_tokens = 1  # only the prompt is returned, but a step must sample a token
    echoed_logprobs = body.logprobs if body.echo else None
    counts = [count for count in (echoed_logprobs, body.prompt_logprobs) if count is not None]
    return openai_sampling_params(
        call,
        body,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=max(counts, default=None),
    )


def default_prompt(call: HttpCall) -> list[Any]:
    """The prompt of a body with `prompt: null`: the token with which the model's texts begin."""
    tokenizer = call.service.tokenizer
    first_ids = [tokenizer.bos_id, *tokenizer.eos_ids]
    token_id = next((token_id for token_id in first_ids if token_id is not None), None)
    if token_id is None:
        message = "prompt is null, and the model has no token to begin with: give a prompt"
        raise InvalidRequest(message, "prompt")
    return [token_id]


def split_prompts(prompt: str | list[Any], field: str = "prompt") -> list[str | list[Any]]:
    """The prompts of a request; a list of numbers is one prompt of token ids."""
    if isinstance(prompt, str) or (prompt and not isinstance(prompt[0], str | list)):
        return [prompt]
    first_type = type(prompt[0]) if prompt else None
    if first_type is None or not all(isinstance(entry, first_type) for entry in prompt):
        raise InvalidRequest(f"{field} {PROMPT_TYPES}", field)
    return prompt


async def tokenize_prompt(
    service: InferenceService,
    prompt: str | list[Any],
    add_special: bool | None,
    field: str = "prompt",
) -> TokenizedPrompt:
    """Tokenize a text, or take a list of token ids as it is."""
    if isinstance(prompt, str):
        return await service.tokenize(prompt, add_special is not False, field)
    service.check_prompt_characters(len(prompt), field)
    return TokenizedPrompt(prompt)


def find_gap_tokens(service: InferenceService) -> GapTokens:
    """The model's tokens for fill in the middle."""
    gap_tokens = service.tokenizer.find_gap_tokens()
    if gap_tokens is None:
        message = (
            "this model cannot fill in the middle: its tokenizer has no tokens for it. "
            "Leave suffix out, or serve a code model such as Qwen2.5-Coder"
        )
        raise InvalidRequest(message, "suffix")
    return gap_tokens


async def tokenize_gap(
    service: InferenceService, gap_tokens: GapTokens, prompt: str | list[Any], suffix: str
) -> TokenizedPrompt:
    """A prompt after which the model writes what lies between `prompt` and `suffix`."""
    before = await tokenize_prompt(service, prompt, add_special=False)
    after = await service.tokenize(suffix, False, "suffix")
    ids = gap_tokens.build_prompt(before.ids, after.ids)
    bos_id = service.tokenizer.bos_id
    if bos_id is not None and bos_id in service.tokenizer.encode(""):
        ids = [bos_id, *ids]
    return TokenizedPrompt(ids, before.text)


class CompletionFormatter:
    """Writes an answer as OpenAI does, with the prompt before it if `echo` asks for it."""

    def __init__(self, job: GenerationJob, body: CompletionBody):
        self.job = job
        self.body = body
        self.tokenizer = job.call.service.tokenizer
        self.envelope = CompletionEnvelope(job, body, "cmpl", "text_completion")
        # Tokens that add no text yet get no chunk, unless a chunk would show something else.
        self.skips_empty_text = (
            body.logprobs is None
            and not body.return_token_ids
            and not self.envelope.continuous_usage
        )
        # Characters written so far, by choice; a choice that has not started has no entry.
        self.text_offsets: dict[int, int] = {}

    def full_response(self) -> dict[str, Any]:
        choices = []
        num_top = self.body.prompt_logprobs
        for index, answer in enumerate(self.job.best_answers):
            prompt_index = index // (self.body.n or 1)
            delta = CompletionDelta(
                index,
                answer.text,
                tuple(answer.token_ids),
                tuple(answer.logprobs),
                answer.finish_reason,
            )
            choice = self._choice(prompt_index, index, delta)
            if num_top is not None:
                entries = self.job.generations[prompt_index].prompt_logprobs
                choice["prompt_logprobs"] = format_prompt_logprobs(self.tokenizer, entries, num_top)
            choices.append(choice)
        return self.envelope.full_response(choices)

    def delta_events(self, prompt_index: int, delta: CompletionDelta) -> bytes:
        index = prompt_index * (self.body.n or 1) + delta.index
        echoes_now = self.body.echo and index not in self.text_offsets
        shows_text = delta.text or echoes_now or not self.skips_empty_text
        if not shows_text and delta.finish_reason is None:
            return b""
        return self.envelope.chunk_event(self._choice(prompt_index, index, delta))

    def final_events(self) -> bytes:
        return self.envelope.final_events()

    def _choice(self, prompt_index: int, index: int, delta: CompletionDelta) -> dict[str, Any]:
        """One choice of a full response or of a chunk. `delta` is its text and tokens."""
        if self.job.hides_output:
            delta = CompletionDelta(delta.index, "", (), (), delta.finish_reason and "length")
        generation = self.job.generations[prompt_index]
        is_first = index not in self.text_offsets
        self.text_offsets.setdefault(index, 0)
        echoed_ids = generation.prompt_ids if is_first and self.body.echo else ()
        text = delta.text
        if echoed_ids:
            text = self._prompt_text(prompt_index) + text
        logprobs = None
        if self.body.logprobs is not None:
            echoed_logprobs = generation.prompt_logprobs if echoed_ids else ()
            logprobs = self._logprobs(index, echoed_ids, [*echoed_logprobs, *delta.logprobs])
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": openai_finish_reason(delta.finish_reason),
        }
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if is_first:
                choice["prompt_token_ids"] = generation.prompt_ids
        return choice

    def _prompt_text(self, prompt_index: int) -> str:
        """The prompt as the client sent it; decoded if it was truncated or sent as token ids."""
        text = self.job.inputs[prompt_index].prompt.text
        if text is not None and self.body.truncate_prompt_tokens is None:
            return text
        prompt_ids = self.job.generations[prompt_index].prompt_ids
        return self.tokenizer.decode(prompt_ids, skip_special=False)

    def _logprobs(
        self, index: int, echoed_ids: Sequence[int], entries: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        first_ids = echoed_ids[:1]  # the first token of a prompt has no log-probability
        token_ids = (*first_ids, *(entry.token for entry in entries))
        tokens = [token_label(self.tokenizer, token_id) for token_id in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self.text_offsets[index])
            self.text_offsets[index] += len(token)
        nulls = [None] * len(first_ids)
        num_top = self.body.logprobs or 0
        top_logprobs = [*nulls, *(self._top_logprobs(entry, num_top) for entry in entries)]
        return {
            "tokens": tokens,
            "token_logprobs": [*nulls, *(clamp_logprob(entry.logprob) for entry in entries)],
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }

    def _top_logprobs(self, entry: TokenLogprob, num_top: int) -> dict[str, float]:
        """Log-probabilities of the best tokens and the sampled one, by label.

        Of two tokens with the same label, the likelier one is shown.
        """
        logprobs: dict[str, float] = {}
        for token_id, logprob in (*entry.top[:num_top], (entry.token, entry.logprob)):
            logprobs.setdefault(token_label(self.tokenizer, token_id), clamp_logprob(logprob))
        return logprobs


def token_label(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text, or its bytes if it is part of a character. Labels stay unique that way."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


ROUTES = (
    Route(
        "/v1/completions",
        completions,
        format_openai_error,
        CompletionBody,
        generates=True,
        media_types=JSON_OR_EVENTS,
        response_shape=TEXT_COMPLETION,
    ),
)
