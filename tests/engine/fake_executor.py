"""An executor without a model: its KV cache holds token ids (FakeExecutor).

The "model" is a hash of what every block table delivers, read back from the cache: the whole
prefix, or in a window group its last positions. A wrong block, slot or position, a stale prefix, a
block given back too early or a lost token therefore changes the output. A recurrent state is a
running hash of all tokens so far, kept in the blocks of the sequence: a wrong copy, a block that
was reused too early or a state that was not reset changes all later tokens. Every engine must
produce `reference_tokens`, which uses no cache at all.

A request may have a "grammar": a text that, with the output so far, decides which tokens are
allowed next and where the output ends. A mask of the wrong position changes the output, too.

A LoRA adapter is a name. It changes every key in the cache and every token, so a wrong device slot,
a load that is missing or comes too early, and a prefix of another adapter change the output.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import repeat
from zlib import crc32

import numpy as np

from bloomery.cache_groups import count_state_blocks
from bloomery.engine.executor import refuse_adapter
from bloomery.messages import (
    NULL_BLOCK,
    AdapterInfo,
    CacheGroup,
    EngineCapacity,
    EngineRequest,
    SampledTokens,
    ScheduledRequest,
    ScheduledStep,
    StepOutput,
)

VOCAB = 7
FULL_ATTENTION = (CacheGroup(),)
START_STATE = 1
EMPTY_SLOT = (-1, -1, -1, "")  # a slot that was never written: no sequence has position -1
BAD_ADAPTER = "/bad"  # how the path of an adapter ends that cannot be loaded


def next_token(
    prefix: list[int], groups: Sequence[CacheGroup] = FULL_ATTENTION, adapter: str = ""
) -> int:
    """Return the token that the "model" with this adapter generates after `prefix`."""
    delivered = adapter.encode()
    for group in groups:
        if group.state_blocks:
            delivered += to_bytes(advance_state(START_STATE, prefix, adapter))
            continue
        start = max(len(prefix) - (group.window or len(prefix)), 0)
        delivered += bytes(prefix[start:]) * group.num_tables
    return crc32(delivered) % VOCAB


def advance_state(state: int, tokens: Sequence[int], adapter: str = "") -> int:
    """Return the state of the recurrent layers after some tokens."""
    inputs = [adapter.encode() + bytes([token]) for token in tokens]
    return crc32(b"".join(inputs), state)


def to_bytes(state: int) -> bytes:
    return state.to_bytes(4, "little")


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


def reference_tokens(
    request: EngineRequest, groups: Sequence[CacheGroup] = FULL_ATTENTION
) -> list[int]:
    """Return the prompt and the correct output, one token at a time, without cache or batch."""
    tokens = [*request.prompt, *request.emitted]
    matcher = FakeMatcher(request)
    while True:
        token = next_token(tokens, groups, request.lora)
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


def read_version_at_once(path: str) -> Future[str]:
    """Return the version of an adapter without looking at files."""
    version: Future[str] = Future()
    version.set_result(path)
    return version


@dataclass
class ExecutorRow:
    """The executor's state of one sequence."""

    tokens: list[int]
    num_computed: int
    initial_length: int  # tokens it was started with
    lora_slot: int = 0
    block_tables: list[list[int]] = field(default_factory=list)
    state_blocks: tuple[int, ...] = ()


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
        self.executor.readers.pop(self, None)
        return super().result(timeout)


