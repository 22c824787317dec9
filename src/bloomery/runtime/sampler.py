"""The sampler: from logits to tokens, for a batch in which every request has its own parameters.

A token is a function of its own row of logits, the request's sampling parameters, the request's
tokens so far, its grammar, its seed and its position. Other requests of the batch, the request's
row, preemption and drafts change nothing. The order is: the grammar's mask, allowed_token_ids,
logit_bias, bad_words, min_tokens, watermark, then repetition, frequency and presence penalty, then
temperature, then truncation by min_p, top_k, top_p and typical_p, then the highest of
score / temperature + Gumbel noise. The lowest id wins among equals.

A request occupies a row for as long as it runs. A sample is one token to choose: one row of logits
at one position of one request; a request with n drafts (speculative decoding) has 1 + n samples.

Parameters that many requests use are tensors with an entry for each row. Rare ones are logits
processors, which act only on the samples of requests that have them. The only state is the token
history, stored only for requests that need it. A sample at position p reads the tokens below p, so
rejected drafts need no undoing.

`FusedSampler` samples inside a captured step (CUDA graph or CPU trace) for requests that
`supports_fused_sampling` admits. This file must not know schedules, blocks or why a request ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch

from bloomery.attention.base import download, upload
from bloomery.kernels.sampling import SamplingScratch, sample_tokens
from bloomery.kernels.sampling_reference import (
    GREEDY_TEMPERATURE,
    SamplingTensors,
    gumbel_noise,
    noise_keys,
    penalized,
    seed_words,
    stable_topk,
    truncation_mask,
)
from bloomery.kernels.token_mask import TokenMasks, mask_logits
from bloomery.messages import NewRequestData, ResolvedSampling, TokenLogprob
from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool

NUM_FIRST_CANDIDATES = 512  # tokens that are sorted first; more only if these are not enough
MAX_CHUNK_LOGITS = 1 << 22  # logits processed at a time where the work takes much more memory

# The tokens that one request gained in a step, and their log-probabilities if requested.
AcceptedTokens = tuple[tuple[int, ...], tuple[TokenLogprob, ...]]

# ---- logits processors ----


class LogitsProcessor(Protocol):
    """Changes the scores [vocab] of one sample in place.

    `history` holds the request's tokens; those below `position` are valid.
    """

    def apply(self, scores: torch.Tensor, position: int, history: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class AllowedTokensProcessor:
    """Allows only some token ids."""

    ids: torch.Tensor

    def apply(self, scores: torch.Tensor, position: int, history: torch.Tensor) -> None:
        allowed = scores[self.ids]
        scores.fill_(-torch.inf)
        scores[self.ids] = allowed


@dataclass(frozen=True)
class LogitBiasProcessor:
    """Adds a bias to the scores of some token ids."""

    ids: torch.Tensor
    values: torch.Tensor

    def apply(self, scores: torch.Tensor, position: int, history: torch.Tensor) -> None:
        scores.index_add_(0, self.ids, self.values)


@dataclass(frozen=True)
class BadWordsProcessor:
    """Forbids the last token of a word whose other tokens end the output so far.

    Prompt tokens do not count as output.
    """

    prefixes: torch.Tensor  # [words, longest word - 1], right-aligned; -1 matches anything
    last_tokens: torch.Tensor  # [words]
    prompt_len: int

    def apply(self, scores: torch.Tensor, position: int, history: torch.Tensor) -> None:
        width = self.prefixes.shape[1]
        recent = self.prefixes.new_full((width,), -2)
        count = min(width, position - self.prompt_len)
        recent[width - count :] = history[position - count : position]
        matches = ((self.prefixes == recent) | (self.prefixes == -1)).all(-1)
        forbid_tokens(scores, self.last_tokens, matches)


@dataclass(frozen=True)
class MinTokensProcessor:
    """Forbids stop tokens before the request may end."""

    stop_ids: torch.Tensor
    first_end_position: int  # the first position at which the request may end

    def apply(self, scores: torch.Tensor, position: int, history: torch.Tensor) -> None:
        if position < self.first_end_position:
            forbidden = torch.ones_like(self.stop_ids, dtype=torch.bool)
            forbid_tokens(scores, self.stop_ids, forbidden)


@dataclass(frozen=True)
class WatermarkProcessor:
    """Favours a green list that the previous token selects, exactly as TGI does on a CPU.

    The list is a prefix of torch.randperm from a CPU generator seeded by a prime times the token,
    whatever device the logits are on. TGI on a GPU uses that GPU's generator, whose lists differ.
    Reading the token waits for the device.
    """

    gamma: float
    delta: float

    def apply(self, scores: torch.Tensor, position: int, history: torch.Tensor) -> None:
        previous_token = int(history[position - 1])
        generator = torch.Generator().manual_seed(15485863 * previous_token)
        green_count = int(len(scores) * self.gamma)
        green_list = torch.randperm(len(scores), generator=generator)[:green_count]
        scores[green_list.to(scores.device)] += self.delta


def forbid_tokens(scores: torch.Tensor, ids: torch.Tensor, forbidden: torch.Tensor) -> None:
    """Rule out the ids where `forbidden` [ids] is set, unless that would leave no token at all."""
    limits = torch.where(forbidden, -torch.inf, torch.inf)
    limited = scores.scatter_reduce(0, ids, limits, "amin")
    scores.copy_(torch.where(limited.isneginf().all(), scores, limited))


def build_logits_processors(
    new_request: NewRequestData, device: torch.device
) -> tuple[LogitsProcessor, ...]:
    """Return the logits processors of a request, in the order in which they apply."""
    sampling = new_request.sampling
    processors = list[LogitsProcessor]()
    if sampling.allowed_token_ids:
        processors.append(AllowedTokensProcessor(upload(sampling.allowed_token_ids, device)))
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias)
        biases = upload(values, device, torch.float32)
        processors.append(LogitBiasProcessor(upload(ids, device), biases))
    if sampling.bad_words:
        width = max(map(len, sampling.bad_words)) - 1
        padded = [[-1] * (width + 1 - len(word)) + list(word[:-1]) for word in sampling.bad_words]
        prefixes = upload(padded, device).reshape(len(padded), width)
        last_tokens = upload([word[-1] for word in sampling.bad_words], device)
        processors.append(BadWordsProcessor(prefixes, last_tokens, new_request.prompt_len))
    if sampling.min_tokens and new_request.stop_ids:
        stop_ids = upload(new_request.stop_ids, device)
        first_end_position = new_request.prompt_len + sampling.min_tokens
        processors.append(MinTokensProcessor(stop_ids, first_end_position))
    if sampling.watermark:
        processors.append(WatermarkProcessor(*sampling.watermark))
    return tuple(processors)


# ---- log-probabilities ----


@dataclass(frozen=True)
class LogprobTensors:
    """Log-probabilities of one token for each sample, still on the device."""

    tokens: torch.Tensor  # [samples]
    logprobs: torch.Tensor  # [samples]
    ranks: torch.Tensor  # [samples]
    top_ids: torch.Tensor  # [samples, count], most likely first
    top_logprobs: torch.Tensor  # [samples, count]

    @classmethod
    def concatenate(cls, parts: Sequence[LogprobTensors]) -> LogprobTensors:
        """Concatenate along the samples."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*(part.fields for part in parts), strict=True)
        return cls(*(torch.cat(column) for column in columns))

    @property
    def fields(self) -> tuple[torch.Tensor, ...]:
        """All tensors, in the order of the constructor."""
        return self.tokens, self.logprobs, self.ranks, self.top_ids, self.top_logprobs

    def to_list(self, counts: Sequence[int]) -> list[TokenLogprob]:
        """Convert to messages; `counts` has the number of top tokens to return for each sample."""
        columns = (values.tolist() for values in self.fields)
        entries = []
        for count, token, logprob, rank, ids, logprobs in zip(counts, *columns):
            top = tuple(zip(ids[:count], logprobs[:count]))
            entries.append(TokenLogprob(token, logprob, rank, top))
        return entries


