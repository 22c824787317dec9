"""The tokenizer of a Hugging Face folder, from whichever of its files are there.

tokenizer.json is the truth about encoding. The files beside it name special tokens, end-of-answer ids, sampling
defaults and chat templates; they may add tokens, never renumber them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from bloomery.errors import TokenizerError
from bloomery.text.gguf_vocab import from_gguf
from bloomery.text.pretokenizers import WORDS
from bloomery.text.sentencepiece_model import REMEDY, metadata_of
from bloomery.text.tokenizer import Extras, Tokenizer, add_borders

SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "max_new_tokens",
)
ADDED_TOKEN = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")

# vocab.json and merges.txt do not say how words are cut; the class that reads them does
WORDS_OF_CLASS = {"GPT2Tokenizer": "gpt-2", "CodeGenTokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
CLASS_OF_MODEL = {
    "gpt2": "GPT2Tokenizer",
    "gptj": "GPT2Tokenizer",
    "opt": "GPT2Tokenizer",
}  # where none is named


def from_folder(folder: Path) -> Tokenizer:
    config = _json(folder / "tokenizer_config.json")
    named = _named_tokens(config, _json(folder / "special_tokens_map.json"))
    try:
        backend = _backend(folder, config, named)
        _add_declared_tokens(backend, folder, config)
        _mark_special(backend, named, config)
        return Tokenizer(backend, _extras(folder, config, named, backend))
    except TokenizerError:
        raise
    except (
        Exception
    ) as error:  # the library raises nothing narrower for files it cannot make sense of
        raise TokenizerError(
            f"{folder}: the tokenizer cannot be read ({error}); download it again"
        ) from error


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not valid JSON ({error}); download it again") from None
    if not isinstance(found, dict):
        raise TokenizerError(f"{path}: not a JSON object; download it again")
    return found


# ---- the vocabulary ----------------------------------------------------------------------------


def _backend(folder: Path, config: Mapping[str, Any], named: Mapping[str, str]) -> Backend:
    whole, vocab, merges, pieces = (
        folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")
    )
    if whole.is_file():
        return Backend.from_file(str(whole))
    if vocab.is_file() and merges.is_file():
        return _from_merges(vocab, merges, config, named)
    if pieces.is_file():
        borders = {
            f"tokenizer.ggml.{key}": config.get(key) for key in ("add_bos_token", "add_eos_token")
        }
        return from_gguf({**metadata_of(pieces.read_bytes()), **borders}).backend
    raise TokenizerError(f"{folder}: no tokenizer.json; {REMEDY}")


def _from_merges(
    vocab: Path, merges: Path, config: Mapping[str, Any], named: Mapping[str, str]
) -> Backend:
    name = config.get("tokenizer_class") or CLASS_OF_MODEL.get(
        _json(vocab.parent / "config.json").get("model_type", "")
    )
    name = str(name).removesuffix("Fast")
    if name not in WORDS_OF_CLASS:
        raise TokenizerError(
            f"{vocab.parent}: vocab.json and merges.txt of the class {name}, unknown to us; {REMEDY}"
        )
    words = WORDS[WORDS_OF_CLASS[name]]
    backend = Backend(BPE.from_file(str(vocab), str(merges)))
    if words.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = words.pre_tokenizer(bool(config.get("add_prefix_space")))
    backend.decoder = decoders.ByteLevel()
    bos, eos = (
        backend.token_to_id(named.get(f"{border}_token", ""))
        if config.get(f"add_{border}_token")
        else None
        for border in ("bos", "eos")
    )
    add_borders(backend, bos, eos)
    return backend


# ---- added and special tokens ------------------------------------------------------------------


def _text(token: object) -> str | None:
    """A token is written as a string or as an object with its content."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _named_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the rest. Without added_tokens_decoder the configuration is of the old kind, and the
    map has the last word."""
    sources = (special_map, config) if "added_tokens_decoder" in config else (config, special_map)
    found: dict[str, str] = {}
    for source in sources:
        extra = source.get("extra_special_tokens")
        for name, token in {**source, **(extra if isinstance(extra, dict) else {})}.items():
            text = _text(token)
            if name.endswith("_token") and text is not None:
                found[name] = text
    return found


def _add_declared_tokens(backend: Backend, folder: Path, config: Mapping[str, Any]) -> None:
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = {
        int(id): dict(token) for id, token in (config.get("added_tokens_decoder") or {}).items()
    }
    for text, id in _json(folder / "added_tokens.json").items():
        declared.setdefault(id, {"content": text})
    for id, token in sorted(declared.items()):
        if token["content"] in present:
            continue
        backend.add_tokens(
            [AddedToken(**{name: token[name] for name in ADDED_TOKEN if name in token})]
        )
        if backend.token_to_id(token["content"]) != id:
            raise TokenizerError(
                f"{folder}: {token['content']!r} is declared as token {id} and would be "
                f"{backend.token_to_id(token['content'])}; the tokenizer files are not of one model"
            )


def _mark_special(backend: Backend, named: Mapping[str, str], config: Mapping[str, Any]) -> None:
    """Named tokens are special where the vocabulary has them. A pad token is left: some models pad with a word."""
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    extra = [
        *(config.get("additional_special_tokens") or ()),
        *(config.get("extra_special_tokens") or ()),
    ]
    names = [text for name, text in named.items() if name != "pad_token"]
    for text in [*names, *map(_text, extra)]:
        if text and text not in present and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


# ---- what stands beside the vocabulary ---------------------------------------------------------


def _extras(
    folder: Path, config: Mapping[str, Any], named: Mapping[str, str], backend: Backend
) -> Extras:
    model = _json(folder / "config.json")
    generation = _json(folder / "generation_config.json")
    model = {**(model.get("text_config") or {}), **model}

    def ids(name: str) -> list[int]:
        found = next(
            (
                said[key]
                for said in (generation, model)
                if said.get(key := f"{name}_token_id") is not None
            ),
            None,
        )
        token = named.get(f"{name}_token")
        every = [
            *(found if isinstance(found, list) else [found]),
            token and backend.token_to_id(token),
        ]
        return list(dict.fromkeys(id for id in every if isinstance(id, int) and id >= 0))

    return Extras(
        bos_id=next(iter(ids("bos")), None),
        eos_ids=tuple(ids("eos")),
        special_tokens=named,
        chat_templates=dict(_templates(folder, config)),
        defaults={
            name.replace("max_new", "max"): generation[name]
            for name in SAMPLING
            if generation.get(name) is not None
        },
    )


def _templates(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Files of their own come before tokenizer_config.json, and that before a processor's chat_template.json."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {
        path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    found = {
        name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()
    }
    written = (
        found
        or config.get("chat_template")
        or _json(folder / "chat_template.json").get("chat_template")
    )
    if isinstance(written, str):
        yield "default", written
    elif isinstance(written, dict):
        yield from written.items()
    elif isinstance(written, list):  # [{"name": "tool_use", "template": "..."}]
        yield from ((entry["name"], entry["template"]) for entry in written)
