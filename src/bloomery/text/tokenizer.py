"""The tokenizer: text to token ids and back.

The `tokenizers` library encodes. Decoding is done here: every token has exact bytes, and a text is
the bytes of its tokens joined and read as UTF-8. So log-probabilities can report the bytes of a
token, and a stream decodes token by token to the same text as all ids at once. Nothing here knows
a file format; hf_tokenizer.py and gguf_tokenizer.py build a Tokenizer.

Special tokens in a text are recognised, as in transformers: a typed `<|im_end|>` is that token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from tokenizers import Encoding, processors
from tokenizers import Tokenizer as Backend

from bloomery.errors import TokenizerError


@dataclass(frozen=True, slots=True)
class EncodedToken:
    """A token and the characters text[start:stop] it encodes; an added BOS or EOS has none."""

    id: int
    text: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class GapTokens:
    """The token ids around the two texts of a fill-in-the-middle prompt."""

    first: int
    between: int
    last: int | None  # None: the model goes on behind the second text
    suffix_first: bool = False
    end_ids: tuple[int, ...] = ()  # with which a model ends the text, besides the usual ones

    def build_prompt(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """Token ids after which the model writes the text between `prefix` and `suffix`."""
        texts = (suffix, prefix) if self.suffix_first else (prefix, suffix)
        last = [] if self.last is None else [self.last]
        return [self.first, *texts[0], self.between, *texts[1], *last]


# Names of the tokens around prefix and suffix in the order in which models expect them.
GAP_TOKEN_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed
    (
        "<\uff5cfim\u2581begin\uff5c>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<\uff5cfim\u2581end\uff5c>",
    ),  # DeepSeek
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # CodeLlama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
# Tokens after which a model has left the gap: another file begins, or the text is over.
GAP_END_NAMES = (
    "<|fim_pad|>",
    "<|file_sep|>",
    "<|repo_name|>",
    "<|file_separator|>",
    "<file_sep>",
    "<EOT>",
    "\u2581<EOT>",
)
# Codestral: the suffix comes first.
SUFFIX_FIRST_NAMES = ("[SUFFIX]", "[PREFIX]")


@dataclass(frozen=True)
class TokenizerConfig:
    """The special tokens, chat templates and sampling defaults of a checkpoint."""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()  # each of them ends a completion
    # bos_token, eos_token ... -> text
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # "default" and others by name
    # Recommended sampling params: temperature, top_k ...
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    # `response_template` of tokenizer_config.json: how the model writes its answers
    response_template: Mapping[str, Any] | None = None


class Tokenizer:
    """Encodes and decodes text, and knows the special tokens and chat templates of a model."""

    def __init__(self, backend: Backend, config: TokenizerConfig | None = None):
        config = config or TokenizerConfig()
        backend.no_truncation()  # settings of a training run must not cut or pad prompts
        backend.no_padding()
        self.backend = backend
        self.bos_id = config.bos_id
        self.eos_ids = config.eos_ids
        self.special_tokens = config.special_tokens
        self.chat_templates = config.chat_templates
        self.sampling_defaults = config.sampling_defaults
        self.sampling_source = "none in the checkpoint"  # where these come from, for the log
        self.response_template = config.response_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.vocab_size = max(
            backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1
        )
        self.decoder = TokenDecoder.from_backend(backend)
        self._bytes = _TokenBytes(backend, self.decoder)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the token ids. `add_special` adds BOS and EOS as the model expects them.

        Encode a rendered chat template without it, because the template adds BOS and EOS itself.
        """
        return self.encode_text(text, add_special).ids

    def encode_text(self, text: str, add_special: bool = True) -> Encoding:
        """Return the encoding, which knows the token of each character besides the ids."""
        text = _replace_unpaired_surrogates(text)
        return self.backend.encode(text, add_special_tokens=add_special)

    def encode_with_offsets(self, text: str, add_special: bool = True) -> list[EncodedToken]:
        text = _replace_unpaired_surrogates(text)
        encoding = self.backend.encode(text, add_special_tokens=add_special)
        return [
            EncodedToken(id, text[start:stop], start, stop)
            for id, (start, stop) in zip(encoding.ids, encoding.offsets)
        ]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        skipped = self.special_ids if skip_special else frozenset[int]()
        token_bytes = self._bytes
        parts = [data for id in ids if id not in skipped and (data := token_bytes[id])]
        if parts:
            parts[0] = self.decoder.strip_leading_space(parts[0])
        text = b"".join(parts).decode("utf-8", self.decoder.utf8_errors)
        return self.decoder.replace_invalid_bytes(text)

    def token_bytes(self, id: int) -> bytes:
        """Return the exact bytes of a token; none for an id outside the vocabulary."""
        return self._bytes[id]

    def token_text(self, id: int) -> str:
        """Return the text of a single token; an incomplete character reads as U+FFFD."""
        return self._bytes[id].decode("utf-8", "replace")

    def token_name(self, id: int) -> str:
        """Return the token as the vocabulary writes it, which is different for every id."""
        return _token_name(self.backend, id) or f"<{id}>"

    def token_to_id(self, name: str) -> int | None:
        return self.backend.token_to_id(name)

    @cached_property
    def special_token_ids(self) -> dict[str, int]:
        """Special tokens by their text."""
        return {self.token_name(id): id for id in sorted(self.special_ids)}

    @cached_property
    def added_token_ids(self) -> dict[str, int]:
        """Tokens that were added to the vocabulary without being special, such as <tool_call>."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: id for id, token in added.items() if not token.special}

    def find_gap_tokens(self) -> GapTokens | None:
        """The tokens for fill in the middle; None if the model has none."""
        found_ends = map(self.token_to_id, GAP_END_NAMES)
        end_ids = tuple(id for id in found_ends if id is not None)
        for names in GAP_TOKEN_NAMES:
            first, between, last = map(self.token_to_id, names)
            if first is not None and between is not None and last is not None:
                return GapTokens(first, between, last, end_ids=end_ids)
        first, between = map(self.token_to_id, SUFFIX_FIRST_NAMES)
        if first is not None and between is not None:
            return GapTokens(first, between, None, suffix_first=True, end_ids=end_ids)
        return None


def add_bos_and_eos(backend: Backend, bos_id: int | None, eos_id: int | None) -> None:
    """Make the backend add BOS before an encoded text and EOS after it, as far as given."""
    ids: dict[str, int] = {}
    if bos_id is not None:
        ids["bos"] = bos_id
    if eos_id is not None:
        ids["eos"] = eos_id
    if not ids:
        return
    backend.post_processor = processors.TemplateProcessing(
        single=[name for name in ("bos", "$A", "eos") if name in {"$A", *ids}],
        special_tokens=[
            {"id": name, "ids": [id], "tokens": [_token_name(backend, id)]}
            for name, id in ids.items()
        ],
    )


def _replace_unpaired_surrogates(text: str) -> str:
    """Replace half a surrogate pair by U+FFFD, because JSON can express it but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _token_name(backend: Backend, id: int) -> str | None:
    if not 0 <= id < 1 << 32:
        return None
    return backend.id_to_token(id)


