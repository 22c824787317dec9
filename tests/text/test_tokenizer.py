"""Encoding, decoding and the bytes of tokens, for every kind of vocabulary."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from bloomery.errors import TokenizerError
from bloomery.text.tokenizer import TokenDecoder, Tokenizer, add_bos_and_eos, byte_alphabet
from tests.text.vocabularies import (
    TOKENIZERS,
    embedded_tokenizer,
    metaspace_tokenizer,
    reduced_tokenizer,
    sample_texts,
    word_level_tokenizer,
)

ODD_IDS = [-(1 << 70), -1, 1 << 31, 1 << 32, 1 << 70, 49152, 60000]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_decoding_agrees_with_the_tokenizers_library(kind: str) -> None:
    """Random ids; the library decodes runs of invalid byte tokens differently."""
    tokenizer = TOKENIZERS[kind]()
    random_source = random.Random(0)
    for _ in range(500):
        ids = [
            random_source.randrange(tokenizer.vocab_size)
            for _ in range(random_source.randrange(12))
        ]
        for skip in (True, False):
            ours = tokenizer.decode(ids, skip)
            library = tokenizer.backend.decode(ids, skip_special_tokens=skip)
            assert ours == library or (tokenizer.decoder.byte_fallback and "\ufffd" in library)


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "llama-spm", "gemma-4"])
@settings(deadline=None)
@given(text=st.text(max_size=40).filter(lambda text: "▁" not in text))
def test_any_text_survives_encoding_and_decoding(name: str, text: str) -> None:
    """Characters outside the vocabulary are encoded as bytes."""
    tokenizer = reduced_tokenizer(name)
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_bytes_of_tokens_join_to_the_text() -> None:
    for text in sample_texts(60):
        ids = embedded_tokenizer().encode(text)
        assert b"".join(map(embedded_tokenizer().token_bytes, ids)) == text.encode()


def test_token_names_are_unique() -> None:
    tokenizer = reduced_tokenizer("llama-spm")
    names = {tokenizer.token_name(id) for id in range(tokenizer.vocab_size)}
    assert len(names) == tokenizer.vocab_size
    newline = tokenizer.token_to_id("<0x0A>")
    letter = tokenizer.token_to_id("<0x41>")
    assert tokenizer.token_bytes(newline) == b"\n"
    assert tokenizer.token_text(letter) == "A"  # the token "A" reads the same and has another name
    assert tokenizer.token_name(letter) == "<0x41>"


def test_incomplete_character_has_bytes_but_no_text() -> None:
    ids = embedded_tokenizer().encode("\U0001f9ff")
    assert len(ids) > 1
    assert "\ufffd" in embedded_tokenizer().token_text(ids[0])
    assert b"".join(map(embedded_tokenizer().token_bytes, ids)).decode() == "\U0001f9ff"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_ids_outside_the_vocabulary_decode_to_nothing(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    for id in ODD_IDS:
        if not 0 <= id < tokenizer.vocab_size:
            assert tokenizer.token_bytes(id) == b""
            assert tokenizer.token_text(id) == ""
            assert str(id) in tokenizer.token_name(id)
    some = [id for id in range(tokenizer.vocab_size) if id not in tokenizer.special_ids][1:3]
    assert tokenizer.decode(
        [-1, some[0], 1 << 40, some[1], tokenizer.vocab_size]
    ) == tokenizer.decode(some)


def test_offsets_point_into_the_text() -> None:
    text = "Grüße 🦙, <|im_end|> 12"
    tokens = embedded_tokenizer().encode_with_offsets(text)
    assert [token.id for token in tokens] == embedded_tokenizer().encode(text)
    assert all(token.text == text[token.start : token.stop] for token in tokens)
    assert tokens[0].start == 0 and tokens[-1].stop == len(text)
    assert [token.text for token in tokens if token.id == 2] == ["<|im_end|>"]


def test_added_bos_and_eos_have_empty_offsets() -> None:
    backend = Backend.from_str(word_level_tokenizer().backend.to_str())
    add_bos_and_eos(backend, bos_id=4, eos_id=4)
    encoded = [
        (token.id, token.text, token.start, token.stop)
        for token in Tokenizer(backend).encode_with_offsets("the fox")
    ]
    assert encoded == [(4, "", 0, 0), (1, "the", 0, 3), (2, "fox", 4, 7), (4, "", 0, 0)]


def test_unpaired_surrogate_is_replaced() -> None:
    assert embedded_tokenizer().encode("a\ud83d b") == embedded_tokenizer().encode("a\ufffd b")
    assert embedded_tokenizer().encode("\ud83d\ude00") == embedded_tokenizer().encode("😀")


def test_truncation_and_padding_of_the_file_are_switched_off() -> None:
    backend = Backend.from_str(word_level_tokenizer().backend.to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert Tokenizer(backend).encode("the fox the fox the") == [1, 2, 1, 2, 1]


def test_leading_space_is_removed_only_at_the_start_of_the_text() -> None:
    spaced = reduced_tokenizer("llama-spm")
    hello = spaced.encode("Hello", add_special=False)
    assert spaced.decode(hello + hello) == "Hello Hello"
    assert spaced.decode([spaced.token_to_id("<unk>"), *hello]) == "Hello"
    assert metaspace_tokenizer().decode(metaspace_tokenizer().encode("the fox")) == "the fox"
    assert word_level_tokenizer().decode([1, 4, 2, 3]) == "the fox é"
    assert word_level_tokenizer().decode([1, 4, 2], skip_special=False) == "the </s> fox"


def test_byte_alphabet_agrees_with_the_library() -> None:
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for character in "aé你😀\n\x00":
        name = "".join(word for word, _ in byte_level.pre_tokenize_str(character))
        assert TokenDecoder(byte_level=True).token_to_bytes(name) == character.encode()


def test_added_tokens_are_not_byte_encoded() -> None:
    backend = Backend(
        BPE({character: id for id, character in enumerate(sorted(byte_alphabet()))}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [AddedToken("a b", normalized=False), AddedToken("<｜end｜>", normalized=False)]
    )
    tokenizer = Tokenizer(backend)
    for text in ("xa by", "x<｜end｜>y"):
        assert (
            tokenizer.decode(tokenizer.encode(text))
            == text
            == backend.decode(backend.encode(text).ids)
        )


def test_unknown_decoder_is_refused() -> None:
    backend = Backend(BPE({"a": 0}, []))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="WordPiece"):
        Tokenizer(backend)
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip("x", 2, 1)])
    with pytest.raises(TokenizerError, match="Strip"):
        Tokenizer(backend)
