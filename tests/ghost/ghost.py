"""The engine's correctness without a model: an executor whose KV cache holds token ids.

The 'model' is a hash of the whole prefix read back *from the cache*, so a wrong block, slot, position, stale
prefix or lost token changes the text. Every run must equal the plain loop, which has no cache at all.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from zlib import crc32

from bloomery.messages import (
    EngineCapacity,
    ScheduledRequest,
    EngineRequest,
    SampledTokens,
    ScheduledStep,
    StepOutput,
)

VOCAB = 7


def next_token(prefix: list[int]) -> int:
    return crc32(bytes(prefix)) % VOCAB


def plain(request: EngineRequest) -> list[int]:
    """What the request must produce, one token at a time, with no cache, batch or engine."""
    tokens = [*request.prompt, *request.emitted]
    while True:
        tokens.append(next_token(tokens))
        produced = len(tokens) - len(request.prompt)
        if tokens[-1] in request.stop_ids and produced > request.sampling.min_tokens:
            return tokens
        if produced >= request.max_tokens:
            return tokens


@dataclass
class Row:
    tokens: list[int]
    done: int
    told: int  # tokens it began with
    table: list[int] = field(default_factory=list)


class Ghost:
    """An executor. Within a step all positions are written before any is read, as a layer of a real model does."""

    def __init__(self, block_size: int, terse: bool = False):
        """`terse`: of those that go on it says no more than their tokens."""
        self.size = block_size
        self.terse = terse
        self.cache: dict[int, tuple[int, int]] = {}
        self.rows: dict[int, Row] = {}
        self.steps = self.chunks = 0
        self.pieces = 0  # of work that may wait

    def start(self, plan: object) -> EngineCapacity:
        raise AssertionError("a ghost has no model to load")

    def submit(self, step: ScheduledStep) -> Future[StepOutput]:
        future: Future[StepOutput] = Future()
        future.set_result(self.run(step))
        return future

    def spare(self) -> int:
        self.pieces = max(self.pieces - 1, 0)
        return self.pieces

    def close(self) -> None:
        self.rows.clear()

    def run(self, step: ScheduledStep) -> StepOutput:
        self.steps += 1
        self.chunks += sum(not item.samples for item in step.requests)
        for sequence in step.finished:
            del self.rows[sequence]
        for item in step.requests:
            self.write(item)
        for sequence, start in zip(step.decodes, step.decode_positions, strict=True):
            assert start >= self.rows[sequence].told, "its token was never drawn"
        samples = tuple(self.sample(item) for item in step.requests if item.samples)
        if not self.terse:
            return StepOutput(samples)
        count = len(step.decodes)
        return StepOutput(
            samples[count:], None, tuple(entry.tokens[0] for entry in samples[:count])
        )

    def write(self, item: ScheduledRequest) -> None:
        if item.new_request is not None:
            assert item.sequence not in self.rows, "a row started twice"
            self.rows[item.sequence] = Row(
                list(item.new_request.tokens), item.start, len(item.new_request.tokens)
            )
        row = self.rows[item.sequence]
        assert item.count > 0 and item.start == row.done, "work repeated, skipped or empty"
        row.done += item.count
        row.table += item.blocks
        fed = row.tokens + list(item.drafts)
        for position in range(item.start, item.start + item.count + len(item.drafts)):
            self.cache[self.slot(row, position)] = (position, fed[position])

    def sample(self, item: ScheduledRequest) -> SampledTokens:
        row = self.rows[item.sequence]
        fed = row.tokens + list(item.drafts)
        length = item.start + item.count
        new = []
        assert length == len(row.tokens), "sampled before the last token was computed"
        while True:
            token = next_token(self.read(row, fed, length))
            new.append(token)
            if len(new) > len(item.drafts) or item.drafts[len(new) - 1] != token:
                break
            length += 1
        row.done += len(new) - 1
        row.tokens += new
        return SampledTokens(item.sequence, tuple(new))

    def read(self, row: Row, fed: list[int], length: int) -> list[int]:
        got = [self.cache[self.slot(row, position)] for position in range(length)]
        assert [position for position, _ in got] == list(range(length)), "keys of another position"
        assert [token for _, token in got] == fed[:length], "keys of other tokens"
        return [token for _, token in got]

    def slot(self, row: Row, position: int) -> int:
        return row.table[position // self.size] * self.size + position % self.size
