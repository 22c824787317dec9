"""A model for tests of the server: the ghost's cache, a vocabulary of words, log-probabilities, seeds that matter.

What it says is a hash of the prefix read back from the cache, so the same request has the same answer on every machine,
and a wrong block, a lost token or a mixed-up stream changes it.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from zlib import crc32

from tokenizers import Tokenizer as Backend

from bloomery.engine.blocks import Blocks
from bloomery.engine.loop import Loop
from bloomery.engine.scheduler import Scheduler
from bloomery.messages import (
    EngineCapacity,
    ScheduledRequest,
    EngineRequest,
    SampledTokens,
    ResolvedSampling,
    NewRequestData,
    EngineStats,
    EngineStatus,
    ScheduledStep,
    StepOutput,
    TokenLogprob,
    TokenOutput,
)
from bloomery.text.tokenizer import Extras, Tokenizer
from tests.ghost.ghost import Ghost

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' and loop.first %}"
    "{{ raise_exception('the first word is not the assistant\\'s') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def words() -> Tokenizer:
    """A byte-level BPE of 406 tokens, trained on a few sentences about iron; golden answers are in its words."""
    backend = Backend.from_file(str(Path(__file__).parent / "words.json"))
    named = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "pad_token": SPECIAL[0]}
    return Tokenizer(backend, Extras(1, (2,), named, {"default": TEMPLATE}))


class Speaker(Ghost):
    """An executor that says words of the vocabulary. Some of them are halves of characters."""

    def __init__(self, block_size: int, tokenizer: Tokenizer):
        super().__init__(block_size)
        known = range(len(SPECIAL), tokenizer.vocab_size)
        self.words = [id for id in known if len(tokenizer.token_bytes(id)) > 2] + tokenizer.encode(
            "火🔥é", add_special=False
        )
        self.end = tokenizer.eos_ids[0]
        self.starts: dict[int, NewRequestData] = {}

    def run(self, step: ScheduledStep) -> StepOutput:
        self.steps += 1
        for sequence in step.finished:
            del self.rows[sequence], self.starts[sequence]
        for item in step.requests:
            if item.new_request is not None:
                self.starts[item.sequence] = item.new_request
            self.write(item)
        return StepOutput(tuple(self.speak(item) for item in step.requests))

    def speak(self, item: ScheduledRequest) -> SampledTokens:
        row = self.rows[item.sequence]
        start = self.starts[item.sequence]
        prompt: list[TokenLogprob] = []
        if start.sampling.prompt_logprobs is not None:
            for position in range(
                item.start + 1, min(item.start + item.count + 1, start.prompt_len)
            ):
                prompt.append(
                    self.scored(
                        row.tokens[:position], row.tokens[position], start.sampling.prompt_logprobs
                    )
                )
        if not item.samples:
            return SampledTokens(item.sequence, prompt_logprobs=tuple(prompt))
        prefix = self.read(row, row.tokens, item.start + item.count)
        if start.pooling is not None:
            return SampledTokens(item.sequence, embedding=self.embedded(prefix, start.pooling))
        token = self.choose(prefix, start.sampling, start.stop_ids, len(prefix) - start.prompt_len)
        row.tokens.append(token)
        asked = start.sampling.logprobs
        return SampledTokens(
            item.sequence,
            (token,),
            () if asked is None else (self.scored(prefix, token, asked),),
            tuple(prompt),
        )

    def choose(
        self, prefix: list[int], sampling: ResolvedSampling, stop_ids: Sequence[int], produced: int
    ) -> int:
        number = hashed(prefix, sampling.seed if sampling.temperature else 0)
        choice = sampling.allowed_token_ids or self.words
        if (
            number % 29 == 0
            and self.end in stop_ids
            and produced >= sampling.min_tokens
            and not sampling.allowed_token_ids
        ):
            return self.end
        return choice[number // 29 % len(choice)]

    def scored(self, prefix: list[int], token: int, top: int) -> TokenLogprob:
        number = hashed(prefix, token)
        others = [self.words[(number // 7 + i) % len(self.words)] for i in range(top + 1)]
        ranked = [token, *(other for other in others if other != token)][:top]
        best = -(number % 1000) / 1000 - 0.125
        return TokenLogprob(
            token, best, 1, tuple((id, best - i / 2) for i, id in enumerate(ranked))
        )

    def embedded(self, prefix: list[int], pooling: str) -> tuple[float, ...]:
        """Four numbers: hashes of the last token's prefix, or the mean of those of every position."""
        states = [
            [hashed(prefix[:end], seed) / 2**32 - 0.5 for seed in range(4)]
            for end in range(1 if pooling == "mean" else len(prefix), len(prefix) + 1)
        ]
        pooled = [sum(column) for column in zip(*states, strict=True)]
        length = sum(number**2 for number in pooled) ** 0.5
        return tuple(number / length for number in pooled)


