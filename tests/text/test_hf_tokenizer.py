"""Tokenizers of Hugging Face folders: each file that may be present, and what it decides."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import AutoTokenizer

from bloomery.artifacts.locate import ModelArtifact, locate_model
from bloomery.errors import TokenizerError
from bloomery.text.chat import render_chat
from bloomery.text.hf_tokenizer import load_hf_tokenizer
from bloomery.text.load import load_tokenizer
from tests.text.vocabularies import LINES, embedded_path, embedded_tokenizer, sample_texts

SPECIAL = ["<s>", "</s>", "<|turn|>"]


def write_files(folder: Path, **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_json", ".json").replace(
            "_jinja", ".jinja"
        )
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def trained() -> Backend:
    backend = Backend(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        LINES,
        trainers.BpeTrainer(
            vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return backend


@pytest.fixture
def folder(trained: Backend, tmp_path: Path) -> Path:
    trained.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_tokenizer_json_is_enough(folder: Path, trained: Backend) -> None:
    tokenizer = load_hf_tokenizer(folder)
    for text in sample_texts(60):
        assert tokenizer.encode(text) == trained.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == trained.decode(trained.encode(text).ids)
    assert tokenizer.eos_ids == () and tokenizer.bos_id is None
    assert tokenizer.chat_templates == {} and tokenizer.sampling_defaults == {}


def test_load_tokenizer_reads_folders_and_gguf_files(folder: Path) -> None:
    assert load_tokenizer(ModelArtifact("x", "folder", folder, "")).encode("Hello")[0] == 0
    tokenizer = load_tokenizer(ModelArtifact("x", "gguf", embedded_path(), ""))
    assert tokenizer.encode("Hello") == embedded_tokenizer().encode("Hello")


def test_an_artifact_may_replace_the_chat_template(tmp_path: Path) -> None:
    """So does the embedded model: its file's system prompt is left out, the rest is the same."""
    messages = [{"role": "user", "content": "Hello"}]
    empty_prompt = {"role": "system", "content": ""}
    artifact = locate_model(None)
    from_file = load_tokenizer(replace(artifact, chat_template=None))
    tokenizer = load_tokenizer(artifact)
    assert render_chat(tokenizer, messages) == render_chat(from_file, [empty_prompt, *messages])
    talk = [{"role": "system", "content": "Be brief."}, *messages, *messages]
    assert render_chat(tokenizer, talk) == render_chat(from_file, talk)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    assert render_chat(load_tokenizer(artifact, str(template)), messages) == "Hello"


def test_eos_ids_are_collected_from_all_files(folder: Path) -> None:
    write_files(folder, config_json={"eos_token_id": 7, "bos_token_id": 0})
    assert load_hf_tokenizer(folder).eos_ids == (7,)
    assert load_hf_tokenizer(folder).bos_id == 0
    write_files(folder, tokenizer_config_json={"eos_token": "</s>"})
    assert load_hf_tokenizer(folder).eos_ids == (7, 1)
    write_files(
        folder,
        generation_config_json={
            "eos_token_id": [2, 9],
            "temperature": 0.6,
            "top_k": None,
            "max_new_tokens": 5,
        },
    )
    tokenizer = load_hf_tokenizer(folder)
    assert tokenizer.eos_ids == (2, 9, 1)  # generation_config.json comes before config.json
    assert tokenizer.sampling_defaults == {"temperature": 0.6, "max_tokens": 5}
    write_files(
        folder,
        generation_config_json={"eos_token_id": None},
        config_json={"text_config": {"eos_token_id": 8}},
    )
    assert load_hf_tokenizer(folder).eos_ids == (8, 1)


def test_special_tokens_as_strings_and_objects_in_either_file(folder: Path) -> None:
    write_files(
        folder,
        tokenizer_config_json={
            "bos_token": {"content": "<s>", "__type": "AddedToken"},
            "eos_token": "config",
        },
        special_tokens_map_json={"eos_token": {"content": "</s>"}, "pad_token": "<|turn|>"},
    )
    special_tokens = load_hf_tokenizer(folder).special_tokens
    assert special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<|turn|>"}
    write_files(folder, tokenizer_config_json={"eos_token": "config", "added_tokens_decoder": {}})
    assert load_hf_tokenizer(folder).special_tokens["eos_token"] == "config"


