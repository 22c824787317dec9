"""Loads the tokenizer of a model, from a Hugging Face folder or from a GGUF file."""

from __future__ import annotations

from bloomery.artifacts import gguf
from bloomery.artifacts.locate import ModelArtifact
from bloomery.text.gguf_tokenizer import build_gguf_tokenizer
from bloomery.text.hf_tokenizer import load_hf_tokenizer
from bloomery.text.tokenizer import Tokenizer


def load_tokenizer(artifact: ModelArtifact) -> Tokenizer:
    if artifact.kind == "folder":
        return load_hf_tokenizer(artifact.path)
    tokenizer = build_gguf_tokenizer(gguf.read_gguf(artifact.path).metadata)
    # Values in the file take precedence over the known defaults of the model.
    tokenizer.sampling_defaults = {
        **dict(artifact.sampling_defaults),
        **tokenizer.sampling_defaults,
    }
    return tokenizer
