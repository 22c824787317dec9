"""Checkpoints with layers for multi-token prediction: they are neither read nor reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bloomery.artifacts.locate import locate_model
from bloomery.models.load import load_model
from tests.parity.cases import CASES, make_checkpoint

# A prefix as the published files of the family have it.
PREFIXES = {
    "glm4_moe": "model.layers.3.",
    "hy_v3": "model.layers.3.",
    "ernie4_5_moe": "model.mtp_block.0.",
    "mellum": "mtp.",
    "qwen3_5_text": "mtp.layers.0.",
    "nemotron_h": "mtp.layers.0.",
}


@pytest.mark.parametrize("name", PREFIXES)
def test_mtp_layers_are_left_out(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    make_checkpoint(case, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    added = {f"{PREFIXES[name]}{part}.weight": torch.ones(8) for part in ("eh_proj", "mlp.gate")}
    save_file(tensors | added, file, {"format": "pt"})
    read = {}

    def report(title: str, num_read: int, num_total: int) -> None:
        read["bytes"] = (num_read, num_total)

    loaded = load_model(
        locate_model(str(tmp_path)), "auto", torch.float32, torch.device("cpu"), report=report
    )
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert read["bytes"] == (num_bytes, num_bytes)
    assert not any("not part of the model" in note for note in loaded.notes)