def compute_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, count: int, chunk_rows: int = 1
) -> LogprobTensors:
    """Compute log-probabilities of tokens [samples] under unchanged logits [samples, vocab].

    `count` top tokens are listed for each sample. Equal logits rank by id, as in the top list.
    `chunk_rows` rows of logits are summed at a time.
    """
    logits = logits.float()
    chunks = logits.split(chunk_rows)
    log_sum_exp = torch.cat([chunk.logsumexp(-1, keepdim=True) for chunk in chunks])
    token_logits = logits.gather(-1, tokens.unsqueeze(-1))
    lower_id = torch.arange(logits.shape[-1], device=logits.device) < tokens.unsqueeze(-1)
    comes_before = (logits > token_logits) | ((logits == token_logits) & lower_id)
    ranks = 1 + comes_before.sum(-1)
    top_logits, top_ids = stable_topk(logits, min(count, logits.shape[-1]))
    logprobs = (token_logits - log_sum_exp).squeeze(-1)
    return LogprobTensors(tokens, logprobs, ranks, top_ids, top_logits - log_sum_exp)


# ---- requests and samples ----


def has_penalties(sampling: ResolvedSampling) -> bool:
    """Whether a repetition, frequency or presence penalty is set."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
    )


@dataclass(frozen=True)
class RequestSampling:
    """The host's copy of a request's sampling parameters: selects how its samples are computed."""

    row: int
    sampling: ResolvedSampling
    processors: tuple[LogitsProcessor, ...]
    prompt_len: int

    @property
    def float_params(self) -> tuple[float, ...]:
        """The request's row of `Sampler.float_params`."""
        sampling = self.sampling
        return (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.typical_p,
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )

    @property
    def has_penalties(self) -> bool:
        return has_penalties(self.sampling)

    @property
    def needs_history(self) -> bool:
        """Whether sampling reads earlier tokens of the request."""
        sampling = self.sampling
        return self.has_penalties or bool(sampling.bad_words) or sampling.watermark is not None

    @property
    def method(self) -> Literal["greedy", "untruncated", "truncated"]:
        """Which tokens can be sampled: the best, any (min_p needs no sorting), or the top ones."""
        sampling = self.sampling
        if sampling.temperature < GREEDY_TEMPERATURE:
            return "greedy"
        if sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.typical_p < 1.0:
            return "truncated"
        return "untruncated"


