"""Text to token ids and back.

Encoding is the `tokenizers` library's. Decoding is ours: every token has exact bytes, and a text is those bytes laid
end to end and read as UTF-8. So a token's bytes are a fact that log-probabilities can report, and a stream decodes
piece by piece to what the whole decodes to. Nothing here knows a file format; folder.py and gguf_vocab.py build this.

Special tokens written in a text are recognised, as the reference does: `<|im_end|>` typed by a user is that token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from bloomery.errors import TokenizerError


@dataclass(frozen=True, slots=True)
class Piece:
    """A token and the characters of the encoded text it stands for; one the tokenizer added stands for none."""

    id: int
    text: str
    start: int
    stop: int


@dataclass(frozen=True)
class Extras:
    """What a checkpoint says beside its vocabulary."""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()  # any of them ends an answer
    special_tokens: Mapping[str, str] = field(
        default_factory=dict
    )  # bos_token, eos_token ... -> text
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # "default" and others by name
    defaults: Mapping[str, Any] = field(
        default_factory=dict
    )  # sampling it was meant for: temperature, top_k ...


class Tokenizer:
    def __init__(self, backend: Backend, extras: Extras | None = None):
        extras = extras or Extras()
        backend.no_truncation()  # what a training run set up must not cut or pad prompts
        backend.no_padding()
        self.backend = backend
        self.bos_id = extras.bos_id
        self.eos_ids = extras.eos_ids
        self.special_tokens = extras.special_tokens
        self.chat_templates = extras.chat_templates
        self.defaults = extras.defaults
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.vocab_size = max(
            backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1
        )
        self.spelling = Spelling.of(backend)
        self._bytes = _TokenBytes(backend, self.spelling)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """`add_special` puts BOS and the like where the model expects them; a rendered chat template has its own."""
        return self.backend.encode(_whole_characters(text), add_special_tokens=add_special).ids

    def pieces(self, text: str, add_special: bool = True) -> list[Piece]:
        text = _whole_characters(text)
        encoding = self.backend.encode(text, add_special_tokens=add_special)
        return [
            Piece(id, text[start:stop], start, stop)
            for id, (start, stop) in zip(encoding.ids, encoding.offsets)
        ]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        hidden = self.special_ids if skip_special else frozenset[int]()
        token_bytes = self._bytes
        parts = [data for id in ids if id not in hidden and (data := token_bytes[id])]
        if parts:
            parts[0] = self.spelling.opening(parts[0])
        return self.spelling.mend(b"".join(parts).decode("utf-8", self.spelling.errors))

    def token_bytes(self, id: int) -> bytes:
        """A token's exact bytes; none for an id outside the vocabulary."""
        return self._bytes[id]

    def token_text(self, id: int) -> str:
        """A token by itself; part of a character reads as U+FFFD."""
        return self._bytes[id].decode("utf-8", "replace")

    def token_name(self, id: int) -> str:
        """The vocabulary's own spelling of a token, different for every id."""
        return _name(self.backend, id) or f"<{id}>"

    def id_of(self, name: str) -> int | None:
        return self.backend.token_to_id(name)


def add_borders(backend: Backend, bos_id: int | None, eos_id: int | None) -> None:
    """From now on BOS is put before an encoded text and EOS after it, as far as they are given."""
    ids = {name: id for name, id in (("bos", bos_id), ("eos", eos_id)) if id is not None}
    if ids:
        backend.post_processor = processors.TemplateProcessing(
            single=[name for name in ("bos", "$A", "eos") if name in {"$A", *ids}],
            special_tokens=[
                {"id": name, "ids": [id], "tokens": [_name(backend, id)]}
                for name, id in ids.items()
            ],
        )


def _whole_characters(text: str) -> str:
    """Half a surrogate pair, which JSON can express and UTF-8 cannot, becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _name(backend: Backend, id: int) -> str | None:
    return backend.id_to_token(id) if 0 <= id < 1 << 32 else None


# ---- how a vocabulary spells bytes -----------------------------------------------------------------


@dataclass(frozen=True)
class Spelling:
    """What the `decoder` of a tokenizer.json does, said of one token at a time."""

    byte_level: bool = False  # each character of a token stands for one byte
    byte_tokens: bool = False  # <0x0A> is the byte 10
    replaced: tuple[tuple[str, str], ...] = ()  # "▁" is a space
    before: str = ""  # each token, where a vocabulary of words has no decoder
    # spaces lost where a text opens: SentencePiece's dummy prefix, or all of the first token's
    opens: Literal["kept", "one", "all"] = "kept"

    @staticmethod
    def of(backend: Backend) -> Spelling:
        if backend.decoder is None:
            return Spelling(before=" ", opens="one")
        spelling = Spelling()
        for step in _steps(json.loads(backend.decoder.__getstate__())):
            spelling = spelling._with(step)
        return spelling

    def _with(self, step: dict[str, Any]) -> Spelling:
        match step:
            case {"type": "Fuse"}:
                return self
            case {"type": "ByteLevel"}:
                return replace(self, byte_level=True)
            case {"type": "ByteFallback"}:
                return replace(self, byte_tokens=True)
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                return replace(self, replaced=(*self.replaced, (old, new)))
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                return replace(self, opens="one" if start else self.opens)
            case {"type": "Metaspace", "replacement": str(marker)}:
                opens: Literal["kept", "all"] = (
                    "kept" if step.get("prepend_scheme") == "never" else "all"
                )
                return replace(self, replaced=(*self.replaced, (marker, " ")), opens=opens)
        raise TokenizerError(
            f"the tokenizer's decoder has the step {json.dumps(step)}, which we cannot follow exactly; "
            "known are ByteLevel, ByteFallback, Replace, Strip, Fuse and Metaspace"
        )

    @property
    def errors(self) -> str:
        """How bytes that are no UTF-8 are read: a broken run as one mark, or byte by byte as SentencePiece does."""
        return "surrogateescape" if self.byte_tokens else "replace"

    def mend(self, text: str) -> str:
        return _ESCAPED.sub("\ufffd", text) if self.byte_tokens else text

    def opening(self, data: bytes) -> bytes:
        """The bytes of a token that is the first of a text."""
        if self.opens == "kept":
            return data
        return data.removeprefix(b" ") if self.opens == "one" else data.replace(b" ", b"")

    def spell(self, name: str) -> bytes:
        for old, new in self.replaced:
            name = name.replace(old, new)
        if self.byte_tokens and (found := _BYTE_TOKEN.fullmatch(name)):
            return bytes.fromhex(found[1])
        if self.byte_level and all(character in _BYTE_OF for character in name):
            return bytes(_BYTE_OF[character] for character in name)
        return (self.before + name).encode()


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _steps(inner)]


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: itself where it is one, otherwise the next from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF = byte_alphabet()
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_ESCAPED = re.compile("[\udc80-\udcff]")


class _TokenBytes(dict[int, bytes]):
    """Filled as tokens are met: a vocabulary of 262,144 costs nothing at the start."""

    def __init__(self, backend: Backend, spelling: Spelling):
        super().__init__()
        self.backend = backend
        self.spelling = spelling

    def __missing__(self, id: int) -> bytes:
        name = _name(self.backend, id)
        if name is None:
            return b""  # not kept: ids that do not exist must not grow the table
        self[id] = data = self.spelling.spell(name)
        return data
