"""An executor without a model: its KV cache holds token ids (FakeExecutor).

The "model" is a hash of the whole prefix, read back from the cache. A wrong block, slot or
position, a stale prefix or a lost token therefore changes the output. Every engine must produce
`reference_tokens`, which uses no cache at all.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass, field
from zlib import crc32

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


def reference_tokens(request: EngineRequest) -> list[int]:
    """Return the prompt and the correct output, one token at a time, without cache or batch."""
    tokens = [*request.prompt, *request.emitted]
    while True:
        tokens.append(next_token(tokens))
        num_output = len(tokens) - len(request.prompt)
        is_stop = tokens[-1] in request.stop_ids
        if is_stop and num_output > request.sampling.min_tokens:
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

    def start(self, plan: object) -> EngineCapacity:
        raise AssertionError("a fake executor has no model to load")

    def submit(self, step: ScheduledStep) -> Future[StepOutput]:
        future: Future[StepOutput] = Future()
        future.set_result(self.run(step))
        return future

    def capture_next_graph(self) -> int:
        self.num_captures = max(self.num_captures - 1, 0)
        return self.num_captures

    def close(self) -> None:
        self.rows.clear()

    def run(self, step: ScheduledStep) -> StepOutput:
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
        samples = tuple(self.sample(request) for request in requests if request.samples)
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

    def sample(self, request: ScheduledRequest) -> SampledTokens:
        """Accept drafts while they are right, then sample one token."""
        row = self.rows[request.sequence]
        drafts = request.drafts
        tokens = row.tokens + list(drafts)
        length = request.start + request.count
        assert length == len(row.tokens), "sampled before the last token was computed"
        sampled: list[int] = []
        while True:
            token = next_token(self.read(row, tokens, length))
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
