"""From a grammar to token masks: the state of each constrained request, and its next mask.

A mask has one bit for each token id of the model, set if the token may come next. Masks are
computed by llguidance on threads of the host that do not hold Python's lock. The scheduler feeds a
matcher with the tokens of its request, in order. This module knows no tensors and no schedules.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Protocol, cast

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from bloomery.errors import GRAMMAR_TOO_COMPLEX, NO_TOKEN_LEFT, InvalidRequest
from bloomery.messages import EngineRequest

# Bounds what one request can take in the engine: a lexer state is 1 to 2 kB.
MAX_LEXER_STATES = 50_000
MAX_CACHED_GRAMMARS = 64
# Matchers of one cached grammar share its lexer and wait for each other. So that threads do not
# wait, a grammar that many requests use is compiled up to this many times.
MAX_LEXERS_PER_GRAMMAR = 4
# A lexer grows with the texts it has seen. After this many requests it is replaced by a new one.
MAX_REQUESTS_PER_GRAMMAR = 2000
MAX_GRAMMAR_THREADS = 6  # a mask takes about 20 microseconds, so more threads mostly wait


class TokenSource(Protocol):
    """The part of a tokenizer that a vocabulary is built from."""

    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]

    @property
    def special_ids(self) -> Collection[int]: ...
    def token_bytes(self, id: int) -> bytes: ...


class TokenVocabulary:
    """The bytes of all tokens, as llguidance needs them. It takes up to a second to build."""

    def __init__(self, tokenizer: TokenSource):
        self.vocab_size = tokenizer.vocab_size
        self.tokens = [tokenizer.token_bytes(id) for id in range(self.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.bos_token_id = tokenizer.bos_id
        # llguidance needs an end token. A model without one gives up its last token for that.
        eos_ids = [id for id in tokenizer.eos_ids if id < self.vocab_size]
        self.end_ids = tuple(eos_ids or [self.vocab_size - 1])
        self.eos_token_id = self.end_ids[0]
        self.is_tokenizer_wrapper = True  # the name by which llguidance knows such an object
        self.tokenizer = LLTokenizer(cast(TokenizerWrapper, self), eos_token=list(self.end_ids))
        self.tokens = []  # llguidance has copied them

    def __call__(self, text: str) -> list[int]:
        """Tokenize a text. llguidance asks only for grammars that force tokens; ours do not."""
        return self.tokenizer.greedy_tokenize(text)

    def compile(self, grammar: str) -> LLMatcher:
        """Compile a grammar. Raises InvalidRequest if it is wrong or beyond the limits."""
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be used: {matcher.get_error()}")
        return matcher


class GrammarMatcher:
    """The grammar state of one request."""

    def __init__(
        self, matcher: LLMatcher, request: EngineRequest, end_ids: Sequence[int], vocab_size: int
    ):
        """Start after the tokens that a client of a replayed request already has.

        end_ids: the ids that llguidance allows where the output may end.
        """
        self.matcher = matcher
        self.grammar = request.grammar
        self.error = ""  # why the request must end
        self.end_ids = [id for id in end_ids if id < vocab_size]
        self.stop_ids = [id for id in request.stop_ids if id < vocab_size]
        self.allowed_words: np.ndarray | None = None  # [words] of allowed_token_ids
        if request.sampling.allowed_token_ids:
            self.allowed_words = np.zeros(count_words(vocab_size), np.uint32)
            set_bits(self.allowed_words, (*request.sampling.allowed_token_ids, *self.stop_ids))
        for token in request.emitted:
            self.accept(token)

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete: nothing may follow it."""
        return not self.error and self.matcher.is_stopped()

    def accept(self, token: int) -> None:
        """Advance by one token of the output."""
        if not self.error and not self.matcher.consume_token(token):
            self.error = explain_stop(self.matcher)

    def adjust_mask(self, mask: np.ndarray) -> None:
        """Let the stop ids of the request end a complete output, and apply allowed_token_ids.

        mask: [words] uint32, as llguidance has filled it.
        """
        if self.matcher.is_error():  # a limit was exceeded
            self.error = explain_stop(self.matcher)
        elif self.matcher.is_accepting():
            clear_bits(mask, self.end_ids)
            set_bits(mask, self.stop_ids)
        if self.allowed_words is not None:
            mask &= self.allowed_words

    def check_end(self) -> None:
        """Note an error if no token is left and the output is not complete."""
        if not self.error and not self.matcher.is_accepting():
            self.error = NO_TOKEN_LEFT


