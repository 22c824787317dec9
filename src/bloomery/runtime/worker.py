"""One device's share of the work: rows in, a forward pass, tokens out.

Steps in which every sequence merely goes on by one position run as a DecodeStep, all others as a Batch that the host
builds. Both leave the rows' state on the device as the next step wants it, so neither waits for the other's result.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from bloomery.artifacts.locate import Artifact
from bloomery.attention.base import Ragged
from bloomery.attention.choose import choose
from bloomery.config import Plan
from bloomery.messages import Capacity, Item, Sampled, Step, StepOutput, TokenLogprob
from bloomery.models.checkpoint import Report
from bloomery.models.load import load
from bloomery.runtime.batch import Batch, Share
from bloomery.runtime.cache import allocate, fit
from bloomery.runtime.decode import DecodeStep, buckets, upload
from bloomery.runtime.device import check
from bloomery.runtime.picker import Picker
from bloomery.runtime.progress import bar
from bloomery.runtime.rows import Row, Rows
from bloomery.runtime.sampler import Draws, Sampler

LOGIT_ROWS = 64  # prompt positions whose logits are held at once
GRAPHS = 1 << 30  # bytes kept for captured steps and what libraries take behind our back


class Worker:
    def __init__(self, plan: Plan, progress: bool = False, report: Report | None = None):
        self.device, dtype = check(plan.device), getattr(torch, plan.dtype)
        if self.device.type == "cpu":
            torch.set_num_threads(plan.threads)
        artifact = Artifact(plan.name, "gguf" if plan.kind == "gguf" else "folder", Path(plan.path), "plan")
        loaded = load(artifact, plan.load_format, dtype, self.device, progress, report)
        self.decoder, model = loaded.decoder, loaded.decoder.spec
        self.backend = choose((layer.attention for layer in model.layers), dtype, self.device)
        self.block_size = plan.block_size
        self.decoder.reach(plan.max_length)
        size = fit(plan, model, dtype, self.device, self._largest_step(plan, dtype))
        if size.max_length != plan.max_length:
            self.decoder.reach(size.max_length)
        self.caches = allocate(model, size.blocks + 1, plan.block_size, dtype, self.device)  # the last is nobody's
        width = -(-size.max_length // plan.block_size)
        self.rows = Rows(plan.max_sequences, width, size.blocks, self.device)
        self.sampler = Sampler(plan.max_sequences + 1, model.vocab, self.device)  # nobody's row is greedy
        self.decode = DecodeStep(
            self.decoder, self.backend, self.caches, self.rows, plan.block_size, Picker(self.sampler)
        )
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
            notes=tuple(filter(None, (*loaded.notes, size.note))),
        )

        if plan.graphs:
            self._capture(progress, report)

    @torch.inference_mode()
    def _capture(self, progress: bool, report: Report | None) -> None:
        with bar("graphs", len(buckets(self.rows.count)), progress, report) as advance:
            self.decode.capture(advance)

    @torch.inference_mode()
    def _largest_step(self, plan: Plan, dtype: torch.dtype) -> int:
        """Bytes that a step may take beside weights and cache: measured on the largest there can be."""
        if self.device.type == "cpu":
            return 0
        model, count = self.decoder.spec, min(plan.max_batch_tokens, plan.max_length)
        blocks = -(-count // plan.block_size)
        caches = allocate(model, blocks, plan.block_size, dtype, self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        numbers = torch.arange(count, dtype=torch.int32, device=self.device)
        ragged = Ragged(
            (count,), (count,), 0, upload([0, count], self.device), upload([count], self.device), numbers, numbers,
            numbers[None, :blocks], plan.block_size,
        )  # fmt: skip
        hidden = self.decoder(numbers % model.vocab, numbers, numbers, caches, self.backend, self.backend.plan(ragged))
        self.decoder.logits(hidden[: plan.max_sequences])
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del hidden, caches
        torch.cuda.empty_cache()
        return peak + GRAPHS

    @torch.inference_mode()
    def run(self, step: Step) -> Pending:
        """Queue the step's work; nothing here waits for the device unless a draft's verdict is wanted."""
        for sequence in step.finished:
            self.sampler.release(self.rows.release(sequence).index)
        place, going = self.rows.place, self.device.type == "cuda"
        placed = []
        for item in step.items:
            row = place(item)
            placed.append((item, row))
            if item.first is not None:
                self.sampler.admit(row.index, item.first)
            going = going and item.count == 1 and not item.drafts and not row.knows(item.start)
        return self._go_on(placed) if going else self._compute(Batch.of(placed, self.rows.last, self.block_size))

    def _go_on(self, placed: list[tuple[Item, Row]]) -> Pending:
        """Every sequence by one position, from what the device already holds."""
        members = [row for _, row in placed]
        picked = all(row.plain for row in members)
        count = self.decode.run(members, picked)
        sequences = [item.sequence for item, _ in placed]
        if picked:
            return Pending(sequences, Draws(self.decode.tokens[:count], ((),) * count))
        shares = [Share(item, row, i) for i, (item, row) in enumerate(placed)]
        return Pending(sequences, self._draw(shares, self.decode.logits[:count]))

    def _compute(self, batch: Batch) -> Pending:
        ragged = batch.ragged
        plan = self.backend.plan(ragged)
        hidden = self.decoder(batch.ids, ragged.positions, ragged.slots, self.caches, self.backend, plan)
        prompts = {
            share.item.sequence: found for share in batch.shares if (found := self._prompt_logprobs(share, hidden))
        }
        shares = [share for share in batch.shares if share.item.samples]
        if not shares:
            return Pending([], None, prompts)
        lines = [line for share in shares for line in share.lines]
        logits = self.decoder.logits(hidden if len(lines) == len(hidden) else hidden[lines])
        return Pending([share.item.sequence for share in shares], self._draw(shares, logits), prompts)

    def _draw(self, shares: list[Share], logits: torch.Tensor) -> Draws:
        """One token a line; each row's last token stays on the device, where the next step looks for it."""
        asked = [(share.row.index, share.item.start + share.item.count, share.item.drafts) for share in shares]
        draws = self.sampler.sample(logits, asked)
        rows, ends = torch.tensor([(row, position) for row, position, _ in asked], device=self.device).unbind(1)
        if len(logits) == len(shares):
            self.rows.last[rows] = draws.tokens.to(self.rows.last.dtype)
        else:  # a sequence with drafts has no other step in flight: its verdict may be waited for
            gained = [tokens for tokens, _ in draws.collect()]
            self.rows.last[rows] = torch.tensor([tokens[-1] for tokens in gained], device=self.device).to(
                self.rows.last.dtype
            )
            ends = ends + torch.tensor([len(tokens) - 1 for tokens in gained], device=self.device)
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
            logits = self.decoder.logits(hidden[at + a : at + b])
            found += self.sampler.prompt_logprobs(logits, row.start.tokens[a + 1 : b + 1], count)
        return tuple(found)


class Pending:
    """A step's result, perhaps still on its way from the device. Tokens are sent off at once: steps queued later do not
    delay them."""

    def __init__(
        self, sequences: list[int], draws: Draws | None, prompts: dict[int, tuple[TokenLogprob, ...]] | None = None
    ):
        self.sequences, self.draws, self.prompts = sequences, draws, prompts or {}
        self.sent: torch.cuda.Event | None = None
        if draws is not None and draws.tokens.is_cuda:
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
        return StepOutput((*samples, *silent))
