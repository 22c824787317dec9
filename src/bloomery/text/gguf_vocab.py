"""The tokenizer a GGUF file describes, from its metadata alone.

Three kinds are known: "gpt2" is byte-level BPE with merges and a named way to cut words; "llama" is SentencePiece's
BPE, whose merges follow from the scores of the pieces; "gemma4" is the latter with its merges written out. Every
other kind, and every unknown name, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from bloomery.errors import TokenizerError
from bloomery.text.pretokenizers import WORDS, WORDS_OF_ARCHITECTURE, Words
from bloomery.text.tokenizer import Extras, Tokenizer, add_borders

NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6

SPECIAL_TOKENS = {  # a template's name for a token -> the metadata's
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # the format's spelling
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}

# Tokens that end a turn. One counts where the chat template writes it: files often name only the end of a document.
TURN_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end_of_text|>",
    "<|eom_id|>",
)

# Nothing in a file says that a token swallows the white space after it. Phi-3's do, but for these.
SWALLOWING: Mapping[str, tuple[str, ...]] = {"phi3": ("<unk>", "<s>", "<|endoftext|>")}

SAMPLING = {  # general.sampling.* -> generation_config.json's name
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    vocabulary = _Vocabulary(metadata)
    return Tokenizer(_backend(vocabulary), vocabulary.extras())


def _backend(vocabulary: _Vocabulary) -> Backend:
    kind = vocabulary.get("model")
    try:
        if kind == "gpt2":
            backend, add_bos = _byte_level(vocabulary)
        elif kind == "llama":
            backend = _sentencepiece(vocabulary, _merges_of_scores(vocabulary))
            add_bos = True
        elif kind == "gemma4":
            backend = _sentencepiece(vocabulary, vocabulary.merges())
            add_bos = True
        else:
            raise TokenizerError(
                f"the tokenizer of the GGUF file is of the kind {kind!r}; known are 'gpt2', 'llama' and 'gemma4'. "
                "Use the model's Hugging Face folder, whose tokenizer.json says it all"
            )
    except (
        Exception
    ) as error:  # the library raises nothing narrower for merges of tokens that are not there
        if isinstance(error, TokenizerError):
            raise
        raise TokenizerError(
            f"the vocabulary of the GGUF file is damaged: {error}; download it again"
        ) from error
    _add_tokens(backend, vocabulary)
    if backend.get_vocab_size() != len(vocabulary.tokens):
        raise TokenizerError(
            "the GGUF file spells several tokens alike; convert it again with a current converter"
        )
    said = vocabulary.get("add_bos_token")
    bos = add_bos if said is None else bool(said)
    eos = bool(vocabulary.get("add_eos_token"))
    add_borders(
        backend, vocabulary.id("bos") if bos else None, vocabulary.id("eos") if eos else None
    )
    return backend


class _Vocabulary:
    """The metadata's tokenizer.ggml.* keys, checked."""

    def __init__(self, metadata: Mapping[str, Any]):
        self.metadata = metadata
        tokens = self.array("tokens", str)
        self.tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(tokens)]
        self.ids = {token: id for id, token in enumerate(self.tokens)}
        if not tokens or len(self.ids) != len(tokens):
            twice = next(
                (token for id, token in enumerate(self.tokens) if self.ids[token] != id), None
            )
            raise TokenizerError(
                f"the GGUF file has no usable vocabulary: {len(tokens)} tokens, {twice!r} twice"
            )
        self.types = self.array("token_type", int, len(tokens)) or [NORMAL] * len(tokens)

    def get(self, key: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}")

    def array(self, key: str, of: type, length: int | None = None) -> list[Any]:
        found = self.get(key)
        if found is None:
            return []
        if not isinstance(found, list) or not set(map(type, found)) <= {of}:
            raise TokenizerError(
                f"tokenizer.ggml.{key} of the GGUF file is not an array of {of.__name__}"
            )
        if length is not None and len(found) != length:
            raise TokenizerError(
                f"the GGUF file has {length} tokens and {len(found)} values in tokenizer.ggml.{key}"
            )
        return found

    def id(self, name: str) -> int | None:
        found = self.get(f"{name}_token_id")
        return found if isinstance(found, int) and 0 <= found < len(self.tokens) else None

    def merges(self) -> list[tuple[str, str]]:
        merges = self.array("merges", str)
        # a part may itself begin with a space
        return [(merge[:at], merge[at + 1 :]) for merge in merges if (at := merge.find(" ", 1)) > 0]

    def special(self) -> set[int]:
        named = {self.id(name) for name in ("bos", "eos", "eot", "eom")} - {None}
        return {
            id for id, kind in enumerate(self.types) if kind in (CONTROL, UNKNOWN) or id in named
        }

    def templates(self) -> dict[str, str]:
        found = {"default": self.metadata.get("tokenizer.chat_template")}
        for name in self.metadata.get("tokenizer.chat_templates") or ():
            found[name] = self.metadata.get(f"tokenizer.chat_template.{name}")
        return {name: text for name, text in found.items() if isinstance(text, str)}

    def eos_ids(self) -> tuple[int, ...]:
        written = self.templates().get("default", "")
        ends = [self.ids[token] for token in TURN_ENDS if token in self.ids and token in written]
        if (
            "<|return|>" in self.ids
        ):  # gpt-oss closes every message with <|end|> and the answer with <|return|>
            ends = [self.ids["<|return|>"]]
        found = [self.id("eos"), self.id("eot"), self.id("eom"), *ends]
        return tuple(dict.fromkeys(id for id in found if id is not None))

    def extras(self) -> Extras:
        named = {name: self.id(key) for name, key in SPECIAL_TOKENS.items()}
        sampling = {
            name: self.metadata.get(f"general.sampling.{key}") for key, name in SAMPLING.items()
        }
        return Extras(
            bos_id=named["bos_token"],
            eos_ids=self.eos_ids(),
            special_tokens={name: self.tokens[id] for name, id in named.items() if id is not None},
            chat_templates=self.templates(),
            defaults={name: value for name, value in sampling.items() if value is not None},
        )


