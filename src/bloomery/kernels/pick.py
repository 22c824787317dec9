"""From logits to tokens on the device: no sort, no host, at most two launches for a batch of mixed wishes.

A line's token is the highest of (score - best) / temperature + Gumbel noise among those that min_p, top_k and top_p
keep, the lowest id among equals; a cold line's is its highest score. What they keep is always a beginning of the order
of kernels/order, so nothing is put in order: a candidate is kept if it is likely enough for min_p, if fewer than top_k
tokens come before it and if those hold less than top_p of the mass. The unrestricted winner usually is, and then it has
won. Otherwise the winner among those before it is the next candidate, and so on: a try leaves out the last candidate
and all behind it, in expectation half of the excess.

Each launch has a program for every line and segment of the vocabulary; the last of a line to arrive concludes.
    scan    finds the unrestricted winner, and settles every line that asks for no more
    verify  lists the tokens that matter to the others, those before the winner or those that can be among the top_k,
            usually few; then tries candidates until one is kept

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
PROGRAMS = 512  # of the second launch, about


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
    """What launches leave for one another: two records for every line, made once and used by all calls."""

    floats: (
        torch.Tensor
    )  # by segment: best score, mass, mass at temperature 1; the line's; by block: best score
    ints: (
        torch.Tensor
    )  # by segment: winner; of the line: arrived, listed, candidate, bound; the list
    segment: int  # tokens that a program looks at together
    block: int  # tokens whose highest score is remembered, to know about where the k-th lies
    listed: int  # tokens that the list of a line holds; when it overflows, the line itself is searched, slowly

    @classmethod
    def of(
        cls,
        lines: int,
        vocab: int,
        device: torch.device | str,
        segment: int = 2048,
        block: int = 64,
        listed: int = 4096,
    ) -> Scratch:
        segments = power_of_two(-(-vocab // segment))
        floats = 3 * segments + 4 + segments * (segment // block)
        ints = segments + 4 + listed
        return cls(
            torch.zeros(lines, floats, dtype=torch.float32, device=device),
            torch.zeros(lines, ints, dtype=torch.int32, device=device),
            segment,
            block,
            listed,
        )


def pick(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    wishes: Wishes,
    scratch: Scratch | None = None,
    restricted: bool = True,
    scored: bool = False,
) -> Picked:
    """logits [lines, vocab]; rows and positions (of the tokens to draw) [lines].

    Without `restricted` no row may ask for top_k, top_p or min_p; only with `scored` are log-probabilities and ranks
    of use. Without both one launch is enough.
    """
    if not fused(logits) or scratch is None:
        return pick_reference(logits, rows, positions, wishes)
    return pick_lines(logits, rows, positions, wishes, scratch, restricted, scored)


def pick_reference(
    logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, wishes: Wishes
) -> Picked:
    raw = logits.float()
    index = rows.long()
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
    scored: bool = False,
) -> Picked:
    """The kernels."""
    lines, vocab = logits.shape
    out = torch.empty(2, lines, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(lines, dtype=torch.float32, device=logits.device)
    segments = -(-vocab // scratch.segment)
    arguments = (
        logits,
        rows,
        positions,
        *wishes,
        out,
        logprobs,
        scratch.floats,
        scratch.ints,
        logits.stride(0),
        wishes.temperature.stride(0),
        vocab,
        lines,
    )
    options = {
        "SEGMENTS": power_of_two(segments),
        "SEGMENT": scratch.segment,
        "BLOCK": scratch.block,
        "LISTED": scratch.listed,
        "COLDEST": COLDEST,
        "SCORED": scored,
        **overlap(logits.device),
    }
    scan_kernel[(lines, segments)](
        *arguments, RESTRICTED=restricted or scored, **options, num_warps=4
    )
    if restricted or scored:
        parts = max(1, min(segments, PROGRAMS // lines))
        verify_kernel[(lines, parts)](*arguments, **options, num_warps=8)
    return Picked(out[0], logprobs, out[1])


class Penalties(NamedTuple):
    """An entry for each row, in float32; what rows said so far, of which a line at position p sees what is below p."""

    repetition: torch.Tensor  # over prompt and output; 1 is off
    frequency: torch.Tensor  # over output; 0 is off
    presence: torch.Tensor  # over output; 0 is off
    history: torch.Tensor  # [rows, length] int32
    prompts: torch.Tensor  # [rows] lengths


def penalise(
    logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, penalties: Penalties
) -> None:
    """logits [lines, vocab] float32, changed in place before `pick`; lines whose row asks for nothing stay."""
    if fused(logits):
        penalise_lines(logits, rows, positions, penalties)
    else:
        penalise_reference(logits, rows, positions, penalties)


def penalise_reference(
    logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, by: Penalties
) -> None:
    index = rows.long()
    tokens = by.history[index].long()
    where = torch.arange(by.history.shape[1], device=logits.device)
    present = where < positions.unsqueeze(-1)
    output = present & (where >= by.prompts[index].unsqueeze(-1))
    repetition, frequency, presence = (values[index].unsqueeze(-1) for values in by[:3])
    seen = torch.zeros_like(logits).scatter_add_(1, tokens, present.float()) > 0
    counts = torch.zeros_like(logits).scatter_add_(1, tokens, output.float())
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(seen, repeated, logits) - frequency * counts - presence * (counts > 0))


def penalise_lines(
    logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, by: Penalties
) -> None:
    """The kernel."""
    lines = len(logits)
    grid = (lines, max(1, min(-(-by.history.shape[1] // 64), PROGRAMS // lines)))
    penalise_kernel[grid](
        logits,
        rows,
        positions,
        *by,
        logits.stride(0),
        by.history.stride(0),
        WIDTH=64,
        num_warps=4,
        **overlap(logits.device),
    )


@jit
def penalise_kernel(
    logits,
    rows,
    positions,
    repetition,
    frequency,
    presence,
    history,
    prompts,
    stride,
    length,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every place of the history is compared with every other; a token's last place acts for all of them."""
    begin(PDL)
    wait(PDL)
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + line).to(tl.int64)
    repeat = tl.load(repetition + row)
    often = tl.load(frequency + row)
    ever = tl.load(presence + row)
    if (repeat != 1.0) | (often != 0.0) | (ever != 0.0):
        end = tl.load(positions + line)
        prompt = tl.load(prompts + row)
        logits += line * stride
        history += row * length
        for start in range(tl.program_id(1) * WIDTH, end, tl.num_programs(1) * WIDTH):
            i = start + tl.arange(0, WIDTH)
            token = tl.load(history + i, mask=i < end, other=-1)
            later = tl.zeros([WIDTH], tl.int32)
            count = tl.zeros([WIDTH], tl.int32)
            for other in range(0, end, WIDTH):
                j = other + tl.arange(0, WIDTH)
                same = token[:, None] == tl.load(history + j, mask=j < end, other=-2)[None, :]
                later += tl.sum((same & (j[None, :] > i[:, None])).to(tl.int32), 1)
                count += tl.sum((same & (j >= prompt)[None, :]).to(tl.int32), 1)
            acts = (i < end) & (later == 0)
            s = tl.load(logits + token, mask=acts, other=0.0)
            s = tl.where(s > 0, s / repeat, s * repeat)
            s = s - often * count - tl.where(count > 0, ever, 0.0)
            tl.store(logits + token, s, mask=acts)


