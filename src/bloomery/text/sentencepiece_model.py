"""A SentencePiece model file (tokenizer.model) in the words of GGUF metadata, which gguf_vocab.py can build from.

The file is a small protocol buffer; the few fields that matter are read here. Only what can be followed exactly is
accepted: BPE, with no normalisation but the space marks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from bloomery.errors import TokenizerError

REMEDY = (
    "save the tokenizer as tokenizer.json first: AutoTokenizer.from_pretrained(folder).save_pretrained(folder) "
    "with the transformers library"
)
BPE = 2  # trainer_spec.model_type


def metadata_of(data: bytes) -> dict[str, Any]:
    try:
        model = list(_fields(data))
        pieces = [dict(_fields(value)) for number, value in model if number == 1]
        trainer = dict(_fields(next((value for number, value in model if number == 2), b"")))
        normalizer = dict(_fields(next((value for number, value in model if number == 3), b"")))
        tokens = [piece[1].decode() for piece in pieces]
        scores = [struct.unpack("<f", piece.get(2, bytes(4)))[0] for piece in pieces]
    except (IndexError, KeyError, TypeError, AttributeError, ValueError, struct.error) as error:
        raise TokenizerError(f"tokenizer.model is not a SentencePiece model; {REMEDY}") from error
    if trainer.get(3) != BPE or normalizer.get(2) or normalizer.get(4, 1):
        raise TokenizerError(
            f"tokenizer.model is not plain SentencePiece BPE, which is all we can follow; {REMEDY}"
        )
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [
            piece.get(3, 1) for piece in pieces
        ],  # the two formats number the types alike
        "tokenizer.ggml.unknown_token_id": trainer.get(40, 0),
        "tokenizer.ggml.bos_token_id": trainer.get(41, 1),
        "tokenizer.ggml.eos_token_id": trainer.get(42, 2),
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, 1)),
    }


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) in order: an int, or bytes for strings, messages and fixed-width numbers."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        match key & 7:
            case 0:
                value, at = _varint(data, at)
                yield key >> 3, value
                continue
            case 1:
                size = 8
            case 2:
                size, at = _varint(data, at)
            case 5:
                size = 4
            case _:
                raise ValueError(f"wire type {key & 7}")
        if size > len(data) - at:
            raise ValueError("truncated")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than ten bytes")
