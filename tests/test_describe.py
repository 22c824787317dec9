"""Describing a model without torch: dtype, context and the engine plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bloomery.artifacts.locate import ModelArtifact, locate_model
from bloomery.config import EngineConfig, resolve_device
from bloomery.describe import build_engine_plan, checkpoint_dtype, describe_model
from bloomery.errors import CheckpointError, UnsupportedModel
from bloomery.families import describe_config
from tests.families.hub_configs import CONFIGS


def write_checkpoint(path: Path, **config: object) -> ModelArtifact:
    (path / "config.json").write_text(json.dumps(config))
    tensors = {
        "a": torch.zeros(100).half(),
        "b": torch.zeros(10),
        "c": torch.zeros(1000, dtype=torch.int32),
    }
    save_file(tensors, path / "model.safetensors")
    return ModelArtifact("x", "folder", path, "local folder")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "torch.float32"}, "float32"),
        ({"torch_dtype": None}, "float16"),
        ({"torch_dtype": "auto"}, "float16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
    ],
)
def test_dtype_is_read_from_the_files(tmp_path: Path, config: dict, expected: str) -> None:
    assert checkpoint_dtype(write_checkpoint(tmp_path, **config)) == expected


def test_infinity_is_read_as_published_files_have_it(tmp_path: Path) -> None:
    config = CONFIGS["Nemotron-3-Nano-30B-A3B"]
    artifact = write_checkpoint(tmp_path, **config)
    assert "[0.0, Infinity]" in (tmp_path / "config.json").read_text()
    assert describe_model(artifact).model == describe_config(config).model
    artifact = write_checkpoint(tmp_path, **config | {"routed_scaling_factor": float("inf")})
    with pytest.raises(UnsupportedModel, match="routed_scaling_factor must be a number"):
        describe_model(artifact)
    artifact = write_checkpoint(tmp_path, **config | {"time_step_limit": [0.0, float("nan")]})
    with pytest.raises(CheckpointError, match="NaN is not JSON"):
        describe_model(artifact)


def test_unknown_dtype_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="float31"):
        checkpoint_dtype(write_checkpoint(tmp_path, torch_dtype="float31"))


def test_embedded_model_is_planned_without_torch() -> None:
    code = (
        "import sys\nfrom bloomery.config import EngineConfig\n"
        "from bloomery.describe import build_engine_plan\n"
        "plan, artifact = build_engine_plan(EngineConfig(device='cpu'))\n"
        "assert 'torch' not in sys.modules\nprint(plan.max_model_len)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert process.stdout.strip() == "8192", process.stderr


def test_plan_of_the_embedded_model() -> None:
    plan, artifact = build_engine_plan(EngineConfig(device="cpu"))
    assert (plan.kind, plan.dtype, plan.device) == ("gguf", "float32", "cpu")
    model = describe_model(locate_model(None)).model
    assert (model.vocab, model.hidden, len(model.layers)) == (49152, 576, 30)
    assert artifact.path.suffix == ".gguf"


def test_named_device_is_used() -> None:
    assert resolve_device("cuda:3") == "cuda:3"
    assert resolve_device("auto") in ("cpu", "cuda")
