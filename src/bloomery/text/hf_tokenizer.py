"""Loads the tokenizer of a Hugging Face folder from the files that are present.

tokenizer.json decides how text is encoded. The files beside it name special tokens, end-of-sequence
ids, sampling defaults and chat templates. They may add tokens but not renumber them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from bloomery.errors import TokenizerError
from bloomery.text.gguf_tokenizer import build_gguf_tokenizer
from bloomery.text.pretokenizers import PRE_TOKENIZERS
from bloomery.text.sentencepiece_model import REMEDY, read_sentencepiece_model
from bloomery.text.tokenizer import Tokenizer, TokenizerConfig, add_bos_and_eos

SAMPLING_KEYS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "max_new_tokens",
)
ADDED_TOKEN_KEYS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")

# vocab.json and merges.txt do not name a pre-tokenizer; the tokenizer class implies it.
PRE_TOKENIZER_OF_CLASS = {
    "GPT2Tokenizer": "gpt-2",
    "CodeGenTokenizer": "gpt-2",
    "Qwen2Tokenizer": "qwen2",
}
# The tokenizer class by model_type, for a folder that does not name one.
CLASS_OF_MODEL = {
    "gpt2": "GPT2Tokenizer",
    "gptj": "GPT2Tokenizer",
    "opt": "GPT2Tokenizer",
}


def load_hf_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a folder; a missing or damaged file raises TokenizerError."""
    config = _read_json(folder / "tokenizer_config.json")
    special_map = _read_json(folder / "special_tokens_map.json")
    special_tokens = _read_special_tokens(config, special_map)
    try:
        backend = _build_backend(folder, config, special_tokens)
        _add_declared_tokens(backend, folder, config)
        _mark_special_tokens(backend, special_tokens, config)
        return Tokenizer(backend, _read_config(folder, config, special_tokens, backend))
    except TokenizerError:
        raise
    except Exception as error:  # the library raises plain Exception for files it cannot read
        raise TokenizerError(
            f"{folder}: the tokenizer cannot be read ({error}); download it again"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: not a JSON object; download it again")
    return value


# ---- the vocabulary ----------------------------------------------------------------------------


def _build_backend(
    folder: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> Backend:
    tokenizer_json = folder / "tokenizer.json"
    vocab = folder / "vocab.json"
    merges = folder / "merges.txt"
    sentencepiece = folder / "tokenizer.model"
    if tokenizer_json.is_file():
        return Backend.from_file(str(tokenizer_json))
    if vocab.is_file() and merges.is_file():
        return _build_from_merges(vocab, merges, config, special_tokens)
    if sentencepiece.is_file():
        metadata = read_sentencepiece_model(sentencepiece.read_bytes())
        for key in ("add_bos_token", "add_eos_token"):
            metadata[f"tokenizer.ggml.{key}"] = config.get(key)
        return build_gguf_tokenizer(metadata).backend
    raise TokenizerError(f"{folder}: no tokenizer.json; {REMEDY}")


def _build_from_merges(
    vocab: Path, merges: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> Backend:
    """Build a byte-level BPE tokenizer from vocab.json and merges.txt."""
    folder = vocab.parent
    class_name = config.get("tokenizer_class")
    if not class_name:
        model_type = _read_json(folder / "config.json").get("model_type", "")
        class_name = CLASS_OF_MODEL.get(model_type)
    class_name = str(class_name).removesuffix("Fast")
    if class_name not in PRE_TOKENIZER_OF_CLASS:
        raise TokenizerError(
            f"{folder}: vocab.json and merges.txt belong to the tokenizer class {class_name}, "
            f"which is not supported; {REMEDY}"
        )
    spec = PRE_TOKENIZERS[PRE_TOKENIZER_OF_CLASS[class_name]]
    backend = Backend(BPE.from_file(str(vocab), str(merges)))
    if spec.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = spec.build_pre_tokenizer(bool(config.get("add_prefix_space")))
    backend.decoder = decoders.ByteLevel()
    bos_id = None
    eos_id = None
    if config.get("add_bos_token"):
        bos_id = backend.token_to_id(special_tokens.get("bos_token", ""))
    if config.get("add_eos_token"):
        eos_id = backend.token_to_id(special_tokens.get("eos_token", ""))
    add_bos_and_eos(backend, bos_id, eos_id)
    return backend


# ---- added and special tokens ------------------------------------------------------------------


def _token_content(token: object) -> str | None:
    """Return the text of a token, which is written as a string or as an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _read_special_tokens(
    config: Mapping[str, Any], special_map: Mapping[str, Any]
) -> dict[str, str]:
    """Return bos_token, eos_token and the others by name.

    In the older layout, without added_tokens_decoder, special_tokens_map.json takes precedence over
    tokenizer_config.json.
    """
    sources = [config, special_map]
    if "added_tokens_decoder" in config:
        sources = [special_map, config]
    special_tokens: dict[str, str] = {}
    for source in sources:
        tokens = dict(source)
        extra = source.get("extra_special_tokens")
        if isinstance(extra, dict):
            tokens.update(extra)
        for name, token in tokens.items():
            content = _token_content(token)
            if name.endswith("_token") and content is not None:
                special_tokens[name] = content
    return special_tokens


def _add_declared_tokens(backend: Backend, folder: Path, config: Mapping[str, Any]) -> None:
    """Add the tokens that the files beside tokenizer.json declare; their ids must fit."""
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    added_tokens = config.get("added_tokens_decoder") or {}
    declared = {int(id): dict(token) for id, token in added_tokens.items()}
    for content, id in _read_json(folder / "added_tokens.json").items():
        declared.setdefault(id, {"content": content})
    for id, token in sorted(declared.items()):
        content = token["content"]
        if content in present:
            continue
        options = {key: token[key] for key in ADDED_TOKEN_KEYS if key in token}
        backend.add_tokens([AddedToken(**options)])
        actual_id = backend.token_to_id(content)
        if actual_id != id:
            raise TokenizerError(
                f"{folder}: {content!r} is declared as token {id} and would be {actual_id}; "
                "the tokenizer files belong to different models"
            )


def _mark_special_tokens(
    backend: Backend, special_tokens: Mapping[str, str], config: Mapping[str, Any]
) -> None:
    """Mark the named tokens of the vocabulary as special.

    The pad token is left out: some models pad with an ordinary word.
    """
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    extra = [
        *(config.get("additional_special_tokens") or ()),
        *(config.get("extra_special_tokens") or ()),
    ]
    named = [content for name, content in special_tokens.items() if name != "pad_token"]
    for content in [*named, *map(_token_content, extra)]:
        if content and content not in present and backend.token_to_id(content) is not None:
            backend.add_special_tokens([AddedToken(content, special=True, normalized=False)])


# ---- the configuration -------------------------------------------------------------------------


def _read_config(
    folder: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str], backend: Backend
) -> TokenizerConfig:
    model = _read_json(folder / "config.json")
    model = {**(model.get("text_config") or {}), **model}
    generation = _read_json(folder / "generation_config.json")

    def read_ids(name: str) -> list[int]:
        """Return the ids of "bos" or "eos": as stated by id, then the id of the named token."""
        key = f"{name}_token_id"
        stated = generation.get(key)
        if stated is None:
            stated = model.get(key)
        ids = list(stated) if isinstance(stated, list) else [stated]
        token = special_tokens.get(f"{name}_token")
        if token:
            ids.append(backend.token_to_id(token))
        return list(dict.fromkeys(id for id in ids if isinstance(id, int) and id >= 0))

    response_template = config.get("response_template")
    return TokenizerConfig(
        bos_id=next(iter(read_ids("bos")), None),
        eos_ids=tuple(read_ids("eos")),
        special_tokens=special_tokens,
        chat_templates=_read_chat_templates(folder, config),
        sampling_defaults={
            key.replace("max_new", "max"): generation[key]
            for key in SAMPLING_KEYS
            if generation.get(key) is not None
        },
        response_template=response_template if isinstance(response_template, dict) else None,
    )


def _read_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name.

    Template files take precedence over tokenizer_config.json, and that over chat_template.json.
    """
    files = {"default": folder / "chat_template.jinja"}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        files[path.stem] = path
    templates: Any = {
        name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()
    }
    if not templates:
        templates = config.get("chat_template")
    if not templates:
        templates = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(templates, str):
        return {"default": templates}
    if isinstance(templates, list):  # [{"name": "tool_use", "template": "..."}]
        return {entry["name"]: entry["template"] for entry in templates}
    return dict(templates) if isinstance(templates, dict) else {}
