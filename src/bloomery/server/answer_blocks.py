"""An answer as blocks: reasoning, text and tool calls, in the order in which they are generated.

Streamed and whole answers are built by the same calls, so they agree. Each API writes the blocks in
its own form: OpenAI's Responses as items, Anthropic as content blocks, Ollama as message fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from bloomery.messages import TokenLogprob
from bloomery.server.generation import DisconnectWatch, GenerationJob, ResponseFormatter
from bloomery.text.outputs import CompletionDelta

BlockKind = Literal["reasoning", "text", "call"]


@dataclass
class AnswerBlock:
    """One block: its text so far, which for a tool call is the arguments as JSON."""

    kind: BlockKind
    index: int
    name: str = ""  # of the tool
    id: str = ""  # of the call
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the text's tokens
    complete: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call; empty if the call was cut off."""
        try:
            arguments = json.loads(self.text or "{}")
        except ValueError:
            return {}
        return arguments if isinstance(arguments, dict) else {"value": arguments}


class BlockChange(NamedTuple):
    """A block was opened, has grown by `text`, or was closed."""

    action: Literal["open", "delta", "close"]
    block: AnswerBlock
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()


class AnswerBlocks:
    """Collects the blocks of one answer from its deltas."""

    def __init__(self, is_parsed: bool):
        self.is_parsed = is_parsed  # else the whole answer is one block of text
        self.blocks: list[AnswerBlock] = []
        self._logprobs: list[TokenLogprob] = []  # of tokens that have shown no text yet
        self._whitespace = ""  # held back before the text of a block

    def add_delta(self, delta: CompletionDelta) -> list[BlockChange]:
        """The changes that a delta makes."""
        self._logprobs += delta.logprobs
        if not self.is_parsed:
            return list(self._add_text("text", delta.text))
        changes: list[BlockChange] = []
        for event in delta.events:
            match event.kind:
                case "reasoning":
                    changes += self._add_parsed("reasoning", event.text)
                case "content":
                    changes += self._add_parsed("text", event.text)
                case "call":
                    changes += self._open("call", event.name, event.id)
                case "arguments":
                    changes += self._add_text("call", event.text)
                case "call_end":
                    changes += self._close_last(complete=True)
        return changes

    def finish(self, complete: bool) -> list[BlockChange]:
        """The last changes. An answer without any block gets an empty text."""
        changes: list[BlockChange] = []
        if not self.blocks:
            changes += self._open("text")
        changes += self._close_last(complete)
        return changes

    def _add_parsed(self, kind: BlockKind, text: str) -> Iterator[BlockChange]:
        """Add text to a parsed answer, in which white space alone does not open a block."""
        is_open = self._open_block(kind) is not None
        if not is_open:
            text = self._whitespace + text
            self._whitespace = ""
            if not text.strip():
                self._whitespace = text
                return
            text = text.lstrip("\n")
        if text:
            yield from self._add_text(kind, text)

    def _add_text(self, kind: BlockKind, text: str) -> Iterator[BlockChange]:
        block = self._open_block(kind)
        if block is None:
            yield from self._open(kind)
            block = self.blocks[-1]
        if not text:
            return
        logprobs = self._logprobs if kind == "text" else []
        self._logprobs = []
        block.text += text
        block.logprobs += logprobs
        yield BlockChange("delta", block, text, logprobs)

    def _open_block(self, kind: BlockKind) -> AnswerBlock | None:
        if self.blocks and self.blocks[-1].kind == kind and not self.blocks[-1].complete:
            return self.blocks[-1]
        return None

    def _open(self, kind: BlockKind, name: str = "", id: str = "") -> Iterator[BlockChange]:
        yield from self._close_last(complete=True)
        block = AnswerBlock(kind, len(self.blocks), name, id)
        self.blocks.append(block)
        yield BlockChange("open", block)

    def _close_last(self, complete: bool) -> Iterator[BlockChange]:
        self._whitespace = ""
        if self.blocks and not self.blocks[-1].complete:
            block = self.blocks[-1]
            if not self.is_parsed:
                block.logprobs += self._logprobs  # such as that of the end of sequence
            block.complete = complete
            yield BlockChange("close", block)


async def collect_answer(job: GenerationJob, formatter: ResponseFormatter) -> dict[str, Any]:
    """The whole answer, built by the code that streams it."""
    watch = DisconnectWatch(job.call.receive, job.call.deadline)
    async with watch, aclosing(job.deltas()) as deltas:
        async for index, delta, _ in deltas:
            formatter.delta_events(index, delta)
    return formatter.full_response()
