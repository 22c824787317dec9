"""Vision checkpoints served as text, in every layout of tensor names that is published."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bloomery.artifacts.locate import locate_model
from bloomery.cli import main
from bloomery.config import EngineConfig
from bloomery.describe import build_engine_plan
from bloomery.models.load import load_model
from bloomery.tools.plan.model_source import read_model_source
from tests.parity.cases import CASES, VOCAB, make_checkpoint, reference_logits
from tests.parity.serve import prompt_logits

# Prefixes of the text model, the head, and the vision part, as published checkpoints name them.
LAYOUTS = {
    "text-as-alone": ("model.", "lm_head.", ""),
    "nested": ("model.language_model.", "lm_head.", "model."),
    "llava": ("language_model.model.", "language_model.lm_head.", ""),
    "without-head-class": ("language_model.", "lm_head.", ""),
}
CASES_BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module", params=["mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, make_checkpoint(CASES_BY_NAME[request.param], folder)


def random_tokens() -> list[int]:
    return torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(0)).tolist()


def write_layout(source: Path, target: Path, prefixes: tuple[str, str, str]) -> None:
    """Write a checkpoint of transformers with other prefixes."""
    text, head, vision = prefixes
    renamed = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        bare = re.sub(r"^(language_model\.model|model\.language_model|model)\.", "", name)
        bare = bare.removeprefix("language_model.")
        if bare.startswith("lm_head."):
            renamed[head + bare.removeprefix("lm_head.")] = tensor
        elif bare.startswith(("visual.", "vision_tower.", "multi_modal_projector.")):
            renamed[vision + bare] = tensor
        else:
            renamed[text + bare] = tensor
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(renamed, target / "model.safetensors")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_the_same_in_every_layout(
    checkpoint: tuple[Path, Any], layout: str, tmp_path: Path
) -> None:
    folder, model = checkpoint
    write_layout(folder, tmp_path / layout, LAYOUTS[layout])
    tokens = random_tokens()
    expected = reference_logits(model, torch.tensor([tokens]), len(tokens))
    actual = prompt_logits(tmp_path / layout, tokens, 128)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts_are_read_in_both_orientations(transposed: bool, tmp_path: Path) -> None:
    """Published checkpoints have [expert, in, out], and transformers 5 saves [expert, out, in]."""
    model = make_checkpoint(CASES_BY_NAME["qwen3_vl_moe"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    num_experts = model.config.text_config.num_experts
    rows = 2 * model.config.text_config.moe_intermediate_size
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            assert tensor.shape[:2] == (num_experts, rows)
        if transposed and ".experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    tokens = random_tokens()
    expected = reference_logits(model, torch.tensor([tokens]), len(tokens))
    actual = prompt_logits(tmp_path, tokens, 128)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_vision_tensors_are_listed_and_not_read(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    vision = {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if re.search("visual|vision_tower|multi_modal_projector", name)
    }
    num_read = 0
    num_total = 0

    def report(title: str, read: int, total: int) -> None:
        nonlocal num_read, num_total
        num_read = read
        num_total = total

    loaded = load_model(
        locate_model(str(folder)), "auto", torch.float32, torch.device("cpu"), report=report
    )
    note = next(note for note in loaded.notes if note.startswith("text only"))
    assert f"{len(vision)} tensors" in note
    assert not any("not part of the model" in note for note in loaded.notes)
    stored = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert num_read == num_total == stored - sum(tensor.nbytes for tensor in vision.values())


def test_plan_says_text_only(
    checkpoint: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = checkpoint
    engine_plan, _ = build_engine_plan(EngineConfig(model=str(folder), device="cpu"))
    assert engine_plan.text_part_only
    assert main(["plan", str(folder), "--gpu", "h200"]) == 0
    report = capsys.readouterr().out
    assert "text only: the vision part of this model is neither loaded nor counted" in report
    assert read_model_source(str(folder)).text_part_only
    assert read_model_source(str(folder / "config.json")).text_part_only
    assert not read_model_source(None).text_part_only
