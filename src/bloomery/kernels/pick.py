"""From logits to tokens on the device: no sort, no host, at most two launches for a batch of mixed wishes.

A line's token is the highest of (score - best) / temperature + Gumbel noise among those that min_p, top_k and top_p
keep, the lowest id among equals; a cold line's is its highest score. What they keep is always a beginning of the order
of kernels/order, so nothing is put in order: a candidate is kept if it is likely enough for min_p, if fewer than top_k
tokens come before it and if those hold less than top_p of the mass. The unrestricted winner usually is, and then it has
won. Otherwise the winner among those before it is the next candidate, and so on: a try leaves out the last candidate
and all behind it, in expectation half of the excess.

Each launch has a program for every line and segment of the vocabulary; the last of a line to arrive concludes.
    scan    finds the unrestricted winner, and settles every line that asks for no more
    verify  counts and weighs what comes before that winner, then tries candidates until one is kept. For top_k it
            lists the few tokens that can be among the k: top_p is a share of what they hold, so the k-th is needed

Masses are sums of whole numbers, exp(z) in units of 2**-40, which no order of adding changes. Scores are float32, so a
result is that of runtime/sampler but for near-exact ties: candidates whose noisy scores, or a border of top_p whose
masses agree to about 1e-6. This file must not know requests, tokens so far or where logits come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from bloomery.kernels.launch import begin, fused, jit, overlap, power_of_two, tl, wait
from bloomery.kernels.noise import gumbel, gumbel_at, key_at, keys
from bloomery.kernels.order import ordered
from bloomery.kernels.truncate import kept

COLDEST = 1e-5  # a temperature below it is greedy
SEGMENT = 2048  # tokens a program looks at
BLOCK = 64  # tokens whose highest score is remembered, to know about where the k-th lies
LISTED = 2048  # tokens that the list of a line holds; when it overflows, the line itself is searched, slowly


class Wishes(NamedTuple):
    """An entry for each row. The three floats are columns of one table, or tensors of their own."""

    temperature: torch.Tensor
    top_p: torch.Tensor  # 1 is off
    min_p: torch.Tensor  # 0 is off
    top_k: torch.Tensor  # whole; 0 is off
    seeds: torch.Tensor  # [rows, 2] int32, from noise.words


class Picked(NamedTuple):
    tokens: torch.Tensor  # [lines] int32
    logprobs: torch.Tensor  # [lines] float32, of the tokens under the logits as they are
    ranks: torch.Tensor  # [lines] int32, 1 is the most likely


@dataclass(frozen=True)
class Scratch:
    """What launches leave for one another: a record of each kind for every line, made once and used by all calls."""

    floats: torch.Tensor  # by segment: best score, mass, mass at temperature 1; of the line: the same; best of blocks
    longs: torch.Tensor  # by segment: mass before the candidate, mass that min_p leaves
    ints: torch.Tensor  # by segment: winner, tokens before the candidate; arrived, listed, candidate, bound; the list

    @classmethod
    def of(cls, lines: int, vocab: int, device: torch.device | str) -> Scratch:
        segments, blocks = sizes(vocab)
        return cls(
            torch.zeros(lines, 3 * segments + 4 + blocks, dtype=torch.float32, device=device),
            torch.zeros(lines, 2 * segments, dtype=torch.int64, device=device),
            torch.zeros(lines, 2 * segments + 4 + LISTED, dtype=torch.int32, device=device),
        )


def sizes(vocab: int) -> tuple[int, int]:
    segments = power_of_two(-(-vocab // SEGMENT))
    return segments, segments * (SEGMENT // BLOCK)


def pick(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    wishes: Wishes,
    scratch: Scratch | None = None,
    restricted: bool = True,
    scored: bool = True,
) -> Picked:
    """logits [lines, vocab]; rows and positions (of the tokens to draw) [lines].

    Without `restricted` no row may ask for top_k, top_p or min_p; only with `scored` are log-probabilities and ranks
    of use. Without both one launch is enough.
    """
    if not fused(logits) or scratch is None:
        return pick_reference(logits, rows, positions, wishes)
    return pick_lines(logits, rows, positions, wishes, scratch, restricted, scored)


def pick_reference(logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, wishes: Wishes) -> Picked:
    raw, index = logits.float(), rows.long()
    temperature, top_p, min_p, top_k = (values[index].unsqueeze(-1) for values in wishes[:4])
    values, ids = ordered(raw, raw.shape[-1])
    z = (values.double() - values[:, :1]) / temperature.double().clamp(min=COLDEST)
    keep, _ = kept(z, min_p.double(), top_k, top_p.double(), None, None)
    noisy = torch.where(keep, z + gumbel(keys(wishes.seeds[index], positions), ids), -torch.inf)
    winners = torch.where(noisy == noisy.amax(-1, keepdim=True), ids, raw.shape[-1]).amin(-1)
    tokens = torch.where(temperature.squeeze(-1) < COLDEST, ids[:, 0], winners)
    own = raw.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return Picked(
        tokens.to(torch.int32),
        own - raw.logsumexp(-1),
        (ids == tokens.unsqueeze(-1)).to(torch.int32).argmax(-1).to(torch.int32) + 1,
    )


def pick_lines(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    wishes: Wishes,
    scratch: Scratch,
    restricted: bool = True,
    scored: bool = True,
) -> Picked:
    """The kernels."""
    lines, vocab = logits.shape
    out = torch.empty(2, lines, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(lines, dtype=torch.float32, device=logits.device)
    segments, blocks = sizes(vocab)
    arguments = (
        logits, rows, positions, *wishes, out, logprobs, scratch.floats, scratch.longs, scratch.ints,
        logits.stride(0), wishes.temperature.stride(0), vocab, lines,
    )  # fmt: skip
    options = {
        "SEGMENTS": segments, "BLOCKS": blocks, "SEGMENT": SEGMENT, "BLOCK": BLOCK, "LISTED": LISTED,
        "COLDEST": COLDEST, "SCORED": scored, "num_warps": 4, **overlap(logits.device),
    }  # fmt: skip
    grid = (lines, -(-vocab // SEGMENT))
    scan_kernel[grid](*arguments, RESTRICTED=restricted, **options)
    if restricted or scored:
        verify_kernel[grid](*arguments, **options)
    return Picked(out[0], logprobs, out[1])


@jit
def scan_kernel(
    logits, rows, positions, temperature, top_p, min_p, top_k, seeds, out, logprobs, floats, longs, ints,
    stride, step, vocab, lines,
    SEGMENTS: tl.constexpr, BLOCKS: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr, LISTED: tl.constexpr,
    COLDEST: tl.constexpr, SCORED: tl.constexpr, RESTRICTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    wait(PDL)
    line, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + line).to(tl.int64)
    heat, k0, k1 = drawn(row, line, temperature, step, seeds, positions)
    logits += line * stride
    floats += line * (3 * SEGMENTS + 4 + BLOCKS)
    ints += line * (2 * SEGMENTS + 4 + LISTED)
    i = segment * SEGMENT + tl.arange(0, SEGMENT)
    s = tl.load(logits + i, mask=i < vocab, other=-float("inf")).to(tl.float32)
    top = tl.max(s, 0)
    v = s
    if heat >= COLDEST:
        v = relative(s, top, heat) + gumbel_at(k0, k1, i)
    tl.store(floats + segment, top)
    tl.store(ints + segment, first_of(v, i))
    if SCORED:
        tl.store(floats + 2 * SEGMENTS + segment, tl.sum(tl.exp(relative(s, top, 1.0)), 0))
    if RESTRICTED:
        if heat >= COLDEST:
            tl.store(floats + SEGMENTS + segment, tl.sum(tl.exp(relative(s, top, heat)), 0))
            b: tl.constexpr = SEGMENT // BLOCK
            best = tl.max(tl.reshape(s, (b, BLOCK)), 1)
            tl.store(floats + 3 * SEGMENTS + 4 + segment * b + tl.arange(0, b), best)
    if arrived(ints + 2 * SEGMENTS):
        j = tl.arange(0, SEGMENTS)
        here = j < tl.num_programs(1)
        tops = tl.load(floats + j, mask=here, other=-float("inf"), cache_modifier=".cg")
        ids = tl.load(ints + j, mask=here, other=0, cache_modifier=".cg")
        top = tl.max(tops, 0)
        v = tl.load(logits + ids, mask=here, other=-float("inf")).to(tl.float32)
        if heat >= COLDEST:
            v = relative(v, top, heat) + gumbel_at(k0, k1, ids)
        winner = tl.minimum(first_of(tl.where(here, v, -float("inf")), ids), vocab - 1)
        own = tl.load(logits + winner).to(tl.float32)
        tl.store(out + line, winner)
        tl.store(out + lines + line, 1)
        open_ = (heat >= COLDEST) & SCORED
        if SCORED:
            mass = tl.load(floats + 2 * SEGMENTS + j, mask=here, other=0.0, cache_modifier=".cg")
            log = top + tl.log(tl.sum(mass * tl.exp(relative(tops, top, 1.0)), 0))
            tl.store(floats + 3 * SEGMENTS + 2, log)
            tl.store(logprobs + line, own - log)
        if RESTRICTED:
            k, p = tl.load(top_k + row).to(tl.int32), tl.load(top_p + row * step)
            floor = tl.log(tl.load(min_p + row * step).to(tl.float32))
            open_ |= (heat >= COLDEST) & ((k > 0) | (p < 1.0) | (relative(own, top, heat) < floor))
            if open_:
                mass = tl.load(floats + SEGMENTS + j, mask=here, other=0.0, cache_modifier=".cg")
                tl.store(floats + 3 * SEGMENTS + 1, tl.sum(mass * tl.exp(relative(tops, top, heat)), 0))
                if k > 0:
                    b = tl.arange(0, BLOCKS)
                    at = floats + 3 * SEGMENTS + 4 + b
                    real = b < tl.num_programs(1) * (SEGMENT // BLOCK)
                    best = tl.load(at, mask=real, other=-float("inf"), cache_modifier=".cg")
                    tl.store(ints + 2 * SEGMENTS + 3, kth(ordinal(best), real, k).to(tl.int32, bitcast=True))
        tl.store(floats + 3 * SEGMENTS, top)
        tl.store(ints + 2 * SEGMENTS + 2, tl.where(open_, winner, -1))


@jit
def verify_kernel(
    logits, rows, positions, temperature, top_p, min_p, top_k, seeds, out, logprobs, floats, longs, ints,
    stride, step, vocab, lines,
    SEGMENTS: tl.constexpr, BLOCKS: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr, LISTED: tl.constexpr,
    COLDEST: tl.constexpr, SCORED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    wait(PDL)
    line, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    floats += line * (3 * SEGMENTS + 4 + BLOCKS)
    longs += line * (2 * SEGMENTS)
    ints += line * (2 * SEGMENTS + 4 + LISTED)
    c = tl.load(ints + 2 * SEGMENTS + 2)
    if c >= 0:
        row = tl.load(rows + line).to(tl.int64)
        heat, k0, k1 = drawn(row, line, temperature, step, seeds, positions)
        k, p = tl.load(top_k + row).to(tl.int32), tl.load(top_p + row * step).to(tl.float64)
        least = tl.load(min_p + row * step).to(tl.float32)
        floor = tl.log(least)
        logits += line * stride
        top = tl.load(floats + 3 * SEGMENTS)
        own = tl.load(logits + c).to(tl.float32)
        border = ordinal(own)
        reach = ordinal(tl.load(floats + segment))  # of the best token of this segment
        i = segment * SEGMENT + tl.arange(0, SEGMENT)
        if k > 0:
            bound = tl.load(ints + 2 * SEGMENTS + 3).to(tl.uint32, bitcast=True)
            if reach >= bound:
                s = tl.load(logits + i, mask=i < vocab, other=-float("inf")).to(tl.float32)
                fit = (ordinal(s) >= bound) & (i < vocab)
                place = tl.atomic_add(ints + 2 * SEGMENTS + 1, tl.sum(fit.to(tl.int32), 0))
                place += tl.cumsum(fit.to(tl.int32), 0) - 1
                tl.store(ints + 2 * SEGMENTS + 4 + place, i, mask=fit & (place < LISTED))
        else:
            count, mass, left, after = 0, tl.full([], 0, tl.int64), tl.full([], 0, tl.int64), -1
            if (reach >= border) | ((least > 0.0) & (p < 1.0)):
                s = tl.load(logits + i, mask=i < vocab, other=-float("inf")).to(tl.float32)
                count, mass, left, value, after = surveyed(s, i, i < vocab, border, c, top, heat, floor, k0, k1)
            tl.store(ints + segment, after)
            tl.store(ints + SEGMENTS + segment, count)
            tl.store(longs + segment, mass)
            tl.store(longs + SEGMENTS + segment, left)
        if arrived(ints + 2 * SEGMENTS):
            size, short = vocab, False
            if k > 0:
                size = tl.load(ints + 2 * SEGMENTS + 1, cache_modifier=".cg")
                tl.store(ints + 2 * SEGMENTS + 1, 0)
                short = size <= LISTED
                size = tl.where(short, size, vocab)
                border = kth_of(logits, ints + 2 * SEGMENTS + 4, short, size, k, SEGMENT, LISTED)
                count, mass, left, after = survey(
                    logits, ints + 2 * SEGMENTS + 4, short, size, border, vocab, top, heat, floor, k0, k1, SEGMENT
                )
                each = weight_of(relative(score_of(border), top, heat))
                whole = (mass - tl.maximum(count - k, 0).to(tl.int64) * each).to(tl.float64) * 9.094947017729282e-13
                c = after
                own = tl.load(logits + c).to(tl.float32)
                border = ordinal(own)
                count, mass, left, after = survey(
                    logits, ints + 2 * SEGMENTS + 4, short, size, border, c, top, heat, floor, k0, k1, SEGMENT
                )
            else:
                j = tl.arange(0, SEGMENTS)
                here = j < tl.num_programs(1)
                ids = tl.load(ints + j, mask=here, other=-1, cache_modifier=".cg")
                v = tl.load(logits + ids, mask=ids >= 0, other=-float("inf")).to(tl.float32)
                v = tl.where(ids >= 0, relative(v, top, heat) + gumbel_at(k0, k1, ids), -float("inf"))
                after = first_of(v, tl.where(ids >= 0, ids, vocab))
                count = tl.sum(tl.load(ints + SEGMENTS + j, mask=here, other=0, cache_modifier=".cg"), 0)
                mass = tl.sum(tl.load(longs + j, mask=here, other=0, cache_modifier=".cg"), 0)
                left = tl.sum(tl.load(longs + SEGMENTS + j, mask=here, other=0, cache_modifier=".cg"), 0)
                whole = tl.load(floats + 3 * SEGMENTS + 1).to(tl.float64)
                if least > 0.0:
                    whole = left.to(tl.float64) * 9.094947017729282e-13
            while (after < vocab) & (not stays(own, count, mass, whole, top, heat, floor, k, p)):
                c = after
                own = tl.load(logits + c).to(tl.float32)
                count, mass, left, after = survey(
                    logits, ints + 2 * SEGMENTS + 4, short, size, ordinal(own), c, top, heat, floor, k0, k1, SEGMENT
                )
            tl.store(out + line, c)
            tl.store(out + lines + line, count + 1)
            if SCORED:
                tl.store(logprobs + line, own - tl.load(floats + 3 * SEGMENTS + 2))