def test_tokens_declared_outside_tokenizer_json_are_added(folder: Path, trained: Backend) -> None:
    size = trained.get_vocab_size()
    declared = {
        str(size): {"content": "<|new|>", "special": True, "normalized": False},
        str(size + 1): {"content": "<tag>", "special": False},
        "1": {"content": "</s>", "special": True},
    }
    write_files(
        folder,
        tokenizer_config_json={"added_tokens_decoder": declared},
        added_tokens_json={"<old>": size + 2},
    )
    tokenizer = load_hf_tokenizer(folder)
    assert {size, size + 1, size + 2} <= set(tokenizer.encode("a<|new|>b<tag><old>"))
    assert tokenizer.decode(tokenizer.encode("a<|new|>b<tag>")) == "ab<tag>"
    reference = AutoTokenizer.from_pretrained(folder)
    for text in ("a<|new|>b<tag> c", "x<tag>y</s>"):
        assert tokenizer.encode(text) == reference.encode(text)
    (folder / "added_tokens.json").unlink()
    write_files(
        folder,
        tokenizer_config_json={"added_tokens_decoder": {str(size + 50): {"content": "<|new|>"}}},
    )
    with pytest.raises(
        TokenizerError, match=rf"'<\|new\|>' is declared as token {size + 50} and would be {size}"
    ):
        load_hf_tokenizer(folder)


def test_named_tokens_of_the_vocabulary_are_special(folder: Path, trained: Backend) -> None:
    end = trained.id_to_token(300)
    pad = trained.id_to_token(301)
    write_files(
        folder,
        tokenizer_config_json={
            "eos_token": end,
            "pad_token": pad,
            "unk_token": "nowhere to be found",
        },
    )
    tokenizer = load_hf_tokenizer(folder)
    assert tokenizer.special_ids == {0, 1, 2, 300}  # not the pad token
    assert tokenizer.vocab_size == trained.get_vocab_size()


@pytest.mark.parametrize(
    ("files", "templates"),
    [
        ({"tokenizer_config_json": {"chat_template": "one"}}, {"default": "one"}),
        (
            {
                "tokenizer_config_json": {
                    "chat_template": [
                        {"name": "default", "template": "one"},
                        {"name": "rag", "template": "two"},
                    ]
                }
            },
            {"default": "one", "rag": "two"},
        ),
        (
            {"chat_template_jinja": "file", "tokenizer_config_json": {"chat_template": "one"}},
            {"default": "file"},
        ),
        (
            {"chat_template_jinja": "file", "additional_chat_templates__tool_use_jinja": "tools"},
            {"default": "file", "tool_use": "tools"},
        ),
        ({"chat_template_json": {"chat_template": "processor"}}, {"default": "processor"}),
    ],
)
def test_chat_templates_are_read_from_every_file(
    folder: Path, files: dict[str, Any], templates: dict[str, str]
) -> None:
    assert load_hf_tokenizer(write_files(folder, **files)).chat_templates == templates


# ---- other files than tokenizer.json -----------------------------------------------------------