@dataclass(frozen=True)
class SampleBatch:
    """Some or all samples of a step: their requests, and the positions of the tokens to choose."""

    requests: Sequence[RequestSampling]
    positions: Sequence[int]
    row_index: torch.Tensor  # [samples], the requests' rows on the device
    position_index: torch.Tensor  # [samples], the positions on the device

    @classmethod
    def build(
        cls,
        requests: Sequence[RequestSampling],
        positions: Sequence[int],
        device: torch.device,
    ) -> SampleBatch:
        """Upload the rows and positions of samples."""
        row_index = upload([request.row for request in requests], device)
        return cls(requests, positions, row_index, upload(positions, device))

    def chunk(self, first: int, count: int) -> SampleBatch:
        """Return `count` samples from the `first` one on."""
        part = slice(first, first + count)
        return SampleBatch(
            self.requests[part],
            self.positions[part],
            self.row_index[part],
            self.position_index[part],
        )

    def select(self, chosen: Sequence[int]) -> tuple[torch.Tensor, SampleBatch]:
        """Return the chosen indices on the device, and those samples."""
        index = upload(chosen, self.row_index.device)
        requests = [self.requests[i] for i in chosen]
        positions = [self.positions[i] for i in chosen]
        batch = SampleBatch(requests, positions, self.row_index[index], self.position_index[index])
        return index, batch


