"""Builds the tokenizer that the metadata of a GGUF file describes.

Three kinds are supported. "gpt2" is byte-level BPE with merges and a named pre-tokenizer. "llama"
is SentencePiece BPE, whose merges follow from the scores of the pieces. "gemma4" is SentencePiece
BPE with its merges written out. Another kind, or an unknown pre-tokenizer, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from bloomery.errors import TokenizerError
from bloomery.text.pretokenizers import (
    PRE_TOKENIZER_OF_ARCHITECTURE,
    PRE_TOKENIZERS,
    PreTokenizerSpec,
)
from bloomery.text.tokenizer import Tokenizer, TokenizerConfig, add_bos_and_eos

# Token types of tokenizer.ggml.token_type.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6

# Name of a token in chat templates -> name in the metadata.
SPECIAL_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # misspelled in the format
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}

# Tokens that end a chat turn. Each counts as EOS if the chat template contains it, because many
# files name only the end-of-document token as EOS.
END_OF_TURN_TOKENS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end_of_text|>",
    "<|eom_id|>",
)

# Special tokens of these architectures strip the white space after them, except for the tokens
# listed here. The file does not state this.
RSTRIP_EXCEPTIONS: Mapping[str, tuple[str, ...]] = {"phi3": ("<unk>", "<s>", "<|endoftext|>")}

# general.sampling.* -> name of the sampling param
SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer; missing or unknown metadata raises TokenizerError."""
    vocabulary = _GgufVocabulary(metadata)
    return Tokenizer(_build_backend(vocabulary), vocabulary.config())


def _build_backend(vocabulary: _GgufVocabulary) -> Backend:
    kind = vocabulary.get("model")
    try:
        if kind == "gpt2":
            backend, add_bos = _build_byte_level(vocabulary)
        elif kind == "llama":
            backend = _build_sentencepiece(vocabulary, _merges_from_scores(vocabulary))
            add_bos = True
        elif kind == "gemma4":
            backend = _build_sentencepiece(vocabulary, vocabulary.merges())
            add_bos = True
        else:
            raise TokenizerError(
                f"the tokenizer of the GGUF file is of the kind {kind!r}; known are 'gpt2', "
                "'llama' and 'gemma4'. Use the model's Hugging Face folder, which has a "
                "tokenizer.json"
            )
    except TokenizerError:
        raise
    except Exception as error:  # the library raises plain Exception for merges of missing tokens
        raise TokenizerError(
            f"the vocabulary of the GGUF file is damaged: {error}; download it again"
        ) from error
    _add_tokens(backend, vocabulary)
    if backend.get_vocab_size() != len(vocabulary.tokens):
        raise TokenizerError(
            "the GGUF file spells several tokens alike; convert it again with a current converter"
        )
    stated_add_bos = vocabulary.get("add_bos_token")
    if stated_add_bos is not None:
        add_bos = bool(stated_add_bos)
    add_eos = bool(vocabulary.get("add_eos_token"))
    bos_id = vocabulary.id("bos") if add_bos else None
    eos_id = vocabulary.id("eos") if add_eos else None
    add_bos_and_eos(backend, bos_id, eos_id)
    return backend


class _GgufVocabulary:
    """The tokenizer.ggml.* keys of the metadata, checked."""

    def __init__(self, metadata: Mapping[str, Any]):
        self.metadata = metadata
        tokens = self.array("tokens", str)
        self.tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(tokens)]
        self.ids = {token: id for id, token in enumerate(self.tokens)}
        if not tokens or len(self.ids) != len(tokens):
            duplicates = (token for id, token in enumerate(self.tokens) if self.ids[token] != id)
            duplicate = next(duplicates, None)
            raise TokenizerError(
                f"the GGUF file has no usable vocabulary: {len(tokens)} tokens, {duplicate!r} twice"
            )
        self.types = self.array("token_type", int, len(tokens)) or [NORMAL] * len(tokens)

    def get(self, key: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}")

    def array(self, key: str, element: type, length: int | None = None) -> list[Any]:
        """Return an array of that element type, empty if the key is missing."""
        values = self.get(key)
        if values is None:
            return []
        if not isinstance(values, list) or not set(map(type, values)) <= {element}:
            raise TokenizerError(
                f"tokenizer.ggml.{key} of the GGUF file is not an array of {element.__name__}"
            )
        if length is not None and len(values) != length:
            raise TokenizerError(
                f"the GGUF file has {length} tokens and {len(values)} values in "
                f"tokenizer.ggml.{key}"
            )
        return values

    def id(self, name: str) -> int | None:
        """Return the id of a named token such as "bos"; None if it is missing or invalid."""
        id = self.get(f"{name}_token_id")
        return id if isinstance(id, int) and 0 <= id < len(self.tokens) else None

    def merges(self) -> list[tuple[str, str]]:
        merges = []
        for merge in self.array("merges", str):
            space = merge.find(" ", 1)  # from 1: the left part may itself begin with a space
            if space > 0:
                merges.append((merge[:space], merge[space + 1 :]))
        return merges

    def special_ids(self) -> set[int]:
        named = {self.id(name) for name in ("bos", "eos", "eot", "eom")} - {None}
        return {
            id for id, kind in enumerate(self.types) if kind in (CONTROL, UNKNOWN) or id in named
        }

    def chat_templates(self) -> dict[str, str]:
        templates = {"default": self.metadata.get("tokenizer.chat_template")}
        for name in self.metadata.get("tokenizer.chat_templates") or ():
            templates[name] = self.metadata.get(f"tokenizer.chat_template.{name}")
        return {name: text for name, text in templates.items() if isinstance(text, str)}

    def eos_ids(self) -> tuple[int, ...]:
        template = self.chat_templates().get("default", "")
        ends = [
            self.ids[token]
            for token in END_OF_TURN_TOKENS
            if token in self.ids and token in template
        ]
        # gpt-oss ends every message with <|end|>, but the completion with <|return|>.
        if "<|return|>" in self.ids:
            ends = [self.ids["<|return|>"]]
        ids = [self.id("eos"), self.id("eot"), self.id("eom"), *ends]
        return tuple(dict.fromkeys(id for id in ids if id is not None))

    def config(self) -> TokenizerConfig:
        named = {name: self.id(key) for name, key in SPECIAL_TOKENS.items()}
        sampling = {
            name: self.metadata.get(f"general.sampling.{key}")
            for key, name in SAMPLING_KEYS.items()
        }
        return TokenizerConfig(
            bos_id=named["bos_token"],
            eos_ids=self.eos_ids(),
            special_tokens={name: self.tokens[id] for name, id in named.items() if id is not None},
            chat_templates=self.chat_templates(),
            sampling_defaults={
                name: value for name, value in sampling.items() if value is not None
            },
        )


