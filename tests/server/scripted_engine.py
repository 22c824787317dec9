"""An engine with scripted answers for tests of the server.

Its executor checks a KV cache of token ids and answers with a hash of the prefix that it reads back
from that cache. The same request has the same answer on every machine, and a wrong block, a lost
token or a mixed-up stream changes it.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from tokenizers import Tokenizer as Backend

from bloomery.engine.block_pool import BlockPool
from bloomery.engine.loop import EngineLoop
from bloomery.engine.scheduler import Scheduler
from bloomery.errors import InvalidRequest
from bloomery.messages import (
    AdapterInfo,
    AdapterRefusal,
    EngineCapacity,
    EngineRequest,
    EngineStats,
    EngineStatus,
    NewRequestData,
    SampledTokens,
    ScheduledRequest,
    ScheduledStep,
    StepOutput,
    TokenLogprob,
    TokenOutput,
    pack_top,
)
from bloomery.structured.matcher import MaskBuilder, TokenVocabulary
from bloomery.text.tokenizer import Tokenizer, TokenizerConfig
from tests.engine.fake_executor import FakeExecutor, read_version_at_once

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' and loop.first %}"
    "{{ raise_exception('the first word is not the assistant\\'s') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BLOCK_SIZE = 8
MAX_BATCHED_TOKENS = 64
MAX_LORAS = 2


def load_test_tokenizer() -> Tokenizer:
    """A byte-level BPE of 406 tokens, trained on a few sentences about iron.

    The golden answers are made of its tokens.
    """
    backend = Backend.from_file(str(Path(__file__).parent / "tokenizer.json"))
    pad, bos, eos = SPECIAL_TOKENS
    special_tokens = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    return Tokenizer(backend, TokenizerConfig(1, (2,), special_tokens, {"default": CHAT_TEMPLATE}))


class ScriptedStep(Future[StepOutput]):
    """A step of a ScriptedExecutor. It samples when it has its masks, if it needs any."""

    def __init__(self, executor: ScriptedExecutor, step: ScheduledStep):
        super().__init__()
        self.executor = executor
        self.step = step

    def provide_masks(self, masks: np.ndarray) -> None:
        """masks: [masked sequences, words] int32."""
        rows = dict(zip(self.step.masked, masks, strict=True))
        self.set_result(self.executor.finish(self.step, rows))


class ScriptedExecutor(FakeExecutor):
    """An executor whose answers are tokens of the vocabulary; some are parts of characters."""

    def __init__(self, block_size: int, tokenizer: Tokenizer):
        super().__init__(block_size)
        ordinary_ids = range(len(SPECIAL_TOKENS), tokenizer.vocab_size)
        long_ids = [id for id in ordinary_ids if len(tokenizer.token_bytes(id)) > 2]
        multibyte_ids = tokenizer.encode("火🔥é", add_special=False)
        self.answer_ids = long_ids + multibyte_ids
        self.eos_id = tokenizer.eos_ids[0]
        self.new_requests: dict[int, NewRequestData] = {}

    def submit(self, step: ScheduledStep) -> ScriptedStep:  # type: ignore[override]
        pending = ScriptedStep(self, step)
        self.begin(step)
        if not step.masked:
            pending.set_result(self.finish(step, {}))
        return pending

    def begin(self, step: ScheduledStep) -> None:
        self.num_steps += 1
        for sequence in step.finished:
            del self.rows[sequence]
            del self.new_requests[sequence]
        self.load_slots(step)
        for scheduled in step.requests:
            if scheduled.new_request is not None:
                self.new_requests[scheduled.sequence] = scheduled.new_request
            self.write(scheduled)

    def finish(self, step: ScheduledStep, masks: Mapping[int, Any]) -> StepOutput:
        """Sample; `masks` are those of sequences with a grammar."""
        samples = [
            self.sample(scheduled, masks.get(scheduled.sequence)) for scheduled in step.requests
        ]
        return StepOutput(tuple(samples))

    def sample(self, scheduled: ScheduledRequest, mask: Any = None) -> SampledTokens:
        row = self.rows[scheduled.sequence]
        request = self.new_requests[scheduled.sequence]
        end = scheduled.start + scheduled.count
        prompt_logprobs: list[TokenLogprob] = []
        num_top = request.sampling.prompt_logprobs
        if num_top is not None:
            for position in range(scheduled.start + 1, min(end + 1, request.prompt_len)):
                prefix, token = row.tokens[:position], row.tokens[position]
                prompt_logprobs.append(self.logprob(prefix, token, num_top))
        if not scheduled.samples:
            return SampledTokens(scheduled.sequence, prompt_logprobs=tuple(prompt_logprobs))
        prefix = self.read(row, row.tokens, end)
        if request.pooling is not None:
            embedding = self.embedding(prefix, request.pooling)
            return SampledTokens(scheduled.sequence, embedding=embedding)
        token = self.next_token(prefix, request)
        if mask is not None:
            token = self.allowed_token(prefix, token, mask)
        row.tokens.append(token)
        logprobs: tuple[TokenLogprob, ...] = ()
        if request.sampling.logprobs is not None:
            logprobs = (self.logprob(prefix, token, request.sampling.logprobs),)
        return SampledTokens(scheduled.sequence, (token,), logprobs, tuple(prompt_logprobs))

    def next_token(self, prefix: list[int], request: NewRequestData) -> int:
        """An answer token, or about once in 29 tokens the end of sequence where it is allowed."""
        sampling = request.sampling
        number = hash_prefix(prefix, sampling.seed if sampling.temperature else 0)
        number ^= crc32(self.device_adapters[request.lora_slot].encode())
        num_output = len(prefix) - request.prompt_len
        may_end = (
            self.eos_id in request.stop_ids
            and num_output >= sampling.min_tokens
            and not sampling.allowed_token_ids
        )
        if number % 29 == 0 and may_end:
            return self.eos_id
        candidates = sampling.allowed_token_ids or self.answer_ids
        return candidates[number // 29 % len(candidates)]

    def allowed_token(self, prefix: list[int], token: int, mask: np.ndarray) -> int:
        """The token if the mask allows it, else one that it allows."""
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        if bits[token]:
            return token
        allowed_ids = np.flatnonzero(bits)
        # The refused token depends on the seed, so the allowed one does too.
        return int(allowed_ids[hash_prefix(prefix, token) % len(allowed_ids)])

    def logprob(self, prefix: list[int], token: int, num_top: int) -> TokenLogprob:
        number = hash_prefix(prefix, token)
        num_answers = len(self.answer_ids)
        others = [self.answer_ids[(number // 7 + i) % num_answers] for i in range(num_top + 1)]
        ranked = [token, *(other for other in others if other != token)][:num_top]
        best = -(number % 1000) / 1000 - 0.125
        top = tuple((id, best - i / 2) for i, id in enumerate(ranked))
        return TokenLogprob(token, best, 1, pack_top(top))

    def embedding(self, prefix: list[int], pooling: str) -> tuple[float, ...]:
        """Four numbers: hashes of the last position's prefix, or the mean over all positions."""
        first_end = 1 if pooling == "mean" else len(prefix)
        states = [
            [hash_prefix(prefix[:end], seed) / 2**32 - 0.5 for seed in range(4)]
            for end in range(first_end, len(prefix) + 1)
        ]
        pooled = [sum(column) for column in zip(*states, strict=True)]
        norm = sum(number**2 for number in pooled) ** 0.5
        return tuple(number / norm for number in pooled)


