"""Checkpoints whose experts are stacked, separate or transposed, unlike the published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity.cases import CASES, VOCAB, make_checkpoint, reference_logits
from tests.parity.serve import prompt_logits

CASES_BY_NAME = {case.name: case for case in CASES}


def check_logits(folder: Path, model: Any) -> None:
    tokens = torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = reference_logits(model, torch.tensor([tokens]), 24)
    actual = prompt_logits(folder, tokens, 128)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    "name", ["glm4_moe", "afmoe", "olmoe", "qwen3_moe", "lfm2_moe", "qwen3_5_moe"]
)
def test_experts_saved_as_transformers_holds_them(name: str, tmp_path: Path) -> None:
    model = make_checkpoint(CASES_BY_NAME[name], tmp_path)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert any(key.endswith("experts.gate_up_proj") for key in load_file_names(tmp_path))
    check_logits(tmp_path, model)


def load_file_names(folder: Path) -> list[str]:
    return list(load_file(folder / "model.safetensors"))


def separate_experts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a tensor [out, in] for each expert of a stacked [expert, in, out] one."""
    prefix, _, kind = name.rpartition(".")
    separated = {}
    for expert, matrix in enumerate(tensor.transpose(1, 2)):
        parts = zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
        if kind == "down_proj":
            parts = iter([(kind, matrix)])
        for part, rows in parts:
            separated[f"{prefix}.{expert}.{part}.weight"] = rows.contiguous()
    return separated


def test_separate_experts_of_a_family_that_stacks_them(tmp_path: Path) -> None:
    model = make_checkpoint(CASES_BY_NAME["llama4_text-mixed"], tmp_path)
    file = tmp_path / "model.safetensors"
    rewritten = {}
    for name, tensor in load_file(file).items():
        is_stacked = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        rewritten |= separate_experts(name, tensor) if is_stacked else {name: tensor}
    assert any("experts.3.up_proj" in name for name in rewritten)
    save_file(rewritten, file, {"format": "pt"})
    check_logits(tmp_path, model)
