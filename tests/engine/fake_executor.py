"""An executor without a model: its KV cache holds token ids (FakeExecutor).

The "model" is a hash of the whole prefix, read back from the cache. A wrong block, slot or
position, a stale prefix or a lost token therefore changes the output. Every engine must produce
`reference_tokens`, which uses no cache at all.

A request may have a "grammar": a text that, with the output so far, decides which tokens are
allowed next and where the output ends. A mask of the wrong position changes the output, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from bloomery.messages import (
    EngineCapacity,
    EngineRequest,
    SampledTokens,
    ScheduledRequest,
    ScheduledStep,
    StepOutput,
)

VOCAB = 7


def next_token(prefix: list[int]) -> int:
    """Return the token that the "model" generates after `prefix`."""
    return crc32(bytes(prefix)) % VOCAB


def apply_mask(token: int, mask: int) -> int:
    """Return the token, or the next one that the mask allows."""
    return next(token for token in range(token, token + VOCAB) if mask >> token % VOCAB & 1) % VOCAB


class FakeMatcher:
    """The grammar state of a request."""

    def __init__(self, request: EngineRequest):
        self.grammar = request.grammar
        self.output = list(request.emitted)
        self.error = ""

    @property
    def hash(self) -> int:
        return crc32(self.grammar.encode() + bytes(self.output))

    @property
    def is_finished(self) -> bool:
        return bool(self.output) and self.hash % 11 == 0

    @property
    def mask(self) -> int:
        return self.hash >> 8 & 0x7F or 1

    def accept(self, token: int) -> None:
        assert self.mask >> token & 1, "a token that the grammar forbids"
        assert not self.is_finished, "a token after the end"
        self.output.append(token)


class FakeMaskSource:
    """Makes matchers, whose grammars take some calls to compile, and their masks."""

    def __init__(self) -> None:
        self.compiling: list[tuple[Future[FakeMatcher], EngineRequest]] = []
        self.num_masks = 0

    def create_matcher(self, request: EngineRequest) -> Future[FakeMatcher]:
        future: Future[FakeMatcher] = Future()
        self.compiling.append((future, request))
        return future

    def finish_compiling(self) -> None:
        for future, request in self.compiling:
            future.set_result(FakeMatcher(request))
        self.compiling.clear()

    def compute_masks(self, matchers: Sequence[FakeMatcher]) -> np.ndarray:
        self.num_masks += len(matchers)
        masks = [matcher.mask for matcher in matchers]
        return np.array(masks, np.int32).reshape(len(masks), 1)


def reference_tokens(request: EngineRequest) -> list[int]:
    """Return the prompt and the correct output, one token at a time, without cache or batch."""
    tokens = [*request.prompt, *request.emitted]
    matcher = FakeMatcher(request)
    while True:
        token = next_token(tokens)
        if request.grammar:
            token = apply_mask(token, matcher.mask)
            matcher.accept(token)
        tokens.append(token)
        num_output = len(tokens) - len(request.prompt)
        is_stop = tokens[-1] in request.stop_ids
        may_stop = num_output > request.sampling.min_tokens or bool(request.grammar)
        if (is_stop and may_stop) or (request.grammar and matcher.is_finished):
            return tokens
        if num_output >= request.max_tokens:
            return tokens


@dataclass
class ExecutorRow:
    """The executor's state of one sequence."""

    tokens: list[int]
    num_computed: int
    initial_length: int  # tokens it was started with
    block_table: list[int] = field(default_factory=list)


class FakePendingStep(Future[StepOutput]):
    """A step of a FakeExecutor, which may wait for its masks."""

    def __init__(self, executor: FakeExecutor, step: ScheduledStep):
        super().__init__()
        self.executor = executor
        self.step = step

    def provide_masks(self, masks: np.ndarray) -> None:
        assert self.executor.waiting is self
        self.executor.waiting = None
        mask_of = dict(zip(self.step.masked, masks[:, 0].tolist(), strict=True))
        self.set_result(self.executor.finish(self.step, mask_of))

    def result(self, timeout: float | None = None) -> StepOutput:
        assert self.done(), "the result of a step that still waits for its masks"
        return super().result(timeout)


