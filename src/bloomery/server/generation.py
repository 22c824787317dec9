"""Generation for every API: prompts and sampling params in, pieces of answers out.

A GenerationJob is what one HTTP request generates. It submits requests to the engine, detokenizes,
times and counts. How an answer looks is decided by the route's ResponseFormatter.

The second half sends an answer as server-sent events. An event goes out as soon as it exists.
Nothing is read from the engine while the socket is full, so a slow client costs a bounded buffer.
A client that has stopped reading or has disconnected is dropped and its requests are aborted.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, Self

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

from bloomery.engine.adapter_catalog import NamedAdapter
from bloomery.errors import InvalidRequest, RequestFailed
from bloomery.messages import EngineRequest, TokenOutput
from bloomery.sampling import SamplingParams, build_requests
from bloomery.server.errors import (
    ClientDisconnected,
    ClientStalled,
    DeadlineExceeded,
    HttpErrorInfo,
)
from bloomery.server.limits import AdmissionPermit
from bloomery.server.schema import encode_json
from bloomery.server.service import HttpCall, PlannedResponse, ResponsePlan, TokenizedPrompt
from bloomery.text.outputs import CompletionDelta, CompletionState, RequestState

DONE_EVENT = b"data: [DONE]\n\n"
KEEPALIVE_COMMENT = b": keep-alive\n\n"
EVENT_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


@dataclass(frozen=True)
class GenerationInput:
    """A prompt and how to answer it."""

    prompt: TokenizedPrompt
    params: SamplingParams
    response: ResponsePlan | None = None  # how to parse the answer; None: all of it is content
    grammar: str = ""  # what the answer must match; empty: anything
    adapter: NamedAdapter | None = None  # None: that of the call

    @classmethod
    def from_plan(cls, planned: PlannedResponse, params: SamplingParams) -> Self:
        return cls(planned.prompt, params, planned.plan, planned.grammar)


class ResponseFormatter(Protocol):
    """How an API writes an answer: as one response, or as events."""

    def full_response(self) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        ...

    def delta_events(self, prompt_index: int, delta: CompletionDelta) -> bytes:
        """The events of one new token; empty if there is nothing to show yet."""
        ...

    def final_events(self) -> bytes:
        """The events after the last token."""
        ...


class GenerationJob:
    """The generations of one HTTP request: one for each prompt, with n sequences each."""

    def __init__(self, call: HttpCall, permit: AdmissionPermit, inputs: Sequence[GenerationInput]):
        self.call = call
        self.permit = permit
        self.inputs = inputs
        self.timings = call.timings
        self.adapters = [entry.adapter or call.adapter for entry in inputs]
        self.generations = [self._create_state(index, entry) for index, entry in enumerate(inputs)]
        call.sampling_params = inputs[0].params
        # Whether only the prompt is returned. The one token that a step must sample is not shown.
        self.hides_output = False
        self.cached_tokens = [0] * len(inputs)  # prefix hit of each prompt
        self.last_token_times: dict[str, float] = {}  # by engine request id

    def _create_state(self, index: int, entry: GenerationInput) -> RequestState:
        """Build the engine requests of one prompt, and the state that collects their outputs."""
        service = self.call.service
        adapter = self.adapters[index]
        try:
            requests = build_requests(
                entry.params,
                entry.prompt.ids,
                id=f"{self.call.unique_id}-{index}",
                entropy=secrets.randbits(64),
                vocab_size=service.capacity.vocab,
                max_model_len=service.capacity.max_model_len,
                eos_ids=service.tokenizer.eos_ids,
                encode=lambda word: service.tokenizer.encode(word, add_special=False),
                cache_salt=self.call.tenant,
                tenant=self.call.tenant,
                grammar=entry.grammar,
                system_length=entry.prompt.system_length,
                lora=adapter.engine_name if adapter else "",
                lora_path=adapter.path if adapter else "",
            )
        except InvalidRequest as error:
            if len(self.inputs) > 1 and error.field == "prompt":
                error.field = f"prompt[{index}]"
            raise
        return RequestState(
            requests[0].id,
            entry.prompt.text,
            entry.params,
            requests,
            service.tokenizer,
            None if entry.response is None else entry.response.create_parser,
        )

    # ---- running ---------------------------------------------------------------------------

    async def respond(
        self,
        formatter: ResponseFormatter,
        stream: bool | None,
        format_error: Callable[[HttpErrorInfo], bytes] | None = None,
    ) -> ASGIApp:
        """Return the answer as an event stream if `stream` is true, else as one JSON response."""
        if stream:
            return self.event_response(formatter, format_error=format_error)
        await self.run()
        return self.call.json_response(formatter.full_response())

    async def run(self) -> None:
        """Generate to the end, unless the client disconnects or the deadline passes."""
        watch = DisconnectWatch(self.call.receive, self.call.deadline)
        async with watch, aclosing(self.deltas()) as deltas:
            async for _ in deltas:
                pass

    def event_response(
        self,
        formatter: ResponseFormatter,
        headers: Mapping[str, str] | None = None,
        format_error: Callable[[HttpErrorInfo], bytes] | None = None,
        keepalive: bytes = KEEPALIVE_COMMENT,
    ) -> EventStreamResponse:
        """An event stream. `format_error` writes an error that comes after the first event.

        By default such an error is an event with the body that the API has for any error.
        `keepalive` is sent while the stream is silent; with b"" nothing is.
        """
        call = self.call
        limits = call.service.limits

        def error_event(error: Exception) -> bytes:
            info = call.record_failure(error)
            if format_error is not None:
                return format_error(info)
            _, body = call.error_formatter(info, call.request_id)
            return format_event(body)

        return EventStreamResponse(
            self.events(formatter),
            error_event,
            deadline=call.deadline,
            keepalive_seconds=limits.keepalive_seconds,
            stall_seconds=limits.stall_seconds,
            headers=EVENT_STREAM_HEADERS | call.warning_headers | dict(headers or {}),
            keepalive=keepalive,
        )

    async def events(self, formatter: ResponseFormatter) -> AsyncGenerator[bytes, None]:
        """Yield one event per token. Tokens that arrive together are written together."""
        data = b""
        async with aclosing(self.deltas()) as deltas:
            async for index, delta, more_follows in deltas:
                data += formatter.delta_events(index, delta)
                if data and not more_follows:
                    yield data
                    data = b""
        data += formatter.final_events()
        if data:
            yield data

    async def deltas(self) -> AsyncGenerator[tuple[int, CompletionDelta, bool], None]:
        """Yield (prompt index, delta, whether the next delta follows at once) for each token.

        Closing the generator aborts the requests that have not finished.
        """
        service = self.call.service
        prompt_index_of = {
            request_id: index
            for index, generation in enumerate(self.generations)
            for request_id in generation.completions
        }
        self._submit()
        async with aclosing(service.backend.stream(self.requests)) as outputs:
            async for output in outputs:
                index = prompt_index_of[output.request]
                generation = self.generations[index]
                if generation.completions[output.request].finish_reason is not None:
                    continue  # a stop string ended it while this output was on its way
                if output.finish in ("error", "abort", "deadline"):
                    raise service.error_for(output, self.permit)
                self._record_output(index, output)
                end = output.position + len(output.ids)
                for part in _split_by_token(output):
                    delta, must_abort = generation.add_output(part)
                    if delta is None:
                        break
                    finished = delta.finish_reason is not None
                    yield index, delta, part.position + 1 < end and not finished
                    if finished and self.finished:
                        self._record_finish()
                        return
                    if must_abort:
                        service.backend.abort(output.request)
        raise RequestFailed("the engine's output ended before the answer did")

    def _submit(self) -> None:
        """Count the prompts as waiting, and check that an engine will take them."""
        service = self.call.service
        requests = self.requests
        self.permit.enqueue(
            sum(len(request.prompt) for request in requests),
            service.max_waiting_tokens,
            service.prompt_rate,
            lambda: service.abort(requests),
        )
        error = service.engine_error()
        if error is not None:
            raise error
        names = [adapter.name for adapter in self.adapters if adapter is not None]
        service.metrics.adapters.open(names)
        self.call.cleanup.callback(service.metrics.adapters.close, names)
        self.timings.submitted = time.monotonic()
        lengths = [(len(request.prompt), request.max_tokens) for request in requests]
        service.metrics.observe_submit(self.timings, lengths, self.inputs[0].params.n)

    def _record_output(self, index: int, output: TokenOutput) -> None:
        now = time.monotonic()
        metrics = self.call.service.metrics
        timings = self.timings
        previous = self.last_token_times.get(output.request)
        self.last_token_times[output.request] = now
        if previous is None and output.request == next(iter(self.generations[index].completions)):
            self.cached_tokens[index] = output.cached
        if not timings.first_token:
            timings.first_token = now
            timings.queue_seconds = output.queued
            self.permit.mark_started()
            metrics.observe_first_token(timings, self.num_prompt_tokens, output.cached)
        gap_seconds = None if previous is None else now - previous
        metrics.observe_tokens(len(output.ids), gap_seconds, now)

    def _record_finish(self) -> None:
        timings = self.timings
        timings.last_token = time.monotonic()
        reasons = [answer.finish_reason or "" for answer in self.all_answers]
        lengths = [len(answer.token_ids) for answer in self.all_answers]
        metrics = self.call.service.metrics
        metrics.observe_finish(timings, reasons, lengths)
        for adapter, generation in zip(self.adapters, self.generations, strict=True):
            if adapter is not None:
                answers = generation.completions.values()
                num_tokens = sum(len(answer.token_ids) for answer in answers)
                metrics.adapters.observe_answer(
                    adapter.name, len(generation.prompt_ids), num_tokens
                )
        inference_seconds = max(timings.last_token - timings.started, 1e-6)
        self.call.log_fields |= {
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": sum(self.cached_tokens),
            "tokens": self.num_output_tokens,
            "queue": round(timings.queue_seconds, 4),
            "ttft": round(timings.first_token - timings.arrived, 4),
            "per_second": round(self.num_output_tokens / inference_seconds, 1),
            "finish": reasons[0],
        }

    # ---- results ---------------------------------------------------------------------------

    @property
    def all_answers(self) -> list[CompletionState]:
        """All generated sequences, including those that best_of will leave out."""
        return [
            answer for generation in self.generations for answer in generation.completions.values()
        ]

    @property
    def best_answers(self) -> list[CompletionState]:
        """The answers to return: n of each prompt, one prompt after the other."""
        return [
            answer for generation in self.generations for answer in generation.select_completions()
        ]

    @property
    def requests(self) -> list[EngineRequest]:
        return [answer.request for answer in self.all_answers]

    @property
    def finished(self) -> bool:
        return all(generation.finished for generation in self.generations)

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counts once, however many answers it has."""
        return sum(len(generation.prompt_ids) for generation in self.generations)

    @property
    def num_output_tokens(self) -> int:
        if self.hides_output:
            return 0
        return sum(len(answer.token_ids) for answer in self.all_answers)

    @property
    def num_reasoning_tokens(self) -> int:
        parsed_answers = [answer.parsed for answer in self.all_answers]
        return sum(parsed.reasoning_tokens for parsed in parsed_answers if parsed is not None)

    def openai_usage(self, num_unsent: int = 0) -> dict[str, Any]:
        """The usage so far, less `num_unsent` output tokens that the client has not seen yet."""
        num_prompt = self.num_prompt_tokens
        num_output = self.num_output_tokens - num_unsent
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens)},
        }
        if any(entry.response is not None for entry in self.inputs):
            num_reasoning = min(self.num_reasoning_tokens, num_output)
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return usage


