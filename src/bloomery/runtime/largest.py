"""What steps may take beside weights and cache, in bytes: the largest there can be is run before blocks are counted.

It is the largest in every part: as many positions as a step may have, of prompts as long as they may be; a chunk at the
end of the longest sequence; as many tokens drawn as there are sequences, asking for all that sampling knows, and one
prompt scored. What lives as long as the worker does is made here too, and so counted. Nothing in it means anything.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from bloomery.attention.base import Backend, AttentionMetadata
from bloomery.config import Plan
from bloomery.messages import ResolvedSampling, NewRequestData
from bloomery.models.decoder import Decoder
from bloomery.runtime.cache import allocate
from bloomery.runtime.device import upload
from bloomery.runtime.picker import Picker
from bloomery.runtime.sampler import Sampler
from bloomery.spec import Attention

LOGIT_ROWS = 64  # prompt positions whose logits are held at once
GRAIN = 256  # positions: chunks of long prompts begin at a multiple of it
TOP = 20  # log-probabilities asked for beside a token's own
WISHES = ResolvedSampling(
    0.9,
    0,
    0.95,
    0.01,
    0.95,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    logprobs=TOP,
)


@torch.inference_mode()
def largest_step(
    decoder: Decoder, backend: Backend, plan: Plan, kv: torch.dtype, captured: int = 0
) -> int:
    """Of any step, and of the largest one that is `captured`, in positions: graphs keep memory of their own."""
    found = Largest(decoder, backend, plan, kv).bytes(captured)
    if decoder.device.type == "cuda":
        torch.cuda.empty_cache()  # its cache is gone, and counts as free
    return found


class Largest:
    def __init__(self, decoder: Decoder, backend: Backend, plan: Plan, kv: torch.dtype):
        self.decoder = decoder
        self.backend = backend
        self.plan = plan
        self.device = decoder.device
        self.positions = min(plan.max_num_batched_tokens, plan.max_num_seqs * plan.max_length)
        self.blocks = sum(-(-count // plan.block_size) for count in self.prompts(self.positions))
        self.caches = allocate(decoder.spec, self.blocks, plan.block_size, kv, self.device)

    def bytes(self, captured: int) -> int:
        graphs = self.peak(self.choose, min(captured, self.positions)) if captured else 0
        return self.peak(self.draw, self.positions) + self.context() + graphs

    def prompts(self, positions: int) -> list[int]:
        """As long as they may be."""
        whole, rest = divmod(positions, self.plan.max_length)
        return [rest] * (rest > 0) + [self.plan.max_length] * whole

    def context(self) -> int:
        """What a chunk takes more for what lies before it: at the end of the longest sequence, against a beginning."""
        longest = self.plan.max_length
        chunk = min(self.positions, max(longest // 2, 1))
        chunk += (longest - chunk) % GRAIN
        kinds = {
            layer.attention: cache
            for layer, cache in zip(self.decoder.spec.layers, self.caches, strict=True)
        }
        near, far = (
            [self.peak(self.attend, spec, cache, chunk, length) for spec, cache in kinds.items()]
            for length in (chunk, longest)
        )
        return max(max(far) - max(near), 0)

    def peak(self, work: Callable[..., object], *asked: Any) -> int:
        """As the card sees it: with what the allocator rounds up."""
        if self.device.type == "cpu":
            work(*asked)
            return 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_reserved(self.device)
        work(*asked)
        torch.cuda.synchronize(self.device)
        found = torch.cuda.max_memory_reserved(self.device) - before
        torch.cuda.empty_cache()
        return found

    def ragged(self, counts: list[int], length: int | None = None) -> AttentionMetadata:
        """Chunks at the end of sequences of `length`, or whole prompts; blocks of long ones repeat."""
        size = self.plan.block_size
        kind = torch.int64 if self.device.type == "cpu" else torch.int32
        lengths = [length or count for count in counts]
        firsts = [0, *accumulate(-(-one // size) for one in lengths)]
        width = max(-(-one // size) for one in lengths)
        tables = [[(first + i) % self.blocks for i in range(width)] for first in firsts[:-1]]
        places = [
            (position, table[position // size] * size + position % size)
            for count, end, table in zip(counts, lengths, tables, strict=True)
            for position in range(end - count, end)
        ]
        positions, slots = upload(places, self.device, kind).unbind(1)
        starts, ends = (
            upload(numbers, self.device, kind) for numbers in ([0, *accumulate(counts)], lengths)
        )
        singles = sum(count == 1 for count in counts)
        return AttentionMetadata(
            tuple(counts),
            tuple(lengths),
            singles,
            starts,
            ends,
            positions.contiguous(),
            slots.contiguous(),
            upload(tables, self.device, kind),
            size,
        )

    def attend(self, spec: Attention, cache: torch.Tensor, count: int, length: int) -> None:
        """One layer over a chunk that ends at `length`."""
        q = torch.zeros(
            count, spec.num_heads, spec.head_dim, dtype=self.decoder.dtype, device=self.device
        )
        self.backend.attend(q, cache, spec, self.backend.plan(self.ragged([count], length)))

    def compute(self, positions: int) -> torch.Tensor:
        """Hidden states of so many positions."""
        decoder = self.decoder
        ragged = self.ragged(self.prompts(positions))
        ids = ragged.positions % decoder.spec.vocab
        shape = positions, decoder.spec.hidden
        before = (
            None if decoder.first else torch.zeros(shape, dtype=decoder.dtype, device=self.device)
        )
        layout = self.backend.plan(ragged)
        return decoder(
            ids, ragged.positions, ragged.slots, self.caches, self.backend, layout, None, before
        )

    def choose(self, positions: int) -> None:
        """As a captured step does: the picking itself takes nothing more."""
        hidden = self.compute(positions)
        if self.decoder.last:
            self.decoder.logits(hidden[: self.plan.max_num_seqs])

    def draw(self, positions: int) -> tuple[object, ...]:
        """All that may be asked of so many positions, each in its worst form; what must live as long as that."""
        if not self.decoder.last:
            return (self.compute(positions),)
        lines = self.plan.max_num_seqs
        vocab = self.decoder.spec.vocab
        longest = self.plan.max_length
        kept = torch.zeros(
            lines, vocab, dtype=torch.float32, device=self.device
        )  # a captured step's logits
        sampler = Sampler(lines + 1, vocab, self.device, self.plan.deterministic, longest)
        picker = Picker(sampler)
        for row in range(
            lines
        ):  # the first is greedy, for others must then be picked from among all
            tokens = (0,) * (longest - 1 if row == lines - 1 else 1)
            wishes = ResolvedSampling(0.0) if row == 0 and lines > 1 else WISHES
            sampler.admit(row, NewRequestData(tokens, len(tokens), wishes, ()))
        hidden = self.compute(positions)
        hidden.float().sum(0)  # an embedding
        some = torch.arange(max(lines, LOGIT_ROWS), device=self.device) % len(hidden)
        logits = self.decoder.logits(hidden[some])
        sampler.sample(logits[:lines], [(row, longest - 1, ()) for row in range(lines)])
        sampler.prompt_logprobs(logits[:LOGIT_ROWS], [0] * len(logits[:LOGIT_ROWS]), TOP)
        return hidden, kept, picker