def test_vocab_and_merges(folder: Path, trained: Backend, tmp_path: Path) -> None:
    trained.model.save(str(tmp_path))
    (folder / "tokenizer.json").unlink()
    named = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "</s>",
        "extra_special_tokens": ["<|turn|>"],
    }
    write_files(
        folder,
        tokenizer_config_json={**named, "tokenizer_class": "GPT2Tokenizer", "add_bos_token": True},
    )
    tokenizer = load_hf_tokenizer(folder)
    reference = AutoTokenizer.from_pretrained(folder)
    for text in sample_texts(60):
        assert tokenizer.encode(text) == trained.encode(text).ids == reference.encode(text)
    write_files(folder, tokenizer_config_json={**named, "tokenizer_class": "GPT2TokenizerFast"})
    assert (
        load_hf_tokenizer(folder).encode("Hello")
        == trained.encode("Hello", add_special_tokens=False).ids
    )
    write_files(folder, tokenizer_config_json=named, config_json={"model_type": "gpt2"})
    assert (
        load_hf_tokenizer(folder).encode("Hello")
        == trained.encode("Hello", add_special_tokens=False).ids
    )
    write_files(folder, config_json={"model_type": "another"})
    with pytest.raises(TokenizerError, match="class None"):
        load_hf_tokenizer(folder)
    write_files(folder, tokenizer_config_json={**named, "tokenizer_class": "RobertaTokenizer"})
    with pytest.raises(TokenizerError, match="class RobertaTokenizer.*save_pretrained"):
        load_hf_tokenizer(folder)


def test_qwen2_from_vocab_and_merges(folder: Path, trained: Backend, tmp_path: Path) -> None:
    trained.model.save(str(tmp_path))
    (folder / "tokenizer.json").unlink()
    write_files(
        folder, tokenizer_config_json={"eos_token": "</s>", "tokenizer_class": "Qwen2Tokenizer"}
    )
    tokenizer = load_hf_tokenizer(folder)
    reference = AutoTokenizer.from_pretrained(folder)
    for text in sample_texts(60):
        text = text.replace("<s>", "").replace("<|endoftext|>", "")
        assert tokenizer.encode(text) == reference.encode(text)


def test_sentencepiece_model(tmp_path: Path) -> None:
    import sentencepiece

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(line.replace("\x00", "") for line in LINES))
    options = {
        "input": str(corpus),
        "vocab_size": 600,
        "byte_fallback": True,
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    train = sentencepiece.SentencePieceTrainer.train
    train(model_prefix=str(tmp_path / "bpe"), model_type="bpe", **options, **plain)
    train(model_prefix=str(tmp_path / "nfkc"), model_type="bpe", **options)
    train(model_prefix=str(tmp_path / "unigram"), model_type="unigram", **options, **plain)
    folder = write_files(tmp_path / "model")
    shutil.copy(tmp_path / "bpe.model", folder / "tokenizer.model")
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "bpe.model"))
    assert load_hf_tokenizer(folder).encode("Hello fox") == [1, *original.encode("Hello fox")]
    write_files(
        folder,
        tokenizer_config_json={"add_bos_token": False, "add_eos_token": True, "eos_token": "</s>"},
    )
    assert load_hf_tokenizer(folder).encode("Hello fox") == [*original.encode("Hello fox"), 2]
    assert load_hf_tokenizer(folder).eos_ids == (2,)
    for other in ("nfkc", "unigram"):
        shutil.copy(tmp_path / f"{other}.model", folder / "tokenizer.model")
        with pytest.raises(TokenizerError, match="not plain SentencePiece BPE.*save_pretrained"):
            load_hf_tokenizer(folder)
    (folder / "tokenizer.model").write_bytes((tmp_path / "bpe.model").read_bytes()[:1000])
    with pytest.raises(TokenizerError, match="not a SentencePiece model"):
        load_hf_tokenizer(folder)


# ---- errors ------------------------------------------------------------------------------------


def test_error_for_an_empty_folder_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json.*save_pretrained"):
        load_hf_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_json": "{"}, "cannot be read"),
        ({"tokenizer_json": "{}"}, "cannot be read"),
        ({"tokenizer_config_json": "[1]"}, r"tokenizer_config\.json: not a JSON object"),
        ({"generation_config_json": "{'a'}"}, r"generation_config\.json: not valid JSON"),
        ({"tokenizer_config_json": {"added_tokens_decoder": {"x": {}}}}, "cannot be read"),
        ({"tokenizer_config_json": {"chat_template": [{"name": "x"}]}}, "cannot be read"),
    ],
)
def test_error_names_the_damaged_file(folder: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        load_hf_tokenizer(write_files(folder, **files))
