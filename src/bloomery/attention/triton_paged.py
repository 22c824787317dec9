"""Paged attention in Triton: the path on a GPU, for steps the host knows and for steps captured in a graph.

Single positions go through kernels/paged_decode, sequences of several through kernels/paged_prefill. A long
prompt, or a long chunk of one, may go to the library instead (cuDNN, by way of torch), which is faster there and knows
no pages. Single positions keep the memory busy and prompts the arithmetic, so a step of both runs them side by side, on
two streams. Nothing here waits for the device. A captured step has no host copy of counts and lengths: it is all single
positions, or has a fixed number of prompts behind them, each perhaps as long as the step or a single position.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
import torch.nn.functional as F

from bloomery.attention.base import AttentionMetadata, slopes
from bloomery.kernels import launch, paged_decode, paged_prefill
from bloomery.kernels.merge import merge
from bloomery.kernels.paged_decode import Scoring
from bloomery.kernels.rounded_cache import read
from bloomery.spec import Alibi, Attention

WIDEST = 256  # of a head
COUNTERS = 1 << 14  # of splits that have arrived, for each of the two kernels
# new positions from which the library pays; a multiple of what it is given
LIBRARY = 2048
GRAIN = 256


@dataclass(frozen=True)
class Prompt:
    """Neighbouring sequences of several new positions, or one with many."""

    first: int  # sequence
    count: int
    longest: int  # new positions
    tokens: slice
    whole: bool  # one sequence, its new positions enough for the library
    before: int  # positions of a whole one that are in the cache already


@dataclass(frozen=True)
class Plan:
    ragged: AttentionMetadata
    prompts: tuple[Prompt, ...]
    arrived: (
        torch.Tensor
    )  # zeros between launches: of single positions, then of prompts, for they run at once


class Aside:
    """A second stream that starts where the current one stands. What it was given must be joined before memory of
    either stream is used for something else."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self.within = torch.cuda.stream(self.stream)
        self.forked = torch.cuda.Event()
        self.done = torch.cuda.Event()

    def __enter__(self) -> None:
        self.forked.record()
        self.stream.wait_event(self.forked)
        self.within.__enter__()

    def __exit__(self, *raised: object) -> None:
        self.done.record()
        self.within.__exit__(*raised)

    def join(self) -> None:
        torch.cuda.current_stream().wait_event(self.done)


