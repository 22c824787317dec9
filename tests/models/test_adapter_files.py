"""Adapters that cannot be used are refused: the error names the file, and says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bloomery.artifacts.locate import locate_model
from bloomery.errors import InvalidRequest
from bloomery.models.adapter_files import AdapterReader
from bloomery.models.adapter_memory import AdapterMemory
from bloomery.models.load import load_model
from tests.parity.cases import CASES, VOCAB, make_checkpoint

CPU = torch.device("cpu")
LAYER = "base_model.model.model.layers.0."
Q_PROJ = f"{LAYER}self_attn.q_proj"
MAX_RANK = 8


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> AdapterReader:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(next(case for case in CASES if case.name == "llama"), folder)
    memory = AdapterMemory(1, MAX_RANK, torch.float32, CPU)
    artifact = locate_model(str(folder))
    loaded = load_model(artifact, "auto", torch.float32, CPU, adapter_memory=memory)
    assert loaded.adapter_reader is not None
    return loaded.adapter_reader


def make_tensors(rank: int = 4, outputs: int = 32, inputs: int = 32) -> dict[str, torch.Tensor]:
    return {
        f"{Q_PROJ}.lora_A.weight": torch.ones(rank, inputs),
        f"{Q_PROJ}.lora_B.weight": torch.ones(outputs, rank),
    }


def write(folder: Path, tensors: dict[str, torch.Tensor], **values: Any) -> Path:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config | values))
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    return folder


def refusal(reader: AdapterReader, path: Path) -> str:
    with pytest.raises(InvalidRequest) as caught:
        reader.read(str(path))
    assert str(caught.value).startswith(str(path)), "the error does not name the file"
    return str(caught.value)


def test_a_good_adapter_is_read(reader: AdapterReader, tmp_path: Path) -> None:
    adapter = reader.read(str(write(tmp_path / "adapter", make_tensors())))
    assert (adapter.rank, adapter.num_targets) == (4, 1)
    a, b, _ = reader.memory.layers.split(adapter.values)[0]
    assert a[0, :4].eq(1).all() and not a[0, 4:].any()
    assert b[0, :32, :4].eq(2).all(), "alpha / r is not in B"
    assert not b[0, 32:].any()


WRONG_CONFIGS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"use_dora": True}, "merge_and_unload"),
    ({"kasa_config": {"beta": 0.1}}, "KaSA is not supported"),
    ({"monteclora_config": {"num_samples": 8}}, "MonteCLoRA is not supported"),
    ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
    ({"peft_type": "IA3"}, "only LORA"),
    ({"r": 0}, "positive number"),
    ({"r": 4, "lora_alpha": "x"}, "positive number"),
    ({"bias": "some"}, "none, all or lora_only"),
    ({"target_modules": "("}, "not a regular expression"),
    ({"target_modules": ["v_proj"]}, "belong to different adapters"),
    ({"r": 2}, "belong to different adapters"),
    ({"layers_to_transform": [1]}, "belong to different adapters"),
    ({"layers_to_transform": "all"}, "layers_to_transform must be a list"),
    ({"layers_to_transform": [[1]]}, "layers_to_transform must be a list"),
    ({"target_parameters": 5}, "target_parameters must be a list"),
    ({"r": 4.5}, "r must be a whole number"),
    ({"rank_pattern": {"q_proj": 0.5}}, "rank_pattern 'q_proj' must be a whole number"),
    ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern 'q_proj' must be a positive number"),
    ({"alpha_pattern": {"(" * 5000: 2}}, "longer than 2000 characters"),
    ({"rank_pattern": {"(?i)q_proj": 4}}, "write flags as (?i:...)"),
    ({"rank_pattern": {"a)|(b": 4}}, "rank_pattern: 'a)|(b' is not a regular expression"),
    ({"rank_pattern": {f"m{n}": 4 for n in range(2001)}}, "more than 2000 patterns"),
    ({"rank_pattern": {f"{n:0>1999}": 4 for n in range(101)}}, "200000 characters"),
    ({"target_parameters": ["m.p"] * 2001}, "more than 2000 names"),
    ({"target_modules": "(" * 900 + ")" * 900}, "not a regular expression: maximum recursion"),
    # Python's own matching would take longer than the age of the universe.
    ({"target_modules": "(.*)*" * 9 + "x"}, "takes too long to match"),
    ({"rank_pattern": {"(a|a)*(.*)*(.*)*(.*)*b": 4}}, "takes too long to match"),
    ({"padding": "x" * (17 << 20)}, "larger than 16 MiB"),
)


@pytest.mark.parametrize("values, reason", WRONG_CONFIGS)
def test_a_wrong_configuration_is_refused(
    values: dict[str, Any], reason: str, reader: AdapterReader, tmp_path: Path
) -> None:
    assert reason in refusal(reader, write(tmp_path / "adapter", make_tensors(), **values))


WRONG_TENSORS: tuple[tuple[dict[str, torch.Tensor], dict[str, Any], str], ...] = (
    (make_tensors(16), {"r": 16}, "--max-lora-rank 16"),
    (make_tensors(inputs=48), {}, "load it into a server of its base model"),
    (make_tensors(outputs=40), {"base_model_name_or_path": "other/model"}, "other/model"),
    ({f"{Q_PROJ}.lora_A.weight": torch.ones(4, 32)}, {}, "no lora_B"),
    (make_tensors() | {f"{Q_PROJ}.lora_magnitude_vector": torch.ones(32)}, {}, "DoRA"),
    (make_tensors() | {f"{LAYER}input_layernorm.weight": torch.ones(32)}, {}, "modules_to_save"),
    (make_tensors() | {f"{Q_PROJ}.bias": torch.ones(32)}, {}, "base model has none"),
    (  # other tensors of the module come before its matrices in the file
        make_tensors() | {f"{Q_PROJ}.base_layer.weight": torch.ones(32, 32)},
        {"target_modules": ["v_proj"]},
        "belong to different adapters",
    ),
    (make_tensors() | {"optimizer.state": torch.ones(3)}, {}, "save the adapter again"),
    (
        make_tensors() | {"base_model.model.model.embed_tokens.weight": torch.ones(105, 32)},
        {},
        "has added tokens",
    ),
    (
        {name.replace("layers.0", "layers.7"): value for name, value in make_tensors().items()},
        {},
        "which this model does not have",
    ),
    (
        {name.replace("q_proj", "w_proj"): value for name, value in make_tensors().items()},
        {"target_modules": ["w_proj"]},
        "which this model does not have",
    ),
    (
        make_tensors() | {f"{Q_PROJ}.lora_A.weight": torch.full((4, 32), float("nan"))},
        {},
        "not finite",
    ),
    ({"x.weight": torch.ones(2)}, {}, "replaces x"),
    (
        make_tensors() | {f"{Q_PROJ}.lora_B.weight": torch.eye(32, 4) * 5e37},
        {"lora_alpha": 40},
        "too large for float32",
    ),
    (make_tensors(inputs=0), {}, "has shape [4, 0]"),
)


@pytest.mark.parametrize("tensors, values, reason", WRONG_TENSORS)
def test_wrong_tensors_are_refused(
    tensors: dict[str, torch.Tensor],
    values: dict[str, Any],
    reason: str,
    reader: AdapterReader,
    tmp_path: Path,
) -> None:
    assert reason in refusal(reader, write(tmp_path / "adapter", tensors, **values))


def test_a_tied_head_is_changed_with_the_embedding(reader: AdapterReader, tmp_path: Path) -> None:
    """PEFT does not name the head in target_modules then."""
    head = "base_model.model.lm_head"
    tensors = make_tensors() | {
        f"{head}.lora_A.weight": torch.ones(4, 32),
        f"{head}.lora_B.weight": torch.ones(VOCAB, 4),
    }
    path = write(tmp_path / "tied", tensors, ensure_weight_tying=True)
    assert reader.read(str(path)).num_targets == 2
    assert "does not target" in refusal(reader, write(tmp_path / "other", tensors))


def test_an_expression_stands_for_modules_as_in_peft(reader: AdapterReader, tmp_path: Path) -> None:
    """Of rank and alpha patterns the end of a path counts, of target_modules the whole path."""
    patterns = {"alpha_pattern": {r"layers\.[1-9]\..*": 80, r"(q|k)_proj": 16, "q_proj": 4}}
    folder = write(
        tmp_path / "adapter",
        make_tensors(),
        target_modules=r".*\.self_attn\.(q|v)_proj",
        **patterns,
    )
    _, b, _ = reader.memory.layers.split(reader.read(str(folder)).values)[0]
    assert b[0, :32, :4].eq(16 / 4).all()


def test_links_out_of_an_allowed_folder_are_refused_at_every_read(
    reader: AdapterReader, tmp_path: Path
) -> None:
    outside = write(tmp_path / "outside", make_tensors())
    (tmp_path / "allowed").mkdir()
    folder = write(tmp_path / "allowed" / "adapter", make_tensors())
    allowed_folders = [str(tmp_path / "allowed")]
    reader.read(str(folder), allowed_folders)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).rename(folder / "kept")
        (folder / name).symlink_to(outside / name)
        with pytest.raises(InvalidRequest, match="a link there leads out"):
            reader.read(str(folder), allowed_folders)
        reader.read(str(folder))  # in no allowed folder: the operator has named it
        (folder / name).unlink()
        (folder / name).symlink_to(folder / "kept")  # inside
        reader.read(str(folder), allowed_folders)
        (folder / "kept").rename(folder / name)
    folder.rename(tmp_path / "allowed" / "moved")
    folder.symlink_to(outside)
    with pytest.raises(InvalidRequest, match="a link there leads out"):
        reader.read(str(folder), allowed_folders)


def test_other_files_are_refused(reader: AdapterReader, tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", make_tensors())
    weights = folder / "adapter_model.safetensors"
    weights.rename(folder / "adapter_model.bin")
    assert "pickle" in refusal(reader, folder)
    assert "pickle" in refusal(reader, folder / "adapter_model.bin")
    (folder / "adapter_model.bin").rename(weights)
    weights.write_bytes(weights.read_bytes()[:-8])
    assert "download" in refusal(reader, folder)
    (folder / "adapter_config.json").unlink()
    assert "adapter_config.json" in refusal(reader, folder)
    assert "check the path" in refusal(reader, tmp_path / "missing")
    gguf_file = tmp_path / "adapter.gguf"
    gguf_file.write_bytes(b"GGUF")
    assert "base model that is a GGUF file" in refusal(reader, gguf_file)
