"""One device's share of the work: rows in, a forward pass, tokens out."""

from __future__ import annotations

from pathlib import Path

import torch

from bloomery.artifacts.locate import Artifact
from bloomery.attention.torch_paged import TorchPaged
from bloomery.config import Plan
from bloomery.messages import Capacity, Sampled, Step, StepOutput, TokenLogprob
from bloomery.models.load import load
from bloomery.runtime.batch import Batch, Share
from bloomery.runtime.cache import allocate, fit
from bloomery.runtime.rows import Rows
from bloomery.runtime.sampler import Sampler

LOGIT_ROWS = 64  # prompt positions whose logits are held at once


def artifact(plan: Plan) -> Artifact:
    return Artifact(plan.name, "gguf" if plan.kind == "gguf" else "folder", Path(plan.path), "plan")


class Worker:
    def __init__(self, plan: Plan, progress: bool = False):
        self.device, dtype = torch.device(plan.device), getattr(torch, plan.dtype)
        if self.device.type == "cpu":
            torch.set_num_threads(plan.threads)
        self.backend = TorchPaged()
        loaded = load(artifact(plan), plan.load_format, dtype, self.device, progress)
        self.decoder, model = loaded.decoder, loaded.decoder.spec
        size = fit(plan, model, dtype, self.device)
        self.decoder.reach(size.max_length)
        self.block_size = plan.block_size
        self.caches = allocate(model, size.blocks, plan.block_size, dtype, self.device)
        self.rows = Rows(plan.max_sequences)
        self.sampler = Sampler(plan.max_sequences, model.vocab, self.device)
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

    @torch.inference_mode()
    def run(self, step: Step) -> StepOutput:
        batch = self._place(step)
        ragged = batch.ragged
        plan = self.backend.plan(ragged)
        hidden = self.decoder(batch.ids, ragged.positions, ragged.slots, self.caches, self.backend, plan)
        prompt = {share.item.sequence: self._prompt_logprobs(share, hidden) for share in batch.shares}
        sampled = self._sample(batch, hidden)
        return StepOutput(
            tuple(
                Sampled(item.sequence, *sampled.get(item.sequence, ((), ())), prompt[item.sequence])
                for item in step.items
                if item.samples or prompt[item.sequence]
            )
        )

    def _place(self, step: Step) -> Batch:
        for sequence in step.finished:
            self.sampler.release(self.rows.release(sequence).index)
        placed = [(item, self.rows.place(item)) for item in step.items]
        for item, row in placed:
            if item.first is not None:
                self.sampler.admit(row.index, item.first)
        return Batch.of(placed, self.block_size, self.device)

    def _sample(
        self, batch: Batch, hidden: torch.Tensor
    ) -> dict[int, tuple[tuple[int, ...], tuple[TokenLogprob, ...]]]:
        """Logits only where a token is wanted."""
        shares = [share for share in batch.shares if share.item.samples]
        if not shares:
            return {}
        lines = [line for share in shares for line in share.lines]
        logits = self.decoder.logits(hidden if len(lines) == len(hidden) else hidden[lines])
        asked = [(share.row.index, len(share.row.tokens), share.item.drafts) for share in shares]
        results = self.sampler.sample(logits, asked).collect()
        for share, (tokens, _) in zip(shares, results, strict=True):
            share.row.tokens += tokens
        return {share.item.sequence: result for share, result in zip(shares, results, strict=True)}

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
            found += self.sampler.prompt_logprobs(logits, row.tokens[a + 1 : b + 1], count)
        return tuple(found)