# ---- byte-level BPE ----------------------------------------------------------------------------


def _byte_level(vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    words = _words(vocabulary)
    backend = Backend(BPE(vocabulary.ids, vocabulary.merges(), ignore_merges=words.whole_words))
    if words.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = words.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, words.add_bos


def _words(vocabulary: _Vocabulary) -> Words:
    name = vocabulary.get("pre")
    if name in (None, "default"):
        architecture = vocabulary.metadata.get("general.architecture")
        name = WORDS_OF_ARCHITECTURE.get(str(architecture))
        if name is None:
            raise TokenizerError(
                f"the GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre) and {architecture!r} models have "
                "several; convert it again with a current converter"
            )
    if name not in WORDS:
        raise TokenizerError(
            f"the GGUF file's pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known; known are "
            f"{', '.join(sorted(WORDS))}. Use the model's Hugging Face folder, whose tokenizer.json says it all"
        )
    return WORDS[name]


# ---- SentencePiece BPE -------------------------------------------------------------------------


def _sentencepiece(vocabulary: _Vocabulary, merges: list[tuple[str, str]]) -> Backend:
    """Spaces are written ▁, one more is put before the text unless the file says otherwise."""
    unknown = vocabulary.id("unknown")
    special = vocabulary.special()
    backend = Backend(
        BPE(
            {
                token if id in special else _marked(token): id
                for token, id in vocabulary.ids.items()
            },
            merges,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = vocabulary.get("add_space_prefix") is not False
    space = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _marked(token: str) -> str:
    return token.replace(" ", "▁")  # converters write user-defined runs of spaces as they are


def _merges_of_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Two neighbours join where that makes a piece, the best score first, then the leftmost.

    As a list of merges: every way to cut a piece in two, by score. Cuts of one score come longest left part first,
    so that runs of spaces, all of one score, grow from the left as SentencePiece matches them.
    """
    scores = vocabulary.array("scores", float, len(vocabulary.tokens))
    if not scores:
        raise TokenizerError(
            "the GGUF file's SentencePiece vocabulary has no tokenizer.ggml.scores; convert it again"
        )
    types = vocabulary.types
    pieces = {
        _marked(token): 0.0 if types[id] == USER_DEFINED else -scores[id]
        for id, token in enumerate(vocabulary.tokens)
        if types[id] in (NORMAL, USER_DEFINED)
    }
    merges: list[tuple[str, str]] = []
    for _, equals in groupby(sorted(pieces, key=pieces.__getitem__), key=pieces.__getitem__):
        cuts = [
            (left, right)
            for piece in equals
            for cut in range(len(piece) - 1, 0, -1)
            if (left := piece[:cut]) in pieces and (right := piece[cut:]) in pieces
        ]
        cuts.sort(key=lambda cut: (len(cut[0]), len(cut[1])), reverse=True)
        merges += cuts
    return merges


# ---- both --------------------------------------------------------------------------------------


def _add_tokens(backend: Backend, vocabulary: _Vocabulary) -> None:
    """Control tokens are special; user-defined ones are found whole in a text but are text."""
    spaces = vocabulary.get("model") != "gpt2"
    spared = (
        SWALLOWING.get(str(vocabulary.metadata.get("general.architecture"))) if spaces else None
    )
    special = vocabulary.special()
    control = []
    plain = []
    for id, token in enumerate(vocabulary.tokens):
        if id in special:
            rstrip = spared is not None and token not in spared
            control.append(AddedToken(token, special=True, normalized=False, rstrip=rstrip))
        elif vocabulary.types[id] == USER_DEFINED:
            plain.append(
                AddedToken(_marked(token) if spaces else token, special=False, normalized=False)
            )
    backend.add_special_tokens(control)
    backend.add_tokens(plain)
