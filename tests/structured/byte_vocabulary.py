"""A small vocabulary for tests: one token for each byte below 128, some words, and an end token."""

from __future__ import annotations

from concurrent.futures import Future, wait

from bloomery.engine.loop import EngineLoop
from bloomery.messages import EngineRequest
from bloomery.structured.matcher import GrammarMatcher, MaskBuilder, TokenVocabulary

LONGER_TOKENS = (b"true", b"false", b'{"', b'":', b"ab", b"yes", b"no", b"maybe", b"12")


class ByteTokenizer:
    """The part of a tokenizer that a vocabulary is built from."""

    bos_id = None

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(128)] + list(LONGER_TOKENS) + [b"<end>"]
        self.vocab_size = len(self.tokens)
        self.eos_ids = (self.vocab_size - 1,)
        self.special_ids = frozenset(self.eos_ids)

    def token_bytes(self, id: int) -> bytes:
        return self.tokens[id]

    def encode(self, text: str) -> list[int]:
        """Spell a text in bytes."""
        return list(text.encode("ascii"))

    def decode(self, ids: list[int]) -> str:
        """Join the tokens, without the end."""
        return b"".join(self.tokens[id] for id in ids if id not in self.eos_ids).decode()


BYTES = ByteTokenizer()
END = BYTES.eos_ids[0]


class PromptMaskBuilder(MaskBuilder):
    """Waits until a grammar is compiled, so that a test always has the same steps."""

    def create_matcher(self, request: EngineRequest) -> Future[GrammarMatcher]:
        matcher = super().create_matcher(request)
        wait([matcher])
        return matcher


def use_grammars(loop: EngineLoop, vocab_size: int) -> MaskBuilder:
    """Let an engine whose model has `vocab_size` ids take requests with a grammar."""
    vocabulary: Future[TokenVocabulary] = Future()
    vocabulary.set_result(TokenVocabulary(BYTES))
    builder = PromptMaskBuilder(vocabulary, vocab_size)
    loop.create_mask_builder = lambda: builder
    return builder
