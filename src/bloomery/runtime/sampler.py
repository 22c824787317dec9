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
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch

from bloomery.kernels.noise import gumbel, keys, words
from bloomery.kernels.order import ordered
from bloomery.kernels.truncate import kept
from bloomery.messages import ResolvedSampling, NewRequestData, TokenLogprob
from bloomery.runtime.device import download, upload

COLDEST = 1e-5  # below it the noise cannot matter: greedy
NARROW = 512  # candidates tried before a whole line is sorted
CHUNK = 1 << 22  # logits that are looked at in more than float32 at once, or scored

Gain = tuple[
    tuple[int, ...], tuple[TokenLogprob, ...]
]  # tokens of one row, and their log-probabilities if wanted

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


def edits(start: NewRequestData, device: torch.device) -> tuple[Edit, ...]:
    sampling = start.sampling
    chosen = list[Edit]()
    if sampling.allowed_token_ids:
        chosen.append(Allow(upload(sampling.allowed_token_ids, device)))
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias)
        chosen.append(Bias(upload(ids, device), upload(values, device, torch.float32)))
    if sampling.bad_words:
        width = max(map(len, sampling.bad_words)) - 1
        heads = [[-1] * (width + 1 - len(word)) + list(word[:-1]) for word in sampling.bad_words]
        shape = (len(heads), width)
        tails = upload([word[-1] for word in sampling.bad_words], device)
        chosen.append(BadWords(upload(heads, device).reshape(shape), tails, start.prompt_len))
    if sampling.min_tokens and start.stop_ids:
        stop_ids = upload(start.stop_ids, device)
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

    @classmethod
    def cat(cls, parts: Sequence[Scored]) -> Scored:
        fields = zip(*(part.fields for part in parts), strict=True)
        return cls(*(torch.cat(field) for field in fields)) if len(parts) > 1 else parts[0]

    @property
    def fields(self) -> tuple[torch.Tensor, ...]:
        return self.tokens, self.logprobs, self.ranks, self.top_ids, self.top_logprobs

    def read(self, counts: Sequence[int]) -> list[TokenLogprob]:
        """counts: how many of the best each line wants, at most as many as there are."""
        return [
            TokenLogprob(token, logprob, rank, tuple(zip(ids[:count], best[:count])))
            for count, token, logprob, rank, ids, best in zip(
                counts, *(values.tolist() for values in self.fields)
            )
        ]


def score(logits: torch.Tensor, tokens: torch.Tensor, count: int, together: int = 1) -> Scored:
    """Raw logits [lines, vocab] and a token for each line. Equal logits rank by id, as they do among the best."""
    logits = logits.float()
    total = torch.cat([lines.logsumexp(-1, keepdim=True) for lines in logits.split(together)])
    own = logits.gather(-1, tokens.unsqueeze(-1))
    lower = torch.arange(logits.shape[-1], device=logits.device) < tokens.unsqueeze(-1)
    ranks = 1 + ((logits > own) | ((logits == own) & lower)).sum(-1)
    best, ids = ordered(logits, min(count, logits.shape[-1]))
    return Scored(tokens, (own - total).squeeze(-1), ranks, ids, best - total)


# ---- the rows --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What decides, on the host, which way the lines of a row take."""

    number: int
    sampling: ResolvedSampling
    edits: tuple[Edit, ...]
    prompt_len: int

    @property
    def numbers(self) -> tuple[float, ...]:
        """What the device knows of it, in the order `_parameters` reads."""
        s = self.sampling
        penalties = (s.repetition_penalty, s.frequency_penalty, s.presence_penalty)
        return (s.temperature, s.top_p, s.min_p, s.typical_p, *penalties)

    @property
    def penalised(self) -> bool:
        s = self.sampling
        return (
            s.repetition_penalty != 1.0 or s.frequency_penalty != 0.0 or s.presence_penalty != 0.0
        )

    @property
    def remembers(self) -> bool:
        return (
            self.penalised or bool(self.sampling.bad_words) or self.sampling.watermark is not None
        )

    @property
    def choice(self) -> Literal["greedy", "free", "truncated"]:
        """Of the best alone, of all tokens (min_p needs no order), or of some that must be put in order."""
        s = self.sampling
        if s.temperature < COLDEST:
            return "greedy"
        return "truncated" if s.top_k > 0 or s.top_p < 1.0 or s.typical_p < 1.0 else "free"


