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
from bloomery.runtime.sampler import Draws, Sampler

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
        self.rows = Rows(plan.max_sequences, self.device)
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
    def run(self, step: Step) -> Pending:
        """Queue the step's work; nothing here waits for the device unless a draft's verdict is wanted."""
        batch = self._place(step)
        ragged = batch.ragged
        plan = self.backend.plan(ragged)
        hidden = self.decoder(batch.ids, ragged.positions, ragged.slots, self.caches, self.backend, plan)
        prompts = {
            share.item.sequence: found for share in batch.shares if (found := self._prompt_logprobs(share, hidden))
        }
        shares = [share for share in batch.shares if share.item.samples]
        return Pending(shares, self._sample(shares, hidden) if shares else None, prompts)

    def _place(self, step: Step) -> Batch:
        for sequence in step.finished:
            self.sampler.release(self.rows.release(sequence).index)
        placed = [(item, self.rows.place(item)) for item in step.items]
        for item, row in placed:
            if item.first is not None:
                self.sampler.admit(row.index, item.first)
        return Batch.of(placed, self.rows.last, self.block_size)

    def _sample(self, shares: list[Share], hidden: torch.Tensor) -> Draws:
        """Logits only where a token is wanted; each row's last token stays on the device for the next step."""
        lines = [line for share in shares for line in share.lines]
        logits = self.decoder.logits(hidden if len(lines) == len(hidden) else hidden[lines])
        asked = [(share.row.index, share.item.start + share.item.count, share.item.drafts) for share in shares]
        draws = self.sampler.sample(logits, asked)
        rows = torch.tensor([share.row.index for share in shares], device=self.device)
        if len(lines) == len(shares):
            self.rows.last[rows] = draws.tokens
        else:
            gained = [tokens[-1] for tokens, _ in draws.collect()]
            self.rows.last[rows] = torch.tensor(gained, device=self.device)
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
    """A step's result, perhaps still on its way from the device."""

    def __init__(self, shares: list[Share], draws: Draws | None, prompts: dict[int, tuple[TokenLogprob, ...]]):
        self.shares, self.draws, self.prompts = shares, draws, prompts

    def result(self) -> StepOutput:
        gains = self.draws.collect() if self.draws is not None else []
        samples = {
            share.item.sequence: Sampled(share.item.sequence, *gain, self.prompts.pop(share.item.sequence, ()))
            for share, gain in zip(self.shares, gains, strict=True)
        }
        silent = (Sampled(sequence, prompt_logprobs=found) for sequence, found in self.prompts.items())
        return StepOutput((*samples.values(), *silent))