# ---- byte-level BPE ----------------------------------------------------------------------------


def _build_byte_level(vocabulary: _GgufVocabulary) -> tuple[Backend, bool]:
    """Return the backend, and whether BOS is added by default."""
    spec = _select_pre_tokenizer(vocabulary)
    bpe = BPE(vocabulary.ids, vocabulary.merges(), ignore_merges=spec.ignore_merges)
    backend = Backend(bpe)
    if spec.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = spec.build_pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, spec.add_bos


def _select_pre_tokenizer(vocabulary: _GgufVocabulary) -> PreTokenizerSpec:
    name = vocabulary.get("pre")
    if name in (None, "default"):
        architecture = vocabulary.metadata.get("general.architecture")
        name = PRE_TOKENIZER_OF_ARCHITECTURE.get(str(architecture))
        if name is None:
            raise TokenizerError(
                "the GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre) and "
                f"{architecture!r} models have several; convert it again with a current converter"
            )
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise TokenizerError(
            f"the GGUF file's pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known; known are "
            f"{known}. Use the model's Hugging Face folder, which has a tokenizer.json"
        )
    return PRE_TOKENIZERS[name]


# ---- SentencePiece BPE -------------------------------------------------------------------------


def _build_sentencepiece(vocabulary: _GgufVocabulary, merges: list[tuple[str, str]]) -> Backend:
    """Build the backend. Spaces become ▁, and the text gets one more unless the file forbids it."""
    unknown_id = vocabulary.id("unknown")
    special_ids = vocabulary.special_ids()
    ids = {
        token if id in special_ids else _mark_spaces(token): id
        for token, id in vocabulary.ids.items()
    }
    bpe = BPE(
        ids,
        merges,
        unk_token=None if unknown_id is None else vocabulary.tokens[unknown_id],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Backend(bpe)
    mark_spaces = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.get("add_space_prefix") is not False:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), mark_spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = mark_spaces
    backend.decoder = decoders.Sequence(steps)
    return backend


def _mark_spaces(token: str) -> str:
    """Write spaces as ▁: converters leave runs of spaces in user-defined tokens as they are."""
    return token.replace(" ", "▁")


def _merges_from_scores(vocabulary: _GgufVocabulary) -> list[tuple[str, str]]:
    """Return the merges that a vocabulary with scores implies.

    SentencePiece joins two neighbours that make a piece, the best score first, then the leftmost.
    The equivalent list has every split of every piece into two pieces, ordered by score. Among
    equal scores the longest left part comes first, so that runs of spaces, which all have the same
    score, grow from the left as in SentencePiece.
    """
    scores = vocabulary.array("scores", float, len(vocabulary.tokens))
    if not scores:
        raise TokenizerError(
            "the GGUF file's SentencePiece vocabulary has no tokenizer.ggml.scores; "
            "convert it again"
        )
    types = vocabulary.types
    pieces = {
        _mark_spaces(token): 0.0 if types[id] == USER_DEFINED else -scores[id]
        for id, token in enumerate(vocabulary.tokens)
        if types[id] in (NORMAL, USER_DEFINED)
    }
    merges: list[tuple[str, str]] = []
    by_score = sorted(pieces, key=pieces.__getitem__)
    for _, equal_pieces in groupby(by_score, key=pieces.__getitem__):
        splits = [
            (left, right)
            for piece in equal_pieces
            for i in range(len(piece) - 1, 0, -1)
            if (left := piece[:i]) in pieces and (right := piece[i:]) in pieces
        ]
        splits.sort(key=lambda split: (len(split[0]), len(split[1])), reverse=True)
        merges += splits
    return merges


# ---- added tokens ------------------------------------------------------------------------------


def _add_tokens(backend: Backend, vocabulary: _GgufVocabulary) -> None:
    """Add control tokens as special tokens, and user-defined tokens as tokens that are never split.

    User-defined tokens are ordinary text when decoded.
    """
    is_sentencepiece = vocabulary.get("model") != "gpt2"
    rstrip_exceptions = None
    if is_sentencepiece:
        architecture = str(vocabulary.metadata.get("general.architecture"))
        rstrip_exceptions = RSTRIP_EXCEPTIONS.get(architecture)
    special_ids = vocabulary.special_ids()
    special = []
    user_defined = []
    for id, token in enumerate(vocabulary.tokens):
        if id in special_ids:
            rstrip = rstrip_exceptions is not None and token not in rstrip_exceptions
            special.append(AddedToken(token, special=True, normalized=False, rstrip=rstrip))
        elif vocabulary.types[id] == USER_DEFINED:
            content = _mark_spaces(token) if is_sentencepiece else token
            user_defined.append(AddedToken(content, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(user_defined)
