"""The sampling parameters of every request row, on the device.

A row is written when its request joins. After that sampling needs nothing from the host, except
what depends on more than the parameters: the mask of a grammar.
The kernels skip what a row does not ask for: its flags say what it asks for.

Sets of tokens are bit sets: bit i of word w is token 32 w + i. The bits of BIASED and OUTPUT say
which entries of `bias` and `counts` are valid, so these large tables are never cleared.

Penalty counts and the latest tokens are state: sampling a token updates them. A row that joins gets
them from the tokens that its request already has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# ---- flags of a row ----
PERMITTED_FLAG = 1  # only some tokens are permitted
BIASED_FLAG = 2  # some tokens have a bias
BANNED_FLAG = 4  # bad words, or stop tokens before min_tokens
GREEN_FLAG = 8  # watermark: the tokens of a green list are favoured
PENALIZED_FLAG = 16  # repetition, frequency or presence penalty
LOGPROBS_FLAG = 32  # log-probabilities are wanted
ADJUSTED_FLAGS = 31  # any flag that changes scores

# ---- bit sets of a row ----
PERMITTED = 0  # allowed_token_ids, and what a grammar allows
BIASED = 1  # tokens with an entry in `bias`
BANNED = 2  # tokens that bad words and min_tokens forbid now; computed by every step
GREEN = 3  # the green list of a watermark; computed by every step
PROMPT = 4  # tokens of the prompt
OUTPUT = 5  # tokens of the output: those with an entry in `counts`
BAD = 6  # bad words of one token
STOPS = 7  # stop tokens, if min_tokens is set
NUM_BIT_SETS = 8

# ---- columns of `floats` ----
TEMPERATURE = 0
TOP_P = 1  # 1 is off
MIN_P = 2  # 0 is off
TYPICAL_P = 3  # 1 is off
REPETITION = 4  # over prompt and output; 1 is off
FREQUENCY = 5  # over the output; 0 is off
PRESENCE = 6  # over the output; 0 is off
DELTA = 7  # of a watermark
NUM_FLOATS = 8

# ---- columns of `ints` ----
FLAGS = 0
TOP_K = 1  # 0 is off
SEED_WORDS = 2  # and the next column
NUM_TOP = 4  # likeliest tokens to report with the sampled one
PROMPT_LEN = 5
FIRST_END = 6  # min_tokens: the first position at which a stop token may stand
NUM_WORDS = 7  # bad words of several tokens
NUM_GREEN = 8  # watermark: the length of a green list
NUM_INTS = 9

MAX_BAD_WORDS = 512  # of several tokens, of one request
MAX_BAD_WORD_TOKENS = 4096  # of all these words together
NUM_RECENT = 128  # latest tokens of a row; a bad word has at most half as many
MAX_TOP_LOGPROBS = 128  # likeliest tokens that a step can report for one row
MAX_COUNT = 32767  # penalty counts stop here


class SamplingRows(NamedTuple):
    """The tables; the first index is the row."""

    floats: torch.Tensor  # [rows, NUM_FLOATS] float64
    ints: torch.Tensor  # [rows, NUM_INTS] int32
    bits: torch.Tensor  # [rows, NUM_BIT_SETS, words] int32
    bias: torch.Tensor  # [rows, vocab] float32
    counts: torch.Tensor  # [rows, vocab] int16: how often the output has the token
    # [rows, MAX_BAD_WORDS, 3] int32: last token, first place in `word_tokens`, tokens before it
    bad_words: torch.Tensor
    word_tokens: torch.Tensor  # [rows, MAX_BAD_WORD_TOKENS] int32
    recent: torch.Tensor  # [rows, NUM_RECENT] int32: the token at position p is at p % NUM_RECENT

    @classmethod
    def allocate(
        cls, num_rows: int, vocab_size: int, device: torch.device | str = "cpu"
    ) -> SamplingRows:
        """Allocate rows that are greedy and ask for nothing else."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

        return cls(
            zeros(NUM_FLOATS, dtype=torch.float64),
            zeros(NUM_INTS),
            zeros(NUM_BIT_SETS, -(-vocab_size // 32)),
            zeros(vocab_size, dtype=torch.float32),
            zeros(vocab_size, dtype=torch.int16),
            zeros(MAX_BAD_WORDS, 3),
            zeros(MAX_BAD_WORD_TOKENS),
            zeros(NUM_RECENT),
        )


class SampleOutputs(NamedTuple):
    """The results of sampling, by sample.

    A report has the rank of the token, its log-probability, MAX_TOP_LOGPROBS ids and as many
    log-probabilities; those are float32 stored as their bits. It is valid for samples whose row has
    LOGPROBS_FLAG.
    """

    tokens: torch.Tensor  # [samples]
    reports: torch.Tensor  # [samples, 2 + 2 * MAX_TOP_LOGPROBS] int32

    @classmethod
    def allocate(
        cls, num_samples: int, device: torch.device | str, dtype: torch.dtype = torch.int64
    ) -> SampleOutputs:
        """Allocate room for some samples."""
        width = 2 + 2 * MAX_TOP_LOGPROBS
        return cls(
            torch.zeros(num_samples, dtype=dtype, device=device),
            torch.zeros(num_samples, width, dtype=torch.int32, device=device),
        )

    def first(self, count: int) -> SampleOutputs:
        """The outputs of the first samples."""
        return SampleOutputs(self.tokens[:count], self.reports[:count])