class MaskBuilder:
    """Compiles the grammars of requests in the background, and computes masks on threads."""

    def __init__(
        self,
        vocabulary: Future[TokenVocabulary],
        vocab_size: int,
        num_threads: int | None = None,
    ):
        """`vocab_size` counts the ids of the model; those without a token are never allowed."""
        self.vocabulary = vocabulary  # may still be loading
        self.vocab_size = vocab_size
        threads = num_threads or min(MAX_GRAMMAR_THREADS, max(1, (os.cpu_count() or 1) - 1))
        self.executor = LLExecutor(threads)
        self.compile_pool = ThreadPoolExecutor(threads, "grammar")
        self.cache: OrderedDict[str, list[LLMatcher]] = OrderedDict()
        self.num_uses: dict[str, int] = {}
        self.cache_lock = Lock()
        self.buffer = np.zeros((0, 0), np.uint32)  # of the masks

    def create_matcher(self, request: EngineRequest) -> Future[GrammarMatcher]:
        """Compile the grammar of a request on another thread."""
        return self.compile_pool.submit(self._create_matcher, request)

    def _create_matcher(self, request: EngineRequest) -> GrammarMatcher:
        vocabulary = self.vocabulary.result()
        grammar = request.grammar
        with self.cache_lock:
            lexers = self.cache.setdefault(grammar, [])
            self.cache.move_to_end(grammar)
            num_uses = self.num_uses.get(grammar, 0)
            self.num_uses[grammar] = num_uses + 1
            if num_uses >= MAX_REQUESTS_PER_GRAMMAR:
                self._forget(grammar)
            if len(self.cache) > MAX_CACHED_GRAMMARS:
                self._forget(next(iter(self.cache)))
        if len(lexers) <= min(num_uses, MAX_LEXERS_PER_GRAMMAR - 1):
            lexers.append(vocabulary.compile(grammar))
        index = num_uses % len(lexers)
        matcher = lexers[index].deep_copy()
        matcher.compute_bitmask()
        if matcher.is_error():  # other requests have made the lexer too large
            lexers[index] = vocabulary.compile(grammar)
            matcher = lexers[index].deep_copy()
        return GrammarMatcher(matcher, request, vocabulary.end_ids, self.vocab_size)

    def _forget(self, grammar: str) -> None:
        """Compile a grammar anew when it comes again."""
        self.cache.pop(grammar, None)
        self.num_uses.pop(grammar, None)

    def compute_masks(self, matchers: Sequence[GrammarMatcher]) -> np.ndarray:
        """Return the masks [matchers, words] of the next tokens, as int32.

        They are valid until the next call: fresh memory would cost more than the masks.
        """
        if not matchers:
            return np.zeros((0, count_words(self.vocab_size)), np.int32)
        num_words = count_words(self.vocabulary.result().vocab_size)
        if len(self.buffer) < len(matchers):
            self.buffer = np.zeros((2 * len(matchers), num_words), np.uint32)
        filled = self.buffer[: len(matchers)]
        jobs = [(matcher.matcher, index) for index, matcher in enumerate(matchers)]
        self.executor.unsafe_compute_mask_ptr(
            jobs, filled.ctypes.data, 4 * num_words, len(matchers)
        )
        masks = self._fit_to_model(filled)
        for mask, matcher in zip(masks, matchers, strict=True):
            matcher.adjust_mask(mask)
            if matcher.error:  # perhaps its lexer has become too large
                with self.cache_lock:
                    self._forget(matcher.grammar)
        for index in np.flatnonzero(~masks.any(axis=1)).tolist():
            matchers[index].check_end()
        return masks.view(np.int32)

    def _fit_to_model(self, filled: np.ndarray) -> np.ndarray:
        """Give masks the width of the model's vocabulary, which may differ from the tokenizer's."""
        width = count_words(self.vocab_size)
        masks = filled
        if filled.shape[1] != width:
            masks = np.zeros((len(filled), width), np.uint32)
            shared = min(width, filled.shape[1])
            masks[:, :shared] = filled[:, :shared]
        if self.vocab_size % 32:
            masks[:, -1] &= np.uint32((1 << self.vocab_size % 32) - 1)
        return masks


def explain_stop(matcher: LLMatcher) -> str:
    """Say why a grammar cannot go on, for the client."""
    reason = matcher.get_error().replace("<non-verbose/>", "").strip()
    if reason.startswith("lexer error: too many"):
        return GRAMMAR_TOO_COMPLEX
    return f"the grammar cannot go on: {reason}"


def count_words(vocab_size: int) -> int:
    """The 32-bit words of a mask."""
    return -(-vocab_size // 32)


def set_bits(mask: np.ndarray, ids: Sequence[int]) -> None:
    for id in ids:
        mask[id >> 5] |= np.uint32(1 << (id & 31))


def clear_bits(mask: np.ndarray, ids: Sequence[int]) -> None:
    for id in ids:
        mask[id >> 5] &= np.uint32(~(1 << (id & 31)) & 0xFFFFFFFF)
