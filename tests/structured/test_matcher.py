"""Masks of requests: which tokens a grammar, the stop ids and the other options leave."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from bloomery.errors import InvalidRequest
from bloomery.messages import EngineRequest, ResolvedSampling
from bloomery.structured.matcher import GrammarMatcher, MaskBuilder, TokenVocabulary
from tests.structured.byte_vocabulary import BYTES, END


def make_builder(vocab_size: int = BYTES.vocab_size) -> MaskBuilder:
    vocabulary: Future[TokenVocabulary] = Future()
    vocabulary.set_result(TokenVocabulary(BYTES))
    return MaskBuilder(vocabulary, vocab_size, num_threads=1)


def make_request(grammar: str, stop_ids: tuple[int, ...] = (END,), **options: Any) -> EngineRequest:
    emitted = tuple(BYTES.encode(options.pop("emitted", "")))
    sampling = ResolvedSampling(**options)
    return EngineRequest("0", (1,), sampling, 16, stop_ids, emitted, grammar=grammar)


def create_matcher(builder: MaskBuilder, request: EngineRequest) -> GrammarMatcher:
    return builder.create_matcher(request).result()


def allowed_ids(builder: MaskBuilder, matcher: GrammarMatcher) -> set[int]:
    mask = builder.compute_masks([matcher])[0].copy()
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def ids_of(*texts: str) -> set[int]:
    return {BYTES.tokens.index(text.encode()) for text in texts}


def test_a_mask_allows_every_token_that_goes_on() -> None:
    builder = make_builder()
    matcher = create_matcher(builder, make_request('start: "yes" | "no"'))
    assert allowed_ids(builder, matcher) == ids_of("y", "n", "yes", "no")
    matcher.accept(ord("n"))
    assert allowed_ids(builder, matcher) == ids_of("o")
    assert not matcher.is_finished
    matcher.accept(ord("o"))
    assert matcher.is_finished and not matcher.error


def test_stop_ids_end_a_complete_output_only() -> None:
    builder = make_builder()
    other_stop = ord("#")
    matcher = create_matcher(builder, make_request("start: /a+/", stop_ids=(END, other_stop)))
    assert allowed_ids(builder, matcher) == ids_of("a")
    matcher.accept(ord("a"))
    assert allowed_ids(builder, matcher) == ids_of("a") | {END, other_stop}


def test_without_stop_ids_the_end_token_is_not_allowed() -> None:
    """ignore_eos: the output goes on while the grammar lets it, and ends with the grammar."""
    builder = make_builder()
    matcher = create_matcher(builder, make_request("start: /a{1,2}/", stop_ids=()))
    matcher.accept(ord("a"))
    assert allowed_ids(builder, matcher) == ids_of("a")
    matcher.accept(ord("a"))
    assert matcher.is_finished


def test_allowed_token_ids_and_the_grammar_apply_together() -> None:
    builder = make_builder()
    request = make_request("start: /[abc]+/", allowed_token_ids=(ord("a"), ord("x")))
    matcher = create_matcher(builder, request)
    assert allowed_ids(builder, matcher) == ids_of("a")
    matcher.accept(ord("a"))
    assert allowed_ids(builder, matcher) == ids_of("a") | {END}
    nothing = create_matcher(builder, make_request("start: /b+/", allowed_token_ids=(ord("a"),)))
    assert allowed_ids(builder, nothing) == set()
    assert "no token is left" in nothing.error


def test_a_replayed_request_starts_after_the_tokens_that_a_client_has() -> None:
    builder = make_builder()
    matcher = create_matcher(builder, make_request('start: "abc" /[0-9]+/', emitted="abc1"))
    fresh = create_matcher(builder, make_request('start: "abc" /[0-9]+/'))
    for token in BYTES.encode("abc1"):
        fresh.accept(token)
    assert allowed_ids(builder, matcher) == allowed_ids(builder, fresh)


def test_a_forbidden_token_is_an_error_of_its_request_alone() -> None:
    builder = make_builder()
    broken = create_matcher(builder, make_request('start: "a"'))
    sound = create_matcher(builder, make_request('start: "a"'))
    broken.accept(ord("b"))
    assert broken.error and not broken.is_finished
    masks = builder.compute_masks([broken, sound])
    assert masks[1].any() and not sound.error


@pytest.mark.parametrize("vocab_size", [100, 128, BYTES.vocab_size + 1, 300])
def test_masks_have_the_width_of_the_model(vocab_size: int) -> None:
    """Ids that the tokenizer does not have are never allowed."""
    builder = make_builder(vocab_size)
    matcher = create_matcher(builder, make_request("start: /[a-z]+/"))
    masks = builder.compute_masks([matcher])
    assert masks.shape == (1, -(-vocab_size // 32))
    expected = {id for id, token in enumerate(BYTES.tokens) if token.isalpha() and token.islower()}
    assert allowed_ids(builder, matcher) == {id for id in expected if id < vocab_size}


def test_requests_with_the_same_grammar_do_not_disturb_each_other() -> None:
    builder = make_builder()
    request = make_request("start: /[a-z]{3}/")
    matchers = [create_matcher(builder, request) for _ in range(12)]
    for count, matcher in enumerate(matchers):
        for _ in range(count % 3):
            matcher.accept(ord("x"))
    masks = builder.compute_masks(matchers).copy()
    for count, (matcher, mask) in enumerate(zip(matchers, masks, strict=True)):
        assert mask.any() and not matcher.error
        assert not matcher.is_finished, count
    assert len(builder.cache) == 1


def test_a_wrong_grammar_is_refused() -> None:
    builder = make_builder()
    with pytest.raises(InvalidRequest, match="unknown name"):
        builder.create_matcher(make_request("start: nothing")).result()


def test_a_lexer_that_has_grown_too_large_is_replaced() -> None:
    """A request does not fail because of the texts that others have written."""
    builder = make_builder()
    grammar = r"start: TEXT" "\n" r"TEXT: /(?:\S+\s+){0,99}\S+/ & /(?s:.{1,5000})/"
    request = make_request(grammar)
    growing = create_matcher(builder, request)
    for character in "ab c":
        # Not compute_masks, which also replaces the lexer of a request with an error.
        growing.matcher.compute_bitmask()
        growing.accept(ord(character))
    assert "too complex: simplify its patterns" in growing.error
    lexer = builder.cache[grammar][0].deep_copy()
    lexer.compute_bitmask()
    assert lexer.is_error(), "the shared lexer is too large"
    for _ in range(5):
        matcher = create_matcher(builder, request)
        assert ord("a") in allowed_ids(builder, matcher) and not matcher.error