@dataclass(frozen=True)
class Lines:
    """Some or all lines of a step: whose they are and at which position their token will stand."""

    rows: Sequence[Row]
    positions: Sequence[int]
    index: torch.Tensor  # [lines], the rows' numbers on the device
    place: torch.Tensor  # [lines], the positions on the device

    @classmethod
    def of(cls, rows: Sequence[Row], positions: Sequence[int], device: torch.device) -> Lines:
        index = upload([row.number for row in rows], device)
        return cls(rows, positions, index, upload(positions, device))

    def cut(self, first: int, count: int) -> Lines:
        part = slice(first, first + count)
        return Lines(self.rows[part], self.positions[part], self.index[part], self.place[part])

    def some(self, chosen: Sequence[int]) -> tuple[torch.Tensor, Lines]:
        """The chosen ones' numbers on the device, and those lines."""
        at = upload(chosen, self.index.device)
        rows = [self.rows[i] for i in chosen]
        positions = [self.positions[i] for i in chosen]
        return at, Lines(rows, positions, self.index[at], self.place[at])


@dataclass(frozen=True)
class Draws:
    """One token for each line, on the device until somebody collects."""

    tokens: torch.Tensor  # [lines]
    drafts: tuple[
        Sequence[int], ...
    ]  # of each row that was asked for; it has one line more than drafts
    scored: Scored | None = None  # of the lines that want log-probabilities
    counts: Mapping[int, int] = field(default_factory=dict)  # line -> how many of the best it wants

    def downloaded(self) -> Draws:
        """The same, on its way to the host."""
        scored = None if self.scored is None else Scored(*map(download, self.scored.fields))
        return replace(self, tokens=download(self.tokens), scored=scored)

    def collect(self) -> list[Gain]:
        """What each row gained: its drafts while they equal the tokens drawn in their place, and one token more."""
        tokens = self.tokens.tolist()
        logprobs = (
            dict(zip(self.counts, self.scored.read(tuple(self.counts.values()))))
            if self.scored
            else {}
        )
        gains = []
        line = 0
        for drafts in self.drafts:
            drawn = tokens[line : line + len(drafts) + 1]
            stand = (
                next((i for i, draft in enumerate(drafts) if draft != drawn[i]), len(drafts)) + 1
            )
            own = tuple(logprobs[i] for i in range(line, line + stand) if i in logprobs)
            gains.append((tuple(drawn[:stand]), own))
            line += len(drafts) + 1
        return gains


