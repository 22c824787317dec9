"""One device's share of the work: rows in, a forward pass, tokens out.

Steps in which every sequence merely goes on by one position run as a DecodeStep, on a GPU those that have a few small
chunks of prompts beside as a MixedStep, all others as a Batch that the host builds. All leave the rows' state on the
device as the next step wants it, so none waits for another's result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from bloomery.artifacts.locate import Artifact
from bloomery.attention.choose import choose
from bloomery.attention.native_paged import NativePaged
from bloomery.attention.triton_paged import TritonPaged
from bloomery.config import Plan
from bloomery.machines import here
from bloomery.messages import (
    EngineCapacity,
    ScheduledRequest,
    SampledTokens,
    ScheduledStep,
    StepOutput,
    TokenLogprob,
)
from bloomery.models.checkpoint import Report
from bloomery.models.load import load
from bloomery.native.team import team
from bloomery.parallel.mesh import Mesh
from bloomery.runtime.batch import Batch, Share
from bloomery.runtime.cache import allocate, fit, kv_cache_dtype
from bloomery.runtime.decode import DecodeStep
from bloomery.runtime.device import check, download, one_thread, upload
from bloomery.runtime.forward import Forward, Steady, Whole, steady
from bloomery.runtime.largest import LOGIT_ROWS, largest_step
from bloomery.runtime.meter import Meter, Reading, roofline
from bloomery.runtime.mixed import PROMPTS, TOKENS, MixedStep
from bloomery.runtime.picker import Picker
from bloomery.runtime.pooling import pool, unit
from bloomery.runtime.replay import Captured, Pool
from bloomery.runtime.rows import Lineup, Row, Rows
from bloomery.runtime.sampler import Draws, Gain, Sampler
from bloomery.runtime.stages import stage

GRAPHS = 5 << 28  # bytes for what the driver keeps of graphs, and libraries behind our back


class Worker:
    """All of the work, or a rank's part of it; where ranks share layers, each of them draws the same tokens."""

    def __init__(
        self,
        plan: Plan,
        progress: bool = False,
        report: Report | None = None,
        mesh: Mesh = Mesh(),  # frozen
    ):
        self.mesh = mesh
        self.recorded = False
        self.device = check(plan.device)
        dtype = getattr(torch, plan.dtype)
        if self.device.type == "cpu":
            torch.set_num_threads(plan.threads)
        why_not = team().start(plan.threads) if plan.native else None
        if not plan.native:
            team().stop()  # of a worker before this one
        native = plan.native and why_not is None
        artifact = Artifact(
            plan.name, "gguf" if plan.kind == "gguf" else "folder", Path(plan.path), "plan"
        )
        cut = partial(stage, mesh=mesh, native=native) if mesh.stages > 1 else None
        loaded = load(
            artifact,
            plan.load_format,
            dtype,
            self.device,
            progress,
            report,
            mesh,
            plan.quantize,
            native,
            cut,
        )
        self.decoder = loaded.decoder
        model = loaded.decoder.spec
        specs = [layer.attention for layer in model.layers]
        kv = (
            None if mesh.shared else kv_cache_dtype(plan.kv_cache_dtype, dtype)
        )  # on a shared device nothing can be measured
        self.backend = choose(
            specs,
            dtype,
            self.device,
            plan.deterministic,
            native and plan.kv_cache_dtype != "fp8",
            kv,
        )
        rounds = (
            isinstance(self.backend, NativePaged)
            and artifact.kind == "gguf"
            and plan.quantize == "auto"
        )
        kv = kv_cache_dtype(plan.kv_cache_dtype, dtype, rounds)
        self.block_size = plan.block_size
        self.decoder.reach(plan.max_length)
        size = fit(plan, model, kv, self.device, self._reserve(plan, kv), mesh)
        if size.max_length != plan.max_length:
            self.decoder.reach(size.max_length)
        self.caches = allocate(
            model, size.blocks + 1, plan.block_size, kv, self.device
        )  # the last is nobody's
        width = -(-size.max_length // plan.block_size)
        self.rows = Rows(plan.max_num_seqs, width, size.blocks, self.device)
        self.sampler = Sampler(  # nobody's is greedy
            plan.max_num_seqs + 1, model.vocab, self.device, plan.deterministic, size.max_length
        )
        self.model = self._forward(plan, width, size.blocks)
        pick = Picker(self.sampler, PROMPTS)
        self.graphs = Pool() if plan.graphs and mesh.stages == 1 and not mesh.shared else None
        runs = Captured(self.graphs) if self.graphs else None
        self.decode = DecodeStep(
            self.model, model.vocab, self.rows, plan.block_size, pick, mesh.last, runs
        )
        self.mixed = self._mixed(pick, plan.max_num_batched_tokens)
        limit = roofline(
            self.decoder.whole,
            here(self.device.type),
            loaded.bytes * plan.tp * plan.pp,
            dtype,
            kv,
            plan.tp,
            plan.pp,
        )
        self.capacity = EngineCapacity(
            blocks=size.blocks,
            block_size=plan.block_size,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            max_length=size.max_length,
            vocab=model.vocab,
            weights_bytes=loaded.bytes,
            kv_bytes=size.bytes,
            device=str(self.device),
            notes=tuple(filter(None, (*loaded.notes, size.note, self._native(why_not)))),
            expected=limit.usual(),
        )

        self.capturing: Iterator[int] = self._capture() if self.graphs else iter(())
        self.padded = 0  # lines of the step under way that are nobody's
        self.meter: Meter | None = Meter(limit, self.device)

    @torch.inference_mode()
    def _forward(self, plan: Plan, width: int, nobody: int) -> Forward:
        pipe = self.mesh.pipe(self.decoder.spec.hidden, self.decoder.dtype)
        whole = Whole(self.decoder, self.backend, self.caches, pipe=pipe)
        return (
            steady(whole, width, nobody, plan.block_size, self.mesh)
            if plan.deterministic
            else whole
        )

    @torch.inference_mode()
    def _native(self, why_not: str | None) -> str | None:
        """Record the smallest decode step where native kernels run; what the operator should know, if anything."""
        able = (
            isinstance(self.backend, NativePaged) and self.model.grain == 1
        )  # tiles have no native form
        refused = self.decode.record() if able else None
        self.recorded = bool(
            self.mesh.least(able and refused is None)
        )  # all ranks or none: lines go in one order
        if why_not is not None:
            return f"no native kernels, torch alone: {why_not}"
        return (
            None
            if refused is None
            else f"decode steps are not recorded but run one operation at a time: {refused}"
        )

    def _mixed(self, pick: Picker, most: int) -> MixedStep | None:
        """Where the backend knows steps whose layout only the device has, and positions need not go tile by tile."""
        if (
            not isinstance(self.backend, TritonPaged)
            or isinstance(self.model, Steady)
            or self.mesh.stages > 1
        ):
            return None
        runs = Captured(self.graphs) if self.graphs else None
        return MixedStep(self.model, self.rows, self.block_size, pick, most, runs)

    def _capture(self) -> Iterator[int]:
        """The largest step first: the others fit into the room it leaves. Then decode steps from the smallest on, as a
        server fills, and those with prompts; all others when they have come twice. Steps may run in between, without a
        graph if need be."""
        sizes = self.decode.sizes[-1:] + self.decode.sizes[:-1]
        work = [partial(self.decode.prepare, size) for size in sizes]
        if self.mixed is not None:
            largest, *usual = [partial(self.mixed.prepare, *size) for size in self.mixed.usual()]
            work = [largest, *work, *usual]
        for left, prepare in zip(reversed(range(len(work))), work, strict=True):
            prepare()
            if left:  # with the last it is over, and holds nothing any more
                yield left

    @torch.inference_mode()
    def spare(self) -> int:
        """Capture one more step, while nobody waits; how many are left. What is not captured runs without a graph."""
        return next(self.capturing, 0)

    def _reserve(self, plan: Plan, kv: torch.dtype) -> int:
        """Bytes that steps and graphs may take beside weights and cache."""
        if self.device.type == "cpu":
            return 0
        captured = plan.max_num_seqs + TOKENS[-1] if plan.graphs else 0
        return largest_step(self.decoder, self.backend, plan, kv, captured) + GRAPHS

    @torch.inference_mode()
    def run(self, step: ScheduledStep, drawn: Sequence[tuple[int, int]] = ()) -> Pending:
        """Queue the step's work; nothing here waits for the device unless a draft's verdict is wanted.

        `drawn`: sequences and their last tokens, where another stage has drawn them.
        """
        self.padded = 0
        if self.meter is not None:
            self.meter.begin(step)
        pending = self._run(step, drawn)
        if self.meter is not None:
            pending.meter = self.meter
            pending.reading = self.meter.end(self.padded)
        if self.graphs is not None:
            self.graphs.catch_up()
        return pending

    def _run(self, step: ScheduledStep, drawn: Sequence[tuple[int, int]]) -> Pending:
        for sequence in step.finished:
            self.sampler.release(self.rows.release(sequence).index)
        for sequence, blocks in step.new_blocks:
            self.rows.grow(sequence, blocks)
        chunks = [(item, self.rows.place(item)) for item in step.chunks]
        for item, row in chunks:
            if item.new_request is not None:
                self.sampler.admit(row.index, item.new_request)
        if drawn:
            starts = {item.sequence: item.start for item in step.requests}
            told = [
                (self.rows.by_sequence[sequence].index, token, starts[sequence])
                for sequence, token in drawn
            ]
            rows, tokens, positions = upload(told, self.device).unbind(1)
            self.rows.last[rows] = tokens.to(self.rows.last.dtype)
            self.rows.positions[rows] = positions.to(self.rows.positions.dtype)
        if not chunks and ((self.device.type == "cuda" and self.mesh.stages == 1) or self.recorded):
            return self._go_on(step)
        lineup = self.rows.line_up(step.decodes, step.decode_positions)
        if self.mixed is not None and lineup.plain and self.mixed.takes(len(lineup.rows), chunks):
            return self._mix(self.mixed, lineup, chunks, max(step.decode_positions, default=0))
        placed = [(item, self.rows.by_sequence[item.sequence]) for item in step.requests]
        return self._compute(Batch.of(placed, self.rows.last, self.block_size))

    def _mix(
        self,
        mixed: MixedStep,
        lineup: Lineup,
        chunks: list[tuple[ScheduledRequest, Row]],
        furthest: int,
    ) -> Pending:
        """Some sequences by one position, and a few chunks of prompts."""
        self.sampler.settle()
        sequences, tokens = mixed.run(lineup.indices, chunks, furthest)
        self.padded = mixed.padded
        return Pending(sequences, Draws(tokens, ()) if len(tokens) else None, lines=lineup.places)

    def _go_on(self, step: ScheduledStep) -> Pending:
        """Every sequence by one position, from what the device already holds."""
        lineup = self.rows.line_up(step.decodes, step.decode_positions)
        count = len(lineup.rows)
        self.decode.run(lineup.indices, lineup.plain)
        self.padded = len(self.decode.members) - count
        if not self.mesh.last:
            return Pending([], None)
        if lineup.plain:
            return Pending([], Draws(self.decode.tokens[:count], ()), lines=lineup.places)
        items = step.requests
        shares = [
            Share(items[place], row, i)
            for i, (place, row) in enumerate(zip(lineup.places, lineup.rows))
        ]
        return Pending(
            [share.item.sequence for share in shares],
            self._draw(shares, self.decode.logits[:count]),
        )

    def _compute(self, batch: Batch) -> Pending:
        shares = [
            share
            for share in batch.shares
            if share.item.samples and share.row.start.pooling is None
        ]
        lines = upload([line for share in shares for line in share.lines] or [0], self.device)
        wanted = (
            None if len(lines) == len(batch.ids) or any(map(reads_all, batch.shares)) else lines
        )
        hidden = self.model.hidden(batch.ids, batch.ragged, wanted)
        if not self.mesh.last:
            return Pending([], None)
        prompts = {
            share.item.sequence: found
            for share in batch.shares
            if (found := self._prompt_logprobs(share, hidden))
        }
        pooled = self._pool(batch, hidden)
        if not shares:
            return Pending([], None, prompts, pooled)
        logits = self.model.logits(hidden if len(lines) == len(hidden) else hidden[lines])
        return Pending(
            [share.item.sequence for share in shares], self._draw(shares, logits), prompts, pooled
        )

    def _pool(self, batch: Batch, hidden: torch.Tensor) -> dict[int, torch.Tensor]:
        """Embeddings of the prompts that end in this step, by sequence."""
        wanted = [share for share in batch.shares if share.row.start.pooling is not None]
        found = {
            share.item.sequence: state
            for share in wanted
            if (state := pool(share, hidden)) is not None
        }
        return {sequence: unit(self.decoder.features(state)) for sequence, state in found.items()}

    def _draw(self, shares: list[Share], logits: torch.Tensor) -> Draws:
        """One token a line; each row's last token stays on the device, where the next step looks for it."""
        if self.meter is not None:
            self.meter.choosing()
        asked = [
            (share.row.index, share.item.start + share.item.count, share.item.drafts)
            for share in shares
        ]
        with one_thread(team().active):
            draws = self.sampler.sample(logits, asked)
        rows, ends = upload([(row, position) for row, position, _ in asked], self.device).unbind(1)
        if len(logits) == len(shares):
            self.rows.last[rows] = draws.tokens.to(self.rows.last.dtype)
        else:  # a sequence with drafts has no other step in flight: its verdict may be waited for
            gained = [tokens for tokens, _ in draws.collect()]
            self.rows.last[rows] = upload(
                [tokens[-1] for tokens in gained], self.device, self.rows.last.dtype
            )
            ends = ends + upload([len(tokens) - 1 for tokens in gained], self.device)
        self.rows.positions[rows] = ends.to(self.rows.positions.dtype)
        return draws

    def _prompt_logprobs(self, share: Share, hidden: torch.Tensor) -> tuple[TokenLogprob, ...]:
        """Of the prompt tokens that this step's positions predict, a few positions at a time."""
        item = share.item
        row = share.row
        count = row.start.sampling.prompt_logprobs
        end = min(item.start + item.count, row.start.prompt_len - 1)
        if count is None or item.start >= end:
            return ()
        found: list[TokenLogprob] = []
        for a in range(item.start, end, LOGIT_ROWS):
            b = min(a + LOGIT_ROWS, end)
            at = share.first - item.start
            logits = self.model.logits(hidden[at + a : at + b])
            found += self.sampler.prompt_logprobs(logits, row.start.tokens[a + 1 : b + 1], count)
        return tuple(found)


def reads_all(share: Share) -> bool:
    """Whether hidden states are wanted beyond those that draw a token."""
    return (
        share.row.start.pooling is not None or share.row.start.sampling.prompt_logprobs is not None
    )


class Pending:
    """A step's result, perhaps still on its way from the device. All of it is sent off at once: steps queued later do
    not delay it."""

    def __init__(
        self,
        sequences: list[int],
        draws: Draws | None,
        prompts: dict[int, tuple[TokenLogprob, ...]] | None = None,
        pooled: dict[int, torch.Tensor] | None = None,
        lines: Sequence[int] | None = None,
    ):
        """`lines`: the first tokens are of those that go on, and these are their places in the step; one each of
        `sequences` is behind them. Without, all tokens are of `sequences`."""
        self.sequences = sequences
        self.prompts = prompts or {}
        self.lines = lines
        self.draws = None if draws is None else draws.downloaded()
        self.pooled = {sequence: download(vector) for sequence, vector in (pooled or {}).items()}
        self.sent: torch.cuda.Event | None = None
        self.meter: Meter | None = None
        self.reading: Reading | None = None
        if (
            torch.cuda.is_initialized()
        ):  # a chunk alone brings nothing, but who waits for it must not run ahead of it
            self.sent = torch.cuda.Event()
            self.sent.record()

    def result(self) -> StepOutput:
        if self.sent is not None:
            self.sent.synchronize()
        tokens, gains = self._gains()
        samples = [
            SampledTokens(
                sequence, gained, logprobs, self.prompts.pop(sequence, ()) if self.prompts else ()
            )
            for sequence, (gained, logprobs) in zip(self.sequences, gains, strict=True)
        ]
        silent = (
            SampledTokens(sequence, prompt_logprobs=found)
            for sequence, found in self.prompts.items()
        )
        embedded = (
            SampledTokens(sequence, embedding=tuple(vector.tolist()))
            for sequence, vector in self.pooled.items()
        )
        timing = (
            None if self.meter is None or self.reading is None else self.meter.collect(self.reading)
        )
        return StepOutput((*samples, *silent, *embedded), timing, tuple(tokens))

    def _gains(self) -> tuple[list[int], list[Gain]]:
        """Tokens of those that go on, in the step's order; and what each of `sequences` gained."""
        if self.draws is None:
            return [], []
        if self.lines is None:
            return [], self.draws.collect()
        drawn = self.draws.tokens.tolist()
        count = len(self.lines)
        tokens = [0] * count
        for place, token in zip(self.lines, drawn):
            tokens[place] = token
        return tokens, [((token,), ()) for token in drawn[count:]]
