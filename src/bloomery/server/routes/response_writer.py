"""Writes an answer as OpenAI's Responses API does: as items of a response, or as typed events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from bloomery.messages import TokenLogprob
from bloomery.server.answer_blocks import AnswerBlock, AnswerBlocks, BlockChange
from bloomery.server.conversations import StoredConversation, StoredResponse
from bloomery.server.errors import HttpErrorInfo
from bloomery.server.generation import GenerationJob, format_event
from bloomery.server.routes.openai import format_chat_logprobs
from bloomery.server.routes.response_items import CustomInputStream, ResponseBody, ResponseTools
from bloomery.text.outputs import CompletionDelta, CompletionState


class ResponseObjectFormatter:
    """Writes one response. Its items are built by the same steps with and without streaming."""

    def __init__(
        self, job: GenerationJob, body: ResponseBody, tools: ResponseTools, stored: StoredResponse
    ):
        self.job = job
        self.body = body
        self.tools = tools
        self.stored = stored
        self.answer_blocks = AnswerBlocks(job.inputs[0].response is not None)
        self.custom_inputs: dict[int, CustomInputStream] = {}  # by block
        self.custom_texts: dict[int, str] = {}  # by block
        self.response_id = f"resp_{job.call.unique_id}"
        self.sequence_number = -1  # of the last event
        self.is_created = False
        self.is_in_progress = False
        self.is_finished = False

    @property
    def answer(self) -> CompletionState:
        return self.job.best_answers[0]

    # ---- the steps of a response -------------------------------------------------------------

    def queue(self) -> bytes:
        """The first events of a background response, which does not run yet."""
        response = self._response("queued")
        events = self._event("response.created", response=response)
        self.is_created = True
        return events + self._event("response.queued", response=response)

    def delta_events(self, prompt_index: int, delta: CompletionDelta) -> bytes:
        events = self._opening_events()
        for change in self.answer_blocks.add_delta(delta):
            events += self._change_events(change)
        return events

    def full_response(self) -> dict[str, Any]:
        """The response, also stored unless the client asked not to store it."""
        self._finish()
        return self.stored.response

    def final_events(self) -> bytes:
        events = self._finish()
        response = self.stored.response
        return events + self._event(f"response.{response['status']}", response=response)

    def _finish(self) -> bytes:
        """Close the last item and build the final response."""
        if self.is_finished:
            return b""
        self.is_finished = True
        was_cut = self.answer.finish_reason == "length"
        events = b""
        for change in self.answer_blocks.finish(complete=not was_cut):
            events += self._change_events(change)
        self._response(
            status="incomplete" if was_cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if was_cut else None,
            usage=self._usage(),
            completed_at=None if was_cut else int(time.time()),
        )
        call = self.job.call
        if self.stored.conversation_object is not None:
            self._extend_conversation(self.stored.conversation_object)
        if self.body.store is not False:
            call.service.conversations.put((call.tenant, self.response_id), self.stored)
        return events

    def _extend_conversation(self, conversation: StoredConversation) -> None:
        """Add the items of the request and of the answer, unless it has been deleted meanwhile."""
        call = self.job.call
        key = (call.tenant, conversation.conversation["id"])
        if call.service.stored_conversations.get(key) is conversation:
            conversation.items += [
                {"status": "completed", **item} for item in self.stored.input_items
            ]
            conversation.items += self.stored.response["output"]
            call.service.stored_conversations.put(key, conversation)

    def error_event(self, error: HttpErrorInfo) -> bytes:
        """The last events of a stream that failed; clients read one or the other."""
        events = self.fail(error)
        return events + self._event(
            "error", code=error.code, message=error.message, param=error.param
        )

    def fail(self, error: HttpErrorInfo) -> bytes:
        """The event that says that the response has failed."""
        code = error.code or "server_error"
        response = self._response("failed", error={"code": code, "message": error.message})
        return self._event("response.failed", response=response)

    # ---- events ------------------------------------------------------------------------------

    def _event(self, event_type: str, **data: Any) -> bytes:
        self.sequence_number += 1
        content = {"type": event_type, "sequence_number": self.sequence_number, **data}
        return format_event(content, event_type)

    def _opening_events(self) -> bytes:
        if self.is_in_progress:
            return b""
        self.is_in_progress = True
        response = self._response("in_progress")
        events = b""
        if not self.is_created:
            events = self._event("response.created", response=response)
        return events + self._event("response.in_progress", response=response)

    def _change_events(self, change: BlockChange) -> bytes:
        match change.action:
            case "open":
                return self._open_events(change.block)
            case "delta":
                return self._delta_events(change)
            case "close":
                return self._close_events(change.block)

    def _open_events(self, block: AnswerBlock) -> bytes:
        item = self._item(block, "in_progress")
        events = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            part = self._part(block, "", [])
            location = self._part_location(block)
            events += self._event("response.content_part.added", **location, part=part)
        return events

    def _delta_events(self, change: BlockChange) -> bytes:
        block = change.block
        match block.kind:
            case "text":
                return self._event(
                    "response.output_text.delta",
                    **self._part_location(block),
                    delta=change.text,
                    logprobs=self._logprobs(change.logprobs),
                )
            case "reasoning":
                location = self._part_location(block)
                return self._event("response.reasoning_text.delta", **location, delta=change.text)
        location = self._item_location(block)
        if block.name not in self.tools.custom_names:
            event_type = "response.function_call_arguments.delta"
            return self._event(event_type, **location, delta=change.text)
        reader = self.custom_inputs.setdefault(block.index, CustomInputStream())
        text = reader.feed(change.text)
        if not text:
            return b""
        self.custom_texts[block.index] = self.custom_texts.get(block.index, "") + text
        return self._event("response.custom_tool_call_input.delta", **location, delta=text)

    def _close_events(self, block: AnswerBlock) -> bytes:
        status = "completed" if block.complete else "incomplete"
        item = self._item(block, status)
        if block.kind == "call":
            events = self._call_done_event(block, item)
        else:
            location = self._part_location(block)
            part = item["content"][0]
            done: dict[str, Any] = {"text": block.text}
            event_type = "response.reasoning_text.done"
            if block.kind == "text":
                event_type = "response.output_text.done"
                done["logprobs"] = part["logprobs"]
            events = self._event(event_type, **location, **done)
            events += self._event("response.content_part.done", **location, part=part)
        return events + self._event(
            "response.output_item.done", output_index=block.index, item=item
        )

    def _call_done_event(self, block: AnswerBlock, item: dict[str, Any]) -> bytes:
        location = self._item_location(block)
        if item["type"] == "custom_tool_call":
            event_type = "response.custom_tool_call_input.done"
            return self._event(event_type, **location, input=item["input"])
        return self._event(
            "response.function_call_arguments.done",
            **location,
            name=item["name"],
            arguments=item["arguments"],
        )

    def _item_location(self, block: AnswerBlock) -> dict[str, Any]:
        return {"item_id": self._item_id(block), "output_index": block.index}

    def _part_location(self, block: AnswerBlock) -> dict[str, Any]:
        return {**self._item_location(block), "content_index": 0}

    # ---- items -------------------------------------------------------------------------------

    def _item_id(self, block: AnswerBlock) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
        if block.name in self.tools.custom_names:
            prefix = "ctc"
        suffix = f"_{block.index}" if block.index else ""
        return f"{prefix}_{self.job.call.unique_id}{suffix}"

    def _item(self, block: AnswerBlock, status: str) -> dict[str, Any]:
        item_id = self._item_id(block)
        is_new = status == "in_progress"
        if block.kind == "call":
            return self._call_item(block, item_id, status)
        content = [] if is_new else [self._part(block, block.text, block.logprobs)]
        if block.kind == "reasoning":
            return {
                "type": "reasoning",
                "id": item_id,
                "status": status,
                "summary": [],
                "content": content,
                "encrypted_content": None,
            }
        return {
            "type": "message",
            "id": item_id,
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _call_item(self, block: AnswerBlock, item_id: str, status: str) -> dict[str, Any]:
        namespace, name = self.tools.namespaces.get(block.name, (None, block.name))
        item: dict[str, Any] = {"id": item_id, "call_id": block.id, "name": name, "status": status}
        if namespace is not None:
            item["namespace"] = namespace
        if block.name in self.tools.custom_names:
            text = self.custom_texts.get(block.index, "")
            return {"type": "custom_tool_call", **item, "input": text}
        return {"type": "function_call", **item, "arguments": block.text}

    def _part(
        self, block: AnswerBlock, text: str, logprobs: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self._logprobs(logprobs),
        }

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        if self.job.inputs[0].params.logprobs is None:
            return []
        tokenizer = self.job.call.service.tokenizer
        content: list[dict[str, Any]] = format_chat_logprobs(
            tokenizer, entries, self.body.top_logprobs or 0
        )["content"]
        return content

    # ---- the response ------------------------------------------------------------------------

    def _usage(self) -> dict[str, Any]:
        job = self.job
        num_prompt = job.num_prompt_tokens
        num_cached = sum(job.cached_tokens)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {
                "cached_tokens": num_cached,
                "cache_write_tokens": count_cache_writes(job),
            },
            "output_tokens": job.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": job.num_reasoning_tokens},
            "total_tokens": num_prompt + job.num_output_tokens,
        }

    def _response(
        self,
        status: str,
        incomplete_details: dict[str, str] | None = None,
        usage: dict[str, Any] | None = None,
        error: dict[str, str] | None = None,
        completed_at: int | None = None,
    ) -> dict[str, Any]:
        """The response as it is now, which becomes the stored one."""
        call = self.job.call
        body = self.body
        params = self.job.inputs[0].params
        blocks = self.answer_blocks.blocks
        item_statuses = ["completed" if block.complete else "incomplete" for block in blocks]
        reasoning = body.reasoning or {}
        text = body.text or {}
        self.stored.response = {
            "id": self.response_id,
            "object": "response",
            "created_at": call.created,
            "completed_at": completed_at,
            "status": status,
            "background": bool(body.background),
            "error": error,
            "incomplete_details": incomplete_details,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": call.model_name,
            "output": [self._item(*pair) for pair in zip(blocks, item_statuses, strict=True)],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": {**text, "format": text.get("format") or {"type": "text"}},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": body.user,
        }
        if self.stored.conversation_object is not None:
            conversation_id = self.stored.conversation_object.conversation["id"]
            self.stored.response["conversation"] = {"id": conversation_id}
        return self.stored.response


def count_cache_writes(job: GenerationJob) -> int:
    """Prompt tokens that this request adds to the prefix cache, which holds whole blocks."""
    block_size = job.call.service.capacity.block_size
    num_writable = sum(
        len(generation.prompt_ids) // block_size * block_size for generation in job.generations
    )
    return max(num_writable - sum(job.cached_tokens), 0)