def _split_by_token(output: TokenOutput) -> Sequence[TokenOutput]:
    """Split an output with several tokens into one output per token."""
    last = len(output.ids) - 1
    if last <= 0:
        return (output,)
    # Built by hand: dataclasses.replace takes many times as long, and a server that lags behind
    # its engine splits many outputs.
    return [
        TokenOutput(
            output.request,
            output.position + i,
            (token_id,),
            output.logprobs[i : i + 1],
            () if i else output.prompt_logprobs,
            output.cached,
            output.finish if i == last else None,
            output.error,
            output.queued,
        )
        for i, token_id in enumerate(output.ids)
    ]


# ---- server-sent events --------------------------------------------------------------------


def format_event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event with JSON data."""
    event = b"data: " + encode_json(data) + b"\n\n"
    if name is None:
        return event
    return b"event: " + name.encode() + b"\n" + event


class DisconnectWatch:
    """A context that cancels its body at the deadline, on a disconnect, or when `end` is called.

    On exit it then raises DeadlineExceeded, ClientDisconnected or the exception given to `end`.
    """

    def __init__(self, receive: Receive, deadline: float):
        self._receive = receive
        self._timeout = asyncio.timeout_at(deadline)
        self._reason: Exception | None = None  # None: the deadline

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._listener = asyncio.create_task(self._wait_for_disconnect())
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._listener.cancel()
        try:
            await self._timeout.__aexit__(*error)
        except TimeoutError:
            raise self._reason or DeadlineExceeded() from None

    def end(self, reason: Exception) -> None:
        if not self._timeout.expired():
            self._reason = reason
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.end(ClientDisconnected())


class EventStreamResponse:
    """An ASGI response that sends events as they come.

    The response head is sent with the first event or keep-alive comment, so an earlier error can
    still have a status of its own. A later error becomes an event, and the stream ends there.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        error_event: Callable[[Exception], bytes],
        *,
        deadline: float,
        keepalive_seconds: float,
        stall_seconds: float,
        headers: Mapping[str, str],
        keepalive: bytes = KEEPALIVE_COMMENT,
    ):
        self.keepalive = keepalive
        self.events = events
        self.error_event = error_event
        self.deadline = deadline
        self.keepalive_seconds = keepalive_seconds
        self.stall_seconds = stall_seconds
        self.headers = MutableHeaders(dict(headers))
        self.status_code = 200
        self.started = False
        self.is_sending = False
        self.last_activity = 0.0  # when the last write began or ended
        self.keepalive_task: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.send = send
        self.loop = asyncio.get_running_loop()
        self.last_activity = self.loop.time()
        last_event = b""
        watch = DisconnectWatch(receive, self.deadline)
        try:
            async with watch, aclosing(self.events) as events:
                self._schedule_check(watch)
                async for data in events:
                    await self._write(data)
        except ClientDisconnected:
            raise
        except Exception as error:
            if not self.started:
                raise
            last_event = self.error_event(error)
        finally:
            self.timer.cancel()
            if self.keepalive_task is not None:
                self.keepalive_task.cancel()
        try:
            async with asyncio.timeout(self.stall_seconds):
                await send({"type": "http.response.body", "body": last_event, "more_body": False})
        except TimeoutError:
            raise ClientStalled from None

    async def _write(self, data: bytes) -> None:
        if not self.started:
            self.started = True
            start = {"type": "http.response.start", "status": self.status_code}
            await self.send({**start, "headers": self.headers.raw})
        self.is_sending = True
        self.last_activity = self.loop.time()
        if data:
            await self.send({"type": "http.response.body", "body": data, "more_body": True})
        self.is_sending = False
        self.last_activity = self.loop.time()

    def _schedule_check(self, watch: DisconnectWatch) -> None:
        """Set the stream's only timer. One timer per stream is cheaper than one per token."""
        now = self.loop.time()
        max_silence = self.stall_seconds if self.is_sending else self.keepalive_seconds
        check_time = min(
            self.last_activity + max_silence,
            now + self.keepalive_seconds,
            now + self.stall_seconds,
        )
        self.timer = self.loop.call_at(max(check_time, now + 0.001), self._check_activity, watch)

    def _check_activity(self, watch: DisconnectWatch) -> None:
        """Drop a client that has stopped reading; send a keep-alive on a silent stream."""
        silent_seconds = self.loop.time() - self.last_activity
        if self.is_sending and silent_seconds >= self.stall_seconds:
            watch.end(ClientStalled())
            return
        if not self.is_sending and silent_seconds >= self.keepalive_seconds:
            self.keepalive_task = self.loop.create_task(self._write(self.keepalive))
            self.last_activity = self.loop.time()
        self._schedule_check(watch)