class FakeExecutor:
    """Writes all positions of a step before it reads any, as each layer of a real model does."""

    def __init__(
        self,
        page_size: int,
        compact_output: bool = False,
        groups: Sequence[CacheGroup] = FULL_ATTENTION,
    ):
        """`compact_output` returns the tokens of decodes as plain numbers (StepOutput.tokens)."""
        self.page_size = page_size
        self.compact_output = compact_output
        self.groups = groups
        self.tables = [
            group for group in groups for _ in range(group.num_tables) if not group.state_blocks
        ]
        self.blocks_per_state = count_state_blocks(groups)
        # The KV cache by block: table, position, token and adapter of each slot. All tables share
        # blocks.
        self.cache: defaultdict[int, list[tuple[int, int, int, str]]] = defaultdict(
            lambda: [EMPTY_SLOT] * page_size
        )
        # Blocks that hold part of a state instead: part and value.
        self.states: dict[int, tuple[int, int]] = {}
        self.rows: dict[int, ExecutorRow] = {}
        self.num_steps = 0
        self.num_copies = 0  # blocks
        self.num_partial_chunks = 0  # chunks that did not complete a prompt
        self.waiting: FakePendingStep | None = None  # the step that waits for its masks
        # By step in flight: the window blocks that it reads, and the sequences that read them.
        self.readers: dict[FakePendingStep, set[tuple[int, int]]] = {}
        self.host_adapters: set[str] = set()  # that have been read
        self.device_adapters: dict[int, str] = {0: ""}  # by slot
        self.reading: list[tuple[Future[AdapterInfo], str, str]] = []  # future, name, path
        self.reads_at_once = True  # else `finish_reading` must be called
        self.num_reads = 0

    def load_adapter(self, name: str, path: str) -> Future[AdapterInfo]:
        assert name not in self.host_adapters, "an adapter was loaded twice"
        future: Future[AdapterInfo] = Future()
        self.reading.append((future, name, path))
        if self.reads_at_once:
            self.finish_reading()
        return future

    def finish_reading(self) -> None:
        for future, name, path in self.reading:
            self.num_reads += 1
            if path.endswith(BAD_ADAPTER):
                error = refuse_adapter(f"{path}: rank 99 is too large").exception()
                future.set_exception(error)
                continue
            self.host_adapters.add(name)
            future.set_result(AdapterInfo(name, 8, 1000, 4))
        self.reading.clear()

    def unload_adapter(self, name: str) -> None:
        self.host_adapters.remove(name)

    def start(self, plan: object) -> EngineCapacity:
        raise AssertionError("a fake executor has no model to load")

    def submit(self, step: ScheduledStep) -> FakePendingStep:
        assert self.waiting is None, "a step was submitted before the last one had its masks"
        pending = FakePendingStep(self, step)
        self.begin(step)
        self.readers[pending] = self.find_readers(step)
        if step.masked:
            self.waiting = pending
        else:
            pending.set_result(self.finish(step, {}))
        return pending

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
        self.load_slots(step)
        self.copy_blocks(step.block_copies)
        for request in requests:
            self.write(request)
        self.advance_states(requests)
        for sequence, position in zip(step.decodes, step.decode_positions, strict=True):
            row = self.rows[sequence]
            assert position >= row.initial_length, "a decode of a token that was never sampled"
        for request in requests:
            # The first position of a chunk reads furthest back. Others read less in a window. If it
            # is the one that samples, `sample` reads it.
            if request.count > 1 or not request.samples:
                row = self.rows[request.sequence]
                self.read(row, row.tokens + list(request.drafts), request.start + 1)

    def load_slots(self, step: ScheduledStep) -> None:
        """Copy adapters from host memory into device slots."""
        used_slots = {row.lora_slot for row in self.rows.values()}
        for slot, adapter in step.lora_loads:
            assert adapter in self.host_adapters, "an adapter that is not in host memory"
            assert slot not in used_slots, "a slot was overwritten while a sequence uses it"
            self.device_adapters[slot] = adapter

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

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Read all sources, then write all destinations."""
        self.num_copies += len(copies)
        destinations = {destination for _, destination in copies}
        assert len(destinations) == len(copies), "a block is a destination twice"
        contents = [(self.states.get(source), list(self.cache[source])) for source, _ in copies]
        for (_, destination), (state, slots) in zip(copies, contents, strict=True):
            self.states.pop(destination, None)
            self.cache[destination] = slots
            if state is not None:
                self.states[destination] = state

    def advance_states(self, requests: Sequence[ScheduledRequest]) -> None:
        """Let the states of all sequences of a step take in its tokens."""
        live_blocks = [
            block for request in requests for block in self.rows[request.sequence].state_blocks
        ]
        assert len(set(live_blocks)) == len(live_blocks), "two sequences share a state"
        for request in requests:
            row = self.rows[request.sequence]
            if not row.state_blocks:
                continue
            assert not request.drafts, "a state cannot be rolled back"
            tokens = row.tokens[request.start : request.start + request.count]
            # Nobody clears the blocks of a sequence that starts from position 0.
            state = self.read_state(row.state_blocks) if request.start else START_STATE
            state = advance_state(state, tokens, self.device_adapters[row.lora_slot])
            for part, block in enumerate(row.state_blocks):
                self.states[block] = (part, state)
                self.cache.pop(block, None)

    def read_state(self, blocks: Sequence[int]) -> int:
        """Return what the blocks of a state hold: the mix of their values if they differ."""
        parts = [self.states.get(block, (-1, -1)) for block in blocks]
        value = parts[0][1]
        if parts == [(part, value) for part in range(len(parts))]:
            return value
        return crc32(repr(parts).encode())

    def write(self, request: ScheduledRequest) -> None:
        """Write the positions of a request, drafts included, into the cache."""
        start = request.start
        new_request = request.new_request
        if new_request is not None:
            assert request.sequence not in self.rows, "a row was started twice"
            tokens = list(new_request.tokens)
            slot = new_request.lora_slot
            blocks = new_request.state_blocks
            assert len(blocks) == self.blocks_per_state, "not the blocks of one state"
            self.rows[request.sequence] = ExecutorRow(
                tokens, start, len(tokens), slot, state_blocks=blocks
            )
        row = self.rows[request.sequence]
        assert request.count > 0, "an empty chunk"
        assert start == row.num_computed, "positions were repeated or skipped"
        row.num_computed += request.count
        self.append_blocks(row, request.blocks)
        tokens = row.tokens + list(request.drafts)
        for position in range(start, start + request.count + len(request.drafts)):
            for table, group in enumerate(self.tables):
                block, offset = self.find_slot(row, table, group, position)
                self.check_not_read(block, request.sequence)
                self.states.pop(block, None)
                adapter = self.device_adapters[row.lora_slot]
                self.cache[block][offset] = (table, position, tokens[position], adapter)

    def find_readers(self, step: ScheduledStep) -> set[tuple[int, int]]:
        """Return (block, sequence) for each block of a window that the step reads."""
        readers = set()
        for request in step.requests:
            row = self.rows[request.sequence]
            for table, group in enumerate(self.tables):
                if group.window is None:
                    continue
                first = max(request.start - group.window + 1, 0)
                for position in range(first, request.start):
                    block, _ = self.find_slot(row, table, group, position)
                    readers.add((block, request.sequence))
        return readers

    def check_not_read(self, block: int, sequence: int) -> None:
        """Assert that no step in flight reads the block for another sequence."""
        for readers in self.readers.values():
            others = any(read == block and reader != sequence for read, reader in readers)
            assert not others, "a block was given away while a step in flight reads it"

    def append_blocks(self, row: ExecutorRow, blocks: tuple[int, ...]) -> None:
        """Extend the block tables of a row: page after page, table after table."""
        if not row.block_tables:
            row.block_tables = [[] for _ in self.tables]
        remaining = iter(blocks)
        page_blocks = sum(group.blocks_per_page for group in self.tables)
        if not page_blocks:
            assert not blocks, "a page of a model without attention"
            return
        assert len(blocks) % page_blocks == 0, "part of a page"
        for _ in range(len(blocks) // page_blocks):
            for block_table, group in zip(row.block_tables, self.tables, strict=True):
                block_table += [next(remaining) for _ in range(group.blocks_per_page)]

    def find_slot(
        self, row: ExecutorRow, table: int, group: CacheGroup, position: int
    ) -> tuple[int, int]:
        """Return the block and the offset of a position."""
        index, offset = divmod(position, self.page_size // group.blocks_per_page)
        block_table = row.block_tables[table]
        assert index < len(block_table), "a position without a block"
        assert block_table[index] != NULL_BLOCK, "a position in the null block"
        return block_table[index], offset

    def sample(self, request: ScheduledRequest, mask: int) -> SampledTokens:
        """Accept drafts while they are right, then sample one token."""
        row = self.rows[request.sequence]
        drafts = request.drafts
        tokens = row.tokens + list(drafts)
        length = request.start + request.count
        assert length == len(row.tokens), "sampled before the last token was computed"
        sampled: list[int] = []
        while True:
            adapter = self.device_adapters[row.lora_slot]
            delivered = adapter.encode() + bytes(self.read(row, tokens, length))
            if row.state_blocks:
                delivered += to_bytes(self.read_state(row.state_blocks))
            token = apply_mask(crc32(delivered) % VOCAB, mask)
            sampled.append(token)
            if len(sampled) > len(drafts) or drafts[len(sampled) - 1] != token:
                break
            length += 1
        row.num_computed += len(sampled) - 1
        row.tokens += sampled
        return SampledTokens(request.sequence, tuple(sampled))

    def read(self, row: ExecutorRow, tokens: list[int], length: int) -> list[int]:
        """Return what all tables deliver of the first `length` tokens; checks that it is right."""
        delivered: list[int] = []
        for table, group in enumerate(self.tables):
            start = max(length - (group.window or length), 0)
            block_size = self.page_size // group.blocks_per_page
            first_block = start // block_size
            num_blocks = -(-length // block_size)
            blocks = row.block_tables[table][first_block:num_blocks]
            assert first_block + len(blocks) == num_blocks, "a position without a block"
            assert NULL_BLOCK not in blocks, "a position in the null block"
            slots = [slot for block in blocks for slot in self.cache[block][:block_size]]
            first = first_block * block_size  # position of the first slot
            slots = slots[start - first : length - first]
            read_tokens = tokens[start:length]
            adapter = self.device_adapters[row.lora_slot]
            expected = list(
                zip(repeat(table), range(start, length), read_tokens, repeat(adapter), strict=False)
            )
            assert slots == expected, "keys of another table, position or token"
            delivered += read_tokens
        return delivered