def hashed(prefix: list[int], seed: int) -> int:
    return crc32(array("I", prefix).tobytes() + seed.to_bytes(8, "little"))


class InProcess:
    """A Backend whose engine takes its steps between the server's own doings, `pace` seconds apart."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        pace: float = 0.0,
        blocks: int = 512,
        context: int = 512,
        batch: int = 8,
    ):
        self.capacity: EngineCapacity | None = EngineCapacity(
            blocks, 8, batch, 64, context, tokenizer.vocab_size
        )
        self.blocks = Blocks(blocks, 8)
        self.scheduler = Scheduler(self.blocks, 64, batch)
        self.loop = Loop(self.scheduler, Speaker(8, tokenizer))
        self.status = EngineStatus("ready", 1.0)
        self.pace = pace
        self.steps = 0
        self.hold: int | None = None  # no more steps than this until it is None
        self.queues: dict[str, asyncio.Queue[TokenOutput]] = {}
        self.runner: asyncio.Task[None] | None = None
        self.poison: int | None = None  # a token whose appearance in a prompt fails the request
        self.seen: list[EngineRequest] = []
        self.watchers: list[Callable[[EngineStats, EngineStats], None]] = []

    def observe(self, watcher: Callable[[EngineStats, EngineStats], None]) -> None:
        self.watchers.append(watcher)

    @property
    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        used = self.blocks.count - self.blocks.available
        return EngineStats(
            len(scheduler.running), len(scheduler.waiting), used, self.blocks.count, self.steps
        )

    async def stream(self, requests: Sequence[EngineRequest]) -> AsyncGenerator[TokenOutput, None]:
        queue: asyncio.Queue[TokenOutput] = asyncio.Queue()
        waiting = {request.id for request in requests}
        for request in requests:
            self.seen.append(request)
            self.queues[request.id] = queue
            self.loop.add(request)
        if self.runner is None or self.runner.done():
            self.runner = asyncio.create_task(self.run())
        try:
            while waiting:
                news = await queue.get()
                if news.finish is not None:
                    waiting.discard(news.request)
                yield news
        finally:
            for request in requests:
                self.queues.pop(request.id, None)
                self.loop.abort(request.id)

    async def run(self) -> None:
        while self.loop.busy:
            await asyncio.sleep(self.pace)
            while self.hold is not None and self.steps >= self.hold:
                await asyncio.sleep(0.005)
            before = self.stats
            for news in self.loop.step():
                if queue := self.queues.get(news.request):
                    queue.put_nowait(self.spoiled(news))
            self.steps += 1
            for watcher in self.watchers:
                watcher(before, self.stats)

    def abort(self, id: str) -> bool:
        if queue := self.queues.get(id):
            queue.put_nowait(TokenOutput(id, 0, finish="abort"))
        return self.loop.abort(id)

    def spoiled(self, news: TokenOutput) -> TokenOutput:
        """A request that was told to fail does so at its third token."""
        request = next((one for one in reversed(self.seen) if one.id == news.request), None)
        if request is not None and self.poison in request.prompt and news.position == 2:
            return TokenOutput(
                news.request,
                news.position,
                finish="error",
                error="cosmic ray at 0xdeadbeef in /usr/lib/x.py",
            )
        return news
