"""Tokenizers of GGUF files, against transformers, sentencepiece and published encodings."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, pre_tokenizers

from bloomery.artifacts import gguf
from bloomery.errors import TokenizerError
from bloomery.text.gguf_tokenizer import build_gguf_tokenizer
from bloomery.text.pretokenizers import PRE_TOKENIZER_OF_ARCHITECTURE, PRE_TOKENIZERS
from bloomery.text.sentencepiece_model import read_sentencepiece_model
from tests.text.vocabularies import (
    DATA,
    LINES,
    embedded_path,
    embedded_tokenizer,
    golden_encodings,
    reduced_tokenizer,
    sample_texts,
    transformers_tokenizer,
)


def without_known_differences(text: str) -> str:
    """Remove what transformers splits differently from the tokenizer.json of the model.

    transformers uses only GPT-2's pattern and does not isolate every numeral first. This concerns
    numerals outside ASCII and numerals after several white spaces.
    """
    text = "".join(
        character for character in text if character.isascii() or not character.isnumeric()
    )
    return re.sub(r"(\s)\s+(?=\d)", r"\1", text)


def test_embedded_model_encodes_as_transformers() -> None:
    texts = [without_known_differences(text) for text in sample_texts(220)]
    assert len(set(texts)) > 200
    for text in texts:
        assert embedded_tokenizer().encode(text) == transformers_tokenizer().encode(text), text


def test_embedded_model_splits_every_digit() -> None:
    steps = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    corrected = Backend.from_str(transformers_tokenizer().backend_tokenizer.to_str())
    corrected.pre_tokenizer = pre_tokenizers.Sequence(steps)
    for text in sample_texts(220):
        assert embedded_tokenizer().encode(text) == corrected.encode(text).ids, text


def test_embedded_model_decodes_as_transformers() -> None:
    for text in sample_texts(200):
        ids = embedded_tokenizer().encode(text)
        for skip in (True, False):
            assert embedded_tokenizer().decode(ids, skip) == transformers_tokenizer().decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


def test_config_of_the_embedded_model() -> None:
    tokenizer = embedded_tokenizer()
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.bos_id == 1
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.encode("") == []
    assert "<|im_start|>" in tokenizer.chat_templates["default"]
    assert {
        tokenizer.token_to_id("<|im_end|>"),
        tokenizer.token_to_id("<|endoftext|>"),
    } <= tokenizer.special_ids


def test_embedded_model_is_built_quickly() -> None:
    metadata = gguf.read_gguf(embedded_path()).metadata
    start = time.process_time()
    build_gguf_tokenizer(metadata)
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize("name", golden_encodings())
def test_published_encodings(name: str) -> None:
    cases = golden_encodings()[name]["cases"]
    assert len(cases) >= 46
    for text, ids in cases:
        assert reduced_tokenizer(name).encode(text, add_special=False) == ids, text


@pytest.mark.parametrize("name", golden_encodings())
def test_published_encodings_decode_to_the_text(name: str) -> None:
    for text, ids in golden_encodings()[name]["cases"]:
        if name in ("mpt", "command-r", "qwen2"):
            text = normalizers.NFC().normalize_str(text)
        assert reduced_tokenizer(name).decode(ids) == text


@pytest.mark.parametrize(
    ("name", "written"), json.loads((DATA / "pre_tokenizers.json").read_text()).items()
)
def test_pre_tokenizer_agrees_with_the_original(name: str, written: dict[str, Any]) -> None:
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    original = Backend.from_str(
        json.dumps({"version": "1.0", "added_tokens": [], "model": empty, **written})
    )
    ours = PRE_TOKENIZERS[name].build_pre_tokenizer()
    for text in sample_texts(400):
        assert ours.pre_tokenize_str(text) == original.pre_tokenizer.pre_tokenize_str(text)
    if name != "qwen35":  # its published encodings were made without NFC
        composed = (written["normalizer"] or {}).get("type") == "NFC"
        assert PRE_TOKENIZERS[name].nfc == composed


def test_bloom_splits_at_spaces_and_its_punctuation() -> None:
    pre_tokenizer = PRE_TOKENIZERS["bloom"].build_pre_tokenizer()
    splits = pre_tokenizer.pre_tokenize_str("Salut, le monde! (oui) 12")
    assert [word for word, _ in splits] == ["Salut", ",", "Ġle", "Ġmonde", "!Ġ(", "oui", ")", "Ġ12"]


# ---- SentencePiece -----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no prefix"])
def sentencepiece_file(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("sentencepiece")
    corpus = folder / "corpus.txt"
    corpus.write_text(
        "\n".join(
            [
                *(line.replace("\x00", "") for line in LINES),
                *(["the spaces   between    words"] * 9),
            ]
        )
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "model"),
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=request.param,
        user_defined_symbols=["<sep>", "▁▁", "▁▁▁", "▁▁▁▁"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder / "model.model"


def test_merges_from_scores_encode_as_sentencepiece(sentencepiece_file: Path) -> None:
    original = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file))
    ours = build_gguf_tokenizer(
        {
            **read_sentencepiece_model(sentencepiece_file.read_bytes()),
            "tokenizer.ggml.add_bos_token": False,
        }
    )
    for text in sample_texts(400):
        text = text.replace("\x00", "").replace("<s>", "").replace("</s>", "")
        assert ours.encode(text) == original.encode(text), text
        assert ours.decode(ours.encode(text)) == original.decode(original.encode(text))


def test_invalid_byte_tokens_decode_as_in_sentencepiece(sentencepiece_file: Path) -> None:
    original = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file))
    ours = build_gguf_tokenizer(read_sentencepiece_model(sentencepiece_file.read_bytes()))
    for data in (
        b"\xf0\x9f",
        b"\xe4\xb8A\xad",
        b"\xff\xfe",
        b"\xf0\x9f\x98\x80\xf0\x9f",
        b"\xc3\xc3\xa9",
    ):
        ids = [original.piece_to_id(f"<0x{byte:02X}>") for byte in data]
        assert ours.decode(ids) == original.decode(ids)


def test_byte_tokens_and_prefix_space() -> None:
    tokenizer = reduced_tokenizer("llama-spm")
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
    assert tokenizer.decode(tokenizer.encode(" Hello")) == " Hello"
    hello = tokenizer.encode("Hello", add_special=False)
    assert tokenizer.token_text(hello[0]) == " Hello"
    assert tokenizer.token_bytes(tokenizer.token_to_id("<0x0A>")) == b"\n"


def test_phi3_control_tokens_strip_white_space_after_them() -> None:
    metadata = dict(golden_encodings()["phi-3"]["metadata"])
    metadata["tokenizer.ggml.tokens"] = [
        *metadata["tokenizer.ggml.tokens"],
        "<|end|>",
        "<|endoftext|>",
    ]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 3, 3]
    metadata["tokenizer.ggml.scores"] = [*metadata["tokenizer.ggml.scores"], 0.0, 0.0]
    tokenizer = build_gguf_tokenizer(metadata)
    end = tokenizer.token_to_id("<|end|>")
    document = tokenizer.token_to_id("<|endoftext|>")
    hello = tokenizer.encode("Hello", add_special=False)
    assert tokenizer.encode("<|end|>\nHello", add_special=False) == [end, *hello]
    assert tokenizer.encode("<|endoftext|>\nHello", add_special=False) != [document, *hello]


def test_control_token_with_a_space_keeps_its_id() -> None:
    metadata = dict(golden_encodings()["llama-spm"]["metadata"])
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<|a b|>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 3]
    metadata["tokenizer.ggml.scores"] = [*metadata["tokenizer.ggml.scores"], 0.0]
    tokenizer = build_gguf_tokenizer(metadata)
    assert tokenizer.encode("<|a b|>", add_special=False) == [tokenizer.vocab_size - 1]
    assert tokenizer.vocab_size == len(metadata["tokenizer.ggml.tokens"])


# ---- metadata ----------------------------------------------------------------------------------


def small_metadata(**changes: Any) -> dict[str, Any]:
    metadata = dict(golden_encodings()["gpt-2"]["metadata"])
    tokens = [*metadata["tokenizer.ggml.tokens"], "<|start|>", "<|stop|>", "<think>", "<|im_end|>"]
    metadata["tokenizer.ggml.tokens"] = tokens
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 3, 3, 4, 3]
    metadata["tokenizer.ggml.bos_token_id"] = len(tokens) - 4
    metadata["tokenizer.ggml.eos_token_id"] = len(tokens) - 3
    named = {
        f"tokenizer.ggml.{key}" if "__" not in key else key.replace("__", "."): v
        for key, v in changes.items()
    }
    return {key: value for key, value in {**metadata, **named}.items() if value is not None}


def test_bos_and_eos_are_added_as_the_file_states() -> None:
    plain = build_gguf_tokenizer(small_metadata())
    bos = plain.bos_id
    eos = plain.eos_ids[0]
    text = plain.encode("Hello")
    assert build_gguf_tokenizer(small_metadata(add_bos_token=True)).encode("Hello") == [bos, *text]
    assert build_gguf_tokenizer(small_metadata(add_bos_token=True, add_eos_token=True)).encode(
        "Hello"
    ) == [
        bos,
        *text,
        eos,
    ]
    assert (
        build_gguf_tokenizer(small_metadata(add_bos_token=True)).encode("Hello", add_special=False)
        == text
    )
    assert build_gguf_tokenizer(small_metadata(pre="llama-bpe")).encode("Hello")[0] == bos


def test_special_tokens_are_encoded_and_skipped_when_decoding() -> None:
    tokenizer = build_gguf_tokenizer(small_metadata())
    think = tokenizer.token_to_id("<think>")
    ids = tokenizer.encode("Hello<|stop|><think> world")
    assert tokenizer.eos_ids[0] in ids and think in ids
    assert think not in tokenizer.special_ids
    assert tokenizer.decode(ids) == "Hello<think> world"
    assert tokenizer.decode(ids, skip_special=False) == "Hello<|stop|><think> world"


def test_end_of_turn_token_of_the_template_is_an_eos_id() -> None:
    end = build_gguf_tokenizer(small_metadata()).token_to_id("<|im_end|>")
    assert end not in build_gguf_tokenizer(small_metadata()).eos_ids
    assert (
        build_gguf_tokenizer(small_metadata(tokenizer__chat_template="{{ x }}<|im_end|>")).eos_ids[
            -1
        ]
        == end
    )
    assert end in build_gguf_tokenizer(small_metadata(eot_token_id=end)).eos_ids


def test_chat_templates_and_sampling_defaults_are_read() -> None:
    tokenizer = build_gguf_tokenizer(
        {
            **small_metadata(
                tokenizer__chat_template="one",
                general__sampling__temp=0.6,
                general__sampling__top_k=20,
            ),
            "tokenizer.chat_templates": ["tool_use"],
            "tokenizer.chat_template.tool_use": "two",
        }
    )
    assert tokenizer.chat_templates == {"default": "one", "tool_use": "two"}
    assert tokenizer.sampling_defaults == {"temperature": 0.6, "top_k": 20}


def test_pre_tokenizer_of_an_old_file_follows_from_its_architecture() -> None:
    assert set(PRE_TOKENIZER_OF_ARCHITECTURE.values()) <= set(PRE_TOKENIZERS)
    nameless = build_gguf_tokenizer(small_metadata(pre=None))  # its architecture is gpt2
    for text, ids in golden_encodings()["gpt-2"]["cases"]:
        assert nameless.encode(text) == ids
    with pytest.raises(TokenizerError, match="does not name its pre-tokenizer.*'llama' models"):
        build_gguf_tokenizer(small_metadata(pre="default", general__architecture="llama"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "made-up"}, "'made-up' .* is not known"),
        ({"model": "bert"}, "of the kind 'bert'"),
        ({"model": None}, "of the kind None"),
        ({"tokens": None}, "no usable vocabulary: 0 tokens"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "'a' twice"),
        ({"tokens": ["a", 1]}, "tokens of the GGUF file is not an array of str"),
        ({"tokens": "text"}, "not an array"),
        ({"token_type": [1, 1]}, "2 values in tokenizer.ggml.token_type"),
        ({"merges": ["not there"]}, "damaged"),
        ({"model": "llama", "scores": None}, "no tokenizer.ggml.scores"),
        (
            {"model": "llama", "tokens": ["  ", "▁▁"], "token_type": [4, 1], "scores": [0.0, 0.0]},
            "several tokens alike",
        ),
    ],
)
def test_unsupported_metadata_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        build_gguf_tokenizer(small_metadata(**changes))