@jit
def scan_kernel(
    logits,
    rows,
    positions,
    temperature,
    top_p,
    min_p,
    top_k,
    seeds,
    out,
    logprobs,
    floats,
    ints,
    stride,
    step,
    vocab,
    lines,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
    COLDEST: tl.constexpr,
    SCORED: tl.constexpr,
    RESTRICTED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait(PDL)
    line = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    row = tl.load(rows + line).to(tl.int64)
    heat, k0, k1 = drawn_with(row, line, temperature, step, seeds, positions)
    logits += line * stride
    floats += line * (3 * SEGMENTS + 4 + SEGMENTS * (SEGMENT // BLOCK))
    ints += line * (SEGMENTS + 4 + LISTED)
    i = segment * SEGMENT + tl.arange(0, SEGMENT)
    s = scores_at(logits + i, i < vocab)
    top = tl.max(s, 0)
    tl.store(floats + segment, top)
    tl.store(ints + segment, winner_of(s, i, i < vocab, top, heat, k0, k1, COLDEST))
    if SCORED:
        tl.store(floats + 2 * SEGMENTS + segment, tl.sum(tl.exp(relative(s, top, 1.0)), 0))
    if RESTRICTED:
        if heat >= COLDEST:
            tl.store(floats + SEGMENTS + segment, tl.sum(tl.exp(relative(s, top, heat)), 0))
            b = segment * (SEGMENT // BLOCK) + tl.arange(0, SEGMENT // BLOCK)
            tl.store(
                floats + 3 * SEGMENTS + 4 + b, tl.max(tl.reshape(s, (SEGMENT // BLOCK, BLOCK)), 1)
            )
    if is_last(ints + SEGMENTS):
        j = tl.arange(0, SEGMENTS)
        here = j < tl.num_programs(1)
        tops = tl.load(floats + j, mask=here, other=-float("inf"), cache_modifier=".cg")
        ids = tl.load(ints + j, mask=here, other=0, cache_modifier=".cg")
        best = tl.max(tops, 0)
        leaders = scores_at(logits + ids, here)
        c = tl.minimum(winner_of(leaders, ids, here, best, heat, k0, k1, COLDEST), vocab - 1)
        own = tl.load(logits + c).to(tl.float32)
        tl.store(out + line, c)
        tl.store(out + lines + line, 1)
        if SCORED:
            log = best + tl.log(mass_of(floats + 2 * SEGMENTS + j, tops, here, best, 1.0))
            tl.store(floats + 3 * SEGMENTS + 2, log)
            tl.store(logprobs + line, own - log)
        if RESTRICTED:
            k = tl.load(top_k + row).to(tl.int32)
            least = tl.load(min_p + row * step).to(tl.float32)
            cut = (k > 0) | (least > 0.0) | (tl.load(top_p + row * step) < 1.0)
            leave = (heat >= COLDEST) & (cut | SCORED)
            tl.store(ints + SEGMENTS + 2, tl.where(leave, c, -1))
            if leave:
                tl.store(floats + 3 * SEGMENTS, best)
                tl.store(
                    floats + 3 * SEGMENTS + 1,
                    mass_of(floats + SEGMENTS + j, tops, here, best, heat),
                )
                bound = bound_of(
                    own, best, heat, least, k, floats + 3 * SEGMENTS + 4, SEGMENTS, SEGMENT // BLOCK
                )
                tl.store(ints + SEGMENTS + 3, bound.to(tl.int32, bitcast=True))


@jit
def verify_kernel(
    logits,
    rows,
    positions,
    temperature,
    top_p,
    min_p,
    top_k,
    seeds,
    out,
    logprobs,
    floats,
    ints,
    stride,
    step,
    vocab,
    lines,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
    COLDEST: tl.constexpr,
    SCORED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait(PDL)
    line = tl.program_id(0).to(tl.int64)
    floats += line * (3 * SEGMENTS + 4 + SEGMENTS * (SEGMENT // BLOCK))
    ints += line * (SEGMENTS + 4 + LISTED)
    c = tl.load(ints + SEGMENTS + 2)
    if c >= 0:  # the scan left it open
        logits += line * stride
        bound = tl.load(ints + SEGMENTS + 3).to(tl.uint32, bitcast=True)
        for segment in range(tl.program_id(1), tl.cdiv(vocab, SEGMENT), tl.num_programs(1)):
            if ordinal(tl.load(floats + segment)) >= bound:
                i = segment * SEGMENT + tl.arange(0, SEGMENT)
                s = scores_at(logits + i, i < vocab)
                fits = (i < vocab) & (ordinal(s) >= bound)
                place = tl.atomic_add(ints + SEGMENTS + 1, tl.sum(fits.to(tl.int32), 0))
                place += tl.cumsum(fits.to(tl.int32), 0) - 1
                tl.store(ints + SEGMENTS + 4 + place, i, mask=fits & (place < LISTED))
        if is_last(ints + SEGMENTS):
            row = tl.load(rows + line).to(tl.int64)
            heat, k0, k1 = drawn_with(row, line, temperature, step, seeds, positions)
            k = tl.load(top_k + row).to(tl.int32)
            least = tl.load(min_p + row * step).to(tl.float32)
            share = tl.load(top_p + row * step).to(tl.float64)
            listed = tl.atomic_xchg(
                ints + SEGMENTS + 1, 0
            )  # all threads must know the same: no load, then a store
            size = tl.where(listed <= LISTED, listed, vocab)
            top = tl.load(floats + 3 * SEGMENTS)
            whole = tl.load(floats + 3 * SEGMENTS + 1).to(tl.float64)
            c, count = settled(
                c,
                logits,
                ints + SEGMENTS + 4,
                listed <= LISTED,
                size,
                vocab,
                top,
                whole,
                heat,
                k,
                share,
                least,
                k0,
                k1,
                SEGMENT,
                LISTED,
            )
            tl.store(out + line, c)
            tl.store(out + lines + line, count + 1)
            if SCORED:
                tl.store(
                    logprobs + line,
                    tl.load(logits + c).to(tl.float32) - tl.load(floats + 3 * SEGMENTS + 2),
                )


@jit
def settled(
    c,
    logits,
    ids,
    short,
    size,
    vocab,
    top,
    whole,
    heat,
    k,
    share,
    least,
    k0,
    k1,
    SEGMENT: tl.constexpr,
    LISTED: tl.constexpr,
):
    """The first candidate that is kept, from c on, and how many tokens come before it.

    Where top_k or min_p decide what top_p is a share of, all they leave is surveyed first, and its winner tried first;
    of tokens that equal the k-th too many may have been weighed.
    """
    unit: tl.constexpr = 2.0**-40
    floor = tl.where(least > 0.0, tl.log(tl.maximum(least, 1e-30)), -float("inf"))
    if (k > 0) | (least > 0.0):
        last = kth_of(logits, ids, short, size, k, SEGMENT, LISTED)
        count, mass, c = survey(
            logits, ids, short, size, last, vocab, vocab, top, heat, floor, k0, k1, SEGMENT
        )
        c = tl.minimum(c, vocab - 1)  # where nothing is a number, nothing is left
        spare = tl.where(k > 0, tl.maximum(count - k, 0), 0).to(tl.int64)
        whole = (mass - spare * weight(relative(score(last), top, heat))).to(tl.float64) * unit
    going = True
    count = 0
    while going:
        own = tl.load(logits + c).to(tl.float32)
        count, mass, ahead = survey(
            logits, ids, short, size, ordinal(own), c, vocab, top, heat, floor, k0, k1, SEGMENT
        )
        kept = ((k == 0) | (count < k)) & (relative(own, top, heat) >= floor)
        kept &= (share >= 1.0) | (mass.to(tl.float64) * unit < share * whole)
        going = (ahead < vocab) & (kept == 0)
        c = tl.where(going, ahead, c)
    return c, count


@jit
def survey(
    logits, ids, short, size, border, c, vocab, top, heat, floor, k0, k1, SEGMENT: tl.constexpr
):
    """Of the tokens before the place (border, c) in the order, as min_p leaves them: count, mass, winner or `vocab`."""
    count = 0
    mass = tl.full([], 0, tl.int64)
    best = -float("inf")
    winner = vocab
    for start in range(0, size, SEGMENT):
        i, s, here = looked_at(logits, ids, short, start, size, SEGMENT)
        u = ordinal(s)
        z = relative(s, top, heat)
        here &= ((u > border) | ((u == border) & (i < c))) & (z >= floor)
        v = tl.where(here, z + gumbel_at(k0, k1, i), -float("inf"))
        count += tl.sum(here.to(tl.int32), 0)
        mass += tl.sum(tl.where(here, weight(z), 0), 0)
        high = tl.max(v, 0)
        first = tl.min(tl.where(here & (v == high), i, vocab), 0)
        winner = tl.where((high > best) | ((high == best) & (first < winner)), first, winner)
        best = tl.maximum(best, high)
    return count, mass, winner


@jit
def kth_of(logits, ids, short, size, k, SEGMENT: tl.constexpr, LISTED: tl.constexpr):
    """The k-th highest score as an ordinal; that of -inf, which all reach, if there are fewer or k is 0."""
    last = tl.full([], 0, tl.uint32)
    if k > 0:
        if short:
            _i, s, here = looked_at(logits, ids, short, 0, size, LISTED)
            last = kth(tl.where(here, ordinal(s), 0), k)
        else:
            bit = tl.full([], 0x80000000, tl.uint32)
            for _ in range(32):
                count = 0
                for start in range(0, size, SEGMENT):
                    _i, s, here = looked_at(logits, ids, short, start, size, SEGMENT)
                    count += tl.sum((here & (ordinal(s) >= (last | bit))).to(tl.int32), 0)
                last = tl.where(count >= k, last | bit, last)
                bit = bit >> 1
    return tl.maximum(last, 0x007FFFFF)


@jit
def kth(u, k):
    """The k-th highest of a tile of ordinals, bit by bit; 0 if there are fewer."""
    last = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        enough = tl.sum((u >= (last | bit)).to(tl.int32), 0) >= k
        last = tl.where(enough, last | bit, last)
        bit = bit >> 1
    return last


@jit
def bound_of(own, top, heat, least, k, blocks, SEGMENTS: tl.constexpr, EACH: tl.constexpr):
    """No token below this ordinal matters: k blocks have a token as high as the k-th best of them; min_p, widened by
    more than rounding can move it; and without either, only what comes before the candidate."""
    bound = tl.where((k > 0) | (least > 0.0), 0, ordinal(own))
    if k > 0:
        b = tl.arange(0, SEGMENTS * EACH)
        best = tl.load(
            blocks + b,
            mask=b < tl.num_programs(1) * EACH,
            other=-float("inf"),
            cache_modifier=".cg",
        )
        bound = kth(ordinal(best), k)
    if least > 0.0:
        low = top + heat * tl.log(least)
        bound = tl.maximum(bound, ordinal(low - 1e-5 * (tl.abs(low) + tl.abs(top))))
    return bound


@jit
def looked_at(logits, ids, short, start, size, WIDTH: tl.constexpr):
    """A tile of tokens and their scores: of the list, or of the whole line."""
    i = start + tl.arange(0, WIDTH)
    here = i < size
    if short:
        i = tl.load(ids + i, mask=here, other=0, cache_modifier=".cg")
    return i, scores_at(logits + i, here), here


@jit
def scores_at(at, here):
    """In float32; what is no number counts as impossible."""
    s = tl.load(at, mask=here, other=-float("inf")).to(tl.float32)
    return tl.where(s == s, s, -float("inf"))


@jit
def winner_of(s, i, here, top, heat, k0, k1, COLDEST: tl.constexpr):
    v = s
    if heat >= COLDEST:
        v = relative(s, top, heat) + gumbel_at(k0, k1, i)
    v = tl.where(here, v, -float("inf"))
    return tl.min(tl.where(here & (v == tl.max(v, 0)), i, 0x7FFFFFFF), 0)


@jit
def mass_of(masses, tops, here, top, heat):
    """The masses of the segments, each relative to its own best score, as one relative to the best of all."""
    mass = tl.load(masses, mask=here, other=0.0, cache_modifier=".cg")
    return tl.sum(mass * tl.exp(relative(tops, top, heat)), 0)


@jit
def drawn_with(row, line, temperature, step, seeds, positions):
    position = tl.load(positions + line)
    k0 = key_at(tl.load(seeds + 2 * row), position)
    k1 = key_at(tl.load(seeds + 2 * row + 1), position)
    return tl.load(temperature + row * step).to(tl.float32), k0, k1


@jit
def is_last(arrived):
    """Whether all other programs of the line have stored what they have. Leaves the counter at zero."""
    tl.debug_barrier()  # the stores of all threads come before the one thread's release
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(1) - 1
    if last:
        tl.store(arrived, 0)
    return last


@jit
def relative(s, top, heat):
    """(s - top) / heat, also where both are -inf."""
    return tl.div_rn(s - tl.maximum(top, -3.0e38), heat + tl.zeros_like(s))


@jit
def weight(z):
    return (tl.exp(z) * 1099511627776.0).to(tl.int64)


@jit
def ordinal(s):
    """Scores as whole numbers in the same order; -0.0 is 0.0."""
    bits = (s + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@jit
def score(u):
    bits = (u ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
