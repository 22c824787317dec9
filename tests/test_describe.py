"""What a model is before a weight is read: precision, context, device, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bloomery.artifacts.locate import Artifact, locate
from bloomery.config import Config, device
from bloomery.describe import description, native_dtype, plan_for
from bloomery.errors import UnsupportedModel


def folder(path: Path, **config: object) -> Artifact:
    (path / "config.json").write_text(json.dumps(config))
    halves = {
        "a": torch.zeros(100).half(),
        "b": torch.zeros(10),
        "c": torch.zeros(1000, dtype=torch.int32),
    }
    save_file(halves, path / "model.safetensors")
    return Artifact("x", "folder", path, "local folder")


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "torch.float32"}, "float32"),
        ({"torch_dtype": None}, "float16"),
        ({"torch_dtype": "auto"}, "float16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
    ],
)
def test_precision_is_what_the_files_say(tmp_path: Path, config: dict, want: str) -> None:
    assert native_dtype(folder(tmp_path, **config)) == want


def test_an_unknown_precision_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="float31"):
        native_dtype(folder(tmp_path, torch_dtype="float31"))


def test_the_embedded_model_is_described_without_torch() -> None:
    code = (
        "import sys\nfrom bloomery.config import Config\nfrom bloomery.describe import plan_for\n"
        "plan, artifact = plan_for(Config(device='cpu'))\nassert 'torch' not in sys.modules\nprint(plan.max_length)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "8192", done.stderr


def test_plan_of_the_embedded_model() -> None:
    plan, artifact = plan_for(Config(device="cpu"))
    assert (plan.kind, plan.dtype, plan.device) == ("gguf", "float32", "cpu")
    model = description(locate(None)).model
    assert (model.vocab, model.hidden, len(model.layers)) == (49152, 576, 30)
    assert artifact.path.suffix == ".gguf"


def test_a_device_named_is_a_device_taken() -> None:
    assert device("cuda:3") == "cuda:3"
    assert device("auto") in ("cpu", "cuda")
