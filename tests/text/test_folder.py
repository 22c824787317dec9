"""Tokenizers from folders: every file that may be there, and what each of them says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import AutoTokenizer

from bloomery.artifacts.locate import Artifact
from bloomery.errors import TokenizerError
from bloomery.text.folder import from_folder
from bloomery.text.load import load_tokenizer
from tests.text.vocabularies import LINES, embedded, embedded_path, sample_texts

SPECIAL = ["<s>", "</s>", "<|turn|>"]


def write(folder: Path, **files: Any) -> Path:
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
    tokenizer = from_folder(folder)
    for text in sample_texts(60):
        assert tokenizer.encode(text) == trained.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == trained.decode(trained.encode(text).ids)
    assert tokenizer.eos_ids == () and tokenizer.bos_id is None
    assert tokenizer.chat_templates == {} and tokenizer.defaults == {}


def test_a_folder_and_a_gguf_file_load_alike(folder: Path) -> None:
    assert load_tokenizer(Artifact("x", "folder", folder, "")).encode("Hello")[0] == 0
    found = load_tokenizer(Artifact("x", "gguf", embedded_path(), ""))
    assert found.encode("Hello") == embedded().encode("Hello")


def test_end_of_answer_ids_are_gathered(folder: Path) -> None:
    write(folder, config_json={"eos_token_id": 7, "bos_token_id": 0})
    assert from_folder(folder).eos_ids == (7,)
    assert from_folder(folder).bos_id == 0
    write(folder, tokenizer_config_json={"eos_token": "</s>"})
    assert from_folder(folder).eos_ids == (7, 1)
    write(
        folder,
        generation_config_json={
            "eos_token_id": [2, 9],
            "temperature": 0.6,
            "top_k": None,
            "max_new_tokens": 5,
        },
    )
    tokenizer = from_folder(folder)
    assert tokenizer.eos_ids == (2, 9, 1)  # generation_config.json comes before config.json
    assert tokenizer.defaults == {"temperature": 0.6, "max_tokens": 5}
    write(
        folder,
        generation_config_json={"eos_token_id": None},
        config_json={"text_config": {"eos_token_id": 8}},
    )
    assert from_folder(folder).eos_ids == (8, 1)


def test_named_tokens_in_either_spelling_and_file(folder: Path) -> None:
    write(
        folder,
        tokenizer_config_json={
            "bos_token": {"content": "<s>", "__type": "AddedToken"},
            "eos_token": "config",
        },
        special_tokens_map_json={"eos_token": {"content": "</s>"}, "pad_token": "<|turn|>"},
    )
    found = from_folder(folder).special_tokens
    assert found == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<|turn|>"}
    write(folder, tokenizer_config_json={"eos_token": "config", "added_tokens_decoder": {}})
    assert (
        from_folder(folder).special_tokens["eos_token"] == "config"
    )  # the newer layout has the last word


def test_tokens_that_only_the_configuration_knows_are_added(folder: Path, trained: Backend) -> None:
    size = trained.get_vocab_size()
    declared = {
        str(size): {"content": "<|new|>", "special": True, "normalized": False},
        str(size + 1): {"content": "<tag>", "special": False},
        "1": {"content": "</s>", "special": True},
    }
    write(
        folder,
        tokenizer_config_json={"added_tokens_decoder": declared},
        added_tokens_json={"<old>": size + 2},
    )
    tokenizer = from_folder(folder)
    assert {size, size + 1, size + 2} <= set(tokenizer.encode("a<|new|>b<tag><old>"))
    assert tokenizer.decode(tokenizer.encode("a<|new|>b<tag>")) == "ab<tag>"
    reference = AutoTokenizer.from_pretrained(folder)
    for text in ("a<|new|>b<tag> c", "x<tag>y</s>"):
        assert tokenizer.encode(text) == reference.encode(text)
    (folder / "added_tokens.json").unlink()
    write(
        folder,
        tokenizer_config_json={"added_tokens_decoder": {str(size + 50): {"content": "<|new|>"}}},
    )
    with pytest.raises(
        TokenizerError, match=rf"'<\|new\|>' is declared as token {size + 50} and would be {size}"
    ):
        from_folder(folder)


def test_a_named_token_is_special_where_the_vocabulary_has_it(
    folder: Path, trained: Backend
) -> None:
    end = trained.id_to_token(300)
    pad = trained.id_to_token(301)
    write(
        folder,
        tokenizer_config_json={
            "eos_token": end,
            "pad_token": pad,
            "unk_token": "nowhere to be found",
        },
    )
    tokenizer = from_folder(folder)
    assert tokenizer.special_ids == {0, 1, 2, 300}  # some models pad with a word, which stays one
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
def test_templates_are_found_wherever_they_stand(
    folder: Path, files: dict[str, Any], templates: dict[str, str]
) -> None:
    assert from_folder(write(folder, **files)).chat_templates == templates


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
    write(
        folder,
        tokenizer_config_json={**named, "tokenizer_class": "GPT2Tokenizer", "add_bos_token": True},
    )
    tokenizer = from_folder(folder)
    reference = AutoTokenizer.from_pretrained(folder)
    for text in sample_texts(60):
        assert tokenizer.encode(text) == trained.encode(text).ids == reference.encode(text)
    write(folder, tokenizer_config_json={**named, "tokenizer_class": "GPT2TokenizerFast"})
    assert (
        from_folder(folder).encode("Hello") == trained.encode("Hello", add_special_tokens=False).ids
    )
    write(folder, tokenizer_config_json=named, config_json={"model_type": "gpt2"})
    assert (
        from_folder(folder).encode("Hello") == trained.encode("Hello", add_special_tokens=False).ids
    )
    write(folder, config_json={"model_type": "another"})
    with pytest.raises(TokenizerError, match="class None"):
        from_folder(folder)
    write(folder, tokenizer_config_json={**named, "tokenizer_class": "RobertaTokenizer"})
    with pytest.raises(TokenizerError, match="class RobertaTokenizer.*save_pretrained"):
        from_folder(folder)


def test_qwen2_from_vocab_and_merges(folder: Path, trained: Backend, tmp_path: Path) -> None:
    trained.model.save(str(tmp_path))
    (folder / "tokenizer.json").unlink()
    write(folder, tokenizer_config_json={"eos_token": "</s>", "tokenizer_class": "Qwen2Tokenizer"})
    tokenizer = from_folder(folder)
    reference = AutoTokenizer.from_pretrained(folder)
    for text in sample_texts(60):
        text = text.replace("<s>", "").replace("<|endoftext|>", "")
        assert tokenizer.encode(text) == reference.encode(text)


def test_a_sentencepiece_model(tmp_path: Path) -> None:
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
    folder = write(tmp_path / "model")
    shutil.copy(tmp_path / "bpe.model", folder / "tokenizer.model")
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "bpe.model"))
    assert from_folder(folder).encode("Hello fox") == [1, *original.encode("Hello fox")]
    write(
        folder,
        tokenizer_config_json={"add_bos_token": False, "add_eos_token": True, "eos_token": "</s>"},
    )
    assert from_folder(folder).encode("Hello fox") == [*original.encode("Hello fox"), 2]
    assert from_folder(folder).eos_ids == (2,)
    for other in ("nfkc", "unigram"):
        shutil.copy(tmp_path / f"{other}.model", folder / "tokenizer.model")
        with pytest.raises(TokenizerError, match="not plain SentencePiece BPE.*save_pretrained"):
            from_folder(folder)
    (folder / "tokenizer.model").write_bytes((tmp_path / "bpe.model").read_bytes()[:1000])
    with pytest.raises(TokenizerError, match="not a SentencePiece model"):
        from_folder(folder)


# ---- what is wrong is named --------------------------------------------------------------------


def test_an_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json.*save_pretrained"):
        from_folder(tmp_path)


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
def test_damaged_files_are_named(folder: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        from_folder(write(folder, **files))
