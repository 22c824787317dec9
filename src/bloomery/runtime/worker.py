"""One device's share of the work: rows in, a forward pass, tokens out.

Steps in which every sequence merely goes on by one position run as a DecodeStep, all others as a Batch that the host
builds. Both leave the rows' state on the device as the next step wants it, so neither waits for the other's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bloomery.artifacts.locate import Artifact
from bloomery.attention.base import Ragged
from bloomery.attention.choose import choose
from bloomery.attention.native_paged import NativePaged
from bloomery.config import Plan
from bloomery.machines import here
from bloomery.messages import Capacity, Item, Sampled, Step, StepOutput, TokenLogprob
from bloomery.models.checkpoint import Report
from bloomery.models.load import load
from bloomery.native.team import team
from bloomery.parallel.mesh import Mesh
from bloomery.runtime.batch import Batch, Share
from bloomery.runtime.cache import allocate, fit, kv_dtype
from bloomery.runtime.decode import DecodeStep, buckets
from bloomery.runtime.device import check, upload
from bloomery.runtime.forward import Forward, Whole, steady
from bloomery.runtime.meter import Meter, roofline
from bloomery.runtime.picker import Picker
from bloomery.runtime.pooling import pool, unit
from bloomery.runtime.progress import bar
from bloomery.runtime.rows import Row, Rows
from bloomery.runtime.sampler import Draws, Sampler

LOGIT_ROWS = 64  # prompt positions whose logits are held at once
GRAPHS = 1 << 30  # bytes kept for captured steps and what libraries take behind our back


class Worker:
    """All of the work, or a rank's part of it; where ranks share layers, each of them draws the same tokens."""

    def __init__(
        self,
        plan: Plan,
        progress: bool = False,
        report: Report | None = None,
        mesh: Mesh = Mesh(),  # noqa: B008  # frozen
    ):
        self.mesh, self.recorded = mesh, False
        self.device, dtype = check(plan.device), getattr(torch, plan.dtype)
        if self.device.type == "cpu":
            torch.set_num_threads(plan.threads)
        why_not = team().start(plan.threads) if plan.native else None
        native = plan.native and why_not is None
        artifact = Artifact(plan.name, "gguf" if plan.kind == "gguf" else "folder", Path(plan.path), "plan")
        loaded = load(artifact, plan.load_format, dtype, self.device, progress, report, mesh, plan.quantize, native)
        self.decoder, model = loaded.decoder, loaded.decoder.spec
        kv, specs = kv_dtype(plan.kv_dtype, dtype), [layer.attention for layer in model.layers]
        self.backend = choose(specs, dtype, self.device, plan.deterministic, native and kv == dtype)
        self.block_size = plan.block_size
        self.decoder.reach(plan.max_length)
        size = fit(plan, model, kv, self.device, self._largest_step(plan, dtype), mesh)
        if size.max_length != plan.max_length:
            self.decoder.reach(size.max_length)
        self.caches = allocate(model, size.blocks + 1, plan.block_size, kv, self.device)  # the last is nobody's
        width = -(-size.max_length // plan.block_size)
        self.rows = Rows(plan.max_sequences, width, size.blocks, self.device)
        self.sampler = Sampler(
            plan.max_sequences + 1, model.vocab, self.device, plan.deterministic
        )  # nobody's is greedy
        self.model = self._forward(plan, width, size.blocks)
        self.decode = DecodeStep(self.model, model.vocab, self.rows, plan.block_size, Picker(self.sampler))
        self.capacity = Capacity(
            blocks=size.blocks,
            block_size=plan.block_size,
            max_sequences=plan.max_sequences,
            max_batch_tokens=plan.max_batch_tokens,
            max_length=size.max_length,
            vocab=model.vocab,
            weights_bytes=loaded.bytes,
            kv_bytes=size.bytes,
            device=str(self.device),
            notes=tuple(filter(None, (*loaded.notes, size.note, self._native(why_not)))),
        )

        if plan.graphs and mesh.stages == 1 and not mesh.shared:
            self._capture(progress, report)
        limit = roofline(
            self.decoder.whole, here(self.device.type), loaded.bytes * plan.tp * plan.pp, dtype, plan.tp, plan.pp
        )
        self.padded = 0  # lines of the step under way that are nobody's
        self.meter: Meter | None = Meter(limit, self.device)

    @torch.inference_mode()
    def _forward(self, plan: Plan, width: int, nobody: int) -> Forward:
        pipe = self.mesh.pipe(self.decoder.spec.hidden, self.decoder.dtype, self.device)
        whole = Whole(self.decoder, self.backend, self.caches, pipe=pipe)
        return steady(whole, width, nobody, plan.block_size, self.mesh) if plan.deterministic else whole

    @torch.inference_mode()
    def _native(self, why_not: str | None) -> str | None:
        """Record the smallest decode step where native kernels run; what the operator should know, if anything."""
        if why_not is not None:
            return f"no native kernels, torch alone: {why_not}"
        if not isinstance(self.backend, NativePaged) or self.mesh.size > 1 or self.model.grain > 1:
            return None  # messages between ranks have no native form, nor has the cutting into tiles
        refused = self.decode.record()
        self.recorded = refused is None
        return None if refused is None else f"decode steps are not recorded but run one operation at a time: {refused}"

    @torch.inference_mode()
    def _capture(self, progress: bool, report: Report | None) -> None:
        with bar("graphs", len(buckets(self.rows.count, self.model.grain)), progress, report) as advance:
            self.decode.capture(advance)

    @torch.inference_mode()
    def _largest_step(self, plan: Plan, dtype: torch.dtype) -> int:
        """Bytes that a step may take beside weights and cache: measured on the largest there can be."""
        if self.device.type == "cpu":
            return 0
        model, count = self.decoder.spec, min(plan.max_batch_tokens, plan.max_length)
        blocks = -(-count // plan.block_size)
        caches = allocate(model, blocks, plan.block_size, kv_dtype(plan.kv_dtype, dtype), self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        numbers = torch.arange(count, dtype=torch.int32, device=self.device)
        ragged = Ragged(
            (count,), (count,), 0, upload([0, count], self.device, torch.int32),
            upload([count], self.device, torch.int32), numbers, numbers, numbers[None, :blocks], plan.block_size,
        )  # fmt: skip
        zeros = None if self.decoder.first else torch.zeros(count, model.hidden, dtype=dtype, device=self.device)
        layout = self.backend.plan(ragged)
        hidden = self.decoder(numbers % model.vocab, numbers, numbers, caches, self.backend, layout, None, zeros)
        if self.decoder.last:
            self.decoder.logits(hidden[: plan.max_sequences])
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del hidden, caches
        torch.cuda.empty_cache()
        return peak + GRAPHS

    @torch.inference_mode()
    def run(self, step: Step, drawn: Sequence[tuple[int, int]] = ()) -> Pending:
        """Queue the step's work; nothing here waits for the device unless a draft's verdict is wanted.

        `drawn`: sequences and their last tokens, where another stage has drawn them.
        """
        if self.meter is None:
            return self._run(step, drawn)
        self.padded = 0
        self.meter.begin(step.items)
        pending = self._run(step, drawn)
        self.meter.end(self.padded)
        pending.meter = self.meter
        return pending

    def _run(self, step: Step, drawn: Sequence[tuple[int, int]]) -> Pending:
        for sequence in step.finished:
            self.sampler.release(self.rows.release(sequence).index)
        place, going = self.rows.place, (self.device.type == "cuda" and self.mesh.stages == 1) or self.recorded
        placed = []
        for item in step.items:
            row = place(item)
            placed.append((item, row))
            if item.first is not None:
                self.sampler.admit(row.index, item.first)
            going = going and item.count == 1 and not item.drafts and not row.knows(item.start)
        if drawn:
            rows = upload([self.rows.by_sequence[sequence].index for sequence, _ in drawn], self.device)
            self.rows.last[rows] = upload([token for _, token in drawn], self.device, self.rows.last.dtype)
        return self._go_on(placed) if going else self._compute(Batch.of(placed, self.rows.last, self.block_size))

    def _go_on(self, placed: list[tuple[Item, Row]]) -> Pending:
        """Every sequence by one position, from what the device already holds."""
        members = [row for _, row in placed]
        picked = all(row.plain for row in members)
        count = self.decode.run(members, picked)
        self.padded = len(self.decode.members) - count
        sequences = [item.sequence for item, _ in placed]
        if picked:
            return Pending(sequences, Draws(self.decode.tokens[:count].clone(), ((),) * count))
        shares = [Share(item, row, i) for i, (item, row) in enumerate(placed)]
        return Pending(sequences, self._draw(shares, self.decode.logits[:count]))

    def _compute(self, batch: Batch) -> Pending:
        shares = [share for share in batch.shares if share.item.samples and share.row.start.pooling is None]
        lines = upload([line for share in shares for line in share.lines] or [0], self.device)
        wanted = None if len(lines) == len(batch.ids) or any(map(reads_all, batch.shares)) else lines
        hidden = self.model.hidden(batch.ids, batch.ragged, wanted)
        if not self.mesh.last:
            return Pending([], None)
        prompts = {
            share.item.sequence: found for share in batch.shares if (found := self._prompt_logprobs(share, hidden))
        }
        pooled = self._pool(batch, hidden)
        if not shares:
            return Pending([], None, prompts, pooled)
        logits = self.model.logits(hidden if len(lines) == len(hidden) else hidden[lines])
        return Pending([share.item.sequence for share in shares], self._draw(shares, logits), prompts, pooled)

    def _pool(self, batch: Batch, hidden: torch.Tensor) -> dict[int, torch.Tensor]:
        """Embeddings of the prompts that end in this step, by sequence."""
        wanted = [share for share in batch.shares if share.row.start.pooling is not None]
        found = {share.item.sequence: state for share in wanted if (state := pool(share, hidden)) is not None}
        return {sequence: unit(self.decoder.features(state)) for sequence, state in found.items()}

    def _draw(self, shares: list[Share], logits: torch.Tensor) -> Draws:
        """One token a line; each row's last token stays on the device, where the next step looks for it."""
        if self.meter is not None:
            self.meter.choosing()
        asked = [(share.row.index, share.item.start + share.item.count, share.item.drafts) for share in shares]
        draws = self.sampler.sample(logits, asked)
        rows, ends = upload([(row, position) for row, position, _ in asked], self.device).unbind(1)
        if len(logits) == len(shares):
            self.rows.last[rows] = draws.tokens.to(self.rows.last.dtype)
        else:  # a sequence with drafts has no other step in flight: its verdict may be waited for
            gained = [tokens for tokens, _ in draws.collect()]
            self.rows.last[rows] = upload([tokens[-1] for tokens in gained], self.device, self.rows.last.dtype)
            ends = ends + upload([len(tokens) - 1 for tokens in gained], self.device)
        self.rows.positions[rows] = ends.to(self.rows.positions.dtype)
        return draws

    def _prompt_logprobs(self, share: Share, hidden: torch.Tensor) -> tuple[TokenLogprob, ...]:
        """Of the prompt tokens that this step's positions predict, a few positions at a time."""
        item, row = share.item, share.row
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
    return share.row.start.pooling is not None or share.row.start.sampling.prompt_logprobs is not None


class Pending:
    """A step's result, perhaps still on its way from the device. Tokens are sent off at once: steps queued later do not
    delay them."""

    def __init__(
        self,
        sequences: list[int],
        draws: Draws | None,
        prompts: dict[int, tuple[TokenLogprob, ...]] | None = None,
        pooled: dict[int, torch.Tensor] | None = None,
    ):
        self.sequences, self.draws, self.prompts, self.pooled = sequences, draws, prompts or {}, pooled or {}
        self.sent: torch.cuda.Event | None = None
        self.meter: Meter | None = None
        if draws is None and torch.cuda.is_initialized():  # a chunk alone; who waits for it must not run ahead of it
            self.sent = torch.cuda.Event()
            self.sent.record()
        elif draws is not None and draws.tokens.is_cuda:
            host = torch.empty(draws.tokens.shape, dtype=draws.tokens.dtype, pin_memory=True)
            host.copy_(draws.tokens, non_blocking=True)
            self.draws, self.sent = replace(draws, tokens=host), torch.cuda.Event()
            self.sent.record()

    def result(self) -> StepOutput:
        if self.sent is not None:
            self.sent.synchronize()
        gains = self.draws.collect() if self.draws is not None else []
        samples = [
            Sampled(sequence, tokens, logprobs, self.prompts.pop(sequence, ()) if self.prompts else ())
            for sequence, (tokens, logprobs) in zip(self.sequences, gains, strict=True)
        ]
        silent = (Sampled(sequence, prompt_logprobs=found) for sequence, found in self.prompts.items())
        embedded = (Sampled(sequence, embedding=tuple(vector.tolist())) for sequence, vector in self.pooled.items())
        timing = self.meter.collect() if self.meter is not None else None
        return StepOutput((*samples, *silent, *embedded), timing)
