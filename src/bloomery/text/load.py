"""Loads the tokenizer of a model, from a Hugging Face folder or from a GGUF file."""

from __future__ import annotations

from pathlib import Path

from bloomery.artifacts import gguf
from bloomery.artifacts.locate import ModelArtifact
from bloomery.errors import ConfigError, TemplateError
from bloomery.text.chat import compile_template
from bloomery.text.gguf_tokenizer import build_gguf_tokenizer
from bloomery.text.hf_tokenizer import load_hf_tokenizer
from bloomery.text.tokenizer import Tokenizer

# For a GGUF chat model whose file names no sampling params: llama.cpp's defaults, for which such
# files are made. Without them a small model samples from its whole vocabulary.
GGUF_CHAT_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def load_tokenizer(artifact: ModelArtifact, chat_template: str | None = None) -> Tokenizer:
    """Load the tokenizer. The file `chat_template` replaces the model's own chat templates."""
    if artifact.kind == "folder":
        tokenizer = load_hf_tokenizer(artifact.path)
        tokenizer.sampling_source = "generation_config.json"
        if not tokenizer.sampling_defaults:
            tokenizer.sampling_source = "none in the checkpoint"
    else:
        tokenizer = build_gguf_tokenizer(gguf.read_gguf(artifact.path).metadata)
        set_gguf_defaults(tokenizer, artifact)
    if artifact.chat_template is not None:
        tokenizer.chat_templates = {"default": artifact.chat_template}
    if chat_template is not None:
        tokenizer.chat_templates = {"default": read_chat_template(chat_template)}
    return tokenizer


def set_gguf_defaults(tokenizer: Tokenizer, artifact: ModelArtifact) -> None:
    """Complete the sampling defaults. Values in the file take precedence."""
    stated = tokenizer.sampling_defaults
    if artifact.sampling_defaults:
        tokenizer.sampling_defaults = {**dict(artifact.sampling_defaults), **stated}
        tokenizer.sampling_source = "the embedded model's"
    elif stated:
        tokenizer.sampling_source = "the GGUF file's"
    elif tokenizer.chat_templates:
        tokenizer.sampling_defaults = GGUF_CHAT_DEFAULTS
        tokenizer.sampling_source = "llama.cpp's, because the GGUF file has none"


def read_chat_template(path: str) -> str:
    """Read a chat template and check its syntax."""
    try:
        template = Path(path).read_text(encoding="utf-8")
        compile_template(template)
    except OSError as error:
        raise ConfigError(f"chat_template: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"chat_template: {path} is not a text in UTF-8") from None
    except TemplateError as error:
        raise ConfigError(f"chat_template: {path}: {error}") from None
    return template
