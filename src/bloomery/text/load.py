"""A model's tokenizer, wherever it was found: the one place that knows there are two kinds of artifact."""

from __future__ import annotations

from bloomery.artifacts import gguf
from bloomery.artifacts.locate import Artifact
from bloomery.text.folder import from_folder
from bloomery.text.gguf_vocab import from_gguf
from bloomery.text.tokenizer import Tokenizer


def load_tokenizer(artifact: Artifact) -> Tokenizer:
    if artifact.kind == "folder":
        return from_folder(artifact.path)
    tokenizer = from_gguf(gguf.read(artifact.path).metadata)
    tokenizer.defaults = {**dict(artifact.sampling), **tokenizer.defaults}
    return tokenizer