@dataclass(frozen=True)
class SamplerOutput:
    """One token for each sample, on the device until `collect`."""

    tokens: torch.Tensor  # [samples]
    drafts: tuple[Sequence[int], ...]  # of each request; it has one sample more than drafts
    logprobs: LogprobTensors | None = None  # of the samples that request log-probabilities
    # Sample index -> number of top tokens to return.
    logprob_counts: Mapping[int, int] = field(default_factory=dict)

    def copy_to_host(self) -> SamplerOutput:
        """Start to copy the results to the host, without waiting."""
        logprobs = None
        if self.logprobs is not None:
            logprobs = LogprobTensors(*map(download, self.logprobs.fields))
        return replace(self, tokens=download(self.tokens), logprobs=logprobs)

    def collect(self) -> list[AcceptedTokens]:
        """Return the accepted tokens of each request.

        Drafts are accepted as long as they equal the tokens sampled at their positions. The first
        sample that differs, or the one after the last draft, is accepted too.
        """
        tokens = self.tokens.tolist()
        logprobs = dict[int, TokenLogprob]()
        if self.logprobs is not None:
            entries = self.logprobs.to_list(tuple(self.logprob_counts.values()))
            logprobs = dict(zip(self.logprob_counts, entries))
        accepted = []
        first = 0
        for drafts in self.drafts:
            sampled = tokens[first : first + len(drafts) + 1]
            num_accepted = count_matching(drafts, sampled) + 1
            samples = range(first, first + num_accepted)
            own_logprobs = tuple(logprobs[i] for i in samples if i in logprobs)
            accepted.append((tuple(sampled[:num_accepted]), own_logprobs))
            first += len(drafts) + 1
        return accepted