# ---- from tokens to bytes ----------------------------------------------------------------------

LeadingSpace = Literal["keep", "strip_one", "strip_all"]


@dataclass(frozen=True)
class TokenDecoder:
    """The `decoder` of a tokenizer.json, applied to one token at a time."""

    byte_level: bool = False  # each character of a token stands for one byte
    byte_fallback: bool = False  # <0x0A> is the byte 10
    replacements: tuple[tuple[str, str], ...] = ()  # "▁" is a space
    token_prefix: str = ""  # a space, for a vocabulary of words without a decoder
    # Spaces to remove at the start of a text: SentencePiece's dummy prefix, or all spaces of the
    # first token.
    leading_space: LeadingSpace = "keep"

    @staticmethod
    def from_backend(backend: Backend) -> TokenDecoder:
        if backend.decoder is None:
            return TokenDecoder(token_prefix=" ", leading_space="strip_one")
        decoder = TokenDecoder()
        for step in _flatten_steps(json.loads(backend.decoder.__getstate__())):
            decoder = decoder._with_step(step)
        return decoder

    def _with_step(self, step: dict[str, Any]) -> TokenDecoder:
        match step:
            case {"type": "Fuse"}:
                return self
            case {"type": "ByteLevel"}:
                return replace(self, byte_level=True)
            case {"type": "ByteFallback"}:
                return replace(self, byte_fallback=True)
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                return self._with_replacement(old, new)
            case {"type": "Strip", "content": " ", "start": 0, "stop": 0}:
                return self
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                return replace(self, leading_space="strip_one")
            case {"type": "Metaspace", "replacement": str(marker), "prepend_scheme": "never"}:
                return replace(self._with_replacement(marker, " "), leading_space="keep")
            case {"type": "Metaspace", "replacement": str(marker)}:
                return replace(self._with_replacement(marker, " "), leading_space="strip_all")
        raise TokenizerError(
            f"the tokenizer's decoder has the step {json.dumps(step)}, which cannot "
            "be reproduced exactly; known are ByteLevel, ByteFallback, Replace, Strip, Fuse and "
            "Metaspace"
        )

    def _with_replacement(self, old: str, new: str) -> TokenDecoder:
        return replace(self, replacements=(*self.replacements, (old, new)))

    @property
    def utf8_errors(self) -> str:
        """The error handler for invalid UTF-8.

        SentencePiece shows one U+FFFD per invalid byte, byte-level BPE one per invalid run.
        """
        return "surrogateescape" if self.byte_fallback else "replace"

    def replace_invalid_bytes(self, text: str) -> str:
        """Replace the bytes that "surrogateescape" has kept by U+FFFD."""
        if not self.byte_fallback:
            return text
        return _ESCAPED_BYTE.sub("\ufffd", text)

    def strip_leading_space(self, data: bytes) -> bytes:
        """Return the bytes of a token that is the first of a text."""
        if self.leading_space == "strip_one":
            return data.removeprefix(b" ")
        if self.leading_space == "strip_all":
            return data.replace(b" ", b"")
        return data

    def token_to_bytes(self, name: str) -> bytes:
        """Return the bytes of a token, given as the vocabulary writes it."""
        for old, new in self.replacements:
            name = name.replace(old, new)
        if self.byte_fallback:
            byte_token = _BYTE_TOKEN.fullmatch(name)
            if byte_token:
                return bytes.fromhex(byte_token[1])
        if self.byte_level and all(character in _BYTE_OF_CHARACTER for character in name):
            return bytes(_BYTE_OF_CHARACTER[character] for character in name)
        return (self.token_prefix + name).encode()


def _flatten_steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flatten_steps(inner)]


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable character of each byte.

    A printable byte is its own character; the others are numbered from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    for i, byte in enumerate(others):
        alphabet[chr(0x100 + i)] = byte
    return alphabet


_BYTE_OF_CHARACTER = byte_alphabet()
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")


class _TokenBytes(dict[int, bytes]):
    """The bytes of each token, computed on first use: a large vocabulary costs no start-up time."""

    def __init__(self, backend: Backend, decoder: TokenDecoder):
        super().__init__()
        self.backend = backend
        self.decoder = decoder

    def __missing__(self, id: int) -> bytes:
        name = _token_name(self.backend, id)
        if name is None:
            return b""  # not stored: ids outside the vocabulary must not grow the table
        data = self.decoder.token_to_bytes(name)
        self[id] = data
        return data
