"""Tokens, their bytes, and text: what holds for every kind of vocabulary."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from bloomery.errors import TokenizerError
from bloomery.text.tokenizer import Spelling, Tokenizer, add_borders, byte_alphabet
from tests.text.vocabularies import KINDS, cut_down, embedded, metaspace, sample_texts, words_only

ODD_IDS = [-(1 << 70), -1, 1 << 31, 1 << 32, 1 << 70, 49152, 60000]


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_is_the_library_s(kind: str) -> None:
    """On any ids, but for runs of byte tokens that are no text, where the library gives up the whole run."""
    tokenizer = KINDS[kind]()
    random_source = random.Random(0)
    for _ in range(500):
        ids = [
            random_source.randrange(tokenizer.vocab_size)
            for _ in range(random_source.randrange(12))
        ]
        for skip in (True, False):
            ours = tokenizer.decode(ids, skip)
            library = tokenizer.backend.decode(ids, skip_special_tokens=skip)
            assert ours == library or (tokenizer.spelling.byte_tokens and "\ufffd" in library)


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "llama-spm", "gemma-4"])
@settings(deadline=None)
@given(text=st.text(max_size=40).filter(lambda text: "▁" not in text))
def test_any_text_comes_back(name: str, text: str) -> None:
    """What the vocabulary, cut down as it is, does not have goes through its bytes."""
    tokenizer = cut_down(name)
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_bytes_of_tokens_are_the_text() -> None:
    for text in sample_texts(60):
        ids = embedded().encode(text)
        assert b"".join(map(embedded().token_bytes, ids)) == text.encode()


def test_every_token_has_a_name_of_its_own() -> None:
    tokenizer = cut_down("llama-spm")
    names = {tokenizer.token_name(id) for id in range(tokenizer.vocab_size)}
    assert len(names) == tokenizer.vocab_size
    newline = tokenizer.id_of("<0x0A>")
    letter = tokenizer.id_of("<0x41>")
    assert tokenizer.token_bytes(newline) == b"\n"
    assert tokenizer.token_text(letter) == "A"  # as the token A reads, whose name is another
    assert tokenizer.token_name(letter) == "<0x41>"


def test_part_of_a_character_has_bytes_but_no_text() -> None:
    ids = embedded().encode("\U0001f9ff")
    assert len(ids) > 1
    assert "\ufffd" in embedded().token_text(ids[0])
    assert b"".join(map(embedded().token_bytes, ids)).decode() == "\U0001f9ff"


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_do_not_exist_are_nothing(kind: str) -> None:
    tokenizer = KINDS[kind]()
    for id in ODD_IDS:
        if not 0 <= id < tokenizer.vocab_size:
            assert tokenizer.token_bytes(id) == b""
            assert tokenizer.token_text(id) == ""
            assert str(id) in tokenizer.token_name(id)
    some = [id for id in range(tokenizer.vocab_size) if id not in tokenizer.special_ids][1:3]
    assert tokenizer.decode(
        [-1, some[0], 1 << 40, some[1], tokenizer.vocab_size]
    ) == tokenizer.decode(some)


def test_pieces_say_where_they_stand() -> None:
    text = "Grüße 🦙, <|im_end|> 12"
    pieces = embedded().pieces(text)
    assert [piece.id for piece in pieces] == embedded().encode(text)
    assert all(piece.text == text[piece.start : piece.stop] for piece in pieces)
    assert pieces[0].start == 0 and pieces[-1].stop == len(text)
    assert [piece.text for piece in pieces if piece.id == 2] == ["<|im_end|>"]


def test_an_added_token_stands_for_no_text() -> None:
    backend = Backend.from_str(words_only().backend.to_str())
    add_borders(backend, bos_id=4, eos_id=4)
    found = [
        (piece.id, piece.text, piece.start, piece.stop)
        for piece in Tokenizer(backend).pieces("the fox")
    ]
    assert found == [(4, "", 0, 0), (1, "the", 0, 3), (2, "fox", 4, 7), (4, "", 0, 0)]


def test_half_a_surrogate_pair_is_no_reason_to_fail() -> None:
    assert embedded().encode("a\ud83d b") == embedded().encode("a\ufffd b")
    assert embedded().encode("\ud83d\ude00") == embedded().encode("😀")


def test_what_a_training_run_set_up_does_not_cut_prompts() -> None:
    backend = Backend.from_str(words_only().backend.to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert Tokenizer(backend).encode("the fox the fox the") == [1, 2, 1, 2, 1]


def test_the_first_word_loses_its_space_only_where_it_opens_the_text() -> None:
    spaced = cut_down("llama-spm")
    hello = spaced.encode("Hello", add_special=False)
    assert spaced.decode(hello + hello) == "Hello Hello"
    assert spaced.decode([spaced.id_of("<unk>"), *hello]) == "Hello"
    assert metaspace().decode(metaspace().encode("the fox")) == "the fox"
    assert words_only().decode([1, 4, 2, 3]) == "the fox é"
    assert words_only().decode([1, 4, 2], skip_special=False) == "the </s> fox"


def test_the_byte_alphabet_is_the_library_s() -> None:
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for character in "aé你😀\n\x00":
        spelled = "".join(word for word, _ in cut.pre_tokenize_str(character))
        assert Spelling(byte_level=True).spell(spelled) == character.encode()


def test_added_tokens_are_spelled_as_they_are() -> None:
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


def test_a_decoder_we_cannot_follow_is_refused() -> None:
    backend = Backend(BPE({"a": 0}, []))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="WordPiece"):
        Tokenizer(backend)
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip("x", 2, 1)])
    with pytest.raises(TokenizerError, match="Strip"):
        Tokenizer(backend)