class FakeExecutor:
    """Writes all positions of a step before it reads any, as each layer of a real model does."""

    def __init__(self, block_size: int, compact_output: bool = False):
        """`compact_output` returns the tokens of decodes as plain numbers (StepOutput.tokens)."""
        self.block_size = block_size
        self.compact_output = compact_output
        # The KV cache by block: the position and the token that each slot of the block holds.
        self.cached_positions: defaultdict[int, list[int]] = defaultdict(self.empty_block)
        self.cached_tokens: defaultdict[int, list[int]] = defaultdict(self.empty_block)
        self.rows: dict[int, ExecutorRow] = {}
        self.num_steps = 0
        self.num_partial_chunks = 0  # chunks that did not complete a prompt
        self.num_captures = 0  # CUDA graphs that are pending
        self.waiting: FakePendingStep | None = None  # the step that waits for its masks

    def start(self, plan: object) -> EngineCapacity:
        raise AssertionError("a fake executor has no model to load")

    def submit(self, step: ScheduledStep) -> FakePendingStep:
        assert self.waiting is None, "a step was submitted before the last one had its masks"
        pending = FakePendingStep(self, step)
        self.begin(step)
        if step.masked:
            self.waiting = pending
        else:
            pending.set_result(self.finish(step, {}))
        return pending

    def capture_next_graph(self) -> int:
        self.num_captures = max(self.num_captures - 1, 0)
        return self.num_captures

    def close(self) -> None:
        self.rows.clear()

    def run(self, step: ScheduledStep) -> StepOutput:
        """Run a whole step without masked sequences."""
        self.begin(step)
        return self.finish(step, {})

    def begin(self, step: ScheduledStep) -> None:
        """Do the forward pass of a step."""
        requests = step.requests
        self.num_steps += 1
        self.num_partial_chunks += sum(not request.samples for request in requests)
        for sequence in step.finished:
            del self.rows[sequence]
        for request in requests:
            self.write(request)
        for sequence, position in zip(step.decodes, step.decode_positions, strict=True):
            row = self.rows[sequence]
            assert position >= row.initial_length, "a decode of a token that was never sampled"

    def finish(self, step: ScheduledStep, masks: dict[int, int]) -> StepOutput:
        """Sample; `masks` are those of masked sequences."""
        samples = tuple(
            self.sample(request, masks.get(request.sequence, 0x7F))
            for request in step.requests
            if request.samples
        )
        if not self.compact_output:
            return StepOutput(samples)
        num_decodes = len(step.decodes)
        decoded = tuple(entry.tokens[0] for entry in samples[:num_decodes])
        return StepOutput(samples[num_decodes:], None, decoded)

    def write(self, request: ScheduledRequest) -> None:
        """Write the positions of a request, drafts included, into the cache."""
        start = request.start
        new_request = request.new_request
        if new_request is not None:
            assert request.sequence not in self.rows, "a row was started twice"
            tokens = list(new_request.tokens)
            self.rows[request.sequence] = ExecutorRow(tokens, start, len(tokens))
        row = self.rows[request.sequence]
        assert request.count > 0, "an empty chunk"
        assert start == row.num_computed, "positions were repeated or skipped"
        row.num_computed += request.count
        row.block_table += request.blocks
        tokens = row.tokens + list(request.drafts)
        for position in range(start, start + request.count + len(request.drafts)):
            block_index, offset = divmod(position, self.block_size)
            block = row.block_table[block_index]
            self.cached_positions[block][offset] = position
            self.cached_tokens[block][offset] = tokens[position]

    def sample(self, request: ScheduledRequest, mask: int) -> SampledTokens:
        """Accept drafts while they are right, then sample one token."""
        row = self.rows[request.sequence]
        drafts = request.drafts
        tokens = row.tokens + list(drafts)
        length = request.start + request.count
        assert length == len(row.tokens), "sampled before the last token was computed"
        sampled: list[int] = []
        while True:
            token = apply_mask(next_token(self.read(row, tokens, length)), mask)
            sampled.append(token)
            if len(sampled) > len(drafts) or drafts[len(sampled) - 1] != token:
                break
            length += 1
        row.num_computed += len(sampled) - 1
        row.tokens += sampled
        return SampledTokens(request.sequence, tuple(sampled))

    def read(self, row: ExecutorRow, tokens: list[int], length: int) -> list[int]:
        """Read the first `length` tokens from the cache and check that they are the right ones."""
        num_blocks = -(-length // self.block_size)
        assert num_blocks <= len(row.block_table), "a position without a block"
        positions: list[int] = []
        cached_tokens: list[int] = []
        for block in row.block_table[:num_blocks]:
            positions += self.cached_positions[block]
            cached_tokens += self.cached_tokens[block]
        del positions[length:]
        del cached_tokens[length:]
        assert positions == list(range(length)), "keys of another position"
        assert cached_tokens == tokens[:length], "keys of other tokens"
        return cached_tokens

    def empty_block(self) -> list[int]:
        """Return a block that was never written: no sequence has position -1 or token -1."""
        return [-1] * self.block_size
