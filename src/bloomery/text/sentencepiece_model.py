"""Reads a SentencePiece model (tokenizer.model) into GGUF metadata, for gguf_tokenizer.py.

The file is a small protocol buffer, of which a few fields are read. Only BPE models without
normalisation are accepted, because only these can be reproduced exactly.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from bloomery.errors import TokenizerError

REMEDY = (
    "save the tokenizer as tokenizer.json first: "
    "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) with the transformers library"
)

# Field numbers of sentencepiece_model.proto.
MODEL_PIECES = 1
MODEL_TRAINER = 2
MODEL_NORMALIZER = 3
PIECE_TEXT = 1
PIECE_SCORE = 2
PIECE_TYPE = 3
TRAINER_MODEL_TYPE = 3
TRAINER_UNKNOWN_ID = 40
TRAINER_BOS_ID = 41
TRAINER_EOS_ID = 42
NORMALIZER_CHARSMAP = 2
NORMALIZER_ADD_PREFIX = 3
NORMALIZER_REMOVE_SPACES = 4

BPE_MODEL = 2  # value of TRAINER_MODEL_TYPE
NORMAL_PIECE = 1  # value of PIECE_TYPE


def read_sentencepiece_model(data: bytes) -> dict[str, Any]:
    """Return the metadata of a GGUF file with the same vocabulary."""
    try:
        model = list(_read_fields(data))
        pieces = [dict(_read_fields(value)) for number, value in model if number == MODEL_PIECES]
        trainer = _find_message(model, MODEL_TRAINER)
        normalizer = _find_message(model, MODEL_NORMALIZER)
        tokens = [piece[PIECE_TEXT].decode() for piece in pieces]
        scores = [struct.unpack("<f", piece.get(PIECE_SCORE, bytes(4)))[0] for piece in pieces]
    except (IndexError, KeyError, TypeError, AttributeError, ValueError, struct.error) as error:
        raise TokenizerError(f"tokenizer.model is not a SentencePiece model; {REMEDY}") from error
    is_bpe = trainer.get(TRAINER_MODEL_TYPE) == BPE_MODEL
    removes_spaces = normalizer.get(NORMALIZER_REMOVE_SPACES, 1)
    if not is_bpe or normalizer.get(NORMALIZER_CHARSMAP) or removes_spaces:
        raise TokenizerError(
            f"tokenizer.model is not plain SentencePiece BPE, the only kind supported; {REMEDY}"
        )
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        # Both formats number the types in the same way.
        "tokenizer.ggml.token_type": [piece.get(PIECE_TYPE, NORMAL_PIECE) for piece in pieces],
        "tokenizer.ggml.unknown_token_id": trainer.get(TRAINER_UNKNOWN_ID, 0),
        "tokenizer.ggml.bos_token_id": trainer.get(TRAINER_BOS_ID, 1),
        "tokenizer.ggml.eos_token_id": trainer.get(TRAINER_EOS_ID, 2),
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(NORMALIZER_ADD_PREFIX, 1)),
    }


def _find_message(model: list[tuple[int, Any]], number: int) -> dict[int, Any]:
    """Return the fields of the first message with that field number; none if it is missing."""
    data = next((value for other, value in model if other == number), b"")
    return dict(_read_fields(data))


def _read_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) of a protocol buffer message.

    A varint is an int. Strings, messages and fixed-width numbers are bytes.
    """
    offset = 0
    while offset < len(data):
        key, offset = _read_varint(data, offset)
        number = key >> 3
        wire_type = key & 7
        match wire_type:
            case 0:
                value, offset = _read_varint(data, offset)
                yield number, value
                continue
            case 1:
                size = 8
            case 2:
                size, offset = _read_varint(data, offset)
            case 5:
                size = 4
            case _:
                raise ValueError(f"wire type {wire_type}")
        if size > len(data) - offset:
            raise ValueError("truncated")
        yield number, data[offset : offset + size]
        offset += size


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    """Return the number and the offset after it."""
    value = 0
    shift = 0
    while True:
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than ten bytes")
