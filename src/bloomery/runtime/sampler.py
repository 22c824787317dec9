"""The sampler: from logits to tokens, for a batch in which every request has its own parameters.

A token is a function of its own row of logits, the request's sampling parameters, the request's
tokens so far, its grammar, its seed and its position. Other requests of the batch, the request's
row, preemption and drafts change nothing. The order is: the grammar's mask, allowed_token_ids,
logit_bias, bad_words, min_tokens, watermark, then repetition, frequency and presence penalty, then
temperature, then truncation by min_p, top_k, top_p and typical_p, then the highest of
score / temperature + Gumbel noise. The lowest id wins among equals.

A request occupies a row for as long as it runs. A sample is one token to choose: one row of logits
at one position of one request; a request with n drafts (speculative decoding) has 1 + n samples.

All parameters and all state are tables on the device with an entry for each row
(kernels/sampling_rows). The host writes them when a request joins, and then only sends the masks of
grammars. So a step samples for any mix of requests inside its
CUDA graph or CPU trace. This file must not know schedules, blocks or why a request ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from bloomery.attention.base import download, index_dtype, upload
from bloomery.kernels.grammar_masks import UNUSED, SentMasks, apply_masks
from bloomery.kernels.launch import use_triton
from bloomery.kernels.sampling import (
    SamplingScratch,
    sample_tokens_triton,
    score_tokens_triton,
)
from bloomery.kernels.sampling_reference import (
    INCREMENT_1,
    MULTIPLIER_1,
    MULTIPLIER_2,
    UINT32_MASK,
    report_logprobs,
    sample_tokens_reference,
)
from bloomery.kernels.sampling_rows import (
    BAD,
    BANNED_FLAG,
    BIASED,
    BIASED_FLAG,
    FLAGS,
    GREEN_FLAG,
    LOGPROBS_FLAG,
    MAX_TOP_LOGPROBS,
    NUM_RECENT,
    NUM_TOP,
    OUTPUT,
    PENALIZED_FLAG,
    PERMITTED,
    PERMITTED_FLAG,
    PROMPT,
    STOPS,
    SampleOutputs,
    SamplingRows,
)
from bloomery.messages import NewRequestData, ResolvedSampling, TokenLogprob
from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool

INCREMENT_2 = 0x85EBCA6B  # of `seed_words`
SCORED_TOKENS = 64  # prompt tokens whose log-probabilities are computed at a time

# The tokens that one request gained in a step, and their log-probabilities if requested.
AcceptedTokens = tuple[tuple[int, ...], tuple[TokenLogprob, ...]]


# ---- a request's entries in the tables ----


def seed_words(seed: int) -> tuple[int, int]:
    """Turn a 64-bit seed into two int32 words, by the recipe in kernels/sampling_reference.py."""
    low = seed & UINT32_MASK
    high = seed >> 32 & UINT32_MASK
    first = mix_bits(mix_bits(low + INCREMENT_1) ^ high)
    second = mix_bits(mix_bits(high + INCREMENT_2) ^ low)
    return as_int32(first), as_int32(second)


def mix_bits(x: int) -> int:
    """Hash a 32-bit integer."""
    x &= UINT32_MASK
    x = ((x ^ x >> 16) * MULTIPLIER_1) & UINT32_MASK
    x = ((x ^ x >> 15) * MULTIPLIER_2) & UINT32_MASK
    return x ^ x >> 16


def as_int32(x: int) -> int:
    """Reinterpret an unsigned 32-bit integer as a signed one."""
    return x - (1 << 32) if x >> 31 else x


def pack_token_bits(tokens: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the bit set of tokens [words] int32; bit i of word w is token 32 w + i."""
    num_words = -(-vocab_size // 32)
    flags = np.zeros(32 * num_words, np.bool_)
    if len(tokens):
        flags[np.asarray(tokens)] = True
    return np.packbits(flags, bitorder="little").view(np.int32)


class RequestSampling(NamedTuple):
    """The host's copy of what a row asks for."""

    flags: int
    num_logprobs: int | None  # likeliest tokens to report; None: no log-probabilities
    permitted: np.ndarray | None  # the bits of allowed_token_ids


def find_flags(new_request: NewRequestData) -> int:
    """Return the flags of a request's row."""
    sampling = new_request.sampling
    penalized = (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
    )
    flags = 0
    if sampling.allowed_token_ids:
        flags |= PERMITTED_FLAG
    if sampling.logit_bias:
        flags |= BIASED_FLAG
    if sampling.bad_words or (sampling.min_tokens and new_request.stop_ids):
        flags |= BANNED_FLAG
    if sampling.watermark:
        flags |= GREEN_FLAG
    if penalized:
        flags |= PENALIZED_FLAG
    if sampling.logprobs is not None:
        flags |= LOGPROBS_FLAG
    return flags


def encode_floats(sampling: ResolvedSampling) -> tuple[float, ...]:
    """Return a request's row of `SamplingRows.floats`."""
    delta = sampling.watermark[1] if sampling.watermark else 0.0
    return (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.typical_p,
        sampling.repetition_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
        delta,
    )


def encode_ints(new_request: NewRequestData, flags: int, vocab_size: int) -> tuple[int, ...]:
    """Return a request's row of `SamplingRows.ints`."""
    sampling = new_request.sampling
    first_end = 0
    if sampling.min_tokens and new_request.stop_ids:
        first_end = min(new_request.prompt_len + sampling.min_tokens, 2**31 - 1)
    gamma = sampling.watermark[0] if sampling.watermark else 0.0
    return (
        flags,
        sampling.top_k if 0 < sampling.top_k < vocab_size else 0,
        *seed_words(sampling.seed),
        sampling.logprobs or 0,
        new_request.prompt_len,
        first_end,
        sum(len(word) > 1 for word in sampling.bad_words),
        int(vocab_size * gamma),
    )


def find_bit_sets(new_request: NewRequestData, flags: int) -> list[tuple[int, Sequence[int]]]:
    """Return the bit sets that a request's row needs: (which one, its tokens)."""
    sampling = new_request.sampling
    bit_sets: list[tuple[int, Sequence[int]]] = []
    if flags & PERMITTED_FLAG:
        bit_sets.append((PERMITTED, sampling.allowed_token_ids))
    if flags & BIASED_FLAG:
        bit_sets.append((BIASED, [token for token, _ in sampling.logit_bias]))
    if flags & BANNED_FLAG:
        bit_sets.append((BAD, [word[0] for word in sampling.bad_words if len(word) == 1]))
        bit_sets.append((STOPS, new_request.stop_ids if sampling.min_tokens else ()))
    if flags & PENALIZED_FLAG:
        bit_sets.append((PROMPT, new_request.tokens[: new_request.prompt_len]))
        bit_sets.append((OUTPUT, new_request.tokens[new_request.prompt_len :]))
    return bit_sets


# ---- results ----


def read_reports(
    reports: torch.Tensor, tokens: Sequence[int], counts: Sequence[int | None]
) -> list[TokenLogprob | None]:
    """Convert reports on the host; `counts` has the number of top tokens to return for each."""
    table = reports.numpy()
    wanted = [count for count in counts if count is not None]
    width = min(max(wanted, default=0), MAX_TOP_LOGPROBS)
    first_logprob = 2 + MAX_TOP_LOGPROBS
    ranks = table[:, 0].tolist()
    logprobs = as_floats(table[:, 1]).tolist()
    top_ids = table[:, 2 : 2 + width].tobytes()
    top_floats = as_floats(table[:, first_logprob : first_logprob + width])
    top_logprobs = top_floats.astype(np.float64).tobytes()
    entries: list[TokenLogprob | None] = []
    for i, (token, count) in enumerate(zip(tokens, counts, strict=True)):
        if count is None:
            entries.append(None)
            continue
        first = width * i
        end = first + min(count, width)
        packed_top = top_ids[4 * first : 4 * end] + top_logprobs[8 * first : 8 * end]
        entries.append(TokenLogprob(token, logprobs[i], ranks[i], packed_top))
    return entries


def as_floats(bits: np.ndarray) -> np.ndarray:
    """Reinterpret int32 as float32."""
    return np.ascontiguousarray(bits).view(np.float32)


@dataclass(frozen=True)
class SamplerOutput:
    """One token for each sample, on the device until `collect`."""

    tokens: torch.Tensor  # [samples]
    drafts: tuple[Sequence[int], ...]  # of each request; it has one sample more than drafts
    reports: torch.Tensor | None = None  # [samples, ...], see SampleOutputs; None: none is wanted
    counts: Sequence[int | None] = ()  # likeliest tokens to return for each sample, with reports

    def copy_to_host(self) -> SamplerOutput:
        """Start to copy the results to the host, without waiting."""
        reports = None
        if self.reports is not None:
            reports = download(self.reports)
        return replace(self, tokens=download(self.tokens), reports=reports)

    def read(self) -> tuple[list[int], Sequence[TokenLogprob | None]]:
        """Return each sample's token and, if any sample wants them, its log-probabilities."""
        tokens = self.tokens.tolist()
        if self.reports is None:
            return tokens, ()
        return tokens, read_reports(self.reports.cpu(), tokens, self.counts)

    def collect(self) -> list[AcceptedTokens]:
        """Return the accepted tokens of each request.

        Drafts are accepted as long as they equal the tokens sampled at their positions. The first
        sample that differs, or the one after the last draft, is accepted too.
        """
        tokens, logprobs = self.read()
        accepted = []
        first = 0
        for drafts in self.drafts:
            sampled = tokens[first : first + len(drafts) + 1]
            num_accepted = count_matching(drafts, sampled) + 1
            entries = logprobs[first : first + num_accepted]
            own_logprobs = tuple([entry for entry in entries if entry is not None])
            accepted.append((tuple(sampled[:num_accepted]), own_logprobs))
            first += len(drafts) + 1
        return accepted


def count_matching(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many leading drafts equal the sampled tokens."""
    for i, draft in enumerate(drafts):
        if draft != sampled[i]:
            return i
    return len(drafts)


class MaskUpload:
    """Sends the masks of grammars to the device while it computes the forward pass.

    The copy has a stream of its own. Its source are pinned buffers that are allocated once, by the
    first masks. There are two: while one is being copied, the other can be filled.
    """

    def __init__(self, max_masks: int, num_words: int, device: torch.device):
        self.shape = (max_masks, num_words)
        self.device = device
        self.sent = SentMasks.allocate(max_masks, num_words, device)
        self.hosts: list[SentMasks] = []
        self.copied: list[torch.cuda.Event] = []  # when each of them may be filled again
        self.turn = 0
        self.taken: torch.cuda.Event | None = None  # when the device's buffer may be filled again
        self.stream: torch.cuda.Stream | None = None

    def send(
        self, rows: Sequence[int], masks: np.ndarray, permitted: Sequence[np.ndarray | None]
    ) -> None:
        """Queue the copy; what is queued next on the current stream finds the masks there.

        permitted: the only tokens that may be in each mask, None if there is no such limit.
        """
        if self.device.type != "cuda":
            fill_masks(self.sent, rows, masks, permitted)
            return
        if self.stream is None:
            self.stream = torch.cuda.Stream(self.device)
            for _ in range(2):
                host = SentMasks.allocate(*self.shape, torch.device("cpu"), pin_memory=True)
                self.hosts.append(host)
                self.copied.append(torch.cuda.Event())
        self.turn = 1 - self.turn
        host = self.hosts[self.turn]
        copied = self.copied[self.turn]
        copied.synchronize()
        fill_masks(host, rows, masks, permitted)
        with torch.cuda.stream(self.stream):
            if self.taken is not None:
                self.stream.wait_event(self.taken)
            self.sent.copy_from(host, len(rows))
            copied.record()
        torch.cuda.current_stream(self.device).wait_event(copied)

    def mark_taken(self) -> None:
        """Let the next masks overwrite these once the work queued so far has ended."""
        if self.device.type == "cuda":
            if self.taken is None:
                self.taken = torch.cuda.Event()
            self.taken.record()


def fill_masks(
    host: SentMasks,
    rows: Sequence[int],
    masks: np.ndarray,
    permitted: Sequence[np.ndarray | None],
) -> None:
    """Write masks into a buffer; they may be narrower than the vocabulary."""
    num_masks = len(rows)
    all_rows = host.rows.numpy()
    all_rows[:num_masks] = rows
    all_rows[num_masks:] = UNUSED
    filled = host.masks.numpy()[:num_masks]
    width = min(filled.shape[1], masks.shape[1])
    filled[:, :width] = masks[:, :width]
    filled[:, width:] = 0
    for mask, limit in zip(filled, permitted, strict=True):
        if limit is not None:
            mask &= limit


# ---- the sampler ----


def count_sampler_bytes(num_rows: int, vocab_size: int, extra_samples: int) -> int:
    """Return the GPU memory of a Sampler with these sizes."""
    num_samples = max(num_rows + extra_samples, SCORED_TOKENS)
    scratch = SamplingScratch.allocate(num_samples, vocab_size, "meta")
    num_words = -(-vocab_size // 32)
    masks = SentMasks.allocate(num_rows + extra_samples, num_words, torch.device("meta"))
    tensors = (
        *SamplingRows.allocate(num_rows + 1, vocab_size, "meta"),
        *SampleOutputs.allocate(num_samples, "meta"),
        *(scratch.floats, scratch.ints, scratch.masses, scratch.swaps),
        masks.buffer,
    )
    return sum(tensor.nbytes for tensor in tensors)


class Sampler:
    """Samples tokens for any combination of sampling parameters.

    A captured step calls the sampler itself. `sample` is for steps that the host lays out.
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        extra_samples: int = 0,
        pool: ThreadPool | None = None,
    ):
        """Allocate the tables of `num_rows` requests, and one more row to score prompts with.

        There can be one sample of every row and `extra_samples` more at a time.
        """
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.pool = pool
        self.scoring_row = num_rows
        self.state = SamplingRows.allocate(num_rows + 1, vocab_size, self.device)
        self.state.ints[self.scoring_row, FLAGS] = LOGPROBS_FLAG
        num_samples = max(num_rows + extra_samples, SCORED_TOKENS)
        self.outputs = SampleOutputs.allocate(num_samples, self.device)
        self.scratch: SamplingScratch | None = None
        if self.device.type == "cuda":
            self.scratch = SamplingScratch.allocate(num_samples, vocab_size, self.device)
        self.requests: dict[int, RequestSampling] = {}  # by row
        self.new_requests: dict[int, NewRequestData] = {}  # not on the device yet, by row
        max_masks = num_rows + extra_samples
        self.mask_upload = MaskUpload(max_masks, -(-vocab_size // 32), self.device)

    def __call__(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        is_masked: bool = False,
    ) -> SampleOutputs:
        """Sample one token for each row of logits [samples, vocab], without any work on the host.

        rows and positions [samples] are those of the tokens to sample. `is_masked`: masks may have
        been sent for some of the rows. The results lie in buffers that the next call overwrites.
        Afterwards the tokens count as part of the requests.
        """
        if is_masked:
            self.apply_masks(len(logits))
        outputs = SampleOutputs(*[values[: len(logits)] for values in self.outputs])
        if self.pool is not None and self.pool.accepts(logits):
            ops.sample_tokens(self.pool, logits, rows, positions, self.state, *outputs)
        elif use_triton(logits) and self.scratch is not None:
            sample_tokens_triton(logits, rows, positions, self.state, outputs, self.scratch)
        else:
            sample_tokens_reference(logits, rows, positions, self.state, outputs)
        return outputs

    # ---- requests join and leave ----

    def admit(self, row: int, new_request: NewRequestData) -> None:
        """Start or resume a request in a row.

        `new_request.tokens` is the prompt and whatever output the request already has.
        """
        sampling = new_request.sampling
        flags = find_flags(new_request)
        permitted = None
        if sampling.allowed_token_ids:
            permitted = pack_token_bits(sampling.allowed_token_ids, self.vocab_size)
        self.requests[row] = RequestSampling(flags, sampling.logprobs, permitted)
        self.new_requests[row] = new_request

    def release(self, row: int) -> None:
        """Forget the request in a row: it has ended or was preempted."""
        del self.requests[row]
        self.new_requests.pop(row, None)

    def upload_new_requests(self) -> None:
        """Send the parameters of new requests to the device: once a step, before it samples."""
        if not self.new_requests:
            return
        floats = []
        ints = []
        bit_sets = []
        for row, request in self.new_requests.items():
            flags = self.requests[row].flags
            floats.append(encode_floats(request.sampling))
            ints.append(encode_ints(request, flags, self.vocab_size))
            bit_sets += [(row, *bit_set) for bit_set in find_bit_sets(request, flags)]
        index = upload(list(self.new_requests), self.device)
        self.state.floats[index] = upload(floats, self.device, torch.float64)
        self.state.ints[index] = upload(ints, self.device, torch.int32)
        if bit_sets:
            places = upload([(row, kind) for row, kind, _ in bit_sets], self.device)
            packed_sets = [pack_token_bits(tokens, self.vocab_size) for _, _, tokens in bit_sets]
            packed = upload(torch.from_numpy(np.stack(packed_sets)), self.device, torch.int32)
            self.state.bits[places[:, 0], places[:, 1]] = packed
        self._upload_biases()
        self._upload_counts()
        self._upload_recent_tokens()
        self._upload_bad_words()
        self.new_requests.clear()

    def _upload_biases(self) -> None:
        entries = [
            (row, token, bias)
            for row, request in self.new_requests.items()
            for token, bias in request.sampling.logit_bias
        ]
        if entries:
            rows, tokens, biases = zip(*entries)
            values = upload(biases, self.device, torch.float32)
            self.state.bias[upload(rows, self.device), upload(tokens, self.device)] = values

    def _upload_counts(self) -> None:
        """Count the output that requests already have, for those with penalties."""
        entries = []
        for row, request in self.new_requests.items():
            output = request.tokens[request.prompt_len :]
            if output and self.requests[row].flags & PENALIZED_FLAG:
                entries += [(row, token, count) for token, count in Counter(output).items()]
        if entries:
            rows, tokens, counts = upload(entries, self.device).unbind(1)
            self.state.counts[rows, tokens] = counts.to(torch.int16)

    def _upload_recent_tokens(self) -> None:
        entries = []
        for row, request in self.new_requests.items():
            if self.requests[row].flags & (BANNED_FLAG | GREEN_FLAG):
                length = len(request.tokens)
                first = max(0, length - NUM_RECENT)
                entries += [
                    (row, position % NUM_RECENT, request.tokens[position])
                    for position in range(first, length)
                ]
        if entries:
            rows, places, tokens = upload(entries, self.device, torch.int64).unbind(1)
            self.state.recent[rows, places] = tokens.to(torch.int32)

    def _upload_bad_words(self) -> None:
        """Send bad words of several tokens; those of one token are a bit set."""
        entries = []
        prefixes = []
        for row, request in self.new_requests.items():
            num_tokens = 0
            long_words = [word for word in request.sampling.bad_words if len(word) > 1]
            for number, word in enumerate(long_words):
                entries.append((row, number, word[-1], num_tokens, len(word) - 1))
                for token in word[:-1]:
                    prefixes.append((row, num_tokens, token))
                    num_tokens += 1
        if entries:
            table = upload(entries, self.device, torch.int64)
            self.state.bad_words[table[:, 0], table[:, 1]] = table[:, 2:].to(torch.int32)
            rows, places, tokens = upload(prefixes, self.device, torch.int64).unbind(1)
            self.state.word_tokens[rows, places] = tokens.to(torch.int32)

    # ---- what the host adds to a step ----

    def send_masks(self, rows: Sequence[int], masks: np.ndarray) -> None:
        """Send the masks [rows, words] of grammars; `apply_masks` puts them into these rows."""
        permitted = [self.requests[row].permitted for row in rows]
        self.mask_upload.send(rows, masks, permitted)
        if self.device.type == "cpu":  # the tables are the host's, too
            apply_masks(self.mask_upload.sent, self.state, len(rows))

    def apply_masks(self, max_masks: int) -> None:
        """Permit only the tokens of the masks that were sent since the last call, if any were.

        A mask holds until the next one for its row.
        """
        if self.device.type != "cpu":
            apply_masks(self.mask_upload.sent, self.state, max_masks)

    # ---- steps that the host lays out ----

    def sample(
        self,
        logits: torch.Tensor,
        requests: Sequence[tuple[int, int, Sequence[int]]],
    ) -> SamplerOutput:
        """Sample one token for each row of logits [samples, vocab].

        requests: (row, position of the token to sample, drafts). Each request has 1 + len(drafts)
        consecutive rows of logits. Drafts are verified one after another: each must count as part
        of the request before the next is sampled.
        """
        self.upload_new_requests()
        first_samples = []
        counts: list[int | None] = []
        for row, _, drafts in requests:
            first_samples.append(len(counts))
            counts += [self.requests[row].num_logprobs] * (1 + len(drafts))
        wants_logprobs = any(count is not None for count in counts)
        tokens = torch.empty(len(counts), dtype=torch.int64, device=self.device)
        reports = None
        if wants_logprobs:
            width = self.outputs.reports.shape[1]
            reports = torch.empty(len(counts), width, dtype=torch.int32, device=self.device)
        for turn in range(1 + max(len(drafts) for _, _, drafts in requests)):
            samples = [
                (first + turn, row, position + turn)
                for first, (row, position, drafts) in zip(first_samples, requests)
                if turn <= len(drafts)
            ]
            index, rows, positions = upload(samples, self.device).t().contiguous()
            chosen = logits if len(samples) == len(logits) else logits[index]
            # The types of a captured step, so that the kernels are compiled once.
            outputs = self(chosen, rows.to(torch.int32), positions.to(index_dtype(self.device)))
            tokens[index] = outputs.tokens
            if reports is not None:
                reports[index] = outputs.reports
        all_drafts = tuple(drafts for _, _, drafts in requests)
        output = SamplerOutput(tokens, all_drafts, reports, counts if wants_logprobs else ())
        if any(all_drafts):
            self._forget_rejected(output, [row for row, _, _ in requests])
        return output

    def _forget_rejected(self, output: SamplerOutput, rows: Sequence[int]) -> None:
        """Take tokens that were sampled after a wrong draft off the penalty counts."""
        tokens = output.tokens.tolist()
        first = 0
        for row, drafts, (accepted, _) in zip(rows, output.drafts, output.collect(), strict=True):
            rejected = tokens[first + len(accepted) : first + len(drafts) + 1]
            first += len(drafts) + 1
            if not self.requests[row].flags & PENALIZED_FLAG:
                continue
            for token in rejected:
                count = int(self.state.counts[row, token]) - 1
                self.state.counts[row, token] = count
                if not count:
                    word = int(self.state.bits[row, OUTPUT, token // 32]) & ~(1 << token % 32)
                    self.state.bits[row, OUTPUT, token // 32] = as_int32(word & UINT32_MASK)

    def score_tokens(
        self, logits: torch.Tensor, tokens: Sequence[int], num_top: int
    ) -> torch.Tensor:
        """Return the reports of tokens under logits [tokens, vocab], still on the device."""
        chunks = []
        self.state.ints[self.scoring_row, NUM_TOP].fill_(num_top)
        for first in range(0, len(tokens), SCORED_TOKENS):
            part = logits[first : first + SCORED_TOKENS]
            ids = upload(tokens[first : first + SCORED_TOKENS], self.device)
            reports = self.outputs.reports[: len(ids)]
            if self.pool is not None and self.pool.accepts(part):
                ops.score_tokens(self.pool, part, ids, min(num_top, MAX_TOP_LOGPROBS), reports)
            elif use_triton(part) and self.scratch is not None:
                rows = torch.full_like(ids, self.scoring_row, dtype=torch.int32)
                outputs = SampleOutputs(ids, reports)
                score_tokens_triton(part, rows, self.state, outputs, self.scratch)
            else:
                for place, token in enumerate(ids.tolist()):
                    reports[place] = report_logprobs(part[place].float(), token, num_top)
            chunks.append(reports.clone())
        return torch.cat(chunks)