class TritonPaged:
    """early: in a captured step, decode reads the cache before its predecessor has ended. The step's layout (tables,
    ends, slots) must then be written before the graph, or by a kernel of it that no other may overtake.
    library: the new positions from which a prompt goes to the library; None is never.
    abreast: single positions and prompts of a step run side by side.
    decode, prefill: tilings, for measuring; otherwise they are chosen by shape.
    """

    def __init__(
        self,
        early: bool = False,
        library: int | None = LIBRARY,
        decode: paged_decode.Tiling | None = None,
        prefill: paged_prefill.Tiling | None = None,
        abreast: bool = True,
    ):
        self.early = early
        self.library = library
        self.decode = decode
        self.prefill = prefill
        self.abreast = abreast
        self.aside: Aside | None = None
        self.slopes: dict[tuple[int, Alibi], torch.Tensor] = {}
        self.arrived: torch.Tensor | None = None

    def refuses(self, spec: Attention, dtype: torch.dtype, device: torch.device) -> str | None:
        if launch.triton is None:
            return "triton is not installed"
        if device.type != "cuda" and not launch.interpreted():
            return "it needs a CUDA device"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs a GPU of compute capability 8.0 or more"
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"it knows float32, float16 and bfloat16, not {dtype}"
        if spec.head_dim > WIDEST:
            return f"heads of {spec.head_dim} are wider than {WIDEST}"
        return None

    def plan(self, ragged: AttentionMetadata) -> Plan:
        device = ragged.ends.device
        if self.arrived is None:
            self.arrived = torch.zeros(2 * COUNTERS, dtype=torch.int32, device=device)
        if ragged.several:
            most = len(ragged.positions)
            prompt = Prompt(ragged.singles, ragged.several, most, slice(0, most), False, 0)
            return Plan(ragged, (prompt,), self.arrived)
        if len(ragged.counts) == ragged.singles or not ragged.counts:
            return Plan(ragged, (), self.arrived)
        starts = [0, *accumulate(ragged.counts)]
        several = range(ragged.singles, len(ragged.counts))
        prompts = []
        for whole, run in groupby(
            several, lambda i: self._whole(ragged.counts[i], ragged.lengths[i])
        ):
            members = list(run)
            for group in [[i] for i in members] if whole else [members]:
                longest = max(ragged.counts[i] for i in group)
                tokens = slice(starts[group[0]], starts[group[-1] + 1])
                before = ragged.lengths[group[0]] - ragged.counts[group[0]]
                prompts.append(Prompt(group[0], len(group), longest, tokens, whole, before))
        return Plan(ragged, tuple(prompts), self.arrived)

    def _whole(self, count: int, length: int) -> bool:
        return self.library is not None and count >= self.library and (length - count) % GRAIN == 0

    def attend(
        self, q: torch.Tensor, cache: torch.Tensor, spec: Attention, plan: Plan
    ) -> torch.Tensor:
        ragged = plan.ragged
        scoring = self.scoring(spec, q.device)
        if (
            len(plan.prompts) == 1
            and not ragged.singles
            and self._by_library(plan.prompts[0], spec, q)
        ):
            return self._library(q, cache, spec, plan.prompts[0], ragged)
        q = q.contiguous()
        out = torch.empty_like(q)
        by_library = [prompt for prompt in plan.prompts if self._by_library(prompt, spec, q)]
        own = [prompt for prompt in plan.prompts if prompt not in by_library]
        aside = self._aside(q.device) if ragged.singles and own else None
        with aside or nullcontext():
            for prompt in own:
                self._prefill(q, cache, out, spec, scoring, prompt, ragged, plan.arrived[COUNTERS:])
        if ragged.singles:
            self._decode(q, cache, out, spec, scoring, plan)
        for prompt in by_library:
            found = self._library(q[prompt.tokens], cache, spec, prompt, ragged)
            out[prompt.tokens] = found.view(-1, spec.num_heads, spec.head_dim)
        if aside is not None:
            aside.join()
        return out.flatten(1)

    def _aside(self, device: torch.device) -> Aside | None:
        if self.abreast and self.aside is None and device.type == "cuda":
            self.aside = Aside(device)
        return self.aside

    def _prefill(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        out: torch.Tensor,
        spec: Attention,
        scoring: Scoring,
        prompt: Prompt,
        ragged: AttentionMetadata,
        arrived: torch.Tensor,
    ) -> None:
        share = spec.num_heads // spec.num_kv_heads
        tokens = prompt.tokens.stop - prompt.tokens.start
        cut = self.prefill or paged_prefill.tiling(
            prompt.longest * share,
            tokens * share,
            spec.head_dim,
            q.element_size(),
            spec.num_kv_heads,
            launch.processors(q.device),
        )
        paged_prefill.paged_prefill(
            q,
            cache,
            out,
            ragged.tables,
            ragged.starts,
            ragged.ends,
            prompt.first,
            prompt.count,
            prompt.longest,
            tokens,
            ragged.block_size,
            scoring,
            cut,
            arrived,
        )

    def _decode(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        out: torch.Tensor,
        spec: Attention,
        scoring: Scoring,
        plan: Plan,
    ) -> None:
        ragged = plan.ragged
        positions = ragged.tables.shape[1] * ragged.block_size
        if spec.window is not None:
            positions = min(positions, spec.window)
        cut = self.decode or paged_decode.tiling(
            ragged.singles,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            q.element_size(),
            positions,
            launch.processors(q.device),
        )
        early = self.early and not ragged.counts and not ragged.several
        paged_decode.paged_decode(
            q,
            cache,
            out,
            ragged.tables,
            ragged.ends,
            ragged.slots,
            ragged.singles,
            ragged.block_size,
            scoring,
            cut,
            plan.arrived[:COUNTERS],
            early,
        )

    def scoring(self, spec: Attention, device: torch.device) -> Scoring:
        found = None
        if isinstance(spec.position, Alibi):
            key = spec.num_heads, spec.position
            if key not in self.slopes:
                self.slopes[key] = slopes(spec, spec.position).to(device)
            found = self.slopes[key]
        return Scoring(spec.softmax_scale, spec.window, spec.softcap, found)

    def _by_library(self, prompt: Prompt, spec: Attention, q: torch.Tensor) -> bool:
        near = spec.window is None or prompt.before + prompt.longest <= spec.window
        return prompt.whole and near and known(spec, q.dtype)

    def _library(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        spec: Attention,
        prompt: Prompt,
        ragged: AttentionMetadata,
    ) -> torch.Tensor:
        """Of one sequence: its new positions over themselves, and over what was in the cache before, made one.

        Lengths are rounded up, for the library prepares itself for each anew; nobody looks at what is added last.
        """
        slots = ragged.slots[prompt.tokens]
        before = prompt.before
        size = ragged.block_size
        count = len(slots)
        more = -len(slots) % GRAIN
        if more:
            q = F.pad(q, (0, 0, 0, 0, 0, more))
            slots = torch.cat((slots, slots[-1:].expand(more)))
        if before:
            table = ragged.tables[prompt.first, : -(-before // size), None] * size
            former = (table + torch.arange(size, device=table.device, dtype=table.dtype)).flatten()[
                :before
            ]
            slots = torch.cat((former, slots))
        keys, values = (half.transpose(0, 1)[None] for half in read(cache, slots, q.dtype))
        asked = q.transpose(0, 1)[None]
        scale = spec.softmax_scale
        out, sums = library(
            asked, keys[:, :, before:], values[:, :, before:], scale, causal=True, summed=before > 0
        )
        if before:
            other = library(
                asked, keys[:, :, :before], values[:, :, :before], scale, causal=False, summed=True
            )
            out = merge(out, other[0], sums, other[1])
        return out[:count].flatten(1)


def known(spec: Attention, dtype: torch.dtype) -> bool:
    """Whether the library does such attention, within a window if there is one."""
    plain = spec.softcap is None and not isinstance(spec.position, Alibi)
    return plain and dtype.itemsize == 2 and spec.head_dim in (64, 128)


def library(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, summed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k, v [1, heads, positions, dim] -> [positions, heads, dim], and its sums' logarithms [heads, positions].

    Without `summed` the logarithms mean nothing; the library is a good deal faster then.
    """
    if not q.is_cuda:
        return library_reference(q, k, v, scale, causal)
    out, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, summed, 0.0, causal, scale=scale
    )
    return out[0].transpose(0, 1), sums[0].view(out.shape[1], -1) if summed else sums


def library_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (half[0].repeat_interleave(q.shape[1] // half.shape[1], 0).float() for half in (k, v))
    scores = q[0].float() @ k.transpose(1, 2) * scale
    if causal:
        scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
    return (scores.softmax(-1) @ v).transpose(0, 1).to(q.dtype), scores.logsumexp(-1)