def hash_prefix(prefix: list[int], seed: int) -> int:
    return crc32(array("I", prefix).tobytes() + seed.to_bytes(8, "little"))


class InProcessEngine:
    """A backend whose engine takes its steps in the server's event loop.

    `step_seconds` is the pause between two steps.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        step_seconds: float = 0.0,
        num_blocks: int = 512,
        max_model_len: int = 512,
        max_num_seqs: int = 8,
    ):
        self.capacity: EngineCapacity | None = EngineCapacity(
            num_blocks,
            BLOCK_SIZE,
            max_num_seqs,
            MAX_BATCHED_TOKENS,
            max_model_len,
            tokenizer.vocab_size,
        )
        self.block_pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.block_pool, MAX_BATCHED_TOKENS, max_num_seqs, max_loras=MAX_LORAS
        )
        self.tokenizer = tokenizer
        self.executor = self.create_executor()
        self.loop = EngineLoop(
            self.scheduler,
            self.executor,
            create_mask_builder=self.create_mask_builder,
            max_cpu_loras=MAX_LORAS + 1,
        )
        assert self.loop.adapter_store is not None
        self.loop.adapter_store.read_version = read_version_at_once
        self.status = EngineStatus("ready", 1.0)
        self.step_seconds = step_seconds
        self.num_steps = 0
        self.max_steps: int | None = None  # the engine pauses after this many; None: no limit
        self.queues: dict[str, asyncio.Queue[TokenOutput]] = {}
        self.runner: asyncio.Task[None] | None = None
        self.poison_token: int | None = None  # a request with it in its prompt fails
        self.received: list[EngineRequest] = []
        self.step_observers: list[Callable[[EngineStats, EngineStats], None]] = []

    def create_executor(self) -> ScriptedExecutor:
        return ScriptedExecutor(BLOCK_SIZE, self.tokenizer)

    def create_mask_builder(self) -> MaskBuilder:
        vocabulary: Future[TokenVocabulary] = Future()
        vocabulary.set_result(TokenVocabulary(self.tokenizer))
        return MaskBuilder(vocabulary, self.tokenizer.vocab_size, num_threads=1)

    @property
    def is_idle(self) -> bool:
        """No request runs, and no sequence holds a block of the KV cache."""
        pool = self.block_pool
        return not self.loop.busy and pool.num_free_blocks == pool.num_blocks

    @property
    def num_restarts(self) -> int:
        return 0

    def add_step_observer(self, observer: Callable[[EngineStats, EngineStats], None]) -> None:
        self.step_observers.append(observer)

    @property
    def stats(self) -> EngineStats:
        pool = self.block_pool
        slots = tuple(slot.adapter for slot in self.scheduler.adapter_slots.slots)
        return EngineStats(
            len(self.scheduler.running),
            len(self.scheduler.waiting),
            pool.num_blocks - pool.num_free_blocks,
            pool.num_blocks,
            self.num_steps,
            kv_used_by_group=tuple(pool.used_by_group),
            adapter_slots=slots if any(slots) else (),
        )

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        self.loop.load_adapter(name, path)
        while self.loop.busy:
            await self.take_step()
        (answer,) = [given for given in self.loop.take_adapter_answers() if given.name == name]
        if isinstance(answer, AdapterRefusal):
            raise InvalidRequest(answer.error, "lora_path")
        return answer

    def unload_adapter(self, name: str) -> None:
        self.loop.unload_adapter(name)

    async def stream(self, requests: Sequence[EngineRequest]) -> AsyncGenerator[TokenOutput, None]:
        queue: asyncio.Queue[TokenOutput] = asyncio.Queue()
        open_ids = {request.id for request in requests}
        for request in requests:
            self.received.append(request)
            self.queues[request.id] = queue
            self.loop.add(request)
        if self.runner is None or self.runner.done():
            self.runner = asyncio.create_task(self.run())
        try:
            while open_ids:
                output = await queue.get()
                if output.finish is not None:
                    open_ids.discard(output.request)
                yield output
        finally:
            for request in requests:
                self.queues.pop(request.id, None)
                self.loop.abort(request.id)

    async def run(self) -> None:
        while self.loop.busy:
            await self.take_step()

    async def take_step(self) -> None:
        await asyncio.sleep(self.step_seconds)
        while self.max_steps is not None and self.num_steps >= self.max_steps:
            await asyncio.sleep(0.005)
        before = self.stats
        for output in self.loop.step():
            if queue := self.queues.get(output.request):
                queue.put_nowait(self.fail_if_poisoned(output))
        self.num_steps += 1
        for observer in self.step_observers:
            observer(before, self.stats)

    def abort(self, id: str) -> bool:
        if queue := self.queues.get(id):
            queue.put_nowait(TokenOutput(id, 0, finish="abort"))
        return self.loop.abort(id)

    def fail_if_poisoned(self, output: TokenOutput) -> TokenOutput:
        """A request with the poison token in its prompt fails at its third token.

        If its answer is shorter, it fails at its last token.
        """
        newest_first = reversed(self.received)
        request = next((sent for sent in newest_first if sent.id == output.request), None)
        is_due = output.position == 2 or output.finish is not None
        if request is None or self.poison_token not in request.prompt or not is_due:
            return output
        error = "cosmic ray at 0xdeadbeef in /usr/lib/x.py"
        return TokenOutput(output.request, output.position, finish="error", error=error)
