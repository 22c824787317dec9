"""Finding adapters: folders, GGUF files and Hub ids; nothing outside of what is allowed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bloomery.artifacts.locate_adapter import AdapterAllowList, locate_adapter
from bloomery.errors import ConfigError, ModelNotFound
from tests.artifacts.fake_hub import FakeHub, serve_hub

COMMIT = "c" * 40
SCRIPT = """
import sys
from bloomery.artifacts.locate_adapter import locate_adapter
from bloomery.errors import ModelNotFound
for source in sys.argv[1:]:
    try:
        print(sorted(path.name for path in locate_adapter(source).iterdir()))
    except ModelNotFound as error:
        print(error)
"""


def write_adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_folders_and_gguf_files_are_adapters(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    assert locate_adapter(str(folder)) == folder
    file = tmp_path / "b.gguf"
    file.write_bytes(b"GGUF")
    assert locate_adapter(str(file)) == file


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "no adapter_config.json"),
        ("weights.bin", "not a .gguf"),
        ("missing", "no such folder or file"),
    ],
)
def test_anything_else_is_refused_with_what_is_missing(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=message):
        locate_adapter(str(tmp_path / name))


def test_adapters_come_from_the_hub_without_pickled_files(tmp_path: Path) -> None:
    names = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "README.md")
    files = dict.fromkeys(names, b"{}")
    with serve_hub(FakeHub({COMMIT: files}, {"main": COMMIT}, "org/poet")) as hub:
        settings = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "NO_PROXY": "127.0.0.1"}
        sources = ("org/poet", "org/poet@main", "org/nothing")
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *sources],
            env={**os.environ, **settings, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        first, second, error = done.stdout.splitlines()
    expected = ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads(first.replace("'", '"')) == expected
    assert first == second
    assert error.startswith("org/nothing: no such local folder, and the Hub did not deliver it")


def test_only_allowed_folders_and_repositories_have_adapters(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    inside = write_adapter(allowed / "team" / "sql")
    outside = write_adapter(tmp_path / "outside")
    (allowed / "link").symlink_to(outside)
    linked = write_adapter(allowed / "linked")
    (linked / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    (allowed / "loop").symlink_to(allowed / "loop")
    (allowed / "poet.gguf").write_bytes(b"GGUF")
    allow_list = AdapterAllowList([str(allowed), "org/*", "other/one"])
    assert allow_list.find_source("team/sql") == str(inside)
    assert allow_list.find_source("poet.gguf") == str(allowed / "poet.gguf")
    aliases = (str(inside), "./team/sql", "team//sql", "team/sql/", "team/../team/sql")
    for name in (
        "../outside",
        str(outside),
        "link",
        "linked",
        "loop",
        ".",
        "",
        "team",
        "nothing",
        *aliases,
    ):
        assert allow_list.find_source(name) is None, name
    assert allow_list.find_source("org/any") == "org/any"
    assert allow_list.find_source("other/one@v1") == "other/one@v1"
    assert allow_list.find_source("org/any:q4/poet.gguf") == "org/any:q4/poet.gguf"
    assert allow_list.find_source("other/two") is None
    assert allow_list.allows(str(inside)) and allow_list.allows("org/any")
    assert not allow_list.allows(str(outside)) and not allow_list.allows("other/two")
    assert not allow_list.allows(str(linked)) and not allow_list.allows(str(allowed / "loop"))
    assert allow_list.list_names() == ["poet.gguf"]
    assert not AdapterAllowList()
    with pytest.raises(ConfigError, match="there is no folder"):
        AdapterAllowList([str(tmp_path / "missing")])
    with pytest.raises(ConfigError, match="lora_allow: .* no such user"):
        AdapterAllowList(["~no-such-user/adapters"])


PULL_REQUESTS = ("refs/pr/3", "pr/3", "0123abc", "c" * 40)


@pytest.mark.parametrize("revision", PULL_REQUESTS)
@pytest.mark.parametrize("file", ["", ":poet.gguf"])
def test_pull_requests_are_not_adapters_of_the_organization(revision: str, file: str) -> None:
    name = f"org/any@{revision}{file}"
    allow_list = AdapterAllowList(["org/*"])
    for find in (allow_list.find_source, allow_list.allows):
        with pytest.raises(ModelNotFound, match=f"--lora-allow org/any@{revision}$"):
            find(name)
    assert not AdapterAllowList(["other/*"]).allows(name)
    for pattern in (f"org/any@{revision}", "org/*@*"):
        allow_list = AdapterAllowList([pattern])
        assert allow_list.find_source(name) == name and allow_list.allows(name)
        assert not allow_list.allows("org/any")
    assert not AdapterAllowList(["org/any@v1"]).allows(name)


@pytest.mark.parametrize("revision", ["main", "v1.0", "2024", "refs2", "deadbeef-v1"])
def test_branches_and_tags_are_adapters_of_the_organization(revision: str) -> None:
    name = f"org/any@{revision}"
    assert AdapterAllowList(["org/*"]).find_source(name) == name


@pytest.mark.parametrize(
    "end", [":/etc/poet.gguf", ":../poet.gguf", ":a/../../poet.gguf", "@../v1"]
)
def test_a_hub_id_does_not_lead_out_of_its_repository(end: str) -> None:
    assert AdapterAllowList(["org/*"]).find_source(f"org/any{end}") is None
    with pytest.raises(ModelNotFound, match="no such folder or file"):
        locate_adapter(f"org/any{end}")
