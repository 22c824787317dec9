"""From logits to tokens, for a batch in which every row may ask for something else.

A token is a function of its own line of logits, its row's parameters, the row's tokens so far, its seed and its
position. Neighbours, the row's number, preemption and drafts change nothing. The order is: allowed_token_ids,
logit_bias, bad_words, min_tokens, watermark, repetition, frequency and presence penalty, temperature, min_p, top_k,
top_p, typical_p (kernels/truncate), then the highest of score / temperature + Gumbel noise. Among equals the lowest
id wins, always.

Parameters that many use are tensors with a place for each row; what few use acts only on the lines that ask. The one
thing that is remembered is the rows' tokens, and only of rows that need them: a line at position p reads those below
p, so drafts, accepted or not, need no undoing. This file must not know schedules, blocks or why a row ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from bloomery.kernels.noise import gumbel, keys, words
from bloomery.kernels.order import ordered
from bloomery.kernels.truncate import kept
from bloomery.messages import Sampling, Start, TokenLogprob

TEMPERATURE, TOP_P, MIN_P, TYPICAL_P, REPETITION, FREQUENCY, PRESENCE = range(7)  # columns of Sampler.numbers
COLDEST = 1e-5  # below it the noise cannot matter: greedy
NARROW = 512  # candidates tried before a whole line is sorted
CHUNK = 1 << 22  # logits held in float32 at once while prompts are scored


# ---- what few rows ask for ---------------------------------------------------------------------------


class Edit(Protocol):
    """Changes one line of scores [vocab] in place; `history` holds the row's tokens, those below `position` valid."""

    def apply(self, line: torch.Tensor, position: int, history: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class Allow:
    ids: torch.Tensor

    def apply(self, line: torch.Tensor, position: int, history: torch.Tensor) -> None:
        allowed = line[self.ids]
        line.fill_(-torch.inf)
        line[self.ids] = allowed


@dataclass(frozen=True)
class Bias:
    ids: torch.Tensor
    values: torch.Tensor

    def apply(self, line: torch.Tensor, position: int, history: torch.Tensor) -> None:
        line.index_add_(0, self.ids, self.values)


@dataclass(frozen=True)
class BadWords:
    """Forbids the last token of a word whose other tokens end the output so far; prompt tokens do not count."""

    heads: torch.Tensor  # [words, longest - 1], right-aligned, -1 matches anything
    tails: torch.Tensor  # [words]
    prompt_len: int

    def apply(self, line: torch.Tensor, position: int, history: torch.Tensor) -> None:
        width = self.heads.shape[1]
        recent = self.heads.new_full((width,), -2)
        count = min(width, position - self.prompt_len)
        recent[width - count :] = history[position - count : position]
        forbid(line, self.tails, ((self.heads == recent) | (self.heads == -1)).all(-1))


@dataclass(frozen=True)
class MinTokens:
    stop_ids: torch.Tensor
    until: int  # the first position at which the row may end

    def apply(self, line: torch.Tensor, position: int, history: torch.Tensor) -> None:
        if position < self.until:
            forbid(line, self.stop_ids, torch.ones_like(self.stop_ids, dtype=torch.bool))


@dataclass(frozen=True)
class Watermark:
    """Favours a green list that the previous token selects, exactly as TGI does with its generator on the CPU.

    The list is a prefix of torch.randperm from a CPU generator seeded by a prime times the token, whatever device the
    logits are on. TGI on a GPU seeds a generator of that GPU, whose lists differ. Reading the token waits for the
    device.
    """

    gamma: float
    delta: float

    def apply(self, line: torch.Tensor, position: int, history: torch.Tensor) -> None:
        generator = torch.Generator().manual_seed(15485863 * int(history[position - 1]))
        green = torch.randperm(len(line), generator=generator)[: int(len(line) * self.gamma)]
        line[green.to(line.device)] += self.delta


def forbid(line: torch.Tensor, ids: torch.Tensor, hit: torch.Tensor) -> None:
    """Rules out the ids that are hit [ids], unless nothing at all would remain: then the rule gives way."""
    ruled = line.scatter_reduce(0, ids, torch.where(hit, -torch.inf, torch.inf), "amin")
    line.copy_(torch.where(ruled.isneginf().all(), line, ruled))


def edits(start: Start, device: torch.device) -> tuple[Edit, ...]:
    sampling, chosen = start.sampling, list[Edit]()
    if sampling.allowed_token_ids:
        chosen.append(Allow(torch.tensor(sampling.allowed_token_ids, device=device)))
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias)
        chosen.append(Bias(torch.tensor(ids, device=device), torch.tensor(values, device=device)))
    if sampling.bad_words:
        width = max(map(len, sampling.bad_words)) - 1
        heads = [[-1] * (width + 1 - len(word)) + list(word[:-1]) for word in sampling.bad_words]
        shape = (len(heads), width)
        tails = torch.tensor([word[-1] for word in sampling.bad_words], device=device)
        chosen.append(BadWords(torch.tensor(heads, device=device).reshape(shape), tails, start.prompt_len))
    if sampling.min_tokens and start.stop_ids:
        stop_ids = torch.tensor(start.stop_ids, device=device)
        chosen.append(MinTokens(stop_ids, start.prompt_len + sampling.min_tokens))
    if sampling.watermark:
        chosen.append(Watermark(*sampling.watermark))
    return tuple(chosen)