def count_matching(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many leading drafts equal the sampled tokens."""
    for i, draft in enumerate(drafts):
        if draft != sampled[i]:
            return i
    return len(drafts)


class Sampler:
    """Samples tokens with torch, for any combination of sampling parameters."""

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        batch_invariant: bool = False,
        max_model_len: int = 1 << 31,
    ):
        """Allocate parameters for `num_rows` requests.

        batch_invariant: no result may depend on the number of samples in a batch.
        max_model_len: no sequence has more tokens.
        """
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.max_model_len = max_model_len
        self.requests: dict[int, RequestSampling] = {}  # by row
        self.new_rows: list[int] = []  # rows whose parameters are not on the device yet
        # [rows, 7]: the columns that `_params` returns.
        self.float_params = torch.zeros(num_rows, 7, dtype=torch.float64, device=self.device)
        self.top_k = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self.seed_words = torch.zeros(num_rows, 2, dtype=torch.int32, device=self.device)
        self.prompt_lens = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        # [rows, width]; the width grows on demand.
        self.history = torch.zeros(num_rows, 0, dtype=torch.int32, device=self.device)
        # Rows of logits processed at a time where the work takes many times their memory.
        self.max_chunk_rows = max(1, MAX_CHUNK_LOGITS // vocab_size)
        # Rows of logits processed at a time elsewhere. On a CPU one row fits into the cache.
        one_by_one = batch_invariant or self.device.type == "cpu"
        self.chunk_rows = 1 if one_by_one else self.max_chunk_rows
        self.all_ids = torch.arange(vocab_size, dtype=torch.int32, device=self.device)

    def admit(self, row: int, new_request: NewRequestData) -> None:
        """Start or resume a request in a row.

        `new_request.tokens` is the prompt and whatever output the request already has.
        """
        processors = build_logits_processors(new_request, self.device)
        request = RequestSampling(row, new_request.sampling, processors, new_request.prompt_len)
        self.requests[row] = request
        self.new_rows.append(row)
        if request.needs_history:
            self._append_history(row, 0, new_request.tokens)

    def upload_new_requests(self) -> None:
        """Send the parameters of new requests to the device: once a step, before it samples."""
        if not self.new_rows:
            return
        requests = [self.requests[row] for row in self.new_rows]
        index = upload([request.row for request in requests], self.device)
        float_params = [request.float_params for request in requests]
        word_pairs = [seed_words(request.sampling.seed) for request in requests]
        top_k = [self._effective_top_k(request.sampling.top_k) for request in requests]
        prompt_lens = [request.prompt_len for request in requests]
        self.float_params[index] = upload(float_params, self.device, torch.float64)
        self.seed_words[index] = upload(word_pairs, self.device, torch.int32)
        self.top_k[index] = upload(top_k, self.device)
        self.prompt_lens[index] = upload(prompt_lens, self.device)
        self.new_rows.clear()

    def release(self, row: int) -> None:
        """Forget the request in a row: it has ended or was preempted."""
        del self.requests[row]
        if row in self.new_rows:
            self.new_rows.remove(row)

    def sample(
        self,
        logits: torch.Tensor,
        requests: Sequence[tuple[int, int, Sequence[int]]],
        masks: TokenMasks | None = None,
    ) -> SamplerOutput:
        """Sample one token for each row of logits [samples, vocab].

        requests: (row, position of the token to sample, drafts). Each request has 1 + len(drafts)
        consecutive rows of logits. masks: the tokens that grammars allow.
        """
        self.upload_new_requests()
        for row, position, drafts in requests:
            if drafts and self.requests[row].needs_history:
                self._append_history(row, position, drafts)
        sample_requests = list[RequestSampling]()
        positions = list[int]()
        for row, position, drafts in requests:
            num_samples = len(drafts) + 1
            sample_requests += [self.requests[row]] * num_samples
            positions += range(position, position + num_samples)
        batch = SampleBatch.build(sample_requests, positions, self.device)
        raw = logits.float()
        tokens = self._choose_tokens(self._process_logits(raw, batch, masks), batch)
        self._store_history(tokens, batch)
        all_drafts = tuple(drafts for _, _, drafts in requests)
        counts = {
            i: request.sampling.logprobs
            for i, request in enumerate(sample_requests)
            if request.sampling.logprobs is not None
        }
        if not counts:
            return SamplerOutput(tokens, all_drafts)
        index, _ = batch.select(list(counts))
        max_count = max(counts.values())
        logprobs = [
            compute_logprobs(raw[part], tokens[part], max_count, self.chunk_rows)
            for part in index.split(self.max_chunk_rows)
        ]
        return SamplerOutput(tokens, all_drafts, LogprobTensors.concatenate(logprobs), counts)

    def prompt_logprobs(
        self, logits: torch.Tensor, next_tokens: Sequence[int], count: int
    ) -> list[TokenLogprob]:
        """Score a prompt: logits [positions, vocab] and the token that follows each position."""
        entries = list[TokenLogprob]()
        tokens = upload(next_tokens, self.device)
        chunks = zip(logits.split(self.max_chunk_rows), tokens.split(self.max_chunk_rows))
        for chunk_logits, chunk_tokens in chunks:
            logprobs = compute_logprobs(chunk_logits, chunk_tokens, count, self.chunk_rows)
            entries += logprobs.to_list([count] * len(chunk_tokens))
        return entries

    def _effective_top_k(self, top_k: int) -> int:
        """Return 0, which is off, for a top_k that excludes nothing."""
        return top_k if 0 < top_k < self.vocab_size else 0

    # ---- token history ----

    def _widen_history(self, length: int) -> None:
        num_rows, width = self.history.shape
        if length > width:
            new_width = max(length, min(2 * width, self.max_model_len))
            wider = self.history.new_zeros(num_rows, new_width)
            wider[:, :width] = self.history
            self.history = wider

    def _append_history(self, row: int, position: int, tokens: Sequence[int]) -> None:
        end = position + len(tokens)
        self._widen_history(end)
        self.history[row, position:end] = upload(tokens, self.device)

    def _store_history(self, tokens: torch.Tensor, batch: SampleBatch) -> None:
        """Store the sampled tokens of requests that need their history."""
        chosen = [i for i, request in enumerate(batch.requests) if request.needs_history]
        if not chosen:
            return
        index, part = batch.select(chosen)
        self._widen_history(max(part.positions) + 1)
        self.history[part.row_index, part.position_index] = tokens[index].to(torch.int32)

    # ---- logits processors and penalties ----

    def _process_logits(
        self, raw: torch.Tensor, batch: SampleBatch, masks: TokenMasks | None
    ) -> torch.Tensor:
        """Return the raw logits themselves if no sample changes them, else a changed copy."""
        with_penalties = [i for i, request in enumerate(batch.requests) if request.has_penalties]
        has_processors = any(request.processors for request in batch.requests)
        if not with_penalties and not has_processors and masks is None:
            return raw
        scores = raw.clone()
        if masks is not None:
            mask_logits(scores, masks)
        for row_scores, request, position in zip(scores, batch.requests, batch.positions):
            for processor in request.processors:
                processor.apply(row_scores, position, self.history[request.row])
        if with_penalties:
            self._apply_penalties(scores, *batch.select(with_penalties))
        return scores

    def _apply_penalties(
        self, scores: torch.Tensor, index: torch.Tensor, batch: SampleBatch
    ) -> None:
        """Change the scores [all samples, vocab] of the samples `index`, which are `batch`."""
        max_position = max(batch.positions)
        history_rows = max(1, MAX_CHUNK_LOGITS // max(max_position, 1))
        chunk_rows = min(self.chunk_rows, history_rows)
        for part, rows, positions in zip(
            index.split(chunk_rows),
            batch.row_index.split(chunk_rows),
            batch.position_index.split(chunk_rows),
        ):
            *_, repetition, frequency, presence = self._params(rows)
            scores[part] = penalized(
                scores[part],
                self.history[rows, :max_position].to(torch.int64),
                positions.unsqueeze(-1),
                self.prompt_lens[rows].unsqueeze(-1),
                repetition.float(),
                frequency.float(),
                presence.float(),
            )

    # ---- choosing tokens ----

    def _params(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the float parameters of samples, each [samples, 1] in float64.

        They are: temperature, top_p, min_p, typical_p, repetition, frequency and presence penalty.
        """
        return self.float_params[rows].unsqueeze(-1).unbind(1)

    def _choose_tokens(self, scores: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        """Choose a token for each sample by the method of its request."""
        methods = [request.method for request in batch.requests]
        if "greedy" in methods:
            tokens = scores.argmax(-1)
        else:
            tokens = torch.empty_like(batch.position_index)
        for method, choose in (
            ("untruncated", self._sample_untruncated),
            ("truncated", self._sample_truncated),
        ):
            chosen = [i for i, request_method in enumerate(methods) if request_method == method]
            if len(chosen) == len(methods):
                return choose(scores, batch)
            if chosen:
                index, part = batch.select(chosen)
                tokens[index] = choose(scores[index], part)
        return tokens

    def _sample_untruncated(self, scores: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        """Sample from all tokens, without sorting them."""
        key_pairs = noise_keys(self.seed_words[batch.row_index], batch.position_index)
        tokens = []
        for part_scores, part_rows, part_key_pairs in zip(
            scores.split(self.chunk_rows),
            batch.row_index.split(self.chunk_rows),
            key_pairs.split(self.chunk_rows),
        ):
            z = self._relative_logprobs(part_scores, part_rows)
            tokens.append(z.add_(gumbel_noise(part_key_pairs, self.all_ids)).argmax(-1))
        return torch.cat(tokens)

    def _relative_logprobs(self, scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities less the best one in float32; -inf where min_p excludes."""
        temperature, _, min_p, *_ = self._params(rows)
        z = (scores - scores.amax(-1, keepdim=True)).div_(temperature.float())
        return z.masked_fill_(z < min_p.log().float(), -torch.inf)

    def _sample_truncated(self, scores: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        """Sample from the top tokens only.

        On a CPU few tokens are sorted at first, and more only for the samples that need more. On a
        GPU that check would make the host wait, so all tokens are sorted.
        """
        if len(scores) > self.max_chunk_rows:
            chunks = []
            for first in range(0, len(scores), self.max_chunk_rows):
                part = batch.chunk(first, self.max_chunk_rows)
                part_scores = scores[first : first + self.max_chunk_rows]
                chunks.append(self._sample_truncated(part_scores, part))
            return torch.cat(chunks)
        top_ks = [request.sampling.top_k for request in batch.requests]
        if all(0 < top_k <= NUM_FIRST_CANDIDATES for top_k in top_ks):
            width = min(self.vocab_size, max(top_ks))
            return self._sample_among_best(scores, width, batch, None)[0]
        total_mass = self._total_mass(scores, batch)
        width = self.vocab_size
        if self.device.type == "cpu":
            width = min(self.vocab_size, NUM_FIRST_CANDIDATES)
        tokens, enough = self._sample_among_best(scores, width, batch, total_mass)
        while width < self.vocab_size and not enough.all():
            index, part = batch.select((~enough).nonzero().squeeze(-1).tolist())
            width = min(self.vocab_size, 16 * width)
            tokens[index], enough[index] = self._sample_among_best(
                scores[index], width, part, total_mass[index]
            )
        return tokens

    def _total_mass(self, scores: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        """Return the mass [samples, 1] of all tokens that min_p keeps, in float64."""
        masses = []
        for part_scores, part_rows in zip(
            scores.split(self.chunk_rows), batch.row_index.split(self.chunk_rows)
        ):
            z = self._relative_logprobs(part_scores, part_rows)
            masses.append(z.exp_().sum(-1, True, dtype=torch.float64))
        return torch.cat(masses)

    def _sample_among_best(
        self,
        scores: torch.Tensor,
        width: int,
        batch: SampleBatch,
        total_mass: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample tokens [samples] from the best `width` of the vocabulary.

        Also returns whether that width was enough [samples].
        """
        temperature, top_p, min_p, typical_p, *_ = self._params(batch.row_index)
        values, ids = stable_topk(scores, width)
        z = (values.double() - values[:, :1]) / temperature
        any_typical = any(request.sampling.typical_p < 1.0 for request in batch.requests)
        keep, enough = truncation_mask(
            z,
            min_p,
            self.top_k[batch.row_index].unsqueeze(-1),
            top_p,
            typical_p if any_typical else None,
            total_mass,
        )
        key_pairs = noise_keys(self.seed_words[batch.row_index], batch.position_index)
        noisy = torch.where(keep, z + gumbel_noise(key_pairs, ids), -torch.inf)
        is_best = noisy == noisy.amax(-1, keepdim=True)
        return torch.where(is_best, ids, self.vocab_size).amin(-1), enough


# ---- fused sampling ----


def supports_fused_sampling(new_request: NewRequestData) -> bool:
    """Whether the fused kernels can sample for this request inside a captured step.

    They use only logits and the row's parameters: no logits processors, penalties, typical_p or
    log-probabilities.
    """
    sampling = new_request.sampling
    has_processors = (
        sampling.allowed_token_ids
        or sampling.logit_bias
        or sampling.bad_words
        or sampling.watermark
        or (sampling.min_tokens and new_request.stop_ids)
    )
    return (
        not has_processors
        and not has_penalties(sampling)
        and sampling.typical_p >= 1.0
        and sampling.logprobs is None
    )


class FusedSampler:
    """Samples without any work on the host, as a captured step requires.

    It reads the parameters of a Sampler and returns the tokens that Sampler.sample would return.
    """

    def __init__(self, sampler: Sampler, extra_samples: int = 0, pool: ThreadPool | None = None):
        """Allocate scratch for one sample of every row and `extra_samples` more."""
        self.pool = pool
        self.float_params = sampler.float_params
        temperature, top_p, min_p = self.float_params[:, :3].unbind(1)
        self.params = SamplingTensors(temperature, top_p, min_p, sampler.top_k, sampler.seed_words)
        num_samples = len(sampler.top_k) + extra_samples
        self.scratch = SamplingScratch.allocate(num_samples, sampler.vocab_size, sampler.device)

    def __call__(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return tokens [samples] for logits [samples, vocab].

        rows and positions [samples] are those of the tokens to sample.
        """
        if self.pool is not None and self.pool.accepts(logits):
            return ops.sample_tokens(
                self.pool,
                logits,
                rows,
                positions,
                self.float_params,
                self.float_params.stride(0),
                self.params.top_k,
                self.params.seed_words,
            )
        return sample_tokens(logits, rows, positions, self.params, self.scratch).tokens