class Sampler:
    def __init__(
        self,
        rows: int,
        vocab: int,
        device: torch.device | str = "cpu",
        alone: bool = False,
        longest: int = 1 << 31,
    ):
        """`alone`: no result may depend on how many lines there are. `longest`: no sequence has more tokens."""
        self.vocab = vocab
        self.device = torch.device(device)
        self.longest = longest
        self.rows: dict[int, Row] = {}
        self.newcomers: list[int] = []  # rows whose parameters the device does not know yet
        self.numbers = torch.zeros(
            rows, 7, dtype=torch.float64, device=self.device
        )  # read by _parameters
        self.top_k = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.seeds = torch.zeros(rows, 2, dtype=torch.int32, device=self.device)
        self.prompt_len = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.history = torch.zeros(
            rows, 0, dtype=torch.int32, device=self.device
        )  # widens on demand
        self.some = max(
            1, CHUNK // vocab
        )  # lines handled at once where each takes many times its own memory
        self.together = (
            1 if alone or self.device.type == "cpu" else self.some
        )  # whole lines: one stays in cache
        self.all_ids = torch.arange(vocab, dtype=torch.int32, device=self.device)

    def admit(self, row: int, start: NewRequestData) -> None:
        """Start or resume: `start.tokens` is the prompt and whatever output the sequence already has."""
        self.rows[row] = Row(row, start.sampling, edits(start, self.device), start.prompt_len)
        self.newcomers.append(row)
        if self.rows[row].remembers:
            self._remember(row, 0, start.tokens)

    def settle(self) -> None:
        """Tell the device what newcomers ask for: once a step, before it draws."""
        if not self.newcomers:
            return
        rows = [self.rows[row] for row in self.newcomers]
        at = upload([row.number for row in rows], self.device)
        self.numbers[at] = upload([row.numbers for row in rows], self.device, torch.float64)
        self.seeds[at] = upload(
            [words(row.sampling.seed) for row in rows], self.device, torch.int32
        )
        limits = [row.sampling.top_k if 0 < row.sampling.top_k < self.vocab else 0 for row in rows]
        self.top_k[at] = upload(limits, self.device)
        self.prompt_len[at] = upload([row.prompt_len for row in rows], self.device)
        self.newcomers.clear()

    def release(self, row: int) -> None:
        del self.rows[row]
        if row in self.newcomers:
            self.newcomers.remove(row)

    def sample(
        self, logits: torch.Tensor, asked: Sequence[tuple[int, int, Sequence[int]]]
    ) -> Draws:
        """asked: (row, position of the token to draw, drafts); each has 1 + len(drafts) lines of logits, in order."""
        self.settle()
        for row, position, drafts in asked:
            if drafts and self.rows[row].remembers:
                self._remember(row, position, drafts)
        rows = [self.rows[row] for row, _, drafts in asked for _ in range(len(drafts) + 1)]
        positions = [position + i for _, position, drafts in asked for i in range(len(drafts) + 1)]
        lines = Lines.of(rows, positions, self.device)
        raw = logits.float()
        tokens = self._choose(self._edited(raw, lines), lines)
        if remembering := [i for i, row in enumerate(rows) if row.remembers]:
            at, those = lines.some(remembering)
            self._widen(max(those.positions) + 1)
            self.history[those.index, those.place] = tokens[at].to(torch.int32)
        every = tuple(drafts for _, _, drafts in asked)
        counts = {
            i: row.sampling.logprobs
            for i, row in enumerate(rows)
            if row.sampling.logprobs is not None
        }
        if not counts:
            return Draws(tokens, every)
        at, _ = lines.some(list(counts))
        parts = at.split(self.some)
        scored = [
            score(raw[part], tokens[part], max(counts.values()), self.together) for part in parts
        ]
        return Draws(tokens, every, Scored.cat(scored), counts)

    def prompt_logprobs(
        self, logits: torch.Tensor, next_tokens: Sequence[int], count: int
    ) -> list[TokenLogprob]:
        """logits [lines, vocab] of prompt positions and the token that follows each; a few lines at a time."""
        parts = zip(logits.split(self.some), upload(next_tokens, self.device).split(self.some))
        return [
            entry
            for part, tokens in parts
            for entry in score(part, tokens, count, self.together).read([count] * len(tokens))
        ]

    # ---- tokens so far ----

    def _widen(self, length: int) -> None:
        rows, width = self.history.shape
        if length > width:
            wider = self.history.new_zeros(rows, max(length, min(2 * width, self.longest)))
            wider[:, :width] = self.history
            self.history = wider

    def _remember(self, row: int, position: int, tokens: Sequence[int]) -> None:
        self._widen(position + len(tokens))
        self.history[row, position : position + len(tokens)] = upload(tokens, self.device)

    # ---- edits of the scores ----

    def _edited(self, raw: torch.Tensor, lines: Lines) -> torch.Tensor:
        """The raw logits themselves when no line asks for an edit, else a changed copy."""
        penalised = [i for i, row in enumerate(lines.rows) if row.penalised]
        if not penalised and not any(row.edits for row in lines.rows):
            return raw
        scores = raw.clone()
        for line, row, position in zip(scores, lines.rows, lines.positions):
            for edit in row.edits:
                edit.apply(line, position, self.history[row.number])
        if penalised:
            at, those = lines.some(penalised)
            width = max(those.positions)
            few = min(self.together, max(1, CHUNK // max(width, 1)))
            for part, index, place in zip(
                *(values.split(few) for values in (at, those.index, those.place))
            ):
                scores[part] = self._penalise(scores[part], index, place.unsqueeze(-1), width)
        return scores

    def _penalise(
        self, scores: torch.Tensor, index: torch.Tensor, place: torch.Tensor, width: int
    ) -> torch.Tensor:
        """scores [lines, vocab], place [lines, 1]; no line has more than `width` tokens behind it."""
        *_, repetition, frequency, presence = self._parameters(index)
        tokens = self.history[index, :width].to(torch.int64)
        where = torch.arange(width, device=self.device)
        present = where < place
        output = present & (where >= self.prompt_len[index].unsqueeze(-1))
        seen = torch.zeros_like(scores).scatter_add_(1, tokens, present.float()) > 0
        counts = torch.zeros_like(scores).scatter_add_(1, tokens, output.float())
        repeated = torch.where(scores > 0, scores / repetition.float(), scores * repetition.float())
        return (
            torch.where(seen, repeated, scores)
            - frequency.float() * counts
            - presence.float() * (counts > 0)
        )

    # ---- the choice ----

    def _parameters(self, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """temperature, top_p, min_p, typical_p, repetition, frequency and presence penalty, each [lines, 1]."""
        return self.numbers[index].unsqueeze(-1).unbind(1)

    def _choose(self, scores: torch.Tensor, lines: Lines) -> torch.Tensor:
        choices = [row.choice for row in lines.rows]
        tokens = torch.empty_like(lines.place) if "greedy" not in choices else scores.argmax(-1)
        for choice, draw in (("free", self._from_all), ("truncated", self._from_best)):
            group = [i for i, wanted in enumerate(choices) if wanted == choice]
            if len(group) == len(choices):
                return draw(scores, lines)
            if group:
                at, those = lines.some(group)
                tokens[at] = draw(scores[at], those)
        return tokens

    def _from_all(self, scores: torch.Tensor, lines: Lines) -> torch.Tensor:
        """Any token may win: no order is needed."""
        key = keys(self.seeds[lines.index], lines.place)
        parts = zip(*(values.split(self.together) for values in (scores, lines.index, key)))
        return torch.cat(
            [self._relative(s, i).add_(gumbel(k, self.all_ids)).argmax(-1) for s, i, k in parts]
        )

    def _relative(self, scores: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Log-probabilities less the best one, float32; -inf where min_p excludes."""
        temperature, _, min_p, *_ = self._parameters(index)
        z = (scores - scores.amax(-1, keepdim=True)).div_(temperature.float())
        return z.masked_fill_(z < min_p.log().float(), -torch.inf)

    def _from_best(self, scores: torch.Tensor, lines: Lines) -> torch.Tensor:
        """Only tokens near the top may win. On the CPU few are put in order at first, and more only for lines whose
        border is not among them; elsewhere asking would make the host wait."""
        if len(scores) > self.some:
            cuts = range(0, len(scores), self.some)
            return torch.cat(
                [self._from_best(scores[a : a + self.some], lines.cut(a, self.some)) for a in cuts]
            )
        narrow = [row.sampling.top_k for row in lines.rows if 0 < row.sampling.top_k <= NARROW]
        if len(narrow) == len(lines.rows):
            return self._among(scores, min(self.vocab, max(narrow)), lines, None)[0]
        parts = zip(scores.split(self.together), lines.index.split(self.together))
        total = torch.cat(
            [self._relative(s, i).exp_().sum(-1, True, dtype=torch.float64) for s, i in parts]
        )
        width = min(self.vocab, NARROW) if self.device.type == "cpu" else self.vocab
        tokens, sure = self._among(scores, width, lines, total)
        while width < self.vocab and not sure.all():
            rest = (~sure).nonzero().squeeze(-1).tolist()
            at, those = lines.some(rest)
            width = min(self.vocab, 16 * width)
            tokens[at], sure[at] = self._among(scores[at], width, those, total[at])
        return tokens

    def _among(
        self, scores: torch.Tensor, width: int, lines: Lines, total: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens drawn [lines] when only the best `width` are looked at, and whether that was enough [lines]."""
        temperature, top_p, min_p, typical_p, *_ = self._parameters(lines.index)
        values, ids = ordered(scores, width)
        z = (values.double() - values[:, :1]) / temperature
        typical = typical_p if any(row.sampling.typical_p < 1.0 for row in lines.rows) else None
        keep, sure = kept(z, min_p, self.top_k[lines.index].unsqueeze(-1), top_p, typical, total)
        noisy = torch.where(
            keep, z + gumbel(keys(self.seeds[lines.index], lines.place), ids), -torch.inf
        )
        winners = noisy == noisy.amax(-1, keepdim=True)
        return torch.where(winners, ids, self.vocab).amin(-1), sure