# ---- log-probabilities ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of one token for each line, still on the device."""

    tokens: torch.Tensor  # [lines]
    logprobs: torch.Tensor  # [lines]
    ranks: torch.Tensor  # [lines]
    top_ids: torch.Tensor  # [lines, count], most likely first
    top_logprobs: torch.Tensor  # [lines, count]

    def read(self, counts: Sequence[int]) -> list[TokenLogprob]:
        """counts: how many of the best each line wants, at most as many as there are."""
        fields = (self.tokens, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        return [
            TokenLogprob(token, logprob, rank, tuple(zip(ids[:count], best[:count])))
            for count, token, logprob, rank, ids, best in zip(counts, *(values.tolist() for values in fields))
        ]


def score(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Scored:
    """Raw logits [lines, vocab] and a token for each line. Equal logits rank by id, as they do among the best."""
    logits = logits.float()
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(-1, tokens.unsqueeze(-1))
    lower = torch.arange(logits.shape[-1], device=logits.device) < tokens.unsqueeze(-1)
    ranks = 1 + ((logits > own) | ((logits == own) & lower)).sum(-1)
    best, ids = ordered(logits, min(count, logits.shape[-1]))
    return Scored(tokens, (own - total).squeeze(-1), ranks, ids, best - total)


def prompt_logprobs(logits: torch.Tensor, next_tokens: torch.Tensor, count: int) -> list[TokenLogprob]:
    """The log-probability of the token that follows each prompt position [lines], a few lines at a time."""
    lines = max(1, CHUNK // logits.shape[-1])
    scored = (score(part, tokens, count) for part, tokens in zip(logits.split(lines), next_tokens.split(lines)))
    return [entry for part in scored for entry in part.read([count] * len(part.tokens))]


# ---- the rows --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What decides, on the host, which way the lines of a row take."""

    sampling: Sampling
    edits: tuple[Edit, ...]

    @property
    def penalised(self) -> bool:
        s = self.sampling
        return s.repetition_penalty != 1.0 or s.frequency_penalty != 0.0 or s.presence_penalty != 0.0

    @property
    def remembers(self) -> bool:
        return self.penalised or bool(self.sampling.bad_words) or self.sampling.watermark is not None

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature < COLDEST

    @property
    def truncates(self) -> bool:
        """Needs candidates in order; min_p alone does not."""
        return self.sampling.top_k > 0 or self.sampling.top_p < 1.0 or self.sampling.typical_p < 1.0


@dataclass(frozen=True)
class Outcome:
    """The tokens one row gained, and a log-probability for each if it asked."""

    row: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Draws:
    """One token for each line, on the device until somebody collects."""

    tokens: torch.Tensor  # [lines]
    rows: tuple[int, ...]  # [lines]
    drafts: Mapping[int, Sequence[int]]
    scored: Scored | None = None  # of the lines that asked, in order
    counts: Mapping[int, int] = field(default_factory=dict)  # line -> how many of the best it asked for

    def collect(self) -> list[Outcome]:
        """A draft stands while it equals the token drawn in its place; the token after the last that stands is new."""
        tokens = self.tokens.tolist()
        logprobs = dict(zip(self.counts, self.scored.read(tuple(self.counts.values())))) if self.scored else {}
        outcomes, line = list[Outcome](), 0
        while line < len(tokens):
            drafts = self.drafts.get(self.rows[line], ())
            drawn = tokens[line : line + len(drafts) + 1]
            stand = next((i for i, draft in enumerate(drafts) if draft != drawn[i]), len(drafts)) + 1
            own = tuple(logprobs[i] for i in range(line, line + stand) if i in logprobs)
            outcomes.append(Outcome(self.rows[line], tuple(drawn[:stand]), own))
            line += len(drafts) + 1
        return outcomes


class Sampler:
    def __init__(self, rows: int, vocab: int, device: torch.device | str = "cpu"):
        self.vocab, self.device = vocab, torch.device(device)
        self.rows: dict[int, Row] = {}
        self.numbers = torch.zeros(rows, 7, dtype=torch.float64, device=self.device)
        self.top_k = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.seeds = torch.zeros(rows, 2, dtype=torch.int32, device=self.device)
        self.prompt_len = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.history = torch.zeros(rows, 0, dtype=torch.int32, device=self.device)  # widens on demand
        self.together = 1 if self.device.type == "cpu" else rows  # whole lines handled at once: one stays in the cache
        self.all_ids = torch.arange(vocab, dtype=torch.int32, device=self.device)

    def admit(self, row: int, start: Start) -> None:
        """Start or resume: `start.tokens` is the prompt and whatever output the sequence already has."""
        s = start.sampling
        self.rows[row] = Row(s, edits(start, self.device))
        penalties = (s.repetition_penalty, s.frequency_penalty, s.presence_penalty)
        numbers = (s.temperature, s.top_p, s.min_p, s.typical_p, *penalties)
        self.numbers[row] = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        self.top_k[row] = s.top_k if 0 < s.top_k < self.vocab else 0
        self.seeds[row] = torch.tensor(words(s.seed), dtype=torch.int32, device=self.device)
        self.prompt_len[row] = start.prompt_len
        if self.rows[row].remembers:
            self._remember(row, 0, start.tokens)

    def release(self, row: int) -> None:
        del self.rows[row]

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        positions: Sequence[int],
        drafts: Mapping[int, Sequence[int]] | None = None,
    ) -> Draws:
        """logits [lines, vocab]; for each line its row and the position of the token to draw.

        A row with k drafts (by row number) has k + 1 lines one after the other, at successive positions.
        """
        drafts = drafts or {}
        lines = [self.rows[row] for row in rows]
        index = torch.tensor(rows, device=self.device)
        place = torch.tensor(positions, device=self.device)
        for line, row in enumerate(rows):
            if row in drafts and lines[line].remembers and rows.index(row) == line:
                self._remember(row, positions[line], drafts[row])
        raw = logits.float()
        scores = self._edited(raw, lines, rows, positions, index, place)
        tokens = self._choose(scores, lines, index, place)
        if remembering := [i for i, line in enumerate(lines) if line.remembers]:
            self._widen(max(positions[i] for i in remembering) + 1)
            at = torch.tensor(remembering, device=self.device)
            self.history[index[at], place[at]] = tokens[at].to(torch.int32)
        counts = {i: line.sampling.logprobs for i, line in enumerate(lines) if line.sampling.logprobs is not None}
        if not counts:
            return Draws(tokens, tuple(rows), drafts)
        at = torch.tensor(list(counts), device=self.device)
        return Draws(tokens, tuple(rows), drafts, score(raw[at], tokens[at], max(counts.values())), counts)

    # ---- tokens so far ----

    def _widen(self, length: int) -> None:
        rows, width = self.history.shape
        if length > width:
            wider = self.history.new_zeros(rows, max(length, 2 * width))
            wider[:, :width] = self.history
            self.history = wider

    def _remember(self, row: int, position: int, tokens: Sequence[int]) -> None:
        self._widen(position + len(tokens))
        values = torch.tensor(tuple(tokens), dtype=torch.int32, device=self.device)
        self.history[row, position : position + len(tokens)] = values

    # ---- edits of the scores ----

    def _edited(
        self,
        raw: torch.Tensor,
        lines: Sequence[Row],
        rows: Sequence[int],
        positions: Sequence[int],
        index: torch.Tensor,
        place: torch.Tensor,
    ) -> torch.Tensor:
        """The raw logits themselves when no line asks for an edit, else a changed copy."""
        penalised = [i for i, line in enumerate(lines) if line.penalised]
        if not penalised and not any(line.edits for line in lines):
            return raw
        scores = raw.clone()
        for i, line in enumerate(lines):
            for edit in line.edits:
                edit.apply(scores[i], positions[i], self.history[rows[i]])
        if penalised:
            at = torch.tensor(penalised, device=self.device)
            width = max(positions[i] for i in penalised)
            parts = zip(*(values[at].split(self.together) for values in (scores, index, place)))
            scores[at] = torch.cat([self._penalise(s, i, p.unsqueeze(-1), width) for s, i, p in parts])
        return scores

    def _penalise(self, scores: torch.Tensor, index: torch.Tensor, place: torch.Tensor, width: int) -> torch.Tensor:
        """scores [lines, vocab], place [lines, 1]; `width` covers the longest history among them."""
        tokens = self.history[index, :width].to(torch.int64)
        where = torch.arange(width, device=self.device)
        present = where < place
        output = present & (where >= self.prompt_len[index].unsqueeze(-1))
        repetition, frequency, presence = self.numbers[index, REPETITION:].float().unsqueeze(-1).unbind(1)
        seen = torch.zeros_like(scores).scatter_add_(1, tokens, present.float()) > 0
        counts = torch.zeros_like(scores).scatter_add_(1, tokens, output.float())
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        return torch.where(seen, repeated, scores) - frequency * counts - presence * (counts > 0)

    # ---- the choice ----

    def _choose(
        self, scores: torch.Tensor, lines: Sequence[Row], index: torch.Tensor, place: torch.Tensor
    ) -> torch.Tensor:
        drawn = [i for i, line in enumerate(lines) if not line.greedy]
        if len(drawn) < len(lines):
            tokens = scores.argmax(-1)
            if not drawn:
                return tokens
        else:
            tokens = torch.empty_like(place)
        key = keys(self.seeds[index], place)
        for wanted, choose in ((False, self._from_all), (True, self._from_best)):
            group = [i for i in drawn if lines[i].truncates is wanted]
            if len(group) == len(lines):
                return choose(scores, lines, index, key)
            if group:
                at = torch.tensor(group, device=self.device)
                tokens[at] = choose(scores[at], [lines[i] for i in group], index[at], key[at])
        return tokens

    def _from_all(
        self, scores: torch.Tensor, lines: Sequence[Row], index: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        """Any token may win: no order is needed."""
        parts = zip(*(values.split(self.together) for values in (scores, index, key)))
        return torch.cat([self._relative(s, i).add_(gumbel(k, self.all_ids)).argmax(-1) for s, i, k in parts])

    def _relative(self, scores: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Log-probabilities less the best one, float32; -inf where min_p excludes."""
        temperature, _, min_p = self.numbers[index, :TYPICAL_P].unsqueeze(-1).unbind(1)
        z = (scores - scores.amax(-1, keepdim=True)).div_(temperature.float())
        return z.masked_fill_(z < min_p.log().float(), -torch.inf)

    def _from_best(
        self, scores: torch.Tensor, lines: Sequence[Row], index: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        """Only tokens near the top may win. On the CPU few are put in order at first, and more only for lines whose
        border is not among them; elsewhere asking would make the host wait."""
        narrow = [line.sampling.top_k for line in lines if 0 < line.sampling.top_k <= NARROW]
        if len(narrow) == len(lines):
            return self._among(scores, min(self.vocab, max(narrow)), lines, index, key, None)[0]
        parts = zip(scores.split(self.together), index.split(self.together))
        total = torch.cat([self._relative(s, i).exp_().sum(-1, True, dtype=torch.float64) for s, i in parts])
        width = min(self.vocab, NARROW) if self.device.type == "cpu" else self.vocab
        tokens, sure = self._among(scores, width, lines, index, key, total)
        rest = [] if width == self.vocab else [i for i, enough in enumerate(sure.tolist()) if not enough]
        while rest:
            width, at = min(self.vocab, 16 * width), torch.tensor(rest, device=self.device)
            again = [lines[i] for i in rest]
            tokens[at], sure = self._among(scores[at], width, again, index[at], key[at], total[at])
            rest = [] if width == self.vocab else [i for i, enough in zip(rest, sure.tolist()) if not enough]
        return tokens

    def _among(
        self,
        scores: torch.Tensor,
        width: int,
        lines: Sequence[Row],
        index: torch.Tensor,
        key: torch.Tensor,
        total: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens drawn [lines] when only the best `width` are looked at, and whether that was enough [lines]."""
        values, ids = ordered(scores, width)
        numbers, top_k = self.numbers[index], self.top_k[index].unsqueeze(-1)
        temperature, top_p, min_p, typical_p = numbers[:, :REPETITION].unsqueeze(-1).unbind(1)
        z = (values.double() - values[:, :1]) / temperature
        typical = typical_p if any(line.sampling.typical_p < 1.0 for line in lines) else None
        keep, sure = kept(z, min_p, top_k, top_p, typical, total)
        noisy = torch.where(keep, z + gumbel(key, ids), -torch.inf)
        winners = noisy == noisy.amax(-1, keepdim=True)
        return torch.where(winners, ids, self.vocab).amin(-1), sure
